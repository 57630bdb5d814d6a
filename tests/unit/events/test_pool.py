"""The pool of driver events: R4, S13."""

from __future__ import annotations

import threading

import pytest

from allocator import DriverError, SimDevice
from allocator.events import EventPool


@pytest.fixture
def gpu() -> SimDevice:
    return SimDevice(memory=1 << 24)


def test_r4_an_event_that_was_given_back_is_used_again(gpu: SimDevice) -> None:
    pool = EventPool(gpu)
    with gpu.scope():
        first = pool.take()
        second = pool.take()
        assert first != second and (pool.created, pool.idle, pool.in_use) == (2, 0, 2)
        pool.give_back(first)
        assert (pool.idle, pool.in_use) == (1, 1)
        assert pool.take() == first
    assert gpu.calls["cuEventCreate"] == 2


def test_an_event_of_unknown_state_is_destroyed(gpu: SimDevice) -> None:
    pool = EventPool(gpu)
    with gpu.scope():
        pool.discard(pool.take())
    assert (pool.created, pool.idle, gpu.calls["cuEventDestroy"]) == (0, 0, 1)


def test_a_create_that_fails_changes_nothing(gpu: SimDevice) -> None:
    pool = EventPool(gpu)
    gpu.fail("cuEventCreate")
    with gpu.scope():
        with pytest.raises(DriverError):
            pool.take()
        assert (pool.created, pool.in_use) == (0, 0)
        pool.take()
    assert pool.created == 1


def test_clear_destroys_the_spare_ones_only(gpu: SimDevice) -> None:
    pool = EventPool(gpu)
    with gpu.scope():
        kept, spare = pool.take(), pool.take()
        pool.give_back(spare)
        pool.clear()
        assert (pool.created, pool.idle) == (1, 0)
        assert gpu.event_query(kept)


def test_threads_never_get_the_same_event(gpu: SimDevice) -> None:
    pool = EventPool(gpu)
    taken: list[int] = []

    def body() -> None:
        with gpu.scope():
            taken.extend(pool.take() for _ in range(50))

    threads = [threading.Thread(target=body) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(taken)) == 200 == pool.created

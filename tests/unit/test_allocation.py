"""`Allocation`: given back once, whoever lets it go, in whatever order."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest

from allocator import Allocation, CachingAllocator, Config, SimDevice, Stream


@pytest.fixture
def pool() -> CachingAllocator:
    return CachingAllocator(SimDevice(memory=1 << 26), config=Config())


def test_with_closes_it_also_after_an_error(pool: CachingAllocator) -> None:
    with pytest.raises(ZeroDivisionError), pool.allocate(512) as a:
        raise ZeroDivisionError
    assert a.closed and pool.stats().allocated_bytes == 0


def test_the_free_is_one_append_and_no_more(pool: CachingAllocator) -> None:
    a = pool.allocate(512)
    calls = dict(pool.device.calls)
    a.close()
    assert len(pool.frees) == 1 and dict(pool.device.calls) == calls
    a.close()
    del a
    assert len(pool.frees) == 1


def test_losing_it_is_the_same_free(pool: CachingAllocator) -> None:
    a = pool.allocate(512)
    del a
    assert len(pool.frees) == 1
    assert pool.stats().frees["same_stream"] == 1


def test_closing_and_losing_it_frees_once(pool: CachingAllocator) -> None:
    a = pool.allocate(512)
    a.close()
    a.__del__()
    del a
    assert pool.stats().frees["same_stream"] == 1


def test_a_late_close_does_not_free_the_next_holder(pool: CachingAllocator) -> None:
    s = Stream(pool.device)
    first = pool.allocate(512, stream=s)
    block = first._block
    generation = first._generation
    first.close()
    second = pool.allocate(512, stream=s)
    assert second.ptr == first.ptr
    pool.frees.append((block, generation, None))  # as a second thread's close, a moment too late
    first.close()
    assert pool.stats().blocks["live"] == 1
    assert not second.closed
    pool.check()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_cycles_are_freed_whatever_the_order_of_their_parts(pool: CachingAllocator, order: tuple[int, ...]) -> None:
    class Holder:
        other: Any = None
        memory: Allocation | None = None

    def make() -> None:
        parts: list[Any] = [None] * 3
        for i in order:
            parts[i] = Holder() if i else pool.allocate(1000)
        parts[1].other, parts[2].other = parts[2], parts[1]
        parts[1].memory = parts[0]

    for _ in range(20):
        make()
    gc.collect()
    stats = pool.stats()
    assert stats.blocks["live"] == 0 and sum(stats.frees.values()) == 20


def test_an_allocation_that_was_never_finished_is_harmless() -> None:
    """As after an error in the constructor."""
    a = Allocation.__new__(Allocation)
    a._generation = -1
    del a


def test_no_attribute_can_be_invented(pool: CachingAllocator) -> None:
    with pytest.raises(AttributeError):
        pool.allocate(512).size_bytes = 3  # type: ignore[attr-defined]

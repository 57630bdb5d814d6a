"""Memory in a dead cycle: others in it may use it until the collection is over, or bring it back to life."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from allocator import CachingAllocator, SimDevice, Stream
from allocator.collector import RUNNING

SIZE = 4096
SIGNALLED = """
import _thread, gc, operator, signal
from allocator.collector import RUNNING

signal.signal(signal.SIGINT, signal.default_int_handler)
gc.collect()
try:
    # In C all of it: the signal has come, and nobody has seen it when the collection begins.
    list(map(operator.call, (_thread.interrupt_main, gc.collect)))
    print("lost")
except KeyboardInterrupt:
    print(f"heard, {len(RUNNING)} running")
"""
ORDERS = list(itertools.permutations(("memory", "user", "other")))


@pytest.fixture
def gpu() -> SimDevice:
    return SimDevice()


@pytest.fixture
def pool(gpu: SimDevice) -> Iterator[CachingAllocator]:
    with CachingAllocator(gpu) as pool:
        yield pool


@pytest.fixture(params=["allocation", "CuPy's array", "CuPy's array, nobody watches"])
def make(request: pytest.FixtureRequest, gpu: SimDevice, pool: CachingAllocator) -> Iterator[Callable[[], Any]]:
    """Makes memory of SIZE bytes, on one stream."""
    stream = Stream(gpu)
    if request.param == "allocation":
        yield lambda: pool.allocate(SIZE, stream=stream)
        return
    cupy = pytest.importorskip("cupy")
    import allocator.cupy

    if request.param.endswith("watches"):
        pool.announce = None
    allocator.cupy.install(pool, current_stream=lambda: stream)
    yield lambda: cupy.ndarray((SIZE,), dtype="b")
    allocator.cupy.uninstall()


def where(held: Any) -> int:
    return int(held.ptr if hasattr(held, "ptr") else held.data.ptr)


def cycle(make: Callable[[], Any], order: tuple[str, ...], finalise: Callable[[Any], None]) -> int:
    """Leave a dead cycle of memory, an object that uses it in its finaliser, and another; returns the address."""

    class User:
        def __del__(self) -> None:
            finalise(self)

    class Other:
        pass

    made: dict[str, Any] = {}
    for what in order:
        made[what] = {"memory": make, "user": User, "other": Other}[what]()
    user, other = made["user"], made["other"]
    user.memory, user.other, other.user = made["memory"], other, user
    return where(user.memory)


@pytest.mark.parametrize("order", ORDERS, ids=["-".join(order) for order in ORDERS])
def test_a_finaliser_that_still_uses_memory_gets_no_part_of_it(
    pool: CachingAllocator, make: Callable[[], Any], order: tuple[str, ...]
) -> None:
    """As in `self.sum = self.array + 1`: what is allocated there must lie elsewhere."""
    del [make()][0]  # a bin and a page are there
    got: list[int] = []

    def finalise(user: Any) -> None:
        user.more = [make() for _ in range(3)]
        got.extend(where(one) for one in user.more)

    gc.collect()
    gc.disable()
    try:
        address = cycle(make, order, finalise)
        gc.collect()
        assert len(got) == 3 and address not in got
        assert not RUNNING
        gc.collect()  # what the finaliser allocated is in the cycle, too
        assert pool.allocated_bytes == 0
    finally:
        gc.enable()
    pool.check()


@pytest.mark.parametrize("order", ORDERS, ids=["-".join(order) for order in ORDERS])
def test_memory_that_a_finaliser_brings_back_to_life_stays_whose_it_is(
    pool: CachingAllocator, make: Callable[[], Any], order: tuple[str, ...]
) -> None:
    saved: list[Any] = []
    gc.collect()
    gc.disable()
    try:
        address = cycle(make, order, saved.append)
        gc.collect()
        assert where(saved[0].memory) == address and pool.allocated_bytes == SIZE
        others = [make() for _ in range(5)]
        assert address not in map(where, others)
        gc.collect()
        assert pool.allocated_bytes == 6 * SIZE
        saved.clear()  # its finaliser has run; now it dies without one
        gc.collect()
        assert pool.allocated_bytes == 5 * SIZE
        del others
        assert pool.allocated_bytes == 0
    finally:
        gc.enable()
    pool.check()


def test_what_was_brought_back_to_life_can_be_closed(pool: CachingAllocator, gpu: SimDevice) -> None:
    saved: list[Any] = []
    stream = Stream(gpu)
    address = cycle(lambda: pool.allocate(SIZE, stream=stream), ORDERS[0], saved.append)
    gc.collect()
    memory = saved[0].memory
    assert memory.ptr == address and not memory.closed
    memory.close()
    assert memory.closed and pool.allocated_bytes == 0
    assert pool.stats().pending_frees == 0
    pool.check()


def test_the_collector_says_when_it_runs() -> None:
    seen: list[bool] = []

    class Watcher:
        def __del__(self) -> None:
            seen.append(bool(RUNNING))

    watcher: Any = Watcher()
    del watcher
    watcher = Watcher()
    watcher.me = watcher
    del watcher
    gc.collect()
    assert seen == [False, True] and not RUNNING


def test_s16_what_kept_a_stream_alive_is_let_go_outside_the_lock(pool: CachingAllocator, gpu: SimDevice) -> None:
    """A foreign object's destructor is foreign code, and may come back to us (R9)."""
    inside: list[bool] = []

    class Foreign:
        def __del__(self) -> None:
            inside.append(pool._lock.held_here())  # type: ignore[attr-defined]  # an owned lock says so

    class Dropper:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            held.clear()

    held = [pool.allocate(SIZE, stream=Stream(gpu))]
    held[0].kept = Foreign()  # alive until the allocation has gone: no part of what the collector finds dead
    Dropper()
    gc.collect()
    assert not held and not inside
    for nbytes in (512, 1024, 2048):
        pool.allocate(nbytes)
    assert inside == [False]
    pool.check()


def test_s16_ctrl_c_is_not_lost_where_the_collector_tells_its_phases() -> None:
    """Python drops what is raised in such a callback, so nothing there may be the first to see a signal.

    In a process of its own: in this one anything may be garbage, and its finaliser the first to see it.
    """
    done = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("heard, 0 running\n", "")

"""Where a freed block lies, who may take it, and what merges.  R6, R7, S01."""

from __future__ import annotations

import pytest

from allocator import CachingAllocator, SimDevice, Stream
from allocator.blocks import LARGE, Block
from tests.unit.caching.conftest import MIB, MakePool


def _block(pool: CachingAllocator, ptr: int) -> Block:
    pool.snapshot()  # bins emptied
    return next(b for b in pool._heap.blocks() if b.ptr <= ptr < b.end)


def _freed(gpu: SimDevice, pool: CachingAllocator, owner: Stream, *users: Stream, size: int = 2 * MIB) -> Block:
    a = pool.allocate(size, stream=owner)
    gpu.launch(owner, writes=[a])
    for user in users:
        user.wait_stream(owner)
        gpu.launch(user, reads=[a])
        a.record_stream(user)
    a.close()
    return _block(pool, a.ptr)


def test_what_only_its_owner_still_uses_lies_on_the_owners_shelf(gpu: SimDevice, pool: CachingAllocator) -> None:
    a = Stream(gpu)
    block = _freed(gpu, pool, a)
    assert block.shelf is pool._shelves.own[LARGE][a.line.number]


def test_what_several_use_lies_on_the_shared_shelf_until_all_have_finished(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    a, b = Stream(gpu), Stream(gpu)
    gpu.hold(b)
    block = _freed(gpu, pool, a, b)
    shelves = pool._shelves
    assert block.shelf is shelves.shared[LARGE]
    gpu.run_until_idle()
    a.synchronize()
    pool.stats()
    assert block.shelf is not shelves.idle[LARGE]
    assert shelves.takeable(block, b.line, False) and not shelves.takeable(block, a.line, False)  # B alone uses it now
    gpu.resume(b)
    gpu.run_until_idle()
    b.synchronize()
    pool.stats()
    assert block.shelf is shelves.idle[LARGE]


def test_r7_a_finished_block_is_not_tied_to_a_busy_neighbour(gpu: SimDevice, pool: CachingAllocator) -> None:
    a, b = Stream(gpu), Stream(gpu)
    x, y = pool.allocate(2 * MIB, stream=a), pool.allocate(2 * MIB, stream=b)
    assert x.ptr + x.size == y.ptr
    gpu.hold(b)
    gpu.launch(b, writes=[y])
    x.close()
    y.close()
    pool.stats()
    left, right = _block(pool, x.ptr), _block(pool, y.ptr)
    assert left is not right and left.shelf is pool._shelves.idle[LARGE]
    gpu.resume(b)
    gpu.run_until_idle()
    pool.stats()
    assert _block(pool, x.ptr) is _block(pool, y.ptr)


def test_r7_neighbours_in_flight_merge_if_their_stamps_are_equal(gpu: SimDevice, pool: CachingAllocator) -> None:
    a = Stream(gpu)
    gpu.hold(a)
    live = [pool.allocate(2 * MIB, stream=a) for _ in range(3)]
    gpu.launch(a, writes=live)
    places = [x.ptr for x in live]
    for x in live:
        x.close()
    assert len({id(_block(pool, ptr)) for ptr in places}) == 1
    gpu.resume(a)


@pytest.mark.parametrize("uses", ["auto", "declared", "assumed"])
def test_r6_legacy_reaches_nothing_through_its_order_with_blocking_streams(
    gpu: SimDevice, make: MakePool, uses: str
) -> None:
    """Its work is behind theirs, but an allocation is no work."""
    pool = make(uses=uses)
    blocking = Stream(gpu, non_blocking=False)
    gpu.hold(blocking)
    x = pool.allocate(2 * MIB, stream=blocking)
    gpu.launch(blocking, writes=[x])
    x.close()
    assert pool.allocate(2 * MIB, stream=0).ptr != x.ptr
    gpu.resume(blocking)


def test_r6_a_blocking_stream_reaches_nothing_through_legacy(gpu: SimDevice, make: MakePool) -> None:
    """Its work is behind legacy's, but a host wait for it, once idle, is not."""
    pool = make(uses="declared")
    holder, blocking = Stream(gpu, non_blocking=False), Stream(gpu, non_blocking=False)
    gpu.hold(holder)
    x = pool.allocate(2 * MIB, stream=0)
    gpu.launch(0, writes=[x])
    x.close()
    assert pool.allocate(2 * MIB, stream=blocking).ptr != x.ptr
    gpu.resume(holder)


def test_r6_a_non_blocking_stream_reaches_nothing_through_legacy(gpu: SimDevice, make: MakePool) -> None:
    pool = make(uses="declared")
    holder = Stream(gpu, non_blocking=False)
    gpu.hold(holder)
    x = pool.allocate(2 * MIB, stream=0)
    gpu.launch(0, writes=[x])
    x.close()
    other = Stream(gpu)
    y = pool.allocate(2 * MIB, stream=other)
    assert y.ptr != x.ptr
    gpu.launch(other, writes=[y])
    gpu.resume(holder)


def test_r6_under_auto_uses_a_blocking_stream_reaches_nothing_either(gpu: SimDevice, make: MakePool) -> None:
    pool = make()
    holder, blocking = Stream(gpu, non_blocking=False), Stream(gpu, non_blocking=False)
    gpu.hold(holder)
    x = pool.allocate(2 * MIB, stream=0)
    gpu.launch(0, writes=[x])
    x.close()
    assert pool.allocate(2 * MIB, stream=blocking).ptr != x.ptr
    gpu.resume(holder)


def test_neighbours_that_one_stream_may_all_have_are_gathered_before_the_pool_grows(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    a, b = Stream(gpu), Stream(gpu)
    gpu.hold(a)
    x, y = pool.allocate(2 * MIB, stream=b), pool.allocate(2 * MIB, stream=a)
    gpu.launch(a, writes=[y])
    x.close()  # finished
    y.close()  # A's own, in flight
    pool.stats()
    z = pool.allocate(4 * MIB, stream=a)
    assert (z.ptr, pool.stats().growths) == (x.ptr, 2)
    gpu.launch(a, writes=[z])
    gpu.resume(a)

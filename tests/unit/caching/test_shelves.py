"""Where a freed block lies, who may take it, and what merges.  R6, R7, S01."""

from __future__ import annotations

import pytest

from allocator import CachingAllocator, SimDevice, Stream
from allocator.blocks import LARGE, Block
from allocator.blocks.block import MOST_MET
from allocator.caching.shelves import FEW_BINS, MANY_SIZES
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


def test_a_stream_of_many_sizes_gets_a_bin_where_it_asks_twice(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    for n in range(1, 4 * MANY_SIZES):
        pool.allocate(512 * n, stream=s).close()
    by_size = pool._shelves.bins[False][s.line].by_size
    assert len(by_size) == MANY_SIZES, "few sizes have theirs at once, the others none"
    pool.allocate(512 * (2 * MANY_SIZES), stream=s).close()
    assert len(by_size) == MANY_SIZES + 1
    pool.check()
    for n in range(4 * MANY_SIZES, 4 * MANY_SIZES + 2 * MOST_MET):
        pool.allocate(512 * n, stream=s).close()
    assert len(by_size) == MANY_SIZES + 1 and len(pool._shelves.bins[False][s.line]._met) <= MOST_MET
    pool.check()


# -- bins that nobody uses ------------------------------------------------------------------------


def _many_sizes(pool: CachingAllocator, stream: Stream, first: int, count: int) -> None:
    for n in range(first, first + count):
        for _ in range(2):  # a stream of many sizes gets no bin for one that it asks for once
            pool.allocate(512 * n, stream=stream).close()


def test_an_empty_bin_goes_when_it_was_not_used_while_others_came(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    _many_sizes(pool, s, 1, FEW_BINS)
    by_size = pool._shelves.bins[False][s.line].by_size
    pool.check()
    assert len(by_size) == FEW_BINS
    _many_sizes(pool, s, FEW_BINS + 1, 4 * FEW_BINS)
    pool.check()
    assert 512 not in by_size and len(by_size) <= 2 * FEW_BINS
    pool.allocate(512, stream=s).close()
    assert 512 not in by_size, "it may never be asked for again"
    pool.allocate(512, stream=s).close()
    assert 512 in by_size


def test_r7_a_block_whose_bin_has_gone_comes_back_to_the_bin_that_is_there(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    s = Stream(gpu)
    one, two, three = (pool.allocate(512, stream=s) for _ in range(3))
    _many_sizes(pool, s, 2, 4 * FEW_BINS)
    by_size = pool._shelves.bins[False][s.line].by_size
    assert 512 not in by_size
    one.close()
    pool.check()
    bin_ = by_size[512]
    assert [block.ptr for block in bin_.blocks] == [one.ptr]
    two.close()
    three.close(s)  # one that names its stream passes the bins by
    pool.check()
    assert [block.ptr for block in bin_.blocks] == [one.ptr, two.ptr]
    again = pool.allocate(512, stream=s)
    assert again.ptr == two.ptr and pool.stats().allocated_bytes == 512
    again.close()
    pool.allocate(512, stream=s).close()
    pool.check()


def test_a_bin_with_blocks_in_it_stays(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    _many_sizes(pool, s, 1, FEW_BINS)
    held = [pool.allocate(512 * n, stream=s) for n in range(1, FEW_BINS)]
    for block in held:
        block.close()
    shelves = pool._shelves
    with pool._lock:
        pool._frees.drain()
    full = {bin_.size for bin_ in shelves.filled if bin_.blocks}
    assert len(full) == FEW_BINS - 1
    shelves._forget_unused()
    shelves._forget_unused()
    pool.check()
    assert full <= set(shelves.bins[False][s.line].by_size)


def test_what_bins_that_have_gone_served_still_counts(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    for _ in range(11):
        pool.allocate(1024, stream=s).close()
    before = pool.stats()
    _many_sizes(pool, s, 10, 6 * FEW_BINS)
    assert 1024 not in pool._shelves.bins[False][s.line].by_size
    after = pool.stats()
    assert sum(after.allocations.values()) == sum(before.allocations.values()) + 2 * 6 * FEW_BINS
    asked = 2 * sum(512 * n for n in range(10, 10 + 6 * FEW_BINS))
    assert sum(after.allocation_bytes.values()) == sum(before.allocation_bytes.values()) + asked
    assert after.request_size_bytes[2048] == before.request_size_bytes[2048] == 11


def test_what_merges_when_all_is_over_does_not_carry_every_streams_name(gpu: SimDevice, pool: CachingAllocator) -> None:
    """Or each of a thousand neighbours would cost what the thousand before it have left behind."""
    streams = [Stream(gpu) for _ in range(60)]
    held = [pool.allocate(4096, stream=stream) for stream in streams]
    for stream, block in zip(streams, held, strict=True):
        gpu.launch(stream, writes=[block])
    held.clear()
    gpu.run_until_idle()
    pool.trim(keep=1 << 40)  # asks, and gives nothing back
    pool.check()
    assert pool._heap.merges >= len(streams) // 2

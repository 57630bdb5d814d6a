"""Hits: what was freed last, and what lies in a bin."""

from __future__ import annotations

from allocator import CachingAllocator, SimDevice, Stream

SIZE = 4096


def test_r7_what_was_freed_last_goes_back_to_its_own_stream_at_once(gpu: SimDevice, pool: CachingAllocator) -> None:
    stream = Stream(gpu)
    a = pool.allocate(SIZE, stream=stream)
    ptr, block = a.ptr, a._block
    del a
    before = dict(gpu.calls)
    again = pool.allocate(SIZE - 100, stream=stream)
    assert (again.ptr, again._block) == (ptr, block) and not pool.frees
    assert dict(gpu.calls) == before
    stats = pool.stats()
    assert (stats.allocated_bytes, stats.requested_bytes) == (SIZE, SIZE - 100)
    assert stats.allocations["same_stream"] == 1 and stats.frees["same_stream"] == 1
    pool.check()


def test_a_free_queued_once_more_gives_no_second_owner(gpu: SimDevice, pool: CachingAllocator) -> None:
    """The second of two closes appends late, when the block has gone out again on its own stream."""
    stream = Stream(gpu)
    a = pool.allocate(SIZE, stream=stream)
    entry = (a._block, a._generation, None)
    a.close()
    again = pool.allocate(SIZE, stream=stream)
    assert again._block is entry[0]
    pool.frees.append(entry)
    other = pool.allocate(SIZE, stream=stream)
    assert other.ptr != again.ptr
    pool.check()


def test_r3_a_free_that_names_another_stream_is_not_taken_back(gpu: SimDevice, pool: CachingAllocator) -> None:
    stream, reader = Stream(gpu), Stream(gpu)
    del [pool.allocate(SIZE, stream=stream)][0]
    a = pool.allocate(SIZE, stream=stream)
    gpu.launch(stream, 1000, writes=[a])
    reader.wait_stream(stream)
    gpu.launch(reader, 1000, reads=[a])
    ptr = a.ptr
    a.close(stream=reader)
    b = pool.allocate(SIZE, stream=stream)
    assert b.ptr != ptr
    gpu.launch(stream, 1000, writes=[b])
    gpu.run_until_idle()
    assert gpu.races == []
    pool.check()

"""S01, S02, S34: who may have freed memory, and when."""

from __future__ import annotations

import pytest

from allocator import CachingAllocator, Config, OutOfMemoryError, SimDevice, Stream
from tests.scenarios.lab import KIB, MIB, Lab, overlap, read, span, used, write

# -- S01: split, merged, moved: every part keeps all that it waits for ---------------------------


def test_s01_the_rest_of_a_split_block_still_waits_for_its_user(gpu: SimDevice, pool: CachingAllocator) -> None:
    a, c = Stream(gpu), Stream(gpu)
    gpu.hold(a)
    whole = used(pool, a, 8 * MIB)
    where = span(whole)
    whole.close()
    piece = pool.allocate(2 * MIB, stream=a)  # A's own memory, at once; the rest is split off
    assert overlap(piece, where)
    mine = pool.allocate(4 * MIB, stream=c)
    assert not overlap(mine, where)
    write(gpu, c, mine)
    assert pool.trim() == 0  # nothing of it goes back to the driver either
    gpu.resume(a)
    gpu.run_until_idle()
    pool.settle()
    later = pool.allocate(6 * MIB, stream=c)
    assert overlap(later, where)
    write(gpu, c, later)


def test_s01_both_halves_of_a_split_block_wait_for_every_declared_user(gpu: SimDevice, pool: CachingAllocator) -> None:
    a, b, c = Stream(gpu), Stream(gpu), Stream(gpu)
    gpu.hold(a)
    gpu.hold(b)
    whole = used(pool, a, 8 * MIB)
    read(gpu, b, whole)
    whole.record_stream(b)
    where = span(whole)
    whole.close()
    gpu.resume(a)
    gpu.run_until_idle()
    assert a.query()
    for taker in (a, c):
        for size in (1 * MIB, 4 * MIB, 8 * MIB):
            with pool.allocate(size, stream=taker) as other:
                assert not overlap(other, where)
                write(gpu, taker, other)
    assert not any(overlap((where[0], 1), (s["address"], s["total_size"])) for s in _trimmed(pool))
    gpu.resume(b)
    gpu.run_until_idle()
    assert b.query()
    got = pool.allocate(8 * MIB, stream=c)
    write(gpu, c, got)


def _trimmed(pool: CachingAllocator) -> list[dict[str, int]]:
    """Segments that a trim has taken away."""
    before = pool.snapshot()["segments"]
    pool.trim()
    left = {s["address"] for s in pool.snapshot()["segments"]}
    return [s for s in before if s["address"] not in left]


def test_s01_a_merged_block_waits_for_the_users_of_both_parts(lab: Lab, gpu: SimDevice) -> None:
    pool = lab.pool(gpu, limit=8 * MIB)
    a, b, c = Stream(gpu), Stream(gpu), Stream(gpu)
    first, second = used(pool, a, 4 * MIB), used(pool, a, 4 * MIB)
    assert first.ptr + first.size == second.ptr
    read(gpu, b, second, duration_ns=1_000_000)
    second.record_stream(b)
    first.close()
    second.close()
    c.wait_stream(a)  # C is behind A, and knows nothing of B
    half = pool.allocate(4 * MIB, stream=c)
    assert overlap(half, first)
    write(gpu, c, half)
    half.close()
    whole = pool.allocate(8 * MIB, stream=c)  # the limit leaves nothing but both parts
    write(gpu, c, whole)  # the oracle knows whether B has read by then
    assert overlap(whole, second)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_s01_neighbours_of_three_streams_merge_only_for_those_who_may_have_all(
    lab: Lab, gpu: SimDevice, order: tuple[int, ...]
) -> None:
    pool = lab.pool(gpu, limit=12 * MIB, wait_timeout=0.001)
    streams = [Stream(gpu) for _ in range(3)]
    root = Stream(gpu)
    blocks = [used(pool, root, 4 * MIB) for _ in range(3)]
    root.synchronize()
    for stream, block in zip(streams, blocks, strict=True):
        gpu.hold(stream)
        write(gpu, stream, block)
    for i in order:
        blocks[i].close(streams[i])
    pool.check()  # a public call: the frees are stamped before the record that follows
    taker = Stream(gpu)
    for stream in streams[:2]:
        taker.wait_stream(stream)
    with pool.allocate(8 * MIB, stream=taker) as two:
        write(gpu, taker, two)
        assert not overlap(two, blocks[2])
    with pytest.raises(OutOfMemoryError):
        pool.allocate(12 * MIB, stream=taker)
    for stream in streams:
        gpu.resume(stream)
    with pool.allocate(12 * MIB, stream=taker) as all_three:
        write(gpu, taker, all_three)


def test_s01_a_block_that_moved_to_another_stream_still_waits_there(gpu: SimDevice, pool: CachingAllocator) -> None:
    a, b, c, d = (Stream(gpu) for _ in range(4))
    gpu.hold(a)
    block = used(pool, a, 4 * MIB)
    where = span(block)
    block.close()
    pool.check()  # a public call: the free is stamped before the record that follows
    b.wait_stream(a)
    moved = pool.allocate(4 * MIB, stream=b)
    assert span(moved) == where
    assert pool.stats().allocations["event_dependency"] == 1
    moved.close()  # not used by B at all
    pool.check()
    c.wait_stream(b)
    for stream, may in ((d, False), (c, True)):
        got = pool.allocate(4 * MIB, stream=stream)
        assert overlap(got, where) is may
        write(gpu, stream, got)
    gpu.resume(a)


def test_s01_nothing_that_waits_goes_back_to_the_driver(gpu: SimDevice, pool: CachingAllocator) -> None:
    a, b = Stream(gpu), Stream(gpu)
    gpu.hold(a)
    gpu.hold(b)
    blocks = [used(pool, s, 2 * MIB) for s in (a, b, a, b)]
    for block in blocks:
        block.close()
    assert pool.trim() == 0
    pool.set_limit(1 * MIB)
    assert gpu.used_bytes == 8 * MIB
    gpu.resume(a)
    gpu.run_until_idle()
    pool.trim()
    assert gpu.used_bytes == 4 * MIB  # A's have gone, B's have not
    gpu.resume(b)
    gpu.run_until_idle()
    pool.trim()
    assert gpu.used_bytes == 0
    pool.set_limit(0)


# -- S02: declared uses ----------------------------------------------------------------------------


def _read_elsewhere(gpu: SimDevice, pool: CachingAllocator, *, declared: bool) -> tuple[bool, Stream]:
    """A's block is read on B, which stands still, and freed; does A get it back at once?"""
    a, b = Stream(gpu), Stream(gpu)
    block = used(pool, a, MIB)
    b.wait_stream(a)
    gpu.hold(b)
    read(gpu, b, block)
    if declared:
        block.record_stream(b)
    where = span(block)
    block.close()
    again = pool.allocate(MIB, stream=a)
    write(gpu, a, again)
    return overlap(again, where), b


def test_s02_a_declared_use_keeps_the_owner_away_too(gpu: SimDevice, pool: CachingAllocator) -> None:
    got, b = _read_elsewhere(gpu, pool, declared=True)
    assert not got
    gpu.resume(b)
    gpu.run_until_idle()
    growths = pool.stats().growths
    again = pool.allocate(MIB, stream=Stream(gpu))  # over: anybody may have it
    write(gpu, again.stream, again)
    assert pool.stats().growths == growths


def test_s02_control_without_the_declaration_the_same_program_is_a_race() -> None:
    gpu = SimDevice(memory=1 << 30)
    pool = CachingAllocator(gpu, config=Config())
    got, _ = _read_elsewhere(gpu, pool, declared=False)
    assert got
    assert gpu.races


def test_s02_every_declared_stream_counts(gpu: SimDevice, pool: CachingAllocator) -> None:
    a, *others = (Stream(gpu) for _ in range(4))
    block = used(pool, a, MIB)
    for other in others:
        other.wait_stream(a)
        gpu.hold(other)
        read(gpu, other, block)
        block.record_stream(other)
    where = span(block)
    block.close()
    for other in others:
        got = pool.allocate(MIB, stream=a)
        assert not overlap(got, where)
        write(gpu, a, got)
        got.close()
        gpu.resume(other)
        gpu.run_until_idle()
        assert other.query()
    assert pool.stats().in_flight_bytes <= MIB  # what A itself has written last


def test_s02_work_queued_between_the_declaration_and_the_free_counts(gpu: SimDevice, pool: CachingAllocator) -> None:
    a, b = Stream(gpu), Stream(gpu)
    block = used(pool, a, MIB)
    b.wait_stream(a)
    block.record_stream(b)
    gpu.run_until_idle()
    assert b.query()  # nothing is queued at the declaration
    gpu.hold(b)
    read(gpu, b, block)
    where = span(block)
    block.close()
    got = pool.allocate(MIB, stream=a)
    assert not overlap(got, where)
    write(gpu, a, got)


def test_s02_a_block_never_declared_elsewhere_comes_back_at_once_without_a_driver_call(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    a = Stream(gpu)
    gpu.hold(a)
    block = used(pool, a, MIB)
    where = span(block)
    before = gpu.calls.total()
    block.close()
    again = pool.allocate(MIB, stream=a)
    assert gpu.calls.total() == before
    assert span(again) == where
    write(gpu, a, again)


@pytest.mark.parametrize("size", [KIB, 256 * KIB, 256 * KIB + 1, MIB, 2 * MIB, 20 * MIB])
def test_s02_declared_uses_hold_in_every_size_class(gpu: SimDevice, pool: CachingAllocator, size: int) -> None:
    a, b = Stream(gpu), Stream(gpu)
    block = used(pool, a, size)
    b.wait_stream(a)
    gpu.hold(b)
    write(gpu, b, block)
    block.record_stream(b)
    where = span(block)
    block.close()
    with pool.allocate(size, stream=a) as other:
        assert not overlap(other, where)
        write(gpu, a, other)


# -- S34: the stream that a free names -------------------------------------------------------------


@pytest.mark.parametrize("bare", [False, True])
def test_s34_the_stream_that_a_free_names_keeps_the_owner_away(
    gpu: SimDevice, pool: CachingAllocator, bare: bool
) -> None:
    a, b = Stream(gpu), Stream(gpu)
    block = used(pool, a, MIB)
    b.wait_stream(a)
    gpu.hold(b)
    read(gpu, b, block)
    where = span(block)
    block.close(b.handle if bare else b)
    again = pool.allocate(MIB, stream=a)
    assert not overlap(again, where)
    write(gpu, a, again)
    assert pool.stats().frees["cross_stream"] == 1
    gpu.resume(b)
    gpu.run_until_idle()
    late = pool.allocate(MIB, stream=b)
    write(gpu, b, late)
    assert pool.stats().growths <= 2


def test_s34_control_a_free_that_names_nobody_is_a_race() -> None:
    gpu = SimDevice(memory=1 << 30)
    pool = CachingAllocator(gpu, config=Config())
    a, b = Stream(gpu), Stream(gpu)
    block = used(pool, a, MIB)
    b.wait_stream(a)
    gpu.hold(b)
    read(gpu, b, block)
    block.close()
    again = pool.allocate(MIB, stream=a)
    write(gpu, a, again)
    assert gpu.races


def test_s34_naming_the_owner_changes_nothing(gpu: SimDevice, pool: CachingAllocator) -> None:
    a = Stream(gpu)
    block = used(pool, a, MIB)
    where = span(block)
    block.close(a)
    assert span(pool.allocate(MIB, stream=a)) == where


def test_s34_a_bare_handle_is_sealed_inside_the_free_that_was_given_it(gpu: SimDevice, pool: CachingAllocator) -> None:
    """The caller may destroy the stream as soon as the free has returned (R9)."""
    a = Stream(gpu)
    with gpu.scope():
        handle = gpu.stream_create(non_blocking=True, priority=0)
    block = used(pool, a, MIB)
    gpu.run_until_idle()
    gpu.hold(handle)
    gpu.launch(handle, reads=[block])
    where = span(block)
    block.close(handle)
    with gpu.scope():
        gpu.stream_destroy(handle)
    with pool.allocate(MIB, stream=a) as other:
        assert not overlap(other, where)
        write(gpu, a, other)
    gpu.resume(handle)
    gpu.run_until_idle()
    a.synchronize()
    assert pool.stats().in_flight_bytes == 0


def test_s34_a_stream_that_cannot_be_told_makes_everybody_wait(
    gpu: SimDevice, pool: CachingAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = Stream(gpu), Stream(gpu)
    block = used(pool, a, MIB)
    b.wait_stream(a)
    gpu.hold(b)
    read(gpu, b, block)
    where = span(block)
    block.close(object())  # never raises
    assert len(caplog.records) == 1
    caplog.clear()
    again = pool.allocate(MIB, stream=a)
    assert not overlap(again, where)
    write(gpu, a, again)
    gpu.resume(b)
    gpu.run_until_idle()
    for stream in (a, b):
        stream.synchronize()
    pool.settle()
    assert pool.stats().in_flight_bytes == 0

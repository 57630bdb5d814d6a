"""What a reading says, and that its work is bounded: backlogs, figures by stream, ages, a lost device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from allocator import CachingAllocator, Config, SimDevice, Stats, Stream
from allocator.caching.shelves import FEW_BINS
from allocator.errors import DriverError
from tests.unit.caching.conftest import MakePool

KIB = 1 << 10
MIB = 1 << 20
SECOND = 1_000_000_000

Make = Callable[..., CachingAllocator]


@pytest.fixture
def gpu() -> SimDevice:
    gpu = SimDevice(memory=1 << 30)
    gpu.advance(1000)
    return gpu


@pytest.fixture
def make(gpu: SimDevice) -> Make:
    def make(**config: Any) -> CachingAllocator:
        return CachingAllocator(
            gpu, config=Config(**{"seal_frees": 1 << 30, "seal_bytes": 1 << 40, **config}), name="main"
        )

    return make


def consistent(stats: Stats) -> Stats:
    """The identities that every reading keeps."""
    parts = (stats.allocated_bytes, stats.in_flight_bytes, stats.idle_bytes, stats.private_bytes)
    assert min(parts) >= 0
    assert stats.reserved_bytes == sum(parts)
    assert stats.releasable_bytes + stats.stranded_bytes == stats.idle_bytes
    assert stats.releasable_bytes >= 0 <= stats.stranded_bytes
    assert stats.largest_free_block_bytes <= stats.idle_bytes
    assert min(stats.blocks.values()) >= 0
    for by_stream, total in (
        (stats.stream_allocated_bytes, stats.allocated_bytes),
        (stats.stream_in_flight_bytes, stats.in_flight_bytes),
        (stats.stream_idle_bytes, stats.idle_bytes),
    ):
        assert sum(by_stream.values()) in (0, total)
    return stats


def read(pool: CachingAllocator, most: int | None = None) -> Stats:
    """A consistent reading with the figures by stream."""
    return consistent(pool.stats(per_stream=True, most=most))


def test_a_bounded_reading_sees_to_some_of_the_queued_frees_and_leaves_the_rest(gpu: SimDevice, make: Make) -> None:
    pool = make()
    stream = Stream(gpu)
    held = [pool.allocate(KIB, stream=stream) for _ in range(100)]
    held.clear()
    stats = read(pool, most=30)
    assert (stats.pending_frees, stats.allocated_bytes) == (70, 70 * KIB)
    assert stats.blocks["live"] == 70
    assert read(pool, most=30).pending_frees == 40
    stats = read(pool)
    assert (stats.pending_frees, stats.allocated_bytes) == (0, 0)
    pool.check()


def test_a_bounded_drain_does_what_a_full_one_does_for_every_kind_of_free(gpu: SimDevice, make: Make) -> None:
    """Bins, several users, streams that have ended, second frees of one block."""

    def play(most: int | None) -> tuple[Stats, CachingAllocator]:
        pool = make()
        one, other, gone = Stream(gpu), Stream(gpu), Stream(gpu)
        held = [pool.allocate(KIB << n % 3, stream=(one, other, gone)[n % 3]) for n in range(30)]
        for allocation in held[::4]:
            allocation.record_stream(one)
        gone.close()
        doubled = held[5]
        pool.frees.append((doubled._block, doubled._generation, None))
        held.clear()
        del doubled, allocation
        stats = read(pool, most)
        while most is not None and stats.pending_frees:
            stats = read(pool, most)
        return stats, pool

    full, one_pool = play(None)
    stepwise, other_pool = play(4)
    for name in ("allocated_bytes", "in_flight_bytes", "idle_bytes", "frees", "allocations", "requested_bytes"):
        assert getattr(full, name) == getattr(stepwise, name), name
    one_pool.check()
    other_pool.check()


def test_what_has_finished_in_a_bin_counts_as_idle_before_it_is_moved(gpu: SimDevice, make: Make) -> None:
    pool = make()
    stream = Stream(gpu, name="s")
    held = [pool.allocate(KIB, stream=stream) for _ in range(50)]
    held.clear()
    pool.drain_frees()
    stats = read(pool, most=0)  # nothing is moved
    assert sum(len(b.blocks) for sizes in pool._shelves.bins[0].values() for b in sizes.by_size.values()) == 50
    assert (stats.in_flight_bytes, stats.stream_idle_bytes["s"]) == (0, 50 * KIB)
    assert stats.blocks["retired"] == 0
    assert stats.blocks["idle"] >= 50
    assert stats.idle_bytes == stats.reserved_bytes
    pool.check()


def test_a_bounded_reading_puts_down_some_of_what_has_finished_and_the_next_goes_on(gpu: SimDevice, make: Make) -> None:
    pool = make()
    one, other = Stream(gpu), Stream(gpu)
    gpu.hold(one.handle)
    held = [pool.allocate(KIB, stream=one) for _ in range(80)]
    gpu.launch(one, writes=held)
    for allocation in held[::2]:
        allocation.record_stream(other)
    del allocation, held[::2]  # between others that live, so that they do not merge
    assert read(pool).in_flight_bytes == 40 * KIB
    gpu.resume(one.handle)
    gpu.run_until_idle()
    left = [read(pool, most=15).in_flight_bytes // KIB for _ in range(3)]
    assert left == [25, 10, 0]
    pool.check()


def test_whatever_serves_next_finds_all_that_a_bounded_reading_left(gpu: SimDevice, make: Make) -> None:
    pool = make(limit=2 * MIB)
    one, other = Stream(gpu), Stream(gpu)
    gpu.hold(one.handle)
    held = [pool.allocate(512 * KIB, stream=one) for _ in range(4)]
    gpu.launch(one, writes=held)
    while held:
        held.pop().record_stream(other)
        pool.stats()  # closes the seqno, so that the next has another stamp and does not merge
    gpu.resume(one.handle)
    gpu.run_until_idle()
    assert read(pool, most=1).in_flight_bytes == 3 * 512 * KIB
    assert pool.allocate(2 * MIB, stream=other).size == 2 * MIB
    pool.check()


def test_a_reading_by_stream_looks_at_no_block(gpu: SimDevice, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make()
    streams = [Stream(gpu, name=f"s{n}") for n in range(3)]
    held = [pool.allocate(KIB, stream=streams[n % 3]) for n in range(60)]
    del held[::2]
    expected = read(pool)

    def no(*_: object) -> None:
        raise AssertionError("a walk over the blocks")

    monkeypatch.setattr(type(pool._heap), "blocks", no)
    monkeypatch.setattr(type(pool._shelves), "retired", no)
    stats = read(pool, most=8)
    for n in range(3):
        assert stats.stream_allocated_bytes[f"s{n}"] == expected.stream_allocated_bytes[f"s{n}"] == 10 * KIB


def test_memory_of_streams_that_have_gone_is_held_by_no_figure(gpu: SimDevice, make: Make) -> None:
    pool = make()
    for n in range(50):
        stream = Stream(gpu, name=f"request {n}")
        pool.allocate(KIB, stream=stream).close()
        stream.close()
    del stream
    gpu.run_until_idle()
    read(pool)
    pool.trim()
    assert pool._shelves.live == {}
    assert all(set(shelf.by_owner) <= {None} for shelf in pool._shelves.idle)


def test_the_oldest_in_flight_is_told_also_where_it_lies_in_a_bin(gpu: SimDevice, make: Make) -> None:
    """Its age begins with the first reading, as the hot path takes no time."""
    pool = make()
    still, busy = Stream(gpu), Stream(gpu)
    gpu.hold(still.handle)
    block = pool.allocate(KIB, stream=still)
    gpu.launch(still, writes=[block])
    block.close()
    assert read(pool).oldest_in_flight_seconds == 0
    gpu.advance(60 * SECOND)
    for _ in range(3):  # others come and go meanwhile
        other = pool.allocate(KIB, stream=busy)
        gpu.launch(busy, writes=[other])
        other.close()
        gpu.advance(20 * SECOND)
        read(pool)
    assert read(pool).oldest_in_flight_seconds == 120
    gpu.resume(still.handle)
    gpu.run_until_idle()
    assert read(pool).oldest_in_flight_seconds == 0


def test_the_oldest_in_flight_on_the_shelves_is_the_first_that_is_still_there(gpu: SimDevice, make: Make) -> None:
    pool = make()
    still, user = Stream(gpu), Stream(gpu)
    gpu.hold(still.handle)
    for nbytes in (KIB, 2 * KIB, 3 * KIB):
        block = pool.allocate(nbytes, stream=still)
        gpu.launch(still, writes=[block])
        block.record_stream(user)
        block.close()
        pool.stats()
        gpu.advance(10 * SECOND)
    assert read(pool).oldest_in_flight_seconds == 30
    assert pool.allocate(KIB, stream=still).size == KIB  # the oldest goes back to its owner
    assert read(pool).oldest_in_flight_seconds in (10, 20)
    gpu.resume(still.handle)
    gpu.run_until_idle()
    assert read(pool).oldest_in_flight_seconds == 0


@pytest.mark.parametrize("backing", ["vmm", "malloc"])
def test_releasable_is_what_a_trim_gives_back(gpu: SimDevice, make: Make, backing: str) -> None:
    pool = make(backing=backing)
    stream, other = Stream(gpu), Stream(gpu)
    held = [pool.allocate(nbytes, stream=stream) for nbytes in (KIB, 4 * MIB, 8 * MIB, 2 * KIB, 4 * MIB)]
    held.append(pool.allocate(KIB, stream=other))
    del held[1:3]
    gpu.run_until_idle()
    releasable = read(pool).releasable_bytes
    assert releasable >= 12 * MIB
    assert pool.trim() == releasable
    assert read(pool).releasable_bytes == 0


def test_a_lost_device_is_told_and_the_figures_stay(gpu: SimDevice, make: Make) -> None:
    pool = make()
    held = pool.allocate(MIB)
    assert read(pool).device_lost == 0
    gpu.fail("cuMemCreate", error="CUDA_ERROR_ILLEGAL_ADDRESS", sticky=True)
    with pytest.raises(DriverError):
        pool.allocate(64 * MIB)
    stats = read(pool)
    assert (stats.device_lost, stats.allocated_bytes) == (1, MIB)
    assert not held.closed


@pytest.mark.parametrize(
    ("backing", "calls"), [("vmm", {"cuMemCreate", "cuMemUnmap"}), ("malloc", {"cuMemAlloc", "cuMemFree"})]
)
def test_the_timed_driver_calls_are_there_from_the_start(make: Make, backing: str, calls: set[str]) -> None:
    """A counter that first appears above 0 has no rate."""
    pool = make(backing=backing)
    assert pool.stats().driver_seconds == dict.fromkeys(calls, 0.0)
    pool.allocate(MIB).close()
    pool.trim()
    assert set(pool.stats().driver_seconds) == calls


def test_new_memory_has_never_been_in_flight(gpu: SimDevice) -> None:
    with CachingAllocator(gpu) as pool:
        held = [pool.allocate(nbytes) for nbytes in (64 << 20, 512, 3 << 20, 64 << 20)]
        assert pool.stats().peak_in_flight_bytes == 0
        held.pop().close()
        assert pool.stats().peak_in_flight_bytes == 64 << 20


def test_what_turns_round_on_the_way_is_counted_by_what_was_asked_for(gpu: SimDevice, make: MakePool) -> None:
    """Blocks that are freed and taken back in one step, by requests of one rounded size and several lengths."""
    pool = make()
    s = Stream(gpu)
    asked = [4096, 4096, 4096, 4000, 4000, 4096, 3900, 3900, 3900, 4096, 1000, 1000, 1024]
    for n in asked:
        pool.allocate(n, stream=s).close()
    held = pool.allocate(3999, stream=s)
    stats = pool.stats()
    assert sum(stats.allocations.values()) == len(asked) + 1
    assert sum(stats.frees.values()) == len(asked)
    assert stats.request_size_bytes.sum == sum(asked) + 3999 and stats.requested_bytes == 3999
    assert sum(stats.allocation_bytes.values()) == sum((n + 511) // 512 * 512 for n in asked) + 4096
    assert stats.blocks["live"] == 1
    held.close()
    for n in range(1, 6 * FEW_BINS):  # its bin goes
        for _ in range(2):
            pool.allocate(8192 + 512 * n, stream=s).close()
            pool.allocate(8192 + 512 * n, stream=s).close()
    after = pool.stats()
    assert 4096 not in pool._shelves.bins[False][s.line].by_size
    more = 4 * sum(8192 + 512 * n for n in range(1, 6 * FEW_BINS))
    assert after.request_size_bytes.sum == sum(asked) + 3999 + more and after.requested_bytes == 0
    assert sum(after.frees.values()) == sum(after.allocations.values())
    pool.check()


def test_new_memory_that_joins_idle_memory_was_never_in_flight(gpu: SimDevice, make: MakePool) -> None:
    pool = make()
    s = Stream(gpu)
    pool.allocate(8 << 20, stream=s).close()
    s.synchronize()
    pool.stats()
    pool.reset_peaks()
    held = pool.allocate(20 << 20, stream=s)
    assert pool.stats().peak_in_flight_bytes == 0
    held.close()


def test_idle_memory_that_is_handed_out_was_not_in_flight(gpu: SimDevice, make: MakePool) -> None:
    """Also where it was found at the second look, when what was over had been put together."""
    pool = make()
    s, t = Stream(gpu), Stream(gpu)
    for stream in (t, s):
        pool.allocate(512, stream=stream).close()
    pool.allocate(32 << 20, stream=s).close()
    s.synchronize()
    pool.stats()
    small = pool.allocate(2 << 20, stream=s)
    gpu.launch(s, 1000, writes=[small])
    small.close()
    pool.drain_frees()
    pool.reset_peaks()
    gpu.run_until_idle()
    held = pool.allocate(31 << 20, stream=t)
    assert pool.stats().peak_in_flight_bytes <= 2 << 20
    held.close()
    pool.check()

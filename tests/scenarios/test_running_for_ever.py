"""S13, S14, S26: what is free of charge, and what may be waited for."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections import Counter

import pytest

from allocator import CachingAllocator, Config, OutOfMemoryError, SimDevice, Stream
from allocator.caching.shelves import FEW_BINS
from allocator.config import REUSE_KINDS
from allocator.streams.timeline import MOST_MARKS
from tests.scenarios.lab import KIB, MIB, Lab, in_thread, overlap, read, span, used, write

# -- S13: events -----------------------------------------------------------------------------------


@pytest.mark.parametrize("uses", ["declared", "assumed"])
@pytest.mark.parametrize("gone", [False, True])
def test_s13_a_stream_that_never_ends_its_work_holds_no_more_marks_in_the_end(lab: Lab, uses: str, gone: bool) -> None:
    """Each miss, each reading, each look at a pool that has gone asks; what was asked in vain is not all kept."""
    gpu = lab.gpu(memory=4 << 30)
    pool = lab.pool(gpu, uses=uses, seal_frees=1)
    stuck, busy = Stream(gpu), Stream(gpu)
    if gone:
        other = CachingAllocator(gpu, config=Config(uses=uses))
        used(other, stuck, MIB).close()
        other.close()
    block = pool.allocate(MIB, stream=stuck)
    gpu.hold(stuck)
    gpu.launch(stuck, 1000, writes=[block])
    block.close()
    registry = pool._registry

    def marks() -> int:
        lines = list(registry.lines.values())
        for line in lines:
            line.check()
        return max([len(registry.context.in_flight), *(len(line.in_flight) for line in lines)])

    rng = random.Random(1)
    created: list[int] = []
    for _ in range(4 * MOST_MARKS):
        used(pool, busy, rng.randrange(MIB, 16 * MIB)).close()
        gpu.advance(10_000)
        block = pool.allocate(MIB, stream=stuck)
        gpu.launch(stuck, 1000, writes=[block])
        block.close()
        pool.stats()
        assert marks() <= MOST_MARKS
        created.append(gpu.calls["cuEventCreate"])
    assert created[-1] == created[len(created) // 2], "events come back from what is forgotten"
    pool.check()


@pytest.mark.parametrize(("uses", "times"), [("auto", 100_000), ("declared", 10_000), ("assumed", 10_000)])
def test_s13_one_stream_for_ever_makes_no_driver_call_and_no_event(
    lab: Lab, gpu: SimDevice, uses: str, times: int
) -> None:
    pool = lab.pool(gpu, uses=uses)
    s = Stream(gpu)
    sizes = (512, 4 * KIB, MIB)
    for size in sizes:
        pool.allocate(size, stream=s).close()
    before = Counter(gpu.calls)
    for i in range(times):
        pool.allocate(sizes[i % 3], stream=s).close()
    assert Counter(gpu.calls) == before
    assert gpu.calls["cuEventCreate"] == gpu.calls["cuEventRecord"] == 0
    stats = pool.stats()
    assert stats.events == {"idle": 0, "in_use": 0}
    assert sum(stats.allocations.values()) == times + 3


def test_s13_a_one_stream_program_shows_nothing_in_flight_once_it_has_run_dry(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    s = Stream(gpu)
    for size in (KIB, MIB, 8 * MIB) * 10:
        used(pool, s, size).close()
    gpu.run_until_idle()
    stats = pool.stats()
    assert (stats.in_flight_bytes, stats.allocated_bytes) == (0, 0)
    assert stats.idle_bytes == stats.reserved_bytes > 0
    assert gpu.calls["cuEventCreate"] == gpu.calls["cuEventRecord"] == 0
    assert pool.trim() > 0
    assert gpu.used_bytes == 0


def test_what_is_counted_by_size_does_not_grow_with_the_number_of_sizes(gpu: SimDevice, pool: CachingAllocator) -> None:
    """A soak found it: one more counter for each size that a program ever asked for."""
    s = Stream(gpu)
    for size in range(512, 600 * 512, 512):
        pool.allocate(size, stream=s).close()
    few = len(pool._accounts.sizes)
    for size in range(600 * 512, 2000 * 512, 512):
        pool.allocate(size, stream=s).close()
    assert len(pool._accounts.sizes) <= few + 3
    counts, before = pool.stats().request_size_bytes, 0
    for bound in counts:
        assert counts[bound] == len([n for n in range(512, 2000 * 512, 512) if before < n <= bound])
        before = int(bound) if bound < float("inf") else before


def _bins(pool: CachingAllocator) -> int:
    return sum(len(sizes.by_size) for bins in pool._shelves.bins for sizes in bins.values())


def test_thirty_thousand_sizes_on_one_living_stream_take_bounded_memory_of_the_host(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    """S13: the default stream lives for ever, and a program may ask for a new size each time."""
    s = Stream.legacy(gpu)
    kept = [pool.allocate(512 * n, stream=s) for n in range(1, 65)]  # blocks in use keep nothing alive but themselves
    sizes = [512 * n for n in range(1, 30_001)]
    random.Random(1).shuffle(sizes)
    most = 0
    try:
        for at, size in enumerate(sizes):
            pool.allocate(size, stream=s).close()
            if at % 1000 == 0:
                most = max(most, _bins(pool))
            if at == 25_000:  # it takes time
                tracemalloc.start()
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert most <= 2 * FEW_BINS
    assert grown < 512 * KIB  # up to 512 bins that are new, instead of old ones; 5,000 of them are 1.3 MiB
    pool.check()
    assert sum(pool.stats().request_size_bytes.values()) == 30_064
    kept.clear()
    pool.check()
    assert pool.stats().allocated_bytes == 0


def test_sizes_in_use_keep_their_bins_among_endless_others(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    usual = range(512, 101 * 512, 512)
    for other in range(200 * 512, 3200 * 512, 512):
        for size in usual[:: 1 if other % 10_240 == 0 else 50]:
            pool.allocate(size, stream=s).close()
        pool.allocate(other, stream=s).close()
        assert _bins(pool) <= 2 * (len(usual) + FEW_BINS) + 2 * len([b for b in pool._shelves.filled if b.blocks])
    bins = pool._shelves.bins[False][s.line].by_size
    assert all(size in bins for size in usual[::50])


def test_ages_of_what_was_in_flight_are_counted_also_if_nobody_reads_them(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    """Each was kept until the statistics were read."""
    a, b = Stream(gpu), Stream(gpu)
    for _ in range(3000):
        block = used(pool, a, MIB)
        b.wait_stream(a)
        block.record_stream(b)
        block.close()
        gpu.run_until_idle()
        a.synchronize()
        b.synchronize()
    assert len(pool._shelves.aged) < 600
    assert sum(pool.stats().in_flight_seconds.values()) >= 2900


@pytest.mark.parametrize("how", ["wait_stream", "event", "memory"])
def test_r5_what_was_learnt_of_streams_that_have_gone_is_forgotten(lab: Lab, gpu: SimDevice, how: str) -> None:
    """A soak found it: the default stream's clock had an entry for each stream that it had ever waited for, and all
    that waited for it, and each of their events, got a copy."""
    pool = lab.pool(gpu, uses="declared", limit=2 * MIB)
    for_ever, other = Stream.legacy(gpu) if how != "memory" else Stream(gpu), Stream(gpu)
    most = 0
    for _ in range(600):
        brief = Stream(gpu)
        block = used(pool, brief, 2 * MIB)
        match how:
            case "wait_stream":
                for_ever.wait_stream(brief)
            case "event":
                brief.record_event().wait(for_ever)
        block.close()
        used(pool, for_ever, 2 * MIB).close()  # where nobody has waited, the pool makes the stream wait
        other.wait_stream(for_ever)
        gpu.run_until_idle()
        brief.close()
        pool.settle()
        most = max(most, len(for_ever.line.clock), len(other.line.clock))
    assert most <= 40
    pool.check()


@pytest.mark.parametrize("streams", [2, 4, 16])
@pytest.mark.parametrize("seal_frees", [16, 64])
@pytest.mark.parametrize("uses", ["declared", "assumed"])
def test_s13_in_the_steady_state_one_record_a_stream_for_every_seal_frees_frees(
    lab: Lab, gpu: SimDevice, streams: int, seal_frees: int, uses: str
) -> None:
    pool = lab.pool(gpu, uses=uses, seal_frees=seal_frees)
    lanes = [Stream(gpu) for _ in range(streams)]

    def work(frees: int) -> None:
        for i in range(frees):
            used(pool, lanes[i % streams], MIB, duration_ns=100 * streams).close()
            gpu.advance(200)

    work(1024)
    before = Counter(gpu.calls)
    growths = pool.stats().growths
    frees = 2048
    work(frees)
    calls = Counter(gpu.calls) - before
    assert pool.stats().growths == growths, "not a steady state"
    assert calls["cuEventCreate"] == 0
    rounds = frees / seal_frees
    assert calls["cuEventRecord"] + calls["cuCtxRecordEvent"] <= rounds * streams + streams
    assert calls["cuEventRecord"] + calls["cuCtxRecordEvent"] + calls["cuStreamQuery"] > 0


@pytest.mark.parametrize("assumed", [False, True])
def test_s13_with_context_events_one_record_covers_all_streams(lab: Lab, gpu: SimDevice, assumed: bool) -> None:
    pool = lab.pool(gpu, uses="assumed" if assumed else "auto", context_events=True)
    lanes = [Stream(gpu) for _ in range(8)]
    for i in range(4096):
        used(pool, lanes[i % 8], MIB, duration_ns=400).close()
        gpu.advance(100)
    before = Counter(gpu.calls)
    for i in range(6400):
        used(pool, lanes[i % 8], MIB, duration_ns=400).close()
        gpu.advance(100)
    calls = Counter(gpu.calls) - before
    assert calls["cuEventCreate"] == 0
    if assumed:
        assert calls["cuCtxRecordEvent"] <= 6400 / 64 + 1 and calls["cuEventRecord"] == 0


def test_s13_with_cross_stream_frees_for_ever_the_number_of_events_levels_off(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    a, b = Stream(gpu), Stream(gpu)
    created: list[int] = []
    for _ in range(10):
        for _ in range(500):
            block = used(pool, a, MIB, duration_ns=500)
            b.wait_stream(a)
            read(gpu, b, block, duration_ns=500)
            block.record_stream(b)
            block.close()
            gpu.advance(600)
        stats = pool.stats()
        created.append(stats.events["idle"] + stats.events["in_use"])
    assert created[-1] == created[1] <= 16
    assert pool.stats().reserved_bytes <= 256 * MIB


def test_s13_an_event_is_used_again_only_after_its_last_use_is_finished(lab: Lab, gpu: SimDevice) -> None:
    pool = lab.pool(gpu, seal_frees=1)
    a, b = Stream(gpu), Stream(gpu)
    gpu.hold(a)
    used(pool, a, 2 * MIB).close()
    used(pool, b, 2 * MIB).close()
    for _ in range(50):
        used(pool, b, 2 * MIB).close()
        gpu.advance(10_000)
    assert pool.stats().in_flight_bytes >= 2 * MIB  # no other record of the same event has set A's free loose
    gpu.resume(a)
    gpu.run_until_idle()
    assert pool.stats().in_flight_bytes == 0


# -- S14: what may be waited for -------------------------------------------------------------------


@pytest.mark.parametrize("need", ["release", "internal_dependency", "host_wait", "collect"])
def test_s14_an_unrelated_stuck_stream_stops_nobody(lab: Lab, need: str) -> None:
    gpu = lab.gpu(memory=64 * MIB)
    pool = lab.pool(gpu, reuse=frozenset({"opportunistic"} if need == "host_wait" else REUSE_KINDS))
    stuck, a, b = Stream(gpu), Stream(gpu), Stream(gpu)
    mine = used(pool, stuck, 2 * MIB)
    gpu.hold(stuck)  # until the host does something, which it does after the allocation
    write(gpu, stuck, mine)
    match need:
        case "release":
            small = [used(pool, a, 256 * KIB) for _ in range(8 * 31)]
            small.clear()
            a.synchronize()
        case "internal_dependency" | "host_wait":
            used(pool, a, 62 * MIB, duration_ns=1_000_000).close()
        case "collect":
            cycle: list[object] = [used(pool, a, 62 * MIB)]
            cycle.append(cycle)
            del cycle
    big = pool.allocate(62 * MIB, stream=b)
    write(gpu, b, big)
    assert not stuck.query()
    gpu.resume(stuck)


def test_s14_with_plain_memory_a_trim_does_not_wait_for_an_unrelated_stuck_stream(lab: Lab, gpu: SimDevice) -> None:
    """A plain free waits for the device, so it is left alone while any stream is busy (R13)."""
    pool = lab.pool(gpu, backing="malloc")
    stuck, a = Stream(gpu), Stream(gpu)
    mine = used(pool, stuck, 2 * MIB)
    used(pool, a, 8 * MIB).close()
    a.synchronize()
    gpu.hold(stuck)
    write(gpu, stuck, mine)
    pool.trim()  # must come back
    assert not stuck.query()
    gpu.resume(stuck)
    gpu.run_until_idle()
    stuck.synchronize()
    pool.trim()
    assert gpu.used_bytes == 2 * MIB


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemRelease"])
def test_s14_others_allocate_and_free_while_one_reclaims(lab: Lab, call: str) -> None:
    gpu = lab.gpu(memory=64 * MIB)
    pool = lab.pool(gpu, seal_frees=4)
    a, b, c = Stream(gpu), Stream(gpu), Stream(gpu)
    warm = used(pool, c, KIB)
    warm.close()
    small = [used(pool, s, 256 * KIB) for s in (a, b) for _ in range(8 * 14)]
    small.clear()
    pool.stats()
    worked: list[int] = []
    gpu.run_until_idle()

    me = threading.current_thread()

    def meanwhile(name: str) -> None:
        if name == call and len(worked) < 5 and threading.current_thread() is me:
            worked.append(in_thread(lambda: used(pool, c, KIB, duration_ns=1).ptr))

    gpu.before_call = meanwhile
    big = pool.allocate(40 * MIB, stream=a)
    gpu.before_call = None
    assert worked
    write(gpu, a, big)


def test_s14_others_allocate_and_free_while_one_waits_on_the_host(lab: Lab) -> None:
    gpu = lab.gpu(memory=64 * MIB)
    pool = lab.pool(gpu, reuse=frozenset({"opportunistic"}), wait_timeout=10)
    a, b, c = Stream(gpu), Stream(gpu), Stream(gpu)
    used(pool, c, KIB).close()
    gpu.hold(a)
    used(pool, a, 60 * MIB).close()
    thread = threading.Thread(target=pool.settle, daemon=True)
    thread.start()
    for _ in range(200):
        used(pool, c, KIB).close()
    gpu.resume(a)
    thread.join(30)
    assert not thread.is_alive()
    write(gpu, b, pool.allocate(60 * MIB, stream=b))


def test_s14_the_wait_is_for_anything_that_serves_not_for_one_block(lab: Lab) -> None:
    """Two blocks fit; the stream of the better one is stuck, the other finishes (R13)."""
    gpu = lab.gpu(memory=64 * MIB)
    pool = lab.pool(gpu, reuse=frozenset({"opportunistic"}))
    stuck, a, b = Stream(gpu), Stream(gpu), Stream(gpu)
    gpu.hold(stuck)
    exact = used(pool, stuck, 30 * MIB)
    other = used(pool, a, 32 * MIB, duration_ns=1_000_000)
    where = span(other)
    exact.close()
    other.close()
    got = pool.allocate(30 * MIB, stream=b)
    assert overlap(got, where)
    write(gpu, b, got)
    gpu.resume(stuck)


def test_s14_a_stuck_candidate_is_not_chosen_for_a_device_wait_when_another_one_fits(lab: Lab) -> None:
    gpu = lab.gpu(memory=64 * MIB)
    pool = lab.pool(gpu)
    a, b = Stream(gpu), Stream(gpu)
    used(pool, a, 64 * MIB, duration_ns=1_000_000).close()
    got = pool.allocate(64 * MIB, stream=b)
    write(gpu, b, got)
    gpu.run_until_idle()
    assert b.query()
    with pytest.raises(OutOfMemoryError):
        pool.allocate(MIB, stream=a)


# -- S26: nothing at all ---------------------------------------------------------------------------


@pytest.mark.parametrize("backing", ["vmm", "malloc"])
def test_s26_zero_bytes_are_a_valid_empty_allocation(lab: Lab, gpu: SimDevice, backing: str) -> None:
    pool = lab.pool(gpu, backing=backing)
    s = Stream(gpu)
    kept = used(pool, s, MIB)
    before, stats = Counter(gpu.calls), pool.stats()
    empty = pool.allocate(0, stream=s)
    assert (empty.ptr, empty.size, empty.requested, empty.closed) == (0, 0, 0, False)
    assert empty.stream is s and empty.device_id == gpu.ordinal
    empty.record_stream(Stream.legacy(gpu))
    gpu.launch(s, writes=[empty])
    for _ in range(3):
        empty.close()
    assert empty.closed
    with pytest.raises(ValueError, match="closed"):
        empty.record_stream(s)
    with pool.allocate(0) as other:
        assert other.ptr == 0
    del other, empty
    after = pool.stats()
    before["cuLaunchKernel"] += 1
    changed = Counter(gpu.calls) - before
    assert set(changed) <= {"cuStreamIsCapturing", "cuStreamQuery", "cuCtxPushCurrent", "cuCtxPopCurrent",
                            "cuThreadExchangeStreamCaptureMode"}  # of the two readings of statistics  # fmt: skip
    assert (after.allocated_bytes, after.blocks, after.allocations, after.frees) == (
        stats.allocated_bytes,
        stats.blocks,
        stats.allocations,
        stats.frees,
    )
    kept.close()


def test_s26_no_driver_call_at_all_for_zero_bytes(gpu: SimDevice, pool: CachingAllocator) -> None:
    before = Counter(gpu.calls)
    for _ in range(10):
        pool.allocate(0).close()
    assert Counter(gpu.calls) == before and gpu.used_bytes == 0


@pytest.mark.parametrize("nbytes", [-1, -512, -(1 << 70)])
def test_s26_a_negative_size_is_refused(gpu: SimDevice, pool: CachingAllocator, nbytes: int) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        pool.allocate(nbytes)
    assert gpu.calls.total() == 0

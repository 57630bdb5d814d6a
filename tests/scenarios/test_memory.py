"""S06 to S09, S11, S12: out of memory, limits, fit, and what belongs together."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from allocator import Allocation, CachingAllocator, Config, OutOfMemoryError, SimDevice, Stream
from allocator.config import REUSE_KINDS
from tests.scenarios.lab import KIB, MIB, Lab, identity, overlap, read, span, used, write

# -- S06: pending memory is settled before anything is given up ------------------------------------

NO_DEVICE_WAITS = frozenset({"event_dependency", "opportunistic"})


@pytest.mark.parametrize("backing", ["vmm", "malloc"])
@pytest.mark.parametrize("device_waits", [True, False])
@pytest.mark.parametrize("bounded_by", ["device", "limit"])
def test_s06_the_only_block_that_fits_is_pending_on_another_stream(
    lab: Lab, backing: str, device_waits: bool, bounded_by: str
) -> None:
    gpu = lab.gpu(memory=64 * MIB if bounded_by == "device" else 1 << 30)
    reuse = frozenset(REUSE_KINDS) if device_waits else NO_DEVICE_WAITS
    pool = lab.pool(gpu, backing=backing, limit=64 * MIB if bounded_by == "limit" else 0, reuse=reuse)
    a, b, c = Stream(gpu), Stream(gpu), Stream(gpu)
    block = used(pool, a, 64 * MIB)
    b.wait_stream(a)
    read(gpu, b, block, duration_ns=50_000_000)
    block.record_stream(b)
    where = span(block)
    block.close()
    began = gpu.now_ns
    again = pool.allocate(64 * MIB, stream=c)
    write(gpu, c, again)
    assert span(again) == where
    stats = pool.stats()
    assert stats.out_of_memory == 0
    if device_waits:
        assert gpu.now_ns == began and stats.stream_waits >= 1
        assert stats.allocations["internal_dependency"] == 1
    else:
        assert gpu.now_ns >= began + 50_000_000 and stats.stream_waits == 0
        assert stats.out_of_memory_retries["host_wait"] == 1


def test_s06_pending_memory_that_is_finished_by_now_serves_without_any_wait(lab: Lab) -> None:
    gpu = lab.gpu(memory=64 * MIB)
    pool = lab.pool(gpu)
    a, b = Stream(gpu), Stream(gpu)
    block = used(pool, a, 64 * MIB)
    block.close()
    gpu.run_until_idle()
    began = gpu.now_ns
    again = pool.allocate(64 * MIB, stream=b)
    write(gpu, b, again)
    assert gpu.now_ns == began
    stats = pool.stats()
    assert (stats.stream_waits, stats.host_synchronizations, stats.event_records) == (0, 0, 0)
    assert stats.allocations["opportunistic"] == 1


def test_s06_two_pending_pieces_that_fit_only_together_are_waited_for(lab: Lab) -> None:
    gpu = lab.gpu(memory=64 * MIB)
    pool = lab.pool(gpu)
    a, b, c = Stream(gpu), Stream(gpu), Stream(gpu)
    blocks = [used(pool, s, 32 * MIB, duration_ns=1_000_000 * i) for i, s in enumerate((a, b), 1)]
    for block in blocks:
        block.close()
    again = pool.allocate(64 * MIB, stream=c)
    write(gpu, c, again)
    assert pool.stats().out_of_memory == 0


def test_s06_what_never_finishes_ends_in_an_error_and_not_in_a_hang(lab: Lab) -> None:
    gpu = lab.gpu(memory=64 * MIB)
    pool = lab.pool(gpu, reuse=NO_DEVICE_WAITS, wait_timeout=0.5)
    a, c = Stream(gpu), Stream(gpu)
    gpu.hold(a)
    block = used(pool, a, 64 * MIB)
    block.close()
    began = gpu.now_ns
    with pytest.raises(OutOfMemoryError) as caught:
        pool.allocate(64 * MIB, stream=c)
    assert 0.5e9 <= gpu.now_ns - began <= 2e9
    assert caught.value.requested == 64 * MIB
    assert caught.value.stats["in_flight"] == 64 * MIB
    assert "\n" not in str(caught.value)
    gpu.resume(a)
    write(gpu, c, pool.allocate(64 * MIB, stream=c))


# -- S07: an error keeps nothing alive -------------------------------------------------------------


def test_s07_a_kept_error_keeps_no_memory_alive(lab: Lab) -> None:
    gpu = lab.gpu(memory=64 * MIB)
    pool = lab.pool(gpu)
    s = Stream(gpu)
    arrays = [used(pool, s, 16 * MIB) for _ in range(4)]
    refs = [weakref.ref(a) for a in arrays]
    kept: list[BaseException] = []
    for _ in range(3):
        try:
            pool.allocate(16 * MIB, stream=s)
        except OutOfMemoryError as error:
            kept.append(error)
    assert len(kept) == 3
    arrays.clear()
    assert not any(ref() for ref in refs)
    again = pool.allocate(64 * MIB, stream=s)
    write(gpu, s, again)
    assert all(isinstance(value, int) for value in kept[0].stats.values())  # type: ignore[attr-defined]


def test_s07_recovery_itself_holds_nothing_that_keeps_a_segment(lab: Lab) -> None:
    """What a callback lets go serves the very request that is being recovered, as one new piece."""
    gpu = lab.gpu(memory=64 * MIB)
    pool = lab.pool(gpu)
    s = Stream(gpu)
    arrays = [used(pool, s, 2 * MIB) for _ in range(32)]

    def let_go(nbytes: int) -> bool:
        assert nbytes == 64 * MIB
        arrays.clear()
        return True

    handle = pool.on_out_of_memory(let_go)
    big = pool.allocate(64 * MIB, stream=s)
    write(gpu, s, big)
    assert pool.stats().out_of_memory_retries["callback"] == 1
    handle.remove()
    handle.remove()


def test_s07_memory_in_a_dead_cycle_is_collected_before_giving_up(lab: Lab) -> None:
    gpu = lab.gpu(memory=64 * MIB)
    pool = lab.pool(gpu)
    s = Stream(gpu)
    cycle: list[object] = [used(pool, s, 64 * MIB)]
    cycle.append(cycle)
    del cycle
    again = pool.allocate(64 * MIB, stream=s)
    write(gpu, s, again)
    assert pool.stats().out_of_memory_retries["collect"] == 1


def test_s07_idle_memory_of_the_other_size_class_is_released_for_a_request(lab: Lab) -> None:
    gpu = lab.gpu(memory=64 * MIB)
    pool = lab.pool(gpu)
    s = Stream(gpu)
    small = [used(pool, s, 256 * KIB) for _ in range(256)]
    small.clear()
    s.synchronize()
    big = pool.allocate(64 * MIB, stream=s)
    write(gpu, s, big)
    stats = pool.stats()
    assert stats.out_of_memory_retries["release"] == 1
    assert stats.releases["out_of_memory"] == 32


def test_s07_with_everything_switched_off_the_error_comes_at_once(lab: Lab) -> None:
    gpu = lab.gpu(memory=64 * MIB)
    pool = lab.pool(
        gpu,
        reuse=frozenset[str](),
        release_on_demand=False,
        wait_on_demand=False,
        collect_on_demand=False,
    )
    called: list[int] = []

    def callback(nbytes: int) -> bool:
        called.append(nbytes)
        return True

    pool.on_out_of_memory(callback)
    a, b = Stream(gpu), Stream(gpu)
    used(pool, a, 64 * MIB, duration_ns=1000).close()
    with pytest.raises(OutOfMemoryError):
        pool.allocate(64 * MIB, stream=b)
    assert not called and gpu.now_ns == 0


# -- S08: the host is faster than the device -------------------------------------------------------


def _producer(gpu: SimDevice, pool: CachingAllocator, rounds: int, size: int) -> None:
    a, b = Stream(gpu), Stream(gpu)
    for _ in range(rounds):
        block = used(pool, a, size, duration_ns=1_000_000)
        b.wait_stream(a)
        read(gpu, b, block, duration_ns=1_000_000)
        block.record_stream(b)
        block.close()


def test_s08_pending_bytes_are_reported_and_without_a_bound_the_pool_grows(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    _producer(gpu, pool, 32, 4 * MIB)
    stats = pool.stats()
    assert gpu.now_ns == 0
    assert stats.in_flight_bytes == stats.peak_in_flight_bytes == 32 * 4 * MIB
    assert stats.oldest_in_flight_seconds >= 0


@pytest.mark.parametrize("context_events", [None, True, False])
@pytest.mark.parametrize("uses", ["auto", "declared", "assumed"])
def test_s08_above_the_bound_the_pool_waits_before_it_grows(
    lab: Lab, gpu: SimDevice, uses: str, context_events: bool | None
) -> None:
    bound = 16 * MIB
    pool = lab.pool(gpu, max_in_flight=bound, uses=uses, context_events=context_events)
    _producer(gpu, pool, 64, 4 * MIB)
    stats = pool.stats()
    assert gpu.now_ns > 0
    assert stats.peak_in_flight_bytes <= bound + 2 * 4 * MIB
    assert stats.peak_reserved_bytes <= bound + 2 * 4 * MIB
    assert stats.host_synchronizations > 0


@pytest.mark.parametrize("context_events", [None, True, False])
@pytest.mark.parametrize("uses", ["declared", "assumed"])
@pytest.mark.parametrize("rounds", [False, True], ids=["on and on", "in rounds"])
@pytest.mark.parametrize("settings", [{"max_in_flight": 8 * MIB}, {"limit": 12 * MIB}], ids=["bound", "limit"])
def test_s08_streams_in_turn_wait_for_the_oldest_of_them_and_not_for_all(
    lab: Lab, gpu: SimDevice, settings: dict[str, Any], rounds: bool, uses: str, context_events: bool | None
) -> None:
    """16 streams in turn, each with 4 MiB in flight until its work is over: three blocks serve all of them.

    In rounds: the program waits for the device after each, in a way that nobody sees.
    """
    pool = lab.pool(gpu, uses=uses, context_events=context_events, **settings)
    streams = [Stream(gpu) for _ in range(16)]
    longest = 0
    for turn in range(64):
        before = gpu.now_ns
        block = pool.allocate(4 * MIB, stream=streams[turn % 16])
        longest = max(longest, gpu.now_ns - before)
        gpu.launch(block.stream, duration_ns=1_000_000, writes=[block])
        block.close()
        if turn % 16 == 15 and rounds:
            gpu.run_until_idle()
    assert pool.stats().peak_reserved_bytes <= 12 * MIB
    assert longest <= 1_500_000
    assert pool.stats().out_of_memory == 0


def test_s08_the_wait_is_bounded_and_then_it_grows(lab: Lab, gpu: SimDevice) -> None:
    pool = lab.pool(gpu, max_in_flight=8 * MIB, wait_timeout=0.25)
    a, b, c = Stream(gpu), Stream(gpu), Stream(gpu)
    gpu.hold(b)
    for _ in range(3):
        block = used(pool, a, 4 * MIB)
        write(gpu, b, (block.ptr, 0))
        block.record_stream(b)
        block.close()
    before = gpu.now_ns
    last = pool.allocate(4 * MIB, stream=c)
    write(gpu, c, last)
    assert 0.2e9 <= gpu.now_ns - before <= 0.6e9
    assert pool.stats().out_of_memory == 0


@pytest.mark.parametrize("bound", [0, 8 * MIB])
def test_s08_the_limit_holds_whatever_is_in_flight(lab: Lab, gpu: SimDevice, bound: int) -> None:
    pool = lab.pool(gpu, limit=32 * MIB, max_in_flight=bound)
    _producer(gpu, pool, 64, 4 * MIB)
    stats = pool.stats()
    assert stats.peak_reserved_bytes <= 32 * MIB
    assert stats.out_of_memory == 0


# -- S09: fit --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backing", ["vmm", "malloc"])
@pytest.mark.parametrize("other_stream", [False, True])
def test_s09_the_smallest_block_that_is_large_enough_is_taken(
    lab: Lab, gpu: SimDevice, backing: str, other_stream: bool
) -> None:
    pool = lab.pool(gpu, backing=backing)
    s = Stream(gpu)
    sizes = [12 * MIB, 4 * MIB, 30 * MIB, 6 * MIB, 8 * MIB]
    walls, blocks = [], []
    for size in sizes:  # a live block between every two, so that none merges
        blocks.append(used(pool, s, size))
        walls.append(used(pool, s, 2 * MIB))
    places = {b.size: span(b) for b in blocks}
    blocks.clear()
    s.synchronize()
    pool.stats()
    taker = Stream(gpu) if other_stream else s
    for ask, best in ((5 * MIB, 6 * MIB), (7 * MIB + 1, 8 * MIB), (9 * MIB, 12 * MIB), (13 * MIB, 30 * MIB)):
        got = pool.allocate(ask, stream=taker)
        write(gpu, taker, got)
        assert got.size == -(-ask // 512) * 512
        assert overlap(got, places[best]) and got.ptr == places[best][0]
        blocks.append(got)
    assert pool.stats().growths <= 10


def test_s09_a_tiny_request_leaves_the_rest_of_a_huge_block_usable(gpu: SimDevice, pool: CachingAllocator) -> None:
    s, other = Stream(gpu), Stream(gpu)
    used(pool, s, 64 * MIB).close()
    s.synchronize()
    pool.stats()
    tiny = used(pool, other, 300 * KIB)  # larger than a small request: the huge block is all there is
    rest = used(pool, s, 63 * MIB)
    assert pool.stats().growths == 1
    rest.close()
    tiny.close()
    s.synchronize()
    other.synchronize()
    huge = used(pool, other, 64 * MIB)
    assert huge.size == 64 * MIB
    assert pool.stats().growths == 1


def test_s09_small_requests_share_a_page_and_never_cut_into_large_blocks(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    s = Stream(gpu)
    used(pool, s, 64 * MIB).close()
    s.synchronize()
    pool.stats()
    small = [used(pool, s, 512) for _ in range(100)]
    huge = used(pool, s, 64 * MIB)
    stats = pool.stats()
    assert huge.size == 64 * MIB and stats.reserved_bytes == 66 * MIB
    assert len({a.ptr for a in small}) == 100


@pytest.mark.parametrize("backing", ["vmm", "malloc"])
def test_s09_sizes_and_addresses_are_multiples_of_512_and_nothing_overlaps(
    lab: Lab, gpu: SimDevice, backing: str
) -> None:
    pool = lab.pool(gpu, backing=backing)
    draw = random.Random(9)
    streams = [Stream(gpu) for _ in range(3)]
    live: list[Allocation] = []
    for _ in range(600):
        if live and draw.random() < 0.45:
            live.pop(draw.randrange(len(live))).close()
        s = draw.choice(streams)
        a = used(pool, s, draw.choice([1, 511, 513, 4096, 300_000, 1_000_001, 3 * MIB]), duration_ns=100)
        assert a.ptr % 512 == 0 and a.size % 512 == 0 and a.size - 512 < a.requested <= a.size
        live.append(a)
        gpu.advance(50)
    live.sort(key=lambda a: a.ptr)
    assert all(a.ptr + a.size <= b.ptr for a, b in pairwise(live))
    pool.check()


# -- S11: plain allocations at touching addresses --------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_s11_plain_segments_never_merge_and_go_back_as_they_came(lab: Lab, seed: int) -> None:
    gpu = lab.gpu(touching=True)
    pool = lab.pool(gpu, backing="malloc")
    s = Stream(gpu)
    blocks = [used(pool, s, 4 * MIB) for _ in range(6)]
    places = sorted(span(b) for b in blocks)
    assert all(p + n == q for (p, n), (q, _) in pairwise(places)), "the device must let them touch"
    random.Random(seed).shuffle(blocks)
    while blocks:
        blocks.pop().close()
        pool.check()
    s.synchronize()
    segments = pool.snapshot()["segments"]
    assert sorted((g["address"], g["total_size"]) for g in segments) == places
    assert all(len(g["blocks"]) == 1 for g in segments)
    eight = used(pool, s, 8 * MIB)
    assert not any(overlap(eight, place) for place in places)
    eight.close()
    s.synchronize()
    assert pool.trim() == 32 * MIB
    assert gpu.calls["cuMemFree"] == 7  # each with the address it came with: the device refuses others


def test_s11_virtual_memory_does_merge_across_segments(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    blocks = [used(pool, s, 4 * MIB) for _ in range(6)]
    blocks.clear()
    s.synchronize()
    pool.stats()
    used(pool, s, 24 * MIB)
    assert pool.stats().reserved_bytes == 24 * MIB


def test_s11_a_split_plain_segment_is_whole_again_before_it_goes(lab: Lab) -> None:
    gpu = lab.gpu(touching=True)
    pool = lab.pool(gpu, backing="malloc")
    s = Stream(gpu)
    used(pool, s, 8 * MIB).close()
    parts = [used(pool, s, 2 * MIB) for _ in range(4)]
    s.synchronize()
    for i in (2, 0, 3):
        parts[i].close()
    s.synchronize()
    assert pool.trim() == 0
    parts[1].close()
    s.synchronize()
    assert pool.trim() == 8 * MIB


# -- S12: the index is emptied in between ----------------------------------------------------------


@pytest.mark.parametrize("backing", ["vmm", "malloc"])
@pytest.mark.parametrize("between", ["trim", "snapshot", "stats", "settle", "set_limit", "check", "grow"])
def test_s12_a_free_succeeds_whatever_happened_to_the_index_in_between(
    lab: Lab, gpu: SimDevice, backing: str, between: str
) -> None:
    pool = lab.pool(gpu, backing=backing)
    a, b = Stream(gpu), Stream(gpu)
    live = [used(pool, s, size) for s in (a, b) for size in (KIB, MIB, 8 * MIB)]
    for size in (KIB, MIB, 8 * MIB):
        used(pool, a, size).close()
    gpu.run_until_idle()
    match between:
        case "trim":
            pool.trim()
        case "snapshot":
            pool.snapshot()
        case "stats":
            pool.stats()
        case "settle":
            pool.settle()
        case "set_limit":
            pool.set_limit(1)
            pool.set_limit(0)
        case "check":
            pool.check()
        case "grow":
            live.append(used(pool, b, 64 * MIB))
    for one in live:
        one.close()
        identity(pool)
    gpu.run_until_idle()
    a.synchronize()
    b.synchronize()
    stats = pool.stats()
    assert (stats.allocated_bytes, stats.in_flight_bytes) == (0, 0)
    assert stats.idle_bytes == stats.reserved_bytes == gpu.used_bytes


@pytest.mark.parametrize("backing", ["vmm", "malloc"])
@pytest.mark.parametrize("uses", ["declared", "assumed"])
@pytest.mark.parametrize("seed", range(4))
def test_s12_after_any_sequence_every_byte_belongs_to_one_block(lab: Lab, backing: str, uses: str, seed: int) -> None:
    gpu = lab.gpu(memory=256 * MIB, touching=bool(seed % 2))
    pool = lab.pool(gpu, backing=backing, uses=uses, limit=192 * MIB, wait_timeout=0.01, seal_frees=8)
    draw = random.Random(seed)
    streams = [Stream(gpu, non_blocking=bool(i % 2)) for i in range(3)] + [Stream.legacy(gpu)]
    live: list[Allocation] = []
    for _ in range(400):
        match draw.randrange(10):
            case 0 | 1 | 2 | 3:
                s = draw.choice(streams)
                size = draw.choice([100, 5000, 200_000, MIB, 3 * MIB, 17 * MIB])
                try:
                    live.append(used(pool, s, size, duration_ns=draw.randrange(2000)))
                except OutOfMemoryError:
                    live.clear()
            case 4 | 5 | 6 if live:
                live.pop(draw.randrange(len(live))).close()
            case 7 if live:
                one, s = draw.choice(live), draw.choice(streams)
                s.wait_stream(one.stream)
                read(gpu, s, one, duration_ns=500)
                one.record_stream(s)
            case 8:
                gpu.advance(draw.randrange(1500))
            case 9:
                calls: list[Callable[[], object]] = [pool.trim, pool.snapshot, pool.stats, pool.check]
                calls.append(lambda: pool.trim(64 * MIB))
                draw.choice(calls)()
        if draw.random() < 0.1:
            identity(pool)
            assert pool.stats().reserved_bytes == gpu.used_bytes
    pool.check()
    live.clear()


def test_s12_control_a_block_that_is_lost_is_noticed() -> None:
    """`check()` would see it: take one block out of the shelves behind the pool's back."""
    gpu = SimDevice(memory=1 << 30)
    pool = CachingAllocator(gpu, config=Config())
    used(pool, Stream(gpu), MIB).close()
    gpu.run_until_idle()
    pool.settle()
    shelf = pool._shelves.idle[1]
    shelf.remove(next(iter(shelf)))
    with pytest.raises(AssertionError):
        pool.check()

"""The public API of a pool, on every backing and device."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise
from typing import Any

import pytest

import allocator
from allocator import (
    Allocation,
    AllocatorError,
    CachingAllocator,
    Config,
    MemoryResource,
    OutOfMemoryError,
    PoolClosed,
    Stats,
    Stream,
    StreamClosed,
)
from allocator.config import REUSE_KINDS
from tests.conformance.conftest import MIB, Bench

KIB = 1 << 10


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text and "\n" not in text
    return text


def balanced(pool: CachingAllocator) -> Stats:
    """The statistics, after what always holds of them."""
    s = pool.stats()
    assert s.reserved_bytes == s.allocated_bytes + s.in_flight_bytes + s.idle_bytes + s.private_bytes
    assert s.idle_bytes == s.releasable_bytes + s.stranded_bytes
    assert 0 <= s.requested_bytes <= s.allocated_bytes <= s.peak_allocated_bytes
    assert s.allocated_bytes <= s.reserved_bytes <= s.peak_reserved_bytes
    assert 0 <= s.in_flight_bytes <= s.peak_in_flight_bytes
    assert 0 <= s.largest_free_block_bytes <= s.idle_bytes
    assert 0 <= s.external_fragmentation_ratio <= 1 and 0 <= s.internal_fragmentation_ratio <= 1
    assert set(s.allocations) == set(s.allocation_bytes) == set(REUSE_KINDS)
    assert set(s.blocks) == {"live", "retired", "idle"} and min(s.blocks.values()) >= 0
    assert set(s.frees) == {"same_stream", "cross_stream"}
    assert s.blocks["live"] == sum(s.allocations.values()) - sum(s.frees.values())
    assert sum(s.request_size_bytes.values()) == sum(s.allocations.values())
    assert s.growth_bytes - sum(s.release_bytes.values()) == s.reserved_bytes
    assert s.limit_bytes == 0 or s.reserved_bytes <= max(s.limit_bytes, s.allocated_bytes + s.in_flight_bytes)
    return s


# -- allocate and free ------------------------------------------------------------------------------


def test_an_allocation_says_what_it_is(bench: Bench, pool: CachingAllocator) -> None:
    s = Stream(bench.device, name="mine")
    a = pool.allocate(1000, stream=s)
    assert isinstance(a, Allocation) and isinstance(pool, MemoryResource)
    assert (a.size, a.requested, a.device_id, a.closed) == (1024, 1000, bench.device.ordinal, False)
    assert a.ptr > 0 and a.ptr % 512 == 0 and a.stream is s
    assert hex(a.ptr) in repr(a)
    ptr = a.ptr
    a.close()
    assert a.closed and a.ptr == ptr and "closed" in repr(a)
    a.close()
    assert balanced(pool).blocks["live"] == 0


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 256 * KIB, 256 * KIB + 1, 2 * MIB, 2 * MIB + 1, 50 * MIB])
def test_sizes_are_rounded_to_512(pool: CachingAllocator, nbytes: int) -> None:
    with pool.allocate(nbytes) as a:
        assert a.size == -(-nbytes // 512) * 512 and a.requested == nbytes
        s = balanced(pool)
        assert (s.allocated_bytes, s.requested_bytes) == (a.size, nbytes)
    assert balanced(pool).allocated_bytes == 0


def test_an_allocation_goes_with_its_last_reference(pool: CachingAllocator) -> None:
    a = pool.allocate(MIB)
    ref = weakref.ref(a)
    del a
    assert ref() is None
    assert balanced(pool).allocated_bytes == 0


def test_an_allocation_in_a_dead_cycle_is_freed(pool: CachingAllocator) -> None:
    cycle: list[Any] = [pool.allocate(MIB) for _ in range(5)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert balanced(pool).blocks["live"] == 0


def test_live_allocations_never_overlap(pool: CachingAllocator) -> None:
    live = [pool.allocate(size) for size in (512, 5000, MIB, 3 * MIB) for _ in range(20)]
    spans = sorted((a.ptr, a.ptr + a.size) for a in live)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize("wrong", [1.0, "1", None, True, False, b"1", [1], 1j])
def test_a_size_that_is_no_integer_is_a_type_error(pool: CachingAllocator, wrong: Any) -> None:
    with pytest.raises(TypeError, match="nbytes must be an integer") as caught:
        pool.allocate(wrong)
    one_line(caught.value)


def test_a_negative_size_is_a_value_error(pool: CachingAllocator) -> None:
    with pytest.raises(ValueError, match="negative"):
        pool.allocate(-1)


def test_whatever_counts_as_an_integer_is_a_size(pool: CachingAllocator) -> None:
    class Index:
        def __index__(self) -> int:
            return 700

    assert pool.allocate(Index()).size == 1024  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["int32", "int64", "uint64", "intp"])
def test_numpy_integers_are_sizes(pool: CachingAllocator, kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    a = pool.allocate(getattr(numpy, kind)(1000))
    assert (a.requested, type(a.requested), a.size) == (1000, int, 1024)


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 63, 1 << 64, 1 << 100])
def test_more_than_the_device_has_is_out_of_memory_at_once(pool: CachingAllocator, nbytes: int) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        pool.allocate(nbytes)
    error = caught.value
    assert isinstance(error, MemoryError) and isinstance(error, AllocatorError)
    assert error.requested >= nbytes and error.limit == 0
    assert all(isinstance(v, int) for v in error.stats.values())
    one_line(error)
    assert balanced(pool).out_of_memory == 1
    pool.allocate(1).close()


def test_the_same_stream_gets_its_memory_back_without_a_driver_call(bench: Bench, pool: CachingAllocator) -> None:
    s = Stream(bench.device)
    a = pool.allocate(MIB, stream=s)
    bench.work(s, 20)
    ptr = a.ptr
    before = sum(bench.device.calls.values())
    a.close()
    b = pool.allocate(MIB, stream=s)
    assert b.ptr == ptr and sum(bench.device.calls.values()) == before
    assert balanced(pool).allocations["same_stream"] == 1


def test_no_driver_call_is_made_before_the_first_allocation(bench: Bench) -> None:
    before = dict(bench.device.calls)
    pool = bench.pool()
    pool.allocate(0).close()
    repr(pool)
    assert dict(bench.device.calls) == before


# -- names, config, closing -------------------------------------------------------------------------


def test_a_pool_says_what_it_is(bench: Bench) -> None:
    pool = bench.pool(name="training", limit=64 * MIB)
    assert (pool.name, pool.device, pool.closed) == ("training", bench.device, False)
    assert pool.config == Config(backing=bench.backing, limit=64 * MIB)
    assert "training" in repr(pool)
    assert len(bench.pool(name="x" * 100).name) == 40
    assert bench.pool().name != bench.pool().name


def test_with_closes_the_pool(bench: Bench) -> None:
    with bench.pool() as pool:
        pool.allocate(MIB).close()
    assert pool.closed
    with pytest.raises(PoolClosed) as caught:
        pool.allocate(1)
    assert pool.name in one_line(caught.value)
    pool.close()


def test_live_allocations_of_a_closed_pool_stay_valid_and_their_memory_goes_with_them(bench: Bench) -> None:
    pool = bench.pool()
    s = Stream(bench.device)
    a = pool.allocate(MIB, stream=s)
    pool.close()
    assert balanced(pool).allocated_bytes == MIB
    a.record_stream(Stream.legacy(bench.device))
    a.close()
    bench.run_dry()
    with bench.pool() as other:
        other.stats()
    assert pool.stats().reserved_bytes == 0


def test_a_bool_is_no_device() -> None:
    with pytest.raises(TypeError):
        CachingAllocator(True)


# -- record_stream, close(stream) -------------------------------------------------------------------


def test_record_stream_on_a_closed_allocation_is_a_value_error(bench: Bench, pool: CachingAllocator) -> None:
    a = pool.allocate(MIB)
    a.close()
    with pytest.raises(ValueError, match="record_stream on a closed allocation") as caught:
        a.record_stream(Stream(bench.device))
    one_line(caught.value)


def test_a_declared_use_makes_the_free_a_cross_stream_one(bench: Bench, pool: CachingAllocator) -> None:
    s, other = Stream(bench.device), Stream(bench.device)
    a = pool.allocate(MIB, stream=s)
    a.record_stream(s)
    a.close()
    b = pool.allocate(MIB, stream=s)
    b.record_stream(other)
    b.record_stream(other)
    b.close()
    c = pool.allocate(MIB, stream=s)
    c.close(other)
    assert balanced(pool).frees == {"same_stream": 1, "cross_stream": 2}


def test_close_never_raises(bench: Bench, pool: CachingAllocator, caplog: pytest.LogCaptureFixture) -> None:
    closed = Stream(bench.device)
    closed.close()
    for wrong in (object(), -1, "s", True, closed, 1.5):
        pool.allocate(MIB).close(wrong)
    caplog.clear()
    gc.collect()
    bench.run_dry()
    pool.settle()
    assert balanced(pool).blocks["live"] == 0


# -- statistics -------------------------------------------------------------------------------------


def test_the_statistics_add_up_through_a_life(bench: Bench, pool: CachingAllocator) -> None:
    a, b = Stream(bench.device), Stream(bench.device)
    total = 0
    for i in range(200):
        s = (a, b)[i % 2]
        with pool.allocate((i % 7 + 1) * 300_000, stream=s):
            total += 1
            bench.work(s, 0.01)
        if i % 20 == 0:
            balanced(pool)
        if i % 50 == 0:
            pool.trim()
            pool.check()
    bench.run_dry()
    stats = balanced(pool)
    assert sum(stats.allocations.values()) == total
    assert sum(stats.allocation_bytes.values()) >= 200 * 300_000
    assert stats.device_size_bytes == bench.device.total_memory
    assert 0 < stats.device_free_bytes <= stats.device_size_bytes
    assert stats.allocations["new_memory"] >= 1 and stats.growths >= 1
    with pytest.raises(AttributeError):
        stats.growths = 1  # type: ignore[misc]


def test_reuse_kinds_are_told_apart_and_add_up(bench: Bench) -> None:
    pool = bench.pool()
    a, b, c = (Stream(bench.device) for _ in range(3))
    size = 4 * MIB
    pool.allocate(size, stream=a).close()  # new
    x = pool.allocate(size, stream=a)  # same stream
    bench.work(a, 50)
    x.close()
    pool.check()
    b.wait_stream(a)
    y = pool.allocate(size, stream=b)  # covered by what B waits for
    assert y.ptr == x.ptr
    y.close()
    bench.run_dry()
    z = pool.allocate(size, stream=c)  # finished
    assert z.ptr == x.ptr
    z.close()
    s = balanced(pool)
    assert s.allocations == {
        "same_stream": 1,
        "new_memory": 1,
        "event_dependency": 1,
        "opportunistic": 1,
        "internal_dependency": 0,
    }
    assert s.allocation_bytes["event_dependency"] == size
    pool.trim()
    pool.set_limit(size)
    x = pool.allocate(size, stream=a)
    bench.work(a, 50)
    x.close()
    pool.allocate(size, stream=b).close()  # the limit leaves nothing else: B waits for A
    assert balanced(pool).allocations["internal_dependency"] == 1


@pytest.mark.parametrize("kind", ["event_dependency", "opportunistic", "internal_dependency"])
def test_a_kind_of_reuse_that_is_not_allowed_does_not_happen(bench: Bench, kind: str) -> None:
    pool = bench.pool(reuse=frozenset(REUSE_KINDS) - {kind}, limit=64 * MIB, wait_timeout=0.01)
    streams = [Stream(bench.device) for _ in range(3)]
    for i in range(60):
        s = streams[i % 3]
        if i % 4 == 0:
            s.wait_stream(streams[(i + 1) % 3])
        try:
            with pool.allocate(8 * MIB, stream=s):
                bench.work(s, 0.5)
        except OutOfMemoryError:
            bench.run_dry()
        if i % 10 == 0:
            bench.run_dry()
    assert balanced(pool).allocations[kind] == 0


def test_peaks_are_kept_and_start_again(bench: Bench, pool: CachingAllocator) -> None:
    s = Stream(bench.device)
    a, b = pool.allocate(8 * MIB, stream=s), pool.allocate(4 * MIB, stream=s)
    b.close()
    a.close()
    top = balanced(pool)
    assert top.peak_allocated_bytes == 12 * MIB == top.peak_reserved_bytes
    bench.run_dry()
    pool.settle()
    assert balanced(pool).peak_in_flight_bytes == 12 * MIB
    pool.trim()
    kept = pool.allocate(2 * MIB, stream=s)
    pool.reset_peaks()
    now = balanced(pool)
    assert now.peak_allocated_bytes == now.allocated_bytes == 2 * MIB
    assert now.peak_reserved_bytes == now.reserved_bytes == 2 * MIB
    assert now.peak_in_flight_bytes == now.in_flight_bytes == 0
    kept.close()


def test_figures_by_stream_are_given_on_request(bench: Bench, pool: CachingAllocator) -> None:
    s = Stream(bench.device, name="loader")
    kept = pool.allocate(MIB, stream=s)
    assert dict(pool.stats().stream_allocated_bytes) == {}
    assert pool.stats(per_stream=True).stream_allocated_bytes["loader"] == MIB
    many = [Stream(bench.device, name=f"s{i}") for i in range(50)]
    live = [pool.allocate(MIB, stream=one) for one in many]
    by = pool.stats(per_stream=True).stream_allocated_bytes
    assert len(by) <= 33 and sum(by.values()) == 51 * MIB
    live.clear()
    kept.close()


def test_histograms_count_every_request(pool: CachingAllocator) -> None:
    for nbytes in (1, 512, 513, 2048, 2049, 1 << 20):
        pool.allocate(nbytes).close()
    h = pool.stats().request_size_bytes
    assert h[512] == 2 and h[2048] == 2 and sum(h.values()) == len([1, 512, 513, 2048, 2049, 1 << 20])
    assert h.sum == 1 + 512 + 513 + 2048 + 2049 + (1 << 20)
    assert list(h)[-1] == float("inf")


# -- snapshot ---------------------------------------------------------------------------------------


def test_the_snapshot_has_the_shape_that_pytorchs_viewer_reads(bench: Bench, pool: CachingAllocator) -> None:
    s, other = Stream(bench.device), Stream(bench.device)
    live = pool.allocate(3000, stream=s)
    big = pool.allocate(4 * MIB, stream=s)
    pending = pool.allocate(4 * MIB, stream=s)
    bench.work(other, 50)
    pending.record_stream(other)
    pending.close()
    idle = pool.allocate(8 * MIB, stream=s)
    shot = pool.snapshot()
    assert set(shot) >= {"segments", "device_traces"}
    assert isinstance(shot["device_traces"], list) and all(isinstance(t, list) for t in shot["device_traces"])
    states: dict[int, str] = {}
    for segment in shot["segments"]:
        assert {"device", "address", "total_size", "stream", "blocks"} <= set(segment)
        assert segment["device"] == bench.device.ordinal
        at = segment["address"]
        for block in segment["blocks"]:
            assert {"size", "requested_size", "state", "frames"} <= set(block)
            assert block["state"] in ("active_allocated", "active_pending_free", "inactive")
            assert block["frames"] == []
            states[at] = block["state"]
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
    assert sum(g["total_size"] for g in shot["segments"]) == pool.stats().reserved_bytes
    assert states[live.ptr] == states[big.ptr] == states[idle.ptr] == "active_allocated"
    assert any(state == "active_pending_free" for state in states.values())
    requested = [b["requested_size"] for g in shot["segments"] for b in g["blocks"] if b["state"] == "active_allocated"]
    assert sorted(requested) == sorted([3000, 4 * MIB, 8 * MIB])
    bench.run_dry()
    for one in (live, big, idle):
        one.close()
    pool.settle()
    assert {b["state"] for g in pool.snapshot()["segments"] for b in g["blocks"]} == {"inactive"}


def test_an_empty_pool_has_an_empty_snapshot(pool: CachingAllocator) -> None:
    assert pool.snapshot()["segments"] == []


# -- trim, limits, settle ---------------------------------------------------------------------------


def test_trim_keeps_what_it_is_told_to_keep(bench: Bench, pool: CachingAllocator) -> None:
    s = Stream(bench.device)
    blocks = [pool.allocate(4 * MIB, stream=s) for _ in range(8)]
    kept = blocks.pop()
    blocks.clear()
    s.synchronize()
    assert pool.trim(keep=1 << 40) == 0
    assert pool.trim(keep=16 * MIB) == 16 * MIB
    assert balanced(pool).reserved_bytes == 16 * MIB
    assert pool.trim() == 12 * MIB
    s2 = balanced(pool)
    assert s2.reserved_bytes == s2.allocated_bytes == kept.size
    assert s2.releases["trim"] == 7 and s2.release_bytes["trim"] == 28 * MIB
    assert pool.trim() == 0


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "1MiB", None])
def test_bad_sizes_are_refused_by_trim_and_set_limit(pool: CachingAllocator, wrong: Any) -> None:
    for call in (lambda: pool.trim(wrong), lambda: pool.set_limit(wrong)):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        one_line(caught.value)


def test_a_limit_is_never_passed(bench: Bench) -> None:
    pool = bench.pool(limit=20 * MIB, wait_timeout=0.01)
    a = pool.allocate(16 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        pool.allocate(8 * MIB)
    assert caught.value.limit == 20 * MIB and caught.value.requested == 8 * MIB
    assert "20.00 MiB" in one_line(caught.value)
    b = pool.allocate(4 * MIB)
    assert balanced(pool).reserved_bytes == 20 * MIB
    a.close()
    b.close()


def test_a_limit_below_what_is_reserved_takes_idle_memory_at_once_and_the_rest_as_it_is_freed(bench: Bench) -> None:
    pool = bench.pool(wait_timeout=0.01)
    s = Stream(bench.device)
    live = [pool.allocate(4 * MIB, stream=s) for _ in range(4)]
    idle = [pool.allocate(4 * MIB, stream=s) for _ in range(4)]
    idle.clear()
    s.synchronize()
    pool.set_limit(6 * MIB)
    assert balanced(pool).reserved_bytes == 16 * MIB
    with pytest.raises(OutOfMemoryError):
        pool.allocate(4 * MIB, stream=s)
    live.pop()
    live.pop()
    live.pop()
    s.synchronize()
    pool.allocate(512, stream=s).close()
    s.synchronize()
    pool.stats()
    pool.allocate(MIB, stream=s).close()
    assert balanced(pool).reserved_bytes <= 6 * MIB
    pool.set_limit(0)
    pool.allocate(32 * MIB, stream=s).close()
    live.clear()


def test_settle_waits_until_nothing_is_in_flight(bench: Bench, pool: CachingAllocator) -> None:
    streams = [Stream(bench.device, non_blocking=bool(i % 2)) for i in range(3)] + [Stream.legacy(bench.device)]
    for s in streams:
        a = pool.allocate(4 * MIB, stream=s)
        bench.work(s, 5)
        a.close()
    pool.settle()
    s2 = balanced(pool)
    assert s2.in_flight_bytes == 0 and s2.idle_bytes == s2.reserved_bytes
    assert all(s.query() for s in streams)


def test_abandon_is_for_poisoned_streams_only(bench: Bench, pool: CachingAllocator) -> None:
    s = Stream(bench.device)
    with pytest.raises(ValueError, match="not poisoned") as caught:
        pool.abandon(s)
    one_line(caught.value)


# -- out of memory ----------------------------------------------------------------------------------


def test_callbacks_run_before_the_error_and_can_save_the_request(bench: Bench) -> None:
    pool = bench.pool(limit=16 * MIB, wait_timeout=0.01)
    s = Stream(bench.device)
    kept = [pool.allocate(16 * MIB, stream=s)]
    asked: list[int] = []

    def no(nbytes: int) -> bool:
        asked.append(nbytes)
        return False

    def yes(nbytes: int) -> bool:
        kept.clear()
        return True

    first, second = pool.on_out_of_memory(no), pool.on_out_of_memory(yes)
    a = pool.allocate(16 * MIB, stream=s)
    assert asked == [16 * MIB]
    assert balanced(pool).out_of_memory_retries["callback"] == 1
    second.remove()
    with pytest.raises(OutOfMemoryError):
        pool.allocate(MIB, stream=s)
    assert len(asked) == 2
    first.remove()
    first.remove()
    with pytest.raises(OutOfMemoryError):
        pool.allocate(MIB, stream=s)
    assert len(asked) == 2
    a.close()


def test_a_callback_must_be_callable(pool: CachingAllocator) -> None:
    with pytest.raises(TypeError, match="callable"):
        pool.on_out_of_memory(3)  # type: ignore[arg-type]


# -- streams that are refused -----------------------------------------------------------------------


def test_a_closed_stream_is_refused(bench: Bench, pool: CachingAllocator) -> None:
    s = Stream(bench.device)
    a = pool.allocate(MIB, stream=s)
    s.close()
    for call in (lambda: pool.allocate(MIB, stream=s), lambda: pool.allocate(MIB, stream=s), s.record_event):
        with pytest.raises(StreamClosed) as caught:
            call()
        one_line(caught.value)
    assert a.stream is s and s.closed
    a.close()


@pytest.mark.parametrize("wrong", [object(), "stream", 1.5, True, [], {}])
def test_what_is_no_stream_is_a_type_error(pool: CachingAllocator, wrong: Any) -> None:
    with pytest.raises(TypeError) as caught:
        pool.allocate(MIB, stream=wrong)
    one_line(caught.value)
    assert balanced(pool).reserved_bytes == 0


def test_a_negative_handle_is_a_value_error(pool: CachingAllocator) -> None:
    with pytest.raises(ValueError, match="negative"):
        pool.allocate(MIB, stream=-1)


def test_a_stream_of_another_device_is_refused(bench: Bench, pool: CachingAllocator) -> None:
    elsewhere = allocator.SimDevice(memory=1 << 24, ordinal=7)
    with pytest.raises(ValueError, match="sim:7") as caught:
        pool.allocate(MIB, stream=Stream(elsewhere))
    one_line(caught.value)


def test_two_pools_may_share_a_stream(bench: Bench) -> None:
    first, second = bench.pool(), bench.pool()
    s = Stream(bench.device)
    a, b = first.allocate(MIB, stream=s), second.allocate(MIB, stream=s)
    assert a.ptr != b.ptr
    a.close()
    b.close()
    assert first.allocate(MIB, stream=s).ptr == a.ptr
    assert second.allocate(MIB, stream=s).ptr == b.ptr

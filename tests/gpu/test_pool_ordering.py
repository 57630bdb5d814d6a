"""The pool on a GPU: who gets freed memory while a stream is held.  R3, R5, R8, R9, S01 to S04, S22, S26, S33 to S35.

Each stream stands still behind a latch, so "may not be reused yet" and "may be reused now" are facts, not timing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pools import MIB, SIZE, Bench, overlap, span
from rig import RELAXED, Rig

from allocator import CachingAllocator, Event, Stream
from allocator.devices import PER_THREAD


@pytest.fixture
def bench(rig: Rig) -> Iterator[Bench]:
    bench = Bench(rig)
    yield bench
    bench.close()


@pytest.fixture
def pool(bench: Bench) -> CachingAllocator:
    return bench.pool()


def test_the_owner_gets_its_block_back_at_once_while_it_is_held(bench: Bench, pool: CachingAllocator) -> None:
    a = bench.stream()
    x = pool.allocate(SIZE, stream=a)
    latch = bench.rig.hold(a.handle)
    bench.fill(a, x, 1)
    before = sum(bench.gpu.calls.values())
    x.close()
    y = pool.allocate(SIZE, stream=a)
    assert sum(bench.gpu.calls.values()) == before
    assert y.ptr == x.ptr
    bench.fill(a, y, 2)
    latch.release()
    assert bench.mismatches(a, y, 2) == 0


def test_s01_another_stream_gets_it_only_once_the_owner_is_done(bench: Bench, pool: CachingAllocator) -> None:
    a, b = bench.stream(), bench.stream()
    x = pool.allocate(SIZE, stream=a)
    latch = bench.rig.hold(a.handle)
    bench.fill(a, x, 1)
    where = span(x)
    x.close()
    y = pool.allocate(SIZE, stream=b)
    assert not overlap(y, where)
    bench.fill(b, y, 2)
    assert bench.mismatches(b, y, 2) == 0
    assert pool.stats().in_flight_bytes == SIZE
    latch.release()
    a.synchronize()
    z = pool.allocate(SIZE, stream=b)
    assert span(z) == where
    bench.fill(b, z, 3)
    assert bench.mismatches(b, z, 3) == 0


def test_s01_the_rest_of_a_split_block_waits_as_well(bench: Bench, pool: CachingAllocator) -> None:
    a, c = bench.stream(), bench.stream()
    x = pool.allocate(4 * SIZE, stream=a)
    latch = bench.rig.hold(a.handle)
    bench.fill(a, x, 1)
    where = span(x)
    x.close()
    piece = pool.allocate(SIZE, stream=a)
    assert overlap(piece, where)
    other = pool.allocate(SIZE, stream=c)
    assert not overlap(other, where)
    bench.fill(a, piece, 2)
    latch.release()
    assert bench.mismatches(a, piece, 2) == 0


def test_s02_a_declared_use_keeps_the_owner_away(bench: Bench, pool: CachingAllocator) -> None:
    a, b = bench.stream(), bench.stream()
    x = pool.allocate(SIZE, stream=a)
    bench.fill(a, x, 1)
    b.wait_stream(a)
    a.synchronize()
    result = bench.gpu.mem_alloc(512)
    bench.kernels.cu("cuMemsetD32", result, 0, 1)
    latch = bench.rig.hold(b.handle)
    bench.kernels.verify(b.handle, x.ptr, x.size // 4, 1, result)
    x.record_stream(b)
    where = span(x)
    x.close()
    y = pool.allocate(SIZE, stream=a)
    assert not overlap(y, where)
    bench.fill(a, y, 2)
    a.synchronize()
    latch.release()
    b.synchronize()
    assert bench.kernels.read_word(b.handle, result) == 0
    z = pool.allocate(SIZE, stream=a)
    assert span(z) == where
    bench.gpu.mem_free(result)


def test_s03_a_new_stream_under_an_old_handle_is_another_one(bench: Bench, pool: CachingAllocator) -> None:
    old = bench.stream()
    x = pool.allocate(SIZE, stream=old)
    latch = bench.rig.hold(old.handle)
    bench.fill(old, x, 1)
    handle, where = old.handle, span(x)
    x.close()
    old.close()
    new = bench.stream()
    for _ in range(20):
        if new.handle == handle:
            break
        new = bench.stream()
    y = pool.allocate(SIZE, stream=new)
    assert not overlap(y, where)
    bench.fill(new, y, 2)
    assert bench.mismatches(new, y, 2) == 0
    latch.release()
    bench.gpu.ctx_synchronize()
    pool.stats()
    assert span(pool.allocate(SIZE, stream=new)) == where  # not lost


def test_s04_per_thread_streams_share_a_handle_and_nothing_else(bench: Bench, pool: CachingAllocator) -> None:
    x = pool.allocate(SIZE, stream=PER_THREAD)
    latch = bench.rig.hold(PER_THREAD)
    bench.kernels.fill(PER_THREAD, x.ptr, x.size // 4, 1)
    where = span(x)
    x.close()

    def other_thread() -> bool:
        with pool.allocate(SIZE, stream=PER_THREAD) as y:
            Stream.per_thread(bench.gpu).synchronize()
            return overlap(y, where)

    assert bench.rig.in_thread(other_thread) is False
    latch.release()
    Stream.per_thread(bench.gpu).synchronize()
    assert span(pool.allocate(SIZE, stream=PER_THREAD)) == where


def test_s04_null_and_legacy_are_one_stream(bench: Bench, pool: CachingAllocator) -> None:
    x = pool.allocate(SIZE, stream=0)
    x.close()
    assert pool.allocate(SIZE, stream=1).ptr == x.ptr


def test_s34_the_stream_that_a_free_names_keeps_the_owner_away(bench: Bench, pool: CachingAllocator) -> None:
    a = bench.stream()
    named = bench.stream()
    x = pool.allocate(SIZE, stream=a)
    latch = bench.rig.hold(named.handle)
    bench.fill(named, x, 1)
    where = span(x)
    x.close(named.handle)  # as a bare handle
    y = pool.allocate(SIZE, stream=a)
    assert not overlap(y, where)
    latch.release()
    named.synchronize()
    assert span(pool.allocate(SIZE, stream=a)) == where


def _read_elsewhere(bench: Bench, pool: CachingAllocator, *, assumed: bool) -> tuple[bool, int]:
    """S33: made on A, read on B, dropped; C asks.  (C got the bytes, words that B read wrong)."""
    a, b, c = bench.stream(), bench.stream(), bench.stream()
    x = pool.allocate(SIZE, stream=a, assumed=assumed)
    result = bench.gpu.mem_alloc(512)
    bench.kernels.cu("cuMemsetD32", result, 0, 1)
    bench.fill(a, x, 1)
    b.wait_stream(a)
    a.synchronize()
    latch = bench.rig.hold(b.handle)
    bench.kernels.verify(b.handle, x.ptr, x.size // 4, 1, result)
    where = span(x)
    del x
    y = pool.allocate(SIZE, stream=c, assumed=assumed)
    a.wait_event(b.record_event())
    bench.fill(c, y, 2)
    c.synchronize()
    latch.release()
    b.synchronize()
    wrong = bench.kernels.read_word(b.handle, result)
    bench.gpu.ctx_synchronize()
    bench.gpu.mem_free(result)
    return overlap(y, where), wrong


@pytest.mark.parametrize("context_events", [False, True])
def test_s33_an_undeclared_read_keeps_a_third_stream_away(bench: Bench, context_events: bool) -> None:
    if context_events and not bench.gpu.supports_context_events:
        pytest.skip("this driver has no cuCtxRecordEvent")
    pool = bench.pool(uses="auto", context_events=context_events)
    assert _read_elsewhere(bench, pool, assumed=True) == (False, 0)


def test_s33_control_with_declared_uses_only_the_very_program_is_corrupt(bench: Bench) -> None:
    got, wrong = _read_elsewhere(bench, bench.pool(uses="declared"), assumed=True)
    assert got
    assert wrong == SIZE // 4


def test_s35_an_event_recorded_again_teaches_nothing(bench: Bench, pool: CachingAllocator) -> None:
    a, b, other = bench.stream(), bench.stream(), bench.stream()
    x = pool.allocate(SIZE, stream=a)
    latch = bench.rig.hold(a.handle)
    bench.fill(a, x, 1)
    where = span(x)
    x.close()
    pool.check()  # the free is stamped
    event = a.record_event()
    event.record(other)
    b.wait_event(event)
    y = pool.allocate(SIZE, stream=b)
    assert not overlap(y, where)
    bench.fill(b, y, 2)
    assert bench.mismatches(b, y, 2) == 0
    latch.release()


def test_s35_an_event_that_is_waited_for_does_teach(bench: Bench, pool: CachingAllocator) -> None:
    a, b = bench.stream(), bench.stream()
    x = pool.allocate(SIZE, stream=a)
    latch = bench.rig.hold(a.handle)
    bench.fill(a, x, 1)
    where = span(x)
    x.close()
    pool.check()
    b.wait_event(a.record_event())
    y = pool.allocate(SIZE, stream=b)
    assert span(y) == where
    bench.fill(b, y, 2)
    latch.release()
    assert bench.mismatches(b, y, 2) == 0


def test_s35_records_and_waits_inside_a_capture_order_nothing(bench: Bench, pool: CachingAllocator) -> None:
    a, captured, b = bench.stream(), bench.stream(), bench.stream()
    x = pool.allocate(SIZE, stream=a)
    latch = bench.rig.hold(a.handle)
    bench.fill(a, x, 1)
    where = span(x)
    x.close()
    pool.check()
    event = a.record_event()
    with bench.rig.capturing(captured.handle, RELAXED):
        event.record(captured)
    event.record(b)
    b.wait_event(event)
    y = pool.allocate(SIZE, stream=b)
    assert not overlap(y, where)
    latch.release()


def test_s22_the_last_reference_dies_in_a_thread_that_never_used_the_device(
    bench: Bench, pool: CachingAllocator
) -> None:
    a, b = bench.stream(), bench.stream()
    holder = [pool.allocate(SIZE, stream=a)]
    latch = bench.rig.hold(a.handle)
    bench.fill(a, holder[0], 1)
    where = span(holder[0])
    contexts: list[int] = []

    def other_thread() -> None:
        bench.kernels.cu("cuCtxPopCurrent")  # the worker's own; from here on none is current
        contexts.append(int(bench.kernels.cu("cuCtxGetCurrent") or 0))
        holder.clear()
        contexts.append(int(bench.kernels.cu("cuCtxGetCurrent") or 0))
        bench.kernels.cu("cuCtxPushCurrent", bench.gpu.primary_context())

    bench.rig.in_thread(other_thread)
    assert contexts == [0, 0]
    stats = pool.stats()
    assert (stats.allocated_bytes, stats.in_flight_bytes) == (0, SIZE)
    assert not overlap(pool.allocate(SIZE, stream=b), where)
    latch.release()
    a.synchronize()
    assert pool.stats().in_flight_bytes == 0


def test_s26_zero_bytes_make_no_driver_call(bench: Bench, pool: CachingAllocator) -> None:
    before = dict(bench.gpu.calls)
    for _ in range(3):
        with pool.allocate(0) as empty:
            assert empty.ptr == 0
    assert dict(bench.gpu.calls) == before
    with pytest.raises(ValueError, match="negative"):
        pool.allocate(-1)


def test_r6_blocking_streams_are_kept_apart_from_legacy_work(bench: Bench) -> None:
    """A block freed on legacy, which is held through a blocking stream's turn, serves nobody else."""
    pool = bench.pool(uses="auto")
    free_one = bench.stream()
    held = bench.stream(non_blocking=False)
    x = pool.allocate(SIZE, stream=0)
    latch = bench.rig.hold(held.handle)
    bench.kernels.fill(1, x.ptr, x.size // 4, 1)  # behind the held blocking stream
    where = span(x)
    x.close()
    y = pool.allocate(SIZE, stream=free_one)
    assert not overlap(y, where)
    bench.fill(free_one, y, 2)
    assert bench.mismatches(free_one, y, 2) == 0
    latch.release()


def test_events_measure_time(bench: Bench) -> None:
    s = bench.stream()
    start, end = Event(bench.gpu, timing=True), Event(bench.gpu, timing=True)
    start.record(s)
    bench.gpu.spin(s.handle, 5_000_000)
    end.record(s)
    end.synchronize()
    assert 4.5 <= start.elapsed_time(end) <= 200


def test_allocations_work_on_the_memory_they_name(bench: Bench, pool: CachingAllocator) -> None:
    s = bench.stream()
    live = [pool.allocate(size, stream=s) for size in (512, 300_000, MIB, 64 * MIB)]
    for tag, a in enumerate(live, 1):
        bench.fill(s, a, tag)
    assert [bench.mismatches(s, a, tag) for tag, a in enumerate(live, 1)] == [0] * 4

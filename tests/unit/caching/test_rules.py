"""The rules where pool and streams meet: R8 to R13, each by name."""

from __future__ import annotations

import threading

import pytest

from allocator import CachingAllocator, DriverError, Event, OutOfMemoryError, SimDevice, Stream, StreamCapturing
from allocator.caching.pool import BARE_FREES
from allocator.devices import LEGACY, PER_THREAD
from tests.unit.caching.conftest import MIB, MakePool


def test_r1_two_pools_on_one_stream_share_its_timeline(gpu: SimDevice, make: MakePool) -> None:
    first, second = make(), make()
    s = Stream(gpu)
    for pool in (first, second):
        pool.allocate(2 * MIB, stream=s).close()
    gpu.run_until_idle()
    first.stats()  # asks the stream: both know
    before = gpu.calls["cuStreamQuery"]
    assert second.stats().in_flight_bytes == 0
    assert gpu.calls["cuStreamQuery"] <= before + 1


def test_r2_a_query_proves_what_was_closed_before_it(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    a = pool.allocate(2 * MIB, stream=s)
    asked: list[str] = []

    def free_during_the_query(call: str) -> None:
        if call == "cuStreamQuery" and not asked:
            asked.append(call)
            gpu.launch(s, duration_ns=10_000, writes=[a])
            a.close()

    pool.allocate(2 * MIB, stream=s).close()
    gpu.before_call = free_during_the_query
    pool.stats()
    gpu.before_call = None
    other = Stream(gpu)
    for _ in range(2):
        b = pool.allocate(2 * MIB, stream=other)
        gpu.launch(other, writes=[b])
    gpu.run_until_idle()


def test_r4_a_record_that_failed_is_not_published(gpu: SimDevice, make: MakePool) -> None:
    """Its event queries as done, which must prove nothing."""
    pool = make(seal_frees=1)
    a, b = Stream(gpu), Stream(gpu)
    gpu.hold(a)
    x = pool.allocate(2 * MIB, stream=a)
    gpu.launch(a, writes=[x])
    gpu.fail("cuEventRecord", times=0, error="CUDA_ERROR_UNKNOWN")
    x.close()
    for _ in range(3):
        y = pool.allocate(2 * MIB, stream=b)
        assert y.ptr != x.ptr
        gpu.launch(b, writes=[y])
        y.close()
    assert pool.stats().event_records == 0
    gpu.clear_faults()
    gpu.resume(a)


def test_r8_the_per_thread_stream_is_told_by_its_id_and_not_by_the_threads_ident(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    ids: list[int] = []

    def body() -> None:
        with pool.allocate(2 * MIB, stream=PER_THREAD) as a:
            ids.append(a.stream.id)

    for _ in range(5):  # the operating system gives the same ident again
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
    assert len(set(ids)) == 5


NULLS = [0, LEGACY, PER_THREAD, "stream", "foreign"]


@pytest.mark.parametrize("null", NULLS, ids=[str(null) for null in NULLS])
def test_r6_allocations_on_a_stream_that_never_dies_make_no_call_for_it(
    gpu: SimDevice, pool: CachingAllocator, null: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record on legacy is a barrier for every blocking stream, and each call costs: sizes that hardly repeat.

    Where marks are due, as another stream frees memory as well, legacy is asked once in many frees, and never marked.
    """

    class Foreign:
        ptr = 0

    stream = {"stream": Stream.legacy(gpu), "foreign": Foreign()}.get(str(null), null)
    handle = PER_THREAD if null == PER_THREAD else LEGACY
    pool.allocate(40 * MIB, stream=stream).close()
    gpu.hold(handle)
    held = [pool.allocate(512 * n, stream=stream) for n in range(1, 40)]
    before = dict(gpu.calls)
    for n in range(40, 140):
        held.pop(0).close()
        held.append(pool.allocate(512 * n, stream=stream))
    made = {call: n - before.get(call, 0) for call, n in gpu.calls.items()}
    assert not made.get("cuEventRecord") and not made.get("cuStreamQuery"), made
    marked: list[int] = []
    record = SimDevice.event_record

    def noted(self: SimDevice, event: int, stream: int) -> None:
        marked.append(stream)
        record(self, event, stream)

    monkeypatch.setattr(SimDevice, "event_record", noted)
    other = Stream(gpu)
    for n in range(140, 400):
        held.pop(0).close()
        held.append(pool.allocate(512 * n, stream=stream))
        pool.allocate(512 * n, stream=other).close()
    gpu.resume(handle)
    assert LEGACY not in marked and marked.count(PER_THREAD) < 260 / 8
    pool.check()


def test_r9_a_bare_handle_given_again_and_again_is_marked_once_in_some_frees(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    """Marks cost driver calls, and who gives a handle to each allocation will give it again."""
    with gpu.scope():
        handle = gpu.stream_create(non_blocking=True, priority=0)
    held = [pool.allocate(512 * n, stream=handle) for n in range(1, 40)]
    gpu.hold(handle)
    before = gpu.calls["cuEventRecord"]
    for n in range(40, 200):
        del held[0]
        held.append(pool.allocate(512 * n, stream=handle))
    marks = gpu.calls["cuEventRecord"] - before
    gpu.resume(handle)
    steps = pool._accounts.steps
    climbs = sum(steps.values()) - steps["own or idle"] - steps["covered"]
    assert 1 <= marks <= 160 / BARE_FREES + climbs < 60
    pool.check()


def test_r9_a_finaliser_touches_no_bare_handle(gpu: SimDevice, pool: CachingAllocator) -> None:
    with gpu.scope():
        handle = gpu.stream_create(non_blocking=True, priority=0)
    a = pool.allocate(2 * MIB, stream=handle)
    gpu.launch(handle, writes=[a])
    del a
    with gpu.scope():
        gpu.stream_destroy(handle)
    pool.stats()
    pool.trim()
    pool.settle()
    assert gpu.violations == []  # a call on the dead handle would be one
    assert pool.stats().orphaned_bytes == 2 * MIB


def test_r9_orphans_of_blocking_streams_are_reached_through_legacy(gpu: SimDevice, pool: CachingAllocator) -> None:
    with gpu.scope():
        handle = gpu.stream_create(non_blocking=False, priority=0)
    a = pool.allocate(2 * MIB, stream=handle)
    gpu.launch(handle, writes=[a])
    del a
    with gpu.scope():
        gpu.stream_destroy(handle)
    gpu.run_until_idle()
    pool.settle()
    assert pool.stats().in_flight_bytes == 0


def test_r9_an_orphans_handle_given_again_seals_it(gpu: SimDevice, pool: CachingAllocator) -> None:
    with gpu.scope():
        handle = gpu.stream_create(non_blocking=True, priority=0)
    a = pool.allocate(2 * MIB, stream=handle)
    gpu.launch(handle, writes=[a])
    del a
    gpu.run_until_idle()
    with pool.allocate(2 * MIB, stream=handle):
        pass
    pool.allocate(MIB, stream=handle).close(handle)
    assert pool.stats().in_flight_bytes <= 2 * MIB


def test_r9_the_owner_of_a_live_block_is_held(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    a = pool.allocate(2 * MIB, stream=s)
    del s
    pool.stats()
    assert gpu.calls["cuStreamDestroy"] == 0
    gpu.launch(a.stream, writes=[a])
    del a
    gpu.run_until_idle()
    pool.stats()
    assert gpu.calls["cuStreamDestroy"] == 1


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_r10_nothing_that_the_pool_does_kills_a_strangers_capture(gpu: SimDevice, make: MakePool, mode: str) -> None:
    pool = make(seal_frees=2)
    captured, a, b = Stream(gpu), Stream(gpu), Stream(gpu)
    gpu.begin_capture(captured, mode)
    for i in range(12):
        x = pool.allocate(2 * MIB, stream=(a, b)[i % 2])
        gpu.launch(x.stream, writes=[x])
        x.record_stream((b, a)[i % 2])
        x.close()
        gpu.advance(500)
    pool.stats()
    pool.trim()
    pool.settle()
    gpu.end_capture(captured)  # raises if it was invalidated


def test_r10_with_detect_captures_a_capturing_stream_is_refused(gpu: SimDevice, make: MakePool) -> None:
    pool = make(detect_captures=True)
    s = Stream(gpu)
    pool.allocate(MIB, stream=s).close()
    gpu.begin_capture(s, "relaxed")
    with pytest.raises(StreamCapturing) as caught:
        pool.allocate(MIB, stream=s)
    assert "\n" not in str(caught.value)
    gpu.end_capture(s)
    pool.allocate(MIB, stream=s).close()


def test_r10_a_free_during_a_capture_is_parked_and_comes_back_after_it(gpu: SimDevice, make: MakePool) -> None:
    pool = make(seal_frees=1)
    s, other = Stream(gpu), Stream(gpu)
    x = pool.allocate(2 * MIB, stream=s)
    gpu.begin_capture(s, "global")
    gpu.launch(s, writes=[x])
    x.close()
    for _ in range(3):
        y = pool.allocate(2 * MIB, stream=other)
        assert y.ptr != x.ptr
        gpu.launch(other, writes=[y])
        y.close()
    pool.stats()
    pool.settle()
    gpu.end_capture(s)
    gpu.run_until_idle()
    assert pool.stats().in_flight_bytes == 0


def test_r11_a_sticky_error_ends_the_pool(gpu: SimDevice) -> None:
    mine = SimDevice(memory=64 * MIB)
    pool = CachingAllocator(mine)
    pool.allocate(MIB).close()
    mine.fail("cuStreamQuery", error="CUDA_ERROR_LAUNCH_FAILED", sticky=True)
    pool.stats()
    with pytest.raises(DriverError, match="LAUNCH_FAILED"):
        pool.allocate(MIB)
    pool.close()


def test_r11_an_event_of_invalid_value_is_void_and_the_stream_is_sealed_again(gpu: SimDevice, make: MakePool) -> None:
    pool = make(seal_frees=1)
    a, b = Stream(gpu), Stream(gpu)
    gpu.hold(a)
    x = pool.allocate(2 * MIB, stream=a)
    gpu.launch(a, writes=[x])
    x.close()
    pool.allocate(2 * MIB, stream=b).close()
    pool.allocate(2 * MIB, stream=b).close()
    gpu.fail("cuEventQuery", error="CUDA_ERROR_INVALID_VALUE")
    pool.stats()
    gpu.resume(a)
    gpu.run_until_idle()
    for _ in range(3):
        pool.allocate(2 * MIB, stream=b).close()
    assert pool.stats().in_flight_bytes == 0
    assert pool.stats().poisoned_streams == 0


def test_r12_device_memory_is_not_seen_by_the_host_so_its_stream_may_have_it_at_once(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    """Pinned memory will not follow this rule (R12); device memory does."""
    s = Stream(gpu)
    gpu.hold(s)
    x = pool.allocate(2 * MIB, stream=s)
    gpu.launch(s, writes=[x])
    x.close()
    assert pool.allocate(2 * MIB, stream=s).ptr == x.ptr
    gpu.resume(s)


def test_r13_an_event_that_exists_is_chosen_before_a_new_one(gpu: SimDevice, make: MakePool) -> None:
    pool = make(limit=4 * MIB, seal_frees=1)
    a, b = Stream(gpu), Stream(gpu)
    x = pool.allocate(2 * MIB, stream=a)
    gpu.launch(a, duration_ns=1_000_000, writes=[x])
    pool.allocate(2 * MIB, stream=b).close()
    x.close()
    kept = pool.allocate(2 * MIB, stream=b)  # drains, seals
    records = pool.stats().event_records
    y = pool.allocate(2 * MIB, stream=b)
    gpu.launch(b, writes=[y])
    assert pool.stats().event_records <= records + 1
    assert pool.stats().stream_waits == 1
    kept.close()


def test_r13_nobody_waits_for_a_capturing_stream(gpu: SimDevice, make: MakePool) -> None:
    pool = make(limit=4 * MIB, wait_timeout=0.01)
    s, other = Stream(gpu), Stream(gpu)
    x = pool.allocate(4 * MIB, stream=s)
    gpu.begin_capture(s, "global")
    gpu.launch(s, writes=[x])
    x.close()
    with pytest.raises(OutOfMemoryError):
        pool.allocate(4 * MIB, stream=other)
    gpu.end_capture(s)
    pool.allocate(4 * MIB, stream=other).close()


def test_r5_a_record_closes_and_seals_nothing(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    pool.allocate(2 * MIB, stream=s).close()
    event = Event(gpu)
    event.record(s)
    line = s.line
    assert line.sealed == 0 and line.closed >= 1 and not line.in_flight

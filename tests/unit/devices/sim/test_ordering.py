"""What waits for what: each row of the measured ordering (docs/ordering.md), in virtual time."""

from __future__ import annotations

import math
import threading
import time

import pytest

from allocator.devices import LEGACY, PER_THREAD, SimDevice
from allocator.devices.sim.world import WORLD
from allocator.errors import DriverError, SimDeadlock
from tests.unit.devices.sim.words import Elsewhere, Words


def test_nothing_finishes_unless_time_advances(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    gpu.launch(s, 1000)
    assert not gpu.stream_query(s)
    gpu.advance(999)
    assert not gpu.stream_query(s)
    gpu.advance(1)
    assert gpu.stream_query(s)


def test_a_stream_runs_its_work_one_after_the_other(gpu: SimDevice, words: Words) -> None:
    s, t = words.stream(), words.stream()
    gpu.launch(s, 1000)
    gpu.launch(s, 500)
    gpu.launch(t, 700)
    gpu.stream_synchronize(t)
    assert gpu.now_ns == 700
    gpu.stream_synchronize(s)
    assert gpu.now_ns == 1500 == gpu.stalled_ns


def test_work_does_not_start_before_it_is_queued(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    gpu.advance(5000)
    gpu.launch(s, 1000)
    gpu.run_until_idle()
    assert gpu.now_ns == 6000 == gpu.last_finish_ns and gpu.stalled_ns == 0


def test_an_event_is_done_when_the_work_before_its_record_is(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    gpu.launch(s, 1000)
    event = words.recorded(s)
    gpu.launch(s, 1000)
    assert not gpu.event_query(event)
    gpu.event_synchronize(event)
    assert gpu.now_ns == 1000 and gpu.event_query(event) and not gpu.stream_query(s)


def test_recording_an_event_again_moves_it(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    event = words.recorded(s)
    assert gpu.event_query(event)
    gpu.launch(s, 1000)
    gpu.event_record(event, s)
    assert not gpu.event_query(event)


def test_a_wait_orders_later_work_and_counts_as_a_stall(gpu: SimDevice, words: Words) -> None:
    a, b = words.stream(), words.stream()
    gpu.launch(a, 1000)
    gpu.launch(b, 300)
    gpu.stream_wait_event(b, words.recorded(a))
    gpu.launch(b, 10)
    gpu.stream_synchronize(b)
    assert gpu.now_ns == 1010
    assert gpu.stream_stalled_ns == 700  # b was busy anyway for 300 of the 1000


def test_a_wait_keeps_the_record_that_was_current(gpu: SimDevice, words: Words) -> None:
    a, b = words.stream(), words.stream()
    event = words.recorded(a)
    gpu.stream_wait_event(b, event)
    gpu.launch(a, 1000)
    gpu.event_record(event, a)
    gpu.launch(b, 10)
    gpu.stream_synchronize(b)
    assert gpu.now_ns == 10


def test_waiting_for_an_event_never_recorded_succeeds_and_orders_nothing(gpu: SimDevice, words: Words) -> None:
    s, event = words.stream(), gpu.event_create()
    assert gpu.event_query(event)
    gpu.event_synchronize(event)
    gpu.stream_wait_event(s, event)
    assert gpu.stream_query(s)


@pytest.mark.parametrize("kind", ["blocking", "per-thread", "created later"])
def test_work_on_blocking_streams_is_behind_earlier_legacy_work(gpu: SimDevice, words: Words, kind: str) -> None:
    s = PER_THREAD if kind == "per-thread" else words.blocking()
    gpu.launch(LEGACY, 1000)
    if kind == "created later":
        s = words.blocking()
    gpu.launch(s, 10)
    gpu.stream_synchronize(s)
    assert gpu.now_ns == 1010


@pytest.mark.parametrize("per_thread", [False, True])
def test_legacy_work_is_behind_earlier_work_of_blocking_streams(gpu: SimDevice, words: Words, per_thread: bool) -> None:
    s = PER_THREAD if per_thread else words.blocking()
    gpu.launch(s, 1000)
    gpu.launch(LEGACY, 10)
    gpu.stream_synchronize(LEGACY)
    assert gpu.now_ns == 1010


def test_non_blocking_streams_and_legacy_do_not_know_each_other(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    gpu.launch(LEGACY, 1000)
    gpu.launch(s, 10)
    event = words.recorded(s)
    gpu.advance(10)
    assert gpu.event_query(event) and gpu.stream_query(s)
    gpu.launch(s, 100_000)
    gpu.stream_synchronize(LEGACY)
    assert gpu.now_ns == 1000


@pytest.mark.parametrize("operation", ["record", "wait"])
def test_a_record_or_wait_on_legacy_is_a_barrier_both_ways(gpu: SimDevice, words: Words, operation: str) -> None:
    a, b, free = words.blocking(), words.blocking(), words.stream()
    gpu.launch(a, 1000)
    if operation == "record":
        words.recorded(LEGACY)
    else:
        gpu.launch(free, 1000)
        gpu.stream_wait_event(LEGACY, words.recorded(free))
    gpu.launch(b, 10)
    later = words.blocking()
    gpu.launch(later, 10)
    event = words.recorded(PER_THREAD)
    gpu.advance(999)
    assert not gpu.event_query(event)
    gpu.stream_synchronize(b)
    assert gpu.now_ns == 1010 and gpu.stream_query(later) and gpu.event_query(event)


@pytest.mark.parametrize("kind", ["blocking", "per-thread", "created later"])
def test_an_event_on_an_idle_blocking_stream_waits_for_legacy_but_the_stream_does_not(
    gpu: SimDevice, words: Words, kind: str
) -> None:
    s = PER_THREAD if kind == "per-thread" else words.blocking()
    gpu.launch(LEGACY, 1000)
    if kind == "created later":
        s = words.blocking()
    event = words.recorded(s)
    assert not gpu.event_query(event)
    assert gpu.stream_query(s)
    gpu.stream_synchronize(s)
    assert gpu.now_ns == 0
    follower = words.stream()
    gpu.stream_wait_event(follower, event)
    gpu.launch(follower, 10)
    gpu.stream_synchronize(follower)
    assert gpu.now_ns == 1010


def test_a_query_of_legacy_sees_busy_blocking_streams_and_is_no_barrier(gpu: SimDevice, words: Words) -> None:
    s, other = words.blocking(), words.blocking()
    gpu.launch(s, 1000)
    assert not gpu.stream_query(LEGACY)
    gpu.launch(other, 10)
    gpu.stream_synchronize(other)
    assert gpu.now_ns == 10  # the query put nothing between
    gpu.stream_synchronize(LEGACY)
    assert gpu.now_ns == 1000 and gpu.stream_query(LEGACY)


def test_the_per_thread_stream_is_the_callers_own(gpu: SimDevice, elsewhere: Elsewhere) -> None:
    gpu.launch(PER_THREAD, 1000)
    mine = gpu.stream_id(PER_THREAD)

    def other() -> int:
        with gpu.scope():
            event = gpu.event_create()
            gpu.event_record(event, PER_THREAD)
            assert gpu.event_query(event) and gpu.stream_query(PER_THREAD)
            return gpu.stream_id(PER_THREAD)

    ids = {elsewhere(other) for _ in range(3)} | {mine}
    assert len(ids) == 4
    assert gpu.stream_id(PER_THREAD) == mine


def test_legacy_covers_the_per_thread_streams_of_ended_threads(gpu: SimDevice, elsewhere: Elsewhere) -> None:
    elsewhere(lambda: gpu.launch(PER_THREAD, 1000))
    assert not gpu.stream_query(LEGACY)
    event = gpu.event_create()
    gpu.event_record(event, LEGACY)
    gpu.event_synchronize(event)
    assert gpu.now_ns == 1000


def test_ids_are_unique_and_constant_for_legacy(gpu: SimDevice, words: Words) -> None:
    other = SimDevice(ordinal=1)
    with other.scope():
        theirs = {other.stream_id(LEGACY), other.stream_id(PER_THREAD)}
    ours = {gpu.stream_id(LEGACY), gpu.stream_id(PER_THREAD), gpu.stream_id(words.stream())}
    assert len(ours | theirs) == 5
    assert gpu.stream_id(LEGACY) in ours


def test_handles_come_back_at_once_while_the_old_streams_work_still_runs(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    ident = gpu.stream_id(s)
    gpu.launch(s, 1000)
    event = words.recorded(s)
    gpu.stream_destroy(s)
    again = words.blocking()
    assert again == s and gpu.stream_id(again) != ident
    assert gpu.stream_query(again) and gpu.stream_is_blocking(again)
    assert not gpu.event_query(event)
    gpu.event_synchronize(event)
    assert gpu.now_ns == 1000


@pytest.mark.parametrize(
    "call",
    ["stream_query", "stream_synchronize", "stream_id", "stream_is_blocking", "stream_is_capturing", "stream_destroy"],
)
def test_a_call_on_a_dead_handle_breaks_the_device(gpu: SimDevice, words: Words, call: str) -> None:
    s = words.stream()
    gpu.stream_destroy(s)
    with pytest.raises(DriverError) as caught:
        getattr(gpu, call)(s)
    assert caught.value.sticky and gpu.violations
    with pytest.raises(DriverError) as caught:
        gpu.mem_get_info()
    assert caught.value.sticky


def test_zero_is_never_a_handle_for_the_protocol_but_means_legacy_for_a_program(gpu: SimDevice) -> None:
    gpu.launch(0, 1000)
    assert not gpu.stream_query(LEGACY)
    with pytest.raises(DriverError):
        gpu.stream_query(0)


@pytest.mark.parametrize("blocking", [False, True])
def test_a_context_event_covers_destroyed_streams_and_stalls_nobody(
    gpu: SimDevice, words: Words, blocking: bool
) -> None:
    s = words.blocking() if blocking else words.stream()
    gpu.launch(s, 1000)
    gpu.stream_destroy(s)
    event = gpu.event_create()
    gpu.ctx_record_event(event)
    other = words.blocking()
    gpu.launch(other, 10)
    gpu.stream_synchronize(other)
    assert gpu.now_ns == 10 and not gpu.event_query(event)
    gpu.ctx_synchronize()
    assert gpu.now_ns == 1000 and gpu.event_query(event)


@pytest.mark.parametrize("blocking", [False, True])
def test_an_event_on_legacy_covers_a_destroyed_stream_only_if_it_was_blocking(
    gpu: SimDevice, words: Words, blocking: bool
) -> None:
    s = words.blocking() if blocking else words.stream()
    gpu.launch(s, 1000)
    gpu.stream_destroy(s)
    assert gpu.event_query(words.recorded(LEGACY)) is not blocking


def test_elapsed_time_is_in_milliseconds(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    start, end = gpu.event_create(timing=True), gpu.event_create(timing=True)
    gpu.event_record(start, s)
    gpu.launch(s, 2_500_000)
    gpu.event_record(end, s)
    with pytest.raises(DriverError, match="NOT_READY"):
        gpu.event_elapsed_ms(start, end)
    gpu.run_until_idle()
    assert gpu.event_elapsed_ms(start, end) == 2.5
    with pytest.raises(DriverError, match="INVALID_HANDLE"):
        gpu.event_elapsed_ms(start, words.recorded(s))


def test_waiting_across_devices_works_but_an_event_belongs_to_its_device(gpu: SimDevice, words: Words) -> None:
    other = SimDevice(ordinal=1)
    a = words.stream()
    gpu.launch(a, 1000)
    event = words.recorded(a)
    with other.scope():
        b = other.stream_create(non_blocking=True, priority=0)
        with pytest.raises(DriverError, match="INVALID_HANDLE"):
            other.event_record(event, b)
        other.stream_wait_event(b, event)
        other.launch(b, 10)
        other.ctx_synchronize()
        assert other.now_ns == 1010
    assert gpu.event_query(event)
    assert not gpu.violations and not other.violations


def test_a_held_stream_stands_still_until_it_is_resumed(gpu: SimDevice, words: Words) -> None:
    s, t = words.stream(), words.stream()
    gpu.launch(s, 100)
    gpu.hold(s)
    gpu.hold(s)
    gpu.launch(s, 1000)
    event = words.recorded(s)
    gpu.stream_wait_event(t, event)
    gpu.launch(t, 10)
    gpu.run_until_idle()
    assert gpu.now_ns == 100
    gpu.advance(900)
    assert not gpu.stream_query(s) and not gpu.stream_query(t) and not gpu.event_query(event)
    gpu.resume(s)
    gpu.resume(s)
    gpu.stream_synchronize(t)
    assert gpu.now_ns == 2010


def test_a_stream_destroyed_while_held_can_be_resumed_by_its_old_handle(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    gpu.hold(s)
    gpu.launch(s, 1000)
    event = words.recorded(s)
    gpu.stream_destroy(s)
    assert words.stream() == s
    gpu.resume(s)
    gpu.event_synchronize(event)
    assert gpu.now_ns == 1000


def test_a_host_wait_for_a_held_stream_is_a_deadlock_when_nobody_can_resume(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    gpu.hold(s)
    for wait in (gpu.ctx_synchronize, lambda: gpu.stream_synchronize(s)):
        with pytest.raises(SimDeadlock):
            wait()
    gpu.resume(s)
    gpu.ctx_synchronize()


def test_a_host_wait_blocks_the_thread_until_another_one_resumes(gpu: SimDevice, words: Words) -> None:
    s, other = words.stream(), words.stream()
    gpu.hold(s)
    gpu.launch(s, 1000)
    waiting = threading.Event()
    gpu.before_call = lambda name: waiting.set() if name == "cuStreamSynchronize" else None

    def helper() -> None:
        waiting.wait(10)
        with gpu.scope():  # the device can be used meanwhile: the wait holds no lock
            gpu.launch(other, 50)
            gpu.stream_synchronize(other)
        gpu.resume(s)

    thread = threading.Thread(target=helper)
    thread.start()
    gpu.stream_synchronize(s)
    thread.join(10)
    assert gpu.now_ns >= 1000 and gpu.stream_query(s)


@pytest.mark.parametrize("daemon", [False, True], ids=["alone", "beside a daemon that does not help"])
@pytest.mark.parametrize("first", ["main", "other"])
def test_two_threads_that_wait_for_the_same_held_stream_are_a_deadlock(
    gpu: SimDevice, words: Words, first: str, daemon: bool
) -> None:
    s = words.stream()
    gpu.hold(s)
    errors: list[BaseException] = []
    over = threading.Event()
    if daemon:
        threading.Thread(target=over.wait, daemon=True).start()

    def waits() -> bool:
        deadline = time.monotonic() + 10
        while not WORLD.waiting and time.monotonic() < deadline:
            time.sleep(0.001)
        return bool(WORLD.waiting)

    def body() -> None:
        if first == "main":
            waits()
        with gpu.scope():
            try:
                gpu.stream_synchronize(s)
            except SimDeadlock as error:
                errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    try:
        assert first == "main" or waits()
        with pytest.raises(SimDeadlock):
            gpu.stream_synchronize(s)
        thread.join(10)
        assert len(errors) == 1
    finally:
        over.set()


def test_wait_any_jumps_to_the_first_completion(gpu: SimDevice, words: Words) -> None:
    a, b, held = words.stream(), words.stream(), words.stream()
    gpu.hold(held)
    gpu.launch(a, 3000)
    gpu.launch(b, 2000)
    events = [words.recorded(s) for s in (a, b, held)]
    assert gpu.wait_any(events, 1.0)
    assert gpu.now_ns == 2000 == gpu.stalled_ns
    assert gpu.wait_any([events[1]], 0.0)


def test_wait_any_gives_up_after_its_timeout_without_raising(gpu: SimDevice, words: Words) -> None:
    held, slow = words.stream(), words.stream()
    gpu.hold(held)
    gpu.launch(slow, 3000)
    assert not gpu.wait_any([words.recorded(held), words.recorded(slow)], 2e-6)
    assert gpu.now_ns == 2000
    assert not gpu.wait_any([words.recorded(held)], 1e-6)
    assert gpu.now_ns == 3000


def test_priorities_are_accepted(gpu: SimDevice) -> None:
    least, greatest = gpu.stream_priority_range()
    assert least >= greatest
    assert gpu.stream_create(non_blocking=True, priority=greatest)


def test_many_short_lived_streams_leave_nothing_behind(gpu: SimDevice, words: Words) -> None:
    for _ in range(2000):
        s = words.blocking()
        gpu.launch(s, 10)
        gpu.stream_synchronize(s)
        gpu.stream_destroy(s)
    assert len(gpu._queues._busy) < 300 and len(gpu._queues._since_legacy) < 300
    assert len(gpu.oracle._since_context) < 600 and len(gpu.oracle._since_legacy) < 600


def test_a_host_wait_does_not_hope_for_daemon_threads_for_long(
    gpu: SimDevice, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WORLD, "daemon_patience_s", 0.05)
    s, stop = words.stream(), threading.Event()
    gpu.hold(s)
    idler = threading.Thread(target=stop.wait, daemon=True)
    idler.start()
    with pytest.raises(SimDeadlock, match="no other thread is left"):
        gpu.stream_synchronize(s)
    stop.set()
    idler.join()


def test_an_unbounded_wait_any_returns_when_another_thread_resumes(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    gpu.hold(s)
    gpu.launch(s, 700)
    event = words.recorded(s)
    assert gpu.wait_any([], 0.0) and gpu.wait_any([event, gpu.event_create()], 0.0)
    waiting = threading.Event()
    gpu.before_call = lambda name: waiting.set()

    def resume_later() -> None:
        waiting.wait(10)
        gpu.resume(s)

    helper = threading.Thread(target=resume_later)
    helper.start()
    assert gpu.wait_any([event], math.inf)
    helper.join()
    assert gpu.now_ns == 700


def test_another_threads_per_thread_stream_can_be_resumed(gpu: SimDevice, elsewhere: Elsewhere) -> None:
    elsewhere(lambda: gpu.hold(PER_THREAD))
    assert not gpu.stream_query(LEGACY)
    gpu.resume(PER_THREAD)
    assert gpu.stream_query(LEGACY)


def test_a_call_on_a_dead_event_breaks_the_device(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    event = words.recorded(s)
    gpu.event_destroy(event)
    assert gpu.event_create() == event  # recycled like a stream's
    gpu.event_destroy(event)
    with pytest.raises(DriverError) as caught:
        gpu.event_query(event)
    assert caught.value.sticky


def test_the_default_streams_are_not_destroyed(gpu: SimDevice) -> None:
    for handle in (LEGACY, PER_THREAD):
        with pytest.raises(DriverError):
            gpu.stream_destroy(handle)
    assert gpu.stream_query(LEGACY)


def test_context_events_need_a_new_driver() -> None:
    gpu = SimDevice(context_events=False)
    with gpu.scope(), pytest.raises(DriverError, match="NOT_SUPPORTED"):
        gpu.ctx_record_event(gpu.event_create())


def test_threads_may_use_one_device_at_once(gpu: SimDevice, words: Words) -> None:
    def body(stream: int, ptr: int) -> None:
        with gpu.scope():
            for i in range(300):
                gpu.hand_out(ptr, 512, i)
                gpu.launch(stream, 10, writes=[(ptr, 512)])
                event = gpu.event_create()
                gpu.event_record(event, stream)
                gpu.event_synchronize(event)
                gpu.event_destroy(event)

    threads = [threading.Thread(target=body, args=(words.blocking(), words.memory())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gpu.calls["cuLaunchKernel"] == 1200 and not gpu.races and not gpu.violations
    gpu.ctx_synchronize()
    assert gpu.stream_query(LEGACY)

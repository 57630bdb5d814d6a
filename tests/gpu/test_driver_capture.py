"""What a call does to a stream capture that is running: the facts behind R10.

ok      the call works and the capture goes on
KILLS   the call fails *and* the capture is invalidated
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from rig import GLOBAL, RELAXED, THREAD_LOCAL, Rig, error_of

from allocator.devices import LEGACY, PER_THREAD, Capture

MIB = 1 << 20


class Scene:
    """Everything the calls below need, made before the capture begins; then `stream` captures."""

    def __init__(self, rig: Rig, *, blocking: bool = False) -> None:
        self.rig, self.gpu = rig, rig.gpu
        self.stream = rig.blocking() if blocking else rig.non_blocking()
        self.other = rig.non_blocking()
        self.outside = rig.recorded(self.other)
        self.spare = rig.event()
        self.inside = rig.event()
        self.ptr = self.gpu.mem_alloc(4096)
        self.pinned = int(rig.cu("cuMemHostAlloc", 4096, 0))
        self.range = self.gpu.mem_address_reserve(2 * MIB)
        self.doomed = rig.non_blocking()
        self.gpu.ctx_synchronize()

    @contextlib.contextmanager
    def capturing(self, mode: str) -> Iterator[None]:
        with self.rig.capturing(self.stream, mode):
            self.gpu.event_record(self.inside, self.stream)
            yield
        # What a call freed is 0 by now.  The capture is over: plain calls are allowed again.
        if self.ptr:
            self.gpu.mem_free(self.ptr)
        if self.pinned:
            self.rig.cu("cuMemFreeHost", self.pinned)
        self.gpu.mem_address_free(self.range, 2 * MIB)

    # -- calls --------------------------------------------------------------------------------

    def query_outside_event(self) -> None:
        self.gpu.event_query(self.outside)

    def query_inside_event(self) -> None:
        self.gpu.event_query(self.inside)

    def query_other_stream(self) -> None:
        self.gpu.stream_query(self.other)

    def alloc(self) -> None:
        new = self.gpu.mem_alloc(4096)
        old, self.ptr = self.ptr, new
        self._dropped = old  # a few bytes, left to the end of the process: freeing is another row

    def id_of_capturing(self) -> None:
        self.gpu.stream_id(self.stream)

    def record_on_other(self) -> None:
        self.gpu.event_record(self.spare, self.other)

    def wait_on_other(self) -> None:
        self.gpu.stream_wait_event(self.other, self.outside)

    def create_and_map(self) -> None:
        handle = self.gpu.mem_create(2 * MIB)
        self.gpu.mem_map(self.range, 2 * MIB, handle)
        self.gpu.mem_set_access(self.range, 2 * MIB)
        self.gpu.mem_unmap(self.range, 2 * MIB)
        self.gpu.mem_release(handle)

    def is_capturing(self) -> None:
        assert self.gpu.stream_is_capturing(self.stream) is Capture.ACTIVE
        assert self.gpu.stream_is_capturing(self.other) is Capture.NONE

    def free(self) -> None:
        self.gpu.mem_free(self.ptr)
        self.ptr = 0

    def host_alloc(self) -> None:
        self._also_pinned = int(self.rig.cu("cuMemHostAlloc", 4096, 0))

    def host_free(self) -> None:
        self.rig.cu("cuMemFreeHost", self.pinned)
        self.pinned = 0

    def synchronize_event(self) -> None:
        self.gpu.event_synchronize(self.outside)

    def synchronize_other(self) -> None:
        self.gpu.stream_synchronize(self.other)

    def context_synchronize(self) -> None:
        self.gpu.ctx_synchronize()

    def context_event(self) -> None:
        self.gpu.ctx_record_event(self.spare)

    def flags_of_capturing(self) -> None:
        self.gpu.stream_is_blocking(self.stream)

    def wait_on_capturing(self) -> None:
        self.gpu.stream_wait_event(self.stream, self.outside)

    def record_on_legacy(self) -> None:
        self.gpu.event_record(self.spare, LEGACY)

    def wait_on_legacy(self) -> None:
        self.gpu.stream_wait_event(LEGACY, self.outside)

    def query_legacy(self) -> None:
        self.gpu.stream_query(LEGACY)

    def id_of_legacy(self) -> None:
        self.gpu.stream_id(LEGACY)

    def create_and_destroy_event(self) -> None:
        self.gpu.event_destroy(self.gpu.event_create())

    def create_stream(self) -> None:
        self.rig.non_blocking()

    def create_blocking_stream(self) -> None:
        self.rig.blocking()

    def destroy_other_stream(self) -> None:
        self.rig.destroy(self.doomed)

    def reserve(self) -> None:
        self.gpu.mem_address_free(self.gpu.mem_address_reserve(2 * MIB), 2 * MIB)

    def context_of_other(self) -> None:
        self.rig.cu("cuStreamGetCtx", self.other)

    def context_of_capturing(self) -> None:
        self.rig.cu("cuStreamGetCtx", self.stream)

    def capture_info(self) -> None:
        self.rig.cu("cuStreamGetCaptureInfo", self.stream)

    def id_of_other(self) -> None:
        self.gpu.stream_id(self.other)

    def id_of_per_thread(self) -> None:
        self.gpu.stream_id(PER_THREAD)

    def memory_info(self) -> None:
        self.gpu.mem_get_info()

    def push_and_pop(self) -> None:
        self.rig.cu("cuCtxPushCurrent", self.gpu.primary_context())
        self.rig.cu("cuCtxPopCurrent")

    def scope(self) -> None:
        with self.gpu.scope():
            pass


SAME, OTHER = "same thread", "other thread"
COLUMNS = [
    (GLOBAL, SAME),
    (GLOBAL, OTHER),
    (THREAD_LOCAL, SAME),
    (THREAD_LOCAL, OTHER),
    (RELAXED, SAME),
    (RELAXED, OTHER),
]
K, ok = "KILLS", "ok"
TABLE = {
    "query_outside_event": [K, K, K, ok, ok, ok],
    "query_inside_event": [K, K, K, K, K, K],
    "query_other_stream": [K, K, K, ok, ok, ok],
    "alloc": [K, K, K, ok, ok, ok],
    "id_of_capturing": [K, K, K, K, K, K],
    "record_on_other": [ok, ok, ok, ok, ok, ok],
    "wait_on_other": [ok, ok, ok, ok, ok, ok],
    "create_and_map": [ok, ok, ok, ok, ok, ok],
    "is_capturing": [ok, ok, ok, ok, ok, ok],
}
KILLS_UNLESS_RELAXED = ["free", "host_alloc", "host_free", "synchronize_event", "synchronize_other"]
KILLS_ALWAYS = ["context_synchronize", "context_event", "flags_of_capturing", "wait_on_capturing"]
LEGACY_CALLS = ["record_on_legacy", "wait_on_legacy", "query_legacy", "id_of_legacy"]
ALWAYS_OK = [
    "create_and_destroy_event",
    "create_stream",
    "create_blocking_stream",
    "destroy_other_stream",
    "reserve",
    "context_of_other",
    "context_of_capturing",
    "capture_info",
    "id_of_other",
    "id_of_per_thread",
    "memory_info",
    "push_and_pop",
    "scope",
]


def outcome(scene: Scene, call: str, mode: str, thread: str = SAME, *, relaxed: bool = False) -> str:
    """Make one call while the scene's stream captures; say what it did."""
    gpu, rig = scene.gpu, scene.rig

    def make() -> str | None:
        with gpu.scope() if relaxed else contextlib.nullcontext():
            return error_of(getattr(scene, call))

    with scene.capturing(mode):
        code = make() if thread == SAME else rig.in_thread(make)
        status = gpu.stream_is_capturing(scene.stream)
    if code is None and status is Capture.ACTIVE:
        return ok
    if code is not None and status is Capture.INVALIDATED:
        return K
    return f"{code or 'no error'}, capture {status.name}"


@pytest.mark.parametrize(
    ("call", "mode", "thread", "expected"),
    [(call, *column, expected) for call, row in TABLE.items() for column, expected in zip(COLUMNS, row, strict=True)],
)
def test_r10_what_a_call_does_to_a_capture(rig: Rig, call: str, mode: str, thread: str, expected: str) -> None:
    assert outcome(Scene(rig), call, mode, thread) == expected


@pytest.mark.parametrize("thread", [SAME, OTHER])
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL])
@pytest.mark.parametrize("call", TABLE)
def test_r10_inside_a_scope_a_call_does_what_it_does_to_a_relaxed_capture(
    rig: Rig, call: str, mode: str, thread: str
) -> None:
    assert outcome(Scene(rig), call, mode, thread, relaxed=True) == TABLE[call][-1]


@pytest.mark.parametrize("call", KILLS_UNLESS_RELAXED)
def test_r10_calls_that_kill_unless_relaxed(rig: Rig, call: str) -> None:
    assert outcome(Scene(rig), call, GLOBAL) == K
    assert outcome(Scene(rig), call, GLOBAL, relaxed=True) == ok
    assert outcome(Scene(rig), call, RELAXED) == ok


@pytest.mark.parametrize("thread", [SAME, OTHER])
@pytest.mark.parametrize("call", KILLS_ALWAYS)
def test_r10_calls_that_kill_always(rig: Rig, call: str, thread: str) -> None:
    if call == "context_event" and not rig.gpu.supports_context_events:
        pytest.skip("cuCtxRecordEvent needs a driver for CUDA 12.5 and bindings that have it")
    assert outcome(Scene(rig), call, RELAXED, thread, relaxed=True) == K


@pytest.mark.parametrize("thread", [SAME, OTHER])
@pytest.mark.parametrize("call", LEGACY_CALLS)
def test_r10_calls_on_legacy_kill_the_capture_of_a_blocking_stream_always(rig: Rig, call: str, thread: str) -> None:
    assert outcome(Scene(rig, blocking=True), call, RELAXED, thread, relaxed=True) == K


@pytest.mark.parametrize("call", LEGACY_CALLS)
def test_r10_calls_on_legacy_leave_the_capture_of_a_non_blocking_stream_alone(rig: Rig, call: str) -> None:
    assert outcome(Scene(rig), call, GLOBAL, relaxed=True) == ok


@pytest.mark.parametrize("blocking", [True, False])
def test_r10_asking_whether_legacy_captures_errs_beside_a_blocking_capture_and_harms_nothing(
    rig: Rig, blocking: bool
) -> None:
    scene = Scene(rig, blocking=blocking)
    answers: list[Capture] = []
    with scene.capturing(GLOBAL):
        code = error_of(lambda: answers.append(rig.gpu.stream_is_capturing(LEGACY)))
        assert rig.survives(scene.stream)
    assert (code is not None) == blocking
    assert answers == ([] if blocking else [Capture.NONE])


@pytest.mark.parametrize("call", ALWAYS_OK)
def test_r10_calls_that_are_always_ok(rig: Rig, call: str) -> None:
    assert outcome(Scene(rig), call, GLOBAL) == ok


# -- what events of a capture mean outside --------------------------------------------------------


def _captured_event(rig: Rig) -> int:
    """An event whose last record was inside a capture that has ended."""
    stream, event = rig.non_blocking(), rig.event()
    with rig.capturing(stream, RELAXED):
        rig.gpu.event_record(event, stream)
    return event


@pytest.mark.parametrize("call", ["query", "synchronize", "wait"])
def test_r10_an_event_recorded_in_a_capture_is_invalid_afterwards_until_recorded_again(rig: Rig, call: str) -> None:
    event, stream = _captured_event(rig), rig.non_blocking()
    calls: dict[str, Callable[[], object]] = {
        "query": lambda: rig.gpu.event_query(event),
        "synchronize": lambda: rig.gpu.event_synchronize(event),
        "wait": lambda: rig.gpu.stream_wait_event(stream, event),
    }
    assert error_of(calls[call]) == "CUDA_ERROR_INVALID_VALUE"
    latch = rig.hold(stream)
    rig.gpu.event_record(event, stream)
    assert rig.is_stuck(event)
    latch.release()
    assert rig.finishes(event)
    assert error_of(calls[call]) is None


def test_r10_a_stream_that_waits_for_an_event_of_a_capture_joins_it(rig: Rig) -> None:
    stream, joined, event = rig.non_blocking(), rig.non_blocking(), rig.event()
    back = rig.event()
    with rig.capturing(stream, RELAXED):
        rig.gpu.event_record(event, stream)
        assert rig.gpu.stream_is_capturing(joined) is Capture.NONE
        rig.gpu.stream_wait_event(joined, event)
        assert rig.gpu.stream_is_capturing(joined) is Capture.ACTIVE
        rig.gpu.event_record(back, joined)
        rig.gpu.stream_wait_event(stream, back)
    assert rig.gpu.stream_is_capturing(joined) is Capture.NONE


def test_r5_records_and_waits_inside_a_capture_order_nothing_outside(rig: Rig) -> None:
    held, joined, event, back = rig.non_blocking(), rig.non_blocking(), rig.event(), rig.event()
    latch = rig.hold(held)
    with rig.capturing(held, RELAXED):
        rig.gpu.event_record(event, held)
        rig.gpu.stream_wait_event(joined, event)
        rig.gpu.event_record(back, joined)
        rig.gpu.stream_wait_event(held, back)
    assert rig.finishes(rig.recorded(joined)), "the wait was part of the graph, not of the stream"
    assert rig.is_stuck(rig.recorded(held))
    latch.release()


def test_r10_a_graph_may_be_destroyed_while_its_replay_runs(rig: Rig) -> None:
    """So memory of a graph is retired, not idle, when the graph dies."""
    latches = []
    graph = rig.capture_graph(lambda stream: latches.append(rig.hold(stream)))
    stream = rig.non_blocking()
    rig.cu("cuGraphLaunch", graph, stream)
    event = rig.recorded(stream)
    rig.cu("cuGraphExecDestroy", graph)
    assert rig.is_stuck(event)
    latches[0].release()
    assert rig.finishes(event)


def test_r10_queued_work_of_a_stream_survives_a_killed_capture(rig: Rig) -> None:
    scene = Scene(rig)
    assert outcome(scene, "query_inside_event", RELAXED) == K
    assert rig.finishes(rig.recorded(scene.stream)), "after its end the stream works as before"

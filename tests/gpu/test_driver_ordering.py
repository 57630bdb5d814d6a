"""Which work waits for which: the legacy stream, per-thread streams, context events.  The facts behind R3, R6, R9.

How a claim is tested: rig.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
from rig import Rig, per_thread_or

from allocator.devices import LEGACY, PER_THREAD

BLOCKING = ["blocking", "per_thread"]


# -- the legacy stream as a barrier ---------------------------------------------------------------


@pytest.mark.parametrize("kind", BLOCKING)
def test_r6_a_record_on_legacy_waits_for_blocking_streams_and_holds_their_later_work(rig: Rig, kind: str) -> None:
    held, old, outsider = per_thread_or(rig, kind), rig.blocking(), rig.non_blocking()
    latch = rig.hold(held)
    barrier = rig.recorded(LEGACY)
    behind = [barrier, rig.recorded(old), rig.recorded(rig.blocking())]
    assert rig.finishes(rig.recorded(outsider))
    assert all(rig.is_stuck(event) for event in behind)
    latch.release()
    assert all(rig.finishes(event) for event in behind)


def test_r6_a_record_on_legacy_does_not_wait_for_non_blocking_streams(rig: Rig) -> None:
    held = rig.non_blocking()
    rig.hold(held)
    assert rig.finishes(rig.recorded(LEGACY))
    assert not rig.gpu.stream_query(held)


def test_r6_a_wait_on_legacy_holds_later_events_of_blocking_streams(rig: Rig) -> None:
    """Old, new and per-thread ones; not of non-blocking streams."""
    held, old, outsider = rig.non_blocking(), rig.blocking(), rig.non_blocking()
    latch = rig.hold(held)
    rig.gpu.stream_wait_event(LEGACY, rig.recorded(held))
    behind = [rig.recorded(s) for s in (old, rig.blocking(), PER_THREAD, LEGACY)]
    assert rig.finishes(rig.recorded(outsider))
    assert all(rig.is_stuck(event) for event in behind)
    latch.release()
    assert all(rig.finishes(event) for event in behind)


@pytest.mark.parametrize("kind", [*BLOCKING, "created later"])
def test_r6_an_event_on_an_idle_blocking_stream_waits_for_legacy(rig: Rig, kind: str) -> None:
    """And so does a non-blocking stream that waits for the event."""
    early = rig.blocking() if kind == "created later" else per_thread_or(rig, kind)
    latch = rig.hold(LEGACY)
    stream = rig.blocking() if kind == "created later" else early
    event, follower = rig.recorded(stream), rig.non_blocking()
    rig.gpu.stream_wait_event(follower, event)
    behind = [event, rig.recorded(follower)]
    assert rig.finishes(rig.recorded(rig.non_blocking()))
    assert all(rig.is_stuck(event) for event in behind)
    latch.release()
    assert all(rig.finishes(event) for event in behind)


@pytest.mark.parametrize("kind", BLOCKING)
def test_r6_a_host_query_or_wait_of_an_idle_blocking_stream_does_not_wait_for_legacy(rig: Rig, kind: str) -> None:
    stream = per_thread_or(rig, kind)
    latch = rig.hold(LEGACY)
    mark = rig.recorded(LEGACY)
    assert rig.gpu.stream_query(stream)
    rig.gpu.stream_synchronize(stream)
    assert rig.is_stuck(mark)
    latch.release()


def test_r6_a_record_on_legacy_is_itself_a_barrier_for_streams_created_later(rig: Rig) -> None:
    held = rig.blocking()
    latch = rig.hold(held)
    rig.recorded(LEGACY)
    event = rig.recorded(rig.blocking())
    assert rig.is_stuck(event)
    latch.release()
    assert rig.finishes(event)


@pytest.mark.parametrize("kind", BLOCKING)
def test_r6_legacy_is_behind_a_wait_that_a_blocking_stream_was_given(rig: Rig, kind: str) -> None:
    """So a block that a blocking stream took because of its wait is safe for what is queued on legacy later."""
    held, waiter = rig.non_blocking(), per_thread_or(rig, kind)
    latch = rig.hold(held)
    rig.gpu.stream_wait_event(waiter, rig.recorded(held))
    behind = rig.recorded(LEGACY)
    assert rig.is_stuck(behind)
    latch.release()
    assert rig.finishes(behind)


def test_r6_a_memset_of_no_bytes_on_legacy_orders_nothing(rig: Rig) -> None:
    ptr = rig.gpu.mem_alloc(4096)
    held, other = rig.blocking(), rig.blocking()
    latch = rig.hold(held)
    rig.cu("cuMemsetD8Async", ptr, 0, 0, LEGACY)
    assert rig.finishes(rig.recorded(other))
    latch.release()
    rig.gpu.mem_free(ptr)


# -- what counts as work --------------------------------------------------------------------------

TAG = 77
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Target:
    """A word that each kind of work sets to TAG, and a way to look at it that waits for no held stream."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.ptr = rig.gpu.mem_alloc(512)
        self.source = self.ptr + 256
        self._looker = rig.non_blocking()
        rig.cu("cuMemsetD32Async", self.ptr, 0, 1, self._looker)
        rig.cu("cuMemsetD32Async", self.source, TAG, 1, self._looker)
        rig.gpu.stream_synchronize(self._looker)
        self._seen_by_host: list[int] = []
        self._callback = _Callback(lambda _: self._seen_by_host.append(TAG))  # kept: the driver calls it later
        self._graph = rig.capture_graph(lambda s: rig.kernels.fill(s, self.ptr, 1, TAG))

    def is_set(self) -> bool:
        return bool(self._seen_by_host) or self.rig.kernels.read_word(self._looker, self.ptr) == TAG

    def close(self) -> None:
        self.rig.cu("cuGraphExecDestroy", self._graph)
        self.rig.gpu.mem_free(self.ptr)

    def kernel(self, stream: int) -> None:
        self.rig.kernels.fill(stream, self.ptr, 1, TAG)

    def memset(self, stream: int) -> None:
        self.rig.cu("cuMemsetD32Async", self.ptr, TAG, 1, stream)

    def copy(self, stream: int) -> None:
        self.rig.cu("cuMemcpyDtoDAsync", self.ptr, self.source, 4, stream)

    def write_value(self, stream: int) -> None:
        self.rig.cu("cuStreamWriteValue32", stream, self.ptr, TAG, 0)

    def host_function(self, stream: int) -> None:
        address = ctypes.cast(self._callback, ctypes.c_void_p).value
        self.rig.cu("cuLaunchHostFunc", stream, address, 0)

    def graph(self, stream: int) -> None:
        self.rig.cu("cuGraphLaunch", self._graph, stream)


@pytest.fixture
def target(rig: Rig) -> Iterator[Target]:
    target = Target(rig)
    try:
        yield target
    finally:
        rig.release()
        rig.gpu.ctx_synchronize()
        target.close()


WORK = ["kernel", "memset", "copy", "write_value", "host_function", "graph"]


@pytest.mark.parametrize("kind", BLOCKING)
@pytest.mark.parametrize("work", WORK)
def test_r6_every_kind_of_work_on_a_blocking_stream_is_ordered_behind_legacy(
    rig: Rig, target: Target, work: str, kind: str
) -> None:
    _waits(rig, target, held=LEGACY, work=getattr(target, work), stream=per_thread_or(rig, kind))


@pytest.mark.parametrize("kind", BLOCKING)
@pytest.mark.parametrize("work", WORK)
def test_r6_every_kind_of_work_on_legacy_is_ordered_behind_blocking_streams(
    rig: Rig, target: Target, work: str, kind: str
) -> None:
    _waits(rig, target, held=per_thread_or(rig, kind), work=getattr(target, work), stream=LEGACY)


def _waits(rig: Rig, target: Target, *, held: int, work: Callable[[int], None], stream: int) -> None:
    latch = rig.hold(held)
    work(stream)
    rig.settle()
    assert not target.is_set()
    latch.release()
    rig.gpu.stream_synchronize(stream)
    assert target.is_set()


def test_r6_positive_control_work_on_a_non_blocking_stream_runs_while_legacy_is_held(rig: Rig, target: Target) -> None:
    """Without this the tests above could pass because nothing is ever seen."""
    rig.hold(LEGACY)
    stream = rig.non_blocking()
    target.kernel(stream)
    rig.gpu.stream_synchronize(stream)
    assert target.is_set()


# -- host queries and waits of legacy -------------------------------------------------------------


def test_r6_a_query_of_legacy_says_no_while_a_blocking_stream_is_busy_and_is_no_barrier(rig: Rig) -> None:
    held, other = rig.blocking(), rig.blocking()
    latch = rig.hold(held)
    rig.settle()
    assert not rig.gpu.stream_query(LEGACY)
    assert rig.finishes(rig.recorded(other))
    latch.release()
    rig.gpu.stream_synchronize(held)
    assert rig.gpu.stream_query(LEGACY)


def test_r6_a_query_or_wait_of_legacy_takes_no_notice_of_non_blocking_streams(rig: Rig) -> None:
    held = rig.non_blocking()
    rig.hold(held)
    assert rig.gpu.stream_query(LEGACY)
    rig.gpu.stream_synchronize(LEGACY)
    assert not rig.gpu.stream_query(held)


@pytest.mark.parametrize("kind", ["own thread", "another thread"])
def test_r6_a_host_wait_for_legacy_waits_for_blocking_and_per_thread_streams(rig: Rig, kind: str) -> None:
    stream = rig.blocking() if kind == "another thread" else PER_THREAD
    latch = rig.hold(stream)
    assert not rig.gpu.stream_query(LEGACY)
    worker = rig.start(lambda: rig.gpu.stream_synchronize(LEGACY))
    rig.settle(20)
    assert not worker.finished
    latch.release()
    worker.result()


# -- streams that ended (R9) ----------------------------------------------------------------------


def test_r9_a_record_on_legacy_covers_the_per_thread_streams_of_ended_threads(rig: Rig) -> None:
    latch = rig.in_thread(lambda: rig.hold(PER_THREAD))
    event = rig.recorded(LEGACY)
    assert rig.is_stuck(event)
    latch.release()
    assert rig.finishes(event)


def test_r9_a_record_on_legacy_covers_a_destroyed_blocking_stream(rig: Rig) -> None:
    stream = rig.blocking()
    latch = rig.hold(stream)
    rig.destroy(stream)
    event = rig.recorded(LEGACY)
    assert rig.is_stuck(event)
    latch.release()
    assert rig.finishes(event)


def test_r9_a_record_on_legacy_does_not_cover_a_destroyed_non_blocking_stream(rig: Rig) -> None:
    stream = rig.non_blocking()
    latch = rig.hold(stream)
    mark = rig.recorded(stream)
    rig.destroy(stream)
    assert rig.finishes(rig.recorded(LEGACY))
    assert rig.is_stuck(mark)
    latch.release()


# -- the whole context (R3, R6) -------------------------------------------------------------------


@pytest.fixture
def context_event(rig: Rig) -> Callable[[], int]:
    """Record a new event behind all work of the context."""
    if not rig.gpu.supports_context_events:
        pytest.skip("cuCtxRecordEvent needs a driver for CUDA 12.5 and bindings that have it")

    def record() -> int:
        event = rig.event()
        rig.gpu.ctx_record_event(event)
        return event

    return record


@pytest.mark.parametrize("kind", ["blocking", "non_blocking", "per_thread", "legacy"])
def test_r6_a_context_event_covers_every_stream_and_stalls_none(
    rig: Rig, context_event: Callable[[], int], kind: str
) -> None:
    held = LEGACY if kind == "legacy" else per_thread_or(rig, kind)
    others = [rig.non_blocking()] + ([] if kind == "legacy" else [rig.blocking()])
    latch = rig.hold(held)
    event = context_event()
    assert all(rig.finishes(rig.recorded(other)) for other in others)
    assert rig.is_stuck(event)
    latch.release()
    assert rig.finishes(event)


@pytest.mark.parametrize("kind", ["blocking", "non_blocking"])
def test_r9_a_context_event_covers_destroyed_streams(rig: Rig, context_event: Callable[[], int], kind: str) -> None:
    stream = per_thread_or(rig, kind)
    latch = rig.hold(stream)
    rig.destroy(stream)
    event = context_event()
    assert rig.is_stuck(event)
    latch.release()
    assert rig.finishes(event)


def test_r9_a_context_event_covers_the_streams_of_ended_threads(rig: Rig, context_event: Callable[[], int]) -> None:
    latch = rig.in_thread(lambda: rig.hold(PER_THREAD))
    event = context_event()
    assert rig.is_stuck(event)
    latch.release()
    assert rig.finishes(event)


def test_r3_a_context_event_does_not_cover_work_queued_after_it(rig: Rig, context_event: Callable[[], int]) -> None:
    event = context_event()
    rig.hold(rig.non_blocking())
    assert rig.finishes(event)


@pytest.mark.parametrize("kind", ["blocking", "non_blocking"])
def test_r9_a_context_wait_covers_destroyed_streams(rig: Rig, kind: str) -> None:
    stream = per_thread_or(rig, kind)
    latch = rig.hold(stream)
    rig.destroy(stream)
    worker = rig.start(rig.gpu.ctx_synchronize)
    rig.settle(20)
    assert not worker.finished
    latch.release()
    worker.result()


# -- events between streams -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["blocking", "non_blocking", "per_thread"])
def test_r4_a_wait_holds_the_waiting_stream_and_no_other(rig: Rig, kind: str) -> None:
    held, waiting, other = rig.non_blocking(), per_thread_or(rig, kind), rig.non_blocking()
    latch = rig.hold(held)
    rig.gpu.stream_wait_event(waiting, rig.recorded(held))
    stuck = rig.recorded(waiting)
    assert rig.finishes(rig.recorded(other))
    assert rig.is_stuck(stuck)
    latch.release()
    assert rig.finishes(stuck)


def test_r4_an_event_carries_what_its_stream_had_waited_for(rig: Rig) -> None:
    """Transitive: the ground under the clock that is snapshot with an event."""
    first, second, third = (rig.non_blocking() for _ in range(3))
    latch = rig.hold(first)
    rig.gpu.stream_wait_event(second, rig.recorded(first))
    rig.gpu.stream_wait_event(third, rig.recorded(second))
    stuck = rig.recorded(third)
    assert rig.is_stuck(stuck)
    latch.release()
    assert rig.finishes(stuck)

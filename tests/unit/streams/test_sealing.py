"""Marks, questions and waits whose driver call fails, comes too late, or must not be made at all.

Whatever happens: nothing is taken for finished that is not, and what can be asked again is.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.errors import DriverError, StreamCapturing, StreamClosed
from allocator.streams import Sealed, Sealing, Timeline
from allocator.streams.timeline import MOST_MARKS

KIB = 1 << 10


class Bench:
    """A pool, two streams, and one block in flight on the first of them."""

    def __init__(self) -> None:
        self.gpu = SimDevice()
        self.pool = CachingAllocator(self.gpu, config=Config(uses="declared", seal_frees=10_000))
        self.stream, self.other = Stream(self.gpu), Stream(self.gpu)
        self.line, self.other_line = self.stream.line, self.other.line
        self.sealing: Sealing = self.pool._sealing
        self.registry = self.sealing.registry
        self.work()

    def work(self) -> None:
        block = self.pool.allocate(4 * KIB, stream=self.stream)
        self.gpu.launch(self.stream, 1000, writes=[block])
        block.close()

    def seal(self) -> None:
        assert self.sealing.seal(self.line) is not None

    def calls(self) -> dict[str, int]:
        return dict(self.gpu.calls)


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench()
    yield one
    one.gpu.before_call = None
    one.gpu.clear_faults()
    assert one.gpu.races == [] and one.gpu.violations == []
    one.gpu.run_until_idle()
    one.pool.check()
    one.pool.close()


def test_r10_an_event_that_was_recorded_as_a_capture_began_says_nothing(bench: Bench) -> None:
    """R10: the stream is asked before and after: what lies in between belongs to the graph."""

    def begin(name: str) -> None:
        if name == "cuEventRecord":
            bench.gpu.before_call = None
            bench.gpu.begin_capture(bench.stream, "relaxed")

    before = bench.line.sealed
    bench.gpu.before_call = begin
    assert bench.sealing.seal(bench.line) is None
    assert bench.line.sealed == before and not bench.line.in_flight
    bench.gpu.end_capture(bench.stream)
    bench.seal()
    assert bench.line.sealed > before


def test_r11_a_question_that_cannot_be_put_is_put_again(bench: Bench) -> None:
    bench.seal()
    bench.gpu.run_until_idle()
    bench.gpu.fail("cuCtxPushCurrent", error="CUDA_ERROR_UNKNOWN")
    assert not bench.sealing.poll([bench.line])
    assert bench.line.completed < bench.line.sealed
    assert bench.sealing.poll([bench.line])
    assert bench.line.completed == bench.line.sealed
    assert all(not sealed.users for sealed in bench.line.in_flight)


def test_r6_no_mark_on_legacy_while_a_blocking_stream_captures(bench: Bench) -> None:
    blocking = Stream(bench.gpu, non_blocking=False)
    bench.gpu.begin_capture(blocking, "relaxed")
    records = bench.calls().get("cuEventRecord", 0)
    assert bench.sealing.seal_legacy() is None
    assert bench.calls().get("cuEventRecord", 0) == records
    bench.gpu.end_capture(blocking)
    assert bench.sealing.seal_legacy() is not None
    blocking.close()


def test_r11_a_context_event_that_answers_with_an_error_is_asked_again(bench: Bench) -> None:
    bench.sealing.close_context(context_event=True)
    bench.gpu.run_until_idle()
    bench.gpu.fail("cuEventQuery", error="CUDA_ERROR_UNKNOWN")
    before = bench.registry.context.completed
    bench.sealing.poll([])
    assert bench.registry.context.completed == before
    bench.sealing.poll([])
    assert bench.registry.context.completed > before


def test_r6_a_context_event_that_cannot_be_recorded_leaves_the_streams_to_be_asked(bench: Bench) -> None:
    """The seal is without an event then, and done when every stream it names is."""
    bench.gpu.fail("cuCtxRecordEvent", error="CUDA_ERROR_UNKNOWN")
    before = bench.registry.context.completed
    bench.sealing.close_context(context_event=True)
    bench.sealing.poll([])
    assert bench.registry.context.completed == before
    bench.gpu.run_until_idle()
    for line in (bench.line, bench.other_line, bench.registry.legacy):
        assert bench.sealing.query(line)
    bench.sealing.poll([])
    assert bench.registry.context.completed > before


def test_r10_no_context_event_while_a_stream_captures_that_no_hook_told_of(bench: Bench) -> None:
    """R6: it would kill the capture."""
    bench.gpu.begin_capture(bench.other, "relaxed")
    bench.sealing.close_context(context_event=True)
    assert bench.calls().get("cuCtxRecordEvent", 0) == 0
    bench.gpu.end_capture(bench.other)


def test_r10_a_stream_that_captures_is_made_to_wait_for_nothing(bench: Bench) -> None:
    bench.seal()
    sealed = bench.line.in_flight[-1]
    known = dict(bench.other_line.clock.at)
    bench.gpu.begin_capture(bench.other, "relaxed")
    waits = bench.calls().get("cuStreamWaitEvent", 0)
    assert not bench.sealing.make_wait(bench.other_line, [sealed])
    assert bench.calls().get("cuStreamWaitEvent", 0) == waits
    bench.gpu.end_capture(bench.other)

    def begin(name: str) -> None:
        if name == "cuStreamWaitEvent":
            bench.gpu.before_call = None
            bench.gpu.begin_capture(bench.other, "relaxed")

    bench.gpu.before_call = begin
    assert not bench.sealing.make_wait(bench.other_line, [sealed])
    assert dict(bench.other_line.clock.at) == known, "the wait belongs to the graph, and orders nothing here (R5)"


def test_r9_a_stream_without_a_handle_neither_waits_nor_is_waited_for(bench: Bench) -> None:
    bench.seal()
    sealed = bench.line.in_flight[-1]
    bench.other.close()
    assert not bench.sealing.make_wait(bench.other_line, [sealed])
    with pytest.raises(StreamClosed, match="closed, or belongs to another thread"):
        bench.sealing.synchronize(bench.other_line)


def test_s17_a_wait_of_the_host_for_a_stream_that_captures_is_refused(bench: Bench) -> None:
    bench.gpu.begin_capture(bench.other, "relaxed")
    with pytest.raises(StreamCapturing):
        bench.sealing.synchronize(bench.other_line)
    bench.gpu.end_capture(bench.other)
    capture = bench.registry.captures.begin(bench.other_line, bench.other.handle)  # a hook tells of one
    with pytest.raises(StreamCapturing):
        bench.sealing.synchronize(bench.other_line)
    bench.registry.captures.end(capture)
    bench.sealing.synchronize(bench.other_line)


def test_r11_a_wait_of_the_host_that_fails_proves_nothing(bench: Bench) -> None:
    bench.gpu.fail("cuStreamSynchronize", error="CUDA_ERROR_UNKNOWN")
    with pytest.raises(DriverError):
        bench.sealing.synchronize(bench.line)
    assert bench.line.completed < bench.line.closed and bench.line.poisoned is not None


def test_legacy_has_no_end(bench: Bench) -> None:
    before = bench.calls()
    bench.sealing.end(bench.registry.legacy)
    assert not bench.registry.legacy.ended and bench.calls() == before


@pytest.mark.parametrize("fault", ["lost", "forked"])
def test_r11_s21_of_a_context_that_is_gone_nothing_is_asked(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.seal()
    sealed = bench.line.in_flight[-1]
    if fault == "lost":
        bench.gpu.fail("cuStreamQuery", error="CUDA_ERROR_ILLEGAL_ADDRESS", sticky=True)
        assert not bench.sealing.query(bench.line)
        assert bench.registry.lost is not None
    else:
        monkeypatch.setattr(bench.registry, "forked", True)
    before, line, sealing = bench.calls(), bench.line, bench.sealing
    assert sealing.seal(line) is None and sealing.seal_legacy() is None
    assert not sealing.query(line) and not sealing.poll([line]) and not sealing.make_wait(bench.other_line, [sealed])
    sealing.close_context()
    if fault == "forked":
        sealing.end(line)
        sealing.let_go(line)
    assert bench.calls() == before
    assert line.completed < line.closed, "nothing is taken for finished"


def test_r8_what_an_unknown_stream_stood_for_is_proved_by_the_stream_it_turns_out_to_be(bench: Bench) -> None:
    def unknown() -> Timeline:
        with bench.registry.lock:
            line = bench.registry.new_graph_line()
            line.close_seqno()
        return line

    first = unknown()
    assert bench.sealing.identify(first, bench.line)  # busy: an event behind its work speaks for both
    assert first.completed < first.closed
    bench.gpu.run_until_idle()
    bench.sealing.poll([bench.line])
    assert first.completed == first.closed
    second = unknown()
    assert bench.sealing.identify(second, bench.line)  # idle: known at once
    assert second.completed == second.closed
    bench.work()
    bench.gpu.begin_capture(bench.stream, "relaxed")
    third = unknown()
    assert not bench.sealing.identify(third, bench.line)
    assert third.completed < third.closed
    bench.gpu.end_capture(bench.stream)
    assert bench.sealing.identify(third, bench.line)


@pytest.mark.source
@pytest.mark.parametrize("what", ["forgotten", "void"])
@pytest.mark.parametrize("done", [False, True])
def test_r4_an_event_that_another_thread_gave_up_meanwhile_proves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str, done: bool
) -> None:
    """Between its record and what it is to prove: `done` alone does not say that the work is over."""
    registry, real = bench.registry, Sealing.seal

    def seal(self: Sealing, line: Timeline, given: int | None = None) -> Sealed | None:
        sealed = real(self, line, given)
        assert sealed is not None
        with registry.lock:
            if what == "void":
                line.void(sealed)
            else:
                line.in_flight.remove(sealed)
            sealed.done = True
        if done:
            bench.gpu.run_until_idle()
            registry.mark([(line, sealed.seqno)])
        return sealed

    monkeypatch.setattr(Sealing, "seal", seal)
    with registry.lock:
        unknown = registry.new_graph_line()
        unknown.close_seqno()
    assert bench.sealing.identify(unknown, bench.line) is done
    assert (unknown.completed == unknown.closed) is done
    blocking = Stream(bench.gpu, non_blocking=False)
    block = bench.pool.allocate(4 * KIB, stream=blocking)
    bench.gpu.launch(blocking, 1000, writes=[block])
    block.close()
    bench.sealing.seal_legacy()
    assert (blocking.line.completed == blocking.line.closed) is done
    bench.gpu.run_until_idle()
    blocking.close()


def test_r13_a_stream_whose_host_is_far_ahead_keeps_few_events(bench: Bench) -> None:
    bench.gpu.hold(bench.stream)
    for _ in range(5 * MOST_MARKS):
        bench.work()
        bench.seal()
        assert len(bench.line.in_flight) <= MOST_MARKS
    assert bench.registry.events.in_use <= MOST_MARKS
    assert bench.gpu.calls["cuEventCreate"] <= MOST_MARKS + 1
    bench.gpu.resume(bench.stream)
    bench.gpu.run_until_idle()
    bench.sealing.poll([bench.line])
    assert bench.line.completed == bench.line.sealed == bench.line.closed and not bench.line.in_flight
    assert bench.registry.events.in_use == 0


def test_r9_a_mark_on_legacy_keeps_what_it_was_told_by_one_that_was_forgotten(bench: Bench) -> None:
    """The new mark makes them too many: the one before it goes, and what that was to prove is the new one's."""
    legacy = bench.registry.legacy
    with bench.registry.lock:
        unknown = bench.registry.new_graph_line()
        unknown.close_seqno()
    for _ in range(MOST_MARKS):
        assert bench.sealing.seal(legacy) is not None
    legacy.in_flight[-1].proves.append((unknown, unknown.closed))
    before = legacy.in_flight[-1]
    sealed = bench.sealing.seal_legacy()
    assert sealed is not None and sealed is legacy.in_flight[-1] and before.done
    bench.gpu.run_until_idle()
    bench.sealing.poll([legacy])
    assert unknown.completed == unknown.closed

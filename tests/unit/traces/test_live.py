"""A trace that is played in real time: laps, pace, ends, and nothing that grows."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from allocator import CachingAllocator, Config, PoolClosed, SimDevice
from allocator.traces import LiveReplay, Row, Summary, Trace, TraceError, read_trace, replay_trace, summarize
from allocator.traces import live as module

Write = Callable[..., str]
HEADER = "time_ns,op,stream,pointer,bytes,gpu_start_ns,gpu_duration_ns\n"
ROWS = (
    "0,alloc,1,0x1000,1000,,\n10,launch,1,,,10,5000\n20,alloc,2,0x2000,2000,,\n30,launch,2,,,30,9000\n"
    "40,free,1,0x1000,1000,,\n50,alloc,2,0x3000,900,,\n60,free,2,0x2000,2000,,\n"
)
FAST = 1e6
PATIENCE = 60
"""Seconds until a thread that hangs fails its test."""


@pytest.fixture
def gpu() -> SimDevice:
    return SimDevice(memory=1 << 30)


@pytest.fixture
def pool(gpu: SimDevice) -> Iterator[CachingAllocator]:
    with CachingAllocator(gpu, config=Config(), name="live") as pool:
        yield pool


@pytest.fixture
def trace(write: Write) -> Trace:
    return read_trace(write(HEADER + ROWS))


class Laps:
    """The rows of a trace, and an event that is set when lap `count` begins."""

    def __init__(self, trace: Trace, count: int) -> None:
        self._trace = trace
        self._left = count
        self.reached = threading.Event()
        self.trace = Trace(trace.path, trace.layout, trace.has_launches, self._rows)

    def _rows(self, progress: object) -> Iterator[Row]:
        self._left -= 1
        if self._left == 0:
            self.reached.set()
        return self._trace.rows()

    def wait(self) -> None:
        assert self.reached.wait(PATIENCE)


def test_one_lap_is_the_replay_of_the_same_trace(pool: CachingAllocator, trace: Trace) -> None:
    replay = LiveReplay(trace, pool, speed=FAST, loop=False).start()
    assert replay.wait(PATIENCE)
    assert (replay.laps, replay.error, replay.running) == (1, None, False)
    other = SimDevice(memory=1 << 30)
    expected = replay_trace(trace, summarize(trace), other, config=Config()).result
    stats = pool.stats()
    assert dict(stats.allocations) == expected.reuse
    assert stats.allocated_bytes == stats.in_flight_bytes == 0
    assert stats.reserved_bytes == expected.peak_reserved_bytes
    pool.check()


def test_laps_go_on_until_it_is_stopped_and_leave_nothing_allocated(pool: CachingAllocator, trace: Trace) -> None:
    laps = Laps(trace, 5)
    with LiveReplay(laps.trace, pool, speed=FAST, summary=summarize(trace)) as replay:
        laps.wait()
        assert replay.running
    assert replay.laps >= 4
    assert replay.error is None
    assert pool.stats().allocated_bytes == 0
    assert sum(pool.stats().allocations.values()) >= 3 * replay.laps
    replay.stop()
    pool.check()


def test_a_lap_begins_when_the_gpu_has_done_the_last_ones_work(
    gpu: SimDevice, pool: CachingAllocator, write: Write
) -> None:
    slow = read_trace(write(HEADER + "0,alloc,1,0x1000,1000,,\n10,launch,1,,,10,5000000\n20,free,1,0x1000,1000,,\n"))
    laps = Laps(slow, 20)
    with LiveReplay(laps.trace, pool, speed=FAST, summary=summarize(slow)):
        laps.wait()
    # Otherwise the twentieth would end 95 ms late.
    assert gpu.last_finish_ns - gpu.now_ns <= 5_000_000


def test_nothing_grows_with_laps(gpu: SimDevice, pool: CachingAllocator, trace: Trace) -> None:
    def objects_after(count: int) -> int:
        laps = Laps(trace, count)
        with LiveReplay(laps.trace, pool, speed=FAST, summary=summarize(trace)):
            laps.wait()
        del laps
        gc.collect()
        return len(gc.get_objects())

    objects_after(10)
    few = objects_after(10)
    many = objects_after(150)
    # Three rows of objects a lap that stayed would be thousands.
    assert many - few < 140
    assert gpu.oracle.cells < 50
    assert gpu.races == [] == gpu.violations


def test_stopping_ends_a_pause_between_two_rows_at_once(pool: CachingAllocator, write: Write) -> None:
    trace = read_trace(write(HEADER + "0,alloc,1,0x1000,1000,,\n3600000000000,free,1,0x1000,1000,,\n"))
    allocated = threading.Event()
    original = pool.allocate

    def allocate(*args: Any, **options: Any) -> Any:
        allocation = original(*args, **options)
        allocated.set()
        return allocation

    pool.allocate = allocate  # type: ignore[method-assign]
    replay = LiveReplay(trace, pool).start()
    assert allocated.wait(PATIENCE)
    replay.stop()  # an hour before the next row
    assert (replay.laps, replay.error) == (0, None)
    assert pool.stats().allocated_bytes == 0


def test_stopping_before_the_start_is_harmless_and_a_second_start_is_refused(
    pool: CachingAllocator, trace: Trace
) -> None:
    replay = LiveReplay(trace, pool, speed=FAST)
    replay.stop()
    with replay:
        assert replay.wait(PATIENCE)  # stopped already
    with pytest.raises(RuntimeError, match="started before"):
        replay.start()


def test_a_closed_pool_ends_it_with_the_reason(
    pool: CachingAllocator, trace: Trace, caplog: pytest.LogCaptureFixture
) -> None:
    pool.close()
    with caplog.at_level(logging.WARNING, "allocator.traces"), LiveReplay(trace, pool, speed=FAST) as replay:
        assert replay.wait(PATIENCE)
    assert isinstance(replay.error, PoolClosed)
    assert replay.error.__traceback__ is None
    assert "has ended: pool 'live' has been closed" in caplog.text


def test_an_allocation_that_fails_does_not_end_it(trace: Trace) -> None:
    with (
        CachingAllocator(SimDevice(memory=2 << 20), Config(limit=1024)) as small,
        LiveReplay(trace, small, speed=FAST, loop=False) as replay,
    ):
        assert replay.wait(PATIENCE)
        assert (replay.laps, replay.error) == (1, None)
        assert small.stats().out_of_memory > 0


def test_what_cannot_be_played_is_refused_before_anything_starts(
    pool: CachingAllocator, trace: Trace, write: Write
) -> None:
    class Other:
        device = type("Gpu", (), {"name": "a GPU"})()

    other: Any = Other()
    with pytest.raises(TypeError, match="plays on a simulated device, not on a GPU"):
        LiveReplay(trace, other)
    for speed in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="speed must be above 0"):
            LiveReplay(trace, pool, speed=speed)
    wrong = read_trace(write(HEADER + "0,alloc,1,0x1000,much,,\n"))
    with pytest.raises(TraceError, match="line 2"):
        LiveReplay(wrong, pool)


def test_the_sample_plays(pool: CachingAllocator) -> None:
    sample = next((Path(module.__file__).parent / "samples").glob("*.csv.gz"))
    trace = read_trace(sample)
    first = Trace(trace.path, "weir", True, lambda _: (row for row, _ in zip(trace.rows(), range(4000), strict=False)))
    summary = summarize(first)
    with LiveReplay(first, pool, speed=FAST, loop=False, summary=summary) as replay:
        assert replay.wait(PATIENCE)
    assert replay.error is None
    assert sum(pool.stats().allocations.values()) == summary.allocations


# -- pace, on a clock that is told ------------------------------------------------------------------


class FakeTime:
    """Time that passes in `wait`, and for each row as work."""

    def __init__(self, work_s: float) -> None:
        self.now = 100.0
        self.cpu = 0.0
        self.work_s = work_s
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.cpu

    def work(self) -> None:
        self.now += self.work_s
        self.cpu += self.work_s

    def is_set(self) -> bool:
        self.work()
        return False

    def wait(self, seconds: float) -> bool:
        self.slept.append(seconds)
        self.now += seconds
        return False


def played(monkeypatch: pytest.MonkeyPatch, times: list[int], *, work_s: float, speed: float) -> FakeTime:
    """What time it is after rows at these times."""
    clock: Any = FakeTime(work_s)
    monkeypatch.setattr(module, "time", clock)
    gpu = SimDevice()
    target = module._PacedTarget(gpu, module._Pace(speed, clock))
    for at in times:
        target.reach(at)
    assert gpu.now_ns == times[-1]
    assert isinstance(clock, FakeTime)
    return clock


@pytest.mark.parametrize("speed", [0.25, 1.0, 4.0])
def test_a_virtual_second_takes_a_real_one_divided_by_the_speed(speed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = played(monkeypatch, [i * 1_000_000 for i in range(2001)], work_s=1e-6, speed=speed)
    assert clock.now - 100 == pytest.approx(2.0 / speed, abs=2 * module.TICK_S)


def test_a_long_gap_passes_in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = played(monkeypatch, [0, 1_000_000_000], work_s=1e-6, speed=1.0)
    assert clock.now - 100 == pytest.approx(1.0, abs=2 * module.TICK_S)
    assert max(clock.slept) <= 2 * module.TICK_S


def test_a_trace_that_asks_for_too_much_takes_longer_and_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = played(monkeypatch, [i * 1000 for i in range(10_000)], work_s=1e-4, speed=1.0)
    assert clock.cpu == pytest.approx(1.0, rel=0.01)
    assert clock.now - 100 == pytest.approx(2.0, rel=0.02)


def test_who_was_late_does_not_hurry_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = FakeTime(1e-6)
    monkeypatch.setattr(module, "time", clock)
    target = module._PacedTarget(SimDevice(), module._Pace(1.0, clock))
    target.reach(0)
    clock.now += 10  # the machine slept
    target.reach(1_000_000)
    began = clock.now
    target.reach(1_001_000_000)
    assert clock.now - began == pytest.approx(1.0, abs=2 * module.TICK_S)


def test_a_summary_is_made_where_none_is_given(
    pool: CachingAllocator, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Summary] = []

    def counted(trace: Trace) -> Summary:
        made.append(summarize(trace))
        return made[-1]

    monkeypatch.setattr(module, "summarize", counted)
    LiveReplay(trace, pool)
    LiveReplay(trace, pool, summary=made[0])
    assert len(made) == 1

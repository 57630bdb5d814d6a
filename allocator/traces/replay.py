"""Replaying a trace: what the same program would need here.

What a replay is.  One non-blocking stream for each stream number, 0 included.  The host clock is the row's
time plus every host wait so far.  A launch keeps its recorded duration (divided by `speed`), starts when its
stream is free and not before the host clock, and writes every live block of its stream.  A free that completed
more than 50 us later was held up by other streams, so it is preceded by `record_stream` on every other stream
that has launched anything in an earlier row; a free that names another stream than its owner passes it on.
Frees of unknown pointers are counted.  Blocks live at the end are closed.  An allocation that fails is
counted and its free skipped.  Without launches nothing is known of the GPU's work, and every event is complete
at once.

Rule: the program's side is the same for every policy; only the pools differ.

Next: pools.py (the policies), targets.py (simulated or real), report.py (the numbers for people).
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from allocator.allocation import Allocation
from allocator.config import Config
from allocator.devices import Device
from allocator.errors import OutOfMemoryError
from allocator.streams import Stream
from allocator.traces.pools import Pools
from allocator.traces.progress import Meter
from allocator.traces.reader import Summary
from allocator.traces.row import ALLOC, FREE, LAUNCH, Row, Trace
from allocator.traces.series import Series
from allocator.traces.targets import Target, target_for

_STEP = 1024
"""Rows between two looks at the clock for the progress display; a power of two."""


@dataclass
class Result:
    """What one replay found.  Field names are the keys of `weir replay --json`; sizes in bytes.

    None: the policy or the device has no meaning for it.
    """

    trace: str
    policy: str
    device: str
    rows: int = 0
    skipped: int = 0
    allocations: int = 0
    peak_live_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak_in_flight_bytes: int = 0
    reuse: dict[str, int] = field(default_factory=dict)
    stream_waits: int = 0
    event_records: int = 0
    event_queries: int = 0
    driver_calls: dict[str, int] = field(default_factory=dict)
    races: int | None = None
    leaked_bytes: int = 0
    oom: int = 0
    virtual_seconds: float = 0.0
    stalled_seconds: float | None = None
    seconds: float = 0.0


@dataclass
class Replay:
    """A finished replay.

    broken: what `check()` said of the pools at the end, or None.  series: (reserved, live, in flight)
    in bytes over time, if asked for.  launches: how many the trace has.
    """

    result: Result
    broken: str | None = None
    series: Series | None = None
    launches: int = 0


def replay_trace(
    trace: Trace,
    summary: Summary,
    device: Device,
    *,
    policy: str = "weir",
    config: Config | None = None,
    speed: float = 1.0,
    series: bool = False,
    meter: Meter | None = None,
    target: Target | None = None,
) -> Replay:
    """Replay `trace`, of which `summary` is known, on `device`.

    config: the pools' settings, limit and uses included.  speed: how many times faster the GPU is than the
    recorded one.  Raises TraceError, ValueError for a wrong policy or speed, DriverError.
    """
    if not speed > 0:
        raise ValueError(f"speed must be above 0, got {speed}")
    name = describe(device)  # asks a GPU's driver, which is not to be counted
    began = time.perf_counter()
    run = _Run(summary, device, policy, config or Config(), speed, Series(3) if series else None, target)
    with run.session():
        run.play(trace, meter)
        result = run.finish(Result(trace=trace.path, policy=policy, device=name))
    result.seconds = time.perf_counter() - began
    return Replay(result, run.broken, run.series, summary.launches)


def describe(device: Device) -> str:
    """A device in words: its product name and its label."""
    return f"{device.name} ({device.label})"


class _Run:
    """One replay under way."""

    def __init__(
        self,
        summary: Summary,
        device: Device,
        policy: str,
        config: Config,
        speed: float,
        series: Series | None,
        target: Target | None,
    ) -> None:
        self._summary = summary
        self._speed = speed
        self.series = series
        self.broken: str | None = None
        self._streams = {
            number: Stream(device, non_blocking=True, name=f"stream {number}") for number in summary.streams
        }
        self._device = device
        self._pools = Pools(device, policy, config)
        self._launched: dict[int, Stream] = {}
        self._live: dict[int, tuple[Allocation, int]] = {}  # recorded address -> block, its stream's number
        self._live_bytes = 0
        self._skipped = self._allocations = self._oom = self._rows = 0
        self._target = target or target_for(device)  # last: from here on its clock runs

    def session(self) -> AbstractContextManager[object]:
        """Around `play` and `finish`."""
        return self._target.session()

    def play(self, trace: Trace, meter: Meter | None) -> None:
        """Issue every row."""
        target, total = self._target, self._summary.rows
        for row in trace.rows():
            op = row.op
            if op == LAUNCH:
                target.reach(row.time_ns)
                self._launch(row)
            elif op == ALLOC:
                target.reach(row.time_ns)
                self._allocate(row)
            elif op == FREE:
                target.reach(row.time_ns)
                self._free(row)
            self._rows += 1
            if meter is not None and not self._rows % _STEP:
                meter.rows(self._rows, total)

    def _stream(self, number: int) -> Stream:
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = Stream(self._device, non_blocking=True, name=f"stream {number}")
        return stream

    def _launch(self, row: Row) -> None:
        stream = self._streams[row.stream]
        self._launched.setdefault(row.stream, stream)
        self._target.launch(stream, round(row.gpu_duration_ns / self._speed))

    def _allocate(self, row: Row) -> None:
        stream = self._streams[row.stream]
        try:
            allocation = self._pools.allocate(row.nbytes, row.stream, stream)
        except OutOfMemoryError:
            self._oom += 1
            self._sample()
            return
        self._allocations += 1
        if not row.nbytes and (not row.pointer or row.pointer in self._live):
            allocation.close()  # an empty block: its free will name no address of its own
            return
        self._live[row.pointer] = (allocation, row.stream)
        if row.nbytes:
            self._target.attach(stream, allocation)
            self._live_bytes += allocation.size
        self._sample()

    def _free(self, row: Row) -> None:
        allocation, number = self._live.pop(row.pointer, (None, 0))
        if allocation is None:
            if row.pointer:
                self._skipped += 1
            return
        if row.line in self._summary.late:
            for other, stream in self._launched.items():
                if other != number:
                    allocation.record_stream(stream)
        self._close(allocation, number, self._stream(row.stream) if row.stream != number else None)
        self._sample()

    def _close(self, allocation: Allocation, number: int, named: Stream | None = None) -> None:
        if allocation.size:
            self._target.detach(allocation)
            self._live_bytes -= allocation.size
        allocation.close(named) if named is not None else allocation.close()
        self._pools.look(number)

    def _sample(self) -> None:
        if self.series is not None:
            pools = self._pools
            self.series.add(self._target.elapsed_ns(), (pools.reserved, self._live_bytes, pools.in_flight))

    def finish(self, result: Result) -> Result:
        """Free what is left, wait for everything, close the pools, and fill in the numbers."""
        target, pools, summary = self._target, self._pools, self._summary
        result.virtual_seconds = target.drain() / 1e9
        stalled = target.stalled_ns()
        result.driver_calls = dict(sorted(target.calls().items()))
        for (
            key,
            value,
        ) in pools.totals().items():  # before the blocks left over are freed: that is not the program's doing
            setattr(result, key, value)
        for allocation, number in self._live.values():
            self._close(allocation, number)
        self._live.clear()
        result.rows = self._rows
        result.skipped = self._skipped
        result.allocations = self._allocations
        result.oom = self._oom
        result.peak_live_bytes = summary.peak_live_bytes
        try:
            pools.check()
        except AssertionError as error:
            self.broken = str(error) or "a pool contradicts itself"
        target.drain()
        pools.close()
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        result.stalled_seconds = None if stalled is None else stalled / 1e9
        result.races = target.races()
        result.leaked_bytes = target.leaked_bytes()
        return result

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

Next: pools.py (the policies), targets.py (simulated or real), report.py (the numbers for people), live.py (for ever).
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

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


class Source(Protocol):
    """Where a player's memory comes from: `Pools`, or one pool."""

    @property
    def reserved(self) -> int:
        """Bytes held from the driver now."""

    @property
    def in_flight(self) -> int:
        """Bytes freed and not known to be finished now."""

    def allocate(self, nbytes: int, number: int, stream: Stream) -> Allocation:
        """Memory for stream `number`.  Raises OutOfMemoryError."""

    def look(self, number: int) -> None:
        """Something of stream `number` has been freed."""


class Player:
    """The program's side: issues rows on `source` and on `target`, and counts what came of them.

    `target` may be changed between two rows; streams stay.
    """

    def __init__(
        self, summary: Summary, device: Device, source: Source, speed: float = 1.0, series: Series | None = None
    ) -> None:
        self.target: Target
        self.rows = self.skipped = self.allocations = self.oom = 0
        self._summary = summary
        self._device = device
        self._source = source
        self._speed = speed
        self._series = series
        self._streams = {
            number: Stream(device, non_blocking=True, name=f"stream {number}") for number in summary.streams
        }
        self._launched: dict[int, Stream] = {}
        self._live: dict[int, tuple[Allocation, int]] = {}  # recorded address -> block, its stream's number
        self._live_bytes = 0

    def play(self, trace: Trace, meter: Meter | None = None) -> None:
        """Issue every row."""
        target, total = self.target, self._summary.rows
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
            self.rows += 1
            if meter is not None and not self.rows % _STEP:
                meter.rows(self.rows, total)

    def _stream(self, number: int) -> Stream:
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = Stream(self._device, non_blocking=True, name=f"stream {number}")
        return stream

    def _launch(self, row: Row) -> None:
        stream = self._streams[row.stream]
        self._launched.setdefault(row.stream, stream)
        self.target.launch(stream, round(row.gpu_duration_ns / self._speed))

    def _allocate(self, row: Row) -> None:
        stream = self._streams[row.stream]
        try:
            allocation = self._source.allocate(row.nbytes, row.stream, stream)
        except OutOfMemoryError:
            self.oom += 1
            self._sample()
            return
        self.allocations += 1
        if not row.nbytes and (not row.pointer or row.pointer in self._live):
            allocation.close()  # an empty block: its free will name no address of its own
            return
        self._live[row.pointer] = (allocation, row.stream)
        if row.nbytes:
            self.target.attach(stream, allocation)
            self._live_bytes += allocation.size
        self._sample()

    def _free(self, row: Row) -> None:
        allocation, number = self._live.pop(row.pointer, (None, 0))
        if allocation is None:
            if row.pointer:
                self.skipped += 1
            return
        if row.line in self._summary.late:
            for other, stream in self._launched.items():
                if other != number:
                    allocation.record_stream(stream)
        self._close(allocation, number, self._stream(row.stream) if row.stream != number else None)
        self._sample()

    def _close(self, allocation: Allocation, number: int, named: Stream | None = None) -> None:
        if allocation.size:
            self.target.detach(allocation)
            self._live_bytes -= allocation.size
        allocation.close(named) if named is not None else allocation.close()
        self._source.look(number)

    def _sample(self) -> None:
        if self._series is not None:
            source = self._source
            self._series.add(self.target.elapsed_ns(), (source.reserved, self._live_bytes, source.in_flight))

    def end(self) -> None:
        """The program is over: free what is left, and forget who has launched.  The streams stay."""
        for allocation, number in self._live.values():
            self._close(allocation, number)
        self._live.clear()
        self._launched.clear()

    def close(self) -> None:
        """Close the streams."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()


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
        self.series = series
        self.broken: str | None = None
        self._summary = summary
        self._pools = Pools(device, policy, config)
        self._player = Player(summary, device, self._pools, speed, series)
        self._target = self._player.target = target or target_for(device)  # last: from here on its clock runs

    def session(self) -> AbstractContextManager[object]:
        """Around `play` and `finish`."""
        return self._target.session()

    def play(self, trace: Trace, meter: Meter | None) -> None:
        """Issue every row."""
        self._player.play(trace, meter)

    def finish(self, result: Result) -> Result:
        """Free what is left, wait for everything, close the pools, and fill in the numbers."""
        target, pools, player = self._target, self._pools, self._player
        result.virtual_seconds = target.drain() / 1e9
        stalled = target.stalled_ns()
        result.driver_calls = dict(sorted(target.calls().items()))
        # Before the blocks left over are freed: that is not the program's doing.
        for key, value in pools.totals().items():
            setattr(result, key, value)
        player.end()
        result.rows = player.rows
        result.skipped = player.skipped
        result.allocations = player.allocations
        result.oom = player.oom
        result.peak_live_bytes = self._summary.peak_live_bytes
        try:
            pools.check()
        except AssertionError as error:
            self.broken = str(error) or "a pool contradicts itself"
        target.drain()
        pools.close()
        player.close()
        result.stalled_seconds = None if stalled is None else stalled / 1e9
        result.races = target.races()
        result.leaked_bytes = target.leaked_bytes()
        return result

"""Stream captures: what they record, what they forbid, and the graphs they make.

Rule: *the tables measured on hardware* (docs/ordering.md).  A call that a capture forbids fails **and**
invalidates the capture.  What is forbidden depends on the mode of the capture, on the thread that calls
(the one that began it, or another) and on that thread's own mode, which `Device.scope` makes RELAXED.

A graph is replayed as one piece of work on one stream, with all the accesses that were recorded; races
between the branches inside one graph are not looked for.

Next: calls.py, which asks `forbids` before each call.  Not thread-safe: callers hold the world's lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from allocator.devices.sim.streams import SimEvent, SimStream
from allocator.devices.sim.world import WORLD, CaptureMode

if TYPE_CHECKING:
    from allocator.devices.sim.calls import Item
    from allocator.devices.sim.device import SimDevice

UNSUPPORTED = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
IMPLICIT = "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"
INVALIDATED = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"


class Recording:
    """One capture under way: the streams that take part, and how far each has got."""

    def __init__(self, origin: SimStream, mode: CaptureMode, context: int) -> None:
        self.origin = origin
        self.mode = mode
        self.context = context  # the device's serial number
        self.thread = WORLD.thread.me
        self.invalid = False
        self.ended = False
        self.items: list[Item] = []
        self._steps: dict[SimStream, int] = {}
        self._reach: dict[SimStream, dict[SimStream, int]] = {}  # what each stream is ordered behind
        self._length: dict[SimStream, int] = {}
        self._add(origin)
        WORLD.recordings[self] = None

    @property
    def active(self) -> bool:
        """True while it can still become a graph."""
        return not self.invalid and not self.ended

    @property
    def streams(self) -> Iterable[SimStream]:
        """All that take part."""
        return self._steps.keys()

    @property
    def length(self) -> int:
        """Duration of the graph so far: its longest branch."""
        return max(self._length.values())

    @property
    def joined(self) -> bool:
        """True if the origin is behind the work of every other stream."""
        reach = self._reach[self.origin]
        return all(reach.get(s, 0) >= n for s, n in self._steps.items() if s is not self.origin)

    def _add(self, stream: SimStream) -> None:
        self._steps[stream] = 0
        self._reach[stream] = {}
        self._length[stream] = 0
        stream.recording = self

    def launch(self, stream: SimStream, duration: int, items: Iterable[Item]) -> None:
        """A kernel on one of the streams."""
        self._steps[stream] += 1
        self._length[stream] += duration
        self.items += items

    def record(self, event: SimEvent, stream: SimStream) -> None:
        """An event inside the capture."""
        event.void()
        event.recording = self
        event.reach = {**self._reach[stream], stream: self._steps[stream]}
        event.length = self._length[stream]

    def wait(self, stream: SimStream, event: SimEvent) -> None:
        """A wait for an event of this capture; a stream that was not part of it joins."""
        if stream not in self._steps:
            self._add(stream)
            self._steps[stream] = 1  # joining is a step that the origin has to come behind
        reach = self._reach[stream]
        for other, steps in event.reach.items():
            reach[other] = max(reach.get(other, 0), steps)
        self._length[stream] = max(self._length[stream], event.length)

    def kill(self) -> None:
        """Invalidate; the streams stay in the capture until it is ended."""
        self.invalid = True

    def end(self) -> None:
        """The streams are free again."""
        self.ended = True
        WORLD.recordings.pop(self, None)
        for stream in self._steps:
            if stream.recording is self:
                stream.recording = None


def of_context(context: int) -> list[Recording]:
    """The captures that are active in one context."""
    return [r for r in WORLD.recordings if r.context == context and r.active]


def blocking_in(context: int) -> list[Recording]:
    """Those that a blocking stream takes part in: they forbid the legacy stream."""
    return [r for r in of_context(context) if any(s.blocking for s in r.streams)]


def forbids() -> list[Recording]:
    """The captures, on any device, that an unsafe call of this thread kills."""
    thread = WORLD.thread
    if thread.mode is CaptureMode.RELAXED or not WORLD.recordings:
        return []
    return [r for r in WORLD.recordings if r.active and _kills(r, thread.me, thread.mode)]


def _kills(recording: Recording, me: object, mode: CaptureMode) -> bool:
    if recording.mode is CaptureMode.RELAXED:
        return False
    if recording.thread is me:
        return True
    return recording.mode is CaptureMode.GLOBAL and mode is CaptureMode.GLOBAL


class Graph:
    """A captured graph.  Keeps the hand-outs of the memory it was captured with: a replay is theirs."""

    def __init__(self, device: SimDevice, duration: int, items: list[Item]) -> None:
        self.device = device
        self.duration_ns = duration
        self.items = items
        self.closed = False

    def launch(self, stream: object) -> None:
        """Queue one replay on `stream`.  ValueError once closed.  Driver call: `cuGraphLaunch`."""
        if self.closed:
            raise ValueError("the graph was destroyed")
        self.device.launch_graph(self, stream)

    def close(self) -> None:
        """Destroy it; replays that are queued go on.  Twice is harmless."""
        self.closed = True

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

"""Work on streams, in virtual time.

Rule: *work starts when everything it is ordered behind has finished, and not before it was queued*.  Each
piece of work is a `Node`.  Its finish time is computed as soon as all it waits for have theirs, which is at
once unless a stream is held.  Nothing here runs: "finished" means that the finish time is not after now.

The orders are those measured on hardware (docs/ordering.md): a legacy operation (work, record, wait) is
behind all earlier work of blocking streams, and their later work and records are behind it.  A record on
any other stream leaves no work on it: whoever queries that stream does not wait for the record, nor for the
legacy work that the record waits for.

Next: calls.py.  Not thread-safe: callers hold the world's lock.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from allocator.devices.sim.capture import Recording
    from allocator.devices.sim.oracle import Line

_ids: Final = itertools.count(1)


class How(enum.Enum):
    """Why one node is behind another."""

    OWN = 0  # the stream's own order
    BARRIER = 1  # the legacy stream's
    WAIT = 2  # cuStreamWaitEvent: the only kind that counts as a stall


class Meter:
    """What one device adds up, in virtual ns."""

    def __init__(self) -> None:
        self.host_ns = 0  # host waits
        self.stream_ns = 0  # time by which waits delayed work on streams
        self.latest = 0  # the latest finish time known so far


class Node:
    """One piece of queued work.  `finish` is None until it is known.

    `bare` is when the stream would have been ready without its latest waits, to tell how long they stalled it.
    """

    __slots__ = ("bare", "bare_ready", "dependents", "duration", "finish", "meter", "missing", "ready", "work")

    def __init__(self, meter: Meter, now: int, duration: int = 0, *, work: bool = False) -> None:
        self.finish: int | None = None
        self.bare = 0
        self.ready = now
        self.bare_ready = now
        self.duration = duration
        self.meter = meter
        self.work = work  # ends a stall, as marks, waits and gates do not
        self.missing = 0
        self.dependents: list[tuple[Node, How]] | None = None

    def behind(self, other: Node | None, how: How) -> None:
        """Order this node behind `other`.  Before `settle` only."""
        if other is None:
            return
        if other.finish is None:
            self.missing += 1
            if other.dependents is None:
                other.dependents = []
            other.dependents.append((self, how))
        else:
            self._take(other, other.finish, how)

    def _take(self, other: Node, finish: int, how: How) -> None:
        if finish > self.ready:
            self.ready = finish
        if how is How.OWN:
            self.bare_ready = max(self.bare_ready, other.bare)
        elif how is How.BARRIER:
            self.bare_ready = max(self.bare_ready, finish)

    def settle(self) -> None:
        """Compute the finish time if all it needs is known, and then those that waited for it."""
        todo = [self]
        while todo:
            node = todo.pop()
            if node.missing or node.finish is not None:
                continue
            node.finish = finish = node.ready + node.duration
            meter = node.meter
            if finish > meter.latest:
                meter.latest = finish
            if node.work:
                meter.stream_ns += node.ready - node.bare_ready
                node.bare = finish
            else:
                node.bare = node.bare_ready
            dependents, node.dependents = node.dependents, None
            for dependent, how in dependents or ():
                dependent.missing -= 1
                dependent._take(node, finish, how)
                todo.append(dependent)

    def done(self, now: int) -> bool:
        """True if finished at `now`."""
        return self.finish is not None and self.finish <= now


class SimStream:
    """One stream.  `tail` is its last work; records are not work (except on legacy)."""

    __slots__ = ("__weakref__", "alive", "blocking", "gate", "handle", "ident", "line", "priority", "recording", "tail")

    def __init__(self, handle: int, line: Line, *, blocking: bool, priority: int = 0, ident: int | None = None) -> None:
        self.handle = handle
        self.ident = new_id() if ident is None else ident
        self.line = line
        self.blocking = blocking
        self.priority = priority
        self.tail: Node | None = None
        self.gate: Node | None = None
        self.recording: Recording | None = None
        self.alive = True


def new_id() -> int:
    """A stream id: never repeated in this process, on any device."""
    return next(_ids)


class SimEvent:
    """One event.  `node` is its last record (None: never recorded, or its record failed: done)."""

    __slots__ = ("handle", "length", "mark", "node", "owner", "reach", "recording", "timing")

    def __init__(self, handle: int, owner: Any, *, timing: bool) -> None:
        self.handle = handle
        self.owner = owner  # the device
        self.timing = timing
        self.void()

    def void(self) -> None:
        """As if it had never been recorded."""
        self.node: Node | None = None
        self.mark: dict[Line, int] = {}
        self.recording: Recording | None = None
        self.reach: dict[SimStream, int] = {}
        self.length = 0


class Queues:
    """The order among one device's streams."""

    def __init__(self, legacy: SimStream, meter: Meter) -> None:
        self.legacy = legacy
        self.meter = meter
        self._since_legacy: dict[SimStream, None] = {}  # blocking streams with work behind which legacy is not yet
        self._busy: dict[SimStream, None] = {}  # whoever may have unfinished work, destroyed streams too
        self._prune_at = 64

    def work(self, stream: SimStream, now: int, duration: int) -> Node:
        """Queue a kernel, copy or graph launch."""
        node = Node(self.meter, now, duration, work=True)
        self._queue(stream, node, now)
        node.settle()
        return node

    def gate(self, stream: SimStream, now: int) -> Node:
        """Queue work that is not over before `open_gate`."""
        node = Node(self.meter, now)
        node.missing = 1
        self._queue(stream, node, now)
        return node

    def open_gate(self, node: Node, now: int) -> None:
        """Let a gate's stream go on."""
        node.missing -= 1
        node.ready = max(node.ready, now)
        node.bare_ready = max(node.bare_ready, now)
        node.settle()

    def record(self, stream: SimStream, now: int) -> Node:
        """A mark behind the stream's work (and legacy's, for a blocking stream)."""
        node = Node(self.meter, now)
        if stream is self.legacy:
            self._queue(stream, node, now)
        else:
            node.behind(stream.tail, How.OWN)
            if stream.blocking:
                node.behind(self.legacy.tail, How.BARRIER)
        node.settle()
        return node

    def record_context(self, now: int) -> Node:
        """A mark behind everything; nobody is behind it."""
        node = Node(self.meter, now)
        for tail in self.unfinished(now):
            node.behind(tail, How.BARRIER)
        node.settle()
        return node

    def wait(self, stream: SimStream, event: Node, now: int) -> None:
        """Later work of `stream` starts after `event`."""
        node = Node(self.meter, now)
        if stream is self.legacy:
            self._queue(stream, node, now)
        else:
            # Not behind legacy itself: later work and records are, a query of this stream is not.
            node.behind(stream.tail, How.OWN)
            self._append(stream, node, now)
        node.behind(event, How.WAIT)
        node.settle()

    def of_stream(self, stream: SimStream) -> list[Node]:
        """What a query or host wait of `stream` looks at."""
        nodes = [] if stream.tail is None else [stream.tail]
        if stream is self.legacy:
            nodes += [s.tail for s in self._since_legacy if s.tail is not None]
        return nodes

    def unfinished(self, now: int) -> list[Node]:
        """The last work of every stream that is not idle, destroyed streams included."""
        self._prune(now)
        return [s.tail for s in self._busy if s.tail is not None]

    def _queue(self, stream: SimStream, node: Node, now: int) -> None:
        node.behind(stream.tail, How.OWN)
        if stream is self.legacy:
            for other in self._since_legacy:
                node.behind(other.tail, How.BARRIER)
        elif stream.blocking:
            node.behind(self.legacy.tail, How.BARRIER)
        self._append(stream, node, now)

    def _append(self, stream: SimStream, node: Node, now: int) -> None:
        stream.tail = node
        self._busy[stream] = None
        if stream is self.legacy:
            self._since_legacy.clear()
        elif stream.blocking:
            self._since_legacy[stream] = None
        if len(self._busy) > self._prune_at:
            self._prune(now)
            self._prune_at = 64 + 2 * len(self._busy)

    def _prune(self, now: int) -> None:
        for streams in (self._busy, self._since_legacy):
            for stream in _idle(streams, now):
                del streams[stream]


def _idle(streams: Iterable[SimStream], now: int) -> list[SimStream]:
    return [s for s in streams if s.tail is None or s.tail.done(now)]


def latest(nodes: Iterable[Node]) -> int:
    """The last finish time; all are known."""
    return max(_finishes(nodes), default=0)


def _finishes(nodes: Iterable[Node]) -> Iterator[int]:
    for node in nodes:
        assert node.finish is not None
        yield node.finish

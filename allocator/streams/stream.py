"""The streams that users hold: `Stream`, `current_stream`, and the context manager `stream`.

A `Stream` made here owns its driver stream: it ends with `close()`, or when the last reference goes, and its
memory then serves everyone once its work is done.  `Stream.of(...)` gives a face to anybody else's stream.

Rule: making a stream current orders nothing (R5).  The current stream belongs to a thread and a device; at
first it is the legacy stream.
Next: event.py; registry.py, which holds what a stream has got to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from allocator.devices import LEGACY, PER_THREAD, Device
from allocator.errors import DriverError, StreamClosed
from allocator.streams.identity import OwnedHandle, handle_of
from allocator.streams.registry import Registry
from allocator.streams.sealing import Sealing
from allocator.streams.timeline import Kind, Timeline
from allocator.sync import shielded

if TYPE_CHECKING:
    from allocator.streams.event import Event


class Stream:
    """A CUDA stream of one device; speaks `__cuda_stream__`, so other libraries accept it.

    non_blocking: not ordered against the legacy stream.  priority: lower numbers run first; 0 is the usual.
    name: up to 40 characters, for metrics and dumps.
    Driver calls: `cuStreamCreateWithPriority`, `cuStreamGetId`.  Raises DriverError.
    """

    __slots__ = ("__weakref__", "_device", "_owned", "bare", "fast", "owner", "registry", "timeline")

    @shielded
    def __init__(self, device: Device, non_blocking: bool = True, priority: int = 0, name: str | None = None) -> None:
        self._owned: OwnedHandle | None = None
        self.owner: object = None
        """The foreign object that keeps the stream alive, for a face that a user holds."""
        self.bare: int | None = None
        """A bare handle that its caller keeps alive as long as memory on it lives (R9).  For the allocator."""
        registry = Registry.of(device)
        registry.check_usable()
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority must be an integer, not {type(priority).__name__}")
        with registry.calls():
            least, greatest = device.stream_priority_range()
            if not greatest <= priority <= least:
                raise ValueError(f"priority must lie between {greatest} (runs first) and {least}, got {priority}")
            non_blocking = bool(non_blocking)
            handle = device.stream_create(non_blocking=non_blocking, priority=priority)
        owned = OwnedHandle(handle)
        self._device = device
        self.registry = registry
        """All streams of the device's context.  For the allocator."""
        try:
            self.timeline: Timeline | None = registry.adopt(
                handle, owned, non_blocking=non_blocking, name=None if name is None else str(name)[:40]
            )
        except DriverError:
            with suppress(DriverError):
                registry.destroy(owned)
            raise
        self._owned = owned
        self.fast: Timeline | None = self.timeline
        """`timeline`, as long as nothing has to be looked at before the stream is used; else None."""
        Sealing(registry).end_finished()

    @classmethod
    def _face(cls, device: Device, registry: Registry, line: Timeline | None, bare: int | None = None) -> Stream:
        self = cls.__new__(cls)
        self._device, self.registry, self.timeline, self._owned, self.bare = device, registry, line, None, bare
        self.fast = line if line is not None and line.kind is Kind.LEGACY else None
        self.owner = None
        return self

    @classmethod
    def legacy(cls, device: Device) -> Stream:
        """The legacy default stream: ordered against every blocking stream.  No driver call."""
        registry = Registry.of(device)
        return cls._face(device, registry, registry.legacy)

    @classmethod
    def per_thread(cls, device: Device) -> Stream:
        """The per-thread default stream of whichever thread uses this object.  No driver call."""
        return cls._face(device, Registry.of(device), None)

    @classmethod
    def of(cls, device: Device, stream: object = None, line: Timeline | None = None) -> Stream:
        """`stream` itself if it is one of ours, the current one for None, else a face for a foreign stream.

        The face keeps the foreign object alive, unless `line` is given: its timeline, looked up already by an
        allocation, which holds the object itself and only while it lives.
        Driver calls and errors: those of `Registry.resolve`; ValueError for a stream of another device.
        """
        registry = Registry.of(device)
        if stream is None:
            return current_stream(device) if line is None else cls._face(device, registry, line)
        if isinstance(stream, Stream):
            if stream.registry is not registry:
                raise ValueError(f"{stream!r} belongs to device {stream._device.label}, not to {device.label}")
            return stream
        timeline = registry.resolve(stream) if line is None else line
        if timeline.kind is Kind.PER_THREAD:
            return cls.per_thread(device)
        face = cls._face(device, registry, timeline, None if timeline.owner is stream else handle_of(stream))
        if line is None:
            face.owner = timeline.owner
        return face

    @property
    def device(self) -> Device:
        """The stream's device."""
        return self._device

    @property
    def line(self) -> Timeline:
        """The stream's timeline; of the calling thread for a per-thread stream.  For the allocator."""
        line = self.timeline
        return self.registry.per_thread() if line is None else line

    @property
    @shielded
    def handle(self) -> int:
        """The driver's handle: 1 legacy, 2 per-thread.  StreamClosed once there is none."""
        if self.timeline is None:
            return PER_THREAD
        if self.timeline.kind is Kind.LEGACY:
            return LEGACY
        self.registry.check_forked()
        with self.registry.borrow(self.timeline, by_program=True) as handle:
            if handle is None and not self.timeline.ended:
                handle = self.bare  # the caller of a bare handle keeps it alive as long as the block (R9)
            if handle is None:
                raise StreamClosed(f"{self!r} has been closed")
            return handle

    @property
    def id(self) -> int:
        """The driver's id, which is never used again.  `cuStreamGetId` for the legacy stream, else no call."""
        line = self.line
        if line.identity < 0:
            with self._device.scope():
                line.identity = self._device.stream_id(LEGACY)
        return line.identity

    @property
    def name(self) -> str | None:
        """The name given, if any."""
        return self.line.name

    @property
    def closed(self) -> bool:
        """True once the stream has ended."""
        return self.timeline is not None and self.timeline.ended

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)

    def record_event(self) -> Event:
        """A new event behind all work so far.  Driver calls: `cuEventCreate`, `cuEventRecord`, capture queries."""
        from allocator.streams.event import Event

        event = Event(self._device)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Later work of this stream starts after what `event` was last recorded behind."""
        event.wait(self)

    def wait_stream(self, other: object) -> None:
        """Later work of this stream starts after all work that `other` has been given.  A record and a wait."""
        theirs = Stream.of(self._device if not isinstance(other, Stream) else other._device, other)
        event = theirs.record_event()
        event.wait(self)

    @shielded
    def synchronize(self) -> None:
        """Wait on the host for all work of the stream."""
        self.registry.check_usable()
        self.registry.before_mark()
        Sealing(self.registry).synchronize(self._require(), self.bare)
        self.registry.host_waited()

    @shielded
    def query(self) -> bool:
        """True if the stream is idle."""
        self.registry.check_usable()
        self.registry.before_mark()
        return Sealing(self.registry).query(self._require(), self.bare)

    @shielded
    def close(self) -> None:
        """End the stream: no more work; queued work still runs.  Twice is harmless; the special streams never end."""
        if self.timeline is not None and self.timeline.kind is not Kind.LEGACY and not self.timeline.ended:
            self.fast = None
            Sealing(self.registry).end(self.timeline, self.bare)

    def _require(self) -> Timeline:
        line = self.line
        if line.ended:
            raise StreamClosed(f"{self!r} has been closed")
        return line

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.timeline is other.timeline and self.registry is other.registry

    def __hash__(self) -> int:
        return hash((id(self.registry), self.timeline.number if self.timeline is not None else 0))

    def __repr__(self) -> str:
        if self.timeline is None:
            return f"<Stream per-thread on {self._device.label}>"
        what = self.timeline.name or f"{self.timeline.kind.value} {self.timeline.number}"
        return f"<Stream {what} on {self._device.label}{' closed' if self.timeline.ended else ''}>"

    def __del__(self) -> None:
        # A finaliser only queues: it may run inside anybody's lock (DESIGN 5).
        try:
            if self._owned is not None and self.timeline is not None:
                self.registry.finished.append(self.timeline)
        except AttributeError:  # the constructor failed before there was anything to end
            return


def target(device: Device, stream: object) -> tuple[Timeline, int | None]:
    """The timeline meant by anything stream-like, and a handle that is alive for the length of the call (R9).

    None means the current stream.  Raises what `Stream.of` raises, and StreamClosed.
    """
    if stream is None:
        stream = current_stream(device)
    if isinstance(stream, Stream):
        face = Stream.of(device, stream)
        line = face.line
        if line.ended:
            raise StreamClosed(f"{face!r} has been closed")
        return line, face.bare
    return Registry.of(device).resolve(stream), handle_of(stream)


def current_stream(device: Device) -> Stream:
    """The calling thread's current stream of the device; at first the legacy stream.  No driver call."""
    registry = Registry.of(device)
    stack: list[Stream] | None = getattr(registry.local, "stack", None)
    return stack[-1] if stack else Stream.legacy(device)


@contextmanager
def stream(s: object) -> Iterator[Stream]:
    """Make `s` the calling thread's current stream of its device inside a `with`.  Orders nothing (R5).

    `s` is one of our streams.  TypeError otherwise: a foreign stream does not say its device.
    """
    if not isinstance(s, Stream):
        raise TypeError(f"stream() takes an allocator.Stream, not {type(s).__name__}; see Stream.of(device, stream)")
    stack: list[Stream] | None = getattr(s.registry.local, "stack", None)
    if stack is None:
        stack = s.registry.local.stack = []
    depth = len(stack)
    try:
        stack.append(s)
        yield s
    finally:
        del stack[depth:]

"""The event that users hold.

Rule (R5): what a wait teaches is the snapshot of *this object's* last record, kept with the object and never
under the driver's handle; a version is read on both sides of the wait, so that a record made meanwhile by
another thread teaches nothing.  The event is the program's: it may be recorded again at any time, so it never
counts as a seal of ours.

Next: stream.py, sealing.py.
"""

from __future__ import annotations

from contextlib import suppress

from allocator.devices import Device
from allocator.errors import DriverError, ForkError, StreamClosed
from allocator.events import EMPTY, SyncPoint, VectorClock
from allocator.streams.registry import Registry
from allocator.streams.stream import Stream, target
from allocator.streams.timeline import Timeline
from allocator.sync import shielded


class _Record:
    """One record: where it lies, and what a waiter gets to know.  Replaced whole, so that readers see one record."""

    __slots__ = ("clock", "line", "point")

    def __init__(self, line: Timeline | None, point: SyncPoint | None, clock: VectorClock) -> None:
        self.line = line
        self.point = point
        self.clock = clock


_NOTHING = _Record(None, None, EMPTY)


class Event:
    """A CUDA event.  timing: keep times, for `elapsed_time`.

    Driver call: `cuEventCreate` at once, `cuEventDestroy` when the last reference goes.  Raises DriverError.
    """

    __slots__ = ("__weakref__", "_device", "_event", "_record", "_recording", "_records", "_registry", "timing")

    @shielded
    def __init__(self, device: Device, timing: bool = False) -> None:
        self._event = 0
        self._device = device
        self._registry = Registry.of(device)
        self._registry.check_usable()
        with self._registry.calls():
            self._event = device.event_create(timing=timing)
        self.timing = timing
        self._record = _NOTHING
        self._records = 0
        self._recording = 0

    @property
    def handle(self) -> int:
        """The driver's handle, for other libraries to wait for.  Record it through this object only (R5)."""
        return self._event

    @shielded
    def record(self, stream: object = None) -> None:
        """Record behind all work that `stream` (None: the current one) has been given.

        Closes the stream's seqno and seals nothing.  While the stream captures, the record goes into the graph
        and teaches nothing (R5).  Driver calls: two `cuStreamIsCapturing`, one `cuEventRecord`.
        """
        registry, device = self._registry, self._device
        registry.check_usable()
        line, given = target(device, stream)
        registry.before_mark()
        with registry.lock:
            self._record = _NOTHING  # whatever comes next, the old record is not what the event stands for
            self._records += 1
            mine, alone = self._records, not self._recording
            self._recording += 1
        record = _NOTHING
        try:
            with registry.borrow(line, given, by_program=True) as handle:
                if handle is None:
                    raise StreamClosed(f"{line!r} has no handle any more, or belongs to another thread")
                with registry.calls():
                    captured = registry.capturing(handle)
                    with registry.lock:
                        seqno, clock = (line.closed, EMPTY) if captured else line.close_seqno()  # before (R4)
                    device.event_record(self._event, handle)
                    if not captured and not registry.capturing(handle):
                        record = _Record(line, SyncPoint(line.number, seqno), clock)
        finally:
            with registry.lock:
                self._recording -= 1
                if alone and mine == self._records:  # else two threads recorded at once: nobody knows which is last
                    self._record = record

    @shielded
    def wait(self, stream: object = None) -> None:
        """Later work of `stream` (None: the current one) starts after the last record.

        Driver calls: two `cuStreamIsCapturing`, one `cuStreamWaitEvent`.
        """
        device = stream.device if isinstance(stream, Stream) else self._device  # waiting across devices works
        registry = Registry.of(device)
        registry.check_usable()
        line, given = target(device, stream)
        before = self._record
        with registry.borrow(line, given, by_program=True) as handle:
            if handle is None:
                raise StreamClosed(f"{line!r} has no handle any more, or belongs to another thread")
            with registry.calls():
                captured = registry.capturing(handle)
                device.stream_wait_event(handle, self._event)
                captured = captured or registry.capturing(handle)
        if captured or registry is not self._registry:
            return
        with registry.lock:
            if self._record is before:
                line.learn(before.clock)
                registry.prune(line)

    @shielded
    def query(self) -> bool:
        """True if the work before the last record is over, or there was none.  `cuEventQuery`."""
        self._registry.check_usable()
        before = self._record
        with self._registry.calls():
            if not self._device.event_query(self._event):
                return False
        self._over(before)
        return True

    @shielded
    def synchronize(self) -> None:
        """Wait on the host for the work before the last record.  `cuEventSynchronize`."""
        self._registry.check_usable()
        before = self._record
        with self._registry.calls():
            self._device.event_synchronize(self._event)
        self._over(before)
        self._registry.host_waited()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event's record to that of `end`.  Both with `timing=True`, else ValueError."""
        if not (self.timing and end.timing):
            raise ValueError("elapsed_time needs two events made with timing=True")
        with self._registry.calls():
            return self._device.event_elapsed_ms(self._event, end._event)

    def _over(self, before: _Record) -> None:
        if before.line is None or before.point is None or self._record is not before:
            return
        self._registry.mark([(before.line, before.point.seqno)])

    def __del__(self) -> None:
        # The driver keeps what was recorded.  A finaliser makes no driver call (DESIGN 5): it leaves the event
        # to the next one who needs an event or ends a stream.
        try:
            if self._event:
                self._registry.orphan_events.append(self._event)
        except AttributeError:  # the constructor failed before there was an event
            return


def destroy_orphans(registry: Registry) -> None:
    """Destroy the driver events whose `Event` has gone.  `cuEventDestroy` each."""
    if not registry.orphan_events or registry.forked or registry.lost:
        return
    device = registry.device
    with suppress(DriverError, ForkError), device.scope():
        for _ in range(len(registry.orphan_events)):
            try:
                event = registry.orphan_events.popleft()
            except IndexError:  # another thread took the last
                return
            device.event_destroy(event)

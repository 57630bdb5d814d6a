"""The simulated driver: the calls of the device protocol, with CUDA's rules and stricter ones.

Rule: *every call is judged before it acts*: forked process, scope, broken context, fault plan, dead handle,
capture; then it changes state, then it tells the oracle.  What only a mistake can cause is also written to
`violations`, since the caller may swallow the exception.

One lock guards everything (world.py).  `before_call` runs outside of it, and host waits give it up.

Next: device.py (what a program does with the device).  Rules: docs/ordering.md.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from allocator.devices.device import LEGACY, PER_THREAD, Capture
from allocator.devices.sim import capture, memory
from allocator.devices.sim.faults import Faults
from allocator.devices.sim.oracle import HandOut, Mark, Oracle
from allocator.devices.sim.scope import Scope
from allocator.devices.sim.streams import Meter, Node, Queues, SimEvent, SimStream, latest, new_id
from allocator.devices.sim.world import WORLD, Clock
from allocator.errors import DriverError

T = TypeVar("T")
_serials: Final = itertools.count()
_INVALID_VALUE: Final = "CUDA_ERROR_INVALID_VALUE"
_INVALID_HANDLE: Final = "CUDA_ERROR_INVALID_HANDLE"


Item = tuple["DriverCalls", int, int, bool, HandOut | None]
"""One access of a launch: whose memory, ptr, nbytes, whether it writes, for which hand-out."""


class DriverCalls:
    """The protocol's half of `SimDevice`; see `allocator.devices.Device` for each call's contract."""

    watches: Final = True
    simulated: Final = True
    granularity: Final = memory.GRANULARITY

    def __init__(
        self, total: int, ordinal: int, name: str, *, touching: bool, virtual_memory: bool, context_events: bool
    ) -> None:
        self.ordinal = ordinal
        self.name = name
        self.label = f"sim:{ordinal}"
        self.serial = next(_serials)
        self.key = ("sim", self.serial)
        self.supports_virtual_memory = virtual_memory
        self.supports_context_events = context_events
        self.calls: Counter[str] = Counter()
        self.costs: dict[str, int] = {}
        self.before_call: Callable[[str], object] | None = None
        self.violations: list[str] = []
        self.clock = Clock()
        self.clock.members.add(self)
        self.meter = Meter()
        legacy_id = new_id()
        self.oracle = Oracle(legacy_id)
        self.memory = memory.Memory(total, WORLD.add_device(self), touching=touching)
        self._pid = os.getpid()
        self._faults = Faults()
        self._broken: tuple[str, str] | None = None
        self._legacy = SimStream(LEGACY, self.oracle.legacy, blocking=True, ident=legacy_id)
        self._queues = Queues(self._legacy, self.meter)
        self._streams: dict[int, SimStream] = {}
        self._events: dict[int, SimEvent] = {}
        # Handles are far apart and differ from device to device, as pointers do.
        self._new_handles = itertools.count((self.serial + 1) << 32, 0x100)
        self._stream_handles: list[int] = []
        self._event_handles: list[int] = []

    # -- judging ------------------------------------------------------------------------------

    def refused(self, call: str, code: str, detail: str, *, sticky: bool = False) -> DriverError:
        """The error for a caller's mistake; noted in `violations`."""
        self.violations.append(f"{call}: {code} ({detail})")
        return DriverError(call, code, detail, sticky=sticky)

    def broken(self, call: str, code: str, detail: str) -> DriverError:
        """As `refused`, and the context is lost (R11)."""
        self._broken = (code, detail)
        return self.refused(call, code, detail, sticky=True)

    def before(self, call: str, *, scoped: bool = True) -> None:
        """What comes before the lock: fork, scope, the test's hook."""
        if os.getpid() != self._pid:
            raise self.refused(call, "CUDA_ERROR_NOT_INITIALIZED", "called after a fork, in the child", sticky=True)
        thread = WORLD.thread
        if scoped and not (thread.stack and thread.stack[-1] is self):
            raise self.refused(call, "CUDA_ERROR_INVALID_CONTEXT", f"called outside of the scope() of {self.label}")
        hook = self.before_call
        if hook is not None and not thread.in_hook:
            thread.in_hook = True
            try:
                hook(call)
            finally:
                thread.in_hook = False

    def enter(self, call: str) -> None:
        """What comes first inside the lock: count, cost, broken context, fault plan."""
        if self._broken is not None:
            code, detail = self._broken
            raise DriverError(call, code, f"the context is lost: {detail}", sticky=True)
        self.calls[call] += 1
        if self.costs:
            self.clock.now += self.costs.get(call, 0)
        fault = self._faults.strike(call)
        if fault is not None:
            if fault.sticky:
                self._broken = (fault.error, "planned")
            raise DriverError(call, fault.error, "planned", sticky=fault.sticky)

    def stream_of(self, call: str, handle: int) -> SimStream:
        """The stream behind a handle.  A dead one breaks the device: a real driver crashes."""
        stream = self._streams.get(handle)
        if stream is not None:
            return stream
        if handle == LEGACY:
            return self._legacy
        if handle == PER_THREAD:
            streams = WORLD.thread.streams
            stream = streams.get(self)
            if stream is None:
                ident = new_id()
                stream = SimStream(handle, self.oracle.line(handle, ident, blocking=True), blocking=True, ident=ident)
                streams[self] = stream
            return stream
        raise self.broken(call, _INVALID_HANDLE, f"{handle:#x} is no live stream of {self.label}")

    def event_of(self, call: str, handle: int, *, own: bool = True) -> SimEvent:
        """The event behind a handle; `own`: of this device.  A dead one breaks the device."""
        event = self._events.get(handle)
        if event is not None:
            return event
        for device in list(WORLD.devices.values()):
            event = device._events.get(handle)
            if event is not None:
                if own:
                    raise DriverError(call, _INVALID_HANDLE, f"an event of {device.label}")
                return event
        raise self.broken(call, _INVALID_HANDLE, f"{handle:#x} is no live event")

    def kill(self, call: str, code: str, recordings: Sequence[capture.Recording]) -> None:
        """If there are any captures given, invalidate them and raise."""
        if recordings:
            for recording in recordings:
                recording.kill()
            raise DriverError(call, code, "a stream is capturing; the capture is now invalid")

    def judge_stream(self, call: str, stream: SimStream, *, unsafe: bool = False) -> None:
        """Raise if a capture forbids this call on this stream (legacy: while a blocking stream captures)."""
        if not WORLD.recordings:
            return
        recording = stream.recording
        if recording is not None:
            if recording.invalid:
                raise DriverError(call, capture.INVALIDATED)
            self.kill(call, capture.UNSUPPORTED, [recording])
        if stream is self._legacy:
            self.kill(call, capture.IMPLICIT, capture.blocking_in(self.serial))
        if unsafe:
            self.kill(call, capture.UNSUPPORTED, capture.forbids())

    def judge_event(self, call: str, event: SimEvent) -> None:
        """Raise if the event belongs to a capture, or if a capture forbids asking."""
        recording = event.recording
        if recording is not None:
            if recording.active:
                self.kill(call, "CUDA_ERROR_CAPTURED_EVENT", [recording])
            raise DriverError(call, _INVALID_VALUE, "the event was recorded in a capture")
        self.kill(call, capture.UNSUPPORTED, capture.forbids())

    # -- waiting ------------------------------------------------------------------------------

    def wait_on_host(self, call: str, nodes: list[Node]) -> None:
        """Move virtual time to the end of all `nodes`; the lock is held once, and given up while they are held."""
        WORLD.wait_resolved(nodes, any_of=False, call=call)
        if self._broken is not None:
            raise DriverError(call, self._broken[0], "the context was lost during the wait", sticky=True)
        self._stall_until(latest(nodes))

    def _stall_until(self, when: int) -> None:
        if when > self.clock.now:
            self.meter.host_ns += when - self.clock.now
            self.clock.now = when

    # -- the calling thread -------------------------------------------------------------------

    def clock_ns(self) -> int:
        """Virtual time."""
        return self.clock.now

    def hand_out(self, ptr: int, nbytes: int, owner: object) -> None:
        """Tell the oracle who owns these bytes from now on."""
        with WORLD.lock:
            self.oracle.hand_out(ptr, nbytes, owner)

    def scope(self) -> Scope:
        """Make the context current and the thread RELAXED."""
        return Scope(self)

    def ctx_synchronize(self) -> None:
        """Wait for everything; kills captures."""
        call = "cuCtxSynchronize"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            self.kill(call, capture.UNSUPPORTED, capture.of_context(self.serial))
            mark = self.oracle.record_context()
            self.wait_on_host(call, self._queues.unfinished(self.clock.now))
            self.oracle.host_learns(mark)

    def ctx_record_event(self, event: int) -> None:
        """Record behind everything; kills captures."""
        call = "cuCtxRecordEvent"
        self.before(call)
        with WORLD.lock:
            recorded = self._enter_record(call, event)
            if not self.supports_context_events:
                raise self.refused(call, "CUDA_ERROR_NOT_SUPPORTED", "this driver is older than 12.5")
            self.kill(call, capture.UNSUPPORTED, capture.of_context(self.serial))
            recorded.void()
            recorded.node = self._queues.record_context(self.clock.now)
            recorded.mark = self.oracle.record_context()

    # -- streams ------------------------------------------------------------------------------

    def stream_create(self, *, non_blocking: bool, priority: int) -> int:
        """A new stream, under the handle freed last if there is one."""
        call = "cuStreamCreateWithPriority"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            handle = self._stream_handles.pop() if self._stream_handles else next(self._new_handles)
            ident = new_id()
            line = self.oracle.line(handle, ident, blocking=not non_blocking)
            self._streams[handle] = SimStream(
                handle, line, blocking=not non_blocking, priority=max(-5, min(0, priority)), ident=ident
            )
            return handle

    def stream_priority_range(self) -> tuple[int, int]:
        """(0, -5), as on hardware."""
        call = "cuCtxGetStreamPriorityRange"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            return 0, -5

    def stream_destroy(self, stream: int) -> None:
        """The handle can come back at once; queued work goes on."""
        call = "cuStreamDestroy"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            if stream in (LEGACY, PER_THREAD):
                raise self.refused(call, _INVALID_HANDLE, "the default streams cannot be destroyed")
            found = self.stream_of(call, stream)
            if found.recording is not None:
                found.recording.kill()
            del self._streams[stream]
            self._stream_handles.append(stream)

    def stream_id(self, stream: int) -> int:
        """Kills a capture of that stream."""
        call = "cuStreamGetId"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            found = self.stream_of(call, stream)
            self.judge_stream(call, found)
            return found.ident

    def stream_is_blocking(self, stream: int) -> bool:
        """Kills a capture of that stream."""
        call = "cuStreamGetFlags"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            found = self.stream_of(call, stream)
            self.judge_stream(call, found)
            return found.blocking

    def stream_is_capturing(self, stream: int) -> Capture:
        """Harmless, but an error for legacy while a blocking stream captures."""
        call = "cuStreamIsCapturing"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            found = self.stream_of(call, stream)
            if found is self._legacy and capture.blocking_in(self.serial):
                raise DriverError(call, capture.IMPLICIT, "a blocking stream is capturing")
            if found.recording is None:
                return Capture.NONE
            return Capture.INVALIDATED if found.recording.invalid else Capture.ACTIVE

    def stream_query(self, stream: int) -> bool:
        """For legacy: False while any blocking stream is busy, and no barrier."""
        call = "cuStreamQuery"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            found = self.stream_of(call, stream)
            self.judge_stream(call, found, unsafe=True)
            now = self.clock.now
            if not all(node.done(now) for node in self._queues.of_stream(found)):
                return False
            self.oracle.host_learns(self.oracle.position(found.line))
            return True

    def stream_synchronize(self, stream: int) -> None:
        """Wait for what is queued now."""
        call = "cuStreamSynchronize"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            found = self.stream_of(call, stream)
            self.judge_stream(call, found, unsafe=True)
            mark = self.oracle.position(found.line)  # before the wait: what others queue meanwhile is not proved
            self.wait_on_host(call, self._queues.of_stream(found))
            self.oracle.host_learns(mark)

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Also for events of other devices."""
        call = "cuStreamWaitEvent"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            waiting = self.stream_of(call, stream)
            waited = self.event_of(call, event, own=False)
            theirs = waited.recording
            if theirs is not None and theirs.active and waiting.recording in (None, theirs):
                if waiting is self._legacy:
                    self.kill(call, capture.IMPLICIT, [theirs])
                theirs.wait(waiting, waited)
                return
            if theirs is not None and theirs.active:
                both = [r for r in (theirs, waiting.recording) if r is not None]
                self.kill(call, "CUDA_ERROR_STREAM_CAPTURE_MERGE", both)
            self.judge_stream(call, waiting)
            if theirs is not None:
                raise DriverError(call, _INVALID_VALUE, "the event was recorded in a capture")
            if waited.node is None:
                return
            if waited.owner is not self:
                self.clock.join(waited.owner.clock)
            self._queues.wait(waiting, waited.node, self.clock.now)
            self.oracle.wait(waiting.line, waited.mark)

    # -- events -------------------------------------------------------------------------------

    def event_create(self, *, timing: bool = False) -> int:
        """A new event; handles are recycled like those of streams."""
        call = "cuEventCreate"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            handle = self._event_handles.pop() if self._event_handles else next(self._new_handles)
            self._events[handle] = SimEvent(handle, self, timing=timing)
            return handle

    def event_destroy(self, event: int) -> None:
        """Harmless to what was recorded."""
        call = "cuEventDestroy"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            self.event_of(call, event)
            del self._events[event]
            self._event_handles.append(event)

    def _enter_record(self, call: str, event: int) -> SimEvent:
        """A record that fails leaves an event that queries as done, as on hardware."""
        try:
            self.enter(call)
        except DriverError:
            if event in self._events:
                self._events[event].void()
            raise
        return self.event_of(call, event)

    def event_record(self, event: int, stream: int) -> None:
        """Move the event behind the stream's work so far."""
        call = "cuEventRecord"
        self.before(call)
        with WORLD.lock:
            recorded = self._enter_record(call, event)
            recording = self.stream_of(call, stream)
            if recording.recording is not None and recording.recording.active:
                recording.recording.record(recorded, recording)
                return
            recorded.void()
            self.judge_stream(call, recording)
            recorded.node = self._queues.record(recording, self.clock.now)
            recorded.mark = self.oracle.record(recording.line)

    def event_query(self, event: int) -> bool:
        """True also if never recorded."""
        call = "cuEventQuery"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            found = self.event_of(call, event)
            self.judge_event(call, found)
            if found.node is not None and not found.node.done(self.clock.now):
                return False
            self.oracle.host_learns(found.mark)
            return True

    def event_synchronize(self, event: int) -> None:
        """Wait for the record that is current now."""
        call = "cuEventSynchronize"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            found = self.event_of(call, event)
            self.judge_event(call, found)
            if found.node is not None:
                mark = found.mark
                self.wait_on_host(call, [found.node])
                self.oracle.host_learns(mark)

    def event_elapsed_ms(self, start: int, end: int) -> float:
        """Both must have been made with timing, recorded, and be complete."""
        call = "cuEventElapsedTime"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            times = []
            for event in (self.event_of(call, start), self.event_of(call, end)):
                if event.recording is not None:
                    self.judge_event(call, event)
                if not event.timing or event.node is None:
                    raise DriverError(call, _INVALID_HANDLE, "needs two recorded events made with timing")
                if not event.node.done(self.clock.now):
                    raise DriverError(call, "CUDA_ERROR_NOT_READY")
                assert event.node.finish is not None
                times.append(event.node.finish)
            return (times[1] - times[0]) / 1e6

    def wait_any(self, events: Sequence[int], timeout_s: float) -> bool:
        """Jump to the first completion, or by `timeout_s`.  Counted as one `cuEventQuery` for each event.

        Of several events it does not say which one is complete, so only a single one teaches the host anything.
        """
        call = "cuEventQuery"
        if not events:
            return True
        for _ in events:
            self.before(call)
        with WORLD.lock:
            marks: list[tuple[Node | None, Mark]] = []
            for handle in events:
                self.enter(call)
                found = self.event_of(call, handle)
                self.judge_event(call, found)
                marks.append((found.node, found.mark))
            nodes = [node for node, _ in marks if node is not None]
            if len(nodes) == len(marks):
                if timeout_s == math.inf:
                    WORLD.wait_resolved(nodes, any_of=True, call=call)
                first = min((n.finish for n in nodes if n.finish is not None), default=None)
                if timeout_s != math.inf:
                    deadline = self.clock.now + round(timeout_s * 1e9)
                    if first is None or first > deadline:
                        self._stall_until(deadline)
                        return False
                assert first is not None
                self._stall_until(first)
            if len(marks) == 1:
                self.oracle.host_learns(marks[0][1])
            return True

    # -- memory -------------------------------------------------------------------------------

    @property
    def total_memory(self) -> int:
        """Bytes."""
        return self.memory.total

    def _of_memory(self, call: str, action: Callable[..., T], *args: int) -> T:
        try:
            return action(*args)
        except memory.Refusal as refusal:
            raise self.refused(call, *refusal.args) from None
        except memory.Failure as failure:
            raise DriverError(call, *failure.args) from None

    def _plain_call(self, call: str, action: Callable[..., T], *args: int) -> T:
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            return self._of_memory(call, action, *args)

    def mem_get_info(self) -> tuple[int, int]:
        """(free, total)."""
        return self._plain_call("cuMemGetInfo", lambda: (self.memory.free, self.memory.total))

    def mem_address_reserve(self, nbytes: int) -> int:
        """Addresses only."""
        return self._plain_call("cuMemAddressReserve", self.memory.reserve, nbytes)

    def mem_address_free(self, ptr: int, nbytes: int) -> None:
        """Refused while something is mapped."""
        self._plain_call("cuMemAddressFree", self.memory.unreserve, ptr, nbytes)

    def mem_create(self, nbytes: int) -> int:
        """Physical memory."""
        return self._plain_call("cuMemCreate", self.memory.create, nbytes)

    def mem_release(self, handle: int) -> None:
        """Given back once unmapped."""
        self._plain_call("cuMemRelease", self.memory.release, handle)

    def mem_map(self, ptr: int, nbytes: int, handle: int) -> None:
        """Refused twice for one handle or one address."""
        self._plain_call("cuMemMap", self.memory.map, ptr, nbytes, handle)

    def mem_set_access(self, ptr: int, nbytes: int) -> None:
        """Over whole mappings."""
        self._plain_call("cuMemSetAccess", self.memory.set_access, ptr, nbytes)

    def mem_unmap(self, ptr: int, nbytes: int) -> None:
        """Refused while queued work uses the bytes; a violation if the host had no proof that none does (R13)."""
        call = "cuMemUnmap"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            unproven = self._refuse_in_use(call, ptr, nbytes)
            self._of_memory(call, self.memory.unmap, ptr, nbytes)
            if unproven:
                self.violations.append(f"{call}: {unproven} finished, but the host had not been told so")
            self.oracle.forget(ptr, nbytes)

    def mem_alloc(self, nbytes: int) -> int:
        """Plain memory, accessible at once."""
        call = "cuMemAlloc"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            self.kill(call, capture.UNSUPPORTED, capture.forbids())
            return self._of_memory(call, self.memory.alloc, nbytes)

    def mem_free(self, ptr: int) -> None:
        """Waits for the device; refused, before that, if queued work uses these very bytes."""
        call = "cuMemFree"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            self.kill(call, capture.UNSUPPORTED, capture.forbids())
            nbytes = self._of_memory(call, self.memory.plain_size, ptr)
            self._refuse_in_use(call, ptr, nbytes)
            mark = self.oracle.record_context()
            self.wait_on_host(call, self._queues.unfinished(self.clock.now))
            self.oracle.host_learns(mark)
            self._of_memory(call, self.memory.free_plain, ptr)
            self.oracle.forget(ptr, nbytes)

    def _refuse_in_use(self, call: str, ptr: int, nbytes: int) -> str:
        """Raise if queued work uses the bytes.  What is over although the host cannot know, or ""."""
        unproven = ""
        for use in self.oracle.uses(ptr, nbytes):
            if use.open:
                raise self.refused(call, _INVALID_VALUE, f"memory in use: attached, last {use.access()}")
            if not use.token.done(self.clock.now):
                raise self.refused(call, _INVALID_VALUE, f"memory in use: {use.access()} is queued")
            unproven = str(use.access())
        return unproven

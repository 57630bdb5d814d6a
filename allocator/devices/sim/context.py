"""One simulated context: its state, and how every call is judged before it acts.

Rule: *fork, scope, hook; then under the lock: broken context, count, cost, fault plan; then handles and
captures*.  What only a mistake can cause is also written to `violations`, since the caller may swallow the
exception.

Next: calls.py (the calls themselves).
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from allocator.devices.device import LEGACY, PER_THREAD
from allocator.devices.sim import capture, memory
from allocator.devices.sim.contents import Contents
from allocator.devices.sim.faults import Faults
from allocator.devices.sim.oracle import Oracle
from allocator.devices.sim.streams import Meter, Node, Queues, SimEvent, SimStream, latest, new_id
from allocator.devices.sim.world import WORLD, Clock
from allocator.errors import DriverError

T = TypeVar("T")
_serials: Final = itertools.count()
INVALID_VALUE: Final = "CUDA_ERROR_INVALID_VALUE"
INVALID_HANDLE: Final = "CUDA_ERROR_INVALID_HANDLE"


class Context:
    """State and judgement; the base of `DriverCalls`."""

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
        self.failures: Counter[str] = Counter()
        self.costs: dict[str, int] = {}
        self.before_call: Callable[[str], object] | None = None
        self.violations: list[str] = []
        self.clock = Clock()
        self.clock.members[self] = None
        self.meter = Meter()
        legacy_id = new_id()
        self.oracle = Oracle(legacy_id)
        self.memory = memory.Memory(total, WORLD.add_device(self), touching=touching)
        self.contents = Contents()
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
            self.failures[call] += 1
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
        raise self.broken(call, INVALID_HANDLE, f"{handle:#x} is no live stream of {self.label}")

    def event_of(self, call: str, handle: int, *, own: bool = True) -> SimEvent:
        """The event behind a handle; `own`: of this device.  A dead one breaks the device."""
        event = self._events.get(handle)
        if event is not None:
            return event
        for device in list(WORLD.devices.values()):
            event = device._events.get(handle)
            if event is not None:
                if own:
                    raise DriverError(call, INVALID_HANDLE, f"an event of {device.label}")
                return event
        raise self.broken(call, INVALID_HANDLE, f"{handle:#x} is no live event")

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
            raise DriverError(call, INVALID_VALUE, "the event was recorded in a capture")
        self.kill(call, capture.UNSUPPORTED, capture.forbids())

    # -- waiting ------------------------------------------------------------------------------

    def wait_on_host(self, call: str, nodes: list[Node]) -> None:
        """Move virtual time to the end of all `nodes`; the lock is held once, and given up while they are held."""
        WORLD.wait_resolved(nodes, any_of=False, call=call)
        if self._broken is not None:
            raise DriverError(call, self._broken[0], "the context was lost during the wait", sticky=True)
        self.stall_until(latest(nodes))

    def stall_until(self, when: int) -> None:
        if when > self.clock.now:
            self.meter.host_ns += when - self.clock.now
            self.clock.now = when

    # -- helpers of single calls --------------------------------------------------------------

    def enter_record(self, call: str, event: int) -> SimEvent:
        """A record that fails leaves an event that queries as done, as on hardware."""
        try:
            self.enter(call)
        except DriverError:
            if event in self._events:
                self._events[event].void()
            raise
        return self.event_of(call, event)

    def of_memory(self, call: str, action: Callable[..., T], *args: int) -> T:
        try:
            return action(*args)
        except memory.Refusal as refusal:
            self.failures[call] += 1
            raise self.refused(call, *refusal.args) from None
        except memory.Failure as failure:
            self.failures[call] += 1
            raise DriverError(call, *failure.args) from None

    def plain_call(self, call: str, action: Callable[..., T], *args: int) -> T:
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            return self.of_memory(call, action, *args)

    def refuse_in_use(self, call: str, ptr: int, nbytes: int) -> str:
        """Raise if queued work uses the bytes.  What is over although the host cannot know, or ""."""
        unproven = ""
        for use in self.oracle.uses(ptr, nbytes):
            if use.open:
                raise self.refused(call, INVALID_VALUE, f"memory in use: attached, last {use.access()}")
            if not use.token.done(self.clock.now):
                raise self.refused(call, INVALID_VALUE, f"memory in use: {use.access()} is queued")
            unproven = str(use.access())
        return unproven

"""The simulated driver: the calls of the device protocol, with CUDA's rules and stricter ones.

Rule: *every call is judged* (context.py), *then changes state, then tells the oracle*.  One lock guards
everything (world.py); `before_call` runs outside of it, and host waits give it up.

As long as the protocol has calls: each is its rule, its change and its mark, and they read best side by side.
Next: device.py (what a program does with the device).  Rules: docs/ordering.md.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Final

from allocator.devices.device import LEGACY, PER_THREAD, Capture
from allocator.devices.sim import capture
from allocator.devices.sim.context import INVALID_HANDLE, INVALID_VALUE, Context
from allocator.devices.sim.oracle import HandOut, Mark, Use
from allocator.devices.sim.scope import Scope
from allocator.devices.sim.streams import Node, SimEvent, SimStream, new_id
from allocator.devices.sim.world import WORLD
from allocator.errors import DriverError

Item = tuple[Context, int, int, bool, HandOut | None]
"""One access of a launch: whose memory, ptr, nbytes, whether it writes, for which hand-out."""


class DriverCalls(Context):
    """The protocol's half of `SimDevice`; see `allocator.devices.Device` for each call's contract."""

    watches: Final = True
    simulated: Final = True

    # -- the calling thread -------------------------------------------------------------------

    def clock_ns(self) -> int:
        """Virtual time."""
        return self.clock.now

    def hand_out(self, ptr: int, nbytes: int, owner: object) -> None:
        """Tell the oracle who owns these bytes from now on."""
        with WORLD.lock:
            self.oracle.hand_out(ptr, nbytes, owner)
            if self.contents:
                self.contents.forget(ptr, nbytes)

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
            recorded = self.enter_record(call, event)
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
                raise self.refused(call, INVALID_HANDLE, "the default streams cannot be destroyed")
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
                raise DriverError(call, INVALID_VALUE, "the event was recorded in a capture")
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

    def event_record(self, event: int, stream: int) -> None:
        """Move the event behind the stream's work so far."""
        call = "cuEventRecord"
        self.before(call)
        with WORLD.lock:
            recorded = self.enter_record(call, event)
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
                    raise DriverError(call, INVALID_HANDLE, "needs two recorded events made with timing")
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
                        self.stall_until(deadline)
                        return False
                assert first is not None
                self.stall_until(first)
            if len(marks) == 1:
                self.oracle.host_learns(marks[0][1])
            return True

    # -- memory -------------------------------------------------------------------------------

    @property
    def total_memory(self) -> int:
        """Bytes."""
        return self.memory.total

    def mem_get_info(self) -> tuple[int, int]:
        """(free, total)."""
        return self.plain_call("cuMemGetInfo", lambda: (self.memory.free, self.memory.total))

    def mem_address_reserve(self, nbytes: int) -> int:
        """Addresses only."""
        return self.plain_call("cuMemAddressReserve", self.memory.reserve, nbytes)

    def mem_address_free(self, ptr: int, nbytes: int) -> None:
        """Refused while something is mapped."""
        self.plain_call("cuMemAddressFree", self.memory.unreserve, ptr, nbytes)

    def mem_create(self, nbytes: int) -> int:
        """Physical memory."""
        return self.plain_call("cuMemCreate", self.memory.create, nbytes)

    def mem_release(self, handle: int) -> None:
        """Given back once unmapped."""
        self.plain_call("cuMemRelease", self.memory.release, handle)

    def mem_map(self, ptr: int, nbytes: int, handle: int) -> None:
        """Refused twice for one handle or one address."""
        self.plain_call("cuMemMap", self.memory.map, ptr, nbytes, handle)

    def mem_set_access(self, ptr: int, nbytes: int) -> None:
        """Over whole mappings."""
        self.plain_call("cuMemSetAccess", self.memory.set_access, ptr, nbytes)

    def mem_unmap(self, ptr: int, nbytes: int) -> None:
        """Refused while queued work uses the bytes; a violation if the host had no proof that none does (R13)."""
        call = "cuMemUnmap"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            unproven = self.refuse_in_use(call, ptr, nbytes)
            self.of_memory(call, self.memory.unmap, ptr, nbytes)
            if unproven:
                self.violations.append(f"{call}: {unproven} finished, but the host had not been told so")
            self.oracle.forget(ptr, nbytes)
            self.contents.forget(ptr, nbytes)

    def mem_alloc(self, nbytes: int) -> int:
        """Plain memory, accessible at once."""
        call = "cuMemAlloc"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            self.kill(call, capture.UNSUPPORTED, capture.forbids())
            return self.of_memory(call, self.memory.alloc, nbytes)

    def mem_free(self, ptr: int) -> None:
        """Waits for the device; refused, before that, if queued work uses these very bytes."""
        call = "cuMemFree"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            self.kill(call, capture.UNSUPPORTED, capture.forbids())
            nbytes = self.of_memory(call, self.memory.plain_size, ptr)
            self.refuse_in_use(call, ptr, nbytes)
            mark = self.oracle.record_context()
            self.wait_on_host(call, self._queues.unfinished(self.clock.now))
            self.oracle.host_learns(mark)
            self.of_memory(call, self.memory.free_plain, ptr)
            self.oracle.forget(ptr, nbytes)
            self.contents.forget(ptr, nbytes)

    def mem_set_async(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        """Takes no time.  To the oracle it is a write by the pool itself, and no hand-out's."""
        call = "cuMemsetD8Async"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            earlier = self.oracle.writes(ptr, nbytes)
            self.contents.fill(ptr, nbytes, value, self._own_access(call, ptr, nbytes, stream, write=True), earlier)

    def mem_copy_to_host_async(self, host: int, ptr: int, nbytes: int, stream: int) -> None:
        """As to pageable memory: returns with the bytes there, which proves nothing; waiting for the stream does."""
        call = "cuMemcpyDtoHAsync"
        self.before(call)
        with WORLD.lock:
            self.enter(call)
            self.kill(call, capture.UNSUPPORTED, capture.forbids())
            node = self._own_access(call, ptr, nbytes, stream, write=False)
            self.wait_on_host(call, [node])
            data = self.contents.read(ptr, nbytes, self.clock.now)
            ctypes.memmove(host, (ctypes.c_char * nbytes).from_buffer(data), nbytes)

    def _own_access(self, call: str, ptr: int, nbytes: int, stream: int, *, write: bool) -> Node:
        """Queue work of the pool's own on these bytes."""
        found = self.stream_of(call, stream)
        self.judge_stream(call, found)
        if nbytes <= 0 or not self.memory.accessible(ptr, nbytes):
            raise self.refused(call, INVALID_VALUE, f"{nbytes} bytes at {ptr:#x} are not mapped, or no access was set")
        node = self._queues.work(found, self.clock.now, 0)
        self.oracle.launch(found.line, (), node)
        self.oracle.touch(Use(found.line, write, self.oracle.pools), ptr, nbytes)
        return node

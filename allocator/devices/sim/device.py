"""The simulated device: what a program, or a test that plays one, does with it.

Rule: *deterministic, in virtual time, and stricter than a GPU*.  Nothing finishes unless time advances
(`advance`, `run_until_idle`, `costs`) or somebody waits on the host.  The driver calls that an allocator
makes are in calls.py; the methods here are the program's side, and set their own scope.

A stream is an int handle (0 means legacy), or has `.handle` or `__cuda_stream__`.  An item of memory is an
allocation (`.ptr`, `.size`, `.closed`) or a tuple (ptr, nbytes).

Next: calls.py (driver calls), streams.py (time and order), oracle.py (races).  Rules: docs/ordering.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from allocator.devices.device import LEGACY, PER_THREAD
from allocator.devices.sim import capture
from allocator.devices.sim.calls import DriverCalls, Item
from allocator.devices.sim.context import Context
from allocator.devices.sim.memory import SLOT_BITS
from allocator.devices.sim.oracle import HandOut, Race, Resident, Use
from allocator.devices.sim.scope import ProgramScope
from allocator.devices.sim.streams import Node, SimStream
from allocator.devices.sim.world import WORLD, CaptureMode
from allocator.errors import DriverError


class SimDevice(DriverCalls):
    """One simulated GPU.

    memory: bytes of physical memory.  others: bytes of it that other processes hold.  touching: plain
    allocations lie at adjacent addresses.  virtual_memory, context_events: what the device supports.

    >>> gpu = SimDevice()
    >>> with gpu.scope():
    ...     stream = gpu.stream_create(non_blocking=True, priority=0)
    ...     ptr = gpu.mem_alloc(4096)
    >>> gpu.launch(stream, duration_ns=1000, writes=[(ptr, 4096)])
    >>> with gpu.scope():
    ...     gpu.stream_query(stream), gpu.now_ns
    ...     gpu.stream_synchronize(stream)
    ...     gpu.stream_query(stream), gpu.now_ns
    (False, 0)
    (True, 1000)
    """

    def __init__(
        self,
        memory: int = 8 << 30,
        ordinal: int = 0,
        name: str | None = None,
        touching: bool = False,
        others: int = 0,
        *,
        virtual_memory: bool = True,
        context_events: bool = True,
    ) -> None:
        super().__init__(
            memory,
            ordinal,
            name or f"Simulated device {ordinal}",
            touching=touching,
            virtual_memory=virtual_memory,
            context_events=context_events,
        )
        self.others = others
        self._held: dict[int, list[SimStream]] = {}
        self._attached: dict[int | tuple[int, int], list[Resident]] = {}
        self._attached_refs: dict[int, weakref.ref[Any]] = {}
        """By `id`, which is given again: an allocation that goes without `detach` leaves nothing under its own."""

    def __repr__(self) -> str:
        return f"<SimDevice {self.label} {self.name!r} at {self.clock.now} ns>"

    # -- time ---------------------------------------------------------------------------------

    @property
    def now_ns(self) -> int:
        """Virtual time."""
        return self.clock.now

    def advance(self, ns: int) -> None:
        """Let `ns` pass; ValueError if negative."""
        if ns < 0:
            raise ValueError(f"time does not run backwards: {ns}")
        with WORLD.lock:
            self.clock.now += ns

    def run_until_idle(self) -> None:
        """Let time pass until all work that is not held has finished.  Tells the host nothing (R2)."""
        with WORLD.lock:
            self.clock.now = max(self.clock.now, self.meter.latest)

    @property
    def stalled_ns(self) -> int:
        """Virtual time that host waits have taken."""
        return self.meter.host_ns

    @property
    def stream_stalled_ns(self) -> int:
        """Virtual time by which waits put on streams have delayed their work."""
        return self.meter.stream_ns

    @property
    def last_finish_ns(self) -> int:
        """When the last work that is not held finishes, or finished."""
        return self.meter.latest

    # -- work ---------------------------------------------------------------------------------

    def launch(
        self, stream: object, duration_ns: int = 1000, reads: Iterable[Any] = (), writes: Iterable[Any] = ()
    ) -> None:
        """Queue a kernel.  Driver call: `cuLaunchKernel`.

        ValueError for a closed allocation.  Memory that is not mapped, or has no access set, breaks the
        device (CUDA_ERROR_ILLEGAL_ADDRESS).
        """
        call = "cuLaunchKernel"
        handle = handle_of(stream)
        if duration_ns < 0:
            raise ValueError(f"duration_ns must not be negative, got {duration_ns}")
        spans = [(*_span(item), False, item) for item in reads]
        spans += [(*_span(item), True, item) for item in writes]
        self.before(call, scoped=False)
        with WORLD.lock:
            self.enter(call)
            found = self.stream_of(call, handle)
            recording = found.recording
            if recording is None or not recording.active:
                self.judge_stream(call, found)
            items = [self._item(call, *span) for span in spans if span[1]]
            if recording is not None:
                recording.launch(found, duration_ns, items)
            else:
                self._run(found, duration_ns, items)

    def launch_graph(self, graph: capture.Graph, stream: object) -> None:
        """Queue a replay; `Graph.launch` is the usual way.  Driver call: `cuGraphLaunch`."""
        call = "cuGraphLaunch"
        handle = handle_of(stream)
        self.before(call, scoped=False)
        with WORLD.lock:
            self.enter(call)
            found = self.stream_of(call, handle)
            recording = found.recording
            if recording is None or not recording.active:
                self.judge_stream(call, found)
            for owner, ptr, nbytes, _, _ in graph.items:
                self._check_access(call, owner, ptr, nbytes)
            if recording is not None:
                recording.launch(found, graph.duration_ns, graph.items)
            else:
                self._run(found, graph.duration_ns, graph.items)

    def _run(self, stream: SimStream, duration_ns: int, items: Iterable[Item]) -> None:
        node: Node = self._queues.work(stream, self.clock.now, duration_ns)
        line = stream.line
        self.oracle.launch(line, (), node)
        for owner, ptr, nbytes, write, hand_out in items:
            owner.oracle.touch(Use(line, write, hand_out), ptr, nbytes)
            if write and owner.contents:
                owner.contents.write(ptr, nbytes, node)

    def _item(self, call: str, ptr: int, nbytes: int, write: bool, item: object) -> Item:
        """One access, with the device whose memory it is and the hand-out it belongs to."""
        owner = WORLD.devices.get(ptr >> SLOT_BITS)
        self._check_access(call, owner, ptr, nbytes)
        assert owner is not None
        if owner is not self:
            self.clock.join(owner.clock)  # whether the work is over is then one question for both
        hand_out: HandOut | None = owner.oracle.owner_at(ptr, None if isinstance(item, tuple) else item)
        return owner, ptr, nbytes, write, hand_out

    def _check_access(self, call: str, owner: Context | None, ptr: int, nbytes: int) -> None:
        if owner is None or not owner.memory.accessible(ptr, nbytes):
            detail = f"{nbytes} bytes at {ptr:#x} are not mapped, or no access was set"
            raise self.broken(call, "CUDA_ERROR_ILLEGAL_ADDRESS", detail)

    def attach(self, stream: object, allocation: Any) -> None:
        """From its next launch on, every launch on `stream` writes `allocation`, until `detach`.

        The cheap form of naming it in each launch.  Launches that are captured do not count.
        """
        call = "cuLaunchKernel"
        ptr, nbytes = _span(allocation)
        with WORLD.lock:
            found = self.stream_of(call, handle_of(stream))
            if nbytes:
                owner, _, _, _, hand_out = self._item(call, ptr, nbytes, True, allocation)
                resident = owner.oracle.attach(found.line, ptr, nbytes, hand_out)
                key = _key(allocation)
                self._attached.setdefault(key, []).append(resident)
                if isinstance(key, int) and key not in self._attached_refs:
                    with suppress(TypeError):  # some objects cannot say when they go
                        self._attached_refs[key] = weakref.ref(allocation, partial(self._forget_attached, key))

    def detach(self, allocation: Any) -> None:
        """End every `attach` of this allocation; harmless if there is none."""
        with WORLD.lock:
            key = _key(allocation)
            found = self._attached.get(key, ())
            self._forget_attached(key)
            for resident in found:
                self.oracle.detach(resident)

    def _forget_attached(self, key: int | tuple[int, int], _: object = None) -> None:
        self._attached.pop(key, None)
        if isinstance(key, int):
            self._attached_refs.pop(key, None)

    @property
    def races(self) -> list[Race]:
        """The races found so far."""
        return self.oracle.races

    # -- the latch ----------------------------------------------------------------------------

    def hold(self, stream: object) -> None:
        """Work queued on `stream` from now on stands still until `resume`.  Twice is harmless."""
        with WORLD.lock:
            found = self.stream_of("cuLaunchKernel", handle_of(stream))
            if found.recording is not None:
                raise ValueError("a capturing stream cannot be held: its work is not queued but recorded")
            if found.gate is None:
                node = self._queues.gate(found, self.clock.now)
                found.gate = node
                self._held.setdefault(found.handle, []).append(found)

    def resume(self, stream: object) -> None:
        """Let a held stream go on; harmless if it is not held.

        Also finds a stream that was destroyed while held, and another thread's per-thread stream, if it is the
        only one, or the latest, held under that handle.
        """
        handle = handle_of(stream)
        with WORLD.lock:
            held = self._held.get(handle)
            if not held:
                return
            mine = WORLD.thread.streams.get(self) if handle == PER_THREAD else self._streams.get(handle)
            found = mine if mine in held else held[-1]
            assert found is not None and found.gate is not None
            held.remove(found)
            gate, found.gate = found.gate, None
            self._queues.open_gate(gate, self.clock.now)
            WORLD.changed.notify_all()

    # -- captures -----------------------------------------------------------------------------

    def begin_capture(self, stream: object, mode: str = "global") -> None:
        """Record `stream`'s work instead of running it.  mode: "global", "thread_local" or "relaxed".

        Driver call: `cuStreamBeginCapture`.
        """
        call = "cuStreamBeginCapture"
        handle = handle_of(stream)
        wanted = CaptureMode(mode)
        self.before(call, scoped=False)
        with WORLD.lock:
            self.enter(call)
            found = self.stream_of(call, handle)
            if found is self._legacy:
                raise DriverError(call, capture.UNSUPPORTED, "the legacy stream cannot be captured")
            if found.recording is not None:
                raise DriverError(call, "CUDA_ERROR_ILLEGAL_STATE", "already capturing")
            capture.Recording(found, wanted, self.serial)

    def end_capture(self, stream: object) -> capture.Graph:
        """Stop recording and return the graph; DriverError if the capture was invalidated.

        Driver call: `cuStreamEndCapture`.  The stream is free again, also after an error (but for a wrong
        thread, or another stream than the one where the capture began).
        """
        call = "cuStreamEndCapture"
        handle = handle_of(stream)
        self.before(call, scoped=False)
        with WORLD.lock:
            self.enter(call)
            found = self.stream_of(call, handle)
            recording = found.recording
            if recording is None:
                raise DriverError(call, "CUDA_ERROR_ILLEGAL_STATE", "not capturing")
            if recording.origin is not found:
                raise DriverError(call, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "the capture began on another stream")
            if recording.mode is not CaptureMode.RELAXED and recording.thread is not WORLD.thread.me:
                raise DriverError(call, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "begun by another thread")
            recording.end()
            if recording.invalid:
                raise DriverError(call, capture.INVALIDATED)
            if not recording.joined:
                recording.kill()
                raise DriverError(call, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "a stream was not joined back")
            return capture.Graph(self, recording.length, recording.items)

    # -- the test's hand ----------------------------------------------------------------------

    def program_scope(self, mode: str = "global") -> ProgramScope:
        """The context is current and the thread's capture mode is `mode`, as when a program calls the driver.

        Within it the protocol's methods can be called without the protection that `scope()` gives.
        """
        return ProgramScope(self, CaptureMode(mode))

    def fail(
        self,
        name: str,
        at: int = 1,
        error: str = "CUDA_ERROR_OUT_OF_MEMORY",
        sticky: bool = False,
        *,
        times: int = 1,
    ) -> None:
        """The `at`-th call of `name` from now fails (1 = the next), and the `times` - 1 after it (0: all)."""
        with WORLD.lock:
            self._faults.plan(name, at=at, error=error, sticky=sticky, times=times)

    def clear_faults(self) -> None:
        """Forget every planned failure that has not struck."""
        with WORLD.lock:
            self._faults.clear()

    @property
    def used_bytes(self) -> int:
        """Physical memory held."""
        return self.memory.used

    @property
    def others(self) -> int:
        """Bytes held by other processes; may be set at any time."""
        return self.memory.others

    @others.setter
    def others(self, nbytes: int) -> None:
        self.memory.others = nbytes


def handle_of(stream: object) -> int:
    """The handle of a stream-like; TypeError if it is none.

    >>> handle_of(0), handle_of(2)
    (1, 2)
    """
    if not isinstance(stream, int):
        handle = getattr(stream, "handle", None)
        if handle is None:
            speak = getattr(stream, "__cuda_stream__", None)
            if speak is None:
                raise TypeError(f"{stream!r} is no stream: pass a handle, or what has .handle or __cuda_stream__")
            handle = speak()[1]
        stream = int(handle)
    return stream or LEGACY


def _span(item: Any) -> tuple[int, int]:
    """(ptr, nbytes) of an item; ValueError for a closed allocation."""
    if isinstance(item, tuple):
        ptr, nbytes = item
        return int(ptr), int(nbytes)
    if item.closed:
        raise ValueError("the allocation is closed; to play a user's mistake, pass (ptr, nbytes)")
    return int(item.ptr), int(item.size)


def _key(allocation: Any) -> int | tuple[int, int]:
    return allocation if isinstance(allocation, tuple) else id(allocation)

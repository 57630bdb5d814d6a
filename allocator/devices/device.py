"""The device protocol: the driver calls we need, each with its contract.

One rule: *a device adds no policy*.  Each method is one driver call under its own name; what may be
called when (R4, R6, R9, R10) is decided above, so that the simulator can judge those decisions.  The
one convenience is `scope()`.

Handles, events and addresses are plain ints.  Stream handles 1 (`LEGACY`) and 2 (`PER_THREAD`) mean
the *calling thread's* stream of that kind in the *current* context; 0 is never passed (R8).

Every method raises `DriverError(call, code)` if the driver reports an error, and then has changed
nothing.  Codes are the driver's names, such as "CUDA_ERROR_OUT_OF_MEMORY".  `DriverError.sticky` is
set for errors that end the context (R11).

Next: cuda.py (a real GPU), sim/device.py (the simulator).  Facts: docs/ordering.md.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

LEGACY: Final = 1
PER_THREAD: Final = 2


class Capture(enum.IntEnum):
    """What `stream_is_capturing` answers; the driver's numbers."""

    NONE = 0
    ACTIVE = 1
    INVALIDATED = 2


class Device(Protocol):
    """One GPU (its primary context), as the allocator sees it."""

    @property
    def ordinal(self) -> int:
        """The driver's number of this device."""

    @property
    def name(self) -> str:
        """The product's name, for people."""

    @property
    def label(self) -> str:
        """Short and unique among devices: "0" for a GPU, "sim:0" for a simulated one."""

    @property
    def key(self) -> Hashable:
        """The context's identity (R8): equal for two `Device` objects over one context."""

    @property
    def total_memory(self) -> int:
        """Bytes of physical memory."""

    @property
    def granularity(self) -> int:
        """Bytes in which virtual memory is made and mapped (2 MiB); a power of two."""

    @property
    def supports_virtual_memory(self) -> bool:
        """False: only `backing="malloc"` works here."""

    @property
    def supports_context_events(self) -> bool:
        """True if `ctx_record_event` exists (driver 12.5 and newer)."""

    @property
    def watches(self) -> bool:
        """True if `hand_out` must be called for each allocation (the simulator's oracle)."""

    @property
    def simulated(self) -> bool:
        """True if time is virtual."""

    @property
    def calls(self) -> MutableMapping[str, int]:
        """Driver calls made so far, by the driver's names."""

    @property
    def failures(self) -> Mapping[str, int]:
        """Those of `calls` that the driver answered with an error: all that take memory or give it back, at least."""

    def clock_ns(self) -> int:
        """Monotonic host time in ns (virtual on the simulator).  No driver call."""

    def hand_out(self, ptr: int, nbytes: int, owner: object) -> None:
        """Announce that [ptr, ptr + nbytes) now belongs to `owner`.  Only if `watches`."""

    # -- the calling thread -------------------------------------------------------------------

    def scope(self) -> AbstractContextManager[None]:
        """Make this context current and the thread's capture mode RELAXED; restore both at the end (R10, S23).

        Every other method below, `stream_is_capturing` included, must run inside a scope of its device.
        Scopes nest, also with those of other devices; an inner scope of the same device costs at most one look at
        the current context.
        Driver calls: `cuCtxPushCurrent`, `cuThreadExchangeStreamCaptureMode`; at the end the same exchange
        and `cuCtxPopCurrent`.
        """

    def ctx_synchronize(self) -> None:
        """Wait on the host for all work of the context.  Kills every capture of the context."""

    def ctx_record_event(self, event: int) -> None:
        """Record `event` behind all work of the context.  Kills every capture of the context (R6).

        Driver call: `cuCtxRecordEvent`.  Only if `supports_context_events`.
        """

    # -- streams ------------------------------------------------------------------------------

    def stream_create(self, *, non_blocking: bool, priority: int) -> int:
        """`cuStreamCreateWithPriority`."""

    def stream_priority_range(self) -> tuple[int, int]:
        """(least, greatest) priority: lower numbers run first.  `cuCtxGetStreamPriorityRange`."""

    def stream_destroy(self, stream: int) -> None:
        """`cuStreamDestroy`: returns at once; queued work still runs.  The handle is dead and may be recycled."""

    def stream_id(self, stream: int) -> int:
        """`cuStreamGetId`: never reused within the process.  Kills a capture of that stream."""

    def stream_is_blocking(self, stream: int) -> bool:
        """`cuStreamGetFlags`: False for non-blocking streams; True for legacy and per-thread ones.

        Kills a capture of that stream.
        """

    def stream_is_capturing(self, stream: int) -> Capture:
        """`cuStreamIsCapturing`.  Harms no capture.  For LEGACY it fails while a blocking stream captures."""

    def stream_query(self, stream: int) -> bool:
        """`cuStreamQuery`: True if all work of the stream is done."""

    def stream_synchronize(self, stream: int) -> None:
        """`cuStreamSynchronize`."""

    def stream_wait_event(self, stream: int, event: int) -> None:
        """`cuStreamWaitEvent`: later work of the stream starts after the event's last record."""

    # -- events -------------------------------------------------------------------------------

    def event_create(self, *, timing: bool = False) -> int:
        """`cuEventCreate`."""

    def event_destroy(self, event: int) -> None:
        """`cuEventDestroy`: harmless while recorded work is pending."""

    def event_record(self, event: int, stream: int) -> None:
        """`cuEventRecord`."""

    def event_query(self, event: int) -> bool:
        """`cuEventQuery`.  True also for an event that was never recorded, or whose record failed (R4)."""

    def event_synchronize(self, event: int) -> None:
        """`cuEventSynchronize`."""

    def event_elapsed_ms(self, start: int, end: int) -> float:
        """`cuEventElapsedTime`, in milliseconds."""

    def wait_any(self, events: Sequence[int], timeout_s: float) -> bool:
        """Wait on the host until one of `events` is complete, at most `timeout_s` seconds (R13).

        True: at least one is complete.  False: the time is up.  On a GPU this polls with `cuEventQuery`,
        from 10 us pauses upwards; on the simulator virtual time advances, by `timeout_s` if nothing
        completes.  Never raises for a stuck stream.
        """

    # -- memory -------------------------------------------------------------------------------

    def mem_get_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device.  `cuMemGetInfo`."""

    def mem_address_reserve(self, nbytes: int) -> int:
        """`cuMemAddressReserve`: a range of addresses with nothing behind it."""

    def mem_address_free(self, ptr: int, nbytes: int) -> None:
        """`cuMemAddressFree`: nothing may be mapped in the range."""

    def mem_create(self, nbytes: int) -> int:
        """`cuMemCreate`: physical memory, a multiple of `granularity`; returns its handle."""

    def mem_release(self, handle: int) -> None:
        """`cuMemRelease`: the memory is given back once it is unmapped."""

    def mem_map(self, ptr: int, nbytes: int, handle: int) -> None:
        """`cuMemMap`, whole handles only (offset 0)."""

    def mem_set_access(self, ptr: int, nbytes: int) -> None:
        """`cuMemSetAccess`: read and write for this device and every visible one that can reach it."""

    def mem_unmap(self, ptr: int, nbytes: int) -> None:
        """`cuMemUnmap`.  Does not wait for anything: proving that nobody uses the bytes is the caller's task."""

    def mem_alloc(self, nbytes: int) -> int:
        """`cuMemAlloc`."""

    def mem_free(self, ptr: int) -> None:
        """`cuMemFree`.  Waits for the whole device."""

    def mem_set_async(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        """`cuMemsetD8Async`: queue on `stream` that every byte becomes `value`, 0 to 255."""

    def mem_copy_to_host_async(self, host: int, ptr: int, nbytes: int, stream: int) -> None:
        """`cuMemcpyDtoHAsync` to pageable memory at the address `host`, which is there until the stream was waited for.

        It is behind the stream's work, and of no other order: the plain `cuMemcpyDtoH` is work of the legacy stream.
        """


def pieces_held(device: Device) -> int:
    """Pieces of memory taken from the driver and not given back, by its answers: other processes come and go.

    Of the whole process, and each of them counts as one, whatever its size.  No driver call.
    """
    calls, failures = device.calls, device.failures

    def done(call: str) -> int:
        return calls.get(call, 0) - failures.get(call, 0)

    return done("cuMemCreate") + done("cuMemAlloc") - done("cuMemRelease") - done("cuMemFree")

"""A real GPU: the device protocol over cuda-python's driver bindings.

Rule: one method, one driver call, checked once.  `_make` counts a call and makes it; whatever is wrong
becomes one `DriverError` with the call's name.  "Not ready" is an answer.  No policy (device.py).

Two things are decided here:

* **Fork and exit.**  In a forked child every call is a `ForkError`, and leaving a scope that the parent
  opened is silent.  Once the interpreter finalises, a call answers as a driver that has shut down does:
  sticky CUDA_ERROR_DEINITIALIZED.  Neither reaches the driver.
* **The primary context** is retained at the first scope and never given back: the process owns it, and
  releasing it at exit would be a driver call too late.

Bindings 12 and 13 differ in none of the calls used, but the older ones may lack `cuCtxRecordEvent`.
Thread-safe; `calls` is exact while a global interpreter lock exists.  As long as the driver has calls that we need.
Next: device.py (the contracts), _scope.py (current context and capture mode), _bindings.py (what is
missing on this machine).
"""

from __future__ import annotations

import operator
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from allocator.devices import _bindings, _spin
from allocator.devices._scope import Scope
from allocator.devices.device import Capture, Device
from allocator.errors import DriverError, ForkError

# Errors after which the context answers every call with an error (R11).  Not among them: what a start can
# run into and a later try may not (DEVICE_UNAVAILABLE, SYSTEM_NOT_READY), and UNKNOWN, which says nothing.
STICKY: Final = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT",
        "CONTAINED",
        "CONTEXT_IS_DESTROYED",
        "DEINITIALIZED",
        "ECC_UNCORRECTABLE",
        "EXTERNAL_DEVICE",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_ADDRESS",
        "ILLEGAL_INSTRUCTION",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "LAUNCH_TIMEOUT",
        "MISALIGNED_ADDRESS",
        "MPS_CLIENT_TERMINATED",
        "MPS_RPC_FAILURE",
        "NVLINK_UNCORRECTABLE",
        "TENSOR_MEMORY_LEAK",
    )
)

_NOT_READY: Final = 600  # CUDA_ERROR_NOT_READY: an answer, not an error
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING
_DISABLE_TIMING: Final = 2  # CU_EVENT_DISABLE_TIMING
_PAUSES_S: Final = (10e-6, 1e-3)  # wait_any: first and longest pause


def _error(call: str, status: Any) -> DriverError:
    code = str(status.name)
    return DriverError(call, code, sticky=code in STICKY)


_devices: dict[int, CudaDevice] = {}


class CudaDevice:
    """GPU number `ordinal`, its primary context.  Two `CudaDevice(0)` are one object.

    Driver calls: `cuInit`, `cuDriverGetVersion`, `cuDeviceGetCount`, `cuDeviceGet`, the first time.
    Raises AllocatorError without bindings, driver or GPU; ValueError where there is no such GPU.
    """

    _driver: Any
    _handle: int
    _forks: int
    _pid: int
    _version: int
    _ordinal: int
    _functions: dict[str, Callable[..., Any]]
    _calls: defaultdict[str, int]
    _failures: defaultdict[str, int]
    _context: int | None

    def __new__(cls, ordinal: int = 0) -> CudaDevice:
        if isinstance(ordinal, bool) or not hasattr(ordinal, "__index__"):
            raise TypeError(f"a device is named by its number, an int, not {type(ordinal).__name__}")
        ordinal = operator.index(ordinal)
        if (known := _devices.get(ordinal)) is not None:
            return known
        if ordinal < 0:
            raise ValueError(f"a device number is 0 or more, not {ordinal}")
        self = super().__new__(cls)
        self._driver = _bindings.load()
        self._version = _bindings.start(self._driver)
        self._forks = _bindings.forks
        self._pid = os.getpid()
        self._ordinal = ordinal
        self._calls, self._failures = defaultdict(int), defaultdict(int)
        self._functions = {}
        self._context = None
        count = int(self._do("cuDeviceGetCount"))
        if ordinal >= count:
            raise ValueError(f"there is no GPU {ordinal}: the driver sees {count}, numbered from 0")
        self._handle = int(self._do("cuDeviceGet", ordinal))
        # No lock: it would be a lock that a fork can leave locked.  Two threads may get this far; one wins.
        return _devices.setdefault(ordinal, self)

    def __repr__(self) -> str:
        return f"CudaDevice({self._ordinal})"

    def __reduce__(self) -> tuple[type[CudaDevice], tuple[int]]:
        return (CudaDevice, (self._ordinal,))

    def _do(self, call: str, *args: object) -> Any:
        """Make one driver call; return its only result, a tuple of several, or None."""
        answer = self._make(call, *args)
        if answer[0]:
            self._failures[call] += 1
            raise _error(call, answer[0])
        if len(answer) == 2:
            return answer[1]
        return answer[1:] or None

    def _ready(self, call: str, handle: int) -> bool:
        """Make a query: True, or False for "not ready"."""
        status = self._make(call, handle)[0]
        if not status:
            return True
        if status == _NOT_READY:
            return False
        raise _error(call, status)

    def _make(self, call: str, *args: object) -> Any:
        """Count a call and make it: what the bindings return, the status first."""
        if self._forks != _bindings.forks:
            raise ForkError(f"{self!r} was made in a parent process; a CUDA context does not survive a fork")
        if sys.is_finalizing():
            raise DriverError(call, "CUDA_ERROR_DEINITIALIZED", "the interpreter is shutting down", sticky=True)
        self._calls[call] += 1
        function = self._functions.get(call)
        if function is None:
            function = getattr(self._driver, call, None)
            if function is None:
                raise DriverError(call, "CUDA_ERROR_NOT_FOUND", "these bindings are too old for it")
            self._functions[call] = function
        try:
            return function(*args)
        except RuntimeError as error:  # the bindings know it, the driver does not
            raise DriverError(call, "CUDA_ERROR_NOT_FOUND", str(error)) from None
        except ValueError as error:  # an error code newer than the bindings
            if "CUresult" not in str(error):
                raise
            raise DriverError(call, "CUDA_ERROR_UNKNOWN", str(error)) from None

    # -- what it is ---------------------------------------------------------------------------

    @property
    def ordinal(self) -> int:
        return self._ordinal

    @cached_property
    def name(self) -> str:
        raw: bytes = self._do("cuDeviceGetName", 256, self._handle)
        return raw.split(b"\0", 1)[0].decode(errors="replace").strip()

    @property
    def label(self) -> str:
        return str(self._ordinal)

    @property
    def key(self) -> Hashable:
        # One primary context a device, and one object a device: the number is the context's identity.
        return ("cuda", self._ordinal)

    @cached_property
    def total_memory(self) -> int:
        return int(self._do("cuDeviceTotalMem", self._handle))

    @cached_property
    def granularity(self) -> int:
        if not self.supports_virtual_memory:
            return 2 << 20
        minimum = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._do("cuMemGetAllocationGranularity", self._memory_kind, minimum))

    @cached_property
    def supports_virtual_memory(self) -> bool:
        attribute = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        return bool(self._do("cuDeviceGetAttribute", attribute, self._handle))

    @property
    def driver_version(self) -> tuple[int, int]:
        """The newest CUDA that the driver is for, such as (13, 0)."""
        return self._version // 1000, self._version % 1000 // 10

    def device_count(self) -> int:
        """GPUs that the driver shows to this process.  `cuDeviceGetCount`."""
        return int(self._do("cuDeviceGetCount"))

    def reaches(self, other: CudaDevice) -> bool:
        """Can kernels here read memory of the other GPU?  `cuDeviceCanAccessPeer`."""
        return bool(self._do("cuDeviceCanAccessPeer", self._handle, other._handle))

    @property
    def supports_context_events(self) -> bool:
        return self._version >= 12050 and hasattr(self._driver, "cuCtxRecordEvent")

    @property
    def watches(self) -> bool:
        return False

    @property
    def simulated(self) -> bool:
        return False

    @property
    def calls(self) -> MutableMapping[str, int]:
        return self._calls

    @property
    def failures(self) -> Mapping[str, int]:
        return self._failures

    def clock_ns(self) -> int:
        return time.monotonic_ns()

    def hand_out(self, ptr: int, nbytes: int, owner: object) -> None:
        pass

    @cached_property
    def _memory_kind(self) -> Any:
        """Pinned device memory here, as `cuMemCreate` wants it described."""
        kind = self._driver.CUmemAllocationProp()
        kind.type = self._driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        kind.location.id = self._handle
        return kind

    @cached_property
    def _access(self) -> list[Any]:
        """Read and write for this device and each visible one that can reach it, itself first."""
        reach = [self._handle]
        for ordinal in range(int(self._do("cuDeviceGetCount"))):
            if ordinal != self._ordinal:
                peer = int(self._do("cuDeviceGet", ordinal))
                if self._do("cuDeviceCanAccessPeer", peer, self._handle):
                    reach.append(peer)
        access = []
        for handle in reach:
            entry = self._driver.CUmemAccessDesc()
            entry.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            entry.location.id = handle
            entry.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            access.append(entry)
        return access

    # -- the calling thread -------------------------------------------------------------------

    def scope(self) -> AbstractContextManager[None]:
        return Scope(self)

    def ctx_synchronize(self) -> None:
        self._do("cuCtxSynchronize")

    def ctx_record_event(self, event: int) -> None:
        self._do("cuCtxRecordEvent", self.primary_context(), event)

    def primary_context(self) -> int:
        """The primary context's handle, retained at the first call (`cuDevicePrimaryCtxRetain`)."""
        if self._context is None:  # a race retains twice, which harms nobody: it is never released
            self._context = int(self._do("cuDevicePrimaryCtxRetain", self._handle))
        return self._context

    # -- streams ------------------------------------------------------------------------------

    def stream_create(self, *, non_blocking: bool, priority: int) -> int:
        return int(self._do("cuStreamCreateWithPriority", _NON_BLOCKING if non_blocking else 0, priority))

    def stream_priority_range(self) -> tuple[int, int]:
        least, greatest = self._do("cuCtxGetStreamPriorityRange")
        return int(least), int(greatest)

    def stream_destroy(self, stream: int) -> None:
        self._do("cuStreamDestroy", stream)

    def stream_id(self, stream: int) -> int:
        return int(self._do("cuStreamGetId", stream))

    def stream_is_blocking(self, stream: int) -> bool:
        return not int(self._do("cuStreamGetFlags", stream)) & _NON_BLOCKING

    def stream_is_capturing(self, stream: int) -> Capture:
        status = self._do("cuStreamIsCapturing", stream)
        return Capture(int(status)) if status else Capture.NONE  # asked before every call on a stream

    def stream_query(self, stream: int) -> bool:
        return self._ready("cuStreamQuery", stream)

    def stream_synchronize(self, stream: int) -> None:
        self._do("cuStreamSynchronize", stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._do("cuStreamWaitEvent", stream, event, 0)

    def spin(self, stream: int, duration_ns: int) -> None:
        """Queue a kernel that keeps one multiprocessor busy for `duration_ns` (for replays and tests).

        Driver calls: a scope's, `cuLaunchKernel`; at first use also `cuModuleLoadData` and
        `cuModuleGetFunction`.
        """
        with self.scope():
            self._do("cuLaunchKernel", self._spin_kernel, *_spin.launch(stream, duration_ns))

    @cached_property
    def _spin_kernel(self) -> Any:
        module = self._do("cuModuleLoadData", _spin.PTX)
        return self._do("cuModuleGetFunction", module, _spin.NAME)

    # -- events -------------------------------------------------------------------------------

    def event_create(self, *, timing: bool = False) -> int:
        return int(self._do("cuEventCreate", 0 if timing else _DISABLE_TIMING))

    def event_destroy(self, event: int) -> None:
        self._do("cuEventDestroy", event)

    def event_record(self, event: int, stream: int) -> None:
        self._do("cuEventRecord", event, stream)

    def event_query(self, event: int) -> bool:
        return self._ready("cuEventQuery", event)

    def event_synchronize(self, event: int) -> None:
        self._do("cuEventSynchronize", event)

    def event_elapsed_ms(self, start: int, end: int) -> float:
        return float(self._do("cuEventElapsedTime", start, end))

    def wait_any(self, events: Sequence[int], timeout_s: float) -> bool:
        """As the protocol says; with no events there is nothing to wait for, and the answer is False at once."""
        deadline = time.monotonic() + timeout_s
        pause, longest = _PAUSES_S
        while events:
            if any(self.event_query(event) for event in events):
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(pause, left))
            pause = min(2 * pause, longest)
        return False

    # -- memory -------------------------------------------------------------------------------

    def mem_get_info(self) -> tuple[int, int]:
        free, total = self._do("cuMemGetInfo")
        return int(free), int(total)

    def mem_address_reserve(self, nbytes: int) -> int:
        return int(self._do("cuMemAddressReserve", nbytes, 0, 0, 0))

    def mem_address_free(self, ptr: int, nbytes: int) -> None:
        self._do("cuMemAddressFree", ptr, nbytes)

    def mem_create(self, nbytes: int) -> int:
        return int(self._do("cuMemCreate", nbytes, self._memory_kind, 0))

    def mem_release(self, handle: int) -> None:
        self._do("cuMemRelease", handle)

    def mem_map(self, ptr: int, nbytes: int, handle: int) -> None:
        self._do("cuMemMap", ptr, nbytes, 0, handle, 0)

    def mem_set_access(self, ptr: int, nbytes: int) -> None:
        self._do("cuMemSetAccess", ptr, nbytes, self._access, len(self._access))

    def mem_unmap(self, ptr: int, nbytes: int) -> None:
        self._do("cuMemUnmap", ptr, nbytes)

    def mem_alloc(self, nbytes: int) -> int:
        return int(self._do("cuMemAlloc", nbytes))

    def mem_free(self, ptr: int) -> None:
        self._do("cuMemFree", ptr)

    def mem_set_async(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        self._do("cuMemsetD8Async", ptr, value, nbytes, stream)

    def mem_copy_to_host_async(self, host: int, ptr: int, nbytes: int, stream: int) -> None:
        self._do("cuMemcpyDtoHAsync", host, ptr, nbytes, stream)

    # -- for _scope.py ------------------------------------------------------------------------

    def context_is_current(self) -> bool:
        """True if the calling thread's current context is this one.  `cuCtxGetCurrent`."""
        return int(self._do("cuCtxGetCurrent")) == self.primary_context()

    def push(self) -> Any:
        """Make the context current and the thread's capture mode RELAXED; return the mode before."""
        if self._pid != os.getpid():  # a fork by foreign code, unseen by Python: asked here, as a call asks a counter
            raise ForkError(f"{self!r} was made in a parent process; a CUDA context does not survive a fork")
        self._do("cuCtxPushCurrent", self.primary_context())
        try:
            relaxed = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            return self._do("cuThreadExchangeStreamCaptureMode", relaxed)
        except BaseException:
            self._do("cuCtxPopCurrent")
            raise

    def pop(self, mode: Any) -> None:
        """Undo `push`, both parts even if the first fails.  Silent in a forked child, and at exit."""
        if self._pid != os.getpid() or self._forks != _bindings.forks or sys.is_finalizing():
            return
        try:
            self._do("cuThreadExchangeStreamCaptureMode", mode)
        finally:
            self._do("cuCtxPopCurrent")


if TYPE_CHECKING:
    _conforms: type[Device] = CudaDevice

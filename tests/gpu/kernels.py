"""Kernels for GPU tests, as PTX text that the driver compiles: no compiler needed on the machine.

latch    spins until a word of pinned host memory becomes non-zero, or 20 s have passed
fill     writes one 32-bit tag over n words
verify   counts into a word how many of n words differ from the tag

A `Latch` holds a stream still, so that a test decides what has finished; no test sleeps to get an order.
A latch that nobody releases gives up after `SAFETY_NS` and says so in `timed_out`.

Call `Kernels.warm_up()` before anything is held: the driver may load a kernel at its first launch, and
that may wait for the device.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from typing import Any, Final

from allocator.devices import CudaDevice

SAFETY_NS: Final = 20_000_000_000
_SLOTS: Final = 1024  # latches a session; each is two words: the gate, and "gave up"

_PTX: Final = b"""
.version 6.0
.target sm_52
.address_size 64

.visible .entry latch(
    .param .u64 gate,
    .param .u64 limit
)
{
    .reg .pred %closed, %early;
    .reg .b32 %value, %one;
    .reg .b64 %address, %start, %now, %gone, %limit;

    ld.param.u64 %address, [gate];
    cvta.to.global.u64 %address, %address;
    ld.param.u64 %limit, [limit];
    mov.u64 %start, %globaltimer;
LOOK:
    ld.volatile.global.u32 %value, [%address];
    setp.eq.u32 %closed, %value, 0;
    @!%closed bra DONE;
    mov.u64 %now, %globaltimer;
    sub.u64 %gone, %now, %start;
    setp.lt.u64 %early, %gone, %limit;
    @%early bra LOOK;
    mov.u32 %one, 1;
    st.volatile.global.u32 [%address+4], %one;
    membar.sys;
DONE:
    ret;
}

.visible .entry fill(
    .param .u64 words,
    .param .u64 count,
    .param .u32 tag
)
{
    .reg .pred %inside;
    .reg .b32 %t, %b, %d, %g, %tag;
    .reg .b64 %base, %count, %i, %step, %address;

    ld.param.u64 %base, [words];
    cvta.to.global.u64 %base, %base;
    ld.param.u64 %count, [count];
    ld.param.u32 %tag, [tag];
    mov.u32 %t, %tid.x;
    mov.u32 %b, %ctaid.x;
    mov.u32 %d, %ntid.x;
    mov.u32 %g, %nctaid.x;
    mul.wide.u32 %i, %b, %d;
    cvt.u64.u32 %step, %t;
    add.u64 %i, %i, %step;
    mul.wide.u32 %step, %d, %g;
NEXT_FILL:
    setp.lt.u64 %inside, %i, %count;
    @!%inside bra DONE_FILL;
    shl.b64 %address, %i, 2;
    add.u64 %address, %address, %base;
    st.global.u32 [%address], %tag;
    add.u64 %i, %i, %step;
    bra NEXT_FILL;
DONE_FILL:
    ret;
}

.visible .entry verify(
    .param .u64 words,
    .param .u64 count,
    .param .u32 tag,
    .param .u64 result
)
{
    .reg .pred %inside, %same;
    .reg .b32 %t, %b, %d, %g, %tag, %value;
    .reg .b64 %base, %count, %i, %step, %address, %result;

    ld.param.u64 %base, [words];
    cvta.to.global.u64 %base, %base;
    ld.param.u64 %count, [count];
    ld.param.u32 %tag, [tag];
    ld.param.u64 %result, [result];
    cvta.to.global.u64 %result, %result;
    mov.u32 %t, %tid.x;
    mov.u32 %b, %ctaid.x;
    mov.u32 %d, %ntid.x;
    mov.u32 %g, %nctaid.x;
    mul.wide.u32 %i, %b, %d;
    cvt.u64.u32 %step, %t;
    add.u64 %i, %i, %step;
    mul.wide.u32 %step, %d, %g;
NEXT_VERIFY:
    setp.lt.u64 %inside, %i, %count;
    @!%inside bra DONE_VERIFY;
    shl.b64 %address, %i, 2;
    add.u64 %address, %address, %base;
    ld.global.u32 %value, [%address];
    setp.eq.u32 %same, %value, %tag;
    @%same bra SAME;
    red.global.add.u32 [%result], 1;
SAME:
    add.u64 %i, %i, %step;
    bra NEXT_VERIFY;
DONE_VERIFY:
    ret;
}
\0"""


class Latch:
    """One held stream.  `release()` lets it go; harmless when repeated."""

    def __init__(self, words: Any) -> None:
        self._words = words

    def release(self) -> None:
        self._words[0] = 1

    @property
    def timed_out(self) -> bool:
        """True if the kernel gave up before it was released."""
        return bool(self._words[1])


class Kernels:
    """The kernels above on one device.  Everything runs in the device's scope, except where noted."""

    def __init__(self, gpu: CudaDevice) -> None:
        self.gpu = gpu
        self.driver = _bindings()
        self._taken = itertools.count()
        self._lock = threading.Lock()
        self._latches: list[Latch] = []
        with gpu.scope():
            module = self.cu("cuModuleLoadData", _PTX)
            self._functions = {
                name: self.cu("cuModuleGetFunction", module, name.encode()) for name in ("latch", "fill", "verify")
            }
            flags = self.driver.CU_MEMHOSTALLOC_PORTABLE | self.driver.CU_MEMHOSTALLOC_DEVICEMAP
            host = int(self.cu("cuMemHostAlloc", 8 * _SLOTS, flags))
            self._device_words = int(self.cu("cuMemHostGetDevicePointer", host, 0))
            self._words = (ctypes.c_uint32 * (2 * _SLOTS)).from_address(host)
            ctypes.memset(host, 0, 8 * _SLOTS)
            # Made here once: freeing device or pinned memory waits for held streams.
            self._host_results = int(self.cu("cuMemHostAlloc", 4 * _SLOTS, flags))
            self._device_results = gpu.mem_alloc(4 * _SLOTS)
            self._results = itertools.cycle(range(_SLOTS))

    def cu(self, call: str, *args: object) -> Any:
        """Make any driver call, also one that the device protocol lacks; a failure is a DriverError."""
        return self.gpu._do(call, *args)

    # -- launches: the context must be current ------------------------------------------------

    def hold(self, stream: int, *, safety_ns: int = SAFETY_NS) -> Latch:
        """Hold `stream` from here on, until the latch is released."""
        with self._lock:
            slot = next(self._taken)
            if slot >= _SLOTS:
                raise RuntimeError("too many latches in one session")
            words = (ctypes.c_uint32 * 2).from_buffer(self._words, 8 * slot)
            latch = Latch(words)
            self._latches.append(latch)
        self._launch("latch", stream, 1, 1, (self._device_words + 8 * slot, safety_ns), (ctypes.c_uint64,) * 2)
        return latch

    def release_all(self) -> list[Latch]:
        """Release every latch; return those that had given up before."""
        with self._lock:
            latches, self._latches = self._latches, []
        gave_up = [latch for latch in latches if latch.timed_out]
        for latch in latches:
            latch.release()
        return gave_up

    def fill(self, stream: int, ptr: int, words: int, tag: int) -> None:
        """Queue: write `tag` over `words` 32-bit words at `ptr`."""
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)
        self._launch("fill", stream, _grid(words), 256, (ptr, words, tag), kinds)

    def verify(self, stream: int, ptr: int, words: int, tag: int, result: int) -> None:
        """Queue: add to the 32-bit word at `result` how many of `words` words at `ptr` are not `tag`."""
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64)
        self._launch("verify", stream, _grid(words), 256, (ptr, words, tag, result), kinds)

    def _launch(
        self, name: str, stream: int, grid: int, block: int, values: tuple[int, ...], kinds: tuple[Any, ...]
    ) -> None:
        self.cu("cuLaunchKernel", self._functions[name], grid, 1, 1, block, 1, 1, 0, stream, (values, kinds), 0)

    # -- host side: waits for the stream named, and for no other -------------------------------

    def read_word(self, stream: int, ptr: int) -> int:
        """Copy the 32-bit word at `ptr` to the host, on `stream`, and wait for that."""
        offset = 4 * next(self._results)
        self.cu("cuMemcpyAsync", self._host_results + offset, ptr, 4, stream)
        self.gpu.stream_synchronize(stream)
        return ctypes.c_uint32.from_address(self._host_results + offset).value

    def mismatches(self, stream: int, ptr: int, words: int, tag: int) -> int:
        """Wait for `stream` and say how many of `words` words at `ptr` are not `tag`."""
        result = self._device_results + 4 * next(self._results)
        self.cu("cuMemsetD32Async", result, 0, 1, stream)
        self.verify(stream, ptr, words, tag, result)
        return self.read_word(stream, result)

    def warm_up(self) -> None:
        """Launch each kernel once and wait, so that no later launch has to load it."""
        with self.gpu.scope():
            stream = self.gpu.stream_create(non_blocking=True, priority=0)
            ptr = self.gpu.mem_alloc(4096)
            self.hold(stream).release()
            self.cu("cuMemcpyDtoDAsync", ptr, ptr + 2048, 4, stream)  # small copies may be kernels of the driver's
            self.fill(stream, ptr, 1000, 7)
            self.gpu.spin(stream, 1000)
            self.gpu.stream_synchronize(stream)
            assert self.mismatches(stream, ptr, 1000, 7) == 0
            assert self.mismatches(stream, ptr, 1000, 8) == 1000
            self.gpu.mem_free(ptr)
            self.gpu.stream_destroy(stream)
            self.release_all()


def done_within(probe: Any, seconds: float = 5.0) -> bool:
    """Ask `probe()` until it says yes, at most for `seconds`."""
    deadline = time.monotonic() + seconds
    while not probe():
        if time.monotonic() > deadline:
            return False
        time.sleep(20e-6)
    return True


def _grid(words: int) -> int:
    return max(1, min(1024, (words + 255) // 256))


def _bindings() -> Any:
    from allocator.devices import _bindings as bindings

    return bindings.load()

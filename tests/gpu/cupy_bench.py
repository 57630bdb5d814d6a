"""CuPy on a pool of its own, for one test on a real GPU."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
from rig import Rig

from allocator import CachingAllocator, Config
from allocator.devices import CudaDevice

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'weir-allocator[cupy]'")
weir = pytest.importorskip("allocator.cupy")

MIB = 1 << 20


class CuPyBench:
    """CuPy on a pool of its own, switched off again at the end, whatever happened."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.gpu: CudaDevice = rig.gpu
        self.kernels = rig.kernels
        self._pools: list[CachingAllocator] = []
        self._streams: list[weakref.ref[Any]] = []

    def install(self, **config: Any) -> CachingAllocator:
        """A new pool with these settings, and CuPy on it."""
        pool = CachingAllocator(self.gpu, config=Config(**config))
        self._pools.append(pool)
        weir.install(pool)
        return pool

    def stream(self, *, non_blocking: bool = True) -> Any:
        stream = cupy.cuda.Stream(non_blocking=non_blocking)
        self._streams.append(weakref.ref(stream))
        return stream

    def close(self) -> None:
        self.rig.release()
        for stream in filter(None, (ref() for ref in self._streams)):
            with contextlib.suppress(Exception):  # a test that failed in a capture takes no other with it
                if stream.is_capturing():
                    stream.end_capture()
        cupy.cuda.Device(0).synchronize()
        gc.collect()
        weir.uninstall()
        for pool in self._pools:
            pool.check()
            assert pool.allocated_bytes == 0, "an array outlived its test"
            pool.close()


def where(array: Any) -> int:
    """The address of the memory behind an array."""
    return int(array.data.mem.ptr)


def on(stream: Any, nbytes: int) -> Any:
    """An array of so many bytes, made on `stream`."""
    with stream:
        return cupy.empty((nbytes,), dtype=cupy.uint8)

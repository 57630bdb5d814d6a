"""What we touch of CuPy, in one place: nothing else here imports it.

Rule: public names, and three private ones that the public API cannot do without (`cupy._default_memory_pool`,
`cupy.cuda.stream._BaseStream`, and the list a stream keeps for the graph that it captures); each is looked for, and a
CuPy without it is refused with one sentence.

Next: memory.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from allocator.errors import AllocatorError

try:
    import cupy
    from cupy.cuda import memory, memory_hook
    from cupy.cuda import stream as streams
except ImportError as error:
    raise ImportError(f'CuPy could not be imported ({error}): pip install "weir-allocator[cupy]"') from error

UnownedMemory: Any = memory.UnownedMemory
MemoryPointer: Any = memory.MemoryPointer
MemoryPool: Any = memory.MemoryPool
OutOfMemoryError: Any = memory.OutOfMemoryError
MemoryHook: Any = memory_hook.MemoryHook
get_memory_hooks: Callable[[], dict[str, Any]] = memory_hook.get_memory_hooks

for _name, _where in (("_BaseStream", streams), ("_default_memory_pool", cupy)):
    if not hasattr(_where, _name):
        raise ImportError(
            f"CuPy {cupy.__version__} has no {_where.__name__}.{_name}; use one that Weir supports, 13.3 to 14"
        )
BaseStream: Any = streams._BaseStream
Stream: Any = streams.Stream
Event: Any = streams.Event
runtime: Any = cupy.cuda.runtime
Array: Any = cupy.ndarray
current_stream: Callable[[], Any] = streams.get_current_stream

CAPTURING_LIBRARIES: Final = (
    "torch", "jax", "jaxlib", "tensorflow", "warp", "numba.cuda", "pycuda", "cuda.core", "cuda.bindings.runtime",
    "cudart", "onnxruntime", "tensorrt", "paddle", "mxnet", "triton", "nvmath", "taichi",
)  # fmt: skip
"""Modules that can capture graphs and do not tell us: while one is loaded, the whole context is never marked (R6)."""


def captures_are_known() -> bool:
    """Is CuPy, which reports its captures to us, the only library in the process that can capture?"""
    return not any(name in sys.modules for name in CAPTURING_LIBRARIES)


def device_count() -> int:
    """GPUs that CuPy can see.  AllocatorError, in one sentence, where it cannot work at all."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # a CUDARuntimeError, or whatever a broken installation raises
        raise AllocatorError(f"CuPy finds no GPU ({error}); see `weir doctor`") from None


def current_device() -> int:
    """The ordinal of the calling thread's current device.  One runtime call."""
    return int(cupy.cuda.device.get_device_id())


def memory_without_a_pool(nbytes: int) -> Any:
    """A memory object straight from the runtime.  `cudaMalloc`, and `cudaFree` at its end, which waits for the GPU."""
    return memory.Memory(nbytes)


def get_allocator() -> Any:
    """The process-wide or thread-local allocator that CuPy uses now."""
    return cupy.cuda.get_allocator()


def set_allocator(allocator: Any) -> None:
    """Process-wide.  ValueError inside `using_allocator`."""
    cupy.cuda.set_allocator(allocator)


def default_pool() -> Any:
    """What `cupy.get_default_memory_pool()` returns."""
    return cupy._default_memory_pool


def set_default_pool(pool: Any) -> None:
    """Replace it."""
    cupy._default_memory_pool = pool


def memory_of(array: object) -> Any:
    """The memory object behind an array or a view; TypeError if it has none."""
    data = getattr(array, "data", None)
    found = getattr(data, "mem", None)
    if found is None:
        raise TypeError(f"record_stream takes a CuPy array, not {type(array).__name__}")
    return found


def limit_setting(environ: Any) -> tuple[int | None, float | None]:
    """(bytes, share of the device) as `CUPY_GPU_MEMORY_LIMIT` asks for; at most one is not None.  ValueError."""
    text = environ.get("CUPY_GPU_MEMORY_LIMIT")
    if not text:
        return None, None
    try:
        size, share = (None, float(text[:-1]) / 100) if text.endswith("%") else (int(text), None)
    except ValueError:
        size, share = -1, None
    if (size is not None and size < 0) or (share is not None and not 0 <= share <= 1):
        raise ValueError(f"CUPY_GPU_MEMORY_LIMIT={text!r}: write bytes as digits, or a percentage such as 50%")
    return size, share

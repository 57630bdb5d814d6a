"""CuPy on Weir: `allocator.cupy.install()`, and every array comes from one pool a device.

>>> import allocator
>>> allocator.cupy.install()                                        # doctest: +SKIP
<CachingAllocator 'cupy:0' on 0: 0 B reserved>

Rule: nothing that was right with CuPy's own pool becomes wrong, also where nothing is declared (R3).
Next: installation.py, memory.py, watch.py, pool.py; library.py is all that is known of CuPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allocator.caching import CachingAllocator
from allocator.integrations.cupy import library
from allocator.integrations.cupy.installation import Installation
from allocator.integrations.cupy.memory import Memory
from allocator.integrations.cupy.pool import MemoryPool
from allocator.integrations.cupy.watch import Classes

__all__ = ["Memory", "MemoryPool", "install", "malloc", "observe", "pools", "record_stream", "uninstall"]

_installation = Installation(
    Classes(
        library.BaseStream,
        library.Event,
        library.current_stream,
        memory_hook=library.MemoryHook,
        runtime=library.runtime,
        array=library.Array,
    )
)


def install(
    pool: CachingAllocator | None = None, *, current_stream: Callable[[], Any] | None = None
) -> CachingAllocator:
    """Let CuPy allocate from Weir; returns the current device's pool, or the one given.

    pool: used for its own device, and CuPy is not asked which is current; other devices get a pool at first use.
    current_stream: what says on which stream memory is asked for; CuPy's own current stream by default.
    Called again it may change both.  Arrays that are alive stay with the allocator that made them.
    Raises AllocatorError where CuPy finds no GPU; ValueError inside `cupy.cuda.using_allocator`; TypeError.
    """
    return _installation.install(pool, current_stream=current_stream)


def uninstall() -> None:
    """Put back CuPy's allocator and default pool.  Arrays that are alive stay valid.  Twice is harmless.

    Pools that `install` made are closed: their memory goes with the last array.  CuPy's streams are watched until the
    next call that finds no array of ours alive.  ValueError inside `cupy.cuda.using_allocator`.
    """
    _installation.uninstall()


def pools() -> dict[int, CachingAllocator]:
    """The pools in use, by the device's ordinal."""
    return _installation.pools()


def malloc(nbytes: int) -> Any:
    """The allocator itself, for `cupy.cuda.using_allocator(allocator.cupy.malloc)`; `install` is not needed for it."""
    return _installation.malloc(nbytes)


def record_stream(array: object, stream: object) -> None:
    """The array's memory is also in use on `stream`, for everything queued there up to its free.

    Programs that are right with CuPy's own pool need not call it; it is for streams that CuPy does not know.
    ValueError if the memory is not ours or has been given back; TypeError if it is no array.
    """
    _installation.record_stream(array, stream)


def observe(on: bool = True) -> None:
    """Whether the program's own records, waits and synchronisations are learnt from.  At first they are.

    Off, memory serves other streams later; streams are seen and captures respected all the same.
    """
    _installation.watch.learning = bool(on)

"""The pool that CuPy users know: what `cupy.get_default_memory_pool()` returns while Weir is installed.

Rule: every call answers for the current device, in CuPy's words and with CuPy's arguments, so that a program which
prints or limits its pool keeps working:

    used_bytes    held by arrays
    total_bytes   held from the driver
    free_bytes    the rest: idle, and freed with work still in flight
    n_free_blocks the blocks of that rest

It is a `cupy.cuda.MemoryPool` to whoever asks, but holds nothing itself.  Next: installation.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from allocator.caching import CachingAllocator
from allocator.integrations.cupy import library


class MemoryPool(library.MemoryPool):  # type: ignore[misc]  # CuPy's classes have no types
    """pool_now: the current device's pool.  malloc: what serves an allocation there."""

    def __init__(self, pool_now: Callable[[], CachingAllocator], malloc: Callable[[int], Any]) -> None:
        self._pool_now = pool_now
        self._malloc = malloc

    def malloc(self, size: int) -> Any:
        """A `MemoryPointer` to `size` bytes on the current stream."""
        return self._malloc(size)

    def free_all_blocks(self, stream: Any = None) -> None:
        """Give idle memory back to the driver.  It is everybody's, so one stream's is not told from the rest.

        Never waits: memory with work in flight goes at a later call, or when it is needed.
        """
        self._pool_now().trim()

    def free_all_free(self) -> None:
        """The old name of `free_all_blocks`."""
        warnings.warn("free_all_free is deprecated; use free_all_blocks", DeprecationWarning, stacklevel=2)
        self.free_all_blocks()

    def n_free_blocks(self) -> int:
        """Blocks that no array holds."""
        return self._pool_now().free_blocks

    def used_bytes(self) -> int:
        """Bytes that arrays hold."""
        return self._pool_now().allocated_bytes

    def free_bytes(self) -> int:
        """Bytes held from the driver that no array holds."""
        pool = self._pool_now()
        used = pool.allocated_bytes
        return max(0, pool.reserved_bytes - used)

    def total_bytes(self) -> int:
        """Bytes held from the driver."""
        return self._pool_now().reserved_bytes

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        """The most that may be held from the driver: bytes, or a share of the device's memory.  Neither: no limit.

        ValueError for both, and for values out of range.  What is over goes back at once, or as it is freed.
        """
        pool = self._pool_now()
        if size is not None and fraction is not None:
            raise ValueError("size and fraction cannot be specified at one time")
        if fraction is not None:
            if not 0 <= fraction <= 1:
                raise ValueError(f"memory limit fraction out of range: {fraction}")
            size = int(fraction * pool.device.total_memory)
        elif size is not None and size < 0:
            raise ValueError(f"memory limit size out of range: {size}")
        pool.set_limit(int(size or 0))

    def get_limit(self) -> int:
        """Bytes; 0 = no limit."""
        return self._pool_now().limit

    def __repr__(self) -> str:
        return f"<MemoryPool of {self._pool_now()!r}>"

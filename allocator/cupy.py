"""`allocator.cupy`: CuPy on this pool.  The code is in integrations/cupy/."""

from __future__ import annotations

from allocator.integrations.cupy import (
    Memory,
    MemoryPool,
    install,
    malloc,
    observe,
    pools,
    record_stream,
    uninstall,
)

__all__ = ["Memory", "MemoryPool", "install", "malloc", "observe", "pools", "record_stream", "uninstall"]

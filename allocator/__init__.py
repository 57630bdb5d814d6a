"""One GPU memory pool for every library in the process.

Memory freed on one stream serves another stream as soon as that is safe.  The names here are the public API;
importing them needs no GPU, no driver and no other library.  Next: docs/concepts.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from allocator.allocation import Allocation
from allocator.caching import CachingAllocator
from allocator.config import Config
from allocator.devices import SimDevice
from allocator.errors import (
    AllocatorError,
    CorruptionError,
    DriverError,
    ForkError,
    OutOfMemoryError,
    PoolClosed,
    SimDeadlock,
    StreamCapturing,
    StreamClosed,
)
from allocator.resource import MemoryResource
from allocator.stats import Stats
from allocator.streams import Event, Stream, current_stream, stream

if TYPE_CHECKING:
    from allocator import metrics as metrics
    from allocator.devices import CudaDevice

__version__ = "0.1.0"

__all__ = [
    "Allocation",
    "AllocatorError",
    "CachingAllocator",
    "Config",
    "CorruptionError",
    "CudaDevice",
    "DriverError",
    "Event",
    "ForkError",
    "MemoryResource",
    "OutOfMemoryError",
    "PoolClosed",
    "SimDeadlock",
    "SimDevice",
    "Stats",
    "Stream",
    "StreamCapturing",
    "StreamClosed",
    "__version__",
    "current_stream",
    "stream",
]


def __getattr__(name: str) -> object:
    if name == "CudaDevice":  # at first use, so that importing the package never looks for a driver
        from allocator.devices import CudaDevice

        return CudaDevice
    if name in ("cupy", "metrics"):  # likewise: nobody pays for a library that is not used
        return importlib.import_module(f"allocator.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

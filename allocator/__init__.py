"""One GPU memory pool for every library in the process.

Memory freed on one stream serves another stream as soon as that is safe.  The names here are the public API;
importing them needs no GPU, no driver and no other library.  Next: docs/concepts.md.
"""

from __future__ import annotations

import importlib
import os
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
    from allocator import cupy as cupy
    from allocator import metrics as metrics
    from allocator import stress as stress
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
    if name in ("cupy", "metrics", "stress"):  # likewise: nobody pays for a library that is not used
        return importlib.import_module(f"allocator.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _install_as_asked() -> None:
    """`WEIR_AUTOINSTALL=1`: importing this package is enough.  What stands in the way is a warning, never an error."""
    wanted = os.environ.get("WEIR_AUTOINSTALL", "").strip().lower()
    if wanted in ("", "0", "false", "no", "off"):
        return
    try:
        if wanted not in ("1", "true", "yes", "on"):
            raise ValueError(f"write 1 or 0, not {wanted!r}")
        importlib.import_module("allocator.cupy").install()
    except (ImportError, AllocatorError, ValueError) as error:
        import warnings

        warnings.warn(f"WEIR_AUTOINSTALL: nothing was installed: {error}", RuntimeWarning, stacklevel=3)


_install_as_asked()

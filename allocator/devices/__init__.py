"""The only door to a driver: a real GPU, or one that is simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allocator.devices.device import LEGACY, PER_THREAD, Capture, Device, pieces_held
from allocator.devices.sim import Access, Race, SimDevice

if TYPE_CHECKING:
    from allocator.devices.cuda import CudaDevice

__all__ = ["LEGACY", "PER_THREAD", "Access", "Capture", "CudaDevice", "Device", "Race", "SimDevice", "pieces_held"]


def __getattr__(name: str) -> object:
    if name == "CudaDevice":  # at first use, so that importing the package never looks for bindings
        from allocator.devices.cuda import CudaDevice

        return CudaDevice
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

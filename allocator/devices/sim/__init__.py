"""The simulated device, where correctness is proved.  Begin with device.py."""

from __future__ import annotations

from allocator.devices.sim.capture import Graph
from allocator.devices.sim.device import SimDevice
from allocator.devices.sim.oracle import Access, Race

__all__ = ["Access", "Graph", "Race", "SimDevice"]

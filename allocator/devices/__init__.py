"""The only door to a driver: a real GPU, or one that is simulated."""

from __future__ import annotations

from allocator.devices.device import LEGACY, PER_THREAD, Capture, Device

__all__ = ["LEGACY", "PER_THREAD", "Capture", "Device"]

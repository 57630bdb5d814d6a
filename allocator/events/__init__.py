"""Seqnos and vector clocks, and the pool of driver events."""

from __future__ import annotations

from allocator.events.clock import EMPTY, SyncPoint, VectorClock
from allocator.events.pool import EventPool

__all__ = ["EMPTY", "EventPool", "SyncPoint", "VectorClock"]

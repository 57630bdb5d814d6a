"""Streams without memory: how far each has got, and what it may rely on."""

from __future__ import annotations

from allocator.streams.captures import Capture, GraphToken
from allocator.streams.context import CONTEXT, ContextSeal
from allocator.streams.event import Event, destroy_orphans
from allocator.streams.order import Order
from allocator.streams.registry import Registry
from allocator.streams.sealing import Sealing
from allocator.streams.stream import Stream, current_stream, stream, target
from allocator.streams.timeline import Kind, Sealed, Timeline

__all__ = [
    "CONTEXT",
    "Capture",
    "ContextSeal",
    "Event",
    "GraphToken",
    "Kind",
    "Order",
    "Registry",
    "Sealed",
    "Sealing",
    "Stream",
    "Timeline",
    "current_stream",
    "destroy_orphans",
    "stream",
    "target",
]

"""Streams without memory: how far each has got, and what it may rely on."""

from __future__ import annotations

from allocator.streams.context import CONTEXT, ContextSeal
from allocator.streams.event import Event, destroy_orphans
from allocator.streams.registry import Registry
from allocator.streams.sealing import (
    end,
    end_finished,
    make_wait,
    mark,
    poll,
    query,
    seal,
    seal_context,
    synchronize,
)
from allocator.streams.stream import Stream, current_stream, stream, target
from allocator.streams.timeline import Kind, Sealed, Timeline

__all__ = [
    "CONTEXT",
    "ContextSeal",
    "Event",
    "Kind",
    "Registry",
    "Sealed",
    "Stream",
    "Timeline",
    "current_stream",
    "destroy_orphans",
    "end",
    "end_finished",
    "make_wait",
    "mark",
    "poll",
    "query",
    "seal",
    "seal_context",
    "stream",
    "synchronize",
    "target",
]

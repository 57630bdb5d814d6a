"""Memory without streams: blocks, best fit, split and merge, and where the bytes come from."""

from __future__ import annotations

from allocator.blocks.backing import Backing, PlainMemory, VirtualMemory
from allocator.blocks.block import IDLE, LIVE, MANY, NOBODY, RETIRED, STATES, Bin, Bins, Block, Owner
from allocator.blocks.heap import KINDS, LARGE, SMALL, Heap
from allocator.blocks.index import BestFit
from allocator.blocks.pages import Plan, Segment, Space

__all__ = [
    "IDLE",
    "KINDS",
    "LARGE",
    "LIVE",
    "MANY",
    "NOBODY",
    "RETIRED",
    "SMALL",
    "STATES",
    "Backing",
    "BestFit",
    "Bin",
    "Bins",
    "Block",
    "Heap",
    "Owner",
    "PlainMemory",
    "Plan",
    "Segment",
    "Space",
    "VirtualMemory",
]

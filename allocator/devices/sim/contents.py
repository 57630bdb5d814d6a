"""What is in the memory: which bytes still hold what a memset wrote.

Rule: *a write lands when its launch finishes*.  Only memory that was set is followed, and only until it is handed
out or goes back to the driver; so a simulation without memsets pays one question a launch.  A launch that writes
such bytes turns them into junk at its virtual finish time, whether it was queued before or after the memset.

It shares no code with the allocator, whose checked mode it judges.
Next: calls.py (`cuMemsetD8Async`, `cuMemcpyDtoHAsync`).  Not thread-safe: callers hold the world's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from sortedcontainers import SortedDict

from allocator.devices.sim.streams import Node

JUNK: Final = 0x5A
"""What a launch writes; 0xA5 over bytes that were set to this very value.  Bytes never set read as 0."""

Span = tuple[int, int, Node]
"""Bytes [start, end), written by that work."""


class _Piece:
    """[start, end), set to `value` by `node`; `writes` came, or land, later."""

    __slots__ = ("end", "node", "start", "value", "writes")

    def __init__(self, start: int, end: int, value: int, node: Node, writes: list[Span]) -> None:
        self.start = start
        self.end = end
        self.value = value
        self.node = node
        self.writes = writes


class Contents:
    """The followed bytes of one device."""

    def __init__(self) -> None:
        self._pieces: SortedDict[int, _Piece] = SortedDict()

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def fill(self, ptr: int, nbytes: int, value: int, node: Node, earlier: Iterable[Span]) -> None:
        """A memset was queued.  earlier: writes that were queued before it, and may land after it."""
        self.forget(ptr, nbytes)
        late = [(max(a, ptr), min(b, ptr + nbytes), w) for a, b, w in earlier]
        late = [(a, b, w) for a, b, w in late if a < b and not _before(w, node)]
        self._pieces[ptr] = _Piece(ptr, ptr + nbytes, value, node, late)

    def write(self, ptr: int, nbytes: int, node: Node) -> None:
        """A launch that writes these bytes was queued."""
        for piece in self._overlapping(ptr, ptr + nbytes):
            piece.writes.append((max(ptr, piece.start), min(ptr + nbytes, piece.end), node))

    def forget(self, ptr: int, nbytes: int) -> None:
        """The bytes are somebody's now, or gone: follow them no more."""
        end = ptr + nbytes
        for piece in list(self._overlapping(ptr, end)):
            del self._pieces[piece.start]
            for a, b in ((piece.start, ptr), (end, piece.end)):
                if a < b:
                    kept = [(max(a, x), min(b, y), w) for x, y, w in piece.writes if x < b and a < y]
                    self._pieces[a] = _Piece(a, b, piece.value, piece.node, kept)

    def read(self, ptr: int, nbytes: int, now: int) -> bytearray:
        """The bytes as they are at time `now`."""
        data = bytearray(nbytes)
        for piece in self._overlapping(ptr, ptr + nbytes):
            if piece.node.done(now):
                _paint(data, ptr, piece.start, piece.end, piece.value)
            for start, end, node in piece.writes:
                if node.done(now):
                    _paint(data, ptr, start, end, JUNK if piece.value != JUNK else JUNK ^ 0xFF)
        return data

    def _overlapping(self, start: int, end: int) -> Iterator[_Piece]:
        index = self._pieces.bisect_right(start) - 1
        if index >= 0:
            piece: _Piece = self._pieces.peekitem(index)[1]
            if piece.start < start < piece.end:
                yield piece
        for key in list(self._pieces.irange(start, end, inclusive=(True, False))):
            yield self._pieces[key]


def _before(write: Node, memset: Node) -> bool:
    """Is the write certain to land before the memset?"""
    return memset.finish is not None and write.done(memset.finish)


def _paint(data: bytearray, base: int, start: int, end: int, value: int) -> None:
    start, end = max(start - base, 0), min(end - base, len(data))
    if start < end:
        data[start:end] = bytes((value,)) * (end - start)

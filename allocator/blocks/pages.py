"""Where in the address range memory lies: segments mapped, holes not.

One reserved range a pool and device; its first quarter is for small requests, the rest for large ones, so that
the two never share a piece from the driver.  A *segment* is one piece from the driver; ranges in between are
*holes*.  Planning makes no driver call: `plan` takes a hole's bytes away, the caller maps them and then
reports `mapped` or `failed`.

Next: backing.py, which makes the calls; heap.py, which cuts the memory into blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sortedcontainers import SortedDict

from allocator.blocks.block import Block


class Segment:
    """One piece from the driver: `handle` is a VMM handle, or 0 for a plain allocation.

    ptr: 0 once it has been unmapped.  usable: False if it never became memory to hand out, and only waits for the
    driver to take it back.  unsure: nobody knows whether it is mapped, as unmapping it was interrupted.
    """

    __slots__ = ("handle", "kind", "ptr", "size", "unsure", "usable")

    def __init__(self, ptr: int, size: int, handle: int, kind: int) -> None:
        self.ptr = ptr
        self.size = size
        self.handle = handle
        self.kind = kind
        self.usable = True
        self.unsure = False

    @property
    def end(self) -> int:
        """The address behind the last byte."""
        return self.ptr + self.size

    def __repr__(self) -> str:
        return f"<Segment {self.ptr:#x}+{self.size}>"


class Plan:
    """What growing will map, and the free neighbours that it will extend."""

    __slots__ = ("left", "nbytes", "ptr", "right")

    def __init__(self, ptr: int, nbytes: int, left: Block | None, right: Block | None) -> None:
        self.ptr = ptr
        self.nbytes = nbytes
        self.left = left
        self.right = right


class Space:
    """The addresses of one size class."""

    def __init__(self, base: int, size: int, granularity: int) -> None:
        self.base = base
        self.size = size
        self._granularity = granularity
        self._holes: SortedDict = SortedDict({base: base + size})  # start -> end

    def plan(
        self,
        size: int,
        page: int,
        most: int,
        before: Callable[[int], Block | None],
        behind: Callable[[int], Block | None],
    ) -> Plan | None:
        """The hole to map for a block of `size` bytes, so that the least new memory is needed.

        page: the least to map where there is room.  most: at most that many bytes.  before(address),
        behind(address): the free block that the caller may take and that ends, or starts, there.
        None if no hole does.  O(holes looked at), at most 64.
        """
        best: Plan | None = None
        for looked, (start, end) in enumerate(self._holes.items()):
            if looked >= 64 and best is not None:
                break
            left, right = before(start), behind(end)
            for plan in self._ways(size, page, most, start, end, left, right):
                if best is None or plan.nbytes < best.nbytes:
                    best = plan
        if best is not None:
            self._cut(best.ptr, best.ptr + best.nbytes)
        return best

    def _ways(
        self, size: int, page: int, most: int, start: int, end: int, left: Block | None, right: Block | None
    ) -> Iterator[Plan]:
        room = min(end - start, most)
        if left is not None and (n := self._round(size - left.size, page, room)):
            yield Plan(start, n, left, right if start + n == end else None)
        if right is not None and (n := self._round(size - right.size, page, room)):
            yield Plan(end - n, n, left if n == end - start else None, right)
        if left is not None and right is not None and end - start <= most and left.size + right.size + room >= size:
            yield Plan(start, end - start, left, right)
        if n := self._round(size, page, room):
            yield Plan(start, n, None, None)

    def _round(self, need: int, page: int, room: int) -> int:
        """Bytes to map for `need`; 0 if there is no room for it, or nothing is needed."""
        if need <= 0:
            return 0
        least = -(-need // self._granularity) * self._granularity
        return 0 if least > room else min(max(least, page), room // self._granularity * self._granularity)

    def _cut(self, start: int, end: int) -> None:
        at = self._holes.bisect_right(start) - 1
        hole_start, hole_end = self._holes.peekitem(at)
        assert hole_start <= start and end <= hole_end, (start, end, hole_start, hole_end)
        del self._holes[hole_start]
        if hole_start < start:
            self._holes[hole_start] = start
        if end < hole_end:
            self._holes[end] = hole_end

    def give_back(self, start: int, end: int) -> None:
        """[start, end) is not mapped any more, or was not mapped after all."""
        at = self._holes.bisect_left(start)
        if at < len(self._holes) and self._holes.peekitem(at)[0] == end:
            end = self._holes.popitem(at)[1]
        if at and self._holes.peekitem(at - 1)[1] == start:
            start = self._holes.popitem(at - 1)[0]
        self._holes[start] = end

    def check(self, mapped: Iterable[Segment]) -> None:
        """Raise AssertionError unless the holes are just where nothing is mapped.  mapped: segments of any space."""
        end = self.base + self.size
        spans = [(piece.ptr, piece.end, False) for piece in mapped if self.base <= piece.ptr < end]
        spans += [(start, stop, True) for start, stop in self._holes.items()]
        spans.sort()
        at, hole = self.base, False
        for start, stop, is_hole in spans:
            assert start == at < stop and not (hole and is_hole), (start, stop, is_hole, at, hole)
            at, hole = stop, is_hole
        assert at == end, (at, end)

    def holes(self) -> list[tuple[int, int]]:
        """(start, end) of every hole, in order."""
        return list(self._holes.items())

"""What is known of which bytes: disjoint address ranges, each with a value.

A later range takes the place of what it covers; what is left of an older one keeps its value.
Not thread-safe.  Next: canary.py, its one user.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from sortedcontainers import SortedDict

V = TypeVar("V")


class Ranges(Generic[V]):
    """Address ranges with values.

    >>> ranges = Ranges[str]()
    >>> ranges.set(0, 100, "a"); ranges.set(40, 60, "b"); list(ranges.inside(50, 200))
    [(50, 60, 'b'), (60, 100, 'a')]
    """

    def __init__(self) -> None:
        self._ranges: SortedDict[int, tuple[int, V]] = SortedDict()  # start -> (end, value)

    def __len__(self) -> int:
        return len(self._ranges)

    def set(self, start: int, end: int, value: V) -> None:
        """[start, end) has this value.  O(log n + ranges covered)."""
        self.forget(start, end)
        self._ranges[start] = (end, value)

    def forget(self, start: int, end: int) -> None:
        """Nothing is known of [start, end) any more."""
        ranges = self._ranges
        index = ranges.bisect_left(start) - 1
        if index >= 0:
            first, (last, value) = ranges.peekitem(index)
            if last > start:
                ranges[first] = (start, value)
                if last > end:
                    ranges[end] = (last, value)
        for first in list(ranges.irange(start, end, inclusive=(True, False))):
            last, value = ranges.pop(first)
            if last > end:
                ranges[end] = (last, value)

    def inside(self, start: int, end: int) -> Iterator[tuple[int, int, V]]:
        """(start, end, value) of what is known within [start, end), cut to it, in order."""
        ranges = self._ranges
        index = ranges.bisect_right(start) - 1
        if index >= 0:
            _, (last, value) = ranges.peekitem(index)
            if last > start:
                yield start, min(last, end), value
        for first in list(ranges.irange(start, end, inclusive=(False, False))):
            last, value = ranges[first]
            yield first, min(last, end), value

    def gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of [start, end) of which nothing is known.  Empty if all of it is."""
        found = []
        for first, last, _ in self.inside(start, end):
            if start < first:
                found.append((start, first))
            start = last
        if start < end:
            found.append((start, end))
        return found

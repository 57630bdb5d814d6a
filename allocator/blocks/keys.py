"""Integers in order: what `sortedcontainers.SortedList` does, as far as an index of free blocks needs it.

Lists of a few hundred keys each, and the least key that may stand in each but the first.  A pool has dozens of free
blocks, so mostly there is one list, and everything is one bisection of it: several times as fast as the general class,
and compiled with the rest.  Next: index.py.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

LONGEST: Final = 1024
"""Keys in one list, at most."""


class SortedKeys:
    """Distinct integers in ascending order.

    >>> keys = SortedKeys()
    >>> for key in (5, 1, 9): keys.add(key)
    >>> keys.remove(5); list(keys.starting_at(2)), keys.first(2), keys.first(10), keys.last()
    ([9], 9, None, 9)
    """

    __slots__ = ("_bounds", "_lists")

    def __init__(self) -> None:
        self._lists: list[list[int]] = [[]]
        """None of them is empty, unless there is no key at all."""
        self._bounds: list[int] = []
        """Keys from the i-th bound on stand in lists[i + 1] or behind."""

    def __len__(self) -> int:
        return sum(map(len, self._lists))

    def __bool__(self) -> bool:
        return bool(self._lists[0])

    def add(self, key: int) -> None:
        """Put in a key that is not there."""
        bounds = self._bounds
        at = bisect_right(bounds, key) if bounds else 0
        keys = self._lists[at]
        insort(keys, key)
        if len(keys) > LONGEST:
            half = LONGEST // 2
            self._lists.insert(at + 1, keys[half:])
            bounds.insert(at, keys[half])
            del keys[half:]

    def remove(self, key: int) -> None:
        """Take out a key; ValueError if it is not there."""
        bounds = self._bounds
        at = bisect_right(bounds, key) if bounds else 0
        keys = self._lists[at]
        where = bisect_left(keys, key)
        if where == len(keys) or keys[where] != key:
            raise ValueError(f"{key} is not here")
        del keys[where]
        if not keys and bounds:
            del self._lists[at]
            del bounds[max(at - 1, 0)]

    def first(self, least: int) -> int | None:
        """The first key from `least` on; None if there is none."""
        bounds = self._bounds
        at = bisect_right(bounds, least) if bounds else 0
        keys = self._lists[at]
        where = bisect_left(keys, least)
        if where < len(keys):
            return keys[where]
        return self._lists[at + 1][0] if at < len(bounds) else None

    def last(self) -> int | None:
        """The greatest key; None if there is none."""
        keys = self._lists[-1]
        return keys[-1] if keys else None

    def starting_at(self, least: int) -> Iterator[int]:
        """The keys from `least` on.  Nothing may be added or removed meanwhile."""
        at = bisect_right(self._bounds, least)
        keys = self._lists[at]
        where = bisect_left(keys, least)
        while True:
            while where < len(keys):
                yield keys[where]
                where += 1
            at += 1
            if at == len(self._lists):
                return
            keys, where = self._lists[at], 0

    def check(self) -> None:
        """Raise AssertionError unless all is in order.  O(n)."""
        lists, bounds = self._lists, self._bounds
        assert len(lists) == len(bounds) + 1 and (all(lists) or not bounds)
        flat = [key for keys in lists for key in keys]
        assert all(a < b for a, b in pairwise(flat))
        assert all(
            before[-1] < bound <= after[0] for before, bound, after in zip(lists, bounds, lists[1:], strict=False)
        )

"""Seqnos, points and vector clocks: the arithmetic of "is that work over?".

A stream finishes its work in the order it was given, so a stream is a *timeline* and one integer, a
*seqno*, says how far along it something lies.  Three things are one type, `VectorClock`, a map
timeline number -> seqno:

    a block's stamp     how far each user of the block had got when the block was freed
    a stream's clock    what the stream has waited for
    an event's clock    what a stream that waits for the event gets to know

and safety is one comparison: **stamp <= known**.  Seqnos of different timelines are never compared
(R1); a missing entry is 0, "nothing".

Clocks are immutable, so they are read without a lock and shared by any number of blocks.
Next: ../streams/timeline.py, which counts the seqnos.  Arguments: docs/ordering.md.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class SyncPoint:
    """A place on one timeline.  It has no `<`: across timelines there is none (R1), and on one the seqnos say it."""

    timeline: int
    seqno: int


class VectorClock:
    """An immutable map timeline number -> seqno.

    >>> a, b = VectorClock({1: 4}), VectorClock({1: 2, 7: 3})
    >>> a.joined(b)
    VectorClock({1: 4, 7: 3})
    >>> a <= b, a <= a.joined(b), EMPTY <= a
    (False, True, True)
    """

    __slots__ = ("at",)

    at: Mapping[int, int]
    """The entries.  Never changed: the hot path reads it directly."""

    def __init__(self, entries: Mapping[int, int] | Iterable[tuple[int, int]] = ()) -> None:
        self.at = dict(entries)

    def get(self, timeline: int) -> int:
        """The seqno for `timeline`, 0 if there is none."""
        return self.at.get(timeline, 0)

    def items(self) -> ItemsView[int, int]:
        """(timeline, seqno) pairs."""
        return self.at.items()

    def joined(self, other: VectorClock) -> VectorClock:
        """The least clock that is >= both.  Returns one of the two where that is enough."""
        if self is other or not other.at:
            return self
        if not self.at:
            return other
        merged = dict(self.at)
        changed = False
        for timeline, seqno in other.at.items():
            if seqno > merged.get(timeline, 0):
                merged[timeline] = seqno
                changed = True
        return VectorClock(merged) if changed else self

    def advanced(self, timeline: int, seqno: int) -> VectorClock:
        """This clock with at least `seqno` for `timeline`."""
        if self.at.get(timeline, 0) >= seqno:
            return self
        merged = dict(self.at)
        merged[timeline] = seqno
        return VectorClock(merged)

    def __le__(self, other: VectorClock) -> bool:
        theirs = other.at
        return all(seqno <= theirs.get(timeline, 0) for timeline, seqno in self.at.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VectorClock) and self.at == other.at

    def __hash__(self) -> int:
        return hash(frozenset(self.at.items()))

    def __bool__(self) -> bool:
        return bool(self.at)

    def __len__(self) -> int:
        return len(self.at)

    def __repr__(self) -> str:
        return f"VectorClock({self.at!r})"


EMPTY: Final = VectorClock()
"""The clock of memory that nobody has used."""

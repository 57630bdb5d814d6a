"""The timeline of all users that we only assume (R3).

A library written for pools that never cross streams declares nothing: any stream seen in the context may
have used a block.  One more entry in the block's stamp stands for all of them: a seqno of the context.

A context seqno is closed, then every stream's seqno is closed; what all of those had reached is the seal's
`need`.  The context seqno is complete when `need` is: each stream by its own event or query, or all at once
by one context event (R6).  Streams first seen after the close cannot have used what was freed before it.

Pure arithmetic, under the registry's lock.  Next: sealing.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from allocator.events import EMPTY, VectorClock
from allocator.streams.timeline import MOST_MARKS, Sealed, Timeline

CONTEXT = 0
"""The context's timeline number."""


class ContextSeal:
    """need: what every stream had reached when `seqno` was closed.  event: a context event behind it, if any."""

    __slots__ = ("event", "need", "seqno")

    def __init__(self, seqno: int, need: VectorClock, event: Sealed | None = None) -> None:
        self.seqno = seqno
        self.need = need
        self.event = event


class ContextTimeline:
    """Counters of the context: completed <= sealed < pending, as for a stream."""

    __slots__ = ("completed", "in_flight", "pending", "sealed")

    def __init__(self) -> None:
        self.pending = 1
        self.sealed = 0
        self.completed = 0
        self.in_flight: deque[ContextSeal] = deque()

    def close_seqno(self) -> int:
        """Close the pending seqno.  Before the streams' seqnos are closed for it (R4)."""
        self.pending += 1
        return self.pending - 1

    def publish(self, seal: ContextSeal) -> bool:
        """`seal.need` covers `seal.seqno`.  False if nobody needs it: a later one is complete already."""
        if seal.seqno <= self.completed:
            return False
        at = len(self.in_flight)
        while at and self.in_flight[at - 1].seqno > seal.seqno:
            at -= 1
        self.in_flight.insert(at, seal)
        self.sealed = max(self.sealed, seal.seqno)
        return True

    def advance(self, lines: Mapping[int, Timeline]) -> list[Sealed]:
        """Complete every seal whose need is complete; returns their context events.  O(completed + 1 need).

        A stream that is not in `lines` any more has ended and finished.
        """
        events: list[Sealed] = []
        while self.in_flight:
            seal = self.in_flight[0]
            if not satisfied(seal.need, EMPTY, lines):
                break
            self.completed = max(self.completed, seal.seqno)
            self.in_flight.popleft()
            if seal.event is not None:
                events.append(seal.event)
        self.sealed = max(self.sealed, self.completed)
        return events

    def thin(self) -> list[Sealed]:
        """Forget every second seal, if there are more than MOST_MARKS; returns their context events, which count as
        done.  As for a stream (`Timeline.thin`): what one covers, the next one covers as well."""
        flight = self.in_flight
        if len(flight) <= MOST_MARKS:
            return []
        last = len(flight) - 1
        events: list[Sealed] = []
        kept: deque[ContextSeal] = deque()
        for at, seal in enumerate(flight):
            if at % 2 == 0 or at == last or (seal.event is not None and seal.event.users):
                kept.append(seal)
            elif seal.event is not None:
                seal.event.done = True
                events.append(seal.event)
        self.in_flight = kept
        return events

    def seal_for(self, seqno: int) -> ContextSeal | None:
        """The oldest seal that covers `seqno`; None if there is none."""
        return next((s for s in self.in_flight if s.seqno >= seqno), None)

    def check(self) -> None:
        """Raise AssertionError unless R2 holds.  O(in flight)."""
        assert self.completed <= self.sealed < self.pending, (self.completed, self.sealed, self.pending)
        seqnos = [s.seqno for s in self.in_flight]
        assert seqnos == sorted(seqnos) and all(q > self.completed for q in seqnos), seqnos


def satisfied(need: VectorClock, clock: VectorClock, lines: Mapping[int, Timeline], me: int = -1) -> bool:
    """True if every entry of `need` is complete, in `clock`, or of the timeline `me`.  O(entries)."""
    at = clock.at
    for number, seqno in need.at.items():
        if number == me:
            continue
        line = lines.get(number)
        if line is not None and line.completed < seqno and at.get(number, 0) < seqno:
            return False
    return True

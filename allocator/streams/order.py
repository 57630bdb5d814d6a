"""What is over, and what a stream may rely on: stamp <= known(S), and nothing else, decides a reuse.

Pure arithmetic, on the way of every block that is not in a bin, so it can be compiled unchanged
(docs/decisions/0016).  Next: registry.py, which timelines there are; ../caching/shelves.py, who asks.
"""

from __future__ import annotations

from allocator.events import EMPTY, VectorClock
from allocator.streams.context import CONTEXT, ContextTimeline, satisfied
from allocator.streams.timeline import AssumedStamp, Timeline
from allocator.sync import LockLike


class Order:
    """The questions that are asked of one context's timelines.  lines: those not over, by number."""

    __slots__ = ("_context", "_lines", "_lock")

    def __init__(self, lines: dict[int, Timeline], context: ContextTimeline, lock: LockLike) -> None:
        self._lines = lines
        self._context = context
        self._lock = lock

    def done(self, stamp: VectorClock) -> bool:
        """Is all work of the stamp over?  O(entries), no lock, no driver call."""
        lines = self._lines
        for number, seqno in stamp.at.items():
            if number == CONTEXT:
                if seqno > self._context.completed:
                    return False
                continue
            line = lines.get(number)
            if line is not None and line.completed < seqno:
                return False
        return True

    def unfinished(self, stamp: VectorClock) -> VectorClock:
        """The entries of the stamp that are not known to be over."""
        lines, context = self._lines, self._context.completed
        left: dict[int, int] = {}
        for number, seqno in stamp.at.items():
            if number == CONTEXT:
                if context < seqno:
                    left[number] = seqno
            else:
                line = lines.get(number)
                if line is not None and line.completed < seqno:
                    left[number] = seqno
        return stamp if len(left) == len(stamp.at) else VectorClock(left) if left else EMPTY

    def known(self, stamp: VectorClock, line: Timeline, exempt: bool = False) -> bool:
        """Is stamp <= known(S)?  May S take memory with this stamp, with no driver call?

        known(S) is its clock, what is complete, and S itself.  exempt: S is the block's own owner, so the users
        that are only assumed do not count (R3).

        The order that the driver keeps between legacy and blocking streams is not used: an allocation is no work, so
        a block taken by that order and used elsewhere, or after a host wait, would not be behind it (R6).
        """
        at = line.clock.at
        me = line.number
        for number, seqno in stamp.at.items():
            if number == me or at.get(number, 0) >= seqno:
                continue
            if number == CONTEXT:
                if exempt or self._context_known(seqno, line):
                    continue
                return False
            other = self._lines.get(number)
            if other is not None and other.completed < seqno:
                return False
        return True

    def _context_known(self, seqno: int, line: Timeline) -> bool:
        """Is all that the context's seqno stands for over, or in the stream's clock?"""
        if seqno <= self._context.completed:
            return True
        with self._lock.checked():
            seal = self._context.seal_for(seqno)
            return seal is not None and satisfied(seal.need, line.clock, self._lines, line.number)

    def stamp(self, line: Timeline, assumed: bool) -> VectorClock:
        """The stamp of a free now, on `line` alone; one shared object until a seqno is closed.  No lock."""
        if not assumed:
            return line.here
        stamp = line.here_assumed
        here = line.here
        own = here.at[line.number]
        pending = self._context.pending
        if stamp is None or stamp.context != pending or stamp.own != own:
            stamp = line.here_assumed = AssumedStamp(here, own, CONTEXT, pending)
        return stamp

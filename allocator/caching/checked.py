"""The ladder and the growth of a pool in checked mode: every way back into use leads past the canary.

The steps are those of ladder.py, without those that let a stream have memory before the host knows that it is
finished: 3 (covered), 6 (internal dependency), and the own stream's part of 1.  What waits (4, 5, 9) fills what has
finished before it looks again.  Memory is verified before the driver has it back.

Next: canary.py (fills, verifies, tells), checked_shelves.py.
"""

from __future__ import annotations

import time

from allocator.blocks import Block, Segment
from allocator.caching.canary import Canary
from allocator.caching.growth import Growth
from allocator.caching.ladder import Ladder, Request
from allocator.errors import DriverError
from allocator.streams import Timeline


class CheckedLadder(Ladder):
    """The policy in checked mode.  `canary` is set once, right after it was made."""

    canary: Canary

    def climb(self, request: Request) -> Block | None:
        """As ever; what is free and finished is filled first."""
        self.canary.tend()
        return super().climb(request)

    def at_hand(self, line: Timeline, requested: int, size: int, kind: int, assumed: bool) -> Block | None:
        """Nothing is, before it is filled."""
        return None

    def _look(self, request: Request, *, first: bool = False, step: str | None = None) -> Block | None:
        self.canary.fill_finished()
        return super()._look(request, first=first, step=step)

    def _depend(self, request: Request) -> Block | None:
        return None


class CheckedGrowth(Growth):
    """Memory from and to the driver in checked mode.  `canary` is set once, right after it was made."""

    canary: Canary

    def _at_once(self) -> int:
        """Each is read back before, which takes its time."""
        return 1

    def _detach(self, segment: Segment, ptr: int, reason: str) -> bool:
        """As ever, if nobody has written to it since it was filled; else what is damaged stays, and is reported.

        Raises CorruptionError; not where a closed pool is emptied, in some later call of any pool: that only logs.
        """
        size = segment.size
        if not segment.ptr or segment.unsure:  # verified before, or there is nothing to read
            return super()._detach(segment, ptr, reason)
        canary = self.canary
        try:
            damage = canary.inspect(ptr, ptr + size)
        except DriverError:  # unread is not verified: it stays, and is tried again
            self._keep(segment, ptr)
            return False
        except BaseException:  # Ctrl-C, where nothing can put it off
            self._keep(segment, ptr)
            raise
        if damage is None:
            with self._lock.checked():  # now: once it is given back, another thread may grow into these very addresses
                canary.gone(ptr, ptr + size)
            return super()._detach(segment, ptr, reason)
        with self._lock.checked():
            self._accounts.mark()
            self.growing -= size
            canary.put_down(self._heap.add(segment), damage)
            self._accounts.mark()
        error = canary.report(damage)
        if reason == "close":
            return False
        raise error

    def wait_for_others(self, seconds: float) -> bool:
        """Memory that another thread is filling or verifying at this moment comes back as well."""
        until = time.monotonic() + seconds
        waited = False
        while self.canary.at_work and time.monotonic() < until:
            waited = True
            time.sleep(0.0002)
        return super().wait_for_others(max(0.0, until - time.monotonic())) or waited

"""Pools that have gone while memory was still live or in flight: kept until the last of it can be given back.

A pool that is closed, or dropped with its last allocation, joins a process-wide list.  There is no thread: every
later public call of any pool, off the hot path, serves the list.  Joining is one atomic append, so a finaliser
may do it (DESIGN 5).  Next: pool.py.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from allocator.sync import shielded

MOST_SKIPPED = 64
"""Allocations off the hot path that pass between two looks at a pool which could not go yet."""


class Leaving(Protocol):
    """A pool that nobody can allocate from any more."""

    frees: deque[Any]

    def give_up_memory(self) -> bool:
        """Give back what is idle by now; True if nothing is left."""


class _Look:
    """skipped: looks let pass since the last one.  skip: how many to let pass."""

    __slots__ = ("pool", "skip", "skipped")

    def __init__(self, pool: Leaving) -> None:
        self.pool = pool
        self.skip = 0
        self.skipped = 0


_leaving: deque[_Look] = deque()


def leave(pool: Leaving) -> None:
    """The pool goes.  Lock-free."""
    _leaving.append(_Look(pool))


def any_left() -> bool:
    """Is there a pool that has gone and holds memory yet?"""
    return bool(_leaving)


def reap(*, patiently: bool = False) -> None:
    """Serve the pools that have gone.  Driver calls: queries, and those that give memory back.

    patiently: for allocations, of which there are many: a pool that could not go is looked at less and less often.
    """
    if _leaving:
        _serve(patiently)


@shielded
def _serve(patiently: bool) -> None:
    for _ in range(len(_leaving)):
        try:
            look = _leaving.popleft()
        except IndexError:
            return
        if patiently and not look.pool.frees and look.skipped < look.skip:
            look.skipped += 1
            _leaving.append(look)
            continue
        try:
            done = look.pool.give_up_memory()
        except Exception:  # whatever it was: the pool stays on the list and is tried again
            done = False
        if not done:
            look.skipped, look.skip = 0, min(2 * look.skip + 1, MOST_SKIPPED)
            _leaving.append(look)


def forget_all() -> None:
    """In a forked child: the memory is the parent's (S21)."""
    _leaving.clear()

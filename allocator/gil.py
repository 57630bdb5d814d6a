"""The pool's lock where the hot path is compiled: taken only where some other code can come in between.

Compiled code gives the interpreter's lock to nobody between two of its own steps, so a few steps that call nothing are
one step to all other threads, and need no lock of ours: only to know that no thread is *inside* the locked section at
this moment.  `busy` says so.  It is set in the same step in which the lock is taken, and cleared in that in which it is
given back, because this class is compiled too.  Interpreted, neither is so: there sync.py's `OwnedLock` is used, and
the hot path takes the lock (docs/decisions/0016).

Next: caching/front.py, which asks `busy`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import sleep
from types import TracebackType
from typing import Any, Final

from allocator.errors import REENTERED, Reentered

COMPILED: Final = not __file__.endswith(".py")
"""Does the compiled code of this package run, or its source?"""

PATIENCE: Final = 16
"""Times that a thread lets others go first before it waits in the lock's own queue."""


def wait_for(acquire: Callable[[bool], bool]) -> bool:
    """Take a lock that another thread holds.

    Whoever waits in a lock's queue is handed it without the interpreter's lock, and all others wait until it has both:
    from then on every operation switches threads.  So the holder, which is inside for microseconds and needs only the
    interpreter's lock to be out again, is let go first.
    """
    for _ in range(PATIENCE):
        sleep(0)
        if acquire(False):
            return True
    return acquire(True)


class GilLock:
    """What `sync.OwnedLock` is, and says, and raises; with `busy`: how often it is taken now."""

    __slots__ = ("_inner", "busy")

    def __init__(self) -> None:
        self._inner: Any = threading.RLock()
        self.busy = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`, but False at once where this thread holds it and does not insist."""
        if self._inner._is_owned():
            if not blocking or timeout >= 0:
                return False
            raise Reentered(REENTERED)
        taken: bool
        if blocking and timeout < 0:
            taken = self._inner.acquire(False) or wait_for(self._inner.acquire)
        else:
            taken = self._inner.acquire(blocking, timeout)
        if taken:
            self.busy += 1
        return taken

    def release(self) -> None:
        """As `threading.Lock.release`."""
        self.busy -= 1
        self._inner.release()

    def held_here(self) -> bool:
        """Does the calling thread hold it?"""
        held: bool = self._inner._is_owned()
        return held

    def checked(self) -> AbstractContextManager[bool]:
        """Itself: see `LockLike.checked`."""
        return self

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.busy -= 1
        self._inner.release()

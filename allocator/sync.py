"""The locks and the free queue, made in one place so that a test scheduler can replace them.

Order of locks, outermost first: a pool's lock, then its device's timeline lock (R1).  Neither is ever
held while foreign code runs: callbacks, log handlers, blocking driver calls (S16).

`FreeQueue` is a deque: appending is one atomic step that takes no lock, so it may happen anywhere, also
in a finaliser that the garbage collector runs inside our own locked section (DESIGN 5).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, TypeVar


class LockLike(AbstractContextManager[bool], Protocol):
    """What we need of a lock; `threading.Lock` has it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`."""

    def release(self) -> None:
        """As `threading.Lock.release`."""


class OwnedLock:
    """A lock that knows which thread holds it, so that a finaliser run inside it can tell (DESIGN 5)."""

    __slots__ = ("_holder", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`."""
        got = self._lock.acquire(blocking, timeout)
        if got:
            self._holder = threading.get_ident()
        return got

    def release(self) -> None:
        """As `threading.Lock.release`."""
        self._holder = 0
        self._lock.release()

    def held_here(self) -> bool:
        """Does the calling thread hold it?"""
        return self._holder == threading.get_ident()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


T = TypeVar("T")
FreeQueue = deque

_lock_factory: Callable[[str], LockLike] | None = None


def make_lock(name: str) -> LockLike:
    """A new lock; `name` says what it guards, for the test scheduler.  Not re-entrant."""
    if _lock_factory is not None:
        return _lock_factory(name)
    return OwnedLock() if name == "timelines" else threading.Lock()


def use_lock_factory(factory: Callable[[str], LockLike] | None) -> None:
    """Make every later lock with `factory(name)`; None restores real locks.  For tests."""
    global _lock_factory
    _lock_factory = factory

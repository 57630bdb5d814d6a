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
from typing import Protocol, TypeVar

from allocator.errors import Reentered


class LockLike(AbstractContextManager[bool], Protocol):
    """What we need of a lock; `threading.Lock` has it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`."""

    def release(self) -> None:
        """As `threading.Lock.release`."""


class InnerLock(LockLike, Protocol):
    """A re-entrant lock that knows whether the calling thread holds it, as `threading.RLock` does."""

    def _is_owned(self) -> bool: ...


class OwnedLock:
    """A lock that knows who holds it.  Entering it again from inside its own section raises `Reentered`.

    That happens where the garbage collector runs somebody's finaliser, or the interpreter a signal handler, in the
    middle of our section, and that calls us (DESIGN 5).  A plain lock would wait for itself for ever.

    A signal handler that raises, as Ctrl-C does, leaves no lock taken: the interpreter looks for signals when a Python
    function begins and after a call, so leaving the section is the inner lock's own function, which is written in C,
    and what is raised between taking it and being inside the section gives it back.

    inner: the lock itself, re-entrant, for the one place that cannot afford this class: the hot path, which asks
    `inner._is_owned()` first.
    """

    __slots__ = ("__exit__", "inner", "release")

    def __init__(self, inner: InnerLock | None = None) -> None:
        self.inner: InnerLock = threading.RLock() if inner is None else inner  # type: ignore[assignment]  # typeshed hides `_is_owned`
        self.__exit__ = self.inner.__exit__
        self.release = self.inner.release
        """As `threading.Lock.release`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`, but False at once where this thread holds it and does not insist."""
        inner = self.inner
        if inner._is_owned():
            if not blocking or timeout >= 0:
                return False
            raise Reentered("called by a finaliser or a signal handler from inside the allocator's own locked section")
        try:
            return inner.acquire(blocking, timeout)
        except BaseException:  # a signal handler's, perhaps just after the lock was taken
            if inner._is_owned():
                inner.release()
            raise

    def held_here(self) -> bool:
        """Does the calling thread hold it?"""
        return self.inner._is_owned()

    def __enter__(self) -> bool:
        return self.acquire()


def inner_of(lock: LockLike) -> tuple[AbstractContextManager[bool], Callable[[], bool]]:
    """(what to enter, what tells whether this thread is inside already): for the hot path."""
    if isinstance(lock, OwnedLock):
        return lock.inner, lock.inner._is_owned
    return lock, bool


T = TypeVar("T")
FreeQueue = deque

_lock_factory: Callable[[str], LockLike] | None = None


def make_lock(name: str) -> LockLike:
    """A new lock; `name` says what it guards, for the test scheduler.  Not re-entrant."""
    if _lock_factory is not None:
        return _lock_factory(name)
    return OwnedLock()


def use_lock_factory(factory: Callable[[str], LockLike] | None) -> None:
    """Make every later lock with `factory(name)`; None restores real locks.  For tests."""
    global _lock_factory
    _lock_factory = factory

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

from allocator.errors import Reentered


class LockLike(AbstractContextManager[bool], Protocol):
    """What we need of a lock; `threading.Lock` has it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`."""

    def release(self) -> None:
        """As `threading.Lock.release`."""


class OwnedLock:
    """A lock that knows who holds it.  Entering it again from inside its own section raises `Reentered`.

    That happens where the garbage collector runs somebody's finaliser, or the interpreter a signal handler, in the
    middle of our section, and that calls us (DESIGN 5).  A plain lock would wait for itself for ever.

    inner: the lock itself, re-entrant, for the one place that cannot afford this class: the hot path, which asks
    `inner._is_owned()` first.
    """

    __slots__ = ("inner",)

    def __init__(self) -> None:
        self.inner = threading.RLock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`, but False at once where this thread holds it and does not insist."""
        if self.inner._is_owned():  # type: ignore[attr-defined]  # public in all but name
            if not blocking or timeout >= 0:
                return False
            raise Reentered("called by a finaliser or a signal handler from inside the allocator's own locked section")
        return self.inner.acquire(blocking, timeout)

    def release(self) -> None:
        """As `threading.Lock.release`."""
        self.inner.release()

    def held_here(self) -> bool:
        """Does the calling thread hold it?"""
        return bool(self.inner._is_owned())  # type: ignore[attr-defined]  # public in all but name

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inner.release()


def inner_of(lock: LockLike) -> tuple[AbstractContextManager[bool], Callable[[], bool]]:
    """(what to enter, what tells whether this thread is inside already): for the hot path."""
    if isinstance(lock, OwnedLock):
        return lock.inner, lock.inner._is_owned  # type: ignore[attr-defined]  # public in all but name
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

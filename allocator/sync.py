"""The locks and the free queue, made in one place so that a test scheduler can replace them.

Order of locks, outermost first: a pool's lock, then its device's timeline lock (R1).  Neither is ever
held while foreign code runs: callbacks, log handlers, blocking driver calls (S16).

`FreeQueue` is a deque: appending is one atomic step that takes no lock, so it may happen anywhere, also
in a finaliser that the garbage collector runs inside our own locked section (DESIGN 5).

Ctrl-C raises `KeyboardInterrupt` between any two steps of the main thread.  On the hot path nothing is lost by that,
step for step; everywhere else `shield` puts it off to the end of the call.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar

from allocator.gil import COMPILED, GilLock, Inside, refused


class LockLike(AbstractContextManager[bool], Protocol):
    """What we need of a lock; `threading.Lock` has it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`."""

    def release(self) -> None:
        """As `threading.Lock.release`."""

    def checked(self) -> AbstractContextManager[bool]:
        """What to enter, in `with`, where compiled code does: the same as entering the lock itself."""


class InnerLock(AbstractContextManager[bool], Protocol):
    """A re-entrant lock that knows whether the calling thread holds it, as `threading.RLock` does."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...

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
    inside: busy from when a section begins.  Leaving it is the inner lock's alone, so it stays busy until the hot path,
    at the end of a section of its own, says that nobody is inside.
    """

    __slots__ = ("__exit__", "below", "inner", "inside", "release")

    def __init__(self, inner: InnerLock | None = None) -> None:
        self.inner: InnerLock = threading.RLock() if inner is None else inner  # type: ignore[assignment]  # typeshed hides `_is_owned`
        self.inside = Inside()
        self.below: Any = None
        """A lock that comes after this one in the order of locks: who holds it does not get this one."""
        self.__exit__ = self.inner.__exit__
        self.release = self.inner.release
        """As `threading.Lock.release`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`, but False at once where this thread must not have it and does not insist."""
        inner, below = self.inner, self.below
        if inner._is_owned() or (below is not None and below.held_here()):
            return refused(blocking, timeout)
        try:
            taken = inner.acquire(blocking, timeout)
            if taken:
                self.inside.busy = 1  # before the section's first step, whoever came in since
                self.inside.entered += 1
            return taken
        except BaseException:  # a signal handler's, perhaps just after the lock was taken
            if inner._is_owned():
                inner.release()
            raise

    def held_here(self) -> bool:
        """Does the calling thread hold it?"""
        return self.inner._is_owned()

    def checked(self) -> AbstractContextManager[bool]:
        """`with lock.checked():` is `with lock:`, for compiled code, which looks for `__exit__` in the type."""
        return self  # `with` finds `__exit__` in the slot

    def __enter__(self) -> bool:
        return self.acquire()


def in_order(lock: LockLike, below: LockLike) -> None:
    """`below` comes after this lock in the order of locks (R1).  A finaliser or a signal handler that runs inside its
    section, and asks for this one, is refused: who has it may be waiting for `below` (DESIGN 5)."""
    if isinstance(lock, (OwnedLock, GilLock)):
        lock.below = below


def inner_of(lock: LockLike) -> tuple[LockLike | InnerLock, Callable[[], bool], Inside | None]:
    """(what to take and give back, what tells whether this thread is inside already, and whether any is): for the hot
    path.  None: there is no telling."""
    if isinstance(lock, OwnedLock):
        return lock.inner, lock.inner._is_owned, lock.inside
    if isinstance(lock, GilLock):
        return lock, lock.held_here, lock.inside
    return lock, bool, None


T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
_SIGINT = int(signal.SIGINT)
_FOREIGN_LOOP = "gevent"
"""Its loop puts signal handlers where Python cannot see them, nor put them back: there Ctrl-C is left alone."""
try:  # the functions themselves: what makes their answers readable for people costs twenty times as much
    from _signal import getsignal as _get_handler, signal as _set_handler  # type: ignore[import-not-found]  # fmt: skip  # isort: skip  # no stubs
except ImportError:  # another interpreter than CPython
    _get_handler, _set_handler = signal.getsignal, signal.signal


class Shield:
    """`with shield:` puts Ctrl-C off to the end of the outermost section: it is raised there, when all is in order.

    For the main thread, which alone runs signal handlers; for others it is nothing.  Whatever SIGINT does is put off,
    an own handler too.  Not for long: driver calls do not answer to Ctrl-C anyway, and our waits are bounded, but for
    those that wait for the program's own work, which end with it.  Foreign code is called inside `lifted()`.
    """

    __slots__ = ("_before", "_main", "_pending", "depth")

    def __init__(self) -> None:
        self._before: Any = None
        self.depth = 0
        """Sections that the main thread is inside of."""
        self._pending = False
        self._main = threading.main_thread().ident

    def __enter__(self) -> None:
        if get_ident() != self._main:
            return
        if not self.depth:
            if _FOREIGN_LOOP in sys.modules:
                return
            before = _get_handler(_SIGINT)
            if callable(before):
                self._before = before
                _set_handler(_SIGINT, self._put_off)
            else:
                self._before = None  # ignored, or the end of the process: nothing is raised
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if get_ident() != self._main or not self.depth:
            return
        self.depth -= 1
        if self.depth:
            return
        before, self._before = self._before, None
        if before is not None:
            pending, self._pending = self._pending, False
            _set_handler(_SIGINT, before)
            if pending:
                before(_SIGINT, None)

    def _put_off(self, number: int, frame: FrameType | None) -> None:
        self._pending = True

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside a section, around foreign code: Ctrl-C is what it was, and what was put off comes first."""
        if get_ident() != self._main or not self.depth:
            yield
            return
        depth, self.depth = self.depth, 1
        try:
            self.__exit__(None, None, None)
            yield
        finally:
            self.__enter__()
            self.depth = depth

    def forked(self) -> None:
        """In a child: the thread that forked is the main one now, and no section of another thread's is open."""
        if self._main != get_ident():
            self._main, self.depth, self._pending = get_ident(), 0, False


shield = Shield()


def shielded(call: Callable[P, R]) -> Callable[P, R]:
    """The same inside `shield`: for what many steps change together."""

    @wraps(call)
    def inside(*args: P.args, **options: P.kwargs) -> R:
        with shield:
            return call(*args, **options)

    return inside


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=shield.forked)

FreeQueue = deque

_lock_factory: Callable[[str], LockLike] | None = None


def make_lock(name: str) -> LockLike:
    """A new lock; `name` says what it guards, for the test scheduler.  Not re-entrant."""
    if _lock_factory is not None:
        return _lock_factory(name)
    return GilLock() if COMPILED else OwnedLock()


def use_lock_factory(factory: Callable[[str], LockLike] | None) -> None:
    """Make every later lock with `factory(name)`; None restores real locks.  For tests."""
    global _lock_factory
    _lock_factory = factory

"""What the interpreter's lock is good for: a few steps that call nothing are one step to all other threads.

CPython gives its lock away, runs signal handlers and, from 3.12 on, collects only where a function begins, after a
call, and where a loop goes back.  Compiled code does so nowhere between two of its own steps.  So steps that call
nothing need no lock of ours: only to know that no thread is *inside* the locked section at this moment.  `Inside.busy`
says so.  A test reads the code of those steps, as the interpreter that runs it has translated them
(tests/unit/caching/test_steps.py); other interpreters, CPython without that lock, and versions that the test has not
seen take the lock instead (docs/decisions/0018).

`GilLock` is the pool's lock where it is compiled; interpreted, sync.py's `OwnedLock` is.
Next: caching/front.py, which asks `busy`.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final

from allocator.errors import REENTERED, Reentered

COMPILED: Final = not __file__.endswith(".py")
"""Does the compiled code of this package run, or its source?"""
STEPS_HOLD: Final = (
    sys.implementation.name == "cpython"
    and (3, 11) <= sys.version_info[:2] <= (3, 13)
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)
"""Are steps that call nothing one step to all other threads?"""


class Inside:
    """busy: 0 if certainly no thread is inside a locked section that has begun and is not over.

    entered: sections that have begun.  While it is the same, no other thread has been inside.
    """

    __slots__ = ("busy", "entered")

    def __init__(self) -> None:
        self.busy = 0
        self.entered = 0


def refused(blocking: bool, timeout: float) -> bool:
    """What a lock answers to a thread that must not have it now: False, or `Reentered` if it insists."""
    if not blocking or timeout >= 0:
        return False
    raise Reentered(REENTERED)


class GilLock:
    """What `sync.OwnedLock` is, and says, and raises.

    `inside.busy`, how often it is taken now, is set in the same step in which the lock is taken, and cleared in that in
    which it is given back, because this class is compiled.
    """

    __slots__ = ("_inner", "below", "inside")

    def __init__(self) -> None:
        self._inner: Any = threading.RLock()
        self.inside = Inside()
        self.below: Any = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`, but False at once where this thread must not have it and does not insist."""
        if self._inner._is_owned() or (self.below is not None and self.below.held_here()):
            return refused(blocking, timeout)
        taken: bool = self._inner.acquire(blocking, timeout)
        if taken:
            self.inside.busy += 1
            self.inside.entered += 1
        return taken

    def release(self) -> None:
        """As `threading.Lock.release`."""
        self.inside.busy -= 1
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
        self.inside.busy -= 1
        self._inner.release()

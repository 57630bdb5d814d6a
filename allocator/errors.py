"""Every error that leaves this package, in one place.

Rule: a caller's mistake is ValueError or TypeError with one line that says what to do; whatever
the pool or the driver refuses is an `AllocatorError`.  Errors carry numbers only, so catching one
keeps no memory alive (S07).
"""

from __future__ import annotations

from collections.abc import Mapping


class AllocatorError(Exception):
    """Base of all errors raised by this package, wrong arguments apart."""


class OutOfMemoryError(AllocatorError, MemoryError):
    """No memory for a request, after every step of the ladder was tried.

    requested: bytes asked for, after rounding.  limit: the pool's limit in bytes, 0 = none.
    stats: a few plain numbers in bytes (reserved, allocated, in flight, idle, device free).
    """

    def __init__(
        self,
        message: str,
        *,
        requested: int = 0,
        limit: int = 0,
        stats: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.requested = requested
        self.limit = limit
        self.stats: dict[str, int] = dict(stats or {})


class CorruptionError(AllocatorError):
    """Checked mode (`Config(canary=True)`) found memory that was written after it had been freed.

    pool: its name.  ptr, nbytes: from the first to the last byte that is wrong.  damaged: how many of them are.
    found: the first of these bytes.  owner, users: the streams that had the memory last, in words; "" and () if
    nobody had it.  requested, generation: of that allocation, 0 likewise.  candidates: the streams that may have
    written, in words.  writer: the only candidate, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        pool: str = "",
        ptr: int = 0,
        nbytes: int = 0,
        damaged: int = 0,
        found: bytes = b"",
        owner: str = "",
        users: tuple[str, ...] = (),
        requested: int = 0,
        generation: int = 0,
        candidates: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.pool = pool
        self.ptr = ptr
        self.nbytes = nbytes
        self.damaged = damaged
        self.found = found
        self.owner = owner
        self.users = users
        self.requested = requested
        self.generation = generation
        self.candidates = candidates
        self.writer = candidates[0] if len(candidates) == 1 else None


class PoolClosed(AllocatorError):
    """An allocation was asked of a pool that has been closed, or whose device is lost."""


class StreamClosed(AllocatorError):
    """A stream was used after it had ended."""


class StreamCapturing(AllocatorError):
    """The stream is being captured into a graph, and the operation would break the capture."""


class ForkError(AllocatorError):
    """The pool was made in a parent process; a CUDA context does not survive a fork (S21)."""


class DriverError(AllocatorError):
    """A driver call failed.

    call: the driver's name for the call.  code: the driver's name for the error.
    sticky: True if the context is lost, so that every later call will fail as well (R11).
    """

    def __init__(self, call: str, code: str, detail: str = "", *, sticky: bool = False) -> None:
        text = f"{call} failed: {code}"
        if detail:
            text += f" ({detail})"
        super().__init__(text)
        self.call = call
        self.code = code
        self.sticky = sticky


REENTERED = "called by a finaliser or a signal handler from inside the allocator's own locked section"


class Reentered(AllocatorError):
    """Called from inside one of the allocator's own locked sections: by a finaliser that the garbage collector ran
    there, or by a signal handler.  Nothing was done; call it from elsewhere, or later."""


class SimDeadlock(AllocatorError):
    """On the simulator: a host wait that nothing in this process can ever end."""

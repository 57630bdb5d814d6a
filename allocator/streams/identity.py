"""Which stream is that?  From anything stream-like to a handle, and to the object that keeps it alive.

Rules: a stream's identity is (context, `cuStreamGetId`): handles are recycled at once (R8).  A handle may be
used while an object known to own it is held, read anew from that object, or inside the call that was given
it (R9).  Owners are told apart by `is`: some libraries' streams compare and hash by their handle.

Next: registry.py, which remembers what was found.
"""

from __future__ import annotations

from typing import Final

from allocator.devices import LEGACY, PER_THREAD

_BORROWED: Final = frozenset({"ExternalStream", "_BaseStream"})
"""Names of classes, and of what derives from them, that wrap a handle without owning it: CuPy's, PyTorch's.  CuPy makes
a `_BaseStream` on the spot where another library hands it a stream."""

_LIBRARIES: Final = frozenset({"cupy", "torch", "cuda", "rmm", "numba", "pycuda", "jax"})
"""Top-level modules whose stream objects own their handle although they may not speak `__cuda_stream__`."""

_DESTROYERS: Final = frozenset({("cupy.cuda.stream", "Stream")})
"""(module, class) of foreign objects that destroy their stream when they go."""

_BORROWED_FROM: Final = "_foreign_stream_ref"
"""Attribute of a CuPy Stream made by `from_external`: whose stream it is.  That one lives on when the wrapper goes."""

_ATTRIBUTES: Final = ("handle", "ptr", "cuda_stream", "value")


class OwnedHandle:
    """A stream handle that we made and shall destroy.

    It dies when it has been closed *and* no thread is inside a driver call that was given it: `pins` counts
    those, under the registry's lock.
    """

    __slots__ = ("__weakref__", "closing", "handle", "pins")

    def __init__(self, handle: int) -> None:
        self.handle: int | None = handle
        self.pins = 0
        self.closing = False


def handle_of(stream: object) -> int:
    """The driver handle that `stream` holds at this moment, 0 told as `LEGACY`.

    `stream` is an int, or speaks `__cuda_stream__`, or has the handle where a known library keeps it.
    TypeError if it is none of these, ValueError if its stream has been closed.
    """
    if isinstance(stream, bool):
        raise TypeError("stream must be a stream, a handle (int) or None, not bool")
    if isinstance(stream, int):
        handle: object = stream
    elif hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        answer = protocol() if callable(protocol) else protocol
        if not isinstance(answer, tuple) or len(answer) < 2:
            raise TypeError(f"{type(stream).__name__}.__cuda_stream__ must answer (version, handle), not {answer!r}")
        handle = answer[1]
    else:
        for name in _ATTRIBUTES:
            handle = getattr(stream, name, None)
            if callable(handle):
                handle = handle()
            if handle is not None:
                break
        else:
            raise TypeError(
                f"{type(stream).__name__} is no stream: pass a Stream, an object with __cuda_stream__, a handle or None"
            )
    if isinstance(handle, bool) or not hasattr(handle, "__index__"):
        raise ValueError(f"the {type(stream).__name__} given has no handle; has it been closed?")
    number = int(handle.__index__())
    if number < 0:
        raise ValueError(f"a stream handle cannot be negative: {number}")
    return number or LEGACY


def owns_handle(stream: object) -> bool:
    """True if holding `stream` is known to keep its handle alive (R9).

    By the protocol an object with `__cuda_stream__` does, and so do the streams of known libraries.  Ints, wrappers
    of a foreign handle, and anything else that merely has a handle somewhere do not: like a bare handle.
    """
    if isinstance(stream, int):
        return False
    line = type(stream).__mro__
    destroys = any((cls.__module__, cls.__name__) in _DESTROYERS for cls in line)
    if not destroys and any(cls.__name__ in _BORROWED for cls in line):
        return False
    return hasattr(stream, "__cuda_stream__") or line[0].__module__.partition(".")[0] in _LIBRARIES


def dies_with(owner: object) -> bool:
    """True if the stream is known to be destroyed when `owner` goes: nobody can give it work after that (R9).

    Of other objects we only know that they keep the stream alive while they live: PyTorch's streams live for ever, and
    wrappers come and go.
    """
    if isinstance(owner, OwnedHandle):
        return True
    if not any((cls.__module__, cls.__name__) in _DESTROYERS for cls in type(owner).__mro__):
        return False
    return getattr(owner, _BORROWED_FROM, None) is None


def is_special(handle: int) -> bool:
    """True for the handles that never die: legacy and per-thread."""
    return handle in (LEGACY, PER_THREAD)

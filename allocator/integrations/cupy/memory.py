"""The memory that CuPy's arrays hold.

An array keeps a `Memory` alive, whose end is the free.  Where source runs that is a `Lease` itself: it has a lease's
fields and functions.  Compiled, it carries a lease that is compiled as well, because an object with a finaliser of
Python's takes longer there to make and to end than both (docs/decisions/0022).  It is an `UnownedMemory`, as CuPy's
`PythonFunctionAllocator` loses frees (FACTS).  Next: lease.py (the free), hook.py (where it is made).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from allocator.gil import COMPILED
from allocator.integrations.cupy import library
from allocator.integrations.cupy.lease import Lease

if TYPE_CHECKING:

    class _UnownedMemory:
        """CuPy's, which has no types."""

        ptr: int
        size: int
        device_id: int
        _owner: Any

        def __init__(self, ptr: int, size: int, owner: object, device_id: int) -> None: ...

else:
    _UnownedMemory = library.UnownedMemory


class Memory(_UnownedMemory):
    """Memory that a CuPy array holds: `ptr`, `size` and `device_id` are CuPy's."""

    __slots__ = () if COMPILED else ("_block", "_generation", "key", "route")

    identity = "Weir"
    """CuPy's pools tell here what kind of memory theirs is."""

    if not COMPILED:
        end = Lease.end
        _give_back = Lease._give_back
        __del__ = Lease.__del__

    @property
    def lease(self) -> Lease | None:
        """What holds the block; None for memory of 0 bytes."""
        held: Any = self._owner if COMPILED else self if hasattr(self, "_block") else None
        return held  # type: ignore[no-any-return]  # where source runs it is one in all but name

    @property
    def pool(self) -> Any:
        """The pool that it came from and goes back to; None for 0 bytes."""
        lease = self.lease
        return None if lease is None else lease.route.pool

    @property
    def requested(self) -> int:
        """Bytes asked for; 0 once given back."""
        lease = self.lease
        return 0 if lease is None or lease._generation < 0 else lease._block.requested

    @property
    def closed(self) -> bool:
        """True once it has been given back."""
        lease = self.lease
        return lease is None or lease._generation < 0

    def free(self) -> None:
        """Give it back at once, as CuPy's own pooled memory can.  Twice is harmless."""
        lease = self.lease
        if lease is not None:
            lease.end()
        self.ptr = 0

    def __reduce__(self) -> NoReturn:
        """Refused: a copy would not hold the block."""
        raise TypeError("memory cannot be copied or pickled; copy the array")

    def __repr__(self) -> str:
        return f"<Memory {self.ptr:#x} of {self.size} bytes{' closed' if self.closed else ''}>"


class WatchedMemory(Memory):
    """The same where a device watches who holds memory: it can be told of its end, which takes a little longer."""

    __slots__ = ("__weakref__",)


def nothing(ordinal: int) -> Any:
    """Memory of 0 bytes."""
    memory: Any = Memory(0, 0, None, ordinal)
    if not COMPILED:
        memory._generation = -1  # its end has nothing to give back
    return memory

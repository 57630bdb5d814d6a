"""The memory that CuPy's arrays hold.

An array keeps a `Memory` alive, and that keeps a `Lease`, whose end is the free.  CuPy's own `UnownedMemory` carries
the two together: an object of Python with a finaliser of its own takes twice as long to make and to end, and CuPy's
`PythonFunctionAllocator` loses frees (FACTS).  Next: lease.py (the free), hook.py (where it is made).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

    __slots__ = ()

    identity = "Weir"
    """CuPy's pools tell here what kind of memory theirs is."""

    @property
    def lease(self) -> Lease | None:
        """What holds the block; None for memory of 0 bytes."""
        owner: Lease | None = self._owner
        return owner

    @property
    def pool(self) -> Any:
        """The pool that it came from and goes back to; None for 0 bytes."""
        lease = self.lease
        return None if lease is None else lease.route.pool

    @property
    def requested(self) -> int:
        """Bytes asked for; 0 once given back."""
        lease = self.lease
        return 0 if lease is None else lease.requested

    @property
    def closed(self) -> bool:
        """True once it has been given back."""
        lease = self.lease
        return lease is None or lease.closed

    def free(self) -> None:
        """Give it back at once, as CuPy's own pooled memory can.  Twice is harmless."""
        lease = self.lease
        if lease is not None:
            lease.end()
        self.ptr = 0

    def __repr__(self) -> str:
        return f"<Memory {self.ptr:#x} of {self.size} bytes{' closed' if self.closed else ''}>"


class WatchedMemory(Memory):
    """The same where a device watches who holds memory: it can be told of its end, which takes a little longer."""

    __slots__ = ("__weakref__",)

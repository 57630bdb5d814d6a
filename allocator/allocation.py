"""`Allocation`: memory somebody holds.  It goes back when it is closed, or when the last reference goes.

Rule: a free never makes a driver call, takes a lock or raises where a finaliser runs it: it is one atomic append
to the pool's queue, which the pool's next public call sees to (DESIGN 5).  The append names the block *and* the
generation it was handed out in, so a second close, also one from another thread, finds nothing to do.

Next: caching/frees.py, where frees are stamped.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from allocator.collector import RUNNING
from allocator.sizes import round_up

if TYPE_CHECKING:
    from allocator.resource import Home


class Allocation:
    """Device memory.  Also a context manager.  Not thread-safe in the sense that no object is while it is closed.

    ptr: address, 0 for an empty allocation; stays readable after `close`.  size: bytes, rounded up to 512.
    requested: bytes asked for.  stream: the resolved stream it was allocated on.
    """

    __slots__ = ("__weakref__", "_block", "_generation", "_home", "kept", "ptr", "requested", "stream")

    kept: Any
    """The foreign object that keeps the stream alive, held until `close` (R9); unset where there is none."""

    ptr: int
    requested: int
    stream: Any

    def __init__(self, home: Home, block: Any, requested: int, stream: Any) -> None:
        self._home = home
        self._block = block
        self._generation = block.generation
        self.ptr = block.ptr
        self.requested = requested
        self.stream = stream

    @property
    def size(self) -> int:
        """Bytes, after rounding."""
        return round_up(self.requested)

    @property
    def device_id(self) -> int:
        """The ordinal of the device that the memory is on."""
        ordinal: int = self.stream.device.ordinal
        return ordinal

    @property
    def closed(self) -> bool:
        """True once it has been given back."""
        generation: int = self._generation
        return generation < 0

    def record_stream(self, stream: object) -> None:
        """The memory is also in use on `stream`, for everything queued there up to the free.

        No driver call, except to find out which stream a bare handle is.  ValueError once closed.
        """
        self._home.declare_use(self, stream)

    def close(self, stream: object = None) -> None:
        """Give the memory back.  Twice is harmless; never raises.

        stream: a stream that used the memory up to now; it joins the owner and the recorded ones (R3).
        """
        self._home.free(self, stream)

    def __enter__(self) -> Allocation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            generation = self._generation
        except AttributeError:  # Ctrl-C before there was any memory in it
            return
        if generation >= 0:
            home, block = self._home, self._block
            if RUNNING:  # it may still be used, or come back to life: see collector.py
                home.put_down((block, generation, [self]))
                return
            lane = home.lane
            if lane is None:
                home.put_down((block, generation, None))
                return
            before = lane.block; then = lane.generation; lane.block = block; lane.generation = generation  # as `Lane.put`  # noqa: E501, E702  # fmt: skip
            if before is not None:
                home.put_down((before, then, None))

    def __repr__(self) -> str:
        return f"<Allocation {self.ptr:#x} of {self.requested} bytes{' closed' if self.closed else ''}>"

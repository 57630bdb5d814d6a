"""What the integrations need of a pool: declarations only, so that lower layers can name it."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from allocator.allocation import Allocation


@runtime_checkable
class MemoryResource(Protocol):
    """Anything that hands out device memory in stream order."""

    def allocate(self, nbytes: int, stream: object = None) -> Allocation:
        """`nbytes` for use on `stream`, at once."""


class Holder(Protocol):
    """Whatever holds one block of a pool: an `Allocation`, or what a library's arrays hold."""

    _block: Any
    _generation: int

    @property
    def closed(self) -> bool:
        """True once it has been given back."""


class Home(Protocol):
    """The pool of an `Allocation`, as the allocation sees it."""

    put_down: Any
    """Queues a free, in one step."""
    lane: Any
    """The place behind it, for a free that names no stream (caching/lane.py); None if it has none."""

    def declare_use(self, allocation: Holder, stream: object) -> None:
        """`Allocation.record_stream`."""

    def free(self, allocation: Allocation, stream: object) -> None:
        """`Allocation.close` where it has work to do beyond queueing the free."""

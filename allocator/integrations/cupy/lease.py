"""One hand-out of one block to one object of CuPy's.  The end of the lease is the free.

It may end in any thread, inside a garbage collection, at exit: so it only queues, and the pool's next public call sees
to the rest (DESIGN 5).  While a collection runs the end is doubtful: see collector.py.
Hot path: made and ended with each array.  Next: memory.py (what CuPy sees), hook.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from allocator.blocks import Block
from allocator.caching import CachingAllocator
from allocator.collector import RUNNING
from allocator.streams import Kind, Registry, Timeline


class HookUse:
    """Whether any of CuPy's memory hooks has been used in this process: looking for them costs, so only then."""

    __slots__ = ("registered", "seen")

    def __init__(self) -> None:
        self.seen = False
        self.registered: Callable[[], dict[str, Any]] = dict
        """The calling thread's hooks, by name.  Set by hook.py: this module knows nothing of CuPy."""


HOOKS: Final = HookUse()


NOBODYS: Final = Timeline(-1, Kind.NON_BLOCKING)
"""No stream's timeline."""
NOBODYS.owner = object()


class Latest:
    """line: of the stream that was made current, or asked, last, or nobody's; who looks here checks `owner`."""

    __slots__ = ("line",)

    def __init__(self) -> None:
        self.line = NOBODYS


class Route:
    """One device's pool, with what the hot path needs of it and of its streams."""

    __slots__ = (
        "assumed",
        "front",
        "lane",
        "latest",
        "legacy",
        "ordinal",
        "owners",
        "pool",
        "put_down",
        "registry",
    )

    def __init__(self, pool: CachingAllocator, latest: Latest | None = None) -> None:
        self.pool = pool
        self.front = pool.front
        self.assumed = pool.assumes(True)
        """CuPy's programs declare no uses; `Config.uses` may overrule that."""
        self.put_down: Any = pool.put_down
        """Queues a free: one atomic step."""
        self.lane = pool.lane
        """Where a free that needs no more than a block and a generation is queued, if there is such a place."""
        self.ordinal = pool.device.ordinal
        self.registry = Registry.of(pool.device)
        self.owners = self.registry.owners
        self.legacy = self.registry.legacy
        self.latest = Latest() if latest is None else latest


class Lease:
    """Holds a block for as long as it lives.  To the pool it is an allocation.

    Made by setting `route`, `_block` and, last, `_generation`: from there on its end gives the block back.
    Where source runs, `Memory` has all of this itself: one object less takes 7 % off an allocation and its free there,
    and compiled it would add more (docs/decisions/0022).
    """

    __slots__ = ("_block", "_generation", "kept", "key", "route")

    route: Route
    """Where the block came from and goes back to."""
    _block: Block
    _generation: int
    kept: object
    """The stream object it was allocated on, where that has to live as long (R9); else None."""
    key: int
    """What CuPy's memory hooks were told that the memory is called; else unset."""

    @property
    def requested(self) -> int:
        """Bytes asked for; 0 once given back."""
        return self._block.requested if self._generation >= 0 else 0

    @property
    def closed(self) -> bool:
        """True once it has been given back."""
        return self._generation < 0

    def end(self) -> None:
        """Give the block back now.  Twice is harmless."""
        generation = self._generation
        if generation >= 0:
            self._give_back(generation, None)

    def _give_back(self, generation: int, doubtful: list[Lease] | None) -> None:
        """Queue the free, and tell CuPy's memory hooks where any are in use.

        Until it is about to be queued the lease holds the block, so that Ctrl-C leaves it to the lease's end.
        """
        block = self._block
        entry = (block, generation, doubtful)
        if HOOKS.seen and not sys.is_finalizing():
            hooks = list(HOOKS.registered().values())
            if hooks:
                named = {
                    "device_id": self.route.ordinal,
                    "mem_size": block.size,
                    "mem_ptr": block.ptr,
                    "pmem_id": getattr(self, "key", 0) or id(self),
                }
                if doubtful is None:
                    self._generation = -1
                try:
                    for hook in hooks:
                        hook.free_preprocess(**named)
                finally:  # whatever a hook raises, the memory goes back
                    self.route.put_down(entry)
                for hook in hooks:
                    hook.free_postprocess(**named)
                return
        put_down = self.route.put_down
        if doubtful is None:
            self._generation = -1
        put_down(entry)

    def __del__(self) -> None:
        try:
            generation = self._generation
        except AttributeError:  # the thread was interrupted before there was any memory in it
            return
        if generation >= 0:
            if HOOKS.seen or RUNNING:
                self._give_back(generation, [self] if RUNNING else None)
                return
            block = self._block
            lane = self.route.lane
            if lane is None:
                entry = (block, generation, None)
                self._generation = -1  # who gets hold of it now, by a weak reference, say, sees that it is over
                self.route.put_down(entry)
                return
            # As `Lane.put`, without a call.
            before = lane.block; then = lane.generation; lane.block = block; lane.generation = generation; self._generation = -1  # noqa: E501, E702  # fmt: skip
            if before is not None:
                self.route.put_down((before, then, None))

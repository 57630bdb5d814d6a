"""One hand-out of one block to one object of CuPy's.  The end of the lease is the free.

It may end in any thread, inside a garbage collection, at exit: so it only queues, and the pool's next public call sees
to the rest (DESIGN 5).  Hot path: made and ended with each array.  Next: memory.py (what CuPy sees), hook.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from allocator.blocks import Block


class HookUse:
    """Whether any of CuPy's memory hooks has been used in this process: looking for them costs, so only then."""

    __slots__ = ("registered", "seen")

    def __init__(self) -> None:
        self.seen = False
        self.registered: Callable[[], dict[str, Any]] = dict
        """The calling thread's hooks, by name.  Set by hook.py: this module knows nothing of CuPy."""


HOOKS: Final = HookUse()


class Lease:
    """Holds a block for as long as it lives.  To the pool it is an allocation.

    kept: the stream object it was allocated on, where that has to live as long (R9).
    key: what CuPy's memory hooks are told that the memory is called; 0 for this object's own identity.
    """

    __slots__ = ("_block", "_frees", "_generation", "_pool", "kept", "key")

    def __init__(self, pool: Any, frees: Any, block: Block, kept: object) -> None:
        self._pool = pool
        self._frees = frees
        self._block = block
        self.kept = kept
        self.key = 0
        self._generation = block.generation  # from here on its end gives the block back

    @property
    def pool(self) -> Any:
        """The pool that the block came from and goes back to: a `CachingAllocator`, which lives as long as this."""
        return self._pool

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
        generation, self._generation = self._generation, -1
        if generation >= 0:
            self._give_back(generation)

    def _give_back(self, generation: int) -> None:
        """Queue the free, and tell CuPy's memory hooks where any are in use."""
        block = self._block
        if HOOKS.seen and not sys.is_finalizing():
            hooks = list(HOOKS.registered().values())
            if hooks:
                named = {
                    "device_id": self._pool.device.ordinal,
                    "mem_size": block.size,
                    "mem_ptr": block.ptr,
                    "pmem_id": self.key or id(self),
                }
                try:
                    for hook in hooks:
                        hook.free_preprocess(**named)
                finally:  # whatever a hook raises, the memory goes back
                    self._frees.append((block, generation, None))
                for hook in hooks:
                    hook.free_postprocess(**named)
                return
        self._frees.append((block, generation, None))

    def __del__(self) -> None:
        try:
            generation = self._generation
        except AttributeError:  # the thread was interrupted before there was any memory in it
            return
        if generation >= 0:
            if HOOKS.seen:
                self._give_back(generation)
            else:
                self._frees.append((self._block, generation, None))

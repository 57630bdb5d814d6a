"""The allocator that CuPy calls, and the memory that its arrays hold.

CuPy asks for bytes and says nothing else: the stream is its current one, the device that stream's.  An array keeps a
`Memory` alive, and the free is the death of that object: in any thread, inside a garbage collection, at exit.  So the
finaliser only queues, and the pool's next public call sees to the rest (DESIGN 5).

CuPy's programs declare no uses: every stream seen is an assumed user (R3), which watch.py sees to.
Hot path: `Hook.malloc`, `CachingAllocator.acquire`, `Memory.__del__`.
Next: watch.py (which streams there are), pool.py (the pool that CuPy users know).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from allocator.blocks import Block
from allocator.caching import CachingAllocator
from allocator.devices import PER_THREAD
from allocator.errors import OutOfMemoryError, Reentered
from allocator.integrations.cupy import library
from allocator.sizes import check_request, round_up
from allocator.streams import Registry, Stream, Timeline, target

MemoryPointer = library.MemoryPointer
_get_memory_hooks = library.get_memory_hooks


class HookUse:
    """Whether any of CuPy's memory hooks has been used in this process: looking for them costs, so only then."""

    seen = False


if TYPE_CHECKING:

    class _BaseMemory:
        """CuPy's, which has no types."""

        ptr: int
        size: int
        device_id: int

else:
    _BaseMemory = library.BaseMemory


class Memory(_BaseMemory):
    """Memory that a CuPy array holds.  To the pool it is an allocation; `ptr`, `size`, `device_id` are CuPy's.

    It keeps its pool as long as it lives, and the stream object it was allocated on where that has to be kept (R9).
    """

    __slots__ = ("__weakref__", "_block", "_generation", "_home", "kept")

    _block: Block
    _generation: int
    _home: CachingAllocator
    kept: object

    identity = "Weir"
    """CuPy's pools tell here what kind of memory theirs is."""

    @property
    def pool(self) -> CachingAllocator:
        """The pool that it came from and goes back to."""
        return self._home

    @property
    def requested(self) -> int:
        """Bytes asked for."""
        return self._block.requested if self._generation >= 0 else 0

    @property
    def closed(self) -> bool:
        """True once it has been given back."""
        return self._generation < 0

    def free(self) -> None:
        """Give it back at once, as CuPy's own pooled memory can.  Twice is harmless."""
        generation, self._generation = self._generation, -1
        if generation >= 0:
            self._give_back(generation)
        self.ptr = 0

    def _give_back(self, generation: int) -> None:
        if HookUse.seen and not sys.is_finalizing():
            hooks = list(_get_memory_hooks().values())
            if hooks:
                named = {
                    "device_id": self.device_id, "mem_size": self.size, "mem_ptr": self.ptr, "pmem_id": id(self),
                }  # fmt: skip
                try:
                    for hook in hooks:
                        hook.free_preprocess(**named)
                finally:  # whatever a hook raises, the memory goes back
                    self._home.frees.append((self._block, generation, None))
                for hook in hooks:
                    hook.free_postprocess(**named)
                return
        self._home.frees.append((self._block, generation, None))

    def __del__(self) -> None:
        try:
            generation = self._generation
        except AttributeError:  # the thread was interrupted before there was any memory in it
            return
        if generation >= 0:
            if HookUse.seen:
                self._give_back(generation)
            else:
                self._home.frees.append((self._block, generation, None))

    def __repr__(self) -> str:
        return f"<Memory {self.ptr:#x} of {self.size} bytes{' closed' if self.closed else ''}>"


class Route:
    """One device's pool, with what the hot path needs of its streams."""

    __slots__ = ("legacy", "owners", "pool", "registry")

    def __init__(self, pool: CachingAllocator) -> None:
        self.pool = pool
        self.registry = Registry.of(pool.device)
        self.owners = self.registry.owners
        self.legacy = self.registry.legacy


class Hook:
    """CuPy's allocator.  current_stream: what says on which stream memory is asked for.

    route_of: the pool for a stream.  alone: the one route, where there is only one device.
    null: CuPy's object for the legacy stream.
    """

    def __init__(
        self, current_stream: Callable[[], Any], route_of: Callable[[Any], Route], *, null: object = None
    ) -> None:
        self._current_stream = current_stream
        self._route_of = route_of
        self._null = null
        self.alone: Route | None = None
        self.before_any: Callable[[], None] = lambda: None
        """Called before memory may come from another stream: what was seen late has to be known by then."""

    def malloc(self, nbytes: int) -> Any:
        """A `MemoryPointer` to at least `nbytes` bytes for use on the current stream.

        0 bytes are pointer 0.  Driver calls: those of `CachingAllocator.allocate`.  Raises CuPy's
        OutOfMemoryError, and what `allocate` raises otherwise.
        """
        if HookUse.seen and _get_memory_hooks():
            return self._malloc_watched(nbytes)
        stream = self._current_stream()
        route = self.alone
        if route is None:
            route = self._route_of(stream)
        line = route.owners.get(id(stream))
        if line is None or line.owner is not stream or line.ended:
            line = route.legacy if stream is self._null else _at_once(stream, route)
        if line is None or type(nbytes) is not int or nbytes <= 0:
            return MemoryPointer(self._take_slowly(nbytes, stream, route), 0)
        pool = route.pool
        block: Block | None = None
        try:
            block = pool.acquire(nbytes, line, True)
            if block is not None:
                memory = Memory()
                memory._home = pool
                memory._block = block
                memory._generation = block.generation  # from here on its end gives the block back
                memory.ptr = block.ptr
                memory.size = block.size
                memory.device_id = pool.device.ordinal
                memory.kept = line.owner if line.keep else None
                if pool.announce is not None:
                    pool.announce(block.ptr, block.size, memory)
                return MemoryPointer(memory, 0)
        except BaseException as error:
            if block is not None:  # Ctrl-C: nobody holds it; should it have been queued already, once counts
                pool.frees.append((block, block.generation, None))
            if not isinstance(error, Reentered):
                raise
        return MemoryPointer(self._take_slowly(nbytes, stream, route), 0)

    def _take_slowly(self, nbytes: int, stream: object, route: Route) -> Any:
        """Everything but a hit.  Nothing that fails here leaves memory behind, nor a reference in its error (S07).

        A finaliser that the collector runs inside our own locked section cannot be served from the pool that is being
        changed: it gets memory of its own from the runtime, as if there were no pool.
        """
        try:
            return self._take(check_request(nbytes), stream, route)
        except Reentered:
            return library.memory_without_a_pool(nbytes)

    def _take(self, nbytes: int, stream: object, route: Route) -> Memory:
        pool = route.pool
        memory = Memory()
        memory._generation = -1
        memory._home = pool
        memory.device_id = pool.device.ordinal
        memory.ptr = memory.size = 0
        if nbytes == 0:
            return memory
        self.before_any()
        line, given = target(pool.device, stream)
        failure: tuple[int, int, int, str] | None = None
        block: Block | None = None
        try:
            block = pool.obtain(nbytes, line, given, True)
            memory._block = block
            memory._generation = block.generation
            memory.ptr = block.ptr
            memory.size = block.size
            memory.kept = line.owner if line.keep else None
            if pool.announce is not None:
                pool.announce(block.ptr, block.size, memory)
        except OutOfMemoryError as error:
            failure = (round_up(nbytes), error.stats["reserved"], error.limit, str(error))
        except BaseException:
            if block is not None:
                pool.frees.append((block, block.generation, None))
            raise
        if failure is not None:
            raise _out_of_memory(*failure)
        return memory

    def _malloc_watched(self, nbytes: int) -> Any:
        """The same with CuPy's memory hooks told, in the order and with the arguments of its own pool.

        "Allocated from the GPU" is, as with that pool, what no array has had before; it is told after the fact.
        """
        stream = self._current_stream()
        route = self.alone if self.alone is not None else self._route_of(stream)
        nbytes = check_request(nbytes)
        rounded, device = round_up(nbytes), route.pool.device.ordinal
        hooks = list(_get_memory_hooks().values())
        for hook in hooks:
            hook.malloc_preprocess(device_id=device, size=nbytes, mem_size=rounded)
        memory: Any = None
        before = route.pool.new_memory_allocations
        try:
            memory = self._take_slowly(nbytes, stream, route)
        finally:
            new = route.pool.new_memory_allocations != before
            ptr, key = (memory.ptr, id(memory)) if memory is not None else (0, 0)
            if new or memory is None:
                for hook in hooks:
                    hook.alloc_preprocess(device_id=device, mem_size=rounded)
                for hook in hooks:
                    hook.alloc_postprocess(device_id=device, mem_size=rounded, mem_ptr=ptr)
            for hook in hooks:
                hook.malloc_postprocess(device_id=device, size=nbytes, mem_size=rounded, mem_ptr=ptr, pmem_id=key)
        return MemoryPointer(memory, 0)


def _at_once(stream: Any, route: Route) -> Timeline | None:
    """The timeline of a stream that is no CuPy object of its own, where no driver call is needed to tell."""
    if type(stream) is Stream:
        return stream.fast
    return route.registry.per_thread_if_known() if getattr(stream, "ptr", 0) == PER_THREAD else None


def _out_of_memory(size: int, total: int, limit: int, text: str) -> Exception:
    """CuPy's own error, with our numbers as a note."""
    error: Exception = library.OutOfMemoryError(size, total, limit)
    error.add_note(text)
    return error

"""The allocator that CuPy calls.

CuPy asks for bytes and says nothing else: the stream is its current one, the device that stream's.  Its programs
declare no uses: every stream seen is an assumed user (R3), which watch.py sees to.
Hot path: `Hook.malloc`, `Front.acquire`, `Lease.__del__`.  What it makes depends on the build: see memory.py.
Next: memory.py (what arrays hold), watch.py (which streams there are), pool.py (the pool that CuPy users know).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from allocator.blocks import Block
from allocator.devices import PER_THREAD
from allocator.errors import OutOfMemoryError, Reentered
from allocator.gil import COMPILED
from allocator.integrations.cupy import library
from allocator.integrations.cupy.lease import HOOKS, NOBODYS, Lease, Route
from allocator.integrations.cupy.memory import Memory, WatchedMemory, nothing
from allocator.sizes import check_request, round_up
from allocator.streams import Stream, Timeline, target

HOOKS.registered = library.get_memory_hooks
_MEMORY: Final[Any] = Memory
_POINTER: Final[Any] = library.MemoryPointer


class Hook:
    """CuPy's allocator.  current_stream: what says on which stream memory is asked for.

    route_of: the pool for a stream.  null: CuPy's object for the legacy stream.
    only: the one route, where there is only one device.  alone: the same, until CuPy's memory hooks are used.
    """

    def __init__(
        self, current_stream: Callable[[], Any], route_of: Callable[[Any], Route], *, null: object = None
    ) -> None:
        self.current_stream = current_stream
        self._route_of = route_of
        self._legacy = null
        self.only: Route | None = None
        self.alone: Route | None = None
        self.before_any: Callable[[], None] = lambda: None
        """Called before memory may come from another stream: what was seen late has to be known by then."""

    def serve(self, only: Route | None) -> None:
        """Allocate from this route's pool alone; None: ask `route_of` for each stream's."""
        self.only = self.alone = only
        if HOOKS.seen:  # after the store: whoever notices a hook at this moment stores as well, without a lock
            self.alone = None

    def malloc(self, nbytes: Any) -> Any:
        """A `MemoryPointer` to at least `nbytes` bytes for use on the current stream.

        0 bytes are pointer 0.  Driver calls: those of `CachingAllocator.allocate`.  Raises CuPy's
        OutOfMemoryError, and what `allocate` raises otherwise.
        """
        stream = self.current_stream()
        route = self.alone
        if route is None:
            route = self.only
            if route is None:
                route = self._route_of(stream)
            if HOOKS.seen and HOOKS.registered():
                return self._malloc_watched(nbytes, stream, route)
        if stream is self._legacy:
            line = route.legacy
        else:
            latest = route.latest
            line = latest.line
            if line.owner is not stream:  # whether it has ended, `front` looks
                known = route.owners.get(id(stream))
                if known is not None and known.owner is stream and not known.ended:
                    latest.line = line = known
                else:
                    known = _at_once(stream, route)
                    if known is None:
                        return _POINTER(self._take_slowly(nbytes, stream, route), 0)
                    line = known
        if type(nbytes) is not int:
            return _POINTER(self._take_slowly(nbytes, stream, route), 0)
        block: Block | None = None
        try:
            block = route.front.acquire(nbytes, line, route.assumed)  # none for 0 bytes
            if block is None:
                self.before_any()
                block = route.front.fetch(nbytes, line, route.assumed)
                if block is None:
                    return _POINTER(self._take_missed(nbytes, stream, line, route), 0)
            if route.front.announce is not None:
                return _POINTER(_hold(block, line, route), 0)
            # The same, without a call.
            if COMPILED:
                lease = Lease()
                lease.kept = line.keeper
                memory = _MEMORY(block.ptr, block.size, lease, route.ordinal)
                lease.route = route
                lease._block = block
                lease._generation = block.generation
                return _POINTER(memory, 0)
            held = _MEMORY(block.ptr, block.size, line.keeper, route.ordinal)
            held.route = route
            held._block = block
            held._generation = block.generation
            return _POINTER(held, 0)
        except BaseException as error:
            if block is not None:  # Ctrl-C: nobody holds it; should it have been queued already, once counts
                route.put_down((block, block.generation, None))
            if not isinstance(error, Reentered):
                raise
        return _POINTER(self._take_missed(nbytes, stream, line, route), 0)

    def _take_missed(self, nbytes: Any, stream: object, line: Timeline, route: Route) -> Any:
        """`_take_slowly`; the timeline of a stream that has ended is looked up anew from now on."""
        if line.ended:
            route.latest.line = NOBODYS
        return self._take_slowly(nbytes, stream, route)

    def _take_slowly(self, nbytes: Any, stream: object, route: Route) -> Any:
        """Everything but a hit.  Nothing that fails here leaves memory behind, nor a reference in its error (S07).

        A finaliser that the collector runs inside our own locked section cannot be served from the pool that is being
        changed: it gets memory of its own from the runtime, as if there were no pool.
        """
        try:
            return self._take(check_request(nbytes), stream, route)
        except Reentered:
            return library.memory_without_a_pool(nbytes)

    def _take(self, nbytes: int, stream: object, route: Route) -> Any:
        if nbytes == 0:
            return nothing(route.ordinal)
        self.before_any()
        pool = route.pool
        line, given = target(pool.device, stream)
        failure: tuple[int, int, int, str] | None = None
        block: Block | None = None
        memory: Any = None
        try:
            block = pool.obtain(nbytes, line, given, True)
            memory = _hold(block, line, route)
        except OutOfMemoryError as error:
            failure = (round_up(nbytes), error.stats["reserved"], error.limit, str(error))
        except BaseException:
            if block is not None:
                route.put_down((block, block.generation, None))
            raise
        if failure is not None:
            raise _out_of_memory(*failure)
        return memory

    def _malloc_watched(self, nbytes: Any, stream: Any, route: Route) -> Any:
        """The same with CuPy's memory hooks told, in the order and with the arguments of its own pool.

        "Allocated from the GPU" is, as with that pool, what no array has had before; it is told after the fact.
        """
        nbytes = check_request(nbytes)
        rounded, device = round_up(nbytes), route.ordinal
        hooks = list(HOOKS.registered().values())
        for hook in hooks:
            hook.malloc_preprocess(device_id=device, size=nbytes, mem_size=rounded)
        memory: Any = None
        before = route.pool.new_memory_allocations
        try:
            memory = self._take_slowly(nbytes, stream, route)
        finally:
            new = route.pool.new_memory_allocations != before
            ptr, key = (memory.ptr, id(memory)) if memory is not None else (0, 0)
            if isinstance(memory, Memory) and memory.lease is not None:
                memory.lease.key = key
            if new or memory is None:
                for hook in hooks:
                    hook.alloc_preprocess(device_id=device, mem_size=rounded)
                for hook in hooks:
                    hook.alloc_postprocess(device_id=device, mem_size=rounded, mem_ptr=ptr)
            for hook in hooks:
                hook.malloc_postprocess(device_id=device, size=nbytes, mem_size=rounded, mem_ptr=ptr, pmem_id=key)
        return _POINTER(memory, 0)


def _hold(block: Block, line: Timeline, route: Route) -> Any:
    """The memory object that holds a block from now on; a device that watches is told."""
    announce = route.front.announce
    make: Any = _MEMORY if announce is None else WatchedMemory
    if COMPILED:
        lease = Lease()
        lease.kept = line.keeper
        memory = make(block.ptr, block.size, lease, route.ordinal)
    else:
        lease = memory = make(block.ptr, block.size, line.keeper, route.ordinal)
    lease.route = route
    lease._block = block
    lease._generation = block.generation
    if announce is not None:
        announce(block.ptr, block.size, memory)
    return memory


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

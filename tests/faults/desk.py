"""A pool with two streams, every public call as an operation on it, and what must hold whatever happened in between.

An operation is prepared on a fresh desk and returned as a function; the test then calls it, and does something to it.
`Desk.wrong` looks at what is left: no lock held, no scope open, nothing counted that is not there, and in the end not a
byte lost.  Next: test_interrupts.py, test_calls.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from allocator import AllocatorError, CachingAllocator, Config, Event, SimDevice, Stream
from allocator.caching import reaper
from allocator.devices.sim.world import WORLD, CaptureMode
from allocator.sizes import KIB, MIB
from allocator.sync import shield

Operation = Callable[[], object]
Prepare = Callable[["Desk"], Operation]
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "usual": {},
    "assumed": {"uses": "assumed", "seal_frees": 1},
    "malloc": {"backing": "malloc"},
    "canary": {"canary": True},
}


class Desk:
    """One device, one pool, two streams, an event; `kept` is what the program holds."""

    def __init__(self, **config: Any) -> None:
        self.gpu = SimDevice(memory=64 * MIB)
        self.pool = CachingAllocator(
            self.gpu, config=Config(**{"wait_timeout": 0.001, "collect_on_demand": False, **config})
        )
        self.a, self.b = Stream(self.gpu), Stream(self.gpu)
        self.event = Event(self.gpu)
        self.kept: dict[str, Any] = {}

    def get(self, name: str, stream: Stream, nbytes: int) -> None:
        """Memory that a kernel writes."""
        self.kept[name] = memory = self.pool.allocate(nbytes, stream=stream)
        self.gpu.launch(stream, writes=[memory])

    def drop(self, *names: str) -> None:
        """Give it back."""
        for name in names:
            if name in self.kept:
                self.kept.pop(name).close()

    def busy(self) -> None:
        """Something of everything: live, in flight on one and on two streams."""
        self.get("x", self.a, 2 * MIB)
        self.get("z", self.b, 3 * MIB)
        self.get("w", self.b, KIB)
        self.kept["x"].record_stream(self.b)
        self.drop("x", "z", "w")

    def wrong(self) -> list[str]:
        """What is wrong now, and when everything has been given back.  The end of the desk."""
        found = self._left()
        try:
            self.pool.check()
            found += self._end()
        except Exception as error:
            found.append(f"afterwards {type(error).__name__}: {str(error).splitlines()[0][:120]}")
        finally:
            reaper._leaving.clear()
        return found

    def _left(self) -> list[str]:
        """What an operation must not leave behind."""
        registry, found = self.pool._registry, []
        if WORLD.thread.stack or WORLD.thread.mode is not CaptureMode.GLOBAL:
            found.append("a scope was left open")
            WORLD.thread.stack.clear()
            WORLD.thread.mode = CaptureMode.GLOBAL
        for lock in (self.pool._lock, registry.lock):
            if lock.held_here():  # type: ignore[attr-defined]  # an OwnedLock
                found.append("a lock is held")
                lock.release()
        lines = registry.lines.values()
        if any(line.pins for line in lines) or any(s.users for line in lines for s in line.in_flight):
            found.append("a pin, or a use of an event, was not given back")
        if self.pool._growth.growing:
            found.append(f"{self.pool._growth.growing} bytes are on their way for ever")
        if shield.depth:
            found.append("Ctrl-C stays put off")
        return found

    def _end(self) -> list[str]:
        """Everything goes back: what is lost, or still counted."""
        gpu, pool, found = self.gpu, self.pool, []
        self.kept.clear()
        gc.collect()
        gpu.run_until_idle()
        if not pool.closed:
            pool.set_limit(0)
            self.get("again", self.b, KIB)
            self.drop("again")
            gpu.run_until_idle()
            pool.settle()
            stats = pool.stats()
            for name in ("allocated_bytes", "in_flight_bytes", "poisoned_streams", "pending_frees"):
                if getattr(stats, name):
                    found.append(f"{name} = {getattr(stats, name)} when all is over")
            if gpu.used_bytes != stats.reserved_bytes and pool.config.canary is False:
                found.append(f"the device holds {gpu.used_bytes} bytes, the pool {stats.reserved_bytes}")
            pool.trim()
            if pool.stats().reserved_bytes:
                found.append("not everything can be given back")
            pool.close()
        with CachingAllocator(gpu, config=Config()) as other:
            other.stats()
            other.stats()
        if gpu.used_bytes:
            found.append(f"{gpu.used_bytes} bytes leaked")
        return found + [f"race: {race}" for race in gpu.races[:1]] + [f"violation: {v}" for v in gpu.violations[:1]]


# -- operations -----------------------------------------------------------------------------------


def a_hit(d: Desk) -> Operation:
    """Memory of a size that the stream freed."""
    d.get("x", d.a, KIB)
    d.drop("x")
    return lambda: d.get("y", d.a, KIB)


def new_memory(d: Desk) -> Operation:
    """Growing, with a free neighbour."""
    d.get("x", d.a, MIB)
    d.drop("x")
    return lambda: d.get("y", d.a, 3 * MIB)


def a_split(d: Desk) -> Operation:
    """Part of an idle block."""
    d.get("x", d.a, 2 * MIB)
    d.drop("x")
    d.gpu.run_until_idle()
    d.pool.stats()
    return lambda: d.get("y", d.b, MIB)


def settled_memory(d: Desk) -> Operation:
    """Memory of another stream whose work is over."""
    d.get("x", d.a, 2 * MIB)
    d.drop("x")
    d.gpu.run_until_idle()
    return lambda: d.get("y", d.b, 2 * MIB)


def a_dependency(d: Desk) -> Operation:
    """A stream is made to wait for another's work."""
    d.pool.set_limit(4 * MIB)
    d.get("x", d.a, 4 * MIB)
    d.drop("x")
    return lambda: d.get("y", d.b, 4 * MIB)


def a_host_wait(d: Desk) -> Operation:
    """Two blocks of two streams are needed together."""
    d.pool.set_limit(4 * MIB)
    d.get("x", d.a, 2 * MIB)
    d.get("z", d.b, 2 * MIB)
    d.drop("x", "z")

    def operation() -> None:
        with suppress(AllocatorError):  # out of memory where pieces cannot be joined
            d.get("y", d.b, 4 * MIB)

    return operation


def a_release(d: Desk) -> Operation:
    """Idle memory of the other size class goes back first."""
    d.pool.set_limit(4 * MIB)
    d.get("x", d.a, KIB)
    d.drop("x")
    d.gpu.run_until_idle()
    return lambda: d.get("y", d.b, 4 * MIB)


def many_allocations(d: Desk) -> Operation:
    """Rounds over two streams."""

    def operation() -> None:
        for i in range(6):
            d.get("x", (d.a, d.b)[i % 2], 2 * MIB)
            d.drop("x")

    return operation


def a_free(d: Desk) -> Operation:
    """The usual one."""
    d.get("x", d.a, KIB)
    return lambda: d.kept["x"].close()


def a_free_on_a_stream(d: Desk) -> Operation:
    """One that names a stream."""
    d.get("x", d.a, 2 * MIB)
    d.b.wait_stream(d.a)
    return lambda: d.kept["x"].close(d.b)


def many_frees(d: Desk) -> Operation:
    """So many that the queue is drained."""
    for i in range(66):
        d.get(f"x{i}", d.a, KIB)
    memory = list(d.kept.values())

    def operation() -> None:
        for one in memory:
            one.close()

    return operation


def a_free_whose_bin_has_gone(d: Desk) -> Operation:
    """It finds another, and on the way others that nobody uses go."""
    d.get("x", d.a, KIB)
    d.get("z", d.b, 2 * KIB)
    d.drop("z")
    d.pool.snapshot()
    shelves = d.pool._shelves
    for _ in range(2):
        shelves._forget_unused()

    def operation() -> None:
        shelves._unused_at = 0
        d.drop("x")
        d.get("y", d.a, KIB)

    return operation


def a_free_by_a_bare_handle(d: Desk) -> Operation:
    """Sealed at once (R9)."""
    handle = d.a.handle
    d.kept["x"] = memory = d.pool.allocate(MIB, stream=handle)
    d.gpu.launch(handle, writes=[memory])
    return memory.close


def a_declared_use(d: Desk) -> Operation:
    """One more user."""
    d.get("x", d.a, 2 * MIB)
    d.b.wait_stream(d.a)
    return lambda: d.kept["x"].record_stream(d.b)


def statistics(d: Desk) -> Operation:
    """By stream."""
    d.busy()
    return lambda: d.pool.stats(per_stream=True)


def a_trim(d: Desk) -> Operation:
    """Everything is idle."""
    d.busy()
    d.gpu.run_until_idle()
    return d.pool.trim


def a_limit(d: Desk) -> Operation:
    """Below what is reserved."""
    d.busy()
    d.gpu.run_until_idle()
    return lambda: d.pool.set_limit(2 * MIB)


def settling(d: Desk) -> Operation:
    """Waits."""
    d.busy()
    return d.pool.settle


def a_snapshot(d: Desk) -> Operation:
    """All blocks."""
    d.busy()
    return d.pool.snapshot


def a_check(d: Desk) -> Operation:
    """All of it."""
    d.busy()
    return d.pool.check


def the_pools_end(d: Desk) -> Operation:
    """With memory that goes back at once, and memory in flight."""
    d.busy()
    d.gpu.advance(1500)
    return d.pool.close


def a_streams_end(d: Desk) -> Operation:
    """With work queued."""
    d.busy()
    return d.a.close


def a_new_stream(d: Desk) -> Operation:
    """Made."""
    return lambda: d.kept.update(s=Stream(d.gpu))


def a_record(d: Desk) -> Operation:
    """Of the program's event."""
    d.busy()
    return lambda: d.event.record(d.a)


def a_wait(d: Desk) -> Operation:
    """For the program's event."""
    d.busy()
    d.event.record(d.a)
    return lambda: d.event.wait(d.b)


def a_synchronisation(d: Desk) -> Operation:
    """Of a stream and of an event."""
    d.busy()
    d.event.record(d.b)

    def operation() -> None:
        d.a.synchronize()
        d.event.synchronize()

    return operation


def a_capture(d: Desk) -> Operation:
    """Reported by a hook, with memory of its own; the graph runs once and goes."""
    d.busy()
    captures = d.pool._registry.captures

    def operation() -> None:
        capture = captures.begin(d.a.line, d.a.handle)
        d.gpu.begin_capture(d.a, "relaxed")
        try:
            with suppress(AllocatorError):
                d.get("y", d.a, MIB)
            with suppress(AllocatorError):
                d.get("v", d.b, MIB)
            d.drop("y", "v")
        finally:
            graph = d.gpu.end_capture(d.a)
            token = captures.end(capture)
        graph.launch(d.a)
        del graph, token
        d.pool.stats()

    return operation


SHORT: Final[tuple[Prepare, ...]] = (
    a_hit,
    a_split,
    settled_memory,
    a_free,
    a_free_on_a_stream,
    a_free_whose_bin_has_gone,
    a_free_by_a_bare_handle,
    a_declared_use,
    a_new_stream,
    a_wait,
)
LONG: Final[tuple[Prepare, ...]] = (
    new_memory,
    a_dependency,
    a_host_wait,
    a_release,
    many_allocations,
    many_frees,
    statistics,
    a_trim,
    a_limit,
    settling,
    a_snapshot,
    a_check,
    the_pools_end,
    a_streams_end,
    a_record,
    a_synchronisation,
)
OPERATIONS: Final = (*SHORT, *LONG)

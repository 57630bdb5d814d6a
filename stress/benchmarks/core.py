"""The core's own door: `pool.allocate(nbytes, stream)`, against a floor and against pools that never cross.

On the simulator the race oracle is not told of the hand-outs: it is the simulator's, not the allocator's.
`per-stream` is what peers do that keep a cache a stream: the same pool code, one pool a stream, nothing crosses.  Its
pools have plain memory: a thousand of them would want more addresses than there are.

Next: floors.py; hooks.py (the same through CuPy).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from allocator import CachingAllocator, Config, Stream
from allocator.devices import Device
from allocator.stress.benchmarks.cases import Allocator, Settings
from allocator.stress.benchmarks.floors import Floor, FloorMemory, UnlockedFloorMemory


def open_pool(device: Device, config: Config | None = None) -> CachingAllocator:
    """A pool as the benchmarks want it: settings from the environment do not count."""
    pool = CachingAllocator(device, config or Config(), name="bench")
    pool.announce = None
    return pool


def told(pool: CachingAllocator) -> dict[str, Any]:
    """What a pool says about a case, for the notes: how its allocations were served, and what that took."""
    stats = pool.stats()
    return {
        "reuse": dict(stats.allocations),
        "event_records": stats.event_records,
        "event_queries": stats.event_queries,
        "growths": stats.growths,
        "peak_reserved_bytes": stats.peak_reserved_bytes,
    }


class PerStream:
    """A pool for each stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pools: dict[int, CachingAllocator] = {}
        """By the stream's `id`; whoever measures keeps it alive."""

    def allocate(self, nbytes: int, stream: Any) -> Any:
        """Memory that this stream alone will ever have."""
        pool = self._pools.get(id(stream))
        if pool is None:
            pool = self._pools[id(stream)] = open_pool(self._device, Config(backing="malloc"))
        return pool.allocate(nbytes, stream)

    def close(self) -> None:
        """Close all of them."""
        for pool in self._pools.values():
            pool.close()

    def notes(self) -> dict[str, Any]:
        """The most that all held together, as each knows its own."""
        return {"peak_reserved_bytes": sum(pool.stats().peak_reserved_bytes for pool in self._pools.values())}


class CoreDoor:
    """Streams are allocator.Stream, and an argument."""

    name = "core"
    reference = "floor"
    takes_stream = True

    def __init__(self, device: Device, settings: Settings) -> None:
        self._device = device
        self._settings = settings

    @contextmanager
    def streams(self, count: int) -> Iterator[Sequence[Any]]:
        """Non-blocking ones."""
        made = [Stream(self._device) for _ in range(count)]
        try:
            yield made
        finally:
            for stream in made:
                stream.close()

    @contextmanager
    def main(self) -> Iterator[Any]:
        """One like any other."""
        with self.streams(1) as (stream,):
            yield stream

    @contextmanager
    def allocators(self, *, several: bool = False, entering: bool = False) -> Iterator[list[Allocator]]:
        """Floors, pools, and with several streams the pools that never cross."""
        wants = self._settings.wants
        made: list[Allocator] = []
        if wants("floor"):
            made.append(Allocator("floor", Floor(FloorMemory).allocate, real=False))
        if wants("floor-unlocked") and not several:
            made.append(Allocator("floor-unlocked", Floor(UnlockedFloorMemory).allocate, real=False))
        closing: list[Callable[[], None]] = []
        try:
            if wants("weir"):
                made.append(self._pool("weir", Config(uses="declared"), closing))
            if wants("weir-assumed"):
                made.append(self._pool("weir-assumed", Config(uses="assumed"), closing))
            if wants("per-stream") and several:
                pools = PerStream(self._device)
                closing.append(pools.close)
                made.append(Allocator("per-stream", pools.allocate, notes=pools.notes))
            yield made
        finally:
            for close in closing:
                close()

    def _pool(self, name: str, config: Config, closing: list[Callable[[], None]]) -> Allocator:
        pool = open_pool(self._device, config)
        closing.append(pool.close)
        return Allocator(name, pool.allocate, notes=lambda: told(pool))

    def touch(self) -> Callable[[Any, Any], object]:
        """A kernel of a microsecond, which on the simulator is over when the call returns."""
        device = self._device
        if device.simulated:
            sim: Any = device

            def launch(stream: Any, memory: Any) -> None:
                sim.launch(stream.handle, 1000)
                sim.advance(1000)

            return launch

        def spin(stream: Any, memory: Any) -> None:
            with device.scope():
                queue_work(device, stream.handle, 1000)

        return spin


def queue_work(device: Device, handle: int, ns: int) -> None:
    """Keep a stream busy for so long.  Within the device's scope."""
    busy: Any = device
    if device.simulated:
        busy.launch(handle, ns)
    else:
        busy.spin(handle, ns)

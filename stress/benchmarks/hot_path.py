"""One allocation and its free, an exact size that the same stream freed a moment ago, against a floor.

The floor is the least that a caching allocator in Python can do and still work with threads and several streams:
a dict of stacks by stream and size, one lock around each change of it, an object with `__del__` that knows its
address and size.  `floor, free without the lock` relies on a list's `append` being atomic instead.
The device is the simulator, with its race oracle not told of the hand-outs: only the allocator is measured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.stress.benchmarks.timing import Timing, interleaved, lines

SIZE = 4096


class FloorMemory:
    """What the floor hands out."""

    __slots__ = ("key", "pool", "ptr", "size")

    def __init__(self, pool: Floor, key: tuple[object, int], ptr: int, size: int) -> None:
        self.pool = pool
        self.key = key
        self.ptr = ptr
        self.size = size

    def __del__(self) -> None:
        pool = self.pool
        with pool.lock:
            pool.stacks[self.key].append(self.ptr)


class UnlockedFloorMemory(FloorMemory):
    """The same, freeing without the lock."""

    __slots__ = ()

    def __del__(self) -> None:
        self.pool.stacks[self.key].append(self.ptr)


class Floor:
    """A dict of stacks, one lock."""

    def __init__(self, memory: type[FloorMemory]) -> None:
        self.stacks: dict[tuple[object, int], list[int]] = {}
        self.lock = threading.Lock()
        self._memory = memory
        self._next = 0

    def allocate(self, nbytes: int, stream: object) -> FloorMemory:
        """Memory for `stream`."""
        size = (nbytes + 511) & -512
        key = (stream, size)
        with self.lock:
            stack = self.stacks.get(key)
            if stack is None:
                stack = self.stacks[key] = []
            if stack:
                ptr = stack.pop()
            else:
                self._next += size
                ptr = self._next
        return self._memory(self, key, ptr, size)


def loop(allocate: Callable[[int, Any], object], stream: object) -> Callable[[int], None]:
    """A function that allocates and drops n times."""

    def run(n: int) -> None:
        for _ in range(n):
            allocate(SIZE, stream)

    return run


def measure(rounds: int = 41, operations: int = 20_000) -> dict[str, Timing]:
    """The timings, by contender."""
    gpu = SimDevice()
    pool = CachingAllocator(gpu, Config())
    pool.announce = None  # the oracle is the simulator's, not the allocator's
    assumed = CachingAllocator(gpu, Config(uses="assumed"))
    assumed.announce = None
    stream = Stream(gpu)
    return interleaved(
        {
            "floor": loop(Floor(FloorMemory).allocate, object()),
            "floor, free without the lock": loop(Floor(UnlockedFloorMemory).allocate, object()),
            "CachingAllocator": loop(pool.allocate, stream),
            "CachingAllocator, uses assumed": loop(assumed.allocate, stream),
        },
        "floor",
        operations=operations,
        rounds=rounds,
    )


def main() -> tuple[str, dict[str, Any]]:
    """Text for people, and the figures."""
    timings = measure()
    text = lines(f"alloc + free of {SIZE} bytes, one stream, steady", timings, "floor")
    return text, {name: vars(t) for name, t in timings.items()}

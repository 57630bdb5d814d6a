"""One allocation and its free, an exact size that the same stream freed a moment ago, against a floor.

What the floors are stands in floors.py.  The device is the simulator, with its race oracle not told of the hand-outs:
only the allocator is measured, and no driver call is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from allocator import Config, SimDevice, Stream
from allocator.stress.benchmarks.cases import Case, Contender, Stage
from allocator.stress.benchmarks.core import open_pool
from allocator.stress.benchmarks.floors import Floor, FloorMemory, UnlockedFloorMemory
from allocator.stress.benchmarks.loops import Run

SIZE: Final = 4096


def hot_path(stage: Stage) -> Iterator[Case]:
    """One case; nothing depends on anything."""
    gpu = SimDevice()
    stream = Stream(gpu)
    with open_pool(gpu, Config()) as pool, open_pool(gpu, Config(uses="assumed")) as assumed:
        yield Case(
            f"alloc + free of {SIZE} bytes, one stream, steady",
            [
                Contender("floor", loop(Floor(FloorMemory).allocate, object())),
                Contender("floor, free without the lock", loop(Floor(UnlockedFloorMemory).allocate, object())),
                Contender("CachingAllocator", loop(pool.allocate, stream)),
                Contender("CachingAllocator, uses assumed", loop(assumed.allocate, stream)),
            ],
            "floor",
        )


def loop(allocate: Any, stream: object) -> Run:
    """A function that allocates and drops n times."""

    def run(n: int) -> None:
        for _ in range(n):
            allocate(SIZE, stream)

    return run

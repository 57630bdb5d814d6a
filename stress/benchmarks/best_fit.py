"""A best-fit miss with split and merge, against what sortedcontainers alone takes for the same changes.

The bare contender keeps one `SortedList` of (size, address) and does only what the index cannot avoid: find the
smallest block that fits and take it out, put the rest in, take the rest out again, put the whole back.
`blocks` is the layer that does it here: `BestFit` and `Heap`, with byte totals, neighbours and shelves kept right.
`pool` is a whole `allocate` and free, from the argument checks to the race-free stamp, on the simulator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from sortedcontainers import SortedList

from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.blocks import IDLE, LARGE, BestFit, Heap, Segment
from allocator.stress.benchmarks.timing import Timing, interleaved, lines

COUNTS = (1_000, 100_000)
SMALLEST, LARGEST = 1024, 8192
"""Sizes of the free blocks, in units of 512 bytes."""


def bare(blocks: list[tuple[int, int]], sizes: list[int]) -> Callable[[int], None]:
    """The changes of one miss on a bare `SortedList`."""
    index = SortedList(blocks)

    def run(n: int) -> None:
        for i in range(n):
            size = sizes[i % len(sizes)]
            whole = index.pop(index.bisect_left((size, 0)))
            rest = (whole[0] - size, whole[1] + size)
            index.add(rest)
            index.remove(rest)
            index.add(whole)

    return run


def layer(blocks: list[tuple[int, int]], sizes: list[int]) -> Callable[[int], None]:
    """The same through `BestFit` and `Heap`."""
    heap, index = Heap(joined=True), BestFit()
    for size, ptr in blocks:
        block = heap.add(Segment(ptr, size, 1, LARGE))
        block.state = IDLE
        index.add(block)

    def run(n: int) -> None:
        for i in range(n):
            size = sizes[i % len(sizes)]
            block = index.find(size)
            assert block is not None
            index.remove(block)
            rest = heap.split(block, size)
            index.add(rest)
            index.remove(rest)
            index.add(heap.merge(block, rest))

    return run


def whole(count: int, sizes: list[int], rng: random.Random) -> Callable[[int], None]:
    """The same through a pool with that many free blocks, none of which touches another."""
    gpu = SimDevice(memory=1 << 42)
    pool = CachingAllocator(gpu, Config(large_page=1 << 30))
    pool.announce = None  # the oracle is the simulator's, not the allocator's
    stream = Stream(gpu)
    between, free = [], []
    for _ in range(count):
        free.append(pool.allocate(512 * rng.randrange(SMALLEST, LARGEST), stream))
        between.append(pool.allocate(600 * 512, stream))
    pool.allocate(1 << 20, Stream(gpu)).close()  # several streams share: large blocks go through the index
    free.clear()
    gpu.run_until_idle()
    while pool.stats().blocks["idle"] < count:
        pass  # each reading moves some blocks out of the bins

    def run(n: int, kept: object = between) -> None:
        for i in range(n):
            pool.allocate(sizes[i % len(sizes)], stream)

    return run


def measure(count: int, rounds: int = 15, operations: int = 4_000) -> dict[str, Timing]:
    """The timings at `count` free blocks, by contender."""
    rng = random.Random(count)
    blocks, at = [], 1 << 40
    for _ in range(count):
        size = 512 * rng.randrange(SMALLEST, LARGEST)
        blocks.append((size, at))
        at += size + (1 << 20)
    most = max(size for size, _ in blocks)
    sizes = [512 * rng.randrange(SMALLEST, most // 512 - 2) for _ in range(4_000)]
    taken = {size for size, _ in blocks}
    sizes = [size for size in sizes if size not in taken] or [512 * SMALLEST + 512]
    return interleaved(
        {
            "bare": bare(blocks, sizes),
            "blocks": layer(blocks, sizes),
            "pool": whole(count, sizes, rng),
        },
        "bare",
        operations=operations,
        rounds=rounds,
    )


def main() -> tuple[str, dict[str, Any]]:
    """Text for people, and the figures."""
    texts, figures = [], {}
    for count in COUNTS:
        timings = measure(count)
        texts.append(lines(f"best-fit miss with split and merge, {count:,} free blocks", timings, "bare"))
        figures[str(count)] = {name: vars(t) for name, t in timings.items()}
    return "\n".join(texts), figures

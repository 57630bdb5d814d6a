"""A best-fit miss with split and merge, against what sortedcontainers alone takes for the same changes.

    bare    one `SortedList` of (size, address), and only what the index cannot avoid: find the smallest block that fits
            and take it out, put the rest in, take the rest out again, put the whole back
    blocks  the layer that does it here: `BestFit` and `Heap`, with byte totals, neighbours and shelves kept right
    pool    a whole `allocate` and free, from the argument checks to the race-free stamp, on the simulator

Free blocks are even multiples of 512 bytes and requests odd ones, so that with ever so many blocks no request finds
its exact size.  Between two free blocks lies one in use: none touches another.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager

from sortedcontainers import SortedList

from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.blocks import IDLE, LARGE, BestFit, Heap, Segment
from allocator.stress.benchmarks.cases import Case, Contender, Stage
from allocator.stress.benchmarks.core import open_pool
from allocator.stress.benchmarks.loops import Run

COUNTS = (100, 1_000, 10_000, 100_000, 1_000_000)
SMALLEST, LARGEST = 1024, 8192
"""Sizes of the free blocks, in units of 512 bytes."""


def bare(blocks: list[tuple[int, int]], sizes: list[int]) -> Run:
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


def layer(blocks: list[tuple[int, int]], sizes: list[int]) -> Run:
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


@contextmanager
def fragmented(blocks: list[tuple[int, int]]) -> Iterator[tuple[CachingAllocator, Stream]]:
    """A pool with free blocks of these sizes, none of which touches another."""
    gpu = SimDevice(memory=1 << 42)
    with open_pool(gpu, Config(large_page=1 << 30)) as pool:
        stream = Stream(gpu)
        between, free = [], []
        gc.disable()  # the collector would walk what is being built again and again
        try:
            for size, _ in blocks:
                free.append(pool.allocate(size, stream))
                between.append(pool.allocate(600 * 512, stream))
        finally:
            gc.enable()
        pool.allocate(1 << 20, Stream(gpu)).close()  # several streams share: large blocks go through the index
        free.clear()
        gpu.run_until_idle()
        pool.trim(keep=1 << 62)  # nothing goes, but all finished blocks come out of the bins
        yield pool, stream
        between.clear()


def miss(pool: CachingAllocator, stream: Stream, sizes: list[int]) -> Run:
    """A whole allocation and its end."""

    def run(n: int) -> None:
        for i in range(n):
            pool.allocate(sizes[i % len(sizes)], stream)

    return run


def best_fit(stage: Stage) -> Iterator[Case]:
    """By the number of free blocks."""
    for count in stage.choose(COUNTS, COUNTS[:2]):
        blocks, sizes = draw(count)
        with fragmented(blocks) as (pool, stream):
            contenders = [
                Contender("bare", bare(blocks, sizes)),
                Contender("blocks", layer(blocks, sizes)),
                Contender("pool", miss(pool, stream, sizes)),
            ]
            yield Case(f"{count:,} free blocks", contenders, "bare", at=count, operations=200, warm=20)


def draw(count: int) -> tuple[list[tuple[int, int]], list[int]]:
    """(free blocks as (size, address), sizes to ask for)."""
    rng = random.Random(count)
    blocks, at = [], 1 << 40
    for _ in range(count):
        size = 1024 * rng.randrange(SMALLEST // 2, LARGEST // 2)
        blocks.append((size, at))
        at += size + (1 << 20)
    most = max(size for size, _ in blocks) // 1024
    sizes = [1024 * rng.randrange(SMALLEST // 2, most) - 512 for _ in range(4_000)]
    return blocks, sizes

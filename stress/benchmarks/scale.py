"""How cost grows with what a pool has to look after: blocks, streams, devices, bytes reserved.

    blocks    live and idle ones: host bytes for each; a hit, a miss, a statistics reading, a scrape, `check()`
    streams   each with a block of its own in flight: host bytes for each; a turn of one, a miss that finds nothing
    devices   a pool each: host bytes, and a hit on the last one
    reserved  GiB in use: segments, driver calls to get there, and what one more GiB takes

On the simulator, CPU time of the thread; host bytes as Python's allocator counts them.  What the simulator itself keeps
for a block, a stream or a page is in the host bytes, as it is made by the same calls: it makes them upper bounds.
Next: best_fit.py and many_streams.py, which compare with peers.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import prometheus_client

from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.metrics import register
from allocator.sizes import GIB, KIB, MIB

Figures = dict[str, float]
Row = tuple[str, Figures]
BLOCKS: Final = (1_000, 10_000, 100_000, 1_000_000)
STREAMS: Final = (1, 10, 100, 1_000, 10_000)
DEVICES: Final = (1, 2, 4, 8)
RESERVED: Final = (1, 16, 64, 256)
SIZE: Final = 4 * KIB


def cost(work: Callable[[], object], at_most: int = 20) -> float:
    """Microseconds of the thread's CPU time: the median of some turns, fewer where one takes long."""
    taken: list[float] = []
    while len(taken) < at_most and (len(taken) < 3 or sum(taken) < 1e6):
        begin = time.thread_time_ns()
        work()
        taken.append((time.thread_time_ns() - begin) / 1000)
    return statistics.median(taken)


@contextmanager
def counted(figures: Figures, name: str, number: int) -> Iterator[None]:
    """Host bytes that stay allocated for each of `number` things made inside."""
    gc.collect()
    gc.disable()  # the collector would walk what is being built again and again
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield
        figures[name] = (tracemalloc.get_traced_memory()[0] - before) / number
    finally:
        tracemalloc.stop()
        gc.enable()


def open_pool(memory: int = 1 << 42) -> tuple[SimDevice, CachingAllocator]:
    """A pool with the defaults, whose hits are not announced to the oracle."""
    gpu = SimDevice(memory=memory)
    pool = CachingAllocator(gpu, config=Config(), name="scale")
    pool.announce = None
    return gpu, pool


def thousand(pool: CachingAllocator, stream: Stream, nbytes: int) -> Callable[[], object]:
    """A thousand allocations and their ends: CPU time in milliseconds is then microseconds for one."""

    def work() -> None:
        for _ in range(1000):
            pool.allocate(nbytes, stream)

    return work


def blocks(number: int) -> Row:
    """Half of them live, half of them idle in between, so that nothing merges."""
    figures: Figures = {}
    gpu, pool = open_pool()
    stream = Stream(gpu)
    held: list[Any] = []
    with counted(figures, "host bytes a live block", number):
        held.extend(pool.allocate(SIZE, stream) for _ in range(number))
    with counted(figures, "host bytes more, idle", number // 2):
        del held[::2]
        gpu.run_until_idle()
        pool.trim(keep=1 << 62)  # nothing goes; all that is finished comes out of the bins
    figures["hit us"] = cost(thousand(pool, stream, SIZE)) / 1000
    sizes = iter(range(2 * SIZE, 1 << 30, 512))
    figures["miss us"] = cost(lambda: pool.allocate(next(sizes) % MIB, stream), 200)
    figures["stats() ms"] = cost(pool.stats) / 1000
    registry = prometheus_client.CollectorRegistry()
    register(pool, registry)
    figures["scrape ms"] = cost(lambda: prometheus_client.generate_latest(registry)) / 1000
    figures["check() ms"] = cost(pool.check, 3) / 1000
    held.clear()
    pool.close()
    return f"{number:,} blocks", figures


def streams(number: int) -> Row:
    """Each with a block of its own, idle at first; then all have freed it with work queued that still holds it."""
    figures: Figures = {}
    gpu, pool = open_pool()
    made: list[Stream] = []
    with counted(figures, "host bytes a stream", number):
        made.extend(Stream(gpu) for _ in range(number))
        held = [pool.allocate(SIZE, stream) for stream in made]
        held.clear()  # now each finds its own
    turn = [0]

    def one_turn() -> None:
        for _ in range(1000):
            turn[0] += 1
            pool.allocate(SIZE, made[turn[0] % number])

    figures["in turn us"] = cost(one_turn) / 1000
    for stream in made:
        gpu.hold(stream.handle)
        gpu.launch(stream, duration_ns=1000)
        pool.allocate(SIZE, stream).close()
    asker = Stream(gpu)
    sizes = iter(range(2 * MIB, 1 << 40, 2 * MIB))
    figures["miss, all waiting us"] = cost(lambda: pool.allocate(next(sizes), asker), 40)
    figures["stats() ms"] = cost(pool.stats) / 1000
    for stream in made:
        gpu.resume(stream.handle)
    gpu.run_until_idle()
    figures["all over, miss us"] = cost(lambda: pool.allocate(next(sizes), asker), 1)
    return f"{number:,} streams", figures


def devices(number: int) -> Row:
    """A pool on each."""
    figures: Figures = {}
    pools: list[CachingAllocator] = []
    with counted(figures, "host bytes a pool", number):
        pools.extend(open_pool(1 << 36)[1] for _ in range(number))
    stream = Stream(pools[-1].device)
    figures["hit us"] = cost(thousand(pools[-1], stream, SIZE)) / 1000
    for pool in pools:
        pool.close()
    return f"{number} device{'s' if number > 1 else ''}", figures


def reserved(gib: int) -> Row:
    """Filled with blocks of 32 MiB, and then one GiB more."""
    figures: Figures = {}
    gpu, pool = open_pool(512 * GIB)
    stream = Stream(gpu)
    held: list[Any] = []
    before = sum(gpu.calls.values())
    with counted(figures, "host KiB a GiB", gib << 10):
        held.extend(pool.allocate(32 * MIB, stream) for _ in range(gib * 32))
    figures["driver calls a GiB"] = (sum(gpu.calls.values()) - before) / gib
    figures["segments"] = len(pool.snapshot()["segments"])
    figures["one GiB more us"] = cost(lambda: held.append(pool.allocate(GIB, stream)), 3)
    figures["stats() ms"] = cost(pool.stats) / 1000
    held.clear()
    pool.close()
    return f"{gib} GiB", figures


def table(rows: list[Row]) -> str:
    """Lines of equal columns."""
    names = list(dict.fromkeys(name for _, figures in rows for name in figures))
    lines = [f"{'':18}" + "".join(f"{name:>24}" for name in names)]
    for title, figures in rows:
        lines.append(f"{title:18}" + "".join(f"{figures[name]:24,.4g}" for name in names))
    return "\n".join(lines)


def main(quick: bool = False) -> tuple[str, dict[str, Figures]]:
    """(text, figures by what was made)."""
    found: dict[str, Figures] = {}
    texts = []
    measures: tuple[tuple[Callable[[int], Row], tuple[int, ...], tuple[int, ...]], ...] = (
        (blocks, BLOCKS, (100, 1_000)),
        (streams, STREAMS, (1, 10)),
        (devices, DEVICES, (1, 2)),
        (reserved, RESERVED, (1, 2)),
    )
    for measure, numbers, few in measures:
        rows = [measure(number) for number in (few if quick else numbers)]
        found.update(rows)
        texts.append(table(rows))
    return "\n\n".join(texts), found

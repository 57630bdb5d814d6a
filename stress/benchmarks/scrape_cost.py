"""What one scrape costs: 100,000 blocks and 200 streams, in the states that cost most, by stream or not.

A scrape is a reading of the pool, the families made of it, and the text written out: what `/metrics` does.  `first` is
the first one after the pool got into that state, with whatever has piled up; `then` is the median of those after it.
CPU time of the thread.  The device is the simulator: the queries of a reading cost several times what a driver takes.

    live        all blocks held by the program
    idle        every second block idle, so that nothing merges
    in flight   all freed, each used by another stream as well; nothing finishes
    queued      all dropped by finalisers, and nobody has looked since
    finished    all freed by their own streams, which have finished: they lie in bins
    drained     all freed while other streams used them, and all of it finishes at once
    ended       all live, of 20,000 streams that have come and gone
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import prometheus_client

from allocator import Allocation, CachingAllocator, Config, SimDevice, Stream
from allocator.metrics import register

BLOCKS = 100_000
STREAMS = 200
GONE = 20_000
SIZE = 4096
SCRAPES = 12


class Scene:
    """A pool with so many blocks, and a registry that shows it."""

    def __init__(self, blocks: int, per_stream: bool) -> None:
        self.gpu = SimDevice(memory=1 << 40)
        self.pool = CachingAllocator(self.gpu, Config(seal_frees=1 << 30, seal_bytes=1 << 62), name="bench")
        self.streams = [Stream(self.gpu, name=f"stream {n}") for n in range(STREAMS)]
        self.registry = prometheus_client.CollectorRegistry()
        register(self.pool, self.registry, per_stream=per_stream)
        self.held: list[Allocation | None] = [
            self.pool.allocate(SIZE, self.streams[n % STREAMS]) for n in range(blocks)
        ]

    def hold(self) -> None:
        """Every stream stands still, with work queued."""
        for stream in self.streams:
            self.gpu.hold(stream.handle)
            self.gpu.launch(stream, duration_ns=1000)

    def share(self) -> None:
        """Another stream uses each block as well."""
        for n, allocation in enumerate(self.held):
            assert allocation is not None
            allocation.record_stream(self.streams[(n + 1) % STREAMS])

    def drop(self, every: int = 1) -> None:
        """As finalisers do: the frees are queued."""
        for n in range(0, len(self.held), every):
            self.held[n] = None

    def see_to(self) -> None:
        """An allocation, which puts down all that is queued."""
        self.pool.allocate(SIZE, self.streams[0]).close()

    def close(self) -> None:
        """Give everything back here, and not in the next scene's first scrape."""
        for stream in self.streams:
            self.gpu.resume(stream.handle)
        self.gpu.run_until_idle()
        self.held.clear()
        self.pool.close()

    def scrape(self) -> tuple[float, int]:
        """(milliseconds, series)."""
        time.sleep(0.05)  # so that no scrape waits for its turn; not measured
        began = time.thread_time_ns()
        text = prometheus_client.generate_latest(self.registry)
        spent = (time.thread_time_ns() - began) / 1e6
        assert b"weir_reserved_bytes{" in text, "the pool could not be read"
        return spent, sum(not line.startswith(b"#") for line in text.splitlines())


def live(scene: Scene) -> None:
    """Nothing to do."""


def idle(scene: Scene) -> None:
    """Put down, flushed and merged as far as it goes."""
    scene.drop(every=2)
    scene.pool.snapshot()


def in_flight(scene: Scene) -> None:
    """On the shelves of blocks in flight."""
    scene.hold()
    scene.share()
    scene.drop()
    scene.see_to()


def queued(scene: Scene) -> None:
    """In the queue."""
    scene.share()
    scene.drop()


def finished(scene: Scene) -> None:
    """In the bins."""
    scene.drop()
    scene.see_to()


def drained(scene: Scene) -> None:
    """On the shelves, and then over."""
    in_flight(scene)
    scene.scrape()
    for stream in scene.streams:
        scene.gpu.resume(stream.handle)
    scene.gpu.run_until_idle()


def ended(scene: Scene) -> None:
    """Of streams that are gone."""
    for n in range(GONE):
        stream = Stream(scene.gpu, name=f"request {n}")
        scene.held.append(scene.pool.allocate(SIZE << n % 4, stream))
        if n % 2:
            scene.held.pop()
        stream.close()


SCENES: dict[str, Callable[[Scene], None]] = {
    "live": live,
    "idle": idle,
    "in flight": in_flight,
    "queued": queued,
    "finished": finished,
    "drained": drained,
    "ended": ended,
}


def main(blocks: int = BLOCKS) -> tuple[str, dict[str, Any]]:
    """Text for people, and the figures."""
    text = [
        f"one scrape of a pool with {blocks:,} blocks and {STREAMS} streams, CPU ms",
        f"  {'state':12} {'by stream':>9} {'first':>8} {'then':>8} {'worst':>8} {'series':>7}",
    ]
    figures: dict[str, Any] = {}
    for name, prepare in SCENES.items():
        for per_stream in (False, True):
            scene = Scene(blocks, per_stream)
            prepare(scene)
            gc.collect()  # what the scene before left, and building this one, is nobody's scrape
            first, series = scene.scrape()
            rest = [scene.scrape()[0] for _ in range(SCRAPES)]
            row = {"first_ms": first, "then_ms": statistics.median(rest), "worst_ms": max(rest), "series": series}
            figures[f"{name}{', by stream' if per_stream else ''}"] = row
            scene.close()
            text.append(
                f"  {name:12} {'yes' if per_stream else 'no':>9} {first:8.1f} {row['then_ms']:8.1f} "
                f"{row['worst_ms']:8.1f} {series:7}"
            )
    return "\n".join(text), figures

"""Every CuPy array gets a tag by kernel, and is verified by kernel on its own stream before it is dropped.

16 streams, mixed sizes, reads on other streams declared and undeclared, frees from other threads.  The control
switches the gating off, and sees corruption.  `CUPY_CANARY` sets the number of allocations (1,000,000 in the results).
"""

from __future__ import annotations

import os
import queue
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from cupy_bench import CuPyBench, cupy, weir
from rig import Rig

from allocator.events import EMPTY
from allocator.streams.order import Order

KIB, MIB = 1 << 10, 1 << 20
SIZES = (512, 4 * KIB, 24 * KIB, 200 * KIB, 300 * KIB, MIB, 3 * MIB)
LATE = 0.25  # how often a stream is kept from its work for a millisecond: else the device would never be behind
ALLOCATIONS = int(os.environ.get("CUPY_CANARY", "40000"))


@pytest.fixture
def bench(rig: Rig) -> Iterator[CuPyBench]:
    bench = CuPyBench(rig)
    yield bench
    bench.close()


class Counter:
    """A word on the device that counts what kernels find wrong."""

    def __init__(self) -> None:
        self.memory = cupy.cuda.Memory(512)  # the driver's own: not judged
        cupy.cuda.runtime.memset(self.memory.ptr, 0, 512)

    @property
    def ptr(self) -> int:
        return int(self.memory.ptr)


def bury(dying: queue.SimpleQueue[Any]) -> None:
    """Drop what comes out of the queue, until None does; in a thread of its own."""
    while dying.get() is not None:  # `==` would be a kernel
        pass


def run(bench: CuPyBench, allocations: int, *, seed: int, streams: int = 16, tag_base: int = 0) -> int:
    """The workload of one thread; words found wrong."""
    draw = random.Random(seed)
    ours = [cupy.cuda.Stream(non_blocking=bool(i % 3)) for i in range(streams)]
    counter = Counter()
    kernels = bench.kernels
    live: list[tuple[Any, Any, int]] = []
    dying: queue.SimpleQueue[Any] = queue.SimpleQueue()
    reaper = threading.Thread(target=bury, args=(dying,))
    reaper.start()
    try:
        for i in range(1, allocations + 1):
            tag = tag_base + i
            stream = ours[draw.randrange(streams)]
            with stream:
                array = cupy.ndarray((SIZES[draw.randrange(len(SIZES))],), dtype=cupy.uint8)
            if draw.random() < LATE:
                bench.gpu.spin(ours[draw.randrange(streams)].ptr, 1_000_000)
            kernels.fill(stream.ptr, array.data.ptr, array.size // 4, tag)
            live.append((array, stream, tag))
            del array
            if len(live) > 96:
                at = draw.randrange(len(live))
                live[at], live[-1] = live[-1], live[at]
                old, owner, its = live.pop()
                chance = draw.random()
                reader = owner
                if chance < 0.2:  # read elsewhere, and the owner waits for it, as CuPy's own pool demands
                    reader = ours[draw.randrange(streams)]
                    reader.wait_event(owner.record())
                kernels.verify(reader.ptr, old.data.ptr, old.size // 4, its, counter.ptr)
                if chance < 0.1:
                    weir.record_stream(old, reader)
                elif reader is not owner:
                    owner.wait_event(reader.record())
                if chance > 0.9:
                    dying.put(old)  # freed by another thread
                del old
        for old, owner, its in live:
            kernels.verify(owner.ptr, old.data.ptr, old.size // 4, its, counter.ptr)
        live.clear()
        del old, owner
        for stream in ours:
            stream.synchronize()
        return int(kernels.read_word(ours[0].ptr, counter.ptr))
    finally:
        dying.put(None)
        reaper.join()
        live.clear()


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"context_events": False}, {"limit": 256 * MIB}], ids=str)
def test_no_array_is_ever_written_by_two_at_once(bench: CuPyBench, config: dict[str, Any]) -> None:
    pool = bench.install(**config)
    allocations = ALLOCATIONS if not config else ALLOCATIONS // 10
    assert run(bench, allocations, seed=1) == 0
    stats = pool.stats()
    assert sum(stats.allocations.values()) == allocations
    assert stats.allocations["opportunistic"] + stats.allocations["event_dependency"] > 0, (
        "memory never crossed streams"
    )
    pool.check()


@pytest.mark.slow
def test_threads_with_streams_of_their_own_do_not_disturb_each_other(bench: CuPyBench) -> None:
    pool = bench.install()
    results: list[int] = []
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            cupy.cuda.Device(0).use()
            results.append(run(bench, ALLOCATIONS // 20, seed=seed, streams=4, tag_base=seed * 10_000_000))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and results == [0] * 4
    pool.check()


def test_control_without_gating_the_canary_sees_corruption(rig: Rig) -> None:
    bench = CuPyBench(rig)
    bench.install()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Order, "done", lambda *_, **__: True)
            patch.setattr(Order, "known", lambda *_, **__: True)
            patch.setattr(Order, "unfinished", lambda *_, **__: EMPTY)
            busy = [cupy.cuda.Stream(non_blocking=True) for _ in range(8)]
            for stream in busy:
                bench.gpu.spin(stream.ptr, 20_000_000)
            wrong = 0
            for seed in range(20):
                wrong += run(bench, 2_000, seed=seed)
                if wrong:
                    break
        assert wrong > 0
    finally:
        cupy.cuda.Device(0).synchronize()
        weir.uninstall()

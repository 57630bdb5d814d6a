"""The cases that RMM publishes for its own resources, as programs of sizes: anybody's pool can run them.

    rmm-random  1,000, 10,000, 100,000 allocations of random sizes, dropped in random order, at most 4 GiB live
    rmm-holes   take and drop beside so many free holes that are too small

The sizes are drawn once, before anything is timed, so that all play the same program.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

from allocator.sizes import GIB, KIB, MIB
from allocator.stress.benchmarks.cases import Allocator, Case, Stage
from allocator.stress.benchmarks.loops import Run, each_size, script, taker
from allocator.stress.benchmarks.steady import one_stream

MOST_LIVE: Final = 4 * GIB
LARGEST: Final = 4 * MIB
HOLE: Final = 4 * KIB


def program(allocations: int, seed: int = 1) -> tuple[list[tuple[int, int]], int]:
    """(steps for `script`, slots): as likely a drop as a take, and a drop wherever the next would be too much."""
    draw = random.Random(seed)
    steps: list[tuple[int, int]] = []
    live: list[tuple[int, int]] = []
    free: list[int] = []
    total = taken = slots = 0
    while taken < allocations:
        size = draw.randint(1, LARGEST)
        if live and (draw.random() < 0.5 or total + size > MOST_LIVE):
            at = draw.randrange(len(live))
            live[at], live[-1] = live[-1], live[at]
            slot, nbytes = live.pop()
            total -= nbytes
            free.append(slot)
            steps.append((slot, 0))
        elif total + size <= MOST_LIVE:
            if free:
                slot = free.pop()
            else:
                slot, slots = slots, slots + 1
            live.append((slot, size))
            total += size
            taken += 1
            steps.append((slot, size))
    return steps, slots


def random_allocations(stage: Stage) -> Iterator[Case]:
    """By their number."""
    for count in stage.choose((1_000, 10_000, 100_000), (100,)):
        steps, slots = program(count)

        def loop(allocator: Allocator, stream: Any, steps: list[tuple[int, int]] = steps, slots: int = slots) -> Run:
            return script(taker(allocator, stream), steps, slots)

        repeats = 3 if count > 10_000 else 1 << 30
        yield from one_stream(stage, f"{count:,} random", loop, at=count, once=count, most_repeats=repeats)


def holes(stage: Stage) -> Iterator[Case]:
    """By the number of holes."""
    draw = random.Random(2)
    sizes = [draw.randrange(2 * HOLE, 16 * HOLE) for _ in range(997)]
    for count in stage.choose((10, 1_000, 100_000), (10,)):

        def loop(allocator: Allocator, stream: Any, count: int = count) -> Run:
            take = taker(allocator, stream)
            with allocator.around():
                whole = take(2 * count * HOLE)  # so that pools which never divide what they got have holes as well
                del whole
                pieces = [take(HOLE) for _ in range(2 * count)]
                del pieces[::2]
            return holding(pieces, each_size(take, sizes))

        yield from one_stream(stage, f"{count:,} holes", loop, at=count)


def holding(kept: object, run: Run) -> Run:
    """The same loop, which keeps something alive as long as it lives itself."""

    def both(n: int, kept: object = kept) -> float | None:
        return run(n)

    return both

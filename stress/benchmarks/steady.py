"""One stream: one size at a time, 64 live, random sizes, and arrays.

steady  take and drop one size, 512 B to 1 GiB: the hot path of every pool
live    64 blocks of 16 sizes are held, the oldest is dropped and another one taken
random  the same with sizes that hardly repeat: best fit, split and merge on each
arrays  `cupy.empty` and its end: what a program sees of all this
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from allocator.sizes import GIB, KIB, MIB, format_size
from allocator.stress.benchmarks.cases import Allocator, Case, Stage
from allocator.stress.benchmarks.loops import Run, each_size, same_size, taker, window

SIZES: Final = (512, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB, GIB)
LIVE: Final = 64


def steady(stage: Stage) -> Iterator[Case]:
    """By size."""
    for size in stage.choose(SIZES, (4 * KIB, MIB)):

        def loop(allocator: Allocator, stream: Any, size: int = size) -> Run:
            return same_size(allocator, size, stream)

        yield from one_stream(stage, short(size), loop, at=size, who=lambda one: True)


def live(stage: Stage) -> Iterator[Case]:
    """64 at once."""
    sizes = [(1 + k) * 8 * KIB for k in range(16)]

    def loop(allocator: Allocator, stream: Any) -> Run:
        return window(taker(allocator, stream), LIVE, sizes)

    yield from one_stream(stage, f"{LIVE} live, 16 sizes", loop)


def random_sizes(stage: Stage) -> Iterator[Case]:
    """Sizes spread evenly over their logarithm."""
    for most in stage.choose((MIB, 16 * MIB), (MIB,)):
        draw = random.Random(most)
        sizes = [round(512 * (most / 512) ** draw.random()) for _ in range(4096)]

        def loop(allocator: Allocator, stream: Any, sizes: list[int] = sizes) -> Run:
            return window(taker(allocator, stream), LIVE, sizes)

        def single(allocator: Allocator, stream: Any, sizes: list[int] = sizes) -> Run:
            return each_size(taker(allocator, stream), sizes)

        yield from one_stream(stage, f"up to {short(most)}, {LIVE} live", loop)
        yield from one_stream(stage, f"up to {short(most)}, one live", single)


def arrays(stage: Stage) -> Iterator[Case]:
    """Whole arrays.  Hooks of CuPy only."""
    from allocator.stress.benchmarks.hooks import import_cupy

    empty, kind = import_cupy().empty, import_cupy().float32
    for size in stage.choose((4 * KIB, MIB, 64 * MIB), (4 * KIB,)):

        def loop(allocator: Allocator, stream: Any, items: int = size // 4) -> Run:
            def run(n: int) -> None:
                for _ in range(n):
                    empty(items, kind)

            return run

        yield from one_stream(hooks_of_cupy(stage), short(size), loop, at=size, who=lambda one: not one.apart)


def one_stream(
    stage: Stage,
    title: str,
    loop: Callable[[Allocator, Any], Run],
    *,
    at: float | None = None,
    who: Callable[[Allocator], bool] = lambda allocator: allocator.pair is None,
    once: int = 0,
    most_repeats: int = 1 << 30,
) -> Iterator[Case]:
    """The case through each door.  loop: makes the loop, given the stream where the door takes one.

    who: who takes part.  once: the loop is a whole, of so many operations, and is not repeated within a turn.
    """
    for door in stage.doors:
        with door.main() as stream, door.allocators() as found:
            given = stream if door.takes_stream else None
            contenders = [one.contender(loop(one, given)) for one in found if who(one)]
            case = Case(title, contenders, door.reference, door.name, at=at, most_repeats=most_repeats)
            if once:
                case.operations, case.fixed, case.batches = once, True, 1
            yield case
            contenders.clear()  # what a loop kept alive goes before its pool
            case.contenders = ()


def hooks_of_cupy(stage: Stage) -> Stage:
    """The same stage with those doors only behind which an array of CuPy's can come from."""
    return replace(stage, doors=[door for door in stage.doors if not door.takes_stream])


def short(size: int) -> str:
    """ "4 KiB" for 4096."""
    return format_size(size).replace(".00", "")

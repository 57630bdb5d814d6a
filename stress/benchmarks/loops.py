"""The loops that are timed.  Each returns a function that does so many operations; an operation is take and drop.

Rule: nothing in a loop but what it measures; what both sides of a ratio share makes the ratio say less.
What a loop allocates is dropped before it returns, so that turns leave nothing behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import chain, cycle, islice, repeat
from typing import Any

from allocator.stress.benchmarks.cases import Allocator

Run = Callable[[int], float | None]


def same_size(allocator: Allocator, size: int, stream: Any | None) -> Run:
    """One size, taken and dropped.  stream: where the door takes it as an argument."""
    call = allocator.call
    if allocator.pair is not None:
        return _pairs(*allocator.pair, size)
    if stream is None:

        def run(n: int) -> None:
            for _ in repeat(None, n):
                call(size)

        return run

    def run_on(n: int) -> None:
        for _ in repeat(None, n):
            call(size, stream)

    return run_on


def _pairs(take: Callable[[int], int], give: Callable[[int], object], size: int) -> Run:
    def run(n: int) -> None:
        for _ in repeat(None, n):
            give(take(size))

    return run


def taker(allocator: Allocator, stream: Any | None) -> Callable[[int], Any]:
    """A function of the size alone."""
    call = allocator.call
    if stream is None:
        return call

    def take(nbytes: int) -> Any:
        return call(nbytes, stream)

    return take


def window(take: Callable[[int], Any], live: int, sizes: Sequence[int]) -> Run:
    """`live` blocks are held, and each operation drops the oldest and takes another."""

    def run(n: int) -> None:
        held: list[Any] = [take(size) for size in islice(cycle(sizes), live)]
        at = 0
        for size in islice(cycle(sizes), n):
            held[at] = None
            held[at] = take(size)
            at += 1
            if at == live:
                at = 0

    return run


def each_size(take: Callable[[int], Any], sizes: Sequence[int]) -> Run:
    """One block at a time, each of the next size."""

    def run(n: int) -> None:
        for size in islice(cycle(sizes), n):
            take(size)

    return run


def script(take: Callable[[int], Any], steps: Sequence[tuple[int, int]], slots: int) -> Run:
    """Steps (slot, bytes): take, or drop where bytes is 0.  The whole script is one turn, whatever is asked for."""

    def run(n: int) -> None:
        held: list[Any] = [None] * slots
        for slot, nbytes in steps:
            held[slot] = take(nbytes) if nbytes else None

    return run


# -- several streams --------------------------------------------------------------------------------------------


def own_blocks(allocator: Allocator, size: int, streams: Sequence[Any], takes_stream: bool) -> None:
    """Every stream gets a block of its own and drops it once all have one: from then on each finds its own."""
    held = []
    for stream in streams:
        if takes_stream:
            held.append(allocator.call(size, stream))
        else:
            with stream:
                held.append(allocator.call(size))


def around_streams(allocator: Allocator, size: int, streams: Sequence[Any], takes_stream: bool, burst: int = 1) -> Run:
    """Stream after stream, `burst` operations on each."""
    call = allocator.call
    turns = list(chain.from_iterable(repeat(stream, burst if takes_stream else 1) for stream in streams))
    if takes_stream:

        def run(n: int) -> None:
            for stream in islice(cycle(turns), n):
                call(size, stream)

        return run
    if burst == 1:

        def run_entering(n: int) -> None:
            for stream in islice(cycle(turns), n):
                with stream:
                    call(size)

        return run_entering

    def run_bursts(n: int) -> None:
        for stream in islice(cycle(turns), max(1, n // burst)):
            with stream:
                for _ in repeat(None, burst):
                    call(size)

    return run_bursts


def working_streams(
    allocator: Allocator,
    size: int,
    streams: Sequence[Any],
    takes_stream: bool,
    touch: Callable[[Any, Any], object],
) -> Run:
    """Stream after stream: take, queue a little work, drop."""
    call = allocator.call

    def run(n: int) -> None:
        for stream in islice(cycle(streams), n):
            if takes_stream:
                touch(stream, call(size, stream))
            else:
                with stream:
                    touch(stream, call(size))

    return run


# -- threads ----------------------------------------------------------------------------------------------------


def threads(work: Sequence[Callable[[int], object]]) -> Run:
    """One thread each, begun together.  The value is ns of wall time an operation, of all threads together."""

    def run(n: int) -> float:
        share = max(1, n // len(work))
        gate = threading.Barrier(len(work))
        times: list[tuple[int, int]] = []
        errors: list[BaseException] = []

        def body(one: Callable[[int], object]) -> None:
            try:
                gate.wait()
                began = time.perf_counter_ns()
                one(share)
                times.append((began, time.perf_counter_ns()))
            except BaseException as error:
                gate.abort()
                errors.append(error)

        running = [threading.Thread(target=body, args=(one,)) for one in work]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return (max(end for _, end in times) - min(began for began, _ in times)) / (share * len(work))

    return run

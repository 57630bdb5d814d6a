"""Threads, each with its own stream and its own block: 1 to 16 of them on one pool.

The figure is wall time for an operation of all threads together: 1000 / figure are million operations a second.  With
a global interpreter lock more threads are never faster; what shows is what they cost each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from allocator.stress.benchmarks.cases import Allocator, Case, Stage
from allocator.stress.benchmarks.loops import own_blocks, same_size, threads
from allocator.stress.benchmarks.many_streams import PERIOD, SIZE


def on_threads(stage: Stage) -> Iterator[Case]:
    """By the number of threads."""
    for count in stage.choose((1, 2, 4, 8, 16), (1, 2)):
        for door in stage.doors:
            with door.streams(count) as made, door.allocators(several=True, entering=not door.takes_stream) as found:
                contenders = []
                for allocator in found:
                    with allocator.around():
                        own_blocks(allocator, SIZE, made, door.takes_stream)
                    work = [worker(stage, allocator, stream, door.takes_stream) for stream in made]
                    contenders.append(allocator.contender(threads(work)))
                title = f"{count} thread{'s' if count > 1 else ''}"
                yield Case(
                    title, contenders, door.reference, door.name,
                    at=count, operations=500, least=PERIOD, wall=True, warm=200,
                )  # fmt: skip


def worker(stage: Stage, allocator: Allocator, stream: Any, takes_stream: bool) -> Callable[[int], object]:
    """What one thread does; the stream is current in it where the door takes none."""
    loop = same_size(allocator, SIZE, stream if takes_stream else None)
    entered = stream if not takes_stream else nullcontext()

    def body(n: int) -> None:
        with entered:
            loop(n)

    return body

"""The workloads: endless programs of operations, each with a seed.

Rule: *the same seed and shape give the same operations*, on every machine; nothing here looks at a pool, a clock or
another thread.  A workload keeps the contract (contract.py), so whatever goes wrong is the pool's fault.

Each of a run's workers has a generator of its own.  It keeps about half of its share of the memory live, but for
`near-limit`, which wants more than there is.  All of them look around at times: statistics, a scrape, a check, trim.

Longer than other modules by being a list: one workload after the other, each a page at most.
Next: player.py (who runs them).
"""

from __future__ import annotations

import importlib.resources
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from random import Random
from typing import Final

from allocator.sizes import KIB, MIB
from allocator.stress.operations import LEGACY, OWN, PRIVATE, Op
from allocator.traces import read_trace

US: Final = 1_000


@dataclass(frozen=True)
class Shape:
    """What a generator may count on.

    streams: shared ones.  worker, workers: which of how many.  share: bytes of the limit that are this worker's.
    """

    streams: int
    worker: int
    workers: int
    share: int

    def __post_init__(self) -> None:
        if self.streams < 1 or not 0 <= self.worker < self.workers or self.share < MIB:
            raise ValueError("a shape needs a stream, a worker among the workers, and a share of 1 MiB at least")


Generator = Callable[[Random, Shape], Iterator[Op]]


@dataclass(frozen=True)
class Workload:
    """A named kind of program.  about: one line for people."""

    name: str
    about: str
    generate: Generator

    def operations(self, seed: str, shape: Shape) -> Iterator[Op]:
        """Operations without end, the same for the same seed and shape."""
        r = Random(f"{self.name}/{seed}/{shape.worker}")
        return _looking_around(r, self.generate(r, shape), shape)


def _looking_around(r: Random, ops: Iterator[Op], shape: Shape) -> Iterator[Op]:
    """What an operator does meanwhile: rarely, and more rarely with more workers."""
    looks = [
        *[Op("stats")] * 8,
        Op("scrape"),
        *[Op("trim", n) for n in (0, shape.share)],
        Op("check"),
        Op("settle"),
    ]
    seldom = 150 * shape.workers
    left = r.randrange(1, seldom)
    for op in ops:
        yield op
        left -= 1
        if not left:
            yield r.choice(looks)
            left = r.randrange(1, 2 * seldom)


class _Live:
    """The blocks of one worker, within a bound of bytes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0
        self._numbers = count(1)
        self._blocks: deque[tuple[int, int]] = deque()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, nbytes: int) -> int:
        """A number for a new block."""
        number = next(self._numbers)
        self._blocks.append((number, nbytes))
        self.bytes += nbytes
        return number

    def oldest(self) -> int:
        """Taken out."""
        number, nbytes = self._blocks.popleft()
        self.bytes -= nbytes
        return number

    def any(self, r: Random) -> int:
        """One of them, taken out."""
        self._blocks.rotate(r.randrange(len(self._blocks)))
        return self.oldest()

    @property
    def full(self) -> bool:
        return self.bytes > self.most


def _two_streams(r: Random, shape: Shape) -> tuple[int, int]:
    """Two different ones, where there are two."""
    first = r.randrange(shape.streams)
    second = (first + r.randrange(1, shape.streams)) % shape.streams if shape.streams > 1 else LEGACY
    return first, second


def _sizes(r: Random, shape: Shape, n: int = 8) -> list[int]:
    """A few sizes that a program would use again and again, from 1 byte to a 32nd of the share."""
    top = shape.share // 32
    return [max(1, int(top ** r.random())) for _ in range(n - 1)] + [top]


def steady(r: Random, shape: Shape) -> Iterator[Op]:
    sizes = _sizes(r, shape)
    live = _Live(shape.share // 2)
    while True:
        stream = r.randrange(shape.streams)
        nbytes = r.choice(sizes)
        block = live.add(nbytes)
        yield Op("alloc", block, stream, nbytes)
        yield Op("use", block, OWN, r.randrange(1, 20) * US)
        while live.full or len(live) > 48:
            yield Op("free", live.oldest())
        if r.random() < 0.3:
            yield Op("pass", r.randrange(1, 10) * US)


def bursty(r: Random, shape: Shape) -> Iterator[Op]:
    live = _Live(shape.share // 2)
    while True:
        stream = r.randrange(shape.streams)
        top = shape.share // 64
        for _ in range(r.randrange(10, 60)):
            nbytes = r.randrange(1, top)
            if live.full:
                break
            block = live.add(nbytes)
            yield Op("alloc", block, stream, nbytes)
            yield Op("use", block, OWN, r.randrange(1, 50) * US)
        if r.random() < 0.5:
            yield Op("pass", r.randrange(1, 500) * US)
        for _ in range(r.randrange(len(live) + 1) if r.random() < 0.3 else len(live)):
            yield Op("free", live.any(r))


def pipeline(r: Random, shape: Shape) -> Iterator[Op]:
    live = _Live(shape.share // 2)
    sizes = _sizes(r, shape)
    for event in map(lambda n: n % 16, count()):
        producer, consumer = _two_streams(r, shape)
        nbytes = r.choice(sizes)
        block = live.add(nbytes)
        yield Op("alloc", block, producer, nbytes)
        yield Op("use", block, OWN, r.randrange(1, 30) * US)
        yield Op("record", event, producer)
        yield Op("wait", event, consumer)
        yield Op("declare", block, consumer)
        yield Op("read", block, consumer, r.randrange(1, 60) * US)
        if r.random() < 0.2:  # a program that is polite: the producer waits before the block is reused
            yield Op("record", event, consumer)
            yield Op("wait", event, producer)
        while live.full or len(live) > r.randrange(24):
            yield Op("free", live.oldest())
        if r.random() < 0.2:
            yield Op("pass", r.randrange(1, 40) * US)


def fan_out(r: Random, shape: Shape) -> Iterator[Op]:
    top = shape.share // 16
    for root in count(1, 100):
        source, _ = _two_streams(r, shape)
        yield Op("alloc", root, source, r.randrange(1, top))
        yield Op("use", root, OWN, r.randrange(1, 30) * US)
        others = r.sample(range(shape.streams), min(r.randrange(2, 9), shape.streams))
        parts = []
        for part, other in enumerate(others, root + 1):
            yield Op("share", root, other)
            yield Op("read", root, other, r.randrange(1, 80) * US)
            yield Op("alloc", part, other, r.randrange(1, top // 4))
            yield Op("use", part, OWN, r.randrange(1, 20) * US)
            parts.append(part)
        if r.random() < 0.5:  # join
            for part in parts:
                yield Op("share", part, source)
                yield Op("read", part, source, r.randrange(1, 20) * US)
        r.shuffle(parts)
        for block in (root, *parts):
            yield Op("free", block)
        if r.random() < 0.4:
            yield Op("pass", r.randrange(1, 100) * US)


def churn(r: Random, shape: Shape) -> Iterator[Op]:
    live = _Live(shape.share // 2)
    sizes = _sizes(r, shape)
    for stream in (PRIVATE + n % 100_000 for n in count()):
        yield Op("open", stream)
        mine = []
        for _ in range(r.randrange(1, 8)):
            nbytes = r.choice(sizes)
            block = live.add(nbytes)
            yield Op("alloc", block, stream, nbytes)
            yield Op("use", block, OWN, r.randrange(1, 100) * US)
            mine.append(block)
        if r.random() < 0.5:
            other = r.randrange(shape.streams)
            yield Op("share", mine[-1], other)
            yield Op("read", mine[-1], other, r.randrange(1, 50) * US)
        early = r.randrange(len(live) + 1)
        for _ in range(early):
            yield Op("free", live.oldest())
        yield Op("end", stream)  # with work queued, and often with blocks live
        while live.full or len(live) > 24:
            yield Op("free", live.any(r))
        if r.random() < 0.3:
            yield Op("pass", r.randrange(1, 200) * US)


def many_users(r: Random, shape: Shape) -> Iterator[Op]:
    live = _Live(shape.share // 2)
    sizes = _sizes(r, shape)
    while True:
        stream = r.randrange(shape.streams)
        nbytes = r.choice(sizes)
        block = live.add(nbytes)
        yield Op("alloc", block, stream, nbytes)
        yield Op("use", block, OWN, r.randrange(1, 10) * US)
        for other in r.sample(range(shape.streams), min(r.randrange(1, 5), shape.streams)):
            yield Op("share", block, other)
            yield Op("use" if r.random() < 0.3 else "read", block, other, r.randrange(1, 40) * US)
        if r.random() < 0.3:  # used where nothing was declared: the free says so
            last = r.randrange(shape.streams)
            yield Op("after", last, stream)
            yield Op("read", block, last, r.randrange(1, 40) * US)
            live._blocks.pop()
            live.bytes -= nbytes
            yield Op("free_on", block, last)
        while live.full or len(live) > 16:
            yield Op("free", live.any(r))
        if r.random() < 0.3:
            yield Op("pass", r.randrange(1, 60) * US)


@cache
def recorded_sizes() -> Sequence[int]:
    """The requests of the recorded run that comes with the package, in order, in bytes."""
    sample = importlib.resources.files("allocator.traces") / "samples" / "serve-8-streams.csv.gz"
    with importlib.resources.as_file(sample) as path:
        return tuple(row.nbytes for row in read_trace(path).rows() if row.op == "alloc" and row.nbytes)


def recorded(r: Random, shape: Shape) -> Iterator[Op]:
    live = _Live(shape.share // 2)
    sizes = recorded_sizes()
    top = shape.share // 4
    at = r.randrange(len(sizes))
    stream = r.randrange(shape.streams)
    while True:
        nbytes = min(sizes[at], top)
        at = (at + 1) % len(sizes)
        if r.random() < 0.05:
            stream = r.randrange(shape.streams)
        block = live.add(nbytes)
        yield Op("alloc", block, stream, nbytes)
        yield Op("use", block, OWN, r.randrange(1, 20) * US)
        if r.random() < 0.1:
            other = r.randrange(shape.streams)
            yield Op("share", block, other)
            yield Op("read", block, other, r.randrange(1, 50) * US)
        while live.full or len(live) > 200 or (len(live) > 4 and r.random() < 0.45):
            yield Op("free", live.any(r) if r.random() < 0.5 else live.oldest())
        if r.random() < 0.2:
            yield Op("pass", r.randrange(1, 20) * US)


def near_limit(r: Random, shape: Shape) -> Iterator[Op]:
    live = _Live(shape.share + shape.share // 8)
    while True:
        stream = r.randrange(shape.streams)
        nbytes = r.randrange(shape.share // 64, shape.share // 6) if r.random() < 0.7 else r.randrange(1, 200 * KIB)
        block = live.add(nbytes)
        yield Op("alloc", block, stream, nbytes)
        yield Op("use", block, OWN, r.randrange(1, 100) * US)
        if r.random() < 0.3:
            other = r.randrange(shape.streams)
            yield Op("share", block, other)
            yield Op("read", block, other, r.randrange(1, 200) * US)
        while live.full or (live.bytes > shape.share // 2 and r.random() < 0.3):
            yield Op("free", live.any(r))
        if r.random() < 0.2:
            yield Op("pass", r.randrange(1, 100) * US)


def host_ahead(r: Random, shape: Shape) -> Iterator[Op]:
    live = _Live(shape.share // 4)
    sizes = _sizes(r, shape, 4)
    while True:
        for _ in range(r.randrange(20, 120)):  # nothing passes meanwhile: everything freed is in flight
            stream, other = _two_streams(r, shape)
            nbytes = r.choice(sizes)
            block = live.add(nbytes)
            yield Op("alloc", block, stream, nbytes)
            yield Op("use", block, OWN, r.randrange(50, 200) * US)
            if r.random() < 0.3:
                yield Op("share", block, other)
                yield Op("read", block, other, r.randrange(50, 200) * US)
            while live.full or len(live) > 6:
                yield Op("free", live.oldest())
        yield r.choice([Op("sync", r.randrange(shape.streams)), Op("pass", 5_000 * US), Op("query", 0), Op("stats")])


def handover(r: Random, shape: Shape) -> Iterator[Op]:
    sizes = _sizes(r, shape)
    for block in count(1, 2):
        stream = r.randrange(shape.streams)
        yield Op("alloc", block, stream, r.choice(sizes))
        yield Op("use", block, OWN, r.randrange(1, 30) * US)
        yield Op("give", block, r.randrange(shape.workers))
        for _ in range(r.randrange(1, 3)):
            taken = block + 1
            yield Op("take", taken)
            if r.random() < 0.5:
                other = r.randrange(shape.streams)
                yield Op("share", taken, other)
                yield Op("read", taken, other, r.randrange(1, 30) * US)
            else:
                yield Op("use", taken, OWN, r.randrange(1, 30) * US)
            yield Op(r.choice(("free", "free", "drop")), taken)
        if r.random() < 0.3:
            yield Op("pass", r.randrange(1, 30) * US)


def garbage(r: Random, shape: Shape) -> Iterator[Op]:
    sizes = _sizes(r, shape)
    live = _Live(shape.share // 4)
    lost = 0
    while True:
        stream, other = _two_streams(r, shape)
        nbytes = r.choice(sizes)
        block = live.add(nbytes)
        yield Op("alloc", block, stream, nbytes)
        yield Op("use", block, OWN, r.randrange(1, 30) * US)
        if r.random() < 0.3:
            yield Op("share", block, other)
            yield Op("read", block, other, r.randrange(1, 30) * US)
        while live.full or len(live) > 12:
            how = r.choice(("cycle", "cycle", "drop", "free"))
            yield Op(how, live.any(r))
            lost += how == "cycle"
            if lost > r.randrange(4, 64):
                lost = 0
                yield Op("collect")
        if r.random() < 0.3:
            yield Op("pass", r.randrange(1, 30) * US)


def default_stream(r: Random, shape: Shape) -> Iterator[Op]:
    live = _Live(shape.share // 2)
    sizes = _sizes(r, shape)
    while True:
        stream = LEGACY if r.random() < 0.4 else r.randrange(shape.streams)
        other = LEGACY if r.random() < 0.3 else r.randrange(shape.streams)
        nbytes = r.choice(sizes)
        block = live.add(nbytes)
        yield Op("alloc", block, stream, nbytes)
        yield Op("use", block, OWN, r.randrange(1, 20) * US)
        if other != stream and r.random() < 0.5:
            yield Op("share", block, other)
            yield Op("read", block, other, r.randrange(1, 40) * US)
        if r.random() < 0.02:
            yield Op(r.choice(("sync", "query")), LEGACY)
        while live.full or len(live) > 24:
            yield Op("free", live.any(r))
        if r.random() < 0.3:
            yield Op("pass", r.randrange(1, 40) * US)


_ALL: Final = (
    Workload("steady", "a few sizes, again and again, on every stream", steady),
    Workload("bursty", "many allocations on one stream, then all are freed", bursty),
    Workload("pipeline", "one stream produces, another consumes, with events", pipeline),
    Workload("fan-out", "one block read on several streams, and their results joined", fan_out),
    Workload("churn", "streams that come and go, also with work queued and blocks live", churn),
    Workload("many-users", "blocks declared on several streams, or named at the free", many_users),
    Workload("recorded", "the sizes of a recorded inference server", recorded),
    Workload("near-limit", "more wanted than the limit allows", near_limit),
    Workload("host-ahead", "the host queues far more than the device has done", host_ahead),
    Workload("handover", "blocks used and freed by another thread", handover),
    Workload("garbage", "blocks freed by the garbage collector", garbage),
    Workload("default-stream", "the legacy stream among blocking and other ones", default_stream),
)

WORKLOADS: Final[dict[str, Workload]] = {workload.name: workload for workload in _ALL}
"""By name, in the order in which people read them."""


def take(ops: Iterator[Op], n: int) -> Iterator[Op]:
    """The next `n` of them."""
    return islice(ops, n)

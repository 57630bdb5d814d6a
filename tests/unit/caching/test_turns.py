"""Streams that take turns: a free is put down and the next stream's own memory taken in one step.

It must come to what the two steps one after the other come to, which stay for whoever cannot be foreseen.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest

from allocator import Allocation, CachingAllocator, Config, SimDevice, Stream
from allocator.blocks import Bin
from allocator.caching import reaper
from allocator.caching.frees import Frees
from tests.unit.caching.conftest import MIB

SIZES = (512, 4096, 4000, 300_000)
FIGURES = ("allocated", "high", "low", "requested_sum", "freed_sum", "frees", "turns", "turned_sum", "cross_frees")


def bins(pool: CachingAllocator) -> Iterator[tuple[int, Bin]]:
    """All bins, by the number of their stream."""
    for assumed in pool._shelves.bins:
        for owner, sizes in assumed.items():
            for bin_ in sizes.by_size.values():
                yield owner.number, bin_


class Twin:
    """One pool, its device and its streams.  foresees: may it do both in one step?"""

    def __init__(self, config: Config, foresees: bool) -> None:
        self.gpu = SimDevice(memory=1 << 30)
        self.pool = CachingAllocator(self.gpu, config)
        self.streams = [Stream(self.gpu) for _ in range(4)]
        self.live: list[Allocation] = []
        self._foresees = foresees

    def allocate(self, stream: int, size: int, assumed: bool, keep: bool) -> int:
        """The address."""
        if not self._foresees:
            for _, bin_ in bins(self.pool):
                bin_.after = None
        made = self.pool.allocate(size, self.streams[stream], assumed=assumed)
        self.gpu.launch(self.streams[stream], 1000, writes=[made])
        if keep:
            self.live.append(made)
        return made.ptr - self.pool._growth._range[0]

    def drop(self, at: int) -> None:
        """Free one of those that are kept."""
        self.live.pop(at).close()

    def renew(self, stream: int) -> None:
        """End a stream, with whatever is in its bins, and in the place; another one comes."""
        self.streams[stream].close()
        self.streams[stream] = Stream(self.gpu)

    def figures(self) -> list[Any]:
        """All that the two must agree on, without looking at it through the pool: that would put frees down."""
        pool, base = self.pool, self.pool._growth._range[0]
        found: list[Any] = [getattr(pool._accounts, name) for name in FIGURES]
        found += [len(pool.frees), len(pool._frees.strays), pool._sealing.counts.copy()]
        for number, bin_ in bins(pool):
            there = [(b.ptr - base, b.generation, dict(b.stamp.at), b.requested) for b in bin_.blocks]
            found.append((number, bin_.size, bin_.assumed, bin_.hits + bin_.turns, bin_.filled, there))
        return found


CONFIGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "marks all the time": {"seal_frees": 3},
    "marks by bytes": {"seal_bytes": 200_000},
    "bounded": {"max_in_flight": 64 * MIB},
    "assumed": {"uses": "assumed"},
    "both uses": {"uses": "auto", "seal_frees": 16},
}


@pytest.fixture
def _nothing_else_goes_on() -> Iterator[None]:
    """A pool of an earlier test that goes meanwhile would be seen to by a call of one twin alone."""
    gc.collect()
    reaper.forget_all()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_nothing_else_goes_on")
@pytest.mark.source  # compiled, the one function cannot be told from outside whether it was one step
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_it_comes_to_the_same(config: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    downs = [0]
    put_down_last = Frees.put_down_last

    def counted(frees: Frees) -> bool:
        downs[0] += 1
        return put_down_last(frees)

    monkeypatch.setattr(Frees, "put_down_last", counted)
    draw = random.Random(f"{config} {seed}")
    one, other = (Twin(Config(**CONFIGS[config]), foresees) for foresees in (True, False))
    asked = [0, 0]
    at = 0
    for n in range(600):
        turning = n // 60 % 2 == 0
        if turning:  # in turn, with now and then one out of turn
            at = (at + (draw.random() < 0.9)) % 4
        stream, size = (at, SIZES[1]) if turning else (draw.randrange(4), draw.choice(SIZES))
        assumed, keep = draw.random() < 0.4 if config == "both uses" else True, draw.random() < 0.1
        if one.live and draw.random() < 0.1:
            drop = draw.randrange(len(one.live))
            one.drop(drop)
            other.drop(drop)
        if draw.random() < 0.01:
            one.renew(stream - 1)
            other.renew(stream - 1)
        ptrs = []
        for which, twin in enumerate((one, other)):
            before = downs[0]
            ptrs.append(twin.allocate(stream, size, assumed, keep))
            asked[which] += downs[0] - before
        assert ptrs[0] == ptrs[1], n
        assert one.figures() == other.figures(), n
        if n % 50 == 49:
            for twin in (one, other):
                twin.gpu.advance(20_000)
                twin.pool.check()
        if n % 130 == 129:
            assert one.pool.stats() == other.pool.stats(), n
    assert asked[0] < asked[1] - 8 or config == "bounded", asked  # the others were put down in one step
    for twin in (one, other):
        twin.live.clear()
        twin.gpu.run_until_idle()
        assert twin.gpu.races == [] and twin.gpu.violations == []
        twin.pool.settle()
        twin.pool.trim()
        assert twin.pool.stats().reserved_bytes == 0
        twin.pool.close()


def turning(pool: CachingAllocator, *streams: Stream) -> None:
    """Each has memory of its own, and who comes after whom has been seen."""
    held = [pool.allocate(4096, stream) for stream in streams]
    held.clear()
    for stream in streams * 3:
        pool._frees.inside.busy = 0
        pool.allocate(4096, stream)


def test_a_size_that_is_out_of_use_keeps_none_behind_it(gpu: SimDevice, pool: CachingAllocator) -> None:
    """Else each bin that has gone would keep the next one that has, without end."""
    a, b = Stream(gpu), Stream(gpu)
    turning(pool, a, b)
    pool.drain_frees()
    with pool._lock:
        pool._shelves.flush()
        pool._shelves._forget_unused()
        pool._shelves._forget_unused()
    assert not list(bins(pool))
    turning(pool, a, b)
    linked = [bin_ for _, bin_ in bins(pool) if bin_.after is not None]
    assert linked and all(bin_.after is not None and bin_.after.taker is not None for bin_ in linked)


def test_a_block_in_a_bin_that_has_gone_is_not_lost(gpu: SimDevice, pool: CachingAllocator) -> None:
    """Another thread, let in by a tracer, empties the bins, and lets this one go, between the last look and the end."""
    a = Stream(gpu)
    turning(pool, a, Stream(gpu))
    pool.drain_frees()
    bin_ = next(b for _, b in bins(pool) if b.owner is a.timeline)
    block = bin_.blocks.pop()
    with pool._lock:
        pool._shelves.flush()
        pool._shelves._forget_unused()
        pool._shelves._forget_unused()
    assert bin_.taker is None and not bin_.filled
    bin_.blocks.append(block)
    pool._frees.strays.append(bin_)
    pool.drain_frees()
    pool.check()
    gpu.run_until_idle()
    pool.settle()
    assert pool.trim() and pool.stats().reserved_bytes == 0 == gpu.used_bytes


def test_what_may_yet_be_in_use_is_looked_at_again_all_the_same(gpu: SimDevice, pool: CachingAllocator) -> None:
    a, b = Stream(gpu), Stream(gpu)
    turning(pool, a, b)
    doubtful = pool.allocate(512, a)
    pool.put_down((doubtful._block, doubtful._generation, [doubtful]))
    pool.drain_frees()  # it is free as soon as nobody else holds it
    assert pool._frees.limbo
    del doubtful
    pool._frees.inside.busy = 0
    for stream in (a, b, a, b):
        pool.allocate(4096, stream)
    assert not pool._frees.limbo


@pytest.mark.parametrize("bound", [0, 1 << 29])
def test_a_limit_that_is_set_later_counts_at_once(gpu: SimDevice, pool: CachingAllocator, bound: int) -> None:
    a, b = Stream(gpu), Stream(gpu)
    turning(pool, a, b)
    pool.set_limit(bound)
    assert (pool._accounts.calm == 0) == bool(bound)
    pool.set_limit(0)
    assert pool._accounts.calm > 0

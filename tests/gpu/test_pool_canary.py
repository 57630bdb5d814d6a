"""Many streams, mixed sizes, every block tagged and verified on the device; and the control: without gating the
same tests see corruption.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from pools import KIB, MIB, SIZE, Bench, Counter
from rig import Rig

from allocator import Allocation, CachingAllocator, Stream
from allocator.events import EMPTY
from allocator.streams.order import Order

SIZES = (512, 4 * KIB, 24 * KIB, 200 * KIB, 300 * KIB, MIB, 3 * MIB)
ALLOCATIONS = 100_000


@pytest.fixture
def bench(rig: Rig) -> Iterator[Bench]:
    bench = Bench(rig)
    yield bench
    bench.close()


@pytest.fixture
def ungated(rig: Rig) -> Iterator[Bench]:
    """For the controls: what a pool knows after it was lied to is no longer consistent."""
    bench = Bench(rig)
    yield bench
    bench.close(check=False)


def _canary(bench: Bench, pool: CachingAllocator, streams: list[Stream], allocations: int, *, seed: int) -> int:
    """Fill each block with its tag on its stream; verify it there before it is freed.  Words found wrong."""
    draw = random.Random(seed)
    counter = Counter(bench)
    live: list[tuple[Allocation, Stream, int]] = []
    try:
        for tag in range(1, allocations + 1):
            stream = streams[draw.randrange(len(streams))]
            a = pool.allocate(SIZES[draw.randrange(len(SIZES))], stream=stream)
            bench.fill(stream, a, tag)
            live.append((a, stream, tag))
            if len(live) > 48:
                at = draw.randrange(len(live))
                live[at], live[-1] = live[-1], live[at]
                old, owner, its = live.pop()
                user = owner
                if draw.random() < 0.1:  # read on another stream, declared
                    user = streams[draw.randrange(len(streams))]
                    user.wait_stream(owner)
                    old.record_stream(user)
                counter.verify(user, old, its)
                old.close()
        for old, owner, its in live:
            counter.verify(owner, old, its)
            old.close()
        return counter.read()
    finally:
        live.clear()
        counter.close()


def _streams(bench: Bench, n: int) -> list[Stream]:
    """Blocking, non-blocking and the legacy one."""
    return [bench.stream(non_blocking=bool(i % 3)) for i in range(n)] + [Stream.legacy(bench.gpu)]


@pytest.mark.slow
def test_no_block_is_ever_written_by_two_at_once(bench: Bench) -> None:
    pool = bench.pool()
    assert _canary(bench, pool, _streams(bench, 8), ALLOCATIONS, seed=1) == 0
    stats = pool.stats()
    assert sum(stats.allocations.values()) == ALLOCATIONS
    assert stats.allocations["opportunistic"] > 0, "memory never crossed streams: the test shows nothing"
    pool.check()


@pytest.mark.parametrize("uses", ["declared", "assumed"])
@pytest.mark.parametrize("backing", ["vmm", "malloc"])
def test_no_corruption_under_a_tight_limit(bench: Bench, backing: str, uses: str) -> None:
    pool = bench.pool(backing=backing, uses=uses, limit=96 * MIB, seal_frees=8)
    assert _canary(bench, pool, _streams(bench, 8), 8_000, seed=2) == 0


def test_no_corruption_with_streams_that_come_and_go(bench: Bench) -> None:
    pool = bench.pool(seal_frees=16)
    for seed in range(20):
        assert _canary(bench, pool, _streams(bench, 4), 300, seed=seed) == 0


def _write_over(bench: Bench, pool: CachingAllocator) -> tuple[bool, int]:
    """A has filled its block and reads it behind a latch; the block is freed, B takes it and writes.

    (B got the same memory, words that A reads wrong)."""
    a, b = bench.stream(), bench.stream()
    counter = Counter(bench)
    try:
        x = pool.allocate(SIZE, stream=a)
        bench.fill(a, x, 1)
        a.synchronize()
        latch = bench.rig.hold(a.handle)
        counter.verify(a, x, 1)
        x.close()
        y = pool.allocate(SIZE, stream=b)
        bench.fill(b, y, 2)
        b.synchronize()
        latch.release()
        return y.ptr == x.ptr, counter.read()
    finally:
        bench.rig.release()
        counter.close()


def test_with_gating_the_owner_reads_what_it_wrote(bench: Bench) -> None:
    assert _write_over(bench, bench.pool()) == (False, 0)


def _switch_gating_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything counts as finished: what a pool without any ordering would do."""
    monkeypatch.setattr(Order, "done", lambda *_, **__: True)
    monkeypatch.setattr(Order, "known", lambda *_, **__: True)
    monkeypatch.setattr(Order, "unfinished", lambda *_, **__: EMPTY)


def test_control_without_gating_corruption_is_seen(ungated: Bench) -> None:
    pool = ungated.pool()
    with pytest.MonkeyPatch.context() as patch:
        _switch_gating_off(patch)
        got, wrong = _write_over(ungated, pool)
    assert got
    assert wrong == SIZE // 4


def test_control_without_gating_the_canary_sees_it_too(ungated: Bench) -> None:
    """The workload of the tests above, with streams that lag behind: they can fail."""
    pool = ungated.pool()
    streams = [ungated.stream() for _ in range(8)]
    with pytest.MonkeyPatch.context() as patch:
        _switch_gating_off(patch)
        for stream in streams[::2]:
            ungated.gpu.spin(stream.handle, 200_000_000)
        wrong = _canary(ungated, pool, streams, 400, seed=3)
    assert wrong > 0

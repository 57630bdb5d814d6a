"""Checked mode on a GPU: a kernel that writes late is found and named; honest work on many streams is not accused."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from pools import MIB, SIZE, Bench, Counter
from rig import Rig

from allocator import CorruptionError, Stream
from allocator.caching.canary import PATTERN


@pytest.fixture
def bench(rig: Rig) -> Iterator[Bench]:
    bench = Bench(rig)
    yield bench
    bench.close()


@pytest.fixture
def accused(rig: Rig) -> Iterator[Bench]:
    """Pools that keep damaged memory until they are closed."""
    bench = Bench(rig)
    yield bench
    bench.close(check=False)


def _named(bench: Bench, name: str) -> Stream:
    return Stream(bench.gpu, name=name)


@pytest.mark.parametrize("backing", ["vmm", "malloc"])
def test_a_kernel_behind_a_latch_that_writes_after_the_free_is_reported(accused: Bench, backing: str) -> None:
    """`b` was never declared; the block is freed, filled, and then `b`'s kernel runs."""
    pool = accused.pool(canary=True, backing=backing)
    a, b = _named(accused, "a"), _named(accused, "b")
    x = pool.allocate(SIZE, stream=a)
    accused.fill(a, x, 1)
    a.synchronize()
    latch = accused.rig.hold(b.handle)
    accused.fill(b, (x.ptr + MIB, MIB), 2)
    ptr = x.ptr
    x.close()
    assert pool.stats().in_flight_bytes == 0  # `a` is done: filled, as far as anybody knows
    latch.release()
    b.synchronize()
    with pytest.raises(CorruptionError) as caught:
        pool.allocate(SIZE, stream=a)
    error = caught.value
    assert (error.ptr, error.nbytes, error.damaged) == (ptr + MIB, MIB, MIB)
    assert error.found == bytes([2, 0, 0, 0]) * 4
    assert error.writer == "stream 'b' (non-blocking)" and error.owner == "stream 'a' (non-blocking)"
    assert pool.damaged_bytes == MIB
    y = pool.allocate(SIZE, stream=a)
    accused.fill(a, y, 3)
    assert accused.mismatches(a, y, 3) == 0


def test_a_use_after_the_free_on_the_same_stream_is_reported_by_check(accused: Bench) -> None:
    pool = accused.pool(canary=True)
    a = _named(accused, "a")
    x = pool.allocate(SIZE, stream=a)
    where = x.ptr, x.size
    x.close()
    pool.check()
    accused.fill(a, where, 7)
    a.synchronize()
    with pytest.raises(CorruptionError, match="07 00 00 00"):
        pool.check()


def test_declared_work_behind_a_latch_is_waited_for(bench: Bench) -> None:
    pool = bench.pool(canary=True)
    a, b = _named(bench, "a"), _named(bench, "b")
    x = pool.allocate(SIZE, stream=a)
    x.record_stream(b)
    b.wait_stream(a)
    latch = bench.rig.hold(b.handle)
    bench.fill(b, x, 2)
    x.close()
    y = pool.allocate(SIZE, stream=a)
    assert y.ptr != x.ptr and pool.stats().in_flight_bytes == SIZE
    latch.release()
    b.synchronize()
    pool.check()
    assert pool.corruptions == 0


def test_memory_comes_filled_with_the_pattern(bench: Bench) -> None:
    pool = bench.pool(canary=True)
    a = _named(bench, "a")
    pool.allocate(SIZE, stream=a).close()
    pool.settle()
    x = pool.allocate(SIZE, stream=a)
    assert bench.mismatches(a, x, int.from_bytes(bytes([PATTERN]) * 4, "little")) == 0


def test_filling_and_verifying_wait_for_no_held_stream(bench: Bench) -> None:
    pool = bench.pool(canary=True)
    a, held, legacy = _named(bench, "a"), bench.stream(non_blocking=False), Stream.legacy(bench.gpu)
    latch = bench.rig.hold(held.handle)
    for _ in range(4):
        with pool.allocate(SIZE, stream=a) as x:
            bench.fill(a, x, 1)
        a.synchronize()
        pool.check()
    assert not held.query() and not legacy.query()
    latch.release()


@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
def test_r10_a_capture_survives_fills_and_reads(bench: Bench, mode: str) -> None:
    pool = bench.pool(canary=True)
    a = _named(bench, "a")
    captured = bench.rig.blocking()
    with pool.allocate(SIZE, stream=a) as x:
        bench.fill(a, x, 1)
    a.synchronize()
    pool.check()
    with bench.rig.capturing(captured, mode):
        with pool.allocate(SIZE, stream=a) as x:
            bench.fill(a, x, 2)
        pool.check()
        assert bench.rig.survives(captured)


@pytest.mark.parametrize("uses", ["declared", "assumed"])
def test_honest_work_on_eight_streams_is_not_accused_and_not_corrupt(bench: Bench, uses: str) -> None:
    pool = bench.pool(canary=True, uses=uses, limit=192 * MIB)
    streams = [bench.stream() for _ in range(8)]
    counter = Counter(bench)
    pick = random.Random(4)
    try:
        live: list[tuple[Stream, object, int]] = []
        for tag in range(1, 1500):
            stream = pick.choice(streams)
            x = pool.allocate(pick.choice((4096, 100_000, MIB, 3 * MIB)), stream=stream)
            bench.fill(stream, x, tag)
            other = pick.choice(streams)
            if other is not stream and uses == "declared":
                other.wait_stream(stream)
                x.record_stream(other)
                counter.verify(other, x, tag)
            counter.verify(stream, x, tag)
            live.append((stream, x, tag))
            if len(live) > 24:
                live.pop(pick.randrange(len(live)))
        live.clear()
        assert counter.read() == 0
    finally:
        counter.close()
    pool.settle()
    pool.check()
    assert pool.corruptions == 0

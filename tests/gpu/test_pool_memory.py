"""The pool on a GPU: growing, trimming and limits while a stream is held.  R13, S01, S06, S08, S14, S23."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pools import MIB, SIZE, Bench, overlap, span
from rig import Rig

from allocator import CachingAllocator, OutOfMemoryError

NO_DEVICE_WAITS = frozenset({"event_dependency", "opportunistic"})


@pytest.fixture
def bench(rig: Rig) -> Iterator[Bench]:
    bench = Bench(rig)
    yield bench
    bench.close()


def test_growing_does_not_wait_for_a_held_stream(bench: Bench) -> None:
    pool = bench.pool()
    a, b = bench.stream(), bench.stream()
    latch = bench.rig.hold(a.handle)
    live = [pool.allocate(size, stream=b) for size in (512, MIB, 64 * MIB, 256 * MIB)]
    for tag, one in enumerate(live, 1):
        bench.fill(b, one, tag)
    assert [bench.mismatches(b, one, tag) for tag, one in enumerate(live, 1)] == [0] * 4
    assert not a.query()  # still held
    latch.release()


def test_trimming_does_not_wait_for_a_held_stream(bench: Bench) -> None:
    pool = bench.pool()
    a, b = bench.stream(), bench.stream()
    kept = pool.allocate(SIZE, stream=a)
    latch = bench.rig.hold(a.handle)
    bench.fill(a, kept, 1)
    pending = pool.allocate(SIZE, stream=a)
    bench.fill(a, pending, 2)
    pending.close()
    for _ in range(2):
        gone = [pool.allocate(8 * SIZE, stream=b) for _ in range(2)]
        gone.clear()
    b.synchronize()
    assert pool.trim() == 16 * SIZE
    assert pool.stats().reserved_bytes == 2 * SIZE  # what is live, and what the held stream still needs
    assert not a.query()
    latch.release()
    assert bench.mismatches(a, kept, 1) == 0
    assert pool.trim() == SIZE


def test_s06_at_the_limit_the_stream_is_made_to_wait_and_the_host_is_not(bench: Bench) -> None:
    pool = bench.pool(limit=SIZE)
    a, b = bench.stream(), bench.stream()
    x = pool.allocate(SIZE, stream=a)
    latch = bench.rig.hold(a.handle)
    bench.fill(a, x, 1)
    where = span(x)
    x.close()
    y = pool.allocate(SIZE, stream=b)
    assert span(y) == where
    assert pool.stats().allocations["internal_dependency"] == 1
    bench.fill(b, y, 2)
    event = b.record_event()
    assert bench.rig.is_stuck(event.handle)  # behind A's latch
    latch.release()
    assert bench.mismatches(b, y, 2) == 0


def test_s06_without_device_waits_the_host_waits_and_then_there_is_memory(bench: Bench) -> None:
    pool = bench.pool(limit=SIZE, reuse=NO_DEVICE_WAITS, wait_timeout=10)
    a, b = bench.stream(), bench.stream()
    x = pool.allocate(SIZE, stream=a)
    bench.gpu.spin(a.handle, 30_000_000)
    bench.fill(a, x, 1)
    x.close()
    y = pool.allocate(SIZE, stream=b)
    assert a.query()
    assert span(y) == span(x)
    assert pool.stats().out_of_memory_retries["host_wait"] == 1


def test_s14_a_wait_for_what_never_ends_is_bounded(bench: Bench) -> None:
    pool = bench.pool(limit=SIZE, reuse=NO_DEVICE_WAITS, wait_timeout=0.05)
    a, b = bench.stream(), bench.stream()
    x = pool.allocate(SIZE, stream=a)
    latch = bench.rig.hold(a.handle)
    bench.fill(a, x, 1)
    x.close()
    with pytest.raises(OutOfMemoryError):
        pool.allocate(SIZE, stream=b)
    latch.release()
    pool.allocate(SIZE, stream=b).close()


def test_s14_a_held_stream_without_memory_in_the_pool_stops_nobody(bench: Bench) -> None:
    pool = bench.pool(limit=8 * SIZE)
    stuck, a, b = bench.stream(), bench.stream(), bench.stream()
    mine = pool.allocate(SIZE, stream=stuck)
    latch = bench.rig.hold(stuck.handle)
    bench.fill(stuck, mine, 1)
    small = [pool.allocate(256 << 10, stream=a) for _ in range(7 * 16)]
    small.clear()
    big = pool.allocate(7 * SIZE, stream=b)
    bench.fill(b, big, 2)
    assert bench.mismatches(b, big, 2) == 0
    assert not stuck.query()
    latch.release()


def test_s08_the_pool_waits_for_the_device_above_the_bound(bench: Bench) -> None:
    pool = bench.pool(max_in_flight=4 * SIZE, wait_timeout=10)
    a, b = bench.stream(), bench.stream()
    for i in range(24):
        x = pool.allocate(SIZE, stream=a)
        bench.fill(a, x, i)
        b.wait_stream(a)
        bench.gpu.spin(b.handle, 1_000_000)
        x.record_stream(b)
        x.close()
    assert pool.stats().peak_reserved_bytes <= 6 * SIZE


def test_plain_memory_gives_nothing_back_while_anything_is_in_flight(bench: Bench) -> None:
    """`cuMemFree` would wait for the device (R13)."""
    pool = bench.pool(backing="malloc")
    a, b = bench.stream(), bench.stream()
    x, y = pool.allocate(SIZE, stream=a), pool.allocate(SIZE, stream=b)
    latch = bench.rig.hold(a.handle)
    bench.fill(a, x, 1)
    bench.fill(b, y, 2)
    x.close()
    y.close()
    b.synchronize()
    assert pool.trim() == 0
    assert not a.query()
    latch.release()
    a.synchronize()
    assert pool.trim() == 2 * SIZE


def test_s23_everything_acts_on_the_blocks_own_device(rig: Rig, second_rig: Rig) -> None:
    """Device 0 is current throughout; everything happens on device 1."""
    bench = Bench(second_rig)
    pool = bench.pool(limit=16 * SIZE)
    before = dict(rig.gpu.calls)
    current = int(rig.cu("cuCtxGetCurrent"))
    a, b = bench.stream(), bench.stream()
    x = pool.allocate(SIZE, stream=a)
    with second_rig.gpu.scope():
        latch = second_rig.hold(a.handle)
        bench.fill(a, x, 1)
    where = span(x)
    x.close()
    y = pool.allocate(SIZE, stream=b)
    assert not overlap(y, where)
    y.close()
    pool.trim()
    assert int(rig.cu("cuCtxGetCurrent")) == current
    latch.release()
    pool.settle()
    assert pool.trim() > 0
    assert pool.stats().reserved_bytes == 0
    assert int(rig.cu("cuCtxGetCurrent")) == current
    same = {k: v for k, v in rig.gpu.calls.items() if k not in ("cuCtxGetCurrent",)}
    assert same == {k: v for k, v in before.items() if k not in ("cuCtxGetCurrent",)}
    with second_rig.gpu.scope():
        bench.close()


def test_s04_a_special_handle_on_two_devices_is_two_streams(rig: Rig, second_rig: Rig) -> None:
    first, second = Bench(rig), Bench(second_rig)
    pools: list[CachingAllocator] = [first.pool(), second.pool()]
    blocks = [pool.allocate(SIZE, stream=0) for pool in pools]
    latch = rig.hold(1)
    first.kernels.fill(1, blocks[0].ptr, SIZE // 4, 1)
    for block in blocks:
        block.close()
    assert pools[1].stats().in_flight_bytes == 0
    assert pools[0].stats().in_flight_bytes == SIZE
    latch.release()
    first.close()
    with second_rig.gpu.scope():
        second.close()

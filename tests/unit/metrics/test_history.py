"""History: samples of gauges and differences of counters, in bounded memory, by a thread that nothing ends."""

from __future__ import annotations

import gc
import logging
import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from allocator import CachingAllocator, Config, SimDevice, Stats, Stream
from allocator.metrics.history import COLUMNS, REUSE, SIZES, AddressMap, History, PoolHistory, quantile, steady_clock
from allocator.stats import SECONDS_BUCKETS

MIB = 1 << 20


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Steps:
    """A listener that a test can wait for: `until(n)` returns once it was called n times."""

    def __init__(self) -> None:
        self._called = threading.Condition()
        self.count = 0

    def __call__(self) -> None:
        with self._called:
            self.count += 1
            self._called.notify_all()

    def until(self, count: int) -> None:
        with self._called:
            assert self._called.wait_for(lambda: self.count >= count, timeout=60), f"{self.count} of {count} samples"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def history(pool: CachingAllocator, clock: Clock) -> Iterator[History]:
    history = History(lambda: [pool], clock=clock)
    yield history
    history.stop()


def only(history: History) -> PoolHistory:
    (one,) = history.pools()
    return one


def test_a_sample_holds_gauges_as_they_are_and_counters_as_differences(
    pool: CachingAllocator, history: History, clock: Clock
) -> None:
    kept = [pool.allocate(MIB) for _ in range(3)]
    history.sample()
    clock.now += 2
    kept.append(pool.allocate(5000))
    history.sample()
    rows = only(history).since(0)
    assert set(rows) == set(COLUMNS)
    assert list(rows["number"]) == [1, 2]
    assert list(rows["time"]) == [1000, 1002]
    assert list(rows["seconds"]) == [0, 2]
    assert list(rows["allocated_bytes"]) == [3 * MIB, 3 * MIB + 5120]
    assert [sum(rows[f"reuse_{kind}"][at] for kind in REUSE) for at in (0, 1)] == [0, 1]
    assert {SIZES[at] for at in range(len(SIZES)) if rows[f"size_{at}"][1]} == {8192}
    assert math.isnan(rows["in_flight_p50"][1])
    stats = only(history).latest
    assert isinstance(stats, Stats)
    assert stats.allocated_bytes == rows["allocated_bytes"][-1]


def test_growth_release_and_time_in_flight_are_differences_too(
    gpu: SimDevice, pool: CachingAllocator, history: History
) -> None:
    a, b = Stream(gpu), Stream(gpu)
    pool.allocate(MIB, stream=b).close()
    history.sample()
    x = pool.allocate(40 * MIB, stream=a)
    gpu.launch(a, duration_ns=3_000_000, writes=[x])
    x.close()
    y = pool.allocate(MIB, stream=b)
    pool.stats()
    gpu.advance(5_000_000)
    y.close()
    gpu.run_until_idle()
    pool.trim()
    history.sample()
    rows = only(history).since(1)
    assert rows["growth_bytes"][0] >= 40 * MIB
    assert rows["release_bytes"][0] >= 40 * MIB


def test_rows_come_after_the_number_that_is_known(history: History, clock: Clock) -> None:
    for _ in range(5):
        clock.now += 1
        history.sample()
    one = only(history)
    assert list(one.since(3)["number"]) == [4, 5]
    assert one.since(5) == {}
    assert one.since(99) == {}
    assert one.count == 5


def test_memory_is_bounded_for_ever(pool: CachingAllocator, clock: Clock) -> None:
    history = History(lambda: [pool], interval_s=1, keep_s=10, clock=clock)
    for _ in range(95):
        clock.now += 1
        history.sample()
    one = only(history)
    assert list(one.since(0)["number"]) == list(range(86, 96))
    assert max(len(column) for column in one._columns.values()) < 20
    assert list(one.since(90)["number"]) == [91, 92, 93, 94, 95]


def test_a_sum_looks_back_as_far_as_it_is_asked(pool: CachingAllocator, history: History, clock: Clock) -> None:
    for _ in range(6):
        clock.now += 10
        pool.allocate(MIB).close()
        pool.allocate(MIB).close()
        history.sample()
    one = only(history)
    assert one.total("reuse_same_stream", 25) == 6
    assert one.total("reuse_same_stream", 1e9) == 10  # what was before the first sample has no time


def test_a_clock_that_goes_back_stands_still_in_the_history(history: History, clock: Clock) -> None:
    history.sample()
    clock.now -= 500
    history.sample()
    assert list(only(history).since(0)["time"]) == [1000, 1000]
    assert list(only(history).since(0)["seconds"]) == [0, 0]


def test_no_pool_is_held_alive(gpu: SimDevice) -> None:
    pools: weakref.WeakSet[CachingAllocator] = weakref.WeakSet()
    history = History(lambda: list(pools), interval_s=0.001)
    pool = CachingAllocator(gpu, config=Config(), name="short")
    pools.add(pool)
    steps = Steps()
    with history.watch(steps):
        history.start()
        steps.until(3)
        assert [one.label for one in history.pools()] == ["short on sim:0"]
        gone = weakref.ref(pool)
        del pool
        steps.until(steps.count + 2)
        gc.collect()
        assert gone() is None
        assert history.pools() == []
    history.stop()


def test_a_closed_pool_leaves_and_its_successor_starts_anew(gpu: SimDevice) -> None:
    pools: list[CachingAllocator] = [CachingAllocator(gpu, config=Config(), name="main")]
    history = History(lambda: pools)
    history.sample()
    history.sample()
    pools[0].close()
    assert history.pools() == []
    pools[0] = CachingAllocator(gpu, config=Config(), name="main")
    history.sample()
    assert (only(history).label, only(history).count) == ("main on sim:0", 1)
    pools[0].close()


def test_pools_of_one_name_are_told_apart_and_keep_their_names(gpu: SimDevice) -> None:
    first, second = (CachingAllocator(gpu, config=Config(), name="same") for _ in range(2))
    pools = [first, second, first]
    history = History(lambda: pools)
    history.sample()
    history.sample()
    assert [(one.label, one.count) for one in history.pools()] == [("same on sim:0", 2), ("same on sim:0 #2", 2)]
    pools.remove(first)
    pools.remove(first)
    history.sample()
    assert [(one.label, one.count) for one in history.pools()] == [("same on sim:0 #2", 3)]
    first.close()
    second.close()


class Broken(CachingAllocator):
    """Cannot be read while `broken`."""

    broken = True

    def stats(self, *, per_stream: bool = False, most: int | None = None) -> Stats:
        if self.broken:
            raise RuntimeError("no figures today")
        return super().stats(per_stream=per_stream)


def test_a_pool_that_cannot_be_read_leaves_a_gap_and_one_line(
    gpu: SimDevice, pool: CachingAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken(gpu, config=Config(), name="broken")
    history = History(lambda: [broken, pool])
    with caplog.at_level(logging.WARNING, "allocator.metrics"):
        history.sample()
        history.sample()
        assert [record.getMessage() for record in caplog.records] == [
            "pool 'broken on sim:0' is left out of the history for now: no figures today"
        ]
    assert [one.count for one in history.pools()] == [0, 2]
    assert history.pools()[0].latest is None
    broken.broken = False
    history.sample()
    assert [one.count for one in history.pools()] == [1, 3]
    broken.close()


def test_nothing_ends_the_thread(pool: CachingAllocator, caplog: pytest.LogCaptureFixture) -> None:
    calls = Steps()

    def pools() -> Sequence[CachingAllocator]:
        calls()
        if calls.count in (2, 3):
            raise RuntimeError("not now")
        return [pool]

    def listener() -> None:
        raise ValueError("a page that is gone")

    history = History(pools, interval_s=0.001)
    with caplog.at_level(logging.ERROR, "allocator.metrics"), history.watch(listener):
        history.start()
        calls.until(6)
        assert only(history).count >= 2
    history.stop()


def test_start_and_stop_twice_are_harmless(pool: CachingAllocator) -> None:
    history = History(lambda: [pool], interval_s=0.001)
    history.stop()
    steps = Steps()
    with history.watch(steps):
        history.start()
        history.start()
        steps.until(1)
        assert sum(thread.name == "weir-history" for thread in threading.enumerate()) == 1
        history.stop()
        history.stop()
        assert not any(thread.name == "weir-history" for thread in threading.enumerate())
        seen = steps.count
        history.start()  # and on it goes
        steps.until(seen + 1)
    history.stop()


def test_a_listener_may_stop_the_history(pool: CachingAllocator) -> None:
    history = History(lambda: [pool], interval_s=0.001)
    stopped = Steps()

    def listener() -> None:
        history.stop()
        stopped()

    with history.watch(listener):
        history.start()
        stopped.until(1)


def test_the_thread_ends_when_nobody_holds_the_history() -> None:
    taken = Steps()

    def pools() -> Sequence[CachingAllocator]:
        taken()
        return []

    history = History(pools, interval_s=0.001)
    history.start()
    taken.until(1)
    thread = history._thread
    assert thread is not None
    del history
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_streams_and_the_map_are_read_only_while_somebody_watches(
    gpu: SimDevice, pool: CachingAllocator, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[str] = []
    snapshot = CachingAllocator.snapshot

    def counted(pool: CachingAllocator) -> dict[str, Any]:
        walks.append("map")
        return snapshot(pool)

    monkeypatch.setattr(CachingAllocator, "snapshot", counted)
    a = pool.allocate(MIB, stream=Stream(gpu, name="copy"))
    history.sample()
    one = only(history)
    assert one.map is None and one.latest is not None and not one.latest.stream_allocated_bytes
    assert walks == []
    with history.watch():
        assert history.watched
        history.sample()
        assert isinstance(one.map, AddressMap)
        assert one.latest is not None
        assert one.latest.stream_allocated_bytes["copy"] == MIB
        assert walks == ["map"]
    assert one.map is None and not history.watched
    history.sample()
    assert walks == ["map"]
    a.close()


def test_whoever_begins_to_watch_need_not_wait_for_the_next_sample(gpu: SimDevice, pool: CachingAllocator) -> None:
    history = History(lambda: [pool], interval_s=3000)
    a = pool.allocate(MIB, stream=Stream(gpu, name="copy"))
    first, second = Steps(), Steps()
    history.start()
    with history.watch(first):
        first.until(1)
        calls = 1
        while only(history).map is None:  # that sample began before there was anybody to draw it for
            calls += 1
            first.until(calls)
    assert only(history).map is None
    count = only(history).count
    with history.watch(second):
        second.until(1)
        latest = only(history).latest
        assert only(history).map is not None
        assert latest is not None and latest.stream_allocated_bytes["copy"] == MIB
        assert only(history).count == count == 1, "a look is no sample: rates would jump"
    history.stop()
    a.close()


def test_the_map_has_every_block_at_its_address_in_its_state_with_its_stream(
    gpu: SimDevice, pool: CachingAllocator, history: History
) -> None:
    copy, other = Stream(gpu, name="copy"), Stream(gpu)
    live = pool.allocate(3 * MIB, stream=copy)
    flying = pool.allocate(5 * MIB, stream=other)
    gpu.launch(other, duration_ns=1000, writes=[flying])
    address = flying.ptr
    flying.close()
    with history.watch():
        history.sample()
        shown = only(history).map
    assert shown is not None
    blocks = {
        at: (size, AddressMap.STATES[state], stream)
        for at, size, state, stream in zip(shown.address, shown.size, shown.state, shown.stream, strict=True)
    }
    size, state, stream = blocks[live.ptr]
    assert (size, state, shown.names[stream]) == (3 * MIB, "live", "copy")
    size, state, stream = blocks[address]
    assert (size, state) == (5 * MIB, "in flight") and stream not in shown.names
    assert sum(shown.size) == sum(size for _, size in shown.segments) == pool.stats().reserved_bytes
    live.close()


def test_percentiles_come_from_the_last_samples() -> None:
    assert math.isnan(quantile([0] * 9, 0.5))
    assert quantile([10, 0, 0, 0, 0, 0, 0, 0, 0], 1.0) == pytest.approx(1e-5)
    assert quantile([0, 0, 100, 0, 0, 0, 0, 0, 0], 0.5) == pytest.approx(10**-3.5)
    assert quantile([90, 0, 0, 0, 0, 0, 10, 0, 0], 0.99) == pytest.approx(10**0.9)
    assert quantile([0, 0, 0, 0, 0, 0, 0, 0, 5], 0.5) == SECONDS_BUCKETS[-1]


def test_the_clock_shows_the_time_and_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = steady_clock()
    before = clock()
    monkeypatch.setattr("allocator.metrics.history.time.time", lambda: 0.0)
    assert clock() >= before > 1e9


@pytest.mark.parametrize(("interval", "keep"), [(0, 10), (-1, 10), (20, 10)])
def test_intervals_that_make_no_sense_are_refused(interval: float, keep: float) -> None:
    with pytest.raises(ValueError, match="interval_s must be above 0"):
        History(list, interval_s=interval, keep_s=keep)

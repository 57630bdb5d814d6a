"""What a scrape says of a pool, and what it asks of it."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import math
import platform
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import allocator
from allocator import CachingAllocator, Config, DriverError, SimDevice, Stats, Stream
from allocator.gil import COMPILED
from allocator.metrics import AllocatorCollector, register
from allocator.metrics.catalogue import POOL, STREAMS
from allocator.metrics.collector import GAP, LONGEST_WAIT, label_text
from allocator.stats import Histogram
from tests.unit.metrics.reading import assert_identity, pools, scrape, value

MIB = 1 << 20

NO_BLOCKING_CALL = {
    "cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode",
    "cuStreamIsCapturing", "cuStreamQuery", "cuEventQuery",
}  # fmt: skip
"""What a scrape may ask of a driver."""


def all_different(stats: Stats) -> Stats:
    """The same fields and labels, each number another one."""
    numbers = itertools.count(1000)

    def other(value: Any) -> Any:
        if isinstance(value, Histogram):
            return Histogram(counts={bound: next(numbers) for bound in value}, sum=float(next(numbers)))
        if isinstance(value, Mapping):
            return {text: next(numbers) for text in value}
        return next(numbers)

    changed = {field.name: other(getattr(stats, field.name)) for field in dataclasses.fields(stats)}
    return dataclasses.replace(stats, **changed)


def test_every_figure_is_the_field_of_its_name(
    gpu: SimDevice, pool: CachingAllocator, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.allocate(1000, stream=Stream(gpu, name="copy")).close()
    stats = all_different(pool.stats(per_stream=True))
    monkeypatch.setattr(pool, "stats", lambda **options: stats)
    register(pool, registry, per_stream=True)
    series = scrape(registry)
    seen = 0
    for spec in (*POOL, *STREAMS):
        expected = getattr(stats, spec.field)
        if isinstance(expected, Histogram):
            running = 0
            for bound, count in expected.items():
                running += count
                le = "+Inf" if bound == math.inf else repr(float(bound))
                assert value(series, f"{spec.name}_bucket", le=le) == running, spec
                seen += 1
            assert value(series, f"{spec.name}_count") == running
            assert value(series, f"{spec.name}_sum") == expected.sum
            seen += 2
        elif isinstance(expected, Mapping):
            assert spec.label is not None and expected
            for text, number in expected.items():
                assert value(series, spec.name, **{spec.label: text}) == number, spec
                seen += 1
        else:
            assert value(series, spec.name) == expected, spec
            seen += 1
    assert len(series) == seen + 2, "and scrape_failures_total and build_info"


def test_a_scrape_reads_what_is_so_now(gpu: SimDevice, pool: CachingAllocator, registry: CollectorRegistry) -> None:
    register(pool, registry)
    a, b = Stream(gpu), Stream(gpu)
    held = pool.allocate(700, stream=a)
    gone = pool.allocate(3 * MIB, stream=b)
    gpu.hold(b)
    gpu.launch(b, writes=[gone])
    gone.close()
    series = scrape(registry)
    assert value(series, "allocated_bytes") == 1024
    assert value(series, "requested_bytes") == 700
    assert value(series, "in_flight_bytes") == 3 * MIB
    assert value(series, "allocations_total", reuse="new_memory") == 2
    assert value(series, "scrape_failures_total") == 0
    assert_identity(series)
    held.close()
    gpu.resume(b)
    gpu.run_until_idle()
    series = scrape(registry)
    assert (value(series, "allocated_bytes"), value(series, "in_flight_bytes")) == (0, 0)
    assert value(series, "idle_bytes") == value(series, "reserved_bytes") == pool.stats().reserved_bytes
    assert value(series, "frees_total", kind="same_stream") == 2
    assert_identity(series)


def test_histograms_count_upwards_to_infinity(
    gpu: SimDevice, pool: CachingAllocator, registry: CollectorRegistry
) -> None:
    register(pool, registry)
    s = Stream(gpu)
    for nbytes in (1, 512, 513, 40_000, 5 * MIB):
        pool.allocate(nbytes, stream=s).close()
    buckets = {
        dict(labels)["le"]: n
        for (name, labels), n in scrape(registry).items()
        if name == "weir_request_size_bytes_bucket"
    }
    assert list(buckets)[-1] == "+Inf" and len(buckets) == 15
    assert buckets["512.0"] == 2 and buckets["2048.0"] == 3 and buckets["+Inf"] == 5
    assert sorted(buckets.values()) == list(buckets.values())
    series = scrape(registry)
    assert value(series, "request_size_bytes_count") == 5
    assert value(series, "request_size_bytes_sum") == 1 + 512 + 513 + 40_000 + 5 * MIB


def test_build_info_says_what_runs(gpu: SimDevice, registry: CollectorRegistry) -> None:
    with CachingAllocator(gpu, config=Config(backing="malloc"), name="main") as pool:
        register(pool, registry)
        found = value(
            scrape(registry),
            "build_info",
            version=allocator.__version__,
            python=platform.python_version(),
            accelerated=str(COMPILED).lower(),
            backing="malloc",
        )
    assert found == 1


def test_free_memory_of_the_device_is_left_out_until_the_driver_was_asked(
    gpu: SimDevice, pool: CachingAllocator, registry: CollectorRegistry
) -> None:
    register(pool, registry)
    assert value(scrape(registry), "device_free_bytes") is None
    pool.allocate(1, stream=Stream(gpu)).close()
    assert value(scrape(registry), "device_free_bytes") == pool.stats().device_free_bytes > 0


def test_a_scrape_makes_no_driver_call_that_can_block(
    gpu: SimDevice, pool: CachingAllocator, registry: CollectorRegistry
) -> None:
    register(pool, registry, per_stream=True)
    streams = [Stream(gpu) for _ in range(3)]
    for s in streams:
        gone = pool.allocate(MIB, stream=s)
        gpu.hold(s)
        gpu.launch(s, writes=[gone])
        gone.close()
    before, now = Counter(gpu.calls), gpu.now_ns
    scrape(registry)
    made = Counter(gpu.calls) - before
    assert made["cuStreamQuery"] >= 1
    assert set(made) <= NO_BLOCKING_CALL, made
    assert gpu.now_ns == now
    for s in streams:
        gpu.resume(s)


def test_describe_looks_at_no_pool(pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = AllocatorCollector(pool)

    def no(**_: object) -> Stats:
        raise AssertionError("a pool was read")

    monkeypatch.setattr(pool, "stats", no)
    with collector._lock:
        registry = CollectorRegistry(auto_describe=True)
        registry.register(collector)


def test_a_reader_that_stops_half_way_holds_no_pool(gpu: SimDevice) -> None:
    pool = CachingAllocator(gpu, config=Config(), name="main")
    ref = weakref.ref(pool)
    families = iter(AllocatorCollector(pool).collect())
    next(families)
    del pool
    gc.collect()
    assert ref() is None
    assert next(families).samples


# -- one pool that cannot be read ----------------------------------------------------------------------


def test_a_pool_that_cannot_be_read_costs_the_others_nothing(
    gpu: SimDevice,
    pool: CachingAllocator,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with CachingAllocator(gpu, config=Config(), name="broken") as broken:
        register(broken, registry)
        register(pool, registry)

        def fails(**_: object) -> Stats:
            raise DriverError("cuStreamQuery", "CUDA_ERROR_UNKNOWN", "for the test")

        with caplog.at_level(logging.WARNING, "allocator.metrics"), monkeypatch.context() as patch:
            patch.setattr(broken, "stats", fails)
            scrape(registry)
            series = scrape(registry)
        assert value(series, "reserved_bytes", "broken") is None
        assert value(series, "scrape_failures_total", "broken") == 2
        assert value(series, "scrape_failures_total") == 0
        assert value(series, "reserved_bytes") == 0
        assert [r.getMessage() for r in caplog.records if "'broken' is left out" in r.getMessage()] == [
            "pool 'broken' is left out of this scrape, and counted: "
            "cuStreamQuery failed: CUDA_ERROR_UNKNOWN (for the test)"
        ]
        series = scrape(registry)  # it has recovered
        assert value(series, "reserved_bytes", "broken") == 0
        assert value(series, "scrape_failures_total", "broken") == 2


def test_r11_a_lost_device_keeps_its_last_figures_and_the_others_theirs(
    pool: CachingAllocator, registry: CollectorRegistry
) -> None:
    dead = SimDevice(ordinal=1)
    lost = CachingAllocator(dead, config=Config(), name="lost")
    register(lost, registry)
    register(pool, registry)
    s = Stream(dead)
    a = lost.allocate(MIB, stream=s)
    dead.hold(s)
    dead.launch(s, writes=[a])
    a.close()
    dead.fail("cuStreamQuery", error="CUDA_ERROR_ILLEGAL_ADDRESS", sticky=True)
    for _ in range(2):
        series = scrape(registry)
        assert value(series, "reserved_bytes") == 0
        assert value(series, "in_flight_bytes", "lost", "sim:1") == MIB
        assert_identity(series, "lost", "sim:1")
    with pytest.raises(DriverError):
        lost.allocate(MIB, stream=s)


# -- streams ---------------------------------------------------------------------------------------------


def test_streams_are_told_only_where_asked_for_and_add_up(
    gpu: SimDevice, pool: CachingAllocator, registry: CollectorRegistry
) -> None:
    register(pool, registry)
    copy, compute = Stream(gpu, name="copy"), Stream(gpu)
    held = pool.allocate(MIB, stream=copy)
    gone = pool.allocate(3 * MIB, stream=compute)
    gpu.hold(compute)
    gpu.launch(compute, writes=[gone])
    gone.close()
    assert not [name for name, _ in scrape(registry) if name.startswith("weir_stream_") and name.endswith("_bytes")]
    register(pool, registry, per_stream=True)
    register(pool, registry)  # does not turn it off again
    series = scrape(registry)
    assert value(series, "stream_allocated_bytes", stream="copy") == MIB
    assert value(series, "stream_in_flight_bytes", stream=str(compute.line.number)) == 3 * MIB
    for kind in ("allocated", "in_flight", "idle"):
        parts = [n for (name, _), n in series.items() if name == f"weir_stream_{kind}_bytes"]
        assert sum(parts) == value(series, f"{kind}_bytes")
    gpu.resume(compute)
    held.close()


def test_two_hundred_streams_are_at_most_thirty_three_and_all_series_at_most_four_hundred(
    gpu: SimDevice, pool: CachingAllocator, registry: CollectorRegistry
) -> None:
    register(pool, registry, per_stream=True)
    streams = [Stream(gpu, name=f"worker {n}") for n in range(200)]
    held = [pool.allocate(1 + 512 * n, stream=s) for n, s in enumerate(streams)]
    series = scrape(registry)
    names = {dict(labels)["stream"] for name, labels in series if name == "weir_stream_allocated_bytes"}
    assert len(names) == 33 and {"other", "worker 199"} <= names
    assert len(series) <= 400
    total = sum(n for (name, _), n in series.items() if name == "weir_stream_allocated_bytes")
    assert total == value(series, "allocated_bytes") == sum(a.size for a in held)


def test_streams_of_one_name_are_one_series(
    gpu: SimDevice, pool: CachingAllocator, registry: CollectorRegistry
) -> None:
    register(pool, registry, per_stream=True)
    held = [pool.allocate(MIB, stream=Stream(gpu, name=name)) for name in ("a\nb", "a\tb", "a?b", "other")]
    series = scrape(registry)
    assert value(series, "stream_allocated_bytes", stream="a?b") == 3 * MIB
    assert len(held) == 4


# -- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("prefetch", "prefetch"),
        ("", "unnamed"),
        ('quo"te\\', 'quo"te\\'),
        ("two\nlines\r\0", "two?lines??"),
        ("\ud800 half a letter", "? half a letter"),
        ("größe", "größe"),
        ("x" * 50, "x" * 40),
    ],
)
def test_a_label_is_a_name_that_can_be_written(
    gpu: SimDevice, registry: CollectorRegistry, name: str, text: str
) -> None:
    assert label_text(name) == text
    with CachingAllocator(gpu, config=Config(), name=name) as pool:
        register(pool, registry)
        assert pools(scrape(registry)) == {(text, "sim:0")}


def test_no_label_holds_an_address_or_a_handle(
    gpu: SimDevice, pool: CachingAllocator, registry: CollectorRegistry
) -> None:
    register(pool, registry, per_stream=True)
    s = Stream(gpu)
    a = pool.allocate(MIB, stream=s)
    texts = {text for _, labels in scrape(registry) for _, text in labels}
    assert not texts & {str(a.ptr), hex(a.ptr), str(s.handle), hex(s.handle)}


# -- how often -------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only where somebody sleeps, or says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now += seconds


def test_scrapes_are_spaced_and_a_seldom_one_never_waits(
    pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("allocator.metrics.collector.time", clock)
    collector = AllocatorCollector(pool)
    for _ in range(3):
        list(collector.collect())
        clock.now += 1.0
    assert clock.slept == []
    for _ in range(3):
        list(collector.collect())
    assert clock.slept == [GAP, GAP]


def test_slow_scrapes_leave_the_program_time_and_none_waits_for_ever(
    pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("allocator.metrics.collector.time", clock)
    stats = pool.stats()
    took = 0.2

    def slowly(**_: object) -> Stats:
        clock.now += took
        return stats

    monkeypatch.setattr(pool, "stats", slowly)
    collector = AllocatorCollector(pool)
    list(collector.collect())  # reserves its time before it knows how long it takes
    list(collector.collect())
    list(collector.collect())
    assert clock.slept == [0.2], "twice as long as the one before, less the time that it took"
    took = 60.0
    list(collector.collect())
    list(collector.collect())
    list(collector.collect())
    assert max(clock.slept) <= LONGEST_WAIT


def test_a_waiting_scrape_holds_nothing(pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("allocator.metrics.collector.time", clock)
    collector = AllocatorCollector(pool)
    list(collector.collect())
    waited: list[bool] = []

    def sleep(seconds: float) -> None:
        waited.append(in_other_thread(lambda: collector.pools == [pool]))  # takes the lock

    monkeypatch.setattr(clock, "sleep", sleep)
    assert list(collector.collect())
    assert waited == [True]


def in_other_thread(work: Callable[[], bool]) -> bool:
    """What `work` answers there."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    thread.join()
    return answers[0]

"""Pools join and leave: which registry, which names, which process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Gauge

import allocator
from allocator import CachingAllocator, Config, ForkError, PoolClosed, SimDevice
from allocator.metrics import AllocatorCollector, MultiprocessModeError, register, unregister
from tests.unit.metrics.reading import pools, scrape, value

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def test_registering_twice_is_harmless(pool: CachingAllocator, registry: CollectorRegistry) -> None:
    collector = register(pool, registry)
    assert register(pool, registry) is collector
    assert collector.pools == [pool]
    assert pools(scrape(registry)) == {("main", "sim:0")}


def test_the_default_registry_is_prometheus_clients(pool: CachingAllocator) -> None:
    collector = register(pool)
    try:
        assert REGISTRY.get_sample_value("weir_limit_bytes", {"pool": "main", "device": "sim:0"}) == 0
    finally:
        REGISTRY.unregister(collector)


def test_registries_are_apart(gpu: SimDevice, pool: CachingAllocator, registry: CollectorRegistry) -> None:
    with CachingAllocator(gpu, config=Config(), name="second") as second:
        private = CollectorRegistry()
        register(pool, registry)
        register(second, private)
        assert pools(scrape(registry)) == {("main", "sim:0")}
        assert pools(scrape(private)) == {("second", "sim:0")}


def test_a_collector_for_private_use_takes_several_pools(gpu: SimDevice, pool: CachingAllocator) -> None:
    with CachingAllocator(gpu, config=Config(), name="second") as second:
        registry = CollectorRegistry()
        registry.register(AllocatorCollector(pool, second))
        assert pools(scrape(registry)) == {("main", "sim:0"), ("second", "sim:0")}


def test_a_second_collector_in_one_registry_is_refused_with_the_way_out(
    pool: CachingAllocator, registry: CollectorRegistry
) -> None:
    registry.register(AllocatorCollector(pool))
    with pytest.raises(ValueError, match=r"another collector of these metrics .*unregister that one, or add"):
        register(pool, registry)


def test_a_collector_that_was_unregistered_comes_back(pool: CachingAllocator, registry: CollectorRegistry) -> None:
    registry.unregister(register(pool, registry))
    assert scrape(registry) == {}
    register(pool, registry)
    assert pools(scrape(registry)) == {("main", "sim:0")}


def test_other_metrics_of_the_registry_stay(pool: CachingAllocator, registry: CollectorRegistry) -> None:
    Gauge("mine", "Of the program.", registry=registry).set(3)
    register(pool, registry)
    assert scrape(registry)["mine", ()] == 3


def test_a_pool_can_be_taken_out(pool: CachingAllocator, registry: CollectorRegistry) -> None:
    unregister(pool, registry)  # was never in
    register(pool, registry)
    unregister(pool, registry)
    unregister(pool, registry)
    assert scrape(registry) == {}
    register(pool, registry)
    assert pools(scrape(registry)) == {("main", "sim:0")}


def test_only_open_pools_are_taken(gpu: SimDevice, registry: CollectorRegistry) -> None:
    pool = CachingAllocator(gpu, config=Config(), name="main")
    pool.close()
    with pytest.raises(PoolClosed, match="register a new one"):
        register(pool, registry)
    with pytest.raises(TypeError, match="not from SimDevice"):
        register(gpu, registry)  # type: ignore[arg-type]
    assert scrape(registry) == {}


# -- names -----------------------------------------------------------------------------------------------


def test_pools_of_one_name_are_told_apart_and_keep_their_labels(gpu: SimDevice, registry: CollectorRegistry) -> None:
    first, second, third = (CachingAllocator(gpu, config=Config(limit=n << 20), name="main") for n in (10, 20, 30))
    for pool in (first, second, third, second):
        register(pool, registry)
    series = scrape(registry)
    assert [value(series, "limit_bytes", name) for name in ("main", "main#2", "main#3")] == [
        10 << 20,
        20 << 20,
        30 << 20,
    ]
    first.close()
    series = scrape(registry)
    assert pools(series) == {("main#2", "sim:0"), ("main#3", "sim:0")}
    assert value(series, "limit_bytes", "main#2") == 20 << 20
    with CachingAllocator(gpu, config=Config(), name="main") as again:
        register(again, registry)
        assert value(scrape(registry), "limit_bytes", "main") == 0
    second.close()
    third.close()
    assert scrape(registry) == {}


def test_the_number_fits_behind_a_long_name_and_beside_a_name_that_looks_like_it(
    gpu: SimDevice, registry: CollectorRegistry
) -> None:
    names = ["x" * 40, "x" * 40, "x" * 38 + "#2", "x" * 38 + "#3"]
    made = [CachingAllocator(gpu, config=Config(), name=name) for name in names]
    for pool in made:
        register(pool, registry)
    found = pools(scrape(registry))
    assert len(found) == 4 and all(len(name) == 40 for name, _ in found)
    for pool in made:
        pool.close()


def test_pools_of_one_name_on_two_devices_need_no_number(registry: CollectorRegistry) -> None:
    made = [CachingAllocator(SimDevice(ordinal=n), config=Config(), name="main") for n in (0, 1)]
    for pool in made:
        register(pool, registry)
    assert pools(scrape(registry)) == {("main", "sim:0"), ("main", "sim:1")}


def test_a_pool_that_dies_leaves_and_is_not_kept_alive(gpu: SimDevice, registry: CollectorRegistry) -> None:
    pool = CachingAllocator(gpu, config=Config(), name="main")
    ref = weakref.ref(pool)
    register(pool, registry)
    scrape(registry)
    del pool
    gc.collect()
    assert ref() is None
    assert scrape(registry) == {}


def test_a_registry_that_dies_takes_its_collector_along(pool: CachingAllocator) -> None:
    registry = CollectorRegistry()
    ref = weakref.ref(register(pool, registry))
    del registry
    gc.collect()
    assert ref() is None


def test_threads_that_register_at_once_make_one_collector(gpu: SimDevice, registry: CollectorRegistry) -> None:
    made = [CachingAllocator(gpu, config=Config(), name="main") for _ in range(8)]
    start = threading.Barrier(8)
    found: list[AllocatorCollector] = []

    def body(pool: CachingAllocator) -> None:
        start.wait()
        found.append(register(pool, registry))

    threads = [threading.Thread(target=body, args=(pool,)) for pool in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(collector) for collector in found}) == 1
    assert len(pools(scrape(registry))) == 8


# -- processes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"])
def test_s30_multi_process_mode_is_refused_with_the_way_out(
    pool: CachingAllocator, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "")
    with pytest.raises(MultiprocessModeError, match="Give each process one port of its own") as caught:
        register(pool, registry)
    assert variable in str(caught.value) and "own_port=True" in str(caught.value)
    with pytest.raises(MultiprocessModeError, match="Give each process one port of its own"):
        AllocatorCollector(pool)
    assert scrape(registry) == {}
    register(pool, registry, own_port=True)
    assert pools(scrape(registry)) == {("main", "sim:0")}


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_s30_a_forked_child_exports_its_own_pools_only(pool: CachingAllocator, registry: CollectorRegistry) -> None:
    collector = register(pool, registry)
    with collector._lock:  # as if a thread of the parent were inside
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert scrape(registry) == {}
                try:
                    register(pool, registry)
                except ForkError:
                    pass
                else:
                    raise AssertionError("a parent's pool was taken")
                mine = CachingAllocator(SimDevice(), config=Config(), name="child")
                assert register(mine, registry) is collector
                assert pools(scrape(registry)) == {("child", "sim:0")}
                status = 0
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pools(scrape(registry)) == {("main", "sim:0")}


def test_the_module_is_an_attribute_and_costs_nothing_before() -> None:
    code = (
        "import sys, allocator\n"
        "assert 'prometheus_client' not in sys.modules\n"
        "pool = allocator.CachingAllocator(allocator.SimDevice(), config=allocator.Config())\n"
        "allocator.metrics.register(pool)\n"
        "import prometheus_client\n"
        "assert b'weir_reserved_bytes{' in prometheus_client.generate_latest()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert set(allocator.metrics.__all__) >= {"AllocatorCollector", "register"}

"""S15, S27 to S30 as a scraper sees them: load, garbage collection, names, streams that go, processes."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from allocator import Allocation, CachingAllocator, OutOfMemoryError, SimDevice, Stream
from allocator.metrics import AllocatorCollector, MultiprocessModeError, register
from tests.scenarios.lab import KIB, MIB, Lab, in_thread, used

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.fixture(autouse=True)
def single_process_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def small_thresholds() -> Iterator[None]:
    """The garbage collector runs at nearly every allocation of an object."""
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


class Scrape:
    """One scrape, written out and read back; every series once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(generate_latest(registry).decode()):
            for sample in family.samples:
                series = (sample.name, frozenset(sample.labels.items()))
                assert series not in self.samples, f"{series} appears twice"
                self.samples[series] = sample.value

    def __call__(self, name: str, pool: str, **labels: str) -> float:
        """One value of a pool on sim:0."""
        return self.samples[f"weir_{name}", frozenset({"pool": pool, "device": "sim:0", **labels}.items())]

    def pools(self) -> list[str]:
        """The names of the pools."""
        return sorted({dict(labels)["pool"] for _, labels in self.samples})

    def streams(self, figure: str = "allocated") -> dict[str, float]:
        """One of the figures by stream."""
        wanted = f"weir_stream_{figure}_bytes"
        return {dict(labels)["stream"]: n for (name, labels), n in self.samples.items() if name == wanted}

    def check(self, pool: str) -> None:
        """The identity, and what must agree with it."""
        parts = [self(f"{kind}_bytes", pool) for kind in ("allocated", "in_flight", "idle", "private")]
        assert min(parts) >= 0
        assert self("reserved_bytes", pool) == sum(parts)
        assert self("requested_bytes", pool) <= self("allocated_bytes", pool)
        assert self("releasable_bytes", pool) + self("stranded_bytes", pool) == self("idle_bytes", pool)
        assert self("request_size_bytes_count", pool) == self.total("allocations", pool)
        live = self("blocks", pool, state="live")
        assert live == self.total("allocations", pool) - self.total("frees", pool)

    def total(self, counter: str, pool: str) -> float:
        """A labelled counter's sum."""
        return sum(
            n
            for (name, labels), n in self.samples.items()
            if name == f"weir_{counter}_total" and ("pool", pool) in labels
        )


# -- S15 ----------------------------------------------------------------------------------------------


def test_s15_every_scrape_is_consistent_while_threads_allocate_and_trim(lab: Lab, registry: CollectorRegistry) -> None:
    gpu = lab.gpu(memory=512 * MIB)
    pool = lab.pool(gpu, name="main", limit=256 * MIB, wait_timeout=0.01, seal_frees=8)
    register(pool, registry, per_stream=True)
    streams = [Stream(gpu, name=f"s{n}") for n in range(3)]
    errors: list[BaseException] = []
    stop = threading.Event()
    scrapes = [0, 0]

    def worker(seed: int) -> None:
        draw = random.Random(seed)
        live: list[Allocation] = []
        while not stop.is_set():
            try:
                live.append(used(pool, draw.choice(streams), draw.choice([700, 60 * KIB, MIB, 3 * MIB])))
            except OutOfMemoryError:
                live.clear()
            if len(live) > 20:
                del live[draw.randrange(len(live))]
            if draw.random() < 0.01:
                pool.trim()

    def scraper(me: int) -> None:
        before = 0.0
        for _ in range(40):
            scrape = Scrape(registry)
            scrape.check("main")
            for figure in ("allocated", "in_flight", "idle"):
                assert sum(scrape.streams(figure).values()) == scrape(f"{figure}_bytes", "main")
            assert scrape.total("allocations", "main") >= before
            before = scrape.total("allocations", "main")
            scrapes[me] += 1

    def guarded(body: object, argument: int) -> None:
        try:
            body(argument)  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=guarded, args=(worker, seed), daemon=True) for seed in range(2)]
    scrapers = [threading.Thread(target=guarded, args=(scraper, me), daemon=True) for me in range(2)]
    for thread in (*workers, *scrapers):
        thread.start()
    for thread in scrapers:
        thread.join(120)
    stop.set()
    for thread in workers:
        thread.join(60)
    assert not errors, errors
    assert scrapes == [40, 40]
    assert Scrape(registry).total("allocations", "main") == sum(pool.stats().allocations.values()) > 0


# -- S27 ----------------------------------------------------------------------------------------------


def _rubbish(pool: CachingAllocator, stream: Stream, n: int) -> None:
    """Arrays in unreachable cycles, which only the garbage collector finds."""
    for _ in range(n):
        cycle: list[object] = [used(pool, stream, 4 * KIB)]
        cycle.append(cycle)


def test_s27_a_collection_inside_a_scrapes_driver_call_frees_and_both_finish(
    gpu: SimDevice, lab: Lab, registry: CollectorRegistry
) -> None:
    pool = lab.pool(gpu, name="main")
    register(pool, registry, per_stream=True)
    a, b = Stream(gpu), Stream(gpu)
    gc.collect()
    gc.disable()
    try:
        _rubbish(pool, a, 50)
        used(pool, b, MIB).close()  # so that the scrape has something to ask the driver
        collected: list[int] = []

        def hook(call: str) -> None:
            if not collected:
                collected.append(gc.collect())

        gpu.before_call = hook
        in_thread(lambda: Scrape(registry).check("main"))
        gpu.before_call = None
        assert collected and collected[0] >= 50
    finally:
        gc.enable()
    scrape = Scrape(registry)
    scrape.check("main")
    assert scrape("allocated_bytes", "main") == 0
    assert scrape.total("frees", "main") == 51


def test_s27_a_collection_at_any_point_of_a_scrape_frees_and_both_finish(
    gpu: SimDevice, lab: Lab, registry: CollectorRegistry, small_thresholds: None
) -> None:
    """Also under the pool's lock, and while samples are made and written."""
    pool = lab.pool(gpu, name="main")
    register(pool, registry, per_stream=True)
    streams = [Stream(gpu) for _ in range(2)]

    def body() -> None:
        for n in range(20):
            _rubbish(pool, streams[n % 2], 3)
            Scrape(registry).check("main")

    in_thread(body, timeout_s=120)
    gc.collect()
    scrape = Scrape(registry)
    scrape.check("main")
    assert scrape("allocated_bytes", "main") == 0
    assert scrape.total("frees", "main") == 60


def test_s27_a_pool_that_the_collector_finds_in_the_middle_of_a_scrape_is_gone_at_the_next(
    gpu: SimDevice, lab: Lab, registry: CollectorRegistry
) -> None:
    pool, doomed = lab.pool(gpu, name="main"), lab.pool(gpu, name="doomed")
    lab.forget(doomed)
    register(pool, registry)
    register(doomed, registry)
    s = Stream(gpu)
    used(pool, s, MIB).close()
    cycle: list[object] = [doomed, used(doomed, s, MIB)]
    cycle.append(cycle)
    del doomed, cycle

    def hook(call: str) -> None:
        gc.collect()

    gpu.before_call = hook
    in_thread(lambda: Scrape(registry).check("main"))
    gpu.before_call = None
    gc.collect()
    assert Scrape(registry).pools() == ["main"]


# -- S28 ----------------------------------------------------------------------------------------------


def test_s28_two_pools_are_told_apart_and_every_series_appears_once(
    gpu: SimDevice, lab: Lab, registry: CollectorRegistry
) -> None:
    pools = [lab.pool(gpu, name=name) for name in ("train", "serve", "serve")]
    for pool in (*pools, *pools):
        register(pool, registry)
    s = Stream(gpu)
    held = [used(pool, s, MIB * (n + 1)) for n, pool in enumerate(pools)]
    scrape = Scrape(registry)
    assert scrape.pools() == ["serve", "serve#2", "train"]
    assert [scrape("allocated_bytes", name) for name in ("train", "serve", "serve#2")] == [MIB, 2 * MIB, 3 * MIB]
    assert len(held) == 3


def test_s28_a_pool_made_again_under_its_name_takes_its_place(
    gpu: SimDevice, lab: Lab, registry: CollectorRegistry
) -> None:
    s = Stream(gpu)
    for n in range(3):
        pool = lab.pool(gpu, name="main")
        register(pool, registry)
        held = used(pool, s, MIB << n)
        scrape = Scrape(registry)
        assert scrape.pools() == ["main"]
        assert scrape("allocated_bytes", "main") == MIB << n
        pool.close()  # `held` is alive, and still its pool is gone
        assert Scrape(registry).pools() == []
        del held


def test_s28_registering_twice_and_on_private_registries_does_not_raise(gpu: SimDevice, lab: Lab) -> None:
    pool = lab.pool(gpu, name="main")
    for registry in (CollectorRegistry(auto_describe=True), CollectorRegistry()):
        for _ in range(2):
            register(pool, registry)
        assert Scrape(registry).pools() == ["main"]
    private = CollectorRegistry(auto_describe=True)
    private.register(AllocatorCollector(pool))
    assert Scrape(private).pools() == ["main"]


# -- S29 ----------------------------------------------------------------------------------------------


def test_s29_thousands_of_streams_come_and_go_and_the_series_stay_few(
    gpu: SimDevice, lab: Lab, registry: CollectorRegistry
) -> None:
    pool = lab.pool(gpu, name="main")
    register(pool, registry, per_stream=True)
    lasting = Stream(gpu, name="lasting")
    held = used(pool, lasting, MIB)
    most, allocated = 0, 0.0
    for n in range(2000):
        s = Stream(gpu, name=f"request {n}")
        used(pool, s, 4 * KIB).close()
        s.close()
        if n % 200 == 199:
            gpu.run_until_idle()
            scrape = Scrape(registry)
            most = max(most, len(scrape.samples))
            assert "lasting" in scrape.streams()
            assert set(scrape.streams()) <= {"lasting", "other"}
            assert scrape.total("allocations", "main") == n + 2
            assert scrape.total("allocation_bytes", "main") > allocated
            allocated = scrape.total("allocation_bytes", "main")
            scrape.check("main")
    assert most <= 400
    assert not held.closed


def test_s29_a_gone_streams_figures_go_and_the_totals_stay(
    gpu: SimDevice, lab: Lab, registry: CollectorRegistry
) -> None:
    pool = lab.pool(gpu, name="main")
    register(pool, registry, per_stream=True)
    s = Stream(gpu, name="short")
    gone = used(pool, s, MIB)
    before = Scrape(registry)
    assert before.streams()["short"] == MIB
    gone.close()
    s.close()
    gpu.run_until_idle()
    after = Scrape(registry)
    assert "short" not in {**after.streams(), **after.streams("in_flight"), **after.streams("idle")}
    for counter in ("allocations", "allocation_bytes", "frees", "growths"):
        assert after.total(counter, "main") >= before.total(counter, "main"), counter
    assert sum(after.streams("idle").values()) == after("idle_bytes", "main") > 0


# -- S30 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"])
def test_s30_multi_process_mode_is_refused_at_registration(
    pool: CachingAllocator, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "/nowhere")
    with pytest.raises(MultiprocessModeError, match=rf"(?s){variable} is set.*one port of its own"):
        register(pool, registry)
    assert Scrape(registry).pools() == []


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("scraping", [False, True], ids=["at rest", "while a thread scrapes"])
def test_s30_a_forked_worker_does_not_repeat_its_parents_counts(
    gpu: SimDevice, lab: Lab, registry: CollectorRegistry, scraping: bool
) -> None:
    pool = lab.pool(gpu, name="main")
    register(pool, registry)
    s = Stream(gpu)
    held = used(pool, s, MIB)
    used(pool, s, MIB).close()
    inside, go_on = threading.Event(), threading.Event()

    def hook(call: str) -> None:
        inside.set()
        go_on.wait(20)

    thread = threading.Thread(target=lambda: Scrape(registry), daemon=True)
    if scraping:
        gpu.before_call = hook
        thread.start()
        assert inside.wait(20)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            gpu.before_call = None
            if Scrape(registry).samples == {}:
                status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    go_on.set()
    if scraping:
        thread.join(20)
        gpu.before_call = None
    assert status == 0
    scrape = Scrape(registry)
    assert scrape("allocated_bytes", "main") == MIB
    scrape.check("main")
    assert not held.closed

"""The list of metrics: what is promised to dashboards, and what `Stats` has."""

from __future__ import annotations

from dataclasses import fields

import pytest
from prometheus_client import CollectorRegistry

from allocator import CachingAllocator, SimDevice, Stats, Stream
from allocator.metrics import AllocatorCollector, register
from allocator.metrics.catalogue import ALL, BUILD_INFO, POOL, SCRAPE_FAILURES, STREAMS, Spec, Type
from tests.unit.metrics.reading import scrape

PROMISED = """
    gauge      allocated_bytes requested_bytes reserved_bytes in_flight_bytes idle_bytes private_bytes
    gauge      largest_free_block_bytes releasable_bytes stranded_bytes
    gauge      peak_allocated_bytes peak_reserved_bytes peak_in_flight_bytes limit_bytes
    gauge      device_free_bytes device_size_bytes external_fragmentation_ratio internal_fragmentation_ratio
    gauge      blocks{state} segments streams device_lost poisoned_streams orphaned_bytes events{state} pending_frees
    gauge      oldest_in_flight_seconds
    counter    allocations_total{reuse} allocation_bytes_total{reuse} frees_total{kind}
    counter    growths_total growth_bytes_total releases_total{reason} release_bytes_total{reason}
    counter    page_moves_total page_move_bytes_total out_of_memory_total out_of_memory_retries_total{step}
    counter    stream_waits_total event_records_total event_queries_total host_synchronizations_total
    counter    block_splits_total block_merges_total driver_seconds_total{call} scrape_failures_total
    histogram  request_size_bytes in_flight_seconds growth_seconds
    gauge      stream_allocated_bytes{stream} stream_in_flight_bytes{stream} stream_idle_bytes{stream}
    info       build_info
"""

LABEL_VALUES = {
    "weir_allocations_total": {
        "same_stream", "event_dependency", "opportunistic", "internal_dependency", "new_memory",
    },
    "weir_frees_total": {"same_stream", "cross_stream"},
    "weir_releases_total": {"trim", "limit", "out_of_memory", "quiet", "pressure", "close"},
    "weir_out_of_memory_retries_total": {
        "internal_dependency", "move", "release", "host_wait", "callback", "collect",
    },
    "weir_blocks": {"live", "retired", "idle"},
    "weir_events": {"idle", "in_use"},
}  # fmt: skip


def promised() -> dict[str, tuple[str, str | None]]:
    """Name -> type and the label beside pool and device."""
    found: dict[str, tuple[str, str | None]] = {}
    for line in PROMISED.split("\n"):
        kind, *names = line.split() or [""]
        for name in names:
            bare, _, label = name.rstrip("}").partition("{")
            found[bare] = (kind, label or None)
    return found


def test_names_types_and_labels_are_those_promised() -> None:
    assert {spec.name: (spec.type.value, spec.label) for spec in ALL} == promised()
    assert len({spec.family for spec in ALL}) == len(ALL)


def test_every_field_of_stats_is_exported_and_nothing_else() -> None:
    assert {spec.field for spec in (*POOL, *STREAMS)} == {field.name for field in fields(Stats)}
    assert {*ALL} - {*POOL, *STREAMS} == {SCRAPE_FAILURES, BUILD_INFO}


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_each_follows_the_rules_of_naming(spec: Spec) -> None:
    assert spec.name.endswith("_total") == (spec.type is Type.COUNTER)
    assert spec.name.endswith("_info") == (spec.type is Type.INFO)
    assert not spec.family.endswith(("_sum", "_count", "_bucket", "_created"))
    assert spec.help[0].isupper() or spec.help[0].isdigit()
    assert spec.help.endswith(".") and "\n" not in spec.help
    assert spec.unit == "" or spec.family.endswith(f"_{spec.unit}")
    for word in ("bytes", "seconds", "ratio"):
        assert word not in spec.family or spec.unit == word or spec.type is Type.COUNTER


def test_a_collector_describes_all_of_it_without_samples() -> None:
    described = list(AllocatorCollector().describe())
    assert [(f.name, f.type, f.unit, f.samples) for f in described] == [
        (spec.family, spec.type.value, spec.unit, []) for spec in ALL
    ]


def test_a_scrape_has_every_family_as_it_is_described(
    gpu: SimDevice, pool: CachingAllocator, registry: CollectorRegistry
) -> None:
    pool.allocate(1000, stream=Stream(gpu)).close()
    collector = register(pool, registry, per_stream=True)
    collected = [(f.name, f.type, f.unit, f.documentation) for f in collector.collect()]
    assert collected == [(f.name, f.type, f.unit, f.documentation) for f in collector.describe()]


def test_every_series_has_pool_and_device_and_only_the_labels_listed(
    gpu: SimDevice, pool: CachingAllocator, registry: CollectorRegistry
) -> None:
    pool.allocate(1000, stream=Stream(gpu)).close()
    collector = register(pool, registry, per_stream=True)
    for family, spec in zip(collector.collect(), ALL, strict=True):
        for sample in family.samples:
            more = {"le"} if sample.name.endswith("_bucket") else set()
            if spec is BUILD_INFO:
                more = {"version", "python", "accelerated", "backing"}
            assert set(sample.labels) == {*spec.labels, *more}


@pytest.mark.parametrize("name", LABEL_VALUES)
def test_a_label_has_all_its_values_from_the_start(
    pool: CachingAllocator, registry: CollectorRegistry, name: str
) -> None:
    register(pool, registry)
    (label,) = {label for _, label in (promised()[name.removeprefix("weir_")],)}
    found = {dict(labels)[str(label)] for series, labels in scrape(registry) if series == name}
    assert found == LABEL_VALUES[name]

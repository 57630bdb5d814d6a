"""The written form: both text formats are read back, and Prometheus's own checker has nothing to say."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition, parser
from prometheus_client.parser import text_string_to_metric_families as parse_text

from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.metrics import register
from allocator.metrics.catalogue import ALL, Type

generate_openmetrics: Any = exposition.generate_latest  # has no types
parse_openmetrics: Any = parser.text_string_to_metric_families


@pytest.fixture
def filled(gpu: SimDevice, pool: CachingAllocator, registry: CollectorRegistry) -> Iterator[CollectorRegistry]:
    """Two pools of one name on two devices, and streams with names that need care."""
    register(pool, registry, per_stream=True)
    streams = [Stream(gpu, name=name) for name in ("copy", 'quo"te\\', "größe")]
    held = []
    for n, stream in enumerate(streams):
        pool.allocate(1000 << n, stream=stream).close()
        held.append(pool.allocate(1000 << n, stream=stream))
    with CachingAllocator(SimDevice(ordinal=1), config=Config(), name="main") as other:
        register(other, registry)
        yield registry
    assert len(held) == 3


def test_prometheus_text_is_read_back(filled: CollectorRegistry) -> None:
    families = {family.name: family for family in parse_text(generate_latest(filled).decode())}
    for spec in ALL:
        gauge = spec.type is Type.INFO  # which this format does not know
        family = families[f"{spec.family}_info" if gauge else spec.family]
        assert family.type == ("gauge" if gauge else spec.type.value)
        assert family.documentation == spec.help
    assert len(families) == len(ALL)
    names = {sample.labels["stream"] for sample in families["weir_stream_allocated_bytes"].samples}
    assert {"copy", 'quo"te\\', "größe"} <= names


def test_openmetrics_text_is_read_back(filled: CollectorRegistry) -> None:
    families = list(parse_openmetrics(generate_openmetrics(filled).decode()))
    assert [(f.name, f.type, f.unit, f.documentation) for f in families] == [
        (spec.family, spec.type.value, spec.unit, spec.help) for spec in ALL
    ]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing (Debian: package prometheus)")
def test_promtool_has_nothing_to_say(filled: CollectorRegistry) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=generate_latest(filled), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

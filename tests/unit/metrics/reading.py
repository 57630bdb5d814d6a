"""What a scrape says, in a shape that tests can compare."""

from __future__ import annotations

from collections import Counter

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and its labels."""


def scrape(registry: CollectorRegistry) -> dict[Series, float]:
    """Every series of one scrape, written out and read again; each once."""
    text = generate_latest(registry).decode()
    found = [
        ((sample.name, tuple(sorted(sample.labels.items()))), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    twice = [series for series, n in Counter(series for series, _ in found).items() if n > 1]
    assert not twice, twice
    explained = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert len(explained) == len(set(explained)), "a family is explained twice"
    return dict(found)


def value(
    series: dict[Series, float], name: str, pool: str = "main", device: str = "sim:0", **labels: str
) -> float | None:
    """One value; None if the series is not there."""
    wanted = {"pool": pool, "device": device, **labels}
    return series.get((f"weir_{name}", tuple(sorted(wanted.items()))))


def pools(series: dict[Series, float]) -> set[tuple[str, str]]:
    """The pools and devices that a scrape speaks of."""
    return {(dict(labels)["pool"], dict(labels)["device"]) for _, labels in series}


def assert_identity(series: dict[Series, float], pool: str = "main", device: str = "sim:0") -> None:
    """reserved = allocated + in flight + idle + private."""
    parts = [value(series, f"{kind}_bytes", pool, device) for kind in ("allocated", "in_flight", "idle", "private")]
    assert value(series, "reserved_bytes", pool, device) == sum(part for part in parts if part is not None)
    assert None not in parts

"""Latencies: exact to 1/32, mergeable, sendable."""

from __future__ import annotations

import doctest
from statistics import quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.stress import histogram, shapes
from allocator.stress.histogram import Latencies, bounds_of, bucket_of, merged

TIMES = st.integers(0, (1 << 62) - 1)


@given(TIMES)
def test_a_bucket_holds_its_values_and_is_never_wider_than_a_32nd(ns: int) -> None:
    low, high = bounds_of(bucket_of(ns))
    assert low <= ns <= high
    assert high - low <= low / 32


@given(TIMES, TIMES)
def test_larger_values_never_come_into_smaller_buckets(one: int, two: int) -> None:
    assert (bucket_of(one) <= bucket_of(two)) or one > two


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=200), st.sampled_from([50, 90, 99, 99.9, 100]))
def test_a_percentile_is_that_of_the_sorted_values_to_a_32nd(times: list[int], percent: float) -> None:
    latencies = Latencies()
    for ns in times:
        latencies.add(ns)
    rank = max(1, -(-len(times) * percent // 100))
    exact = sorted(times)[int(rank) - 1]
    assert exact / 1000 <= latencies.percentile_us(percent) <= min(exact * (1 + 1 / 32), max(times)) / 1000 + 1e-9


@given(st.lists(TIMES), st.lists(TIMES))
def test_merged_histograms_are_the_histogram_of_all(one: list[int], two: list[int]) -> None:
    parts = []
    for times in (one, two, one + two):
        latencies = Latencies()
        for ns in times:
            latencies.add(ns)
        parts.append(latencies)
    both = merged(parts[:2])
    assert both.to_json() == parts[2].to_json() == Latencies.from_json(both.to_json()).to_json()
    assert both.count == len(one) + len(two)


def test_microseconds_are_never_rounded_to_nothing() -> None:
    times = Latencies()
    for ns in (400, 500, 600):
        times.add(ns)
    assert times.mean_us == 0.5 and 0.49 < times.percentile_us(50) < 0.52 and times.most_us == 0.6
    assert quantiles([400, 500, 600], n=2)[0] == 500


def test_without_values_everything_is_nothing() -> None:
    empty = Latencies()
    assert (empty.count, empty.mean_us, empty.percentile_us(99), empty.most_us) == (0, 0.0, 0.0, 0.0)


def test_what_lies_outside_is_counted_at_the_ends() -> None:
    times = Latencies()
    times.add(-5)
    times.add(1 << 70)
    assert times.count == 2 and times.percentile_us(0) == 0.0


@pytest.mark.parametrize("percent", [-1, 101])
def test_a_percentile_beyond_the_ends_is_refused(percent: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 100"):
        Latencies().percentile_us(percent)


@pytest.mark.parametrize(
    "data", [{}, {"buckets": [], "total": 0, "most": 0}, {"buckets": {"99999": 1}, "total": 0, "most": 0}]
)
def test_what_is_no_histogram_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"no latencies|no bucket"):
        Latencies.from_json(data)


@pytest.mark.parametrize("module", [histogram, shapes])
def test_examples_do_what_they_show(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]  # modules

"""A peak never gets lost, whatever the resolution."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.traces.series import Series

SAMPLES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=80)


@given(SAMPLES, st.sampled_from([2, 4, 8, 64]))
def test_each_bucket_holds_the_maximum_of_its_span(steps: list[tuple[int, int, int]], buckets: int) -> None:
    """Against the values at every single nanosecond."""
    series, now = Series(2, buckets=buckets), 0
    exact: list[tuple[set[int], set[int]]] = []  # each nanosecond: every value held in it
    last = (0, 0)
    for gap, first, second in steps:
        now += gap
        while len(exact) <= now:
            exact.append(({last[0]}, {last[1]}))
        begins = len(exact[now][0]) == 1 and exact[now] == ({last[0]}, {last[1]})
        if begins and gap:
            exact[now] = (set(), set())
        exact[now][0].add(first)
        exact[now][1].add(second)
        last = (first, second)
        series.add(now, last)
    points = series.points()
    assert len(points) <= buckets
    for index, (start, values) in enumerate(points):
        assert start == index * series.bucket_ns
        span = exact[start : start + series.bucket_ns]
        for which in (0, 1):
            assert values[which] == max(max(instant[which], default=0) for instant in span)


def test_memory_is_bounded_on_a_long_run() -> None:
    series = Series(1, buckets=16)
    for time in range(0, 10**9, 10**5):
        series.add(time, (time,))
    assert len(series.points()) <= 16
    assert max(values[0] for _, values in series.points()) == 10**9 - 10**5


@pytest.mark.parametrize("buckets", [0, 1, 3])
def test_buckets_merge_in_pairs(buckets: int) -> None:
    with pytest.raises(ValueError, match="even"):
        Series(1, buckets=buckets)

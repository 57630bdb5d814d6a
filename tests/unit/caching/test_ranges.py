"""Address ranges with values, against a plain list of bytes."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import given

from allocator.caching.ranges import Ranges

SPANS = st.tuples(st.integers(0, 40), st.integers(1, 20))


@given(st.lists(st.tuples(SPANS, st.one_of(st.none(), st.integers(0, 3)))), SPANS)
def test_it_knows_what_a_list_of_bytes_knows(
    steps: list[tuple[tuple[int, int], int | None]], asked: tuple[int, int]
) -> None:
    ranges = Ranges[int]()
    naive: list[int | None] = [None] * 64
    for (start, size), value in steps:
        if value is None:
            ranges.forget(start, start + size)
        else:
            ranges.set(start, start + size, value)
        naive[start : start + size] = [value] * size
    start, end = asked[0], asked[0] + asked[1]
    found: list[int | None] = [None] * 64
    for first, last, value in ranges.inside(start, end):
        assert start <= first < last <= end and all(one is None for one in found[first:last])
        found[first:last] = [value] * (last - first)
    assert found[start:end] == naive[start:end]
    gaps = ranges.gaps(start, end)
    assert [i for a, b in gaps for i in range(a, b)] == [i for i in range(start, end) if naive[i] is None]
    assert all(a[1] < b[0] for a, b in itertools.pairwise(gaps))
    ranges.forget(0, 64)
    assert len(ranges) == 0

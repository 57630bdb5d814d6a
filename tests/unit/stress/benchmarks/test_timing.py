"""Medians, ratios within a repeat, quartiles."""

from __future__ import annotations

import pytest

from allocator.stress.benchmarks.timing import compare, quartiles


def test_a_ratio_is_taken_within_each_repeat() -> None:
    found = compare({"a": [10.0, 100.0, 1000.0], "b": [20.0, 300.0, 1000.0]}, "a")
    assert found["b"].ratio == 2.0, "the middle one of 2, 3 and 1"
    assert (found["b"].low, found["b"].high) == (1.5, 2.5)
    assert found["b"].median == 300.0 and found["b"].values == (20.0, 300.0, 1000.0)
    assert found["a"].ratio == 1.0


@pytest.mark.parametrize(
    "values", [{"b": [1.0, 2.0]}, {"a": [], "b": [1.0]}, {"a": [0.0, 1.0], "b": [1.0, 1.0]}, {"a": [1.0], "b": [1, 2]}]
)
def test_without_a_reference_that_took_time_there_is_no_ratio(values: dict[str, list[float]]) -> None:
    found = compare(values, "a")
    assert found["b"].ratio is None and found["b"].low is None and found["b"].high is None
    assert found["b"].median > 0


def test_who_has_no_values_is_not_there_and_notes_stay_with_their_owner() -> None:
    found = compare({"a": [1.0], "b": []}, "a", {"a": {"growths": 3}})
    assert set(found) == {"a"} and found["a"].notes == {"growths": 3}


def test_one_value_is_all_three_quartiles() -> None:
    assert quartiles([4.0]) == (4.0, 4.0, 4.0)
    assert quartiles([1.0, 2.0]) == (1.25, 1.5, 1.75)

"""Integers in order, against a sorted list."""

from __future__ import annotations

import random
from bisect import bisect_left, insort

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.blocks import keys as module
from allocator.blocks.keys import SortedKeys


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "look"]), st.integers(0, 40)), max_size=120))
def test_it_agrees_with_a_sorted_list(steps: list[tuple[str, int]]) -> None:
    _play(steps)


@pytest.mark.parametrize("seed", range(3))
def test_it_agrees_where_there_are_many_lists(seed: int) -> None:
    rng = random.Random(seed)
    _play([("add", rng.randrange(1 << 40)) for _ in range(5 * module.LONGEST)], thinned=seed)


def _play(steps: list[tuple[str, int]], thinned: int | None = None) -> None:
    keys, naive = SortedKeys(), list[int]()

    def look(at: int) -> None:
        behind = naive[bisect_left(naive, at) :]
        assert list(keys.starting_at(at)) == behind
        assert keys.first(at) == (behind[0] if behind else None)
        assert keys.last() == (naive[-1] if naive else None)
        assert len(keys) == len(naive) and bool(keys) == bool(naive)
        keys.check()

    def remove(key: int) -> None:
        keys.remove(key)
        naive.remove(key)

    for what, number in steps:
        if what == "add" and number not in naive[bisect_left(naive, number) :][:1]:
            keys.add(number)
            insort(naive, number)
        elif what == "remove" and naive:
            remove(naive[number % len(naive)])
        elif what == "look":
            look(number)
    look(0)
    if thinned is not None:  # until lists are empty, and then all of them
        middle = naive[len(naive) // 2]
        look(middle)
        look(middle + 1)
        for key in naive[100:-100]:
            remove(key)
        look(0)
        look(middle)
        rng = random.Random(thinned)
        while naive:
            remove(rng.choice(naive))
        look(0)
        keys.add(middle)
        insort(naive, middle)
        look(0)


def test_a_key_that_is_not_there_cannot_be_taken_out() -> None:
    keys = SortedKeys()
    keys.add(1)
    for absent in (0, 2):
        with pytest.raises(ValueError, match="not here"):
            keys.remove(absent)

"""Where growth puts its memory, and what holes are left."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.blocks import Block, Space

PAGE = 2 << 20
BASE = 1 << 40


def _nobody(_: int) -> Block | None:
    return None


def _plan(
    space: Space,
    size: int,
    page: int = PAGE,
    most: int = 1 << 60,
    before: Callable[[int], Block | None] = _nobody,
    behind: Callable[[int], Block | None] = _nobody,
) -> Any:
    return space.plan(size, page, most, before, behind)


def test_memory_is_taken_in_whole_pages_from_the_lowest_hole() -> None:
    space = Space(BASE, 16 * PAGE, PAGE)
    plan = _plan(space, 512)
    assert (plan.ptr, plan.nbytes, plan.left, plan.right) == (BASE, PAGE, None, None)
    assert space.holes() == [(BASE + PAGE, BASE + 16 * PAGE)]
    plan = _plan(space, 3 * PAGE + 1)
    assert (plan.ptr, plan.nbytes) == (BASE + PAGE, 4 * PAGE)


def test_a_free_neighbour_means_less_new_memory() -> None:
    space = Space(BASE, 16 * PAGE, PAGE)
    _plan(space, PAGE)
    left = Block(BASE + PAGE - 4096, 4096, 0)
    plan = _plan(space, PAGE + 4096, before=lambda at: left if at == BASE + PAGE else None)
    assert (plan.ptr, plan.nbytes, plan.left) == (BASE + PAGE, PAGE, left)


def test_a_hole_between_two_free_neighbours_joins_them() -> None:
    space = Space(BASE, 3 * PAGE, PAGE)
    _plan(space, 3 * PAGE)
    space.give_back(BASE + PAGE, BASE + 2 * PAGE)
    left, right = Block(BASE, PAGE, 0), Block(BASE + 2 * PAGE, PAGE, 0)
    plan = _plan(space, 3 * PAGE, before=lambda at: left, behind=lambda at: right)
    assert (plan.ptr, plan.nbytes, plan.left, plan.right) == (BASE + PAGE, PAGE, left, right)


def test_no_plan_where_there_is_no_room_or_no_allowance() -> None:
    space = Space(BASE, 2 * PAGE, PAGE)
    assert _plan(space, 3 * PAGE) is None
    assert _plan(space, PAGE, most=PAGE - 1) is None
    assert space.holes() == [(BASE, BASE + 2 * PAGE)]
    assert _plan(space, 512, page=4 * PAGE, most=PAGE).nbytes == PAGE


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6), st.integers(0, 99)), max_size=40))
def test_holes_and_pieces_always_tile_the_range(steps: list[tuple[bool, int, int]]) -> None:
    space = Space(BASE, 24 * PAGE, PAGE)
    taken: list[tuple[int, int]] = []
    for take, pages, at in steps:
        if take:
            plan = _plan(space, pages * PAGE)
            if plan is not None:
                assert plan.nbytes == pages * PAGE
                taken.append((plan.ptr, plan.ptr + plan.nbytes))
        elif taken:
            space.give_back(*taken.pop(at % len(taken)))
        spans = sorted(taken + space.holes())
        assert spans[0][0] == BASE and spans[-1][1] == BASE + 24 * PAGE
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
        holes = space.holes()
        assert all(a[1] < b[0] for a, b in itertools.pairwise(holes)), "touching holes are one"


def test_a_piece_outside_of_every_hole_cannot_be_cut() -> None:
    space = Space(BASE, 2 * PAGE, PAGE)
    _plan(space, PAGE)
    with pytest.raises(AssertionError):
        space._cut(BASE, BASE + PAGE)

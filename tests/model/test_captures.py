"""A slice of the exhaustive search over programs with graph captures: every short one, and a sample of long ones.

All of them: `python -m tests.model.exhaustive --graphs --length 6 --jobs 2` (docs/ordering.md says what it found).
Programs of all lengths are run, and each is checked at its end: so `check()` has been run after every step of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.model.captures import GRAPH_UNIVERSES, GRAPHS_BY_NAME, GraphEnumeration
from tests.model.contract import GraphUniverse, is_allowed
from tests.model.exhaustive import Unit, check_all
from tests.model.graphs import GraphPlayer, Wrong
from tests.model.programs import Step, parse, text

EVERY_LENGTH = 3
"""All programs to this length."""
SAMPLE = 120
"""Programs of nine steps in each universe."""


def programs(universe: GraphUniverse) -> Iterator[list[Step]]:
    """What the test suite plays of a universe."""
    for length in range(1, EVERY_LENGTH + 1):
        yield from GraphEnumeration(universe, length).programs()
    yield from GraphEnumeration(universe, 9).sampled(SAMPLE)


@pytest.mark.parametrize("universe", GRAPH_UNIVERSES, ids=lambda u: u.name)
def test_r10_every_short_program_with_a_capture_and_a_sample_of_long_ones_are_right(universe: GraphUniverse) -> None:
    unit = check_all(universe, iter([list(program) for program in programs(universe)]), Unit(universe.name, 0, ()))
    assert unit.programs > SAMPLE
    assert not unit.failures, "\n".join(unit.failures)


def allowed(universe: str, program: str) -> bool:
    """Is the program right?"""
    return is_allowed(GRAPHS_BY_NAME[universe], parse(program))


def test_programs_that_break_the_rules_of_captures_are_told_apart() -> None:
    assert allowed("graph-assumed", "begin 0; alloc 0 1; end 0; launch 0 1")
    assert not allowed("graph-assumed", "begin 0; end 0; launch 0 1")  # it does nothing
    assert not allowed("graph-assumed", "begin 0; alloc 0 1; launch 0 1")
    assert not allowed("graph-assumed", "begin 0; alloc 0 1; end 0; drop 0; launch 0 1")
    assert not allowed("graph-assumed", "begin 0; begin 0")
    assert not allowed("graph-usual", "begin 0")  # legacy cannot be captured
    assert not allowed("graph-usual", "alloc 0 1; begin 1; work 0")  # legacy's work would kill the capture
    assert allowed("graph-usual", "alloc 0 1; begin 1; work 1; end 1; work 0; launch 0 0")


def test_a_stream_that_joined_a_capture_must_be_joined_back() -> None:
    joined = "begin 0; wait_stream 1 0; alloc 1 1; "
    assert not allowed("graph-assumed", joined + "end 0")
    assert allowed("graph-assumed", joined + "wait_stream 0 1; end 0")
    assert not allowed("graph-assumed", "begin 0; wait_stream 1 0; end 0")  # joining is a step
    assert not allowed("graph-assumed", "alloc 1 1; begin 0; wait_stream 0 1")  # work from outside would kill it
    assert not allowed("graph-assumed", "begin 0; wait_stream 1 0; end 1")


def test_a_graph_is_launched_behind_the_allocations_that_it_uses_and_the_uses_of_its_own() -> None:
    late = "alloc 0 1; free 0; alloc 0 1; begin 1; work 1; end 1; "
    assert not allowed("graph-assumed", late + "launch 0 1")
    assert allowed("graph-assumed", late + "wait_stream 1 0; launch 0 1")
    result = "begin 0; alloc 0 1; end 0; launch 0 1; "
    assert not allowed("graph-assumed", result + "work 0")  # it may be written by the replay meanwhile
    assert allowed("graph-assumed", result + "wait_stream 0 1; work 0")
    assert not allowed("graph-assumed", result + "wait_stream 0 1; work 0; launch 0 1")
    assert allowed("graph-assumed", result + "wait_stream 0 1; work 0; wait_stream 1 0; launch 0 1")


def test_with_assumed_uses_an_owner_takes_back_what_it_freed_only_behind_its_users() -> None:
    late = "alloc 0 1; use 0 1; free 0; begin 1; "
    assert not allowed("graph-bins", late + "alloc 0 1")
    assert allowed("graph-bins", "alloc 0 1; use 0 1; begin 1; free 0; alloc 0 1")  # the capture keeps it
    assert allowed("graph-bins-declared", late + "alloc 0 1")


def test_within_a_graph_the_owner_takes_back_what_it_freed_only_behind_its_users() -> None:
    inside = "begin 0; alloc 0 1; wait_stream 1 0; work 1; free 0; "
    assert not allowed("graph-assumed", inside + "alloc 0 1")
    assert allowed("graph-assumed", inside + "wait_stream 0 1; alloc 0 1")


def test_every_program_that_is_generated_is_right_and_none_is_generated_twice() -> None:
    for universe in GRAPH_UNIVERSES:
        found = [tuple(program) for program in GraphEnumeration(universe, 4).programs()]
        assert len(set(found)) == len(found)
        assert all(is_allowed(universe, program) for program in found[::23])


def test_the_units_of_work_make_up_all_programs() -> None:
    enumeration = GraphEnumeration(GRAPHS_BY_NAME["graph-usual"], 4)
    whole = [text(program) for program in enumeration.programs()]
    parts = [text(program) for prefix in enumeration.prefixes(2) for program in enumeration.programs(prefix)]
    assert parts == whole


def test_a_graph_whose_memory_was_given_away_is_noticed_when_it_is_launched() -> None:
    """Not by a race: the launch is ordered behind the other's use, and overwrites it all the same."""
    player = GraphPlayer(GRAPHS_BY_NAME["graph-assumed"])
    for step in parse("begin 0; alloc 0 1; free 0; end 0"):
        player.take(step)
    player.take(("alloc", 0, 1))
    player._spans[1] = player._spans[0]
    with pytest.raises(Wrong, match="block 0, whose memory was given to block 1"):
        player.take(("launch", 0, 0))


def test_two_branches_of_a_graph_that_share_bytes_without_an_order_are_noticed() -> None:
    player = GraphPlayer(GRAPHS_BY_NAME["graph-assumed"])
    for step in parse("begin 0; wait_stream 1 0; alloc 0 1; free 0; alloc 1 1"):
        player.take(step)
    player._spans[1] = player._spans[0]
    with pytest.raises(Wrong, match="no order"):
        player.take(("work", 1))


def test_a_capture_that_was_killed_is_noticed() -> None:
    player = GraphPlayer(GRAPHS_BY_NAME["graph-assumed"])
    player.take(("begin", 0))
    with player.gpu.program_scope(), pytest.raises(Exception, match="CAPTURE"):
        player.gpu.ctx_synchronize()
    assert "killed" in str(player_error(player))


def player_error(player: GraphPlayer) -> Wrong:
    """What the end of the capture says."""
    with pytest.raises(Wrong) as caught:
        player.take(("end", 0))
    return caught.value


def test_a_graph_that_is_launched_into_another_capture_must_outlive_that_one() -> None:
    """A limit (docs/decisions/0014-graphs.md): launches are not seen, and what a graph freed is its own alone."""
    universe = replace(GRAPHS_BY_NAME["graph-two"], child=True)
    program = parse("begin 0; alloc 0 1; free 0; end 0; begin 1; launch 0 1; end 1")
    assert is_allowed(universe, program)
    assert GraphPlayer(universe).run(program) is None
    wrong = GraphPlayer(universe).run([*program, ("drop", 0)])
    assert wrong is not None and "graph 1 lives and uses block 0" in wrong

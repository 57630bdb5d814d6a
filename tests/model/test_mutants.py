"""Each rule broken on purpose must be noticed: by a program, by two threads, or by a scene with a failing call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.model.capture_mutants import ALL_MUTANTS
from tests.model.capture_scenes import CAPTURE_SCENES
from tests.model.contract import GraphUniverse, is_allowed
from tests.model.exhaustive import ALL_BY_NAME, player_for
from tests.model.graphs import GraphPlayer
from tests.model.mutants import Mutant
from tests.model.pairs import PAIRS, Pair, run_pair
from tests.model.programs import is_right, judge, parse
from tests.model.scenes import SCENES
from tests.model.threads import Plan, plans

ALL_SCENES = {**SCENES, **CAPTURE_SCENES}
BY_PAIR = {pair.name: pair for pair in PAIRS}


def caught_by_a_program(mutant: Mutant, name: str, line: str) -> bool:
    """The program is right, the pool plays it well, and the mutant does not."""
    universe, program = ALL_BY_NAME[name], parse(line)
    if isinstance(universe, GraphUniverse):
        assert is_allowed(universe, program)
        assert GraphPlayer(universe).run(program) is None
    else:
        assert is_right(universe, program)
        assert judge(universe, program) is None
    with mutant.applied():
        player = player_for(universe)
        try:
            return (player.run(program) or player.close()) is not None
        except Exception:
            return True


def plans_of(pair: Pair) -> Iterator[Plan]:
    """None, one, or two pre-emptions."""
    _, points = run_pair(pair, ())
    yield from plans(points + 12, 2)


def caught_by_a_pair(mutant: Mutant, pair: Pair) -> bool:
    """Some interleaving goes wrong with the mutant, and that same one does not without."""
    for plan in plans_of(pair):
        with mutant.applied():
            wrong, _ = run_pair(pair, plan)
        if wrong is not None:
            assert run_pair(pair, plan)[0] is None
            return True
    return False


@pytest.mark.source
@pytest.mark.parametrize("mutant", ALL_MUTANTS, ids=lambda m: m.name)
def test_the_mutant_is_caught(mutant: Mutant) -> None:
    how, _, what = mutant.catch.partition(": ")
    if how == "pair":
        assert caught_by_a_pair(mutant, BY_PAIR[what])
    elif how == "scene":
        scene = ALL_SCENES[what]
        assert scene() is None
        with mutant.applied():
            try:
                wrong = scene()
            except Exception as error:
                wrong = repr(error)
        assert wrong is not None
    else:
        assert caught_by_a_program(mutant, how, what)


@pytest.mark.parametrize("scene", ALL_SCENES.values(), ids=ALL_SCENES)
def test_in_every_scene_all_is_well(scene: object) -> None:
    assert callable(scene)
    assert scene() is None


def test_every_rule_that_programs_can_break_has_a_mutant() -> None:
    rules = {mutant.name.partition("_")[0] for mutant in ALL_MUTANTS}
    # R12 speaks of memory that the host can touch, which this pool does not hand out.
    assert rules == {f"r{n}" for n in range(1, 14)} - {"r12"}

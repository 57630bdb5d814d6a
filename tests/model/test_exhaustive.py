"""A slice of the exhaustive search: every short program, and a seeded sample of those of length 6.

All of them: `python -m tests.model.exhaustive --length 6 --jobs 2` (docs/ordering.md says what it found).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.model.enumerate import Enumeration, Shadow
from tests.model.exhaustive import Unit, check_all
from tests.model.programs import NaivePlayer, Program, Step, Universe, is_right, judge, parse, text
from tests.model.universes import BY_NAME, UNIVERSES

SAMPLE = 220
"""Programs of length 6 in each universe."""


def sampled(universe: Universe, length: int, count: int) -> Iterator[Program]:
    """Random walks over what the enumeration allows, each program as long as the walk gets."""
    rng = random.Random(f"{universe.name} {length}")
    enumeration = Enumeration(universe, length)
    found = 0
    for _ in range(count * 20):
        program: list[Step] = []
        shadow = Shadow.start(universe)
        while len(program) < length:
            steps = list(enumeration.next_steps(program, shadow))
            if not steps:
                break
            step = rng.choice(steps)
            program.append(step)
            shadow.take(universe, step)
        if len(program) == length:
            found += 1
            yield program
            if found == count:
                return


@pytest.mark.parametrize("universe", UNIVERSES, ids=lambda u: u.name)
def test_every_program_of_three_steps_and_a_sample_of_six_are_free_of_races(universe: Universe) -> None:
    for programs in (Enumeration(universe, 3).programs(), sampled(universe, 6, SAMPLE)):
        unit = check_all(universe, iter([list(p) for p in programs]), Unit(universe.name, 0, ()))
        assert not unit.failures, "\n".join(unit.failures)
        assert universe.assumed or unit.wrong_programs == 0  # of assumed uses the judge has the last word


def test_programs_that_break_the_contract_are_told_apart() -> None:
    universe = BY_NAME["waits"]
    assert not is_right(universe, parse("alloc 0 1; use 0 1"))  # stream 1 has not waited for the owner
    assert is_right(universe, parse("alloc 0 1; wait_stream 1 0; use 0 1"))
    assumed = BY_NAME["assumed"]
    late = "alloc 0 1; wait_stream 1 0; use 0 1; free 0; alloc 0 1"
    assert not is_right(assumed, parse(late))  # the owner takes the block back and has not waited for stream 1
    assert is_right(assumed, parse(late.replace("free 0;", "free 0; wait_stream 0 1;")))


def test_every_program_that_is_generated_keeps_the_contract() -> None:
    for universe in UNIVERSES:
        if universe.assumed:
            continue  # there the judge has the last word
        for program in sampled(universe, 6, 8):
            player = NaivePlayer(universe)
            player.play(program)
            assert not player.gpu.races, (universe.name, text(program))
            player.close()


def test_a_program_is_read_back_from_its_text() -> None:
    line = "alloc 0 1; wait_stream 1 0; use 0 1; free 0; tick; stats"
    assert text(parse(line)) == line


@pytest.mark.parametrize(
    "universe, program",
    [
        (
            "assumed-halves",
            "alloc 1 0; alloc 0 0; free 0; stats; wait_stream 0 1; wait_stream 2 0; use 1 2; free 1; quiet 0 2; "
            "wait_stream 1 0; alloc 1 3",
        ),
        (
            "one-page",
            "alloc 0 0; alloc 1 0; free 0; record 0 0; free 1; wait_stream 0 1; quiet 0 2; wait 0 2; alloc 2 3",
        ),
        ("waits-threads", "alloc 1 1; free 0"),
        ("quiet", "alloc 0 1; free 0; quiet 1 1; sync 1; use 1 2"),
        ("quiet-thread", "alloc 1 1; free 0; quiet 0 1; use 1 2"),
    ],
)
def test_programs_that_went_wrong_once_are_right_now(universe: str, program: str) -> None:
    assert judge(BY_NAME[universe], parse(program)) is None

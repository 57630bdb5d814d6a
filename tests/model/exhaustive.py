"""Runs every program of a universe: `python -m tests.model.exhaustive --length 6 --jobs 2`.

`--graphs` runs those with graph captures instead (captures.py).  Work is cut into the programs' first two steps.
`--state FILE` notes each such unit when it is done, so that a run can be broken off and taken up again; `--shard 1/4`
takes every fourth unit.  Exit status 1 if a right program went wrong, with the program in one line, which `--program`
plays again.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.model.captures import GRAPH_UNIVERSES, GRAPHS_BY_NAME, GraphEnumeration
from tests.model.contract import GraphUniverse
from tests.model.enumerate import Enumeration
from tests.model.graphs import GraphPlayer
from tests.model.programs import Player, Program, Step, Universe, forget_pools, is_right, judge, parse, text
from tests.model.universes import BY_NAME, UNIVERSES

ALL_BY_NAME: dict[str, Universe] = {**BY_NAME, **GRAPHS_BY_NAME}

FRESH = 256
"""Programs played on one pool before a new one is made: its close is then tested as well."""
MOST_FAILURES = 5
"""Failures told of one unit."""


def player_for(universe: Universe) -> Player:
    """What plays the programs of a universe."""
    return GraphPlayer(universe) if isinstance(universe, GraphUniverse) else Player(universe)


def enumeration_for(universe: Universe, length: int) -> Enumeration | GraphEnumeration:
    """All programs of a universe."""
    return GraphEnumeration(universe, length) if isinstance(universe, GraphUniverse) else Enumeration(universe, length)


@dataclass
class Unit:
    """The programs of one universe that begin alike, and what came of them."""

    universe: str
    length: int
    prefix: tuple[Step, ...]
    programs: int = 0
    wrong_programs: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """How a state file names it."""
        return f"{self.universe} {self.length} {text(self.prefix)}"


def check_all(universe: Universe, programs: Iterator[Program], unit: Unit) -> Unit:
    """Play them all and judge what goes wrong."""
    started = time.monotonic()
    player: Player | None = None
    played = 0
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for program in programs:
            if player is None:
                player, played = player_for(universe), 0
            wrong = player.run(program)
            unit.programs += 1
            played += 1
            if wrong is not None:
                refused = [i for i, block in enumerate(player.blocks) if block is None]
                # With captures only right programs are generated.
                if isinstance(player, GraphPlayer) or is_right(universe, program, player.answers, refused):
                    unit.failures.append(f"{unit.universe}: {text(program)}: {wrong}")
                    if len(unit.failures) >= MOST_FAILURES:
                        break
                else:
                    unit.wrong_programs += 1
                player = None
                forget_pools()
            elif played >= FRESH:
                _close(player, unit, program)
                player = None
                gc.collect()
        if player is not None:
            _close(player, unit, ())
    finally:
        if was_enabled:
            gc.enable()
        gc.collect()
    unit.seconds = time.monotonic() - started
    return unit


def _close(player: Player, unit: Unit, program: Program) -> None:
    wrong = player.close()
    if wrong is not None:
        unit.failures.append(f"{unit.universe}: closed after {text(program)}: {wrong}")


def run_unit(unit: Unit) -> Unit:
    """One unit of work, in whichever process."""
    gc.freeze()  # the modules are not looked at again by every collection
    universe = ALL_BY_NAME[unit.universe]
    return check_all(universe, enumeration_for(universe, unit.length).programs(unit.prefix), unit)


def units_of(names: Sequence[str], length: int, shard: tuple[int, int]) -> list[Unit]:
    """What there is to do, in the order of the universes."""
    units = [
        Unit(name, length, prefix)
        for name in names
        for prefix in enumeration_for(ALL_BY_NAME[name], length).prefixes(2)
    ]
    return units[shard[0] - 1 :: shard[1]]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.model.exhaustive", description=__doc__)
    parser.add_argument("--length", type=int, default=6)
    parser.add_argument("--universe", action="append", choices=sorted(ALL_BY_NAME), help="default: all of them")
    parser.add_argument("--graphs", action="store_true", help="the universes with graph captures")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--shard", default="1/1", help="which part of how many, such as 1/4")
    parser.add_argument("--state", type=Path, help="file of the units that are done; taken up again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no unit after this time")
    parser.add_argument("--program", help="play this one program instead, on --universe")
    options = parser.parse_args(argv)
    names = options.universe or [universe.name for universe in (GRAPH_UNIVERSES if options.graphs else UNIVERSES)]
    if options.program:
        universe, program = ALL_BY_NAME[names[0]], parse(options.program)
        wrong = GraphPlayer(universe).run(program) if isinstance(universe, GraphUniverse) else judge(universe, program)
        print(wrong or "nothing went wrong, or the program itself is wrong")
        return int(wrong is not None)
    part, parts = map(int, options.shard.split("/"))
    units = units_of(names, options.length, (part, parts))
    done = _read(options.state)
    todo = [unit for unit in units if unit.key not in done]
    print(f"{len(units)} units, {len(units) - len(todo)} of them done before", file=sys.stderr)
    total = Counts(options.state)
    for unit in units:
        if unit.key in done:
            total.add(done[unit.key])
    started = time.monotonic()
    complete = True
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for unit in pool.imap_unordered(run_unit, todo, chunksize=1):
            total.add(unit, fresh=True)
            total.show(len(todo), started)
            if time.monotonic() - started > options.seconds:
                complete = False
                pool.terminate()
                break
    print(file=sys.stderr)
    for name in names:
        print(f"{name:24} {total.programs.get(name, 0):9} programs")
    print(
        f"length {options.length}, {'complete' if complete else 'NOT complete'}, shard {options.shard}: "
        f"{sum(total.programs.values())} programs, {total.wrong_programs} of them wrong by themselves, "
        f"{len(total.failures)} failures, "
        f"{sum(total.programs.values()) / max(total.seconds, 1e-9):.0f} programs/s and process"
    )
    for failure in total.failures:
        print("FAILED", failure)
    return int(bool(total.failures))


class Counts:
    """What has come of all units so far."""

    def __init__(self, state: Path | None) -> None:
        self._state = state
        self.programs: dict[str, int] = {}
        self.wrong_programs = 0
        self.seconds = 0.0
        self.units = 0
        self.failures: list[str] = []

    def add(self, unit: Unit, *, fresh: bool = False) -> None:
        """Count a unit, and note it if it has just been done."""
        self.programs[unit.universe] = self.programs.get(unit.universe, 0) + unit.programs
        self.wrong_programs += unit.wrong_programs
        self.seconds += unit.seconds
        self.failures += unit.failures
        self.units += fresh
        for failure in unit.failures if fresh else ():
            print(f"\nFAILED {failure}", file=sys.stderr)
        if fresh and self._state is not None:
            with self._state.open("a", encoding="utf-8") as file:
                numbers = [unit.programs, unit.wrong_programs, unit.seconds, unit.failures]
                file.write(json.dumps([unit.universe, unit.length, text(unit.prefix), *numbers]) + "\n")

    def show(self, units: int, started: float) -> None:
        """Progress, on one line."""
        seconds = time.monotonic() - started
        programs = sum(self.programs.values())
        print(
            f"\r{self.units}/{units} units, {programs} programs, {programs / max(seconds, 1e-9):.0f}/s, "
            f"{len(self.failures)} failures   ",
            end="",
            file=sys.stderr,
            flush=True,
        )


def _read(state: Path | None) -> dict[str, Unit]:
    done: dict[str, Unit] = {}
    if state is not None and state.exists():
        for line in state.read_text(encoding="utf-8").splitlines():
            name, length, prefix, programs, wrong, seconds, failures = json.loads(line)
            unit = Unit(name, length, tuple(parse(prefix)), programs, wrong, seconds, failures)
            done[unit.key] = unit
    return done


if __name__ == "__main__":
    sys.exit(main())

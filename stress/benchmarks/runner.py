"""Runs benchmarks: contenders take turns, in one process, and nobody waits for a lucky one.

    turn      one contender does its operations, between two looks at the clock
    repeat    every contender has a few turns, and begins first in turn; the median of a contender's turns is its value
    result    medians and ratios over the repeats (timing.py)

Rule: a benchmark that fails is told as failed and the next one runs; a contender that fails leaves its case.  One run
on a machine that one does not have for long should bring home everything it can.

Next: timing.py, report.py.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from allocator.stress.benchmarks.cases import Benchmark, Case, Contender, Missing, Reading, Settings, Stage
from allocator.stress.benchmarks.timing import Figures, compare

_MOST: Final = 10_000_000
"""Operations in a turn at most."""
CALIBRATIONS: Final = 3
"""The first turn pays for what is there afterwards, memory for example, and the next one for what that displaced."""


@dataclass(frozen=True)
class Measured:
    """One case, measured.  figures: by contender, the reference among them.  failed: contender -> reason."""

    benchmark: str
    case: str
    door: str
    unit: str
    reference: str
    figures: dict[str, Figures]
    at: float | None = None
    guests: bool = False
    operations: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    text: str = ""


@dataclass
class Results:
    """Everything that a run has found.  skipped, failed: benchmark -> reason.  left_out: peer -> reason."""

    measured: list[Measured] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def run(
    benchmarks: Sequence[Benchmark],
    stages: Iterable[Stage],
    results: Results,
    say: Callable[[str], object] = lambda text: None,
    done: Callable[[Measured], object] = lambda measured: None,
) -> None:
    """Run all of them on each stage.  results: filled as it goes on, so that an interrupted run has something to show.

    say: told what is under way.  done: told each case as it is ready.
    """
    for stage in stages:
        for benchmark in benchmarks:
            if stage.guests and not benchmark.guests:
                continue
            said = told_as(benchmark.name, stage.guests)
            say(said)
            lacking = _lacks(benchmark, stage)
            if lacking:
                results.skipped[benchmark.name] = lacking
                continue
            try:
                for found in benchmark.cases(stage):
                    if isinstance(found, Case):
                        say(f"{said}: {found.title}")
                        one = measure(benchmark.name, found, stage)
                    else:
                        one = _read(benchmark.name, found, stage)
                    results.measured.append(one)
                    done(one)
            except Missing as error:
                results.skipped[benchmark.name] = reason(error)
            except Exception as error:
                results.failed[said] = reason(error)
        results.left_out |= stage.left_out


def told_as(name: str, guests: bool) -> str:
    """A benchmark by the name under which it fails."""
    return f"{name} beside guests" if guests else name


def reason(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, Missing) else f"{type(error).__name__}: {text}"


def _lacks(benchmark: Benchmark, stage: Stage) -> str:
    """What the stage has not, in a few words; "" if nothing."""
    if "gpu" in benchmark.needs and stage.simulated:
        return "needs a GPU (--device 0)"
    if "cupy" in benchmark.needs and not any(not door.takes_stream for door in stage.doors):
        return "needs CuPy"
    return ""


def measure(name: str, case: Case, stage: Stage) -> Measured:
    """Let the contenders of one case take turns."""
    settings = stage.settings
    clock = time.thread_time_ns if stage.simulated and not case.wall else time.perf_counter_ns
    contenders = list(case.contenders)
    failed: dict[str, str] = {}
    repeats = min(settings.repeats, case.most_repeats)
    batches = 1 if settings.quick else case.batches
    share = 1e9 * settings.seconds / max(1, repeats * batches * len(contenders))
    operations: dict[str, int] = {}
    if not settings.quick:
        gc.collect()  # what earlier cases left is nobody's turn

    def attempt(contender: Contender, count: int) -> tuple[float, int] | None:
        try:
            return turn(contender, count, clock, case.warm)
        except Exception as error:
            failed[contender.name] = reason(error)
            contenders.remove(contender)
            return None

    for contender in list(contenders):  # turns that do not count, and say how many operations fill the time
        count = case.operations
        for _ in range(1 if case.fixed or settings.quick else CALIBRATIONS):
            taken = attempt(contender, count)
            if taken is None or case.fixed:
                break
            fitting = min(_MOST, int(count * share / max(taken[1], 1)))
            least = 1 if settings.quick else case.least
            count = max(1, fitting // least) * least
        operations[contender.name] = count
    values: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for repeat in range(repeats):
        turns: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for batch in range(batches):
            first_one = (repeat + batch) % max(1, len(contenders))
            for contender in [*contenders[first_one:], *contenders[:first_one]]:
                taken = attempt(contender, operations[contender.name])
                if taken is not None:
                    turns[contender.name].append(taken[0])
        for contender in contenders:
            values[contender.name].append(statistics.median(turns[contender.name]))
    whole = {one.name: values[one.name] for one in contenders}
    notes = {one.name: one.notes() for one in contenders}
    return Measured(
        benchmark=name,
        case=case.title,
        door=case.door,
        unit=case.unit,
        reference=case.reference,
        figures=compare(whole, case.reference, notes),
        at=case.at,
        guests=stage.guests,
        operations={one.name: operations[one.name] for one in contenders},
        failed=failed,
    )


def turn(contender: Contender, count: int, clock: Callable[[], int], warm: int = 0) -> tuple[float, int]:
    """(value, ns that it took): the value is what the contender says, or ns an operation."""
    with contender.around():
        if warm:
            contender.run(warm)
        began = clock()
        told = contender.run(count)
        spent = clock() - began
    return (spent / count if told is None else float(told)), spent


def _read(name: str, reading: Reading, stage: Stage) -> Measured:
    return Measured(
        benchmark=name,
        case=reading.title,
        door=reading.door,
        unit=reading.unit,
        reference=reading.reference,
        figures=compare(reading.values, reading.reference, reading.notes),
        at=reading.at,
        guests=stage.guests,
        text=reading.text,
    )


def take_turns(
    contenders: dict[str, Callable[[], dict[str, float]]], repeats: int, say: Callable[[str], Any] = lambda text: None
) -> dict[str, dict[str, list[float]]]:
    """For readings: figure -> contender -> values, one a repeat; each contender begins first in turn."""
    found: dict[str, dict[str, list[float]]] = {}
    names = list(contenders)
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in [*names[first:], *names[:first]]:
            say(name)
            for figure, value in contenders[name]().items():
                found.setdefault(figure, {each: [] for each in names})[name].append(value)
    return found


__all__ = ["Measured", "Results", "Settings", "measure", "reason", "run", "take_turns", "told_as", "turn"]

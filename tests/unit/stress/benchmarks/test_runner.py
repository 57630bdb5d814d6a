"""Who runs when: contenders take turns, and nothing that fails takes others with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from allocator import SimDevice
from allocator.stress.benchmarks.cases import Benchmark, Case, Contender, Missing, Reading, Settings, Stage
from allocator.stress.benchmarks.runner import CALIBRATIONS, Measured, Results, measure, run, take_turns, turn


def stage(**settings: object) -> Stage:
    return Stage(SimDevice(), Settings(**{"repeats": 3, "seconds": 0.001, "quick": True} | settings), [])  # type: ignore[arg-type]  # the keywords of `Settings`


def recorder(log: list[tuple[str, int]], name: str, value: float | None = 1.0) -> Contender:
    def run(n: int) -> float | None:
        log.append((name, n))
        return value

    return Contender(name, run)


def test_contenders_take_turns_and_each_begins_first_in_turn() -> None:
    log: list[tuple[str, int]] = []
    case = Case("x", [recorder(log, "a"), recorder(log, "b")], "a", operations=5, fixed=True, batches=1)
    measure("m", case, stage())
    assert [name for name, _ in log] == ["a", "b", *"ab", *"ba", *"ab"], "the first two do not count"
    assert {n for _, n in log} == {5}


def test_the_value_of_a_repeat_is_the_median_of_its_batches() -> None:
    told = iter([99.0, 1.0, 5.0, 2.0, 7.0, 8.0, 30.0])
    case = Case("x", [Contender("a", lambda n: next(told))], "a", fixed=True, batches=3)
    assert measure("m", case, stage(repeats=2, quick=False)).figures["a"].values == (2.0, 8.0)


def test_operations_are_fitted_to_the_time() -> None:
    log: list[tuple[str, int]] = []

    def slow(n: int) -> None:
        log.append(("slow", n))
        for _ in range(2000 * n):
            pass

    case = Case("x", [Contender("slow", slow), recorder(log, "quick", None)], "slow", operations=4)
    found = measure("m", case, stage(seconds=0.05))
    assert found.operations["quick"] > found.operations["slow"] >= 1
    assert {n for name, n in log[2:] if name == "quick"} == {found.operations["quick"]}
    assert found.figures["slow"].median > 0


def test_a_turn_has_a_multiple_of_the_least_operations() -> None:
    log: list[tuple[str, int]] = []
    case = Case("x", [recorder(log, "a", None)], "a", operations=3, least=64)
    measure("m", case, stage(seconds=1e-9, repeats=1, quick=False))
    assert [n for _, n in log] == [3, *[64] * (CALIBRATIONS - 1), *[64] * 3], (
        "turns that say how many fit, and a repeat"
    )
    log.clear()
    measure("m", case, stage(seconds=1e-9, repeats=1))
    assert [n for _, n in log] == [3, 1], "in small runs it does not matter"


def test_what_only_the_first_turn_pays_does_not_make_the_others_small() -> None:
    counts: list[int] = []

    def run_(n: int) -> None:
        counts.append(n)
        if len(counts) == 1:
            time.sleep(0.02)

    case = Case("x", [Contender("a", run_)], "a", operations=8, wall=True)
    measure("m", case, stage(seconds=1e-3, repeats=1, quick=False))
    assert counts[0] == 8 and counts[1] == 1 and max(counts[2:]) > 1


def test_most_repeats_bounds_what_the_settings_ask() -> None:
    case = Case("x", [recorder([], "a")], "a", most_repeats=2)
    assert len(measure("m", case, stage(repeats=50)).figures["a"].values) == 2


def test_a_turn_is_timed_inside_its_surroundings_and_after_the_warm_up() -> None:
    log: list[str] = []
    times = iter([100, 700])

    @contextmanager
    def around() -> Iterator[None]:
        log.append("on")
        yield
        log.append("off")

    def clock() -> int:
        log.append("look")
        return next(times)

    contender = Contender("a", lambda n: log.append(f"run {n}"), around)
    assert turn(contender, 6, clock, warm=2) == (100.0, 600)
    assert log == ["on", "run 2", "look", "run 6", "look", "off"]


def test_a_contender_that_fails_leaves_and_the_others_go_on() -> None:
    calls = [0]

    def breaks(n: int) -> float:
        calls[0] += 1
        if calls[0] > 2:
            raise MemoryError("no\nmore")
        return 1.0

    found = measure("m", Case("x", [Contender("a", breaks), recorder([], "b", 2.0)], "b", fixed=True), stage())
    assert found.failed == {"a": "MemoryError: no more"}
    assert set(found.figures) == {"b"} and found.figures["b"].values == (2.0, 2.0, 2.0)


def test_a_reference_that_fails_leaves_values_without_ratios() -> None:
    def breaks(n: int) -> float:
        raise ValueError("never")

    found = measure("m", Case("x", [Contender("a", breaks), recorder([], "b", 2.0)], "a", fixed=True), stage())
    assert found.failed == {"a": "ValueError: never"} and found.figures["b"].ratio is None


def cases_of(*found: Case | Reading | Exception) -> Callable[[Stage], Iterator[Case | Reading]]:
    def cases(stage: Stage) -> Iterator[Case | Reading]:
        for one in found:
            if isinstance(one, Exception):
                raise one
            yield one

    return cases


def test_what_fails_is_told_and_the_next_one_runs() -> None:
    reading = Reading("r", {"a": [1.0, 2.0], "b": [2.0, 2.0]}, "a", "ms", notes={"b": {"x": 1}})
    benchmarks = [
        Benchmark("missing", "", cases_of(Missing("no such library"))),
        Benchmark("broken", "", cases_of(reading, ZeroDivisionError("by zero"))),
        Benchmark("gpu", "", cases_of(reading), needs=("gpu",)),
        Benchmark("cupy", "", cases_of(reading), needs=("cupy",)),
        Benchmark("well", "", cases_of(Case("c", [recorder([], "a")], "a", fixed=True))),
    ]
    results = Results()
    told: list[Measured] = []
    run(benchmarks, [stage()], results, done=told.append)
    assert results.skipped == {
        "missing": "no such library", "gpu": "needs a GPU (--device 0)", "cupy": "needs CuPy",
    }  # fmt: skip
    assert results.failed == {"broken": "ZeroDivisionError: by zero"}
    assert [(one.benchmark, one.case) for one in told] == [("broken", "r"), ("well", "c")]
    assert told == results.measured
    assert results.measured[0].figures["b"].ratio == 1.5 and results.measured[0].figures["b"].notes == {"x": 1}


def test_with_guests_only_those_run_in_which_they_take_part() -> None:
    one, two = stage(), stage()
    two.guests = True
    two.left_out["torch"] = "not installed"
    benchmarks = [
        Benchmark("alone", "", cases_of(Case("c", [recorder([], "a")], "a", fixed=True))),
        Benchmark("both", "", cases_of(Case("c", [recorder([], "a")], "a", fixed=True)), guests=True),
    ]
    results = Results()
    said: list[str] = []
    run(benchmarks, [one, two], results, say=said.append)
    assert [(m.benchmark, m.guests) for m in results.measured] == [("alone", False), ("both", False), ("both", True)]
    assert "both beside guests: c" in said and results.left_out == {"torch": "not installed"}


def test_an_interrupted_run_keeps_what_it_has() -> None:
    def interrupted(n: int) -> float:
        raise KeyboardInterrupt

    first = Case("c", [recorder([], "a")], "a", fixed=True)
    benchmark = Benchmark("b", "", cases_of(first, Case("d", [Contender("a", interrupted)], "a")))
    results = Results()
    with pytest.raises(KeyboardInterrupt):
        run([benchmark], [stage()], results)
    assert [one.case for one in results.measured] == ["c"]


def test_readings_take_turns_too() -> None:
    log: list[str] = []

    def contender(name: str) -> Callable[[], dict[str, float]]:
        return lambda: log.append(name) or {"ms": float(len(log))}  # type: ignore[func-returns-value]  # `append` gives None, and then the figure counts

    found = take_turns({"a": contender("a"), "b": contender("b")}, 3)
    assert log == [*"ab", *"ba", *"ab"]
    assert found == {"ms": {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}}

"""The hammer, what is left of a failing round, and what is said about it."""

from __future__ import annotations

import gc
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allocator import CachingAllocator, Config
from allocator.stress import (
    WORKLOADS,
    Hammer,
    Plan,
    Progress,
    Recording,
    Setting,
    Violation,
    json_line,
    open_target,
    play,
    play_threaded,
    read_recording,
    shrink,
    table,
    verdict,
)
from allocator.stress.contract import breach
from allocator.stress.hammer import SWITCH_S, Outcome
from allocator.stress.report import figures
from tests.unit.stress.conftest import MIB, a_plan, a_setting, steps_of


def hammer(plan: Plan, config: Config | None = None) -> Hammer:
    return Hammer(open_target(None, plan.setting.limit), plan, config)


def failing(plan: Plan, rounds: int = 6) -> Outcome:
    """A run that has to find something."""
    outcome = hammer(plan).run(60, rounds=rounds)
    assert outcome.violation is not None
    return outcome


# -- runs ----------------------------------------------------------------------------------------


def test_a_run_of_all_workloads_finds_nothing_and_counts_everything() -> None:
    plan = a_plan(workers=2, operations=80)
    outcome = hammer(plan).run(600, rounds=len(WORKLOADS) * 2)
    assert outcome.violation is None
    assert outcome.rounds == len(WORKLOADS) * 2
    done = {verb: n for verb, n in outcome.counts.items() if verb not in ("refused", "skipped")}
    assert outcome.operations == outcome.rounds * 2 * 80 == sum(done.values())
    assert outcome.stats is not None
    assert sum(outcome.stats.allocations.values()) == done["alloc"] - outcome.counts["refused"]
    assert outcome.latencies["allocate"].count and outcome.latencies["free"].count


def test_even_rounds_run_one_workload_and_odd_ones_several() -> None:
    plan = a_plan("steady", "churn", "garbage", workers=3)
    assert [[plan.workload(number, worker) for worker in range(3)] for number in range(4)] == [
        ["steady", "steady", "steady"],
        ["steady", "churn", "garbage"],
        ["churn", "churn", "churn"],
        ["churn", "garbage", "steady"],
    ]


def test_rounds_have_operations_of_their_own_and_the_same_each_time() -> None:
    plan = a_plan("steady", workers=1)
    first, again, second = (list(plan.programs(number)[0]) for number in (0, 0, 1))
    assert first == again != second


def test_a_run_ends_when_somebody_says_so_and_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[CachingAllocator] = []
    close = CachingAllocator.close

    def counted(pool: CachingAllocator) -> None:
        closed.append(pool)
        close(pool)

    monkeypatch.setattr(CachingAllocator, "close", counted)
    one = hammer(a_plan("steady"))
    told: list[int] = []

    def progress(outcome: Outcome, more: int) -> None:
        told.append(more)

    outcome = one.run(600, lambda: len(told) > 1, progress)
    one.finish()
    assert outcome.violation is None and closed == [one.pool]


def test_the_time_is_up_after_one_round_at_least() -> None:
    assert hammer(a_plan("steady", operations=20)).run(1e-9).rounds == 1


def test_threads_change_places_more_often_only_while_a_run_lasts() -> None:
    before = sys.getswitchinterval()
    seen: list[float] = []
    hammer(a_plan("steady")).run(60, progress=lambda *_: seen.append(sys.getswitchinterval()), rounds=1)
    assert seen and max(seen) == pytest.approx(SWITCH_S) and sys.getswitchinterval() == before


def test_the_collector_looks_only_at_what_a_run_makes_and_at_everything_afterwards() -> None:
    gc.unfreeze()  # of this folder's tests
    one = hammer(a_plan("steady"))
    frozen: list[int] = []
    one.run(600, progress=lambda outcome, more: frozen.append(gc.get_freeze_count()), rounds=1)
    assert min(frozen) > 0 and gc.get_freeze_count() == 0
    gc.freeze()  # a program that has done so itself is left as it is
    try:
        before = gc.get_freeze_count()
        hammer(a_plan("steady")).run(600, rounds=1)
        assert gc.get_freeze_count() >= before - 1000 > 0
    finally:
        gc.unfreeze()


def test_settings_of_the_pool_count_and_the_limit_is_the_plans() -> None:
    one = hammer(a_plan("steady", operations=50), Config(limit=5, seal_frees=3))
    assert one.pool.config == Config(limit=one.outcome.plan.setting.limit, seal_frees=3)
    assert one.run(60, rounds=1).violation is None


def test_an_error_outside_the_rounds_is_a_violation_too(monkeypatch: pytest.MonkeyPatch) -> None:
    one = hammer(a_plan("steady"))

    def fails(*_: object) -> None:
        raise RuntimeError("no such thing")

    outcome = one.run(60, progress=fails)
    assert outcome.violation is not None and outcome.violation.text.startswith("RuntimeError: no such thing")
    assert outcome.failed_round is None and "at the end" in verdict(outcome)
    with pytest.raises(ValueError, match="no failed round"):
        shrink(outcome)


def test_a_pool_that_cannot_be_closed_or_keeps_memory_fails_at_the_very_end(monkeypatch: pytest.MonkeyPatch) -> None:
    one = hammer(a_plan("steady", operations=20))
    monkeypatch.setattr(one.pool, "stats", lambda: 1 / 0)
    outcome = one.run(60, rounds=0, stopped=lambda: True)
    assert outcome.violation is not None and "ZeroDivisionError" in outcome.violation.text

    one = hammer(a_plan("steady", operations=20))
    monkeypatch.setattr(one._target, "leaked_bytes", lambda: 7)
    outcome = one.run(60, stopped=lambda: True)
    assert outcome.violation is not None and outcome.violation.kind == "leak"


def test_an_interruption_that_nobody_caught_is_not_held_up_by_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    one = hammer(a_plan("steady", operations=20))
    monkeypatch.setattr(one.pool, "stats", lambda: pytest.fail("statistics were read"))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.run(60, progress=interrupted)


def test_after_a_hang_nothing_is_touched_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    one = hammer(a_plan("steady", operations=20))
    monkeypatch.setattr(one.pool, "close", lambda: pytest.fail("the pool was closed"))
    one.outcome.violation = Violation("hang", "everywhere")
    one.finish()
    assert one.outcome.stats is None


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"workloads": ()}, "needs a workload"),
        ({"operations": 0}, "needs a workload and an operation"),
        ({"workloads": ("nothing",)}, "no workload 'nothing'"),
        ({"setting": Setting(workers=4, streams=1, limit=MIB)}, "less than 1 MiB for each worker"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(a_plan(), **wrong)


# -- what is wrong --------------------------------------------------------------------------------


@pytest.mark.usefixtures("careless")
def test_a_careless_pool_is_caught_and_a_short_program_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = failing(a_plan("many-users", workers=1, operations=120, seed=3))
    assert outcome.violation is not None and outcome.violation.kind == "race"
    told: list[int] = []
    recording = shrink(outcome, patience_s=600, progress=told.append)
    assert recording.setting.alone and recording.wrong.startswith("race: ")
    assert len(recording.steps) <= 12 and told[-1] == len(recording.steps)
    assert breach(recording.steps) is None

    path = tmp_path / "r.txt"
    recording.write(path)
    done, violation = play(read_recording(path))
    assert done == len(recording.steps) and violation is not None and violation.kind == "race"

    monkeypatch.undo()
    assert play(read_recording(path)) == (len(recording.steps), None)  # on a pool that is right


@pytest.mark.usefixtures("careless")
def test_shrinking_stops_when_its_time_is_up() -> None:
    outcome = failing(a_plan("many-users", workers=1, operations=120, seed=3))
    recording = shrink(outcome, patience_s=0)
    assert len(recording.steps) > 12 and recording.setting.alone


def test_a_round_that_fails_with_threads_only_is_kept_whole() -> None:
    plan = a_plan("steady", operations=40)
    outcome = hammer(plan).run(60, rounds=1)
    broken = Outcome(plan, "", violation=None)
    broken.violation, broken.failed_round, broken.order = Violation("race", "once"), 0, [0, 1] * 40
    recording = shrink(broken)
    assert outcome.violation is None
    assert not recording.setting.alone and len(recording.steps) == 80 and recording.wrong == "race: once"
    assert play_threaded(recording) == (80, None)


@pytest.mark.usefixtures("careless")
def test_a_recording_is_played_by_threads_too() -> None:
    text = (
        "alloc b1 s0 n2097152", "share b1 s1", "read b1 s1 t9000", "free b1", "alloc b2 s2 n2097152", "use b2 own t9",
    )  # fmt: skip
    steps = steps_of("\n".join(f"0 {op}" for op in text))
    done, violation = play_threaded(Recording(a_setting(), steps))
    assert done == 6 and violation is not None and violation.kind == "race"


def test_a_check_that_fails_is_shrunk_to_the_operation_that_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check = CachingAllocator.check

    def odd(pool: CachingAllocator) -> None:
        check(pool)
        assert pool.stats().frees["same_stream"] < 3, "three frees are too many"

    monkeypatch.setattr(CachingAllocator, "check", odd)
    monkeypatch.setattr("allocator.stress.player.TRY_AGAIN_S", 0)
    outcome = failing(a_plan("steady", workers=1, operations=30))
    assert outcome.violation is not None and outcome.violation.kind == "check"
    recording = shrink(outcome, patience_s=600)
    assert recording.setting.alone and "three frees are too many" in recording.wrong
    assert [step.op.verb for step in recording.steps].count("alloc") == 3
    assert len(recording.steps) <= 6


# -- reports --------------------------------------------------------------------------------------


def test_the_table_and_the_json_say_the_same() -> None:
    plan = a_plan("steady", "near-limit", operations=150)
    outcome = hammer(plan).run(60, rounds=4)
    shown, data = table(outcome), json.loads(json_line(outcome))
    assert data == json.loads(json.dumps(figures(outcome)))
    assert f"{data['operations']:,} operations" in shown and f"seed {data['seed']}" in shown
    assert data["latency_us"]["allocate"]["p50"] > 0 and data["latency_us"]["free"]["p99.9"] > 0
    assert sum(data["reuse"].values()) > 0 and data["violation"] is None
    for words in ("p99.9 us", "same stream", "waits put on streams", "nothing wrong", "allocate", "workloads: steady"):
        assert words in shown, words


@pytest.mark.usefixtures("careless")
def test_a_violation_is_the_last_line() -> None:
    outcome = failing(a_plan("many-users", workers=1, operations=120, seed=3))
    assert table(outcome).splitlines()[-1].startswith("VIOLATION in round ")
    assert json.loads(json_line(outcome))["violation"]["kind"] == "race"


def test_an_outcome_without_anything_can_be_shown() -> None:
    empty = Outcome(a_plan(), "nowhere")
    assert "0 operations" in table(empty) and json.loads(json_line(empty))["reuse"] is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_now_and_then_and_rewritten_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("allocator.stress.report.time", type("T", (), {"monotonic": staticmethod(lambda: now[0])}))
    outcome = Outcome(a_plan(), "nowhere")
    plain, terminal = io.StringIO(), Terminal()
    for out in (plain, terminal):
        now[0] = 0.0
        progress = Progress(out)
        for _ in range(10):
            now[0] += 1
            progress(outcome, 1000)
        progress.wipe()
    assert plain.getvalue().splitlines() == [
        "5 s, round 1: 1,000 operations, 200/s",
        "10 s, round 1: 1,000 operations, 100/s",
    ]
    assert terminal.getvalue().count("\r") == 12 and terminal.getvalue().endswith(" \r")

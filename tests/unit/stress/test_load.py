"""A session: the pool under the users of a load test, and its one verdict."""

from __future__ import annotations

import gc
import threading

import pytest

from allocator import CachingAllocator
from allocator.stress.load import MAILBOXES, Options, Session, Verdict
from allocator.stress.player import Violation
from allocator.stress.workloads import WORKLOADS
from tests.unit.stress.conftest import MIB

OPTIONS = Options(streams=4, limit=256 * MIB, share=4 * MIB, seed=1)


def test_users_of_all_workloads_play_batches_and_nothing_is_left() -> None:
    session = Session(OPTIONS)
    parts = [session.join(name) for name in WORKLOADS]
    for part in parts:
        assert part.play(100) == 100
    verdict = session.finish()
    assert verdict.wrong == [] and verdict.operations == 100 * len(parts) and verdict.sessions == 1
    assert verdict.latencies["allocate"].count == verdict.counts["alloc"]
    assert sum(verdict.reuse.values()) == verdict.counts["alloc"]
    assert session.pool.closed


def test_batches_run_in_several_threads_at_once() -> None:
    session = Session(OPTIONS)
    parts = [session.join("handover") for _ in range(MAILBOXES + 2)]
    threads = [threading.Thread(target=lambda part=part: [part.play(50) for _ in range(3)]) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.finish().operations == 150 * len(parts)
    assert session.violation is None


def test_the_final_check_runs_once_and_ends_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[CachingAllocator] = []
    close = CachingAllocator.close

    def counted(pool: CachingAllocator) -> None:
        closed.append(pool)
        close(pool)

    monkeypatch.setattr(CachingAllocator, "close", counted)
    session = Session(OPTIONS)
    part = session.join("steady")
    part.play(10)
    first = session.finish()
    assert session.finish() is first and closed == [session.pool] and session.over
    assert part.play(10) == 0


def test_a_user_who_leaves_frees_its_blocks_and_keeps_its_figures() -> None:
    session = Session(OPTIONS)
    part = session.join("steady")
    part.play(30)
    session.leave(part)
    session.leave(part)
    assert session.pool.allocated_bytes == 0 and part.play(10) == 0
    assert session.figures().operations == 30 == session.finish().operations


def test_what_a_user_who_left_gave_to_the_garbage_collector_is_no_leak() -> None:
    session = Session(OPTIONS)
    part = session.join("garbage")
    gc.disable()
    try:
        while not part.player.counts["cycle"] or part.player.counts["collect"]:
            part.player.counts.clear()
            part.play(20)
        session.leave(part)
        assert session.finish().wrong == []
    finally:
        gc.enable()


def test_figures_so_far_hold_those_of_every_user() -> None:
    session = Session(OPTIONS)
    one, two = session.join("steady"), session.join("churn")
    one.play(30)
    session.leave(one)
    two.play(40)
    sofar = session.figures()
    assert sofar.operations == 70 and sofar.latencies["allocate"].count > 0 and sofar.seconds > 0
    assert session.finish().operations == 70


@pytest.mark.usefixtures("careless")
def test_a_violation_ends_the_batches_of_everybody_and_is_the_verdict() -> None:
    session = Session(Options(streams=4, limit=64 * MIB, share=8 * MIB, seed=3))
    parts = [session.join("many-users") for _ in range(2)]
    with pytest.raises(Violation):
        for _ in range(100):
            for part in parts:
                part.play(50)
    assert session.violation is not None and session.violation.kind == "race"
    assert [part.play(10) for part in parts] == [0, 0]
    assert session.finish().wrong == [f"race: {session.violation.text}"]


def test_a_leak_is_found_although_no_operation_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """S31: the final check decides, not the operations."""
    session = Session(OPTIONS)
    session.join("steady").play(50)
    monkeypatch.setattr(session.pool, "trim", lambda keep=0: 0)
    (wrong,) = session.finish().wrong
    assert wrong.startswith("leak: ")


def test_a_user_whose_end_fails_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(OPTIONS)
    part = session.join("steady")
    part.play(20)
    monkeypatch.setattr(part.player, "end", lambda: 1 / 0)
    session.leave(part)
    assert session.violation is not None and "ZeroDivisionError" in session.violation.text
    assert session.finish().wrong


def test_a_pool_that_cannot_be_closed_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(OPTIONS)
    monkeypatch.setattr(session.pool, "close", lambda: 1 / 0)
    assert "ZeroDivisionError" in session.finish().wrong[0]


def test_verdicts_are_sent_as_json_and_add_up() -> None:
    session = Session(OPTIONS)
    session.join("churn").play(60)
    one = session.finish()
    two = Verdict.from_json(one.to_json())
    assert two.to_json() == one.to_json()
    two.wrong = ["race: here"]
    both = Verdict().merge(one).merge(two)
    assert both.operations == 2 * one.operations and both.sessions == 2 and both.wrong == ["race: here"]
    assert both.seconds == one.seconds
    assert both.latencies["allocate"].count == 2 * one.latencies["allocate"].count

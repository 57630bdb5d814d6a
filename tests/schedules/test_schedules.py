"""What two to four host threads do at the same time goes well in every order that is tried.

In CI a part of it: every order of one switch for the shorter programs, a few seeds of each, and the garbage collector
at every place of the shorter ones.  `python -m tests.schedules` goes on from there.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from allocator import CachingAllocator, SimDevice, Stream
from allocator.caching import reaper
from allocator.caching.frees import Frees
from allocator.errors import Reentered
from allocator.streams import Sealing
from allocator.sync import LockLike, OwnedLock, make_lock
from tests.schedules import __main__ as command
from tests.schedules.explorer import by_seed, collect, explore, run
from tests.schedules.programs import BY_NAME, COLLECTED, FOUR, THREE, TWO, Play
from tests.schedules.scheduler import InnerLock, Queue, Scheduler, Stuck

pytestmark = pytest.mark.source
"""The orders are those of the source's own steps."""

ALL_ORDERS = ("hits_on_one_stream", "statistics", "limits", "frees_that_name_a_stream", "the_last_memory", "settling")
"""Short enough for every order of one switch."""
AT_EVERY_PLACE = ("inside_allocate", "inside_a_scrape", "inside_trim", "inside_settle", "inside_close")


@pytest.mark.parametrize("lane", [False, True], ids=["locked", "lane"])
@pytest.mark.parametrize("play", [BY_NAME[name] for name in ALL_ORDERS], ids=lambda p: p.name)
def test_no_order_with_one_switch_goes_wrong(play: Play, lane: bool) -> None:
    orders = 0
    for outcome in explore(play, 1, lane=lane):
        assert outcome.wrong is None, outcome
        orders += 1
    assert orders > 10


@pytest.mark.parametrize("play", TWO, ids=lambda p: p.name)
def test_no_random_order_of_two_threads_goes_wrong(play: Play) -> None:
    for seed in range(8):
        outcome = by_seed(play, seed)
        assert outcome.wrong is None, outcome


@pytest.mark.parametrize("play", (*THREE, *FOUR), ids=lambda p: p.name)
def test_no_random_order_of_more_threads_goes_wrong(play: Play) -> None:
    for seed in range(10):
        outcome = by_seed(play, seed)
        assert outcome.wrong is None, outcome


@pytest.mark.parametrize("play", [BY_NAME[name] for name in AT_EVERY_PLACE], ids=lambda p: p.name)
def test_s27_the_garbage_collector_may_run_at_any_place(play: Play) -> None:
    finalised = 0
    for outcome in collect(play):
        assert outcome.wrong is None, outcome
        finalised = max(finalised, outcome.finalised)
    assert finalised == len(play.garbage)


def test_every_program_has_its_place() -> None:
    plays = (*TWO, *THREE, *FOUR, *COLLECTED)
    assert len({play.name for play in plays}) == len(plays)
    assert [len(play.threads) for play in (*TWO, *THREE, *FOUR)] == [2] * len(TWO) + [3] * len(THREE) + [4] * len(FOUR)


# -- wrong pools are found ------------------------------------------------------------------------


def test_a_snapshot_of_the_clock_that_is_taken_after_the_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """R4: the seqno is closed before the record, else a free in between counts as covered."""
    seal = Sealing.seal

    def late(self: Sealing, line: Any, given: int | None = None) -> Any:
        sealed = seal(self, line, given)
        if sealed is not None:
            with self.registry.lock:
                sealed.seqno, _ = line.close_seqno()  # what was freed meanwhile is covered too: wrong
                line.sealed = max(line.sealed, sealed.seqno)
        return sealed

    monkeypatch.setattr(Sealing, "seal", late)
    play = Play(
        "late_seal",
        "into 0 0 1; into 1 0 1; into 2 1 1; free 2; free 0; stats",
        ("seal", "use 1 0; free 1; stats"),
        "tick; tick; stats; into 8 1 1; into 9 2 1",
        config={"seal_frees": 1},
    )
    assert any(outcome.wrong is not None for outcome in explore(play, 2))


# -- the scheduler itself -------------------------------------------------------------------------


def threads(scheduler: Scheduler, *bodies: Callable[[], object], plan: dict[int, int] | None = None) -> None:
    scheduler.run(SimDevice(), bodies, plan)


def test_a_plan_repeats_a_run_exactly() -> None:
    for play in (*TWO, *THREE, *FOUR):
        first = by_seed(play, 3)
        scheduler = Scheduler(after_release=first.after_release, lane=first.lane)
        again = run(play, first.plan, scheduler=scheduler)
        assert again.plan == first.plan
        assert again.decisions == first.decisions


def test_every_order_is_tried_once_and_the_fewest_switches_come_first() -> None:
    play = BY_NAME["hits_on_one_stream"]
    plans = [tuple(sorted(outcome.plan.items())) for outcome in explore(play, 1)]
    assert len(plans) == len(set(plans))
    assert [len(plan) for plan in plans] == sorted(len(plan) for plan in plans)


def test_the_parts_of_a_search_are_all_of_it_and_share_nothing() -> None:
    play = BY_NAME["hits_on_one_stream"]

    def plans(part: tuple[int, int]) -> list[tuple[tuple[int, int], ...]]:
        return [tuple(sorted(outcome.plan.items())) for outcome in explore(play, 2, part)]

    whole = plans((1, 1))
    parts = [plans((which, 40)) for which in range(1, 41)]  # more than there are first switches
    assert sorted(plan for part in parts for plan in part) == sorted(whole) and len(set(whole)) == len(whole) > 400
    assert all([len(plan) for plan in part] == sorted(len(plan) for plan in part) for part in parts)


def test_threads_that_wait_for_each_other_are_reported_with_their_stacks() -> None:
    scheduler = Scheduler()
    with scheduler.in_place():
        one, two = make_lock("one"), make_lock("two")

        def nested_in_one_order(first: LockLike, second: LockLike) -> None:
            with first, second:
                pass

        def nested_in_the_other(first: LockLike, second: LockLike) -> None:
            with first, second:
                pass

        with pytest.raises(Stuck) as error:
            threads(
                scheduler, lambda: nested_in_one_order(one, two), lambda: nested_in_the_other(two, one), plan={1: 1}
            )
    text = str(error.value)
    assert "thread 0 waits for two, held by 1" in text and "thread 1 waits for one, held by 0" in text
    assert "nested_in_one_order" in text and "nested_in_the_other" in text


def test_a_lock_that_is_never_released_is_reported_when_its_thread_has_gone() -> None:
    scheduler = Scheduler()
    with scheduler.in_place():
        lock = make_lock("left")
        with pytest.raises(Stuck, match="thread 1 waits for left, held by 0"):
            threads(scheduler, lock.acquire, lock.acquire)


def test_a_thread_that_hangs_outside_of_the_allocator_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.schedules.scheduler.REAL_SECONDS", 0.05)
    go_on = threading.Event()
    with pytest.raises(Stuck, match="a thread hangs"):
        threads(Scheduler(), go_on.wait)
    go_on.set()


def test_an_error_of_a_thread_is_the_runs() -> None:
    def wrong() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        threads(Scheduler(), wrong, lambda: None)


def test_locks_are_what_the_allocator_knows() -> None:
    scheduler = Scheduler()
    with scheduler.in_place():
        lock = make_lock("any")
        assert isinstance(lock, OwnedLock) and isinstance(lock.inner, InnerLock)

        def twice() -> None:
            with lock, pytest.raises(Reentered), lock:
                pass
            with lock:
                assert not lock.acquire(timeout=0.1)

        threads(scheduler, twice)
        assert not lock.held_here()


def test_a_bounded_wait_for_a_lock_ends() -> None:
    scheduler = Scheduler()
    answers: list[bool] = []
    with scheduler.in_place():
        lock = make_lock("busy")

        def holds() -> None:
            with lock:
                scheduler.point("inside")

        def tries() -> None:
            answers.append(lock.acquire(blocking=False))
            answers.append(lock.acquire(timeout=1))

        threads(scheduler, holds, tries, plan={1: 1})
    assert answers[0] is False


def test_queues_and_clocks_are_the_schedulers_inside_and_real_outside() -> None:
    scheduler = Scheduler()
    with scheduler.in_place():
        pool = CachingAllocator(SimDevice())
        assert isinstance(pool.frees, Queue)
        assert isinstance(pool._registry.finished, Queue)
    assert not isinstance(CachingAllocator(SimDevice()).frees, Queue)


def litter(collected: list[str]) -> None:
    """What a test may leave behind: a pool, its memory and a stream, which only the garbage collector ends."""
    gpu = SimDevice()
    pool, stream = CachingAllocator(gpu), Stream(gpu)
    left: list[object] = [pool, stream, pool.allocate(1 << 20, stream=stream)]
    left.append(left)
    weakref.finalize(pool, collected.append, "litter")


def test_what_other_tests_left_behind_adds_no_step_wherever_it_is_collected() -> None:
    play = BY_NAME["hits_on_one_stream"]
    places = (1, 5, 12)
    for place in places:
        alone = Scheduler()
        run(play, collect=(place,), scheduler=alone)
        gc.collect()
        collected: list[str] = []
        litter(collected)
        with Scheduler().in_place():
            litter(collected)
        amid = Scheduler()
        assert not collected
        outcome = run(play, collect=(place,), scheduler=amid)
        assert outcome.wrong is None and collected == ["litter"] * 2
        assert amid.trace == alone.trace and amid.decisions == alone.decisions


def test_the_garbage_collector_does_not_run_by_itself() -> None:
    gc.enable()
    with Scheduler().in_place():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_other_threads_of_the_process_do_not_take_the_pools_of_a_run() -> None:
    theirs: list[int] = []

    def somebody_else() -> None:
        """A server of another test: its calls serve pools that have gone, and it leaves one itself."""
        reaper.reap()
        left = leave(SimDevice())
        theirs.append(len(reaper._leaving))
        left.run_until_idle()
        reaper.reap()
        theirs.append(left.used_bytes)

    def leave(gpu: SimDevice) -> SimDevice:
        """A closed pool with memory in flight."""
        with CachingAllocator(gpu) as pool:
            stream = Stream(gpu)
            kept = pool.allocate(1 << 20, stream=stream)
            gpu.launch(stream, 1000, writes=[kept])
        kept.close()
        return gpu

    with Scheduler().in_place():
        mine = leave(SimDevice())
        mine.run_until_idle()
        other = threading.Thread(target=somebody_else)
        other.start()
        other.join()
        assert mine.used_bytes > 0 and len(reaper._leaving) == 1
        reaper.reap()
        assert mine.used_bytes == 0 and len(reaper._leaving) == 0
    assert theirs[0] >= 1 and theirs[1] == 0


# -- the command ----------------------------------------------------------------------------------


def test_the_command_says_how_many_orders_went_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "TELL_S", 0.0)
    assert command.main(["hits_on_one_stream", "--seeds", "60"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("hits_on_one_stream: 60 orders")
    assert shown.err == "hits_on_one_stream: 50 orders so far, nothing wrong\n"
    assert command.main(["hits_on_one_stream", "--switches", "0"]) == 0
    assert command.main(["inside_a_scrape", "--garbage"]) == 0


def test_the_command_replays_one_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["hits_on_one_stream", "--plan", "3:1 9:0", "--collect", "4"]) == 0
    out = capsys.readouterr().out
    assert "collect" in out and out.endswith("nothing went wrong\n")
    assert command.main(["--plan", "3:1"]) == 2


def test_the_command_prints_what_replays_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Frees, "_retire", lambda *_: None)  # frees that are never stamped
    assert command.main(["frees_that_name_a_stream", "--switches", "1"]) == 1
    out = capsys.readouterr().out
    assert "again: python -m tests.schedules frees_that_name_a_stream --plan" in out
    assert command.main(["frees_that_name_a_stream", "--plan", ""]) == 1


def test_the_command_knows_its_programs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["no_such_program"])
    assert "no such program: no_such_program" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "one/two", "-1/-1"])
def test_the_command_refuses_parts_that_are_none(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["hits_on_one_stream", "--switches", "1", "--part", part])
    assert "--part" in capsys.readouterr().err


def test_the_command_plays_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["hits_on_one_stream", "--switches", "1", "--part", "1/29"]) == 0
    assert capsys.readouterr().out.startswith("hits_on_one_stream: 2 orders")

"""Two host threads inside seal, wait, free, drain, record and close: every single pre-emption, and many double ones.

`MODEL_PREEMPTIONS=2` (or 3) makes the search exhaustive to that number.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.model.pairs import PAIRS, Pair, explore, sample
from tests.model.threads import ModelLock, Scheduler, Stuck, plans

EXHAUSTIVE = int(os.environ.get("MODEL_PREEMPTIONS", "1"))
RUNS = 20
"""Random plans of two and of three pre-emptions, each."""


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: p.name)
def test_no_interleaving_of_two_threads_goes_wrong(pair: Pair) -> None:
    for plan, wrong in explore(pair, EXHAUSTIVE):
        assert wrong is None, (plan, wrong)
    rng = random.Random(pair.name)
    for preemptions in (2, 3):
        for plan, wrong in sample(pair, rng, RUNS, preemptions):
            assert wrong is None, (plan, wrong)


def test_plans_are_complete_and_come_fewest_first() -> None:
    found = list(plans(4, 2))
    assert found[0] == () and len(found) == 1 + 4 + 6
    assert [len(plan) for plan in found] == sorted(len(plan) for plan in found)


def test_a_lock_taken_twice_by_one_thread_is_an_error_and_not_a_hang() -> None:
    from allocator import SimDevice

    scheduler = Scheduler()
    lock = ModelLock(scheduler, "any")

    def twice() -> None:
        with lock, lock:
            pass

    with pytest.raises(Stuck):
        scheduler.run(SimDevice(), [twice, lambda: None])


def test_two_threads_that_wait_for_each_other_are_an_error_and_not_a_hang() -> None:
    from allocator import SimDevice

    scheduler = Scheduler()
    one, two = ModelLock(scheduler, "one"), ModelLock(scheduler, "two")

    def nested(first: ModelLock, second: ModelLock) -> None:
        with first, second:
            pass

    with pytest.raises(Stuck):
        scheduler.run(SimDevice(), [lambda: nested(one, two), lambda: nested(two, one)], (2,))

"""What is left of a round that failed: the fewest operations found that fail in the same way.

Rule: *a shorter program keeps the contract*.  One thread plays the round's operations in the order in which they
began.  If that fails too, everything behind the failure goes, then whole workers, the stories of single blocks, and
single operations, as long as what is left is a right program (contract.py) and still fails with the same kind.  If
neither this order fails nor a few others that threads might have taken, real threads are part of the cause: the
recording then holds the round as it is, and says so.

Only on the simulator, where a program runs the same way each time.  Next: report.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Final

from allocator import Config
from allocator.stress.contract import breach
from allocator.stress.hammer import Outcome, make_pool, quick_switches
from allocator.stress.operations import Recording, Setting, Step
from allocator.stress.player import Violation
from allocator.stress.rounds import Round
from allocator.stress.targets import Target, open_target

PATIENCE_S: Final = 30.0
"""Seconds that shrinking may take."""

ORDERS: Final = 8
"""Other orders of the operations that are tried where the one seen does not fail again."""

MakeTarget = Callable[[Setting], Target]


def simulated(setting: Setting) -> Target:
    """A new simulated device."""
    return open_target(None, setting.limit)


def play(
    recording: Recording, make: MakeTarget = simulated, config: Config | None = None, *, check_each: bool = False
) -> tuple[int, Violation | None]:
    """One thread plays a recording on a new pool: (operations begun, what was wrong)."""
    target = make(recording.setting)
    pool = make_pool(target, recording.setting, config)
    one = Round(target, pool, recording.setting)
    one.play(recording.steps, check_each=check_each)
    _close(pool)
    return one.done, one.violation


def play_threaded(
    recording: Recording,
    look: Callable[[], bool] = lambda: False,
    make: MakeTarget = simulated,
    config: Config | None = None,
) -> tuple[int, Violation | None]:
    """A thread for each worker plays its part of a recording, on a new pool."""
    target = make(recording.setting)
    pool = make_pool(target, recording.setting, config)
    one = Round(target, pool, recording.setting)
    parts = [[op for who, op in recording.steps if who == worker] for worker in range(recording.setting.workers)]
    with quick_switches():
        one.run(parts, look)
    if one.violation is None or one.violation.kind != "hang":
        _close(pool)
    return one.done, one.violation


def _close(pool: object) -> None:
    try:
        pool.close()  # type: ignore[attr-defined]
    except Exception:  # the round has said what is wrong
        return


def shrink(
    outcome: Outcome,
    make: MakeTarget = simulated,
    config: Config | None = None,
    *,
    patience_s: float = PATIENCE_S,
    progress: Callable[[int], object] = lambda steps: None,
) -> Recording:
    """The shortest failing program found for an outcome with a failed round.

    progress: called with the number of operations left.  ValueError for an outcome without a failed round.
    """
    violation, number = outcome.violation, outcome.failed_round
    if violation is None or number is None:
        raise ValueError("there is no failed round to shrink")
    setting = outcome.plan.setting
    steps = outcome.plan.steps(number, outcome.order)
    whole = Recording(replace(setting, alone=False), tuple(steps), f"{violation.kind}: {violation.text}")
    deadline = time.monotonic() + patience_s
    check_each = violation.kind == "check"
    alone = replace(whole, setting=replace(setting, alone=True))
    for candidate in _orders(outcome, steps):
        done, again = play(replace(alone, steps=tuple(candidate)), make, config, check_each=check_each)
        if again is not None:
            steps = candidate
            break
        if time.monotonic() > deadline:
            return whole
    else:
        return whole
    kind = again.kind
    found = [again]

    def fails(candidate: Sequence[Step]) -> bool:
        if time.monotonic() > deadline or breach(candidate) is not None:
            return False
        _, wrong = play(replace(alone, steps=tuple(candidate)), make, config, check_each=check_each)
        if wrong is None or wrong.kind != kind:
            return False
        found[0] = wrong
        progress(len(candidate))
        return True

    steps = steps[:done]
    for units in (_by_worker, _by_block, _singly):
        steps = _reduced(steps, units, fails)
    return replace(alone, steps=tuple(steps), wrong=f"{found[0].kind}: {found[0].text}")


def _orders(outcome: Outcome, steps: list[Step]) -> Iterator[list[Step]]:
    """The order in which the operations began; then others that real threads might have taken, the same each time."""
    yield steps
    if outcome.failed_round is None or outcome.plan.setting.workers == 1:
        return
    plan = outcome.plan
    order = [worker for worker in range(plan.setting.workers) for _ in range(plan.operations)]
    for attempt in range(ORDERS):
        Random(f"{plan.setting.seed}/{attempt}").shuffle(order)
        yield plan.steps(outcome.failed_round, order)


Units = Callable[[Sequence[Step]], list[list[int]]]


def _by_worker(steps: Sequence[Step]) -> list[list[int]]:
    return _grouped(steps, lambda index, step: step.worker)


def _by_block(steps: Sequence[Step]) -> list[list[int]]:
    """All that happens to one block from its allocation on is one story; the rest stays together with nothing."""
    story = 0
    current: dict[tuple[int, int], int] = {}
    keys: list[object] = []
    for worker, op in steps:
        if op.verb in ("alloc", "take"):
            story += 1
            current[worker, op.a] = story
        if op.verb in ("alloc", "take", "use", "read", "share", "declare", "free", "free_on", "drop", "cycle", "give"):
            keys.append(current.get((worker, op.a), 0))
        else:
            keys.append(None)
    grouped = _grouped(steps, lambda index, step: keys[index])
    return [group for group in grouped if keys[group[0]] is not None]


def _singly(steps: Sequence[Step]) -> list[list[int]]:
    return [[index] for index in range(len(steps))]


def _grouped(steps: Sequence[Step], key: Callable[[int, Step], object]) -> list[list[int]]:
    groups: dict[object, list[int]] = {}
    for index, step in enumerate(steps):
        groups.setdefault(key(index, step), []).append(index)
    return list(groups.values())


def _reduced(steps: Sequence[Step], units: Units, fails: Callable[[Sequence[Step]], bool]) -> list[Step]:
    """Leave out units, many at once first, as long as what is left fails."""
    steps = list(steps)
    size = max(1, len(units(steps)) // 2)
    while True:
        groups, at, shorter = units(steps), 0, False
        while at < len(groups):
            out = {index for group in groups[at : at + size] for index in group}
            candidate = _without(steps, out)
            if candidate and fails(candidate):
                steps, shorter = candidate, True
                groups = units(steps)
            else:
                at += size
        if size == 1 and not shorter:
            return steps
        size = max(1, size // 2)


def _without(steps: Sequence[Step], out: Iterable[int]) -> list[Step]:
    gone = frozenset(out)
    return [step for index, step in enumerate(steps) if index not in gone]

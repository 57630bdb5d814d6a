"""Which orders are tried, and what is wrong with one: nothing, or a race, a violation, a leak, a deadlock, an error.

    explore   every plan of up to a number of switches, each exactly once, the fewest first; or a part of them
    sample    by seed, of any number of switches; what a seed chose is a plan, which is printed and replayed
    collect   the garbage collector at every place, one after the other

Next: __main__.py (long searches), test_schedules.py.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice

from allocator import CachingAllocator, Config
from tests.schedules.programs import Actor, Garbage, Play, steps
from tests.schedules.scheduler import Plan, Scheduler


@dataclass(frozen=True)
class Outcome:
    """wrong: what went wrong, or None.  plan: replays it.  decisions: the alternatives at each."""

    play: Play
    plan: dict[int, int]
    wrong: str | None
    decisions: list[tuple[int, ...]]
    points: int
    collect: tuple[int, ...] = ()
    refused: int = 0
    finalised: int = 0
    after_release: bool = False
    lane: bool = False

    def __str__(self) -> str:
        at = f" --collect {' '.join(map(str, self.collect))}" if self.collect else ""
        at += " --after-release" if self.after_release else ""
        at += " --lane" if self.lane else ""
        plan = " ".join(f"{decision}:{thread}" for decision, thread in sorted(self.plan.items()))
        return f"{self.wrong}\nagain: python -m tests.schedules {self.play.name} --plan '{plan}'{at}"


def run(
    play: Play, plan: Plan | None = None, collect: Collection[int] = (), scheduler: Scheduler | None = None
) -> Outcome:
    """Play it once."""
    scheduler = Scheduler() if scheduler is None else scheduler
    with scheduler.in_place():
        actor = Actor(play.universe())
        wrong: str | None = None
        try:
            actor.play(steps(play.before))
            for what in play.garbage:
                Garbage(actor, what)
            scheduler.run(
                actor.gpu,
                [lambda line=line: actor.play(steps(line)) for line in play.threads],  # type: ignore[misc]
                plan,
                collect,
            )
            wrong = _end(play, actor)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        finally:
            if play.garbage:
                gc.collect()
        return Outcome(
            play,
            scheduler.taken,
            wrong,
            scheduler.decisions,
            scheduler.points,
            tuple(collect),
            actor.refused,
            actor.finalised,
            scheduler.after_release,
            scheduler.lane,
        )


def _end(play: Play, actor: Actor) -> str | None:
    """Everything that is left is used and given back: what is wrong, or None."""
    pool = actor.pool
    pool.check()
    actor.play(steps(play.after))
    pool.check()
    wrong = actor.wrong()
    if wrong is not None:
        return wrong
    for block in actor.blocks:
        if block is not None:
            block.close()
    actor.blocks.clear()
    actor.graph = None
    if play.garbage:
        gc.collect()
    actor.gpu.run_until_idle()
    if not pool.closed:
        pool.settle()
        stats = pool.stats()
        if stats.allocated_bytes or stats.in_flight_bytes:
            return f"lost: {stats.allocated_bytes} bytes allocated, {stats.in_flight_bytes} in flight"
        limit = play.config.get("limit")
        if limit and stats.limit_bytes == limit and stats.peak_reserved_bytes > limit:
            return f"over the limit: {stats.peak_reserved_bytes} bytes were reserved"
        lines = pool._registry.lines.values()
        if any(line.pins for line in lines) or any(s.users for line in lines for s in line.in_flight):
            return "a pin or a use of an event was not given back"
        pool.close()
    with CachingAllocator(actor.gpu, Config()) as other:
        other.stats()
        other.stats()
    if actor.gpu.used_bytes:
        return f"leak: {actor.gpu.used_bytes} bytes held after close"
    return actor.wrong()


def explore(play: Play, most: int, part: tuple[int, int] = (1, 1), *, lane: bool = False) -> Iterator[Outcome]:
    """Every plan of up to `most` switches that the program did not have to make, each once, the fewest first.

    part: (k, n) for the k-th of n parts, which have no plan in common and are all of them together.  They are cut by
    the first switch: plans that share it are in one part, and the plan without a switch is in the first.
    lane: where steps hold, so that hits take no lock (gil.py).

    Nothing is left out.  To try one only of several orders that differ in steps which do not touch the same lock, queue
    or driver would save less than half of them (docs/testing.md).
    """
    same: dict[tuple[int, ...], tuple[int, ...]] = {}
    todo: deque[tuple[dict[int, int], list[tuple[int, ...]]]] = deque()
    """Plans that have been played, and the alternatives there were: those of one switch more are made when needed."""
    outcome = run(play, scheduler=Scheduler(lane=lane))
    if part[0] == 1:
        yield outcome
    if most:
        todo.append(({}, outcome.decisions))
    while todo:
        plan, decisions = todo.popleft()
        first = max(plan, default=-1) + 1
        longer = ({**plan, at: thread} for at in range(first, len(decisions)) for thread in decisions[at])
        for child in longer if plan else islice(longer, part[0] - 1, None, part[1]):
            outcome = run(play, child, scheduler=Scheduler(lane=lane))
            yield outcome
            if len(child) < most:
                todo.append((child, [same.setdefault(others, others) for others in outcome.decisions]))


def sample(play: Play, seeds: Collection[int]) -> Iterator[tuple[int, Outcome]]:
    """One order a seed; low and high chances of a switch take turns."""
    for seed in seeds:
        yield seed, by_seed(play, seed)


def by_seed(play: Play, seed: int, lane: bool | None = None) -> Outcome:
    """The order that a seed stands for.  lane: as in `explore`; None for half of the seeds."""
    rng = random.Random(f"{play.name} {seed}")
    chance = (0.03, 0.1, 0.3)[seed % 3]
    return run(
        play,
        scheduler=Scheduler(rng, chance, after_release=seed % 2 == 1, lane=seed % 4 >= 2 if lane is None else lane),
    )


def collect(play: Play, plan: Plan | None = None) -> Iterator[Outcome]:
    """The garbage collector at every place of the run."""
    outcome = run(play, plan)
    yield outcome
    at = 1
    while at <= outcome.points:
        yield run(play, plan, (at,))
        at += 1

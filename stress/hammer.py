"""The thread hammer: real threads and real locks over one pool, round after round, until time is up.

Rule: *every run ends with exactly one verdict*, however it ends: time, a signal, a violation.  One pool lives through
all rounds; each round begins and ends with it empty (rounds.py), so memory is bounded however long a run is, and a
round that fails can be played again by itself.

Workers of an even round all run the same workload, those of an odd one different ones.  Threads change places far
more often than Python lets them, for as long as the run lasts.
Next: shrinking.py, report.py.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from allocator import CachingAllocator, Config, Stats
from allocator.sizes import MIB
from allocator.stress.histogram import Latencies, merged
from allocator.stress.operations import Op, Setting, Step
from allocator.stress.player import TIMED, Violation
from allocator.stress.rounds import Round, violation_of
from allocator.stress.targets import Target
from allocator.stress.workloads import WORKLOADS, Shape

SHARE: Final = 64 * MIB
"""Bytes of the limit for each worker, unless told otherwise."""

SWITCH_S: Final = 1e-4
"""How long a thread runs before another may; Python's own is 5 ms."""

OPERATIONS: Final = 2000
"""Of each worker in a round."""


@dataclass(frozen=True)
class Plan:
    """What to run.  operations: of each worker in a round.  workloads: names; all of them by default."""

    setting: Setting
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    operations: int = OPERATIONS

    def __post_init__(self) -> None:
        if not self.workloads or self.operations < 1:
            raise ValueError("a plan needs a workload and an operation")
        for name in self.workloads:
            if name not in WORKLOADS:
                raise ValueError(f"there is no workload {name!r}; known: {', '.join(WORKLOADS)}")
        if self.setting.limit and self.setting.limit < MIB * self.setting.workers:
            raise ValueError(f"a limit of {self.setting.limit} bytes is less than 1 MiB for each worker")

    def workload(self, number: int, worker: int) -> str:
        """Which one a worker runs in a round."""
        names = self.workloads
        return names[(number // 2 + (worker if number % 2 else 0)) % len(names)]

    def programs(self, number: int) -> list[Iterator[Op]]:
        """The operations of round `number`, an iterator a worker; the same each time."""
        workers = self.setting.workers
        share = (self.setting.limit or SHARE * workers) // workers
        return [
            islice(
                WORKLOADS[self.workload(number, worker)].operations(
                    f"{self.setting.seed}/{number}", Shape(self.setting.streams, worker, workers, share)
                ),
                self.operations,
            )
            for worker in range(workers)
        ]

    def steps(self, number: int, order: Sequence[int]) -> list[Step]:
        """The round as one thread would play it: each worker's next operation, in this order."""
        programs = self.programs(number)
        return [Step(worker, next(programs[worker])) for worker in order]


@dataclass
class Outcome:
    """What a run did and found.  seconds: of the rounds, without setting up."""

    plan: Plan
    device: str
    rounds: int = 0
    operations: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    latencies: Mapping[str, Latencies] = field(default_factory=lambda: {name: Latencies() for name in TIMED})
    stats: Stats | None = None
    violation: Violation | None = None
    failed_round: int | None = None
    """The round of the violation; None if the pool failed at the very end."""
    order: Sequence[int] = ()
    """Of the failed round."""
    worker: int | None = None

    def take(self, done: Round) -> None:
        """Add what a round has done."""
        self.rounds += 1
        self.operations += done.done
        for player in done.players:
            self.counts.update(player.counts)
        for name in TIMED:
            self.latencies[name].merge(merged(player.latencies[name] for player in done.players))


class Hammer:
    """One run of a plan.  Makes the pool at once; raises what that raises.

    config: of the pool; its limit is the setting's.
    """

    def __init__(self, target: Target, plan: Plan, config: Config | None = None) -> None:
        self._target = target
        self._plan = plan
        self.pool = make_pool(target, plan.setting, config)
        self.outcome = Outcome(plan, f"{target.device.name} ({target.device.label})")
        self._over = False

    def run(
        self,
        seconds: float,
        stopped: Callable[[], bool] = lambda: False,
        progress: Callable[[Outcome, int], object] = lambda outcome, more: None,
        *,
        rounds: int = 0,
    ) -> Outcome:
        """Round after round until the time is up, somebody says stop, or something is wrong; then the final check.

        rounds: at most so many; 0 = no bound.  progress: called some times a second with the outcome so far and the
        operations of the round that runs.
        """
        outcome, deadline = self.outcome, time.monotonic() + seconds
        try:
            with quick_switches(), quick_collections():
                for number in range(rounds or sys.maxsize):
                    if stopped() or (number and time.monotonic() >= deadline):
                        break
                    self._round(number, deadline, stopped, progress)
                    if outcome.violation is not None:
                        break
        except Exception as error:
            outcome.violation = outcome.violation or violation_of(error)
        self.finish()  # not after a KeyboardInterrupt: whoever is that impatient wants no checks
        return outcome

    def _round(
        self,
        number: int,
        deadline: float,
        stopped: Callable[[], bool],
        progress: Callable[[Outcome, int], object],
    ) -> None:
        outcome, began = self.outcome, time.monotonic()
        one = Round(self._target, self.pool, self._plan.setting)

        def look() -> bool:
            progress(outcome, one.done)
            return stopped() or time.monotonic() >= deadline

        one.run(self._plan.programs(number), look)
        outcome.seconds += time.monotonic() - began
        outcome.take(one)
        if one.violation is not None:
            outcome.violation, outcome.worker = one.violation, one.worker
            outcome.failed_round, outcome.order = number, one.order

    def _hangs(self) -> bool:
        return self.outcome.violation is not None and self.outcome.violation.kind == "hang"

    def finish(self) -> None:
        """The final check: statistics are read, and the pool closed.  Once, however often it is called."""
        if self._over:
            return
        self._over = True
        outcome = self.outcome
        if self._hangs():
            return  # a lock may be held for ever
        try:
            outcome.stats = self.pool.stats()
            self.pool.close()
            if outcome.violation is None and (leaked := self._target.leaked_bytes()):
                outcome.violation = Violation("leak", f"the pool is closed, and the device counts {leaked} bytes")
        except Exception as error:
            outcome.violation = outcome.violation or violation_of(error)


def make_pool(target: Target, setting: Setting, config: Config | None = None) -> CachingAllocator:
    """A pool for a run: `config`, or what the environment asks for, with the setting's limit."""
    if config is None:
        config = Config.from_env(device_memory=target.device.total_memory)
    return CachingAllocator(target.device, config=replace(config, limit=setting.limit), name="stress")


@contextmanager
def quick_switches() -> Iterator[None]:
    """Threads change places every tenth of a millisecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def quick_collections() -> Iterator[None]:
    """The garbage collector looks only at what is made from here on.

    Near the limit the pool collects before it gives up, thousands of times, and each time all that a process has
    imported would be looked at.  A process that has frozen its objects itself is left as it is.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

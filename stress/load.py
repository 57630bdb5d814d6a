"""One pool under the users of a load test: batches of operations, and one final check.

Rule: *the check runs once, however the test ends*, and its verdict counts more than any single operation.  A process
has at most one `Session` at a time; each locust worker has its own.  Nothing here imports locust or gevent.

Threads: each user is a `Part`; batches of different parts run at the same time in different threads.  `finish` waits
for the batches that run, and refuses later ones.
Next: locustfile.py (who calls this), rounds.py (the checks).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Final

from allocator.sizes import MIB
from allocator.stress.hammer import make_pool
from allocator.stress.histogram import Latencies
from allocator.stress.native import native_lock, native_threads, replaced
from allocator.stress.operations import Op, Setting
from allocator.stress.player import TIMED, Player, Violation
from allocator.stress.rounds import Round, violation_of
from allocator.stress.targets import Target, open_target
from allocator.stress.workloads import WORKLOADS, Shape
from allocator.sync import OwnedLock, use_lock_factory

MAILBOXES: Final = 16
"""Users hand blocks over to so many neighbours."""


@dataclass(frozen=True)
class Options:
    """device: None for the simulator, else a GPU's number.  share: bytes of each user's own working set."""

    device: int | None = None
    streams: int = 8
    limit: int = 1024 * MIB
    share: int = 16 * MIB
    seed: int = 0


@dataclass
class Verdict:
    """What a session, or several, did and found."""

    wrong: list[str] = field(default_factory=list)
    """One line each; empty if all is well."""
    operations: int = 0
    seconds: float = 0.0
    sessions: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    reuse: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, Latencies] = field(default_factory=lambda: {name: Latencies() for name in TIMED})

    def merge(self, other: Verdict) -> Verdict:
        """Take in another one, of the same time; returns itself."""
        self.wrong += other.wrong
        self.operations += other.operations
        self.seconds = max(self.seconds, other.seconds)
        self.sessions += other.sessions
        self.counts.update(other.counts)
        self.reuse.update(other.reuse)
        for name, one in other.latencies.items():
            self.latencies.setdefault(name, Latencies()).merge(one)
        return self

    def to_json(self) -> dict[str, Any]:
        """For a message to another process."""
        return {
            "wrong": self.wrong,
            "operations": self.operations,
            "seconds": self.seconds,
            "sessions": self.sessions,
            "counts": dict(self.counts),
            "reuse": dict(self.reuse),
            "latencies": {name: one.to_json() for name, one in self.latencies.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        """What `to_json` gave."""
        return cls(
            [str(text) for text in data["wrong"]],
            int(data["operations"]),
            float(data["seconds"]),
            int(data["sessions"]),
            Counter(data["counts"]),
            Counter(data["reuse"]),
            {name: Latencies.from_json(one) for name, one in data["latencies"].items()},
        )


class Session:
    """A pool, and who uses it.  Opens the device at once; raises what that raises."""

    def __init__(self, options: Options, target: Target | None = None) -> None:
        self.options = options
        with native_threads():
            if replaced():
                use_lock_factory(_native_owned_lock)
            self._target = open_target(options.device, options.limit) if target is None else target
            setting = Setting(workers=MAILBOXES, streams=options.streams, limit=options.limit, seed=options.seed)
            self.pool = make_pool(self._target, setting)
            self._round = Round(self._target, self.pool, setting)
        self._round.players.clear()
        self._round.arena.order = deque(maxlen=0)
        self._parts: dict[int, Part] = {}
        self._numbers = count()
        self._lock = native_lock()
        self._began = time.monotonic()
        self._verdict = Verdict(sessions=1)
        self._over = False

    @property
    def violation(self) -> Violation | None:
        """The first thing found wrong."""
        return self._round.violation

    @property
    def over(self) -> bool:
        """Has the final check begun?"""
        return self._over

    def join(self, workload: str) -> Part:
        """A new user."""
        with self._lock:
            part = Part(self, next(self._numbers), workload)
            self._parts[part.number] = part
            return part

    def leave(self, part: Part) -> None:
        """A user has ended: its blocks are freed, and its figures kept.  Twice is harmless."""
        with part.lock, self._lock:
            if self._parts.pop(part.number, None) is None:
                return
            try:
                with self._target.session():
                    part.player.end()
            except Exception as error:
                self.blame(error)
            self._take(part.player)

    def blame(self, error: BaseException) -> Violation:
        """Something is wrong; the first one counts."""
        violation = violation_of(error)
        with self._lock:
            if self._round.violation is None:
                self._round.violation = violation
        return violation

    def figures(self) -> Verdict:
        """What has been done so far; not what a batch that runs has done."""
        with self._lock:
            sofar = Verdict(operations=self._verdict.operations, sessions=1, counts=Counter(self._verdict.counts))
            sofar.seconds = self._verdict.seconds or time.monotonic() - self._began
            players = [part.player for part in self._parts.values()]
            for name in TIMED:
                sofar.latencies[name].merge(self._verdict.latencies[name], *(p.latencies[name] for p in players))
            sofar.operations += sum(player.operations for player in players)
            sofar.wrong = list(self._verdict.wrong)
            return sofar

    def finish(self) -> Verdict:
        """Free everything, check everything, close the pool; once: later calls return the same verdict."""
        with self._lock:
            first, self._over = not self._over, True
        parts = list(self._parts.values())
        if not first:
            return self._verdict
        locks = [part.lock for part in parts]
        for lock in locks:  # the batches that run come to their end
            lock.acquire()
        try:
            return self._finish(parts)
        finally:
            for lock in locks:
                lock.release()

    def _finish(self, parts: list[Part]) -> Verdict:
        verdict, one = self._verdict, self._round
        verdict.seconds = time.monotonic() - self._began
        one.players[:] = [part.player for part in parts]
        with native_threads():
            one.end()
            with suppress(Exception):
                verdict.reuse.update(self.pool.stats().allocations)
            try:
                self.pool.close()
            except Exception as error:
                self.blame(error)
        with self._lock:
            for part in parts:
                self._take(part.player)
            self._parts.clear()
            one.players.clear()
        if one.violation is not None:
            verdict.wrong.append(f"{one.violation.kind}: {one.violation.text}")
        return verdict

    def _take(self, player: Player) -> None:
        self._verdict.operations += player.operations
        self._verdict.counts.update(player.counts)
        for name in TIMED:
            self._verdict.latencies[name].merge(player.latencies[name])


class Part:
    """One user of a session.  Its batches run one after the other."""

    def __init__(self, session: Session, number: int, workload: str) -> None:
        options, worker = session.options, number % MAILBOXES
        self.number = number
        self.lock = native_lock()
        self.player = Player(session._round.arena, worker)
        self._session = session
        shape = Shape(options.streams, worker, MAILBOXES, options.share)
        self._ops = WORKLOADS[workload].operations(f"{options.seed}/{number}", shape)

    def play(self, operations: int) -> int:
        """So many operations in the calling thread; returns how many were done: 0 once the session is over.

        Raises Violation.
        """
        session = self._session
        with self.lock:
            if session.over or session.violation is not None or self.number not in session._parts:
                return 0
            ops: list[Op] = list(islice(self._ops, operations))
            before = self.player.operations
            try:
                with session._target.session():
                    self.player.play(ops)
            except Exception as error:
                raise session.blame(error) from None
            return self.player.operations - before


def _native_owned_lock(name: str) -> OwnedLock:
    return OwnedLock(native_lock())

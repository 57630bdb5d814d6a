"""Two host threads, interleaved at will: deterministic, and exhaustive to a number of pre-emptions.

Only one thread runs at a time.  It may be pre-empted wherever another thread could really get in between: before
it takes one of the allocator's locks, and before each driver call.  A *plan* is the list of such points, counted
over both threads, at which the other thread goes on; a thread that waits for a lock, or has ended, gives way by
itself.  So a plan is replayed exactly.

    scheduler = Scheduler()
    with scheduler.locks():      # locks made from here on are the scheduler's
        ...                      # make the pool
    scheduler.run(gpu, [body0, body1], plan=(3, 17))

Next: test_interleavings.py.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from allocator import SimDevice
from allocator.sync import LockLike, use_lock_factory

Plan = tuple[int, ...]


class Stuck(AssertionError):
    """Both threads wait for each other."""


class ModelLock:
    """A lock that asks the scheduler before it is taken.  Not re-entrant, and says so."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self._scheduler = scheduler
        self.name = name
        self.owner: int | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`."""
        scheduler = self._scheduler
        me = scheduler.me()
        scheduler.point(f"lock {self.name}")
        if self.owner is not None and self.owner == me:
            raise Stuck(f"{self.name} is taken twice by one thread")
        while self.owner is not None:
            if not blocking:
                return False
            scheduler.give_way(f"lock {self.name}")
        self.owner = me
        return True

    def release(self) -> None:
        """As `threading.Lock.release`."""
        self.owner = None

    def checked(self) -> ModelLock:
        """As `OwnedLock.checked`."""
        return self

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Scheduler:
    """Whose turn it is."""

    def __init__(self) -> None:
        self._turns: list[threading.Semaphore] = []
        self._local = threading.local()
        self._running = 0
        self._over: list[bool] = []
        self._plan: frozenset[int] = frozenset()
        self._blocked = 0
        self.points = 0
        """Points passed in the run."""
        self.trace: list[str] = []

    @contextmanager
    def locks(self) -> Iterator[None]:
        """Make the allocator's locks ours."""

        def make(name: str) -> LockLike:
            return ModelLock(self, name)

        use_lock_factory(make)
        try:
            yield
        finally:
            use_lock_factory(None)

    def me(self) -> int:
        """The calling thread's number; -1 for one that is not ours."""
        return getattr(self._local, "number", -1)

    def point(self, what: str) -> None:
        """Here the other thread may get in between."""
        me = self.me()
        if me < 0:
            return
        self.points += 1
        self._blocked = 0
        self.trace.append(f"{me}: {what}")
        if self.points in self._plan:
            self._switch(me)

    def give_way(self, what: str) -> None:
        """The thread cannot go on before the other has."""
        me = self.me()
        self._blocked += 1
        if me < 0 or self._blocked > 2 or all(self._over[t] for t in range(len(self._over)) if t != me):
            raise Stuck(f"deadlock at {what}; {self.trace[-20:]}")
        self._switch(me)

    def _switch(self, me: int) -> None:
        other = next((t for t in range(len(self._over)) if t != me and not self._over[t]), None)
        if other is not None:
            self._running = other
            self._turns[other].release()
            self._turns[me].acquire()

    def _sleep(self, seconds: float) -> None:
        """Whoever sleeps lets the other go on: there is no other time in here."""
        me = self.me()
        if me >= 0:
            self.points += 1
            self._switch(me)

    def run(self, gpu: SimDevice, bodies: Sequence[Callable[[], object]], plan: Plan = ()) -> int:
        """Run them to their ends; returns the number of points passed.  Raises the first error of a body."""
        self._turns = [threading.Semaphore(0) for _ in bodies]
        self._over = [False] * len(bodies)
        self._plan = frozenset(plan)
        self._blocked = 0
        self.points = 0
        self.trace = []
        errors: list[BaseException] = []

        def call(number: int, body: Callable[[], object]) -> None:
            self._local.number = number
            self._turns[number].acquire()
            try:
                body()
            except BaseException as error:
                errors.append(error)
            finally:
                self._over[number] = True
                self._local.number = -1
                other = next((t for t in range(len(bodies)) if not self._over[t]), None)
                if other is not None:
                    self._turns[other].release()

        threads = [threading.Thread(target=call, args=pair, daemon=True) for pair in enumerate(bodies)]
        gpu.before_call = self.point
        real_sleep, time.sleep = time.sleep, self._sleep  # type: ignore[assignment]
        try:
            for thread in threads:
                thread.start()
            self._turns[0].release()
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive(), f"a thread hangs; {self.trace[-20:]}"
        finally:
            gpu.before_call = None
            time.sleep = real_sleep
        if errors:
            raise errors[0]
        return self.points


def plans(points: int, most: int) -> Iterator[Plan]:
    """All plans of up to `most` pre-emptions among that many points, fewest first."""
    for n in range(most + 1):
        yield from itertools.combinations(range(1, points + 1), n)

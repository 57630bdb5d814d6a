"""Two to four host threads whose order is chosen: exhaustively to a number of switches, or by a seed.

One thread runs at a time.  Another may go on wherever it could really get in between: before a lock is taken (and,
where asked for, after it was released), before something is put into or taken out of a queue that needs no lock, and
before each driver call.  Each such place where more than one thread could go on is a *decision*.  Left alone, the
running thread goes on, and where it cannot, the next one that can.  A *plan* names the decisions that go another way:
{decision: thread}.  So a plan says everything about a run, is printed when something goes wrong, and can be replayed.

    scheduler = Scheduler()
    with scheduler.in_place():       # locks, queues and clocks made from here on are the scheduler's
        ...                          # make the device and the pool
        scheduler.run(gpu, bodies, plan={17: 1})

The locks are the allocator's own `OwnedLock`s around an inner lock of ours, so what they say to a finaliser that
comes back into our own section is tested as it is.  Threads that all wait for each other are `Stuck`, and a thread that
hangs outside of all this is found by a bound on real time; both with the stacks of all threads.
Next: programs.py (what the threads do), explorer.py (which plans), test_schedules.py.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace, TracebackType
from typing import Any, Final
from unittest.mock import patch

from allocator import SimDevice
from allocator.caching import reaper
from allocator.caching.front import Front
from allocator.sync import LockLike, OwnedLock, use_lock_factory

Plan = Mapping[int, int]

REAL_SECONDS: Final = 30.0
"""After which a run that does not end is called a hang."""
UNSEEN: Final = frozenset(
    {"cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode", "cuLaunchKernel", "cuCtxGetStreamPriorityRange"}
)
"""Driver calls that change nothing which another thread could notice, or that are the program's own."""


class Stuck(AssertionError):
    """No thread can go on, or one hangs."""


class Abandoned(BaseException):
    """Ends the threads of a run that is over already."""


class InnerLock:
    """A re-entrant lock that asks the scheduler before it is taken.  What `OwnedLock` holds inside."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self._scheduler = scheduler
        self.name = name
        self.owner: int | None = None
        self.depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.RLock.acquire`."""
        scheduler = self._scheduler
        me = scheduler.me()
        if self.owner != me:
            scheduler.point(f"lock {self.name}")
            while self.owner is not None:
                if not blocking or timeout == 0:
                    return False
                if timeout > 0:
                    scheduler.sleep(timeout)
                    if self.owner is not None:
                        return False
                    break
                scheduler.wait_for(self)
            self.owner = me
        self.depth += 1
        return True

    def release(self) -> None:
        """As `threading.RLock.release`."""
        assert self.depth > 0 and self.owner == self._scheduler.me(), (self.name, self.owner, self.depth)
        self.depth -= 1
        if not self.depth:
            self.owner = None
            if self._scheduler.after_release:
                self._scheduler.point(f"released {self.name}")

    def _is_owned(self) -> bool:
        return self.depth > 0 and self.owner == self._scheduler.me()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self.release()


class Queue(deque[Any]):
    """A queue without a lock, as the allocator's are: other threads may come in before each change.

    One that an earlier run made, or a thread that is none of the run's, asks nobody: what is left of that run may be
    finalised in the middle of this one, and is none of its steps.
    """

    scheduler: Scheduler | None = None

    def __init__(self, *items: Any) -> None:
        super().__init__(*items)
        scheduler = Queue.scheduler
        self.own = scheduler if scheduler is not None and scheduler.knows_this_thread() else None

    def append(self, item: Any, /) -> None:
        """As a deque's."""
        if self.own is not None and self.own is Queue.scheduler:
            self.own.point("append")
        super().append(item)

    def popleft(self) -> Any:
        """As a deque's."""
        if self.own is not None and self.own is Queue.scheduler:
            self.own.point("popleft")
        return super().popleft()


class Leaving(Queue):
    """The process-wide list of pools that have gone, for the pools and the threads of one run.

    All others have the list that was there before.  Else a pool that an earlier test has left behind would be served
    in the middle of the run, and another thread of the process, a server that is scraped, could have the run's own pool
    in its hands at the moment at which the run looks whether all memory is back.
    """

    def __init__(self, outside: deque[Any]) -> None:
        super().__init__()
        self._outside = outside

    def _mine(self) -> bool:
        return self.own is not None and self.own.knows_this_thread()

    def append(self, item: Any, /) -> None:
        """By the run that made the pool."""
        queue = getattr(item.pool.frees, "rest", item.pool.frees)  # a lane's
        if self.own is not None and getattr(queue, "own", None) is self.own:
            super().append(item)
        else:
            self._outside.append(item)

    def popleft(self) -> Any:
        """By the thread that asks."""
        return super().popleft() if self._mine() else self._outside.popleft()

    def __len__(self) -> int:
        return super().__len__() if self._mine() else len(self._outside)


class Scheduler:
    """Whose turn it is.

    rng: goes another way by chance, with `chance` at each decision; what it chose is in `taken`.
    after_release: another thread may also come in right after a lock was released.
    lane: hits take no lock, and a free is mostly no append (gil.py); else as where steps do not hold.
    """

    def __init__(
        self,
        rng: random.Random | None = None,
        chance: float = 0.1,
        *,
        after_release: bool = False,
        lane: bool = False,
    ) -> None:
        self.lane = lane
        self._rng = rng
        self._chance = chance
        self.after_release = after_release
        self._local = threading.local()
        self._turns: list[threading.Lock] = []
        self._threads: list[threading.Thread] = []
        self._over: list[bool] = []
        self._waits: list[InnerLock | None] = []
        self._plan: Plan = {}
        self._collect: Collection[int] = ()
        self._ended = threading.Event()
        self._aborting = False
        self._errors: list[BaseException] = []
        self._now = 0.0
        self._home = 0
        self.points = 0
        """Places passed in the run at which another thread, or the garbage collector, could have come in."""
        self.decisions: list[tuple[int, ...]] = []
        """Of each decision, the threads that were not chosen unless the plan said so."""
        self.taken: dict[int, int] = {}
        """The plan that was followed."""
        self.trace: list[str] = []

    # -- the allocator's locks, queues and clocks -------------------------------------------------

    def make_lock(self, name: str) -> LockLike:
        """An `OwnedLock` around one of ours."""
        return OwnedLock(InnerLock(self, name))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Everything made inside asks this scheduler; one at a time in the process.  The garbage collector runs only
        where it is told."""
        clock = SimpleNamespace(sleep=self.sleep, monotonic=lambda: self._now, perf_counter=lambda: self._now)
        with ExitStack() as stack:
            if gc.isenabled():
                gc.disable()
                stack.callback(gc.enable)
            self._home = threading.get_ident()
            Queue.scheduler = self
            stack.callback(setattr, Queue, "scheduler", None)
            for module, name, value in (
                ("allocator.caching.frees", "STEPS_HOLD", self.lane),
                ("allocator.caching.frees", "FreeQueue", Queue),
                ("allocator.sync", "FreeQueue", Queue),
                ("allocator.streams.registry", "deque", Queue),
                ("allocator.streams.captures", "deque", Queue),
                ("allocator.caching.reaper", "_leaving", Leaving(reaper._leaving)),
                ("allocator.caching.growth", "time", clock),
                ("allocator.streams.captures", "time", clock),
            ):
                __import__(module)
                stack.enter_context(patch.object(sys.modules[module], name, value))
            if self.lane:
                stack.enter_context(patch.object(Front, "acquire", self._before(Front.acquire)))
            use_lock_factory(self.make_lock)
            stack.callback(use_lock_factory, None)
            yield

    def _before(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, with a place before it: inside, there may be none."""

        def inside(*args: Any) -> Any:
            self.point("acquire")
            return method(*args)

        return inside

    # -- where others may come in -------------------------------------------------------------------

    def me(self) -> int:
        """The calling thread's number; -1 for one that is not ours."""
        return getattr(self._local, "number", -1)

    def knows_this_thread(self) -> bool:
        """Is it one of the run, or the one that has put this scheduler in place?"""
        return self.me() >= 0 or threading.get_ident() == self._home

    def point(self, what: str) -> None:
        """Here another thread may come in, or the garbage collector."""
        me = self.me()
        if me < 0:
            return
        if self._aborting:
            if sys.exc_info()[0] is None and not getattr(self._local, "leaving", False):
                self._local.leaving = True
                raise Abandoned
            return
        self.points += 1
        self.trace.append(f"{me}: {what}")
        if self.points in self._collect:
            self.trace.append(f"{me}: collect")
            gc.collect()
        self._decide(me, me)

    def before_call(self, name: str) -> None:
        """A driver call is about to be made."""
        if name not in UNSEEN:
            self.point(name)

    def sleep(self, seconds: float) -> None:
        """Whoever sleeps lets another go on; there is no other time in here, and it passes quickly."""
        me = self.me()
        self._now += max(seconds, 0.01)
        if me >= 0 and not self._aborting:
            self.trace.append(f"{me}: sleeps")
            self._decide(me, None)

    def wait_for(self, lock: InnerLock) -> None:
        """The thread cannot go on before the lock has been released."""
        me = self.me()
        if me < 0 or self._aborting:
            raise Stuck(f"{lock.name} is held by thread {lock.owner}, which has gone; {self.trace[-20:]}")
        self._waits[me] = lock
        self.trace.append(f"{me}: waits for {lock.name}")
        self._decide(me, None)
        self._waits[me] = None

    def _able(self, thread: int) -> bool:
        lock = self._waits[thread]
        return not self._over[thread] and (lock is None or lock.owner is None)

    def _decide(self, me: int, default: int | None) -> None:
        """Choose who goes on: `default` if it is given, else the next after `me` that can."""
        count = len(self._over)
        able = [t for t in ((me + i) % count for i in range(count)) if self._able(t)]
        if default is None:
            able = [t for t in able if t != me] or able  # whoever gives way lets others go first
        if not able:
            self._stuck(me)
        chosen = able[0]
        if len(able) > 1:
            number = len(self.decisions)
            self.decisions.append(tuple(able[1:]))
            if self._rng is not None:
                if self._rng.random() < self._chance:
                    chosen = self._rng.choice(able[1:])
            else:
                chosen = self._plan.get(number, chosen)
                if chosen not in able:
                    chosen = able[0]
            if chosen != able[0]:
                self.taken[number] = chosen
        if chosen != me:
            self._turns[chosen].release()
            self._turns[me].acquire()
            if self._aborting and not getattr(self._local, "leaving", False):
                self._local.leaving = True
                raise Abandoned

    def _stuck(self, me: int) -> None:
        waits = ", ".join(
            f"thread {t} waits for {lock.name}, held by {lock.owner}" for t, lock in enumerate(self._waits) if lock
        )
        error = Stuck(f"deadlock: {waits}\n{self._stacks()}\nlast: {self.trace[-20:]}")
        self._errors.insert(0, error)
        self._abort(me)
        self._local.leaving = True
        raise Abandoned

    def _abort(self, me: int) -> None:
        self._aborting = True
        for t, turn in enumerate(self._turns):
            if t != me and not self._over[t] and turn.locked():
                turn.release()

    def _stacks(self) -> str:
        frames = sys._current_frames()
        return "\n".join(
            f"--- thread {number}\n{''.join(traceback.format_stack(frames[thread.ident])[-12:])}"
            for number, thread in enumerate(self._threads)
            if thread.ident in frames
        )

    # -- a run ------------------------------------------------------------------------------------

    def run(
        self,
        gpu: SimDevice,
        bodies: Sequence[Callable[[], object]],
        plan: Plan | None = None,
        collect: Collection[int] = (),
    ) -> int:
        """Run them to their ends; returns the number of places passed.  Raises the first error of a body.

        collect: places at which the garbage collector runs, in the thread that is there.
        """
        self._plan = plan or {}
        self._collect = collect
        self._over = [False] * len(bodies)
        self._waits = [None] * len(bodies)
        self._turns = [threading.Lock() for _ in bodies]
        self._errors, self._aborting = [], False
        self._ended.clear()
        self.points, self.decisions, self.taken, self.trace = 0, [], {}, []
        for turn in self._turns:
            turn.acquire()
        self._threads = [
            threading.Thread(target=self._body, args=(number, body), daemon=True) for number, body in enumerate(bodies)
        ]
        gpu.before_call = self.before_call
        try:
            for thread in self._threads:
                thread.start()
            self._turns[0].release()
            if not self._ended.wait(REAL_SECONDS):
                error = Stuck(f"a thread hangs\n{self._stacks()}\nlast: {self.trace[-20:]}")
                self._abort(-1)
                raise error
            for thread in self._threads:
                thread.join(REAL_SECONDS)
        finally:
            gpu.before_call = None
        if self._errors:
            raise self._errors[0]
        return self.points

    def _body(self, number: int, body: Callable[[], object]) -> None:
        self._local.number = number
        self._turns[number].acquire()
        try:
            if not self._aborting:
                body()
        except Abandoned:
            pass
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._end(number)

    def _end(self, number: int) -> None:
        self._over[number] = True
        count = len(self._over)
        if all(self._over):
            self._ended.set()
        elif not self._aborting:
            able = [t for t in ((number + i) % count for i in range(count)) if self._able(t)]
            if able:
                chosen = able[0]
                if len(able) > 1:
                    at = len(self.decisions)
                    self.decisions.append(tuple(able[1:]))
                    if self._rng is not None:
                        chosen = self._rng.choice(able)
                    else:
                        chosen = self._plan.get(at, chosen)
                        if chosen not in able:
                            chosen = able[0]
                    if chosen != able[0]:
                        self.taken[at] = chosen
                self._turns[chosen].release()
            else:
                waits = ", ".join(
                    f"thread {t} waits for {lock.name}, held by {lock.owner}"
                    for t, lock in enumerate(self._waits)
                    if lock
                )
                self._errors.insert(0, Stuck(f"deadlock: {waits}\n{self._stacks()}\nlast: {self.trace[-20:]}"))
                self._abort(number)

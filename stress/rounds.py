"""One round: a program from nothing to nothing, by real threads, or by one that plays its steps in a given order.

Rule: *a round begins and ends with an empty pool*.  At its end, with everything still in use, no two blocks overlap
and the pool's figures are right; then everything is freed, waited for and given back, and nothing may be left.  So
whatever a round finds, its own operations have done, and the operations of one round are enough to play it again.

Threads: `run` starts one for each worker, and they are gone when it returns, unless the pool has made them hang.
Next: hammer.py (rounds until time is up), shrinking.py (what is left of a round that failed).
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from typing import Final

from allocator import CachingAllocator
from allocator.errors import CorruptionError
from allocator.stress.operations import Op, Setting, Step
from allocator.stress.player import Arena, Player, Violation, check
from allocator.stress.targets import Corrupt, Target

AT_ONCE: Final = 64
"""Operations between two looks at the clock."""

LOOK_S: Final = 0.05
PATIENCE_S: Final = 120.0
"""Without one operation for so long, the threads hang."""


class Round:
    """One round on `pool`, which must be empty.  Raises what `Stream` raises.

    violation, worker, done: what was found, who found it (None: the checks at the end), after how many operations
    of all workers.
    """

    def __init__(self, target: Target, pool: CachingAllocator, setting: Setting) -> None:
        self._target = target
        self._pool = pool
        self.arena = Arena(target, pool, setting)
        self.players = [Player(self.arena, worker) for worker in range(setting.workers)]
        self.violation: Violation | None = None
        self.worker: int | None = None
        self._failed = threading.Event()
        self._lock = threading.Lock()

    @property
    def done(self) -> int:
        """Operations begun so far."""
        return sum(player.operations for player in self.players)

    @property
    def order(self) -> Sequence[int]:
        """Which worker began an operation, in order."""
        return tuple(self.arena.order)

    def run(
        self,
        programs: Sequence[Iterable[Op]],
        look: Callable[[], bool] = lambda: False,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Each worker runs its program in a thread of its own; then the checks at the end.

        look: called some times a second, and once at least; True ends the programs early.
        """
        stop = threading.Event()
        threads = [
            threading.Thread(target=self._work, args=(player, iter(ops), stop), name=f"stress-{player.worker}")
            for player, ops in zip(self.players, programs, strict=True)
        ]
        for thread in threads:
            thread.daemon = True  # one that hangs must not keep the process
            thread.start()
        seen, since = -1, time.monotonic()
        try:
            alive = True
            while alive:
                if look():
                    stop.set()
                for thread in threads:
                    thread.join(LOOK_S / len(threads))
                alive = any(thread.is_alive() for thread in threads)
                now = time.monotonic()
                if self.done != seen:
                    seen, since = self.done, now
                elif alive and now - since > patience_s:
                    self._fail(None, Violation("hang", _stacks(threads)))
                    return  # nothing may be touched any more: a lock may be held for ever
        finally:
            stop.set()
        self.end()

    def play(self, steps: Iterable[Step], *, check_each: bool = False) -> None:
        """This thread plays all workers; then the checks at the end.  `done` is then the step at fault."""
        with self._target.session():
            for worker, op in steps:
                try:
                    self.players[worker].play((op,))
                    if check_each:
                        check(self._pool)
                except Exception as error:
                    self._fail(worker, violation_of(error))
                    break
        self.end()

    def _work(self, player: Player, ops: Iterator[Op], stop: threading.Event) -> None:
        try:
            with self._target.session():
                while not stop.is_set() and not self._failed.is_set():
                    before = player.operations
                    player.play(islice(ops, AT_ONCE))
                    if player.operations == before:
                        return
        except BaseException as error:
            self._fail(player.worker, violation_of(error))

    def _fail(self, worker: int | None, violation: Violation) -> None:
        with self._lock:  # the first one counts
            if self.violation is None:
                self.violation, self.worker = violation, worker
        self._failed.set()

    def end(self) -> None:
        """The checks at the end, and everything freed; after a violation only the latter, as far as it goes."""
        try:
            with self._target.session():
                if self.violation is None:
                    self._check_live()
                self._free_all()
                if self.violation is None:
                    self._check_empty()
        except Exception as error:
            self._fail(None, violation_of(error))
            with suppress(Exception), self._target.session():
                self._free_all()

    def _check_live(self) -> None:
        held = [block for player in self.players for block in player.live()]
        held += [(h.allocation.ptr, h.allocation.size) for box in self.arena.mailboxes for h in box]
        held = sorted(block for block in held if block[1])
        for (ptr, size), (other, _) in pairwise(held):
            if ptr + size > other:
                raise Violation("twice", f"the block at {ptr:#x} of {size} bytes overlaps the live one at {other:#x}")
        check(self._pool)
        self._collect()
        allocated, mine = self._pool.allocated_bytes, sum(size for _, size in held)
        if allocated != mine:
            raise Violation("leak", f"{mine} bytes are held, and the pool counts {allocated}")

    def _free_all(self) -> None:
        for player in self.players:
            player.end()
        self.arena.close()
        self._collect()

    def _collect(self) -> None:
        """Blocks in reference cycles go; nothing else does, and looking for nothing takes long in a large process."""
        if self.arena.garbage:
            gc.collect()

    def _check_empty(self) -> None:
        pool, target = self._pool, self._target
        target.finish()
        pool.settle()
        check(pool)
        stats = pool.stats()
        for what in ("allocated_bytes", "in_flight_bytes", "pending_frees", "orphaned_bytes"):
            if left := getattr(stats, what):
                raise Violation("leak", f"everything was freed and waited for, and {what} is {left}")
        pool.trim()
        if pool.reserved_bytes:
            raise Violation("leak", f"{pool.reserved_bytes} bytes are reserved after everything was given back")
        if leaked := target.leaked_bytes():
            raise Violation("leak", f"the pool holds nothing, and the device counts {leaked} bytes")
        check(pool)
        if target.wrong:
            raise Violation("race", str(target.wrong[0]))


def violation_of(error: BaseException) -> Violation:
    """What an exception means: itself, or one line that names the place it came from."""
    if isinstance(error, Violation):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())[:1000]
    if isinstance(error, (Corrupt, CorruptionError)):
        return Violation("corruption", text)
    return Violation("exception", f"{type(error).__name__}: {text}{where}")


def _stacks(threads: Sequence[threading.Thread]) -> str:
    """Where each of them is."""
    frames = sys._current_frames()
    parts = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is not None:
            stack = traceback.extract_stack(frame)[-4:]
            places = " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in reversed(stack))
            parts.append(f"{thread.name}: {places}")
    return "the threads hang: " + "; ".join(parts)

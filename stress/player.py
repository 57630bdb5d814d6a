"""Runs operations: one `Player` a thread, all of them on one `Arena` with the pool, the shared streams and mailboxes.

Rule: *a player does what the operation says, and judges*.  An address handed out while somebody holds it, a race or
a byte that is wrong is a `Violation`; an allocation refused for want of memory is not.  What a workload leaves behind
in the middle of a thought is freed as the contract demands.

Threads: a player belongs to one thread; the arena's parts are safe by themselves.
Next: rounds.py (many players at once).
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Iterable
from time import perf_counter_ns, sleep
from typing import Final

from allocator import Allocation, CachingAllocator, Event, OutOfMemoryError, Stream
from allocator.metrics import AllocatorCollector
from allocator.stress.histogram import Latencies
from allocator.stress.operations import LEGACY, OWN, PRIVATE, VERBS, Op, Setting
from allocator.stress.targets import Target

TIMED: Final = ("allocate", "free", "streams", "look")
"""What latencies are kept of: allocations; frees; streams, events and declarations; readings, checks and trims."""


TRIES: Final = 100
TRY_AGAIN_S: Final = 1e-3
"""Checks in the middle of a run, and the pause between them."""


class Violation(Exception):
    """What must never happen did.  kind: "race", "twice", "check", "leak", "exception"; the text is one line."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


class _Held:
    """A block in somebody's hands."""

    __slots__ = ("allocation", "declared", "named", "stream", "value")

    def __init__(self, allocation: Allocation, stream: int, value: int) -> None:
        self.allocation = allocation
        self.stream = stream
        self.value = value
        self.declared: set[int] = set()
        self.named: Stream | None = None
        """A stream that used it undeclared: the free has to name it."""


class _Cycle:
    """Refers to itself, so that only the garbage collector ends it.  closes: in its finaliser, by a call."""

    def __init__(self, allocation: Allocation, closes: bool) -> None:
        self.me = self
        self.allocation = allocation
        self.closes = closes

    def __del__(self) -> None:
        if self.closes:
            self.allocation.close()


class Arena:
    """What all players of one program share.  Makes the shared streams: every fourth is a blocking one.

    Raises what `Stream` raises.
    """

    def __init__(self, target: Target, pool: CachingAllocator, setting: Setting) -> None:
        self.target = target
        self.pool = pool
        self.collector = AllocatorCollector(pool)
        self.streams: dict[int, Stream] = {
            n: Stream(target.device, non_blocking=n % 4 != 3, name=f"stress {n}") for n in range(setting.streams)
        }
        self.streams[LEGACY] = Stream.legacy(target.device)
        self.mailboxes: list[deque[_Held]] = [deque() for _ in range(setting.workers)]
        self.live: dict[int, str] = {}
        """Address -> who holds it.  Entered after an allocation and left before the free, each in one atomic step."""
        self.garbage = False
        """Has any block been left to the garbage collector?"""
        self.order: list[int] | deque[int] = []
        """Which worker began an operation, in order; whoever needs no order puts a deque that keeps nothing here."""

    def close(self) -> None:
        """End the shared streams.  What is in the mailboxes is freed."""
        for box in self.mailboxes:
            while box:
                self.free(box.popleft())
        for number, stream in self.streams.items():
            if number != LEGACY:
                stream.close()

    def leave(self, held: _Held) -> None:
        """The block is about to go: nobody holds the address, and nothing wrote to it but who held it."""
        if held.allocation.size:
            self.target.compare(held.allocation, held.value)
        self.live.pop(held.allocation.ptr, None)

    def free(self, held: _Held) -> None:
        """As the contract demands."""
        self.leave(held)
        held.allocation.close(held.named)


class Player:
    """The thread `worker` of a program."""

    def __init__(self, arena: Arena, worker: int) -> None:
        self.worker = worker
        self._arena = arena
        self._pool = arena.pool
        self._target = arena.target
        self._blocks: dict[int, _Held] = {}
        self._events: dict[int, Event] = {}
        self._private: dict[int, Stream] = {}
        self._value = worker
        self.latencies = {name: Latencies() for name in TIMED}
        self.counts: Counter[str] = Counter()
        """Operations done by verb; `refused` allocations, `skipped` operations."""
        self.operations = 0
        """Begun so far."""
        self._do: dict[str, Callable[[Op], object]] = {verb: getattr(self, f"_{verb}") for verb in VERBS}

    def play(self, ops: Iterable[Op]) -> None:
        """One after the other.  Raises Violation, and whatever the pool raises but OutOfMemoryError."""
        target, do, counts, order, me = self._target, self._do, self.counts, self._arena.order, self.worker
        for op in ops:
            order.append(me)
            self.operations += 1
            counts[op.verb] += 1
            do[op.verb](op)
            if target.wrong:
                raise Violation("race", str(target.wrong[0]))

    def live(self) -> list[tuple[int, int]]:
        """(address, size) of each block held."""
        return [(held.allocation.ptr, held.allocation.size) for held in self._blocks.values()]

    def end(self) -> None:
        """Free everything, and end the private streams."""
        for held in self._blocks.values():
            self._arena.free(held)
        self._blocks.clear()
        self._events.clear()
        for stream in self._private.values():
            stream.close()
        self._private.clear()

    # -- blocks ---------------------------------------------------------------------------------

    def _stream_of(self, number: int) -> Stream | None:
        return self._private.get(number) if number >= PRIVATE else self._arena.streams.get(number)

    def _alloc(self, op: Op) -> None:
        stream = self._stream_of(op.b)
        if stream is None:
            self.counts["skipped"] += 1
            return
        began = perf_counter_ns()
        try:
            allocation = self._pool.allocate(op.c, stream=stream)
        except OutOfMemoryError:
            self.counts["refused"] += 1
            return
        finally:
            self.latencies["allocate"].add(perf_counter_ns() - began)
        self._value = self._value % 251 + 1
        held = _Held(allocation, op.b, self._value)
        if allocation.size:
            me = f"block {op.a} of worker {self.worker}"
            other = self._arena.live.setdefault(allocation.ptr, me)
            if other is not me:
                raise Violation("twice", f"{allocation.ptr:#x} was handed out to {me}, while {other} holds it")
            self._target.fill(allocation, held.value)
        self._blocks[op.a] = held

    def _launch(self, op: Op, *, write: bool) -> None:
        held = self._blocks.get(op.a)
        stream = None if held is None else held.allocation.stream if op.b == OWN else self._stream_of(op.b)
        if held is None or stream is None or stream.closed or not held.allocation.size:
            self.counts["skipped"] += 1
            return
        if op.b not in (OWN, held.stream) and op.b not in held.declared:
            held.named = stream
        self._target.launch(stream, op.c, held.allocation, held.value, write=write)

    def _use(self, op: Op) -> None:
        self._launch(op, write=True)

    def _read(self, op: Op) -> None:
        self._launch(op, write=False)

    def _share(self, op: Op) -> None:
        held, stream = self._blocks.get(op.a), self._stream_of(op.b)
        if held is None or stream is None or held.allocation.stream.closed:
            self.counts["skipped"] += 1
            return
        began = perf_counter_ns()
        stream.wait_stream(held.allocation.stream)
        held.allocation.record_stream(stream)
        self.latencies["streams"].add(perf_counter_ns() - began)
        held.declared.add(op.b)

    def _declare(self, op: Op) -> None:
        held, stream = self._blocks.get(op.a), self._stream_of(op.b)
        if held is None or stream is None:
            self.counts["skipped"] += 1
            return
        began = perf_counter_ns()
        held.allocation.record_stream(stream)
        self.latencies["streams"].add(perf_counter_ns() - began)
        held.declared.add(op.b)

    def _taken_out(self, number: int) -> _Held | None:
        held = self._blocks.pop(number, None)
        if held is None:
            self.counts["skipped"] += 1
        else:
            self._arena.leave(held)
        return held

    def _free(self, op: Op) -> None:
        held = self._taken_out(op.a)
        if held is not None:
            began = perf_counter_ns()
            held.allocation.close(held.named)
            self.latencies["free"].add(perf_counter_ns() - began)

    def _free_on(self, op: Op) -> None:
        held, stream = self._taken_out(op.a), self._stream_of(op.b)
        if held is not None:
            began = perf_counter_ns()
            held.allocation.close(held.named if stream is None else stream)
            self.latencies["free"].add(perf_counter_ns() - began)

    def _lost(self, number: int) -> _Held | None:
        """A block that nobody will close: its undeclared use has to be declared now."""
        held = self._taken_out(number)
        if held is not None and held.named is not None:
            held.allocation.record_stream(held.named)
        return held

    def _drop(self, op: Op) -> None:
        held = self._lost(op.a)
        began = perf_counter_ns()
        del held
        self.latencies["free"].add(perf_counter_ns() - began)

    def _cycle(self, op: Op) -> None:
        held = self._lost(op.a)
        if held is not None:
            self._arena.garbage = True
            _Cycle(held.allocation, closes=op.a % 2 == 0)

    def _collect(self, op: Op) -> None:
        gc.collect(1)

    def _give(self, op: Op) -> None:
        held = self._blocks.get(op.a)
        if held is None or held.stream >= PRIVATE or held.named is not None:
            self.counts["skipped"] += 1
            return
        del self._blocks[op.a]
        self._arena.mailboxes[op.b].append(held)

    def _take(self, op: Op) -> None:
        try:
            self._blocks[op.a] = self._arena.mailboxes[self.worker].popleft()
        except IndexError:
            self.counts["skipped"] += 1

    # -- streams and events ---------------------------------------------------------------------

    def _timed(self, what: str, call: Callable[[], object]) -> None:
        began = perf_counter_ns()
        call()
        self.latencies[what].add(perf_counter_ns() - began)

    def _record(self, op: Op) -> None:
        stream = self._stream_of(op.b)
        if stream is None:
            self.counts["skipped"] += 1
            return
        event = self._events.get(op.a)
        if event is None:
            event = self._events[op.a] = Event(self._target.device)
        began = perf_counter_ns()
        event.record(stream)
        self.latencies["streams"].add(perf_counter_ns() - began)

    def _wait(self, op: Op) -> None:
        stream, event = self._stream_of(op.b), self._events.get(op.a)
        if stream is None or event is None:
            self.counts["skipped"] += 1
            return
        began = perf_counter_ns()
        event.wait(stream)
        self.latencies["streams"].add(perf_counter_ns() - began)

    def _after(self, op: Op) -> None:
        first, second = self._stream_of(op.a), self._stream_of(op.b)
        if first is None or second is None:
            self.counts["skipped"] += 1
            return
        began = perf_counter_ns()
        first.wait_stream(second)
        self.latencies["streams"].add(perf_counter_ns() - began)

    def _open(self, op: Op) -> None:
        if op.a < PRIVATE or op.a in self._private:
            self.counts["skipped"] += 1
            return
        began = perf_counter_ns()
        self._private[op.a] = Stream(self._target.device)
        self.latencies["streams"].add(perf_counter_ns() - began)

    def _end(self, op: Op) -> None:
        stream = self._private.pop(op.a, None)
        if stream is None:
            self.counts["skipped"] += 1
        else:
            self._timed("streams", stream.close)

    def _sync(self, op: Op) -> None:
        stream = self._stream_of(op.a)
        if stream is not None:
            stream.synchronize()

    def _query(self, op: Op) -> None:
        stream = self._stream_of(op.a)
        if stream is not None:
            self._timed("streams", stream.query)

    def _pass(self, op: Op) -> None:
        self._target.advance(op.a)

    # -- looking around -------------------------------------------------------------------------

    def _stats(self, op: Op) -> None:
        began = perf_counter_ns()
        stats = self._pool.stats()
        self.latencies["look"].add(perf_counter_ns() - began)
        parts = stats.allocated_bytes + stats.in_flight_bytes + stats.idle_bytes + stats.private_bytes
        if stats.reserved_bytes != parts:
            raise Violation("check", f"reserved {stats.reserved_bytes} is not the sum of its parts, {parts}")

    def _scrape(self, op: Op) -> None:
        self._timed("look", lambda: list(self._arena.collector.collect()))

    def _check(self, op: Op) -> None:
        check_amid(self._pool)

    def _trim(self, op: Op) -> None:
        self._timed("look", lambda: self._pool.trim(op.a))

    def _settle(self, op: Op) -> None:
        self._pool.settle()


def check_amid(pool: CachingAllocator) -> None:
    """`check` while others allocate.  A block that another thread is about to hand out is nobody's for a moment, which
    `pool.check()` cannot tell from a lost one: only what stays wrong is a Violation."""
    for _ in range(TRIES - 1):
        try:
            check(pool)
            return
        except Violation:
            sleep(TRY_AGAIN_S)
    check(pool)


def check(pool: CachingAllocator) -> None:
    """`pool.check()`; Violation with the first line of what it says."""
    try:
        pool.check()
    except AssertionError as error:
        raise Violation("check", (str(error).splitlines() or ["check() failed"])[0][:500]) from None

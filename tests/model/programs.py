"""Small programs, and what plays them: on the real pool, or on a naive one that proves nothing by luck.

A program is a list of steps such as ("alloc", 0, 1) or ("wait", 1, 2), the words of `Player`.  It is *right* if it
keeps the contract of docs/ordering.md: a use is issued before the free, and another stream uses a block only
after it has waited for the owner at or after the allocation.  A race of a right program is the pool's fault.

    Player         plays a program on the real pool; the simulator's oracle looks for races
    NaivePlayer    plays the same program without a pool, in memory that nobody uses again; what the weakest lawful
                   pool may do is played along (see there), so a race here is the program's own
    judge          both of them: what is wrong with the pool in this program, or None

Next: enumerate.py (all programs), test_exhaustive.py.
"""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from allocator import CachingAllocator, Config, Event, OutOfMemoryError, SimDevice, Stream
from allocator.caching.reaper import _leaving
from allocator.errors import StreamClosed
from allocator.sizes import MIB

Step = tuple[Any, ...]
Program = Sequence[Step]

SIZES = (1 * MIB, 2 * MIB, 3 * MIB // 2, 1 * MIB // 2)
"""Half a page and a whole one: with these, blocks split and merge.  Then what lies between, and a quarter."""
DURATION_NS = 1000


@dataclass(frozen=True)
class Universe:
    """What a family of programs runs on.

    kinds: of the streams: "nb" (non-blocking), "blocking", "legacy", "thread" (the per-thread stream of the thread
    that plays), "thread2" (that of another thread).  words: the steps it may take.  assumed: uses are not declared.
    """

    name: str
    kinds: tuple[str, ...]
    words: tuple[str, ...] = ()
    events: int = 1
    blocks: int = 3
    sizes: tuple[int, ...] = (1,)
    config: dict[str, Any] = field(default_factory=dict)
    assumed: bool = False
    bare: bool = False
    turns: bool = False
    """Before each program the streams have taken turns, and each has memory of its own."""

    def make_config(self) -> Config:
        """The pool's settings; no garbage collection on a failure, which would cost more than the program."""
        settings: dict[str, Any] = {"collect_on_demand": False, "uses": "assumed" if self.assumed else "declared"}
        settings.update(self.config)
        return Config(**settings)


class Worker:
    """One more host thread, which does what it is told."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[object, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            try:
                self._done.put((work(), None))
            except BaseException as error:
                self._done.put((None, error))
            del work

    def call(self, work: Callable[[], object]) -> object:
        """Do it over there and bring the result, or the error, back."""
        self._todo.put(work)
        result, error = self._done.get()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End the thread."""
        self._todo.put(None)
        self._thread.join(20)


class Foreign:
    """Somebody else's stream object; it keeps its handle alive, and compares by it as CuPy's does."""

    def __init__(self, gpu: SimDevice, non_blocking: bool) -> None:
        self._gpu = gpu
        with gpu.scope():
            self.handle = gpu.stream_create(non_blocking=non_blocking, priority=0)

    def __del__(self) -> None:
        with self._gpu.scope():
            self._gpu.stream_destroy(self.handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Foreign) and other.handle == self.handle

    def __hash__(self) -> int:
        return hash(self.handle)


class Base:
    """The steps that need no memory: streams, events, time, host waits."""

    def __init__(self, universe: Universe) -> None:
        self.universe = universe
        self.gpu = SimDevice(memory=64 * MIB)
        self._worker: Worker | None = Worker() if "thread2" in universe.kinds else None
        self.streams: list[Any] = [self._stream(kind) for kind in universe.kinds]
        self.events = [Event(self.gpu) for _ in range(universe.events)]
        self.answers: list[bool] = []
        self._words: dict[str, Callable[..., None]] = {
            name[3:]: getattr(self, name) for name in dir(type(self)) if name.startswith("do_")
        }

    def _stream(self, kind: str) -> Any:
        gpu = self.gpu
        if kind == "legacy":
            return Stream.legacy(gpu)
        if kind in ("thread", "thread2"):
            return Stream.per_thread(gpu)
        if kind.startswith("foreign"):
            return Foreign(gpu, non_blocking=kind.endswith("nb"))
        if kind.startswith("bare"):
            with gpu.scope():
                return gpu.stream_create(non_blocking=kind.endswith("nb"), priority=0)
        return Stream(gpu, non_blocking=kind == "nb")

    def on(self, slot: int, work: Callable[[Any], object]) -> object:
        """Do it with a stream, in the thread that the stream belongs to."""
        stream = self.streams[slot]
        if self.universe.kinds[slot] == "thread2":
            assert self._worker is not None
            return self._worker.call(lambda: work(stream))
        return work(stream)

    def face(self, stream: Any) -> Stream:
        """Our own face of any stream."""
        return stream if isinstance(stream, Stream) else Stream.of(self.gpu, stream)

    def play(self, program: Program) -> None:
        """Take all steps; a step that makes no sense (the allocation before it failed) is left out."""
        words = self._words
        for step in program:
            words[step[0]](*step[1:])

    # -- words ------------------------------------------------------------------------------------

    def do_record(self, event: int, slot: int) -> None:
        """The program's own event, perhaps recorded before."""
        self.on(slot, self.events[event].record)

    def do_wait(self, event: int, slot: int) -> None:
        """The stream waits for it."""
        self.on(slot, self.events[event].wait)

    def do_wait_stream(self, slot: int, other: int) -> None:
        """Record and wait in one."""
        theirs = self.on(other, lambda s: self.face(s).record_event())
        self.on(slot, lambda s: theirs.wait(s))  # type: ignore[attr-defined]

    def do_sync(self, slot: int) -> None:
        """The host waits for the stream."""
        self.on(slot, lambda s: self.face(s).synchronize())

    def do_query(self, slot: int) -> None:
        """The host asks the stream."""
        self.answers.append(bool(self.on(slot, lambda s: self.face(s).query())))

    def do_sync_event(self, event: int) -> None:
        """The host waits for an event."""
        self.events[event].synchronize()

    def do_query_event(self, event: int) -> None:
        """The host asks an event."""
        self.answers.append(self.events[event].query())

    def do_tick(self) -> None:
        """Time for one kernel."""
        self.gpu.advance(DURATION_NS)

    def do_idle(self) -> None:
        """Time for everything."""
        self.gpu.run_until_idle()

    def do_renew(self, slot: int) -> None:
        """End a stream with whatever is queued on it; another one gets its handle."""
        stream, kind = self.streams[slot], self.universe.kinds[slot]
        if kind in ("nb", "blocking"):
            stream.close()
        elif kind.startswith("bare"):
            with self.gpu.scope():
                self.gpu.stream_destroy(stream)
        elif not kind.startswith("foreign"):  # of a foreign one we only let go
            return
        self.streams[slot] = None
        del stream
        self.streams[slot] = self._stream(kind)

    # -- words that need memory ------------------------------------------------------------------

    def do_alloc(self, slot: int, size: int) -> None:
        """A block on a stream, which writes it at once."""
        index = self.allocate(slot, size)
        if index is not None:
            self.write(index, slot)

    def do_quiet(self, slot: int, size: int) -> None:
        """A block on a stream, not used yet."""
        self.allocate(slot, size)

    def allocate(self, slot: int, size: int) -> int | None:
        """The new block's number; None if there was no memory."""
        raise NotImplementedError

    def write(self, block: int, slot: int) -> None:
        """A kernel on the stream writes the block, if it is live."""
        raise NotImplementedError


class Player(Base):
    """Plays programs on the real pool, one after the other."""

    def __init__(self, universe: Universe) -> None:
        super().__init__(universe)
        self.pool = CachingAllocator(self.gpu, universe.make_config())
        self.blocks: list[Any] = []

    def allocate(self, slot: int, size: int) -> int | None:
        try:
            self.blocks.append(self.on(slot, lambda s: self.pool.allocate(SIZES[size], stream=s)))
        except OutOfMemoryError:
            self.blocks.append(None)
            return None
        return len(self.blocks) - 1

    def _live(self, block: int) -> Any:
        found = self.blocks[block] if block < len(self.blocks) else None
        return None if found is None or found.closed else found

    def write(self, block: int, slot: int) -> None:
        found = self._live(block)
        if found is not None:
            self.on(slot, lambda s: self.gpu.launch(s, DURATION_NS, writes=[found]))

    def do_use(self, block: int, slot: int) -> None:
        """A use, declared unless the universe says otherwise."""
        found = self._live(block)
        if found is None:
            return
        if not self.universe.assumed:
            self.on(slot, found.record_stream)
        self.write(block, slot)

    def do_free(self, block: int) -> None:
        """Queued; the next public call of the pool stamps it."""
        found = self._live(block)
        if found is not None:
            found.close()

    def do_free_on(self, block: int, slot: int) -> None:
        """A use that only the free declares, by naming its stream."""
        found = self._live(block)
        if found is not None:
            self.write(block, slot)
            self.on(slot, found.close)

    def do_stats(self) -> None:
        """Drains, asks and looks."""
        self.pool.stats()

    def do_trim(self) -> None:
        """Gives back what is idle."""
        self.pool.trim()

    def do_settle(self) -> None:
        """Waits for everything."""
        self.pool.settle()

    def wrong(self) -> str | None:
        """What the simulator saw."""
        gpu = self.gpu
        if gpu.races:
            return f"race: {gpu.races[0]}"
        if gpu.violations:
            return f"violation: {gpu.violations[0]}"
        return None

    def _take_turns(self) -> None:
        """From here on a stream that is asked when another one's memory has just come back gets its own in one step."""
        pool, size = self.pool, SIZES[self.universe.sizes[0]]
        held = [pool.allocate(size, stream=stream) for stream in self.streams for _ in range(2)]
        held.clear()
        pool.drain_frees()
        for stream in (*self.streams, *self.streams):
            pool._frees.inside.busy = 0
            pool.allocate(size, stream=stream)
        pool.drain_frees()
        self.gpu.run_until_idle()
        pool._frees.inside.busy = 0

    def run(self, program: Program) -> str | None:
        """Play one program to its end, and see that nothing is left of it.  What went wrong, or None."""
        self.blocks.clear()
        self.answers.clear()
        pool, gpu = self.pool, self.gpu
        try:
            if self.universe.turns:
                self._take_turns()
            for step in program:
                self.play((step,))
                for one in getattr(self, "pools", (pool,)):  # one thread, between two calls: nobody is (gil.py)
                    one._frees.inside.busy = 0
            pool.check()
            wrong = self.wrong()
            if wrong is not None:
                return wrong
            for block in self.blocks:
                if block is not None:
                    block.close()
            gpu.run_until_idle()
            if self._worker is not None:
                self._worker.call(pool.stats)
            pool.settle()
            pool.trim()
            if gpu.used_bytes:
                return f"leak: {gpu.used_bytes} bytes held after settle and trim"
            with gpu.scope():
                gpu.ctx_synchronize()
        except StreamClosed:
            raise
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        frees = pool._frees
        frees.crossing, frees._first = False, None  # as in a new pool
        pool._shelves.crossing = False
        frees.sealed()
        return self.wrong()

    def close(self) -> str | None:
        """Close the pool; a leak, or None."""
        self.blocks.clear()
        self.gpu.run_until_idle()
        self.pool.close()
        self.pool.stats()
        self.pool.stats()
        if self._worker is not None:
            self._worker.close()
        return f"leak: {self.gpu.used_bytes} bytes held after close" if self.gpu.used_bytes else self.wrong()


class NaivePlayer(Base):
    """The same program without a pool: every block has memory of its own, and nothing is used again.

    What the weakest lawful pool may do is played as accesses of somebody else:

    * at the allocation, earlier work on the owner's stream may still use the bytes: a zero-length kernel of a
      hand-out "before".  A stream that has not waited for the owner since races with it.
    * a pool that never crosses streams may give the block of an earlier allocation on that stream, freed by now, to
      this one.  So a pair (old, new) of the same owner shares bytes of its own: with assumed uses whoever used the
      old one, with declared uses the owner's own accesses, as a lawful pool waits for the declared ones.

    The kernel of "before" is work, and on legacy work is a barrier that the program never asked for.  So a program is
    played both with such kernels and with `kernels=False`, with the pairs alone, and is right if both are.
    refused: allocations that failed with the real pool, so that nothing was launched for them.
    """

    MOST = 16

    def __init__(self, universe: Universe, *, kernels: bool = True, refused: Collection[int] = ()) -> None:
        super().__init__(universe)
        self._kernels = kernels
        self._refused = refused
        with self.gpu.scope():
            self._base = self.gpu.mem_alloc(MIB)
        self._blocks: list[tuple[object, Any, bool]] = []  # token, stream, live
        self._before: list[list[int]] = []

    def _at(self, one: int, two: int) -> tuple[int, int]:
        return self._base + (one * self.MOST + two) * 512, 512

    def allocate(self, slot: int, size: int) -> int | None:
        index = len(self._blocks)
        assert index < self.MOST
        stream, token = self.streams[slot], object()
        if index in self._refused:
            self._before.append([])
            self._blocks.append((token, stream, False))
            return None
        gpu = self.gpu
        own = self._at(index, index)
        if self._kernels:
            gpu.hand_out(*own, object())
            self.on(slot, lambda s: gpu.launch(s, 0, writes=[own]))
        gpu.hand_out(*own, token)
        before = [i for i, (_, owner, live) in enumerate(self._blocks) if not live and owner is stream]
        for i in before:
            gpu.hand_out(*self._at(i, index), token)
        for later in range(index + 1, self.MOST):
            gpu.hand_out(*self._at(index, later), token)
        self._before.append(before if self.universe.assumed or not self._kernels else [])
        self._blocks.append((token, stream, True))
        return index

    def _live(self, block: int) -> bool:
        return block < len(self._blocks) and self._blocks[block][2]

    def write(self, block: int, slot: int) -> None:
        if not self._live(block):
            return
        spans = [self._at(block, block), *(self._at(i, block) for i in self._before[block])]
        if self.universe.assumed or self.streams[slot] is self._blocks[block][1]:
            spans += [self._at(block, j) for j in range(block + 1, self.MOST)]
        self.on(slot, lambda s: self.gpu.launch(s, DURATION_NS, writes=spans))

    def do_use(self, block: int, slot: int) -> None:
        """A use."""
        self.write(block, slot)

    def do_free(self, block: int) -> None:
        """Nothing is given back."""
        if self._live(block):
            self._blocks[block] = (*self._blocks[block][:2], False)

    def do_free_on(self, block: int, slot: int) -> None:
        """A use, and the free."""
        self.write(block, slot)
        self.do_free(block)

    def do_stats(self) -> None:
        """There is no pool."""

    do_trim = do_stats
    do_settle = do_stats

    def close(self) -> None:
        """Nothing to give back."""
        if self._worker is not None:
            self._worker.close()


def is_right(universe: Universe, program: Program, answers: Sequence[bool] = (), refused: Collection[int] = ()) -> bool:
    """Does the program keep the contract?  answers: those that queries gave with the real pool.

    A query that said "done" here and not there would have made a real program go another way: not judged.
    """
    for kernels in (True, False):
        naive = NaivePlayer(universe, kernels=kernels, refused=refused)
        try:
            naive.play(program)
            races = bool(naive.gpu.races)
        finally:
            naive.close()
        if races or any(mine and not theirs for mine, theirs in zip(naive.answers, answers, strict=False)):
            return False
    return True


def judge(universe: Universe, program: Program, player: Player | None = None) -> str | None:
    """What is wrong with the pool in this program; None if nothing, or if the program itself is wrong."""
    mine = player if player is not None else Player(universe)
    wrong = mine.run(program)
    answers = list(mine.answers)
    refused = [i for i, block in enumerate(mine.blocks) if block is None]
    if wrong is None and player is None:
        wrong = mine.close()
    if wrong is not None and not is_right(universe, program, answers, refused):
        return None
    return wrong


def forget_pools() -> None:
    """Drop the pools of players that were given up: with work in flight for ever, every call would try to reap them."""
    gc.collect()
    _leaving.clear()


def text(program: Program) -> str:
    """A program in one line."""
    return "; ".join(" ".join(map(str, step)) for step in program)


def parse(line: str) -> list[Step]:
    """The inverse of `text`."""
    steps: list[Step] = []
    for part in line.split(";"):
        word, *numbers = part.split()
        steps.append((word, *map(int, numbers)))
    return steps

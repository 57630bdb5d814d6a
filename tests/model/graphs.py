"""Plays small programs with graph captures on the real pool, as a library with hooks would.

The player makes the calls to `Captures` that a library's hooks make, and looks for

    races, violations      of the simulator; of the branches within one graph it looks itself
    a capture killed       its end fails
    a graph robbed         memory that it uses was given to somebody else when it is launched
    memory lost            in flight although all graphs have gone and everything is idle

Each program is followed by steps that show whether it left the pool with a wrong belief (`GraphPlayer._closing`).
Next: contract.py (which programs are right), captures.py (all of them).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from allocator import CachingAllocator, OutOfMemoryError
from allocator.devices.sim.capture import Graph
from allocator.errors import DriverError
from allocator.streams import Capture, GraphToken, Kind
from tests.model.contract import Contract, GraphUniverse, Op
from tests.model.programs import DURATION_NS, SIZES, Foreign, Player, Program, Step

EVERY = 8
"""Programs after which memory goes back to the driver: in between, the next one finds what this one left idle."""


class Wrong(AssertionError):
    """What the player found, apart from races and violations."""


class CupyStream(Foreign):
    """A foreign stream object as CuPy's: the stream ends with it."""


CupyStream.__module__, CupyStream.__name__ = "cupy.cuda.stream", "Stream"


class GraphPlayer(Player):
    """Plays programs with captures, one after the other, on one pool."""

    universe: GraphUniverse

    def __init__(self, universe: GraphUniverse) -> None:
        super().__init__(universe)
        self.pools = [self.pool]
        self.pools += [CachingAllocator(self.gpu, universe.make_config()) for _ in range(universe.pools - 1)]
        self.captures = self.pool._registry.captures
        self.lines = [self.face(stream).line for stream in self.streams]
        """Hooks see every stream as soon as there is one (R3)."""
        with self.gpu.scope():
            self._event = self.gpu.event_create()
        self._last: dict[int, int] = {}
        """Of each graph, an event behind its last launch."""
        self._played = 0
        self._clear()

    def _stream(self, kind: str) -> Any:
        if kind.startswith("foreign"):
            return CupyStream(self.gpu, non_blocking=kind.endswith("nb"))
        return super()._stream(kind)

    def _clear(self) -> None:
        with self.gpu.scope():
            for event in self._last.values():
                self.gpu.event_destroy(event)
        self._last.clear()
        self.blocks.clear()
        self.contract = Contract.start(self.universe)
        self._spans: list[tuple[int, int]] = []
        self._active: list[Capture | None] = []
        self._graphs: list[tuple[Graph, GraphToken] | None] = []
        self._inside: list[list[tuple[Op, int]]] = []

    def take(self, step: Step) -> None:
        """One step, on the pool and in the contract."""
        word, *args = step
        self._words[word](*args)
        self.contract.take(step)

    # -- words ------------------------------------------------------------------------------------

    def do_alloc(self, slot: int, size: int) -> None:
        """A block; the stream writes it at once, if it may."""
        stream, block = self.streams[slot], len(self.blocks)
        try:
            made = self.pools[block % len(self.pools)].allocate(SIZES[size], stream=stream)
        except OutOfMemoryError:
            self.blocks.append(None)
            self._spans.append((0, 0))
            return
        self.blocks.append(made)
        self._spans.append((made.ptr, made.ptr + made.size))
        if not self.contract.forbidden(slot):
            self._kernel(slot, [block])

    def do_work(self, slot: int) -> None:
        """A kernel that writes all that it may."""
        self._kernel(slot, self.contract.usable(slot))

    def do_use(self, block: int, slot: int) -> None:
        """A kernel of another stream than the owner's; declared unless the universe says otherwise."""
        found = self._live(block)
        if found is not None:
            if not self.universe.assumed:
                found.record_stream(self.streams[slot])
            self._kernel(slot, [block])

    def _kernel(self, slot: int, blocks: Sequence[int]) -> None:
        found = [(i, block) for i in blocks if (block := self._live(i)) is not None]
        self.gpu.launch(self.streams[slot], DURATION_NS, writes=[block for _, block in found])
        number = self.contract.capture_of(slot)
        if number < 0:
            return
        graph = self.contract.graphs[number]
        op = (slot, graph.steps[slot] + 1)
        for i, _ in found:
            for other, j in self._inside[number]:
                if i != j and self._overlap(i, j) and not graph.behind(slot, other):
                    raise Wrong(f"within graph {number}, blocks {j} and {i} have the same bytes and no order")
            self._inside[number].append((op, i))

    def _overlap(self, one: int, two: int) -> bool:
        a, b = self._spans[one], self._spans[two]
        return a[0] < b[1] and b[0] < a[1]

    def do_begin(self, slot: int) -> None:
        """As a library's hook does: say so, then let the driver begin."""
        stream = self.face(self.streams[slot])
        capture = self.captures.begin(stream.line, stream.handle)
        self._active.append(capture)
        self._graphs.append(None)
        self._inside.append([])
        self.gpu.begin_capture(stream, "global")

    def do_end(self, slot: int) -> None:
        """The driver ends it, then say so."""
        number = self.contract.capture_of(slot)
        capture = self._active[number]
        assert capture is not None
        self._active[number] = None
        try:
            graph = self.gpu.end_capture(self.streams[slot])
        except DriverError as error:
            self.captures.end(capture)
            raise Wrong(f"the capture was killed: {error}") from None
        self._graphs[number] = graph, self.captures.end(capture)

    def do_wait_stream(self, slot: int, other: int) -> None:
        """The stream waits for the other, and so joins a capture that the other takes part in."""
        number = self.contract.capture_of(other)
        if number < 0:
            super().do_wait_stream(slot, other)
            return
        capture, waiting = self._active[number], self.face(self.streams[slot])
        assert capture is not None
        with self.gpu.program_scope():
            self.gpu.event_record(self._event, self.face(self.streams[other]).handle)
            self.captures.join(capture, waiting.line, waiting.handle)
            self.gpu.stream_wait_event(waiting.handle, self._event)

    def do_launch(self, number: int, slot: int) -> None:
        """The graph, on any stream: what it uses must still be its own."""
        found = self._graphs[number]
        assert found is not None
        seen = self.contract.graphs[number]
        for i in seen.items:
            mine = self.contract.blocks[i].made_in
            for j in range(i + 1, len(self.blocks)):
                inner = self.contract.blocks[j].made_in == mine == number
                if self.blocks[j] is not None and self.blocks[i] is not None and not inner and self._overlap(i, j):
                    raise Wrong(f"graph {number} lives and uses block {i}, whose memory was given to block {j}")
        if self.contract.capture_of(slot) >= 0:
            found[0].launch(self.streams[slot])
            return
        with self.gpu.program_scope():  # what the driver sees to: launches of one graph do not overlap
            event = self._last.get(number)
            if event is None:
                event = self._last[number] = self.gpu.event_create()
            elif seen.launches[-1][0] != self.contract.columns[slot]:
                self.gpu.stream_wait_event(self.face(self.streams[slot]).handle, event)
            found[0].launch(self.streams[slot])
            self.gpu.event_record(event, self.face(self.streams[slot]).handle)

    def do_stats(self) -> None:
        """Drains, asks and looks."""
        for pool in self.pools:
            pool.stats()

    def do_renew(self, slot: int) -> None:
        """The stream ends; another one gets its handle, and is seen at once."""
        super().do_renew(slot)
        self.lines[slot] = self.face(self.streams[slot]).line

    def do_drop(self, number: int) -> None:
        """The graph is destroyed, perhaps while a replay runs."""
        found = self._graphs[number]
        assert found is not None
        found[0].close()
        self._graphs[number] = None

    # -- a whole program ----------------------------------------------------------------------------

    def run(self, program: Program) -> str | None:
        """Play one program and what shows whether it left the pool with a wrong belief.  What went wrong, or None."""
        self._clear()
        try:
            for step in program:
                self.take(step)
            self._check()
            for step in self._closing():
                self.take(step)
                if wrong := self.wrong():
                    return f"{wrong}; found by {' '.join(map(str, step))} in the end"
            self._check()
            wrong = self.wrong() or self._leave()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return wrong

    def _check(self) -> None:
        for pool in self.pools:
            pool.check()

    def _closing(self) -> Iterator[Step]:
        """End what captures; let every stream take what the pool thinks is free, and launch the graphs on each.

        Then let them die while their replays run, and take again what the pool thinks is free.
        """
        contract, slots = self.contract, range(len(self.streams))
        contract.universe = replace(self.universe, blocks=99)
        contract.touched = -1
        for graph in list(contract.graphs):
            if graph.over:
                continue
            for slot in graph.steps:
                if contract.allows(("wait_stream", graph.origin, slot)):
                    yield ("wait_stream", graph.origin, slot)
            yield ("end", graph.origin)
        yield from self._grab(slots)
        for number, graph in enumerate(contract.graphs):
            if not graph.alive:
                continue
            for slot in sorted(slots, key=graph.steps.__contains__):  # first on one that took no part
                if contract.allows(("launch", number, slot)):
                    yield ("launch", number, slot)
        for number, graph in enumerate(contract.graphs):
            if graph.alive:
                yield ("drop", number)
        yield ("stats",)
        yield from self._grab(slots[::-1])

    def _grab(self, slots: Sequence[int]) -> Iterator[Step]:
        for size in self.universe.sizes:
            for slot in slots:
                if self.contract.allows(("alloc", slot, size)):
                    yield ("alloc", slot, size)

    def _leave(self) -> str | None:
        """Nothing may be left of the program once everything is idle."""
        gpu = self.gpu
        for block in self.blocks:
            if block is not None:
                block.close()
        gpu.run_until_idle()
        self.do_stats()
        for pool in self.pools:
            pool.settle()
            stats = pool.stats()
            if stats.in_flight_bytes or stats.private_bytes:
                return f"lost: {stats.in_flight_bytes} bytes in flight, {stats.private_bytes} of graphs, all idle"
        self.do_stats()
        captures, lines = self.captures, self.pool._registry.lines.values()
        if captures.numbers or captures.dying or captures.active or any(line.kind is Kind.GRAPH for line in lines):
            return f"lost: timelines of graphs {captures.numbers}"
        self._played += 1
        if self._played % EVERY == 1:
            for pool in self.pools:
                pool.trim()
            if gpu.used_bytes:
                return f"leak: {gpu.used_bytes} bytes held after settle and trim"
        with gpu.scope():
            gpu.ctx_synchronize()
        for pool in self.pools:
            frees = pool._frees
            frees.crossing, frees._first = False, None  # as in a new pool
            pool._shelves.crossing = False
            frees.sealed()
        return self.wrong()

    def close(self) -> str | None:
        """Close the pools; a leak, or None."""
        self.blocks.clear()
        for pool in self.pools[1:]:
            pool.close()
        return super().close()

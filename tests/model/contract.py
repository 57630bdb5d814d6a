"""Small programs with graph captures: which of them are right.

The yardstick is a pool that never crosses streams, as CuPy's own, with the one promise that a graph needs: *a kernel in
a capture may use any block that is live at that moment, and the graph may be launched as long as it lives, whatever has
been freed meanwhile*.  A program is right if

* a use outside captures keeps the contract of docs/ordering.md; with assumed uses, it is enough that it comes behind
  what the owner was behind, and the owner allocates again only behind what others did to the blocks that it freed;
* a graph is launched behind the allocation of the blocks it uses, and in order with the uses that its own blocks have
  outside it.  Launches of one graph never overlap: the driver sees to that;
* captures are begun, joined, joined back and ended as the driver demands.

`Contract` follows a program, without a pool, and says what may come next: as it only lets right programs pass, whatever
goes wrong in them is the pool's fault.  Longer than other modules: what a step needs and what it changes is one state.
Next: graphs.py (what plays them), captures.py (all programs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.model.enumerate import BLOCKING, RENEWABLE
from tests.model.programs import Program, Step, Universe

Op = tuple[int, int]
"""A stream's column, and which of its operations."""
Clock = tuple[int, ...]
"""By column: how many operations of that stream come before.  A slot has two: its stream may end, and another begin."""


@dataclass(frozen=True)
class GraphUniverse(Universe):
    """captures: how many a program may begin.  child: may a graph be launched into another capture?

    pools: of the device; blocks come from each in turn.
    """

    captures: int = 1
    child: bool = False
    pools: int = 1


@dataclass(frozen=True)
class Made:
    """A block.  made_in: the number of the capture it was allocated in, or -1."""

    owner: int
    behind: Clock = ()
    """What a use by another stream comes behind; nothing if no memory could have been used before."""
    step: Op = (0, 0)
    """Within a capture: the step of its stream."""
    made_in: int = -1
    live: bool = True
    uses: tuple[Op, ...] = ()
    """Uses outside captures; of a block made outside: those by other streams, undeclared."""
    inside: tuple[Op, ...] = ()
    """Uses within its own capture by other streams of that."""
    captures: frozenset[int] = frozenset()
    """During which it was live."""


@dataclass(frozen=True)
class Captured:
    """A capture, and then its graph.  steps, reach: of each stream in it, as in the driver."""

    origin: int
    steps: dict[int, int]
    reach: dict[int, dict[int, int]]
    over: bool = False
    alive: bool = True
    items: frozenset[int] = frozenset()
    launches: tuple[Op, ...] = ()
    last: Clock = ()
    """What the last launch was behind, itself included."""

    def behind(self, slot: int, op: Op) -> bool:
        """Within the graph: does what comes next on the stream come after that?"""
        return op[0] == slot or self.reach[slot].get(op[0], 0) >= op[1]

    @property
    def joined(self) -> bool:
        """Is the origin behind all the others?"""
        return all(self.behind(self.origin, (s, n)) for s, n in self.steps.items())


def _join(one: Clock, two: Clock) -> Clock:
    return tuple(map(max, one, two))


@dataclass
class Contract:
    """A program so far."""

    universe: GraphUniverse
    ops: list[int] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    legacy: Clock = ()
    host: Clock = ()
    ended: Clock = ()
    """What blocking streams did that have ended: legacy is behind it."""
    columns: list[int] = field(default_factory=list)
    blocks: list[Made] = field(default_factory=list)
    graphs: list[Captured] = field(default_factory=list)
    touched: int = 0
    freed: bool = False
    busy: bool = False

    @classmethod
    def start(cls, universe: GraphUniverse) -> Contract:
        """Nothing has happened."""
        n = len(universe.kinds)
        zero = (0,) * (2 * n)
        return cls(universe, list(zero), [zero] * n, zero, zero, zero, list(range(n)))

    def copy(self) -> Contract:
        """To go on from in another way."""
        return replace(
            self,
            ops=list(self.ops),
            clocks=list(self.clocks),
            columns=list(self.columns),
            blocks=list(self.blocks),
            graphs=list(self.graphs),
        )

    # -- order -------------------------------------------------------------------------------------

    def _blocking(self, slot: int) -> bool:
        return self.universe.kinds[slot] in BLOCKING

    def position(self, slot: int) -> Clock:
        """Behind all that the stream has been given."""
        clock, column = self.clocks[slot], self.columns[slot]
        return (*clock[:column], max(clock[column], self.ops[column]), *clock[column + 1 :])

    def reach(self, slot: int) -> Clock:
        """What work given to the stream now would be behind."""
        clock = _join(self.position(slot), self.host)
        if self.universe.kinds[slot] == "legacy":
            clock = _join(clock, self.ended)
            for other in range(len(self.columns)):
                if self._blocking(other):
                    clock = _join(clock, self.position(other))
        elif self._blocking(slot):
            clock = _join(clock, self.legacy)
        return clock

    def _behind(self, slot: int, ops: Sequence[Op]) -> bool:
        clock = self.reach(slot)
        return all(clock[column] >= n for column, n in ops)

    def _behind_all(self, slot: int, clock: Clock) -> bool:
        return not clock or all(mine >= n for mine, n in zip(self.reach(slot), clock, strict=True))

    def _work(self, slot: int) -> Op:
        self.clocks[slot] = self.reach(slot)
        op = self._count(slot)
        if self.universe.kinds[slot] == "legacy":
            self.legacy = self.position(slot)
        self.busy = True
        return op

    # -- captures ----------------------------------------------------------------------------------

    def capture_of(self, slot: int) -> int:
        """The number of the capture that the stream takes part in, or -1."""
        return next((n for n, g in enumerate(self.graphs) if not g.over and slot in g.steps), -1)

    def forbidden(self, slot: int) -> bool:
        """Would work on it kill a capture?  Legacy beside a blocking stream that captures."""
        return self.universe.kinds[slot] == "legacy" and any(
            not g.over and any(self._blocking(s) for s in g.steps) for g in self.graphs
        )

    def usable(self, slot: int) -> list[int]:
        """The blocks that a kernel on the stream uses: its own; within a capture, whatever it may."""
        number = self.capture_of(slot)
        live = [(i, b) for i, b in enumerate(self.blocks) if b.live]
        if number < 0:
            return [i for i, b in live if b.owner == slot and self._usable_outside(b, slot)]
        graph = self.graphs[number]
        return [i for i, b in live if b.made_in != number or graph.behind(slot, b.step)]

    def _usable_outside(self, block: Made, slot: int) -> bool:
        if block.made_in < 0:
            return block.owner == slot or self._behind_all(slot, block.behind)
        graph = self.graphs[block.made_in]
        return graph.over and self._behind(slot, graph.launches)

    # -- what may come next -------------------------------------------------------------------------

    def allows(self, step: Step) -> bool:
        """May the step come next?"""
        word, *args = step
        if not self._first_of_its_kind(step):
            return False
        if word in ("stats", "trim", "settle"):
            return True
        if word in ("idle", "tick"):
            return self.busy
        if word == "free":
            return args[0] < len(self.blocks) and self.blocks[args[0]].live
        if word == "drop":
            return args[0] < len(self.graphs) and self.graphs[args[0]].over and self.graphs[args[0]].alive
        return bool(getattr(self, "_may_" + word)(*args))

    def _first_of_its_kind(self, step: Step) -> bool:
        kinds = self.universe.kinds
        slots = slots_of(step)
        return all(
            self.touched >> t & 1 or t in slots
            for slot in slots
            if not self.touched >> slot & 1
            for t in range(slot)
            if kinds[t] == kinds[slot]
        )

    def _may_alloc(self, slot: int, size: int) -> bool:
        if len(self.blocks) >= self.universe.blocks:
            return False
        number = self.capture_of(slot)
        for block in self.blocks:
            if block.live or block.owner != slot or block.made_in != number:
                continue
            if number >= 0:
                if not all(self.graphs[number].behind(slot, op) for op in block.inside):
                    return False
            elif self.universe.assumed and not self._kept(block) and not self._behind(slot, block.uses):
                return False
        return True

    def _kept(self, block: Made) -> bool:
        """Does a graph that lives, or a capture, keep it from everybody?"""
        return any(self.graphs[n].alive for n in block.captures)

    def _may_work(self, slot: int) -> bool:
        return not self.forbidden(slot) and bool(self.usable(slot))

    def _may_use(self, block: int, slot: int) -> bool:
        if block >= len(self.blocks) or self.forbidden(slot) or self.capture_of(slot) >= 0:
            return False
        found = self.blocks[block]
        return found.live and found.owner != slot and self._usable_outside(found, slot)

    def _may_begin(self, slot: int) -> bool:
        free = self.universe.kinds[slot] != "legacy" and self.capture_of(slot) < 0
        return free and len(self.graphs) < self.universe.captures

    def _may_end(self, slot: int) -> bool:
        number = self.capture_of(slot)
        return number >= 0 and self.graphs[number].origin == slot and self.graphs[number].joined

    def _may_wait_stream(self, slot: int, other: int) -> bool:
        mine, theirs = self.capture_of(slot), self.capture_of(other)
        if theirs < 0:
            news = _join(self.position(slot), self.position(other)) != self.position(slot)
            return mine < 0 and news and not self.forbidden(slot) and not self.forbidden(other)
        if mine >= 0:
            graph = self.graphs[mine]
            return mine == theirs and not graph.behind(slot, (other, graph.steps[other]))
        return self.universe.kinds[slot] != "legacy"

    def _may_renew(self, slot: int) -> bool:
        known = bool(self.touched >> slot & 1) and self.columns[slot] == slot
        return known and self.universe.kinds[slot] in RENEWABLE and self.capture_of(slot) < 0

    def _may_sync(self, slot: int) -> bool:
        return self.capture_of(slot) < 0 and not self.forbidden(slot)

    def _may_launch(self, number: int, slot: int) -> bool:
        if number >= len(self.graphs) or self.forbidden(slot):
            return False
        graph = self.graphs[number]
        if not graph.over or not graph.alive or not graph.items:
            return False
        if self.capture_of(slot) >= 0:
            return self.universe.child and self._child_is_right(graph)
        for item in graph.items:
            block = self.blocks[item]
            if block.made_in < 0:
                if not self._behind_all(slot, block.behind):
                    return False
            elif block.made_in == number:
                if not self._behind(slot, block.uses):
                    return False
            elif not self.graphs[block.made_in].over or not self._behind(slot, self.graphs[block.made_in].launches):
                return False
        return True

    def _child_is_right(self, graph: Captured) -> bool:
        """Of the simplest only: a graph that is launched into another uses blocks from outside, or of its own."""
        return all(b.made_in in (-1, self.graphs.index(graph)) for b in map(self.blocks.__getitem__, graph.items))

    # -- steps --------------------------------------------------------------------------------------

    def take(self, step: Step) -> None:
        """The step has been taken."""
        word, *args = step
        for slot in slots_of(step):
            self.touched |= 1 << slot
        getattr(self, "_take_" + word, _nothing)(*args)

    def _take_alloc(self, slot: int, size: int) -> None:
        number = self.capture_of(slot)
        during = frozenset(n for n, g in enumerate(self.graphs) if not g.over)
        if number >= 0:
            step = (slot, self.graphs[number].steps[slot])
            self.blocks.append(Made(slot, step=step, made_in=number, captures=during))
            self._take_work(slot, [len(self.blocks) - 1])
            return
        self.blocks.append(Made(slot, self._before(slot), captures=during))
        if not self.forbidden(slot):
            self._take_work(slot, [len(self.blocks) - 1])

    def _before(self, slot: int) -> Clock:
        """What must come before other streams' uses of a block that is allocated now.

        With declared uses: the allocation, as the pool may have made the stream wait for anybody's memory.  With
        assumed ones only what the owner was behind: a pool that never crosses streams gives what it freed itself.
        """
        if not self.universe.assumed:
            column, n = self._count(slot)
            return tuple(n if c == column else 0 for c in range(len(self.ops))) if self.freed else ()
        freed = any(not b.live and b.owner == slot and b.made_in < 0 for b in self.blocks)
        return self.position(slot) if freed else ()

    def _count(self, slot: int) -> Op:
        """An allocation is no work, but whoever is behind it has waited since."""
        column = self.columns[slot]
        self.ops[column] += 1
        return column, self.ops[column]

    def _take_work(self, slot: int, blocks: Sequence[int] | None = None) -> None:
        used = self.usable(slot) if blocks is None else blocks
        number = self.capture_of(slot)
        if number < 0:
            op = self._work(slot)
            for i in used:
                if self.blocks[i].made_in >= 0:
                    self.blocks[i] = replace(self.blocks[i], uses=(*self.blocks[i].uses, op))
            return
        graph = self.graphs[number]
        steps = {**graph.steps, slot: graph.steps[slot] + 1}
        self.graphs[number] = replace(graph, steps=steps, items=graph.items | set(used))
        for i in used:
            block = self.blocks[i]
            if block.made_in == number and block.owner != slot:
                self.blocks[i] = replace(block, inside=(*block.inside, (slot, steps[slot])))

    def _take_use(self, block: int, slot: int) -> None:
        op = self._work(slot)
        self.blocks[block] = replace(self.blocks[block], uses=(*self.blocks[block].uses, op))

    def _take_free(self, block: int) -> None:
        self.blocks[block] = replace(self.blocks[block], live=False)
        self.freed = True

    def _take_begin(self, slot: int) -> None:
        number = len(self.graphs)
        self.graphs.append(Captured(slot, {slot: 0}, {slot: {}}))
        self.blocks = [replace(b, captures=b.captures | {number}) if b.live else b for b in self.blocks]

    def _take_end(self, slot: int) -> None:
        number = self.capture_of(slot)
        self.graphs[number] = replace(self.graphs[number], over=True)

    def _take_wait_stream(self, slot: int, other: int) -> None:
        number = self.capture_of(other)
        if number < 0:
            mark = self.reach(other) if self.universe.kinds[other] == "legacy" else self.position(other)
            if self._blocking(other):
                mark = _join(mark, self.legacy)
            for s in (other, slot):  # a record or a wait on legacy is a barrier
                if self.universe.kinds[s] == "legacy":
                    self.clocks[s] = self.reach(s)
            self.clocks[slot] = _join(self.clocks[slot], mark)
            for s in (other, slot):
                if self.universe.kinds[s] == "legacy":
                    self.legacy = self.position(s)
            return
        graph = self.graphs[number]
        steps, reach = dict(graph.steps), {s: dict(r) for s, r in graph.reach.items()}
        if slot not in steps:
            steps[slot], reach[slot] = 1, {}  # joining is a step that the origin has to come behind
        mine = reach[slot]
        for s, n in {**reach[other], other: graph.steps[other]}.items():
            mine[s] = max(mine.get(s, 0), n)
        self.graphs[number] = replace(graph, steps=steps, reach=reach)

    def _take_renew(self, slot: int) -> None:
        n = len(self.columns)
        if self._blocking(slot):
            self.ended = _join(self.ended, self.position(slot))
        self.columns[slot] += n
        self.clocks[slot] = (0,) * (2 * n)
        self.blocks = [replace(b, owner=-1) if b.owner == slot else b for b in self.blocks]  # nobody's any more

    def _take_sync(self, slot: int) -> None:
        known = self.reach(slot) if self.universe.kinds[slot] == "legacy" else self.position(slot)
        self.host = _join(self.host, known)

    def _take_launch(self, number: int, slot: int) -> None:
        graph = self.graphs[number]
        inside = self.capture_of(slot)
        if inside >= 0:
            outer = self.graphs[inside]
            steps = {**outer.steps, slot: outer.steps[slot] + 1}
            self.graphs[inside] = replace(outer, steps=steps, items=outer.items | graph.items)
            return
        if graph.launches:
            self.clocks[slot] = _join(self.clocks[slot], graph.last)
        op = self._work(slot)
        self.graphs[number] = replace(graph, launches=(*graph.launches, op), last=self.position(slot))
        for i in graph.items:
            if self.blocks[i].made_in not in (-1, number):
                self.blocks[i] = replace(self.blocks[i], uses=(*self.blocks[i].uses, op))

    def _take_drop(self, number: int) -> None:
        self.graphs[number] = replace(self.graphs[number], alive=False)

    def _take_idle(self) -> None:
        self.busy = False


def _nothing(*args: int) -> None:
    """Steps that change no order."""


def slots_of(step: Step) -> tuple[int, ...]:
    """The streams that a step names."""
    word = step[0]
    if word in ("alloc", "work", "begin", "end", "sync", "renew"):
        return (step[1],)
    if word in ("use", "launch"):
        return (step[2],)
    return step[1:] if word == "wait_stream" else ()


def is_allowed(universe: GraphUniverse, program: Program) -> bool:
    """Is the program right?"""
    contract = Contract.start(universe)
    for step in program:
        if not contract.allows(step):
            return False
        contract.take(step)
    return True

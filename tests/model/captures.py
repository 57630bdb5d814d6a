"""All programs with graph captures of a universe, each equivalence class once, and only right ones (contract.py).

Two programs are equal if they differ only in which of several streams of one kind is used first, or in the order of two
neighbouring steps that do not notice each other (`independent`).  Left out are programs without a capture, steps
repeated at once without effect, and kernels that use nothing.

Run by `python -m tests.model.exhaustive --graphs --length 6 --jobs 2`; a slice of it in test_captures.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

from allocator.sizes import MIB
from tests.model.contract import Contract, GraphUniverse, slots_of
from tests.model.programs import Program, Step

TIME = frozenset({"tick", "idle"})
QUEUED = frozenset({"free", "drop"})
"""Steps that only queue: the next public call of the pool sees them."""
UNAWARE = TIME | {"launch"}
"""Steps that neither look into that queue nor use what is live."""
REPEATED = frozenset({"work", "launch", "stats", "trim", "settle", "sync", "idle", "use"})
"""Steps without effect when they were just taken."""

BASIC = ("alloc", "work", "free", "begin", "end", "launch", "drop")
ORDER = (*BASIC, "wait_stream")
NB, MIXED, USUAL = ("nb", "nb"), ("blocking", "nb"), ("legacy", "blocking")
EAGER: dict[str, Any] = {"seal_frees": 1}
ONE_PAGE: dict[str, Any] = {"limit": 2 * MIB, "wait_on_demand": False}
CONTEXT: dict[str, Any] = {"context_events": True, **EAGER}
SMALL: dict[str, Any] = {"small_request": 2 * MIB}


def _g(name: str, kinds: tuple[str, ...], words: tuple[str, ...], **settings: Any) -> GraphUniverse:
    settings.setdefault("assumed", True)
    return GraphUniverse(f"graph-{name}", kinds, words, **settings)


GRAPH_UNIVERSES: Final = (
    _g("assumed", NB, (*ORDER, "stats")),
    _g("declared", MIXED, (*ORDER, "use", "stats"), assumed=False),
    _g("usual", USUAL, (*ORDER, "stats"), config={"seal_frees": 1}),
    _g("time", ("blocking", "blocking"), (*BASIC, "idle", "stats")),
    _g("context", NB, (*BASIC, "idle", "stats"), config=CONTEXT),
    _g("context-declared", MIXED, (*ORDER, "stats"), assumed=False, config=CONTEXT),
    _g("join", ("nb", "nb", "nb"), ("alloc", "work", "free", "begin", "end", "wait_stream"), blocks=4),
    _g("join-blocking", MIXED, ("alloc", "work", "free", "begin", "end", "wait_stream", "stats"), assumed=False),
    _g("two", NB, BASIC, captures=2),
    _g("two-declared", MIXED, (*BASIC, "stats"), captures=2, assumed=False, config=EAGER),
    _g("one-page", NB, ORDER, config=ONE_PAGE),
    _g("one-page-usual", USUAL, (*BASIC, "idle"), config={**ONE_PAGE, **EAGER}),
    _g("two-pages-wait", MIXED, (*BASIC, "idle"), assumed=False, config={"limit": 4 * MIB}),
    _g("halves", NB, BASIC, sizes=(0, 1), config={"limit": 4 * MIB, "wait_on_demand": False}),
    _g("bins", NB, (*ORDER, "use"), config=SMALL),
    _g("bins-declared", MIXED, (*ORDER, "use"), assumed=False, config={**SMALL, **EAGER}),
    _g("malloc", USUAL, (*BASIC, "trim"), config={"backing": "malloc", "limit": 4 * MIB}),
    _g("foreign", ("foreign", "foreignnb"), (*ORDER, "stats"), config=EAGER),
    _g("thread", ("thread", "nb"), (*ORDER, "stats")),
    _g("ends", MIXED, (*BASIC, "renew", "stats"), config=EAGER),
    _g("ends-foreign", ("legacy", "foreign", "foreignnb"), (*BASIC, "renew"), assumed=True),
    _g("two-pools", NB, (*BASIC, "stats"), pools=2),
    _g("pool", MIXED, (*BASIC, "trim", "settle", "sync")),
)

GRAPHS_BY_NAME: Final = {universe.name: universe for universe in GRAPH_UNIVERSES}


def steps_of(universe: GraphUniverse) -> list[Step]:
    """Every step that a program of the universe may take."""
    slots, blocks, graphs = range(len(universe.kinds)), range(universe.blocks), range(universe.captures)
    found: list[Step] = []
    for word in universe.words:
        if word == "alloc":
            found += [(word, s, k) for s in slots for k in universe.sizes]
        elif word == "use":
            found += [(word, b, s) for b in blocks for s in slots]
        elif word == "free":
            found += [(word, b) for b in blocks]
        elif word == "wait_stream":
            found += [(word, s, t) for s in slots for t in slots if s != t]
        elif word in ("work", "begin", "end", "sync", "renew"):
            found += [(word, s) for s in slots]
        elif word == "launch":
            found += [(word, g, s) for g in graphs for s in slots]
        elif word == "drop":
            found += [(word, g) for g in graphs]
        else:
            found.append((word,))
    return found


def independent(universe: GraphUniverse, one: Step, two: Step) -> bool:
    """True if neither of two neighbouring steps notices which of them came first."""
    a, b = one[0], two[0]
    if a in QUEUED and b in QUEUED:
        return True
    if a in QUEUED or b in QUEUED:
        queued, other = (one, two) if a in QUEUED else (two, one)
        return other[0] in UNAWARE and not (queued[0] == "drop" and other[0] == "launch" and queued[1] == other[1])
    if a in TIME or b in TIME:
        # A mark is over when the work before it is, and a capture has no time: whether time passes before or after.
        return (b if a in TIME else a) in ("wait_stream", "begin", "end")
    if {a, b} <= {"work", "use"}:
        slots = slots_of(one) + slots_of(two)
        return len(set(slots)) == 2 and all(universe.kinds[s] != "legacy" for s in slots)
    return False


class GraphEnumeration:
    """The programs of one universe, to one length."""

    def __init__(self, universe: GraphUniverse, length: int) -> None:
        self.universe = universe
        self.length = length
        self.steps = steps_of(universe)
        rank = {step: n for n, step in enumerate(sorted(self.steps, key=_order))}
        self._swapped = {
            (one, two)
            for one in self.steps
            for two in self.steps
            if rank[two] < rank[one] and independent(universe, one, two)
        }

    def next_steps(self, program: Program, contract: Contract) -> Iterator[Step]:
        """What may come next."""
        last = program[-1] if program else None
        final = len(program) + 1 == self.length
        for step in self.steps:
            if last is None and step[0] not in ("alloc", "begin"):
                continue
            if last is not None and ((last == step and step[0] in REPEATED) or (last, step) in self._swapped):
                continue
            if final and not contract.graphs and step[0] != "begin":
                continue
            if contract.allows(step):
                yield step

    def programs(self, prefix: tuple[Step, ...] = ()) -> Iterator[list[Step]]:
        """All of them that begin with `prefix`; the same list each time, changed in place."""
        contract = Contract.start(self.universe)
        for step in prefix:
            contract.take(step)
        yield from self._walk(list(prefix), contract, self.length)

    def prefixes(self, depth: int = 2) -> list[tuple[Step, ...]]:
        """All beginnings of that length: the units of work."""
        return [tuple(program) for program in self._walk([], Contract.start(self.universe), min(depth, self.length))]

    def _walk(self, program: list[Step], contract: Contract, length: int) -> Iterator[list[Step]]:
        if len(program) == length:
            yield program
            return
        for step in list(self.next_steps(program, contract)):
            after = contract.copy()
            after.take(step)
            program.append(step)
            yield from self._walk(program, after, length)
            program.pop()

    def sampled(self, count: int) -> Iterator[list[Step]]:
        """Random walks over what the enumeration allows: always the same ones."""
        rng = random.Random(f"{self.universe.name} {self.length}")
        for _ in range(count):
            program: list[Step] = []
            contract = Contract.start(self.universe)
            while len(program) < self.length and (steps := list(self.next_steps(program, contract))):
                step = rng.choice(steps)
                program.append(step)
                contract.take(step)
            yield program


def _order(step: Step) -> tuple[int, str, tuple[int, ...]]:
    """What only queues first, then time, then the rest: the order of independent neighbours that is generated."""
    word = step[0]
    return (0 if word in QUEUED else 1 if word in TIME else 2, word, tuple(step[1:]))

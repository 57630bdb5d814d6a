"""All programs of a universe, each equivalence class once, and only those that keep the contract.

Two programs are equal if they differ only in

* which of several streams of one kind is used first, or the order of the program's events,
* the order of two neighbouring steps that do not notice each other (`independent`): a queued free and a record,
  say.  Only the order that sorts first is generated.

Left out as unable to race, to lose anything, or to differ from a shorter one: programs that do not begin with an
allocation, whose last step neither allocates nor uses memory, or that end with the use of memory that nobody had
before; steps repeated at once without effect; waits for an event that was not recorded.

`Shadow` follows a program without running it: which blocks are live, and for which streams the contract allows a
use.  Queries teach it nothing, although a real program may act on their answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.model.programs import Step, Universe

BLOCKING = ("blocking", "thread", "thread2", "legacy", "foreign", "bare")
ENDS = ("alloc", "use", "free_on")
"""Words that launch a kernel on a block: only there can a race be seen."""
IDEMPOTENT = frozenset(
    {"record", "wait", "wait_stream", "sync", "sync_event", "query", "query_event", "stats", "trim", "settle"}
)
UNAWARE = frozenset({"wait", "tick", "idle", "use"})
"""Steps that do not look into the pool's queue of frees."""
TIME = frozenset({"tick", "idle"})
RENEWABLE = ("nb", "blocking", "foreign", "foreignnb")


def steps_of(universe: Universe) -> list[Step]:
    """Every step that a program of the universe may take."""
    slots = range(len(universe.kinds))
    blocks, events = range(universe.blocks), range(universe.events)
    kinds = universe.kinds
    found: list[Step] = []
    for word in universe.words:
        if word in ("alloc", "quiet"):
            found += [(word, s, k) for s in slots for k in universe.sizes]
        elif word in ("use", "free_on"):
            found += [(word, b, s) for b in blocks for s in slots]
        elif word == "free":
            found += [(word, b) for b in blocks]
        elif word in ("record", "wait"):
            found += [(word, e, s) for e in events for s in slots]
        elif word == "wait_stream":
            found += [(word, s, t) for s in slots for t in slots if s != t]
        elif word in ("sync", "query"):
            found += [(word, s) for s in slots]
        elif word == "renew":
            found += [(word, s) for s in slots if kinds[s] in RENEWABLE]
        elif word in ("sync_event", "query_event"):
            found += [(word, e) for e in events]
        else:
            found.append((word,))
    return found


@dataclass
class Shadow:
    """A program so far.  A stream's or event's set of blocks whose allocation it is behind is an int, bit by block."""

    owner: list[int] = field(default_factory=list)
    live: int = 0
    used_before: int = 0
    """Blocks that were allocated when another had been freed: only these can share bytes with others."""
    behind: list[int] = field(default_factory=list)
    legacy: int = 0
    host: int = 0
    events: list[int] = field(default_factory=list)
    """-1: not recorded."""
    touched: int = 0
    """Streams named so far, bit by slot."""
    streams: list[int] = field(default_factory=list)
    """Which incarnation of the slot's stream."""

    @classmethod
    def start(cls, universe: Universe) -> Shadow:
        """Nothing has happened."""
        n = len(universe.kinds)
        return cls(behind=[0] * n, events=[-1] * universe.events, streams=[0] * n)

    def copy(self) -> Shadow:
        """To go on from in another way."""
        return Shadow(
            list(self.owner),
            self.live,
            self.used_before,
            list(self.behind),
            self.legacy,
            self.host,
            list(self.events),
            self.touched,
            list(self.streams),
        )

    def allows(self, universe: Universe, step: Step) -> bool:
        """May the step come next, by the contract and as the one of its class that is generated?"""
        word = step[0]
        kinds = universe.kinds
        for slot in slots_of(step):
            if not self.touched >> slot & 1:
                earlier = (t for t in range(slot) if kinds[t] == kinds[slot])
                if any(not self.touched >> t & 1 and t not in slots_of(step) for t in earlier):
                    return False
        if word in ("alloc", "quiet"):
            return len(self.owner) < universe.blocks
        if word in ("use", "free_on"):
            block, slot = step[1], step[2]
            if not self.live >> block & 1:
                return False
            if slot == self.owner[block]:
                return bool(word == "use")
            known = self.behind[slot] | self.host | (self.legacy if kinds[slot] in BLOCKING else 0)
            return bool(known >> block & 1)
        if word == "free":
            return bool(self.live >> step[1] & 1)
        if word == "record":
            event = step[1]
            return event == 0 or self.events[event] >= 0 or self.events[event - 1] >= 0
        if word in ("wait", "sync_event", "query_event"):
            return self.events[step[1]] >= 0
        if word == "renew":
            return bool(self.touched >> step[1] & 1)
        return True

    def take(self, universe: Universe, step: Step) -> None:
        """The step has been taken."""
        word, kinds = step[0], universe.kinds
        for slot in slots_of(step):
            self.touched |= 1 << slot
        if word in ("alloc", "quiet"):
            slot, block = step[1], len(self.owner)
            if (1 << block) - 1 & ~self.live:
                self.used_before |= 1 << block
            self.owner.append(slot)
            self.live |= 1 << block
            self._work(kinds, slot)
            self.behind[slot] |= 1 << block
            if kinds[slot] == "legacy":
                self.legacy = self.behind[slot]
        elif word in ("use", "free_on"):
            self._work(kinds, step[2])
            if word == "free_on":
                self.live &= ~(1 << step[1])
        elif word == "free":
            self.live &= ~(1 << step[1])
        elif word == "record":
            self.events[step[1]] = self._mark(kinds, step[2])
        elif word == "wait":
            self._wait(kinds, step[2], self.events[step[1]])
        elif word == "wait_stream":
            self._wait(kinds, step[1], self._mark(kinds, step[2]))
        elif word == "sync":
            self.host |= self.behind[step[1]]
            if kinds[step[1]] == "legacy":
                for slot, kind in enumerate(kinds):
                    if kind in BLOCKING:
                        self.host |= self.behind[slot]
        elif word == "sync_event":
            self.host |= self.events[step[1]]
        elif word == "renew":
            slot = step[1]
            self.behind[slot] = 0
            self.streams[slot] += 1
            for block, owner in enumerate(self.owner):
                if owner == slot:
                    self.owner[block] = -1  # nobody's any more

    def _barrier(self, kinds: tuple[str, ...], slot: int) -> None:
        """Work, record or wait on legacy: behind all blocking streams and before them."""
        for other, kind in enumerate(kinds):
            if kind in BLOCKING:
                self.behind[slot] |= self.behind[other]
        self.legacy = self.behind[slot]

    def _work(self, kinds: tuple[str, ...], slot: int) -> None:
        if kinds[slot] == "legacy":
            self._barrier(kinds, slot)
        elif kinds[slot] in BLOCKING:
            self.behind[slot] |= self.legacy

    def _mark(self, kinds: tuple[str, ...], slot: int) -> int:
        if kinds[slot] == "legacy":
            self._barrier(kinds, slot)
        return self.behind[slot] | (self.legacy if kinds[slot] in BLOCKING else 0)

    def _wait(self, kinds: tuple[str, ...], slot: int, mark: int) -> None:
        if kinds[slot] == "legacy":
            self._barrier(kinds, slot)
        self.behind[slot] |= mark
        if kinds[slot] == "legacy":
            self.legacy = self.behind[slot]


def slots_of(step: Step) -> tuple[int, ...]:
    """The streams that a step names."""
    word = step[0]
    if word in ("alloc", "quiet", "sync", "query", "renew"):
        return (step[1],)
    if word in ("use", "free_on", "record", "wait"):
        return (step[2],)
    if word == "wait_stream":
        return (step[1], step[2])
    return ()


def events_of(step: Step) -> tuple[int, ...]:
    """The events that a step names."""
    return (step[1],) if step[0] in ("record", "wait", "sync_event", "query_event") else ()


def independent(universe: Universe, one: Step, two: Step) -> bool:
    """True if neither of two neighbouring steps notices which of them came first."""
    a, b = one[0], two[0]
    if a == "free" or b == "free":
        if b == "free":
            a, b, one, two = b, a, two, one
        # A free is an entry in a queue: only who drains it, or uses the block, can tell.
        return b in UNAWARE and not (b == "use" and two[1] == one[1])
    if a in TIME or b in TIME:
        # A mark is over when the work before it is: whether time passes before or after it was made is no matter.
        other = b if a in TIME else a
        return other in ("record", "wait", "wait_stream")
    quiet = ("use", "record", "wait", "wait_stream")
    if a in quiet and b in quiet:
        if set(slots_of(one)) & set(slots_of(two)) or set(events_of(one)) & set(events_of(two)):
            return False
        kinds = universe.kinds
        mine, theirs = ([kinds[s] for s in slots_of(x)] for x in (one, two))
        return not (
            ("legacy" in mine and any(k in BLOCKING for k in theirs))
            or ("legacy" in theirs and any(k in BLOCKING for k in mine))
        )
    return False


class Enumeration:
    """The programs of one universe, to one length."""

    def __init__(self, universe: Universe, length: int) -> None:
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

    def next_steps(self, program: list[Step], shadow: Shadow) -> Iterator[Step]:
        """What may come next."""
        last = program[-1] if program else None
        final = len(program) + 1 == self.length
        for step in self.steps:
            word = step[0]
            if final and word not in ENDS:
                continue
            if last is None:
                if word not in ("alloc", "quiet"):
                    continue
            elif (last == step and word in IDEMPOTENT) or (last, step) in self._swapped:
                continue
            if not shadow.allows(self.universe, step):
                continue
            if final:
                if word == "alloc":
                    if not (1 << len(shadow.owner)) - 1 & ~shadow.live:
                        continue
                elif not shadow.used_before >> step[1] & 1:
                    continue
            yield step

    def programs(self, prefix: tuple[Step, ...] = ()) -> Iterator[list[Step]]:
        """All of them that begin with `prefix`; the same list each time, changed in place."""
        shadow = Shadow.start(self.universe)
        program: list[Step] = []
        for step in prefix:
            program.append(step)
            shadow.take(self.universe, step)
        yield from self._walk(program, shadow)

    def _walk(self, program: list[Step], shadow: Shadow) -> Iterator[list[Step]]:
        if len(program) == self.length:
            yield program
            return
        left = self.length - len(program)
        if left <= 2 and not self._hope(shadow, left):
            return
        for step in list(self.next_steps(program, shadow)):
            after = shadow.copy()
            after.take(self.universe, step)
            program.append(step)
            yield from self._walk(program, after)
            program.pop()

    def _hope(self, shadow: Shadow, left: int) -> bool:
        """Can the steps that are left still share bytes?"""
        full = (1 << len(shadow.owner)) - 1
        return bool(shadow.used_before & shadow.live) or (
            len(shadow.owner) < self.universe.blocks and (left > 1 or bool(full & ~shadow.live))
        )

    def prefixes(self, depth: int = 2) -> list[tuple[Step, ...]]:
        """All beginnings of that length: the units of work."""
        found: list[tuple[Step, ...]] = []

        def walk(program: list[Step], shadow: Shadow) -> None:
            if len(program) == depth:
                found.append(tuple(program))
                return
            for step in self.next_steps(program, shadow):
                after = shadow.copy()
                after.take(self.universe, step)
                walk([*program, step], after)

        walk([], Shadow.start(self.universe))
        return found


def _order(step: Step) -> tuple[int, str, tuple[int, ...]]:
    """Frees first, then time, then the rest: the order of independent neighbours that is generated."""
    word = step[0]
    return (0 if word == "free" else 1 if word in TIME else 2, word, tuple(step[1:]))

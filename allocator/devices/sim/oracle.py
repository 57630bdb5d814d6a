"""The race oracle: which launches touch the same bytes without an order between them.

Rule: *it trusts nobody*.  It sees launches and driver calls, computes happens-before from them alone, and
never looks at virtual time.  All it takes from the allocator is who owns which bytes (`hand_out`).

A stream is a `Line`; its launches are numbered.  What is ordered before a point is a clock: Line -> number.
An earlier access (line T, number q) is ordered before a launch on S if

    T is S,  or  clock(S)[T] >= q,  or  q <= T.host_known

`host_known` is what the host has been told is over, by a wait or by a query that said yes.  There is one
host: what one thread has learnt counts for the launches of all threads.  That is sound for programs whose
threads hand memory to each other under a lock, as a pool does, and misses races of those that do not.

Bytes are kept as cells, disjoint address ranges with equal history.  Two accesses by one hand-out are the
program's own business; of different hand-outs they race if one of them writes and the first is not ordered
before the second.  What a cell may forget, and why, stands at `_touch`.  A consequence: every launch that
races is reported, against at least one of the accesses it races with.

Next: docs/ordering.md.  Imports nothing of the allocator, and is one file although a long one: it must be
possible to check it alone.  Not thread-safe.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sortedcontainers import SortedDict

Mark = dict["Line", int]
"""A clock; never changed once made, so that it can be shared."""


class Line:
    """One stream as the oracle sees it."""

    __slots__ = ("blocking", "clock", "handle", "host_known", "ident", "legacy_seen", "pending", "seqno", "token")

    def __init__(self, handle: int, ident: int, blocking: bool) -> None:
        self.handle = handle
        self.ident = ident
        self.blocking = blocking
        self.seqno = 0  # launches so far
        self.host_known = 0  # launches that the host knows to be over
        self.clock: Mark = {}  # other lines' launches ordered before this line's next one
        self.legacy_seen = 0
        self.pending: dict[Resident, None] = {}  # to be touched by the next launch
        self.token: Any = None  # the caller's name for the last launch

    def __repr__(self) -> str:
        return f"<stream {self.handle:#x} id {self.ident}>"


class HandOut:
    """One period of ownership of some bytes.  The owner is held weakly: watching must not keep memory alive."""

    __slots__ = ("__weakref__", "_owner", "_ref", "number")

    def __init__(self, number: int, owner: object, by_owner: dict[int, HandOut]) -> None:
        self.number = number
        self._owner: object = None
        self._ref: weakref.ref[Any] | None = None
        key = id(owner)
        try:
            self._ref = weakref.ref(owner, lambda _, key=key: by_owner.pop(key, None))  # type: ignore[misc]  # mypy does not infer a lambda with a default
        except TypeError:
            self._owner = owner
        else:
            by_owner[key] = self

    @property
    def owner(self) -> object:
        """The owner, or None if it is gone."""
        return self._owner if self._ref is None else self._ref()


@dataclass(frozen=True)
class Access:
    """One side of a race."""

    stream: int
    """The stream's handle."""
    stream_id: int
    seqno: int
    """Which launch on that stream, from 1."""
    write: bool
    hand_out: HandOut | None

    @property
    def allocation(self) -> object:
        """The owner announced for the bytes; None if none was, or if it is gone."""
        return None if self.hand_out is None else self.hand_out.owner

    def __str__(self) -> str:
        owner = "nobody" if self.hand_out is None else f"hand-out {self.hand_out.number} ({self.allocation!r})"
        verb = "write" if self.write else "read"
        return f"{verb} no. {self.seqno} on stream {self.stream:#x} (id {self.stream_id}) for {owner}"


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes, for different hand-outs, with no order between them."""

    ptr: int
    nbytes: int
    first: Access
    second: Access

    def __str__(self) -> str:
        return f"race on {self.nbytes} bytes at {self.ptr:#x}: {self.first}, then {self.second}"


class Use:
    """One access as a cell remembers it.  While `open` it stands for every launch of its line so far."""

    __slots__ = ("_token", "hand_out", "line", "open", "resident", "seqno", "write")

    def __init__(self, line: Line, write: bool, hand_out: HandOut | None, resident: Resident | None = None) -> None:
        self.line = line
        self.seqno = line.seqno
        self._token = line.token
        self.write = write
        self.hand_out = hand_out
        self.resident = resident
        self.open = resident is not None

    @property
    def last(self) -> int:
        """The number of its latest launch."""
        return self.line.seqno if self.open else self.seqno

    @property
    def token(self) -> Any:
        """The caller's name for its latest launch."""
        return self.line.token if self.open else self._token

    def close(self) -> None:
        """Later launches of the line no longer count."""
        if self.open:
            self.seqno, self._token, self.open = self.line.seqno, self.line.token, False

    def known(self) -> bool:
        """True if the host knows that it is over."""
        return not self.open and self.seqno <= self.line.host_known

    def access(self) -> Access:
        """For people."""
        return Access(self.line.handle, self.line.ident, self.last, self.write, self.hand_out)


class Resident:
    """Bytes that every launch of a line writes, from the next one until `Oracle.detach`."""

    __slots__ = ("hand_out", "line", "nbytes", "oracle", "ptr", "use")

    def __init__(self, oracle: Oracle, line: Line, ptr: int, nbytes: int, hand_out: HandOut | None) -> None:
        self.oracle = oracle  # of the device whose memory it is
        self.line = line
        self.ptr = ptr
        self.nbytes = nbytes
        self.hand_out = hand_out
        self.use: Use | None = None


class Cell:
    """The history of the bytes [start, end)."""

    __slots__ = ("end", "hand_out", "shadowed", "start", "uses")

    def __init__(self, start: int, end: int, hand_out: HandOut | None, uses: list[Use], shadowed: list[Use]) -> None:
        self.start = start
        self.end = end
        self.hand_out = hand_out
        self.uses = uses
        self.shadowed = shadowed


class Oracle:
    """Happens-before and the byte map of one device.

    >>> oracle = Oracle()
    >>> a, b = oracle.line(0x10, 1, blocking=False), oracle.line(0x20, 2, blocking=False)
    >>> old = oracle.hand_out(0, 512, "old")
    >>> oracle.launch(a, [(0, 512, True, old)])
    >>> new = oracle.hand_out(0, 512, "new")
    >>> oracle.launch(b, [(0, 512, True, new)])
    >>> print(oracle.races[0])
    race on 512 bytes at 0x0: write no. 1 on stream 0x10 (id 1) for hand-out 1 ('old'), then write no. 1 on stream \
0x20 (id 2) for hand-out 2 ('new')
    """

    def __init__(self, legacy_id: int = 0) -> None:
        self.legacy = Line(1, legacy_id, True)
        self.races: list[Race] = []
        self._legacy_version = 0
        self._since_legacy: dict[Line, None] = {}  # blocking lines that moved since the last legacy operation
        self._since_context: dict[Line, None] = {}  # lines that moved since the last context-wide mark
        self._context: Mark = {}
        self._cells: SortedDict[int, Cell] = SortedDict()
        self._by_owner: dict[int, HandOut] = {}
        self._numbers = itertools.count(1)
        self.pools = HandOut(0, "the pool itself", self._by_owner)
        """Whose the accesses are that a pool makes to memory nobody has: never current anywhere."""
        self._prune_at = 256

    # -- order --------------------------------------------------------------------------------

    def line(self, handle: int, ident: int, *, blocking: bool) -> Line:
        """A new stream.  Needs no end: lines are forgotten with their last access."""
        return Line(handle, ident, blocking)

    def record(self, line: Line) -> Mark:
        """The mark that an event recorded on `line` now stands for."""
        if line is self.legacy:
            self._legacy_operation()
        mark = _position(line)
        if line.blocking and line is not self.legacy:
            mark = _joined(mark, _position(self.legacy))  # the event waits for legacy, the stream's query does not
        return mark

    def record_context(self) -> Mark:
        """The mark behind everything on this device so far."""
        for line in (*self._since_context, self.legacy):
            self._context = _joined(self._context, _position(line))
        self._since_context.clear()
        self._context = {line: q for line, q in self._context.items() if q > line.host_known}
        return self._context

    def wait(self, line: Line, mark: Mark) -> None:
        """Launches on `line` are from now on ordered behind `mark`."""
        if line is self.legacy:
            self._legacy_operation()
        line.clock = _joined(line.clock, mark)
        self._moved(line)

    def position(self, line: Line) -> Mark:
        """What a successful query or host wait of `line`, begun now, proves."""
        mark = _position(line)
        if line is self.legacy:
            for other in self._since_legacy:
                mark = _joined(mark, _position(other))
        return mark

    def host_learns(self, mark: Mark) -> None:
        """The host was told that all of `mark` is over."""
        for line, seqno in mark.items():
            if seqno > line.host_known:
                line.host_known = seqno

    def _legacy_operation(self) -> None:
        """Legacy work, record or wait: behind all blocking lines, and before their later work."""
        clock = self.legacy.clock
        for line in self._since_legacy:
            clock = _joined(clock, _position(line))
        self.legacy.clock = clock
        self._since_legacy.clear()
        self._legacy_version += 1

    def _moved(self, line: Line) -> None:
        self._since_context[line] = None
        if line.blocking and line is not self.legacy:
            self._since_legacy[line] = None
        if len(self._since_context) > self._prune_at or len(self._since_legacy) > self._prune_at:
            for lines in (self._since_context, self._since_legacy):
                for other in [other for other in lines if not _position(other)]:
                    del lines[other]
            self._prune_at = 256 + 2 * max(len(self._since_context), len(self._since_legacy))

    # -- accesses -----------------------------------------------------------------------------

    def hand_out(self, ptr: int, nbytes: int, owner: object) -> HandOut:
        """[ptr, ptr + nbytes) now belongs to `owner`."""
        hand_out = HandOut(next(self._numbers), owner, self._by_owner)
        kept: Cell | None = None
        for cell in self._range(ptr, ptr + nbytes):
            cell.hand_out = hand_out
            cell.shadowed = []
            cell.uses = [use for use in cell.uses if not use.known()]
            if kept is not None and kept.uses == cell.uses:
                del self._cells[cell.start]
                kept.end = cell.end
            else:
                kept = cell
        return hand_out

    def owner_at(self, ptr: int, owner: object = None) -> HandOut | None:
        """The hand-out announced for `owner` itself, else the one current at `ptr`."""
        if owner is not None:
            found = self._by_owner.get(id(owner))
            if found is not None and found.owner is owner:
                return found
        cell = self._at(ptr)
        return None if cell is None else cell.hand_out

    def launch(self, line: Line, uses: Iterable[tuple[int, int, bool, HandOut | None]] = (), token: Any = None) -> None:
        """One launch with its accesses (ptr, nbytes, write, hand-out), and those of the line's residents."""
        if line is self.legacy:
            self._legacy_operation()
        elif line.blocking and line.legacy_seen != self._legacy_version:
            line.clock = _joined(line.clock, _position(self.legacy))
            line.legacy_seen = self._legacy_version
        line.seqno += 1
        line.token = token
        self._moved(line)
        for ptr, nbytes, write, hand_out in uses:
            self.touch(Use(line, write, hand_out), ptr, nbytes)
        if line.pending:
            pending, line.pending = line.pending, {}
            for resident in pending:
                if resident.use is None:
                    resident.use = Use(line, True, resident.hand_out, resident)
                resident.oracle.touch(resident.use, resident.ptr, resident.nbytes)

    def attach(self, line: Line, ptr: int, nbytes: int, hand_out: HandOut | None) -> Resident:
        """Every launch of `line`, from the next one on, writes these bytes, until `detach`.

        Only the first launch has to be checked against what came before (the others are behind it), and only
        the last one matters to whoever comes later.
        """
        resident = Resident(self, line, ptr, nbytes, hand_out)
        line.pending[resident] = None
        return resident

    def detach(self, resident: Resident) -> None:
        """End of `attach`."""
        resident.line.pending.pop(resident, None)
        if resident.use is not None:
            resident.use.close()

    def touch(self, use: Use, ptr: int, nbytes: int) -> None:
        """Check one access against the history of its bytes, and add it."""
        for cell in self._range(ptr, ptr + nbytes):
            self._touch(cell, use)

    def _touch(self, cell: Cell, use: Use) -> None:
        """Check, then forget what no later check needs.

        Let R be an old use, ordered before the new one N, with N a write or R a read.  A later access M that
        conflicts with R but is not behind R conflicts with N too and is not behind N; so M is reported for N,
        unless M and N belong to one hand-out.  Hence R goes at once if it belongs to N's hand-out as well
        (M against R would be that hand-out's own business), and otherwise once the bytes change hands: until
        then it is *shadowed*.
        """
        line = use.line
        kept: list[Use] = []
        for old in cell.uses:
            if old is use:
                continue
            other = old.line
            last = other.seqno if old.open else old.seqno
            ordered = other is line or last <= other.host_known or line.clock.get(other, 0) >= last
            same = old.hand_out is use.hand_out
            if not same:
                if not ordered and (old.write or use.write):
                    self._report(cell, old, use)
                if old.open and old.resident is not None:
                    other.pending[old.resident] = None  # its next launch comes after us: check it again
            if old.open or not ordered or (old.write and not use.write):
                kept.append(old)
            elif not same and not old.known():
                (cell.shadowed if use.hand_out is cell.hand_out else kept).append(old)
        for old in cell.shadowed:
            if old.hand_out is not use.hand_out and (old.write or use.write) and not _ordered(old, line):
                self._report(cell, old, use)
        kept.append(use)
        cell.uses = kept

    def _report(self, cell: Cell, first: Use, second: Use) -> None:
        """Add a race; one that continues the range reported just before only makes that longer."""
        one, two = first.access(), second.access()
        if self.races:
            last = self.races[-1]
            if last.first == one and last.second == two and last.ptr + last.nbytes == cell.start:
                self.races[-1] = Race(last.ptr, cell.end - last.ptr, one, two)
                return
        self.races.append(Race(cell.start, cell.end - cell.start, one, two))

    # -- for the device -----------------------------------------------------------------------

    def uses(self, ptr: int, nbytes: int) -> list[Use]:
        """What is remembered of [ptr, ptr + nbytes): the last uses, as far as the host may not know them."""
        found: dict[Use, None] = {}
        for cell in self._overlapping(ptr, ptr + nbytes):
            for use in (*cell.uses, *cell.shadowed):
                if not use.known():
                    found[use] = None
        return list(found)

    def writes(self, ptr: int, nbytes: int) -> list[tuple[int, int, Any]]:
        """(start, end, token) of the writes to [ptr, ptr + nbytes) that the host does not know to be over."""
        return [
            (cell.start, cell.end, use.token)
            for cell in self._overlapping(ptr, ptr + nbytes)
            for use in (*cell.uses, *cell.shadowed)
            if use.write and not use.known()
        ]

    def forget(self, ptr: int, nbytes: int) -> None:
        """The bytes have gone back to the driver."""
        for cell in list(self._range(ptr, ptr + nbytes)):
            del self._cells[cell.start]

    @property
    def cells(self) -> int:
        """How many ranges are remembered."""
        return len(self._cells)

    # -- the byte map -------------------------------------------------------------------------

    def _at(self, ptr: int) -> Cell | None:
        index = self._cells.bisect_right(ptr) - 1
        if index < 0:
            return None
        cell: Cell = self._cells.peekitem(index)[1]
        return cell if cell.end > ptr else None

    def _overlapping(self, start: int, end: int) -> Iterator[Cell]:
        first = self._at(start)
        if first is not None:
            start = first.start
        for key in self._cells.irange(start, end, inclusive=(True, False)):
            yield self._cells[key]

    def _range(self, start: int, end: int) -> list[Cell]:
        """The cells that make up exactly [start, end), made and cut as needed.  O(log cells + result)."""
        if end <= start:
            return []
        cell = self._cells.get(start)
        if cell is not None and cell.end == end:
            return [cell]
        self._cut(start)
        self._cut(end)
        found: list[Cell] = []
        gap = start
        for cell in [self._cells[key] for key in self._cells.irange(start, end, inclusive=(True, False))]:
            if cell.start > gap:
                found.append(self._new(gap, cell.start))
            found.append(cell)
            gap = cell.end
        if gap < end:
            found.append(self._new(gap, end))
        return found

    def _new(self, start: int, end: int) -> Cell:
        self._cells[start] = cell = Cell(start, end, None, [], [])
        return cell

    def _cut(self, ptr: int) -> None:
        cell = self._at(ptr)
        if cell is not None and cell.start < ptr:
            self._cells[ptr] = Cell(ptr, cell.end, cell.hand_out, list(cell.uses), list(cell.shadowed))
            cell.end = ptr


def _ordered(old: Use, line: Line) -> bool:
    last = old.last
    return old.line is line or last <= old.line.host_known or line.clock.get(old.line, 0) >= last


def _position(line: Line) -> Mark:
    """Everything before the line's next launch, without what the host knows anyway."""
    mark = {other: q for other, q in line.clock.items() if q > other.host_known}
    if len(mark) < len(line.clock):
        line.clock = dict(mark)
    if line.seqno > line.host_known:
        mark[line] = line.seqno
    return mark


def _joined(one: Mark, two: Mark) -> Mark:
    if not two:
        return one
    joined = dict(one)
    for line, seqno in two.items():
        if seqno > line.host_known and joined.get(line, 0) < seqno:
            joined[line] = seqno
    return joined

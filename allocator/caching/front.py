"""The hot path, and nothing else: what needs no driver call, where nothing has to be looked at before.

    acquire   an exact size that the same stream freed before, from a bin or from where the newest free lies, lock-free
    fetch     the same, or the ladder's first steps, under the lock: best fit among what the stream may take at once

Everything a hit touches is an attribute here, so that `acquire` can be compiled unchanged (docs/decisions/0016).
Whatever is not plain, in the state of the pool or in the request, is left to `CachingAllocator.obtain`.

Ctrl-C raises between any two steps of interpreted code: each step here leaves the block in a bin or with somebody.
Next: pool.py (the rest of an allocation), frees.py (how blocks come back).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from allocator.blocks import Bin, Bins, Block, Owner
from allocator.caching.accounting import Accounts
from allocator.caching.frees import Frees
from allocator.caching.reaper import any_left
from allocator.caching.shelves import Shelves
from allocator.events import VectorClock
from allocator.gil import GilLock, Inside
from allocator.streams import Kind, Registry, Timeline
from allocator.sync import LockLike, inner_of, shield

_EVER: Final = (Kind.LEGACY, Kind.PER_THREAD)
"""Streams without an owner whose handles never die (R9)."""
LAST: Final = (-1, -1 << 50)
"""Where the newest block of a bin is, by `Inside.busy`: while somebody is inside, there is none."""
_NONE: Final[list[Block]] = []
LOOKS: Final = 8
"""Misses for each look at pools that have gone, for as long as there are any."""


class Front:
    """What serves hits.  `assumed` is, in all of this, what `Config.uses` has made of what the caller says.

    careful: something has to be looked at before an allocation (closed, forked, over the limit, captures): no hits.
    """

    __slots__ = (
        "_assumed",
        "_at_hand",
        "_below",
        "_careful",
        "_clears",
        "_context",
        "_declared",
        "_enter",
        "_frees",
        "_here",
        "_kind",
        "_leave",
        "_passed",
        "_put_down",
        "_queue",
        "_registry",
        "_told",
        "_vain",
        "accounts",
        "announce",
        "inside",
        "lane",
    )

    def __init__(
        self,
        lock: LockLike,
        registry: Registry,
        shelves: Shelves,
        frees: Frees,
        accounts: Accounts,
        kind: Callable[[int], int],
        at_hand: Callable[[Timeline, int, int, int, bool], Block | None],
    ) -> None:
        """kind: the class of a size.  at_hand: the ladder's first steps."""
        section, here, told = inner_of(lock)
        self._enter: Any = section.acquire
        self._leave: Any = section.release
        self._here: Any = here
        self._below: Any = inner_of(registry.lock)[1]
        self._registry = registry
        self._context = registry.context
        self._kind = kind
        self._at_hand = at_hand
        self.inside: Inside = Inside() if told is None else told
        self._told = told is not None
        """Does `inside` know of every section?"""
        self._vain: object = None
        """What `fetch` looked for in vain the last time, and all that would have to change for it to be found."""
        self._clears = not isinstance(lock, GilLock)
        """Leaving the section does not say that nobody is inside: say it here."""
        self.accounts = accounts
        self._frees = frees
        self._queue: Any = frees.queue
        self._put_down: Any = frees.put_down
        self.lane = frees.lane
        """Where a free may lie that `acquire` can take back; None where there is no such place, and while `careful`."""
        self._declared: dict[Owner, Bins]
        self._assumed: dict[Owner, Bins]
        self._declared, self._assumed = shelves.bins
        self._passed = 0
        self._careful = False
        self.announce: Any = None
        """What a device that watches is told of each hand-out: (ptr, size, whoever holds it); None for none."""

    @property
    def careful(self) -> bool:
        """Has something to be looked at before an allocation?"""
        return self._careful

    @careful.setter
    def careful(self, careful: bool) -> None:
        lane = None if careful else self._frees.lane
        # In one line, without a call or a branch: another thread, or Ctrl-C, comes before both or after.
        self._careful = careful; self.lane = lane  # noqa: E702  # fmt: skip

    def allocate(self, make: Any, pool: object, nbytes: int, line: Timeline, stream: object, assumed: bool) -> Any:
        """What `make` makes of the block that `acquire` or `fetch` finds; None if they find none.

        Here, and not with the caller: what compiled code returns is lost if Ctrl-C comes before it has a name, and an
        allocation that is lost gives its block back.
        """
        block = self.acquire(nbytes, line, assumed)
        if block is None:
            block = self.fetch(nbytes, line, assumed)
            if block is None:
                return None
        generation = block.generation
        try:
            allocation = make(pool, block, nbytes, stream)
            if self.announce is not None:
                self.announce(block.ptr, block.size, allocation)
        except BaseException:  # nobody holds it; should it have been queued already, once counts
            self._put_down((block, generation, None))
            raise
        return allocation

    def acquire(self, nbytes: int, line: Timeline, assumed: bool) -> Block | None:
        """A block of exactly the size asked for that the stream freed before; None: ask `fetch`, also for 0 bytes.

        None for a stream that has ended.  No driver call: where marks are due (R13), `obtain` makes them.

        Without the lock where that can be: a block is taken in one line, with the look at `busy`, and nothing from then
        to the last change gives the interpreter's lock away (gil.py).  That the entry is still there, and the block in
        the generation that it names, says that nobody has had it since.
        """
        lane = self.lane
        if lane is None:
            return None if self._careful else self._locked(nbytes, line, assumed)
        block: Block | None = None
        bin_: Bin | None
        try:
            last = lane.block; kept = lane.generation  # the entry, before whatever is read of the block  # noqa: E702  # fmt: skip
            if last is not None:
                bin_ = last.bin
                if bin_ is not None:
                    freed = last.requested
                    if (
                        bin_.taker is line
                        and (freed == nbytes or bin_.size == (nbytes + 511) & -512)
                        and bin_.assumed is assumed
                        and not line.ended
                        and not lane.rest
                    ):
                        busy = self.inside.busy; block = lane.block; then = lane.generation; lane.block = None  # noqa: E702  # fmt: skip
                        if block is not last or then != kept or last.generation != kept or busy:
                            if block is not None:  # somebody else's, or not now
                                entry, block = (block, then, None), None  # ours no more, should Ctrl-C come after it
                                self._put_down(entry)
                            return self._locked(nbytes, line, assumed)
                        # Its own stream takes it back (R7).  It never gets to the bin, as if it had been there for no
                        # time: nobody else sees a stamp, and no seqno is due for it.
                        last.generation = kept + 1
                        if freed == nbytes and bin_.request == nbytes:
                            bin_.turns += 1
                        else:
                            accounts = self.accounts
                            last.requested = nbytes
                            bin_.hits += 1
                            accounts.turns += 1
                            accounts.turned_sum += freed
                            accounts.requested_sum += nbytes - freed
                            if not bin_.turns:
                                bin_.request = nbytes
                        return last
                    mine = bin_.after
                    if mine is not None and mine.owner is line and freed == nbytes and bin_.assumed is assumed:
                        # Streams take turns: what `put_down_last` does, and a hit, in one.
                        theirs: Timeline = bin_.owner  # type: ignore[assignment]  # owners are timelines
                        accounts = self.accounts
                        blocks = mine.blocks
                        stamp: VectorClock = theirs.here
                        if assumed:
                            made = theirs.here_assumed
                            if made is None or made.context != self._context.pending or made.own != theirs.pending:
                                blocks = _NONE  # a stamp has to be made
                            else:
                                stamp = made
                        if (
                            blocks
                            and bin_.filled
                            and not theirs.ended
                            and not line.ended
                            and not lane.rest
                            and accounts.frees < accounts.calm
                            and accounts.freed_sum + freed < accounts.bytes_due
                        ):
                            try:
                                block = blocks[LAST[self.inside.busy]]; back = lane.block; then = lane.generation; lane.block = None; del blocks[-1]  # noqa: E501, E702  # fmt: skip
                            except IndexError:
                                return self._locked(nbytes, line, assumed)
                            mine.hits += 1
                            block.requested = nbytes
                            accounts.requested_sum += nbytes
                            if back is last and then == kept and last.generation == kept:
                                last.stamp = stamp
                                last.generation = kept + 1
                                accounts.frees += 1
                                accounts.freed_sum += freed
                                if accounts.allocated - mine.size < accounts.low:  # as it was between the two
                                    accounts.low = accounts.allocated - mine.size
                                bin_.blocks.append(last)
                                if not bin_.filled:
                                    self._frees.strays.append(bin_)  # as in `put_down_last`
                                return block
                            accounts.allocated = allocated = accounts.allocated + mine.size
                            if allocated > accounts.high:
                                accounts.high = allocated
                            if back is not None:  # somebody else's
                                self._put_down((back, then, None))
                            return block
                if not self._frees.put_down_last():
                    return self._locked(nbytes, line, assumed) if lane.rest or self._frees.bounded else None
            else:
                bin_ = None
            before = bin_
            size = (nbytes + 511) & -512
            sizes = (self._assumed if assumed else self._declared).get(line)  # a line of another device finds nothing
            bin_ = sizes.by_size.get(size) if sizes is not None else None
            if lane.rest:
                return self._locked(nbytes, line, assumed)
            if bin_ is None or line.ended:
                return None
            blocks = bin_.blocks
            try:
                block = blocks[LAST[self.inside.busy]]; del blocks[-1]  # noqa: E702  # fmt: skip
            except IndexError:
                return None  # nothing there, or not now
            accounts = self.accounts
            bin_.hits += 1
            block.requested = nbytes
            accounts.requested_sum += nbytes
            accounts.allocated = allocated = accounts.allocated + size
            if allocated > accounts.high:
                accounts.high = allocated
            if before is not None and before.size == size and before.assumed is assumed and before.taker is not None:
                before.after = bin_
            return block
        except BaseException:
            if block is not None:
                self._put_down((block, block.generation, None))
            raise

    def _locked(self, nbytes: int, line: Timeline, assumed: bool) -> Block | None:
        """The same under the lock, so that what others have freed can be put down first; None if marks are due then.

        Between the first change and the last nothing is called: Ctrl-C comes before or after.
        """
        if line.ended or self._here() or self._below():
            return None
        block: Block | None = None
        inside = self.inside
        try:
            if not self._enter(False):  # not `with`: that costs twice as much where this is interpreted
                return None
            inside.busy = 1
            inside.entered += 1
            if not (self._queue and self._frees.drain()):
                size = (nbytes + 511) & -512
                sizes = (self._assumed if assumed else self._declared).get(line)
                bin_ = sizes.by_size.get(size) if sizes is not None else None
                if bin_ is not None and bin_.blocks:
                    blocks, accounts = bin_.blocks, self.accounts
                    block = blocks[-1]
                    del blocks[-1]
                    bin_.hits += 1
                    block.requested = nbytes
                    accounts.requested_sum += nbytes
                    accounts.allocated = allocated = accounts.allocated + size
                    if allocated > accounts.high:
                        accounts.high = allocated
            if self._clears:
                inside.busy = 0
            self._leave()
        except BaseException:
            if self._here():
                self._leave()
            if block is not None:
                self._put_down((block, block.generation, None))
            raise
        return block

    def _turn(self) -> bool:
        """Where a pool that has gone waits for its memory: one miss in LOOKS goes and sees to it."""
        self._passed += 1
        return self._passed % LOOKS == 0

    def fetch(self, nbytes: int, line: Timeline, assumed: bool) -> Block | None:
        """What needs no driver call, as everything lies; None: ask `obtain`, also for 0 bytes.

        Memory may come from another stream.  Under the lock, if it can be had at once.
        """
        if (
            self._careful
            or nbytes <= 0
            or line.ended
            or self._registry.lines.get(line.number) is not line  # of another device: its number is some other stream's
            or (line.owner is None and line.kind not in _EVER)
            or self._here()
            or self._below()
        ):
            return None
        block: Block | None = None
        frees = self._frees
        try:
            # Many steps, which Ctrl-C must not part; it is raised when the lock has been given back (S16).
            with shield:
                if self._enter(False):
                    try:
                        self.inside.busy = 1
                        self.inside.entered += 1
                        # Looked at again, inside: what makes an allocation careful may have come since.
                        if not self._careful and not self._registry.captures.active and not frees.drain():
                            block = self._find(nbytes, line, assumed)
                    finally:
                        if self._clears:
                            self.inside.busy = 0
                        self._leave()
        except BaseException:
            if block is not None:
                self._put_down((block, block.generation, None))
            raise
        if frees.dropped:
            frees.dropped.clear()  # outside every lock: foreign destructors may run here
        return block

    def _find(self, nbytes: int, line: Timeline, assumed: bool) -> Block | None:
        """Under the lock: what the stream has in a bin, else the ladder's first steps."""
        size = (nbytes + 511) & -512
        sizes = (self._assumed if assumed else self._declared).get(line)
        bin_ = sizes.by_size.get(size) if sizes is not None else None
        if bin_ is not None and bin_.blocks:
            block = bin_.blocks.pop()
            bin_.hits += 1
            block.requested = nbytes
            accounts = self.accounts
            accounts.requested_sum += nbytes
            accounts.allocated += size
            accounts.high = max(accounts.high, accounts.allocated)
            return block
        if self._registry.orphan_events or (any_left() and self._turn()):
            return None
        found = self._at_hand(line, nbytes, size, self._kind(size), assumed)
        if found is None and self._told:
            self._vain = self._now(size, line, assumed, 0)
        return found

    def _now(self, size: int, line: Timeline, assumed: bool, sections: int) -> object:
        """A request, and whatever else what can be had at once depends on: what others did or freed, the driver's
        answers, and what the stream has waited for.  sections: of our own, not to be counted."""
        entered = self.inside.entered - sections
        return size, line, assumed, entered, self.accounts.frees, self._registry.version, line.clock

    def in_vain(self, size: int, line: Timeline, assumed: bool) -> object:
        """What `fetch` has noted, if it has just looked for this and would fail again; else None.

        Outside the lock, so whoever relies on it asks `unchanged` inside.
        """
        vain = self._vain
        return vain if vain is not None and vain == self._now(size, line, assumed, 0) else None

    def unchanged(self, vain: object, size: int, line: Timeline, assumed: bool) -> bool:
        """Is it so still?  In the next section, under the lock, with all frees put down."""
        return vain is not None and vain == self._now(size, line, assumed, 1)

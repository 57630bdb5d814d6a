"""The hot path, and nothing else: an exact size that the same stream freed before, from a bin, with no driver call.

Everything a hit touches is an attribute here, so that `acquire` can be compiled unchanged (docs/decisions/0016).
Whatever is not plain, in the state of the pool or in the request, is left to `CachingAllocator.obtain`.

Ctrl-C raises between any two steps of interpreted code: each step here leaves the block in a bin or with somebody.
Next: pool.py (the rest of an allocation), frees.py (how blocks come back).
"""

from __future__ import annotations

from typing import Any

from allocator.blocks import Bin, Bins, Block, Owner
from allocator.caching.accounting import Accounts
from allocator.caching.frees import Frees
from allocator.caching.shelves import Shelves
from allocator.gil import GilLock, Inside
from allocator.streams import Timeline
from allocator.sync import LockLike, inner_of


class Front:
    """What serves hits.  `assumed` is, in all of this, what `Config.uses` has made of what the caller says.

    careful: something has to be looked at before an allocation (closed, forked, over the limit, captures): no hits.
    """

    __slots__ = (
        "_assumed",
        "_below",
        "_clears",
        "_declared",
        "_enter",
        "_frees",
        "_here",
        "_leave",
        "_put_down",
        "_queue",
        "accounts",
        "announce",
        "careful",
        "inside",
        "lane",
    )

    def __init__(
        self,
        lock: LockLike,
        timelines: LockLike,
        shelves: Shelves,
        frees: Frees,
        accounts: Accounts,
    ) -> None:
        section, here, told = inner_of(lock)
        self._enter: Any = section.acquire
        self._leave: Any = section.release
        self._here: Any = here
        self._below: Any = inner_of(timelines)[1]
        self.inside: Inside = Inside() if told is None else told
        self._clears = not isinstance(lock, GilLock)
        """Leaving the section does not say that nobody is inside: say it here."""
        self.accounts = accounts
        self._frees = frees
        self._queue: Any = frees.queue
        self._put_down: Any = frees.put_down
        self.lane = frees.lane
        self._declared: dict[Owner, Bins]
        self._assumed: dict[Owner, Bins]
        self._declared, self._assumed = shelves.bins
        self.careful = False
        self.announce: Any = None
        """What a device that watches is told of each hand-out: (ptr, size, whoever holds it); None for none."""

    def allocate(self, make: Any, pool: object, nbytes: int, line: Timeline, stream: object, assumed: bool) -> Any:
        """What `make` makes of the block that `acquire` finds; None if it finds none.

        Here, and not with the caller: what compiled code returns is lost if Ctrl-C comes before it has a name, and an
        allocation that is lost gives its block back.
        """
        block = self.acquire(nbytes, line, assumed)
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
        """A block of exactly the size asked for that the stream freed before; None: ask `obtain`, also for 0 bytes.

        No driver call: where marks are due (R13), `obtain` makes them.

        Without the lock where that can be: a block is taken in one line, with the look at `busy`, and nothing from then
        to the last change gives the interpreter's lock away (gil.py).  That a block is still in the generation in which
        it was looked at says that nobody has had it since.
        """
        lane = self.lane
        if self.careful:
            return None
        if lane is None:
            return self._locked(nbytes, line, assumed)
        block: Block | None = None
        inside, accounts = self.inside, self.accounts
        bin_: Bin | None
        try:
            last = lane.block
            if last is not None:
                kept = last.generation
                bin_ = last.bin
                if (
                    bin_ is not None
                    and bin_.owner is line
                    and (last.requested == nbytes or bin_.size == (nbytes + 511) & -512)
                    and bin_.assumed is assumed
                    and bin_.open
                    and not line.ended
                    and not lane.rest
                ):
                    busy = inside.busy; block = lane.block; then = lane.generation; lane.block = None  # noqa: E702  # fmt: skip
                    if block is not last or then != kept or last.generation != kept or busy:
                        if block is not None:  # somebody else's, or not now
                            entry, block = (block, then, None), None  # ours no more, should Ctrl-C come after the call
                            self._put_down(entry)
                        return self._locked(nbytes, line, assumed)
                    # Its own stream takes it back (R7).  It never gets to the bin, as if it had been there for no time:
                    # nobody else sees a stamp, and no seqno is due for it.
                    freed = last.requested
                    last.generation = kept + 1
                    last.requested = nbytes
                    bin_.hits += 1
                    accounts.turns += 1
                    accounts.turned_sum += freed
                    if freed != nbytes:
                        accounts.requested_sum += nbytes - freed
                    return last
                if not self._frees.put_down_last():
                    return self._locked(nbytes, line, assumed)
            size = (nbytes + 511) & -512
            sizes = (self._assumed if assumed else self._declared).get(line)  # a line of another device finds nothing
            bin_ = sizes.by_size.get(size) if sizes is not None else None
            if bin_ is None or lane.rest:
                return self._locked(nbytes, line, assumed)
            blocks = bin_.blocks
            try:
                block = blocks[-1 - (inside.busy << 50)]; del blocks[-1]  # while somebody is inside, there is none  # noqa: E702  # fmt: skip
            except IndexError:
                return self._locked(nbytes, line, assumed)
            bin_.hits += 1
            block.requested = nbytes
            accounts.requested_sum += nbytes
            accounts.allocated = allocated = accounts.allocated + size
            if allocated > accounts.high:
                accounts.high = allocated
            return block
        except BaseException:
            if block is not None:
                self._put_down((block, block.generation, None))
            raise

    def _locked(self, nbytes: int, line: Timeline, assumed: bool) -> Block | None:
        """The same under the lock, so that what others have freed can be put down first; None if marks are due then.

        Between the first change and the last nothing is called: Ctrl-C comes before or after.
        """
        if self._here() or self._below():
            return None
        block: Block | None = None
        inside = self.inside
        try:
            if not self._enter(False):  # not `with`: that costs twice as much where this is interpreted
                return None
            inside.busy = 1
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

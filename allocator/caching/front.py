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
from allocator.gil import GilLock
from allocator.streams import Timeline
from allocator.sync import LockLike, inner_of


class Front:
    """What serves hits.  uses: None, or what `Config.uses` says for every caller.

    careful: something has to be looked at before an allocation (closed, forked, over the limit, captures): no hits.
    """

    __slots__ = (
        "_accounts",
        "_assumed",
        "_assumes",
        "_declared",
        "_declares",
        "_enter",
        "_frees",
        "_gil",
        "_inside",
        "_lane",
        "_leave",
        "_queue",
        "announce",
        "careful",
    )

    def __init__(
        self,
        lock: LockLike,
        shelves: Shelves,
        frees: Frees,
        accounts: Accounts,
        uses: bool | None,
    ) -> None:
        section, inside = inner_of(lock)
        self._gil = lock if isinstance(lock, GilLock) else None
        self._enter: Any = section.acquire
        self._leave: Any = section.release
        self._inside: Any = inside
        self._accounts = accounts
        self._frees = frees
        self._queue: Any = frees.queue
        self._lane = frees.lane
        declared, assumed = shelves.bins
        self._declared: dict[Owner, Bins] = assumed if uses else declared
        self._assumed: dict[Owner, Bins] = declared if uses is False else assumed
        self._declares, self._assumes = uses is True, uses is not False
        """What bins say of `assumed` in which declared and assumed requests find their own."""
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
        try:
            allocation = make(pool, block, nbytes, stream)
            if self.announce is not None:
                self.announce(block.ptr, block.size, allocation)
        except BaseException:  # nobody holds it; should it have been queued already, once counts
            self._queue.append((block, block.generation, None))
            raise
        return allocation

    def acquire(self, nbytes: int, line: Timeline, assumed: bool) -> Block | None:
        """A block of exactly the size asked for that the stream freed before; None: ask `obtain`, also for 0 bytes.

        No driver call: where marks are due (R13), `obtain` makes them.
        """
        if self.careful:
            return None
        block: Block | None = None
        try:
            gil = self._gil
            if gil is not None and gil.busy == 0:  # nobody is inside, and nobody can be before `_hit` is over
                block = self._hit(nbytes, line, assumed, False)
                if block is not None:
                    return block
            if self._inside():
                return None
            self._enter()  # not `with`: that costs twice as much where this is interpreted
            block = self._hit(nbytes, line, assumed, True)
            self._leave()
        except BaseException:
            if self._inside():
                self._leave()
            if block is not None:
                self._queue.append((block, block.generation, None))
            raise
        return block

    def _hit(self, nbytes: int, line: Timeline, assumed: bool, locked: bool) -> Block | None:
        """What was freed last, or what lies in the bin; None if it is neither.

        locked: under the pool's lock, so that what others have freed can be put down first; None if marks are due then.
        Between the first change and the last nothing is called that runs interpreted code or waits: to other threads it
        is one step where it is compiled, and Ctrl-C comes before or after it where it is not.
        """
        size = (nbytes + 511) & -512
        bin_: Bin
        last: Block | None = None
        lane = self._lane
        if lane is not None and lane.block is not None:
            block = lane.block
            home = block.bin
            if (
                home is not None
                and home.size == size
                and home.owner is line
                and home.assumed == (self._assumes if assumed else self._declares)
                and home.open
                and block.generation == lane.generation
                and not line.ended
                and not lane.rest
            ):
                last, bin_ = block, home
        if last is None:
            if not locked and lane is not None and lane.block is not None and not self._frees.put_down_last():
                return None
            sizes = (self._assumed if assumed else self._declared).get(line)  # a line of another device finds nothing
            if sizes is None:
                return None
            found = sizes.by_size.get(size)
            if found is None:
                return None
            bin_ = found
            queue = self._queue
            if queue:
                entry: tuple[Block, int, object] = queue[0]
                block, generation, named = entry
                if (
                    block.bin is bin_
                    and named is None
                    and block.generation == generation
                    and len(queue) == 1
                    and not line.ended
                ):
                    last = block
                elif not locked or self._frees.drain():
                    return None
        if last is not None:
            # Its own stream takes it back (R7).  It never gets to the bin, as if it had been there for no time:
            # nobody else sees a stamp, and no seqno is due for it.
            accounts = self._accounts
            low = accounts.allocated - size
            freed = last.requested
            generation = last.generation
            last.generation = generation + 1
            last.requested = nbytes
            bin_.hits += 1
            accounts.frees += 1
            accounts.freed_sum += freed
            accounts.requested_sum += nbytes
            if low < accounts.low:
                accounts.low = low
            if lane is not None and lane.block is last:
                lane.block = None
                return last
            try:
                self._queue.popleft()
            except BaseException:  # Ctrl-C, just after it: what is queued names a generation that has passed
                self._queue.append((last, generation + 1, None))
                raise
            return last
        blocks = bin_.blocks
        if not blocks:
            return None
        accounts = self._accounts
        block = blocks[-1]
        del blocks[-1]
        bin_.hits += 1
        block.requested = nbytes
        accounts.requested_sum += nbytes
        allocated = accounts.allocated + size
        accounts.allocated = allocated
        if allocated > accounts.high:
            accounts.high = allocated
        return block

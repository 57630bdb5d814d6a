"""Frees: the queue, the stamp, and what happens to a block nobody holds any more.

A free is one atomic step, which queues (block, generation, the stream it names or None): no lock, no driver call, so
it may run in a finaliser, in any thread, also inside our own locked section (DESIGN 5).  The next public call drains.
A finaliser that a garbage collection runs puts the object that held the memory there, in a list: it may yet be in use
(collector.py).

A drained block is stamped with (T, T.pending) for every stream T that used it (R3).  Stamping late is safe: it
names work that came after the free as well.  Stamping early would not be.  Each entry is stamped and put down
before it leaves the queue; a block is taken only if it is still in the generation that the entry names.

Next: shelves.py, where the block goes; ladder.py, which decides when streams are sealed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from allocator.blocks import MANY, RETIRED, Bin, Block, Owner
from allocator.caching.accounting import Accounts
from allocator.caching.lane import Lane
from allocator.caching.shelves import Shelves
from allocator.collector import RUNNING
from allocator.config import Config
from allocator.events import VectorClock
from allocator.gil import STEPS_HOLD, Inside
from allocator.resource import Holder
from allocator.sizes import MIB
from allocator.streams import CONTEXT, Registry, Timeline
from allocator.sync import FreeQueue, shield

FEW_STREAMS: Final = 8
"""Up to so many streams, `Config.seal_frees` alone says how often all of them are sealed."""
FREES_PER_STREAM: Final = 8
"""Frees for each stream beyond those before all are sealed again, so that the cost of a free does not grow with them.
Who would have to grow seals at once, whatever the count (R13)."""
SHARE: Final = 8
"""That part of what is reserved, freed since the streams were last sealed, is worth a mark when the host has waited."""
LEAST_SHARE: Final = 16 * MIB
RESTING: Final = 32
"""So many times the frees, at most, while every allocation finds its stream's own memory: nobody asks for others'."""


class Anyone:
    """Named as the stream of a free whose stream could not be told: everybody may still use the block."""


ANYONE = Anyone()


def references(holders: list[Holder], at: int) -> int:
    """How many references one of them has, as seen from here."""
    return sys.getrefcount(holders[at])


_ALONE = references([object()], 0)  # type: ignore[list-item]  # any object will do
"""What `references` says of an object that only the list holds."""


class Frees:
    """The free queue of one pool, and the count that tells when to seal."""

    def __init__(
        self, registry: Registry, shelves: Shelves, accounts: Accounts, config: Config, inside: Inside | None = None
    ) -> None:
        self._registry = registry
        self._order = registry.order
        self._context = registry.context
        self._shelves = shelves
        self._accounts = accounts
        self._seal_frees = config.seal_frees
        self._seal_at = config.seal_frees
        """Frees after which it is time to seal: with many streams more, as sealing costs what there are streams."""
        self._rest = 1
        """What that was multiplied by, as nobody had missed anything."""
        self._missing = False
        """Has an allocation missed the bins since the streams were last sealed?"""
        self._seal_bytes = config.seal_bytes
        self.inside: Inside = Inside() if inside is None else inside
        """Of the pool's lock."""
        self.lane = Lane() if STEPS_HOLD and inside is not None else None
        """None where steps do not hold, or nobody tells who is inside (gil.py)."""
        self.queue: Any = FreeQueue() if self.lane is None else self.lane
        """Of (block, generation, the stream it names, or what may yet hold it, or None)."""
        self.backlog: Any = self.queue if self.lane is None else self.lane.rest
        """The deque: all of the queue, or all but what is in the lane."""
        self.put_down: Any = self.backlog.append
        """Queues one of those.  A function written in C, so that Ctrl-C comes before or after it."""
        self.strays: list[Bin] = []
        """Bins that may hold a block and are not noted."""
        self.limbo: list[Holder] = []
        """What came back while a collection ran, and may yet be in use (collector.py)."""
        self._frees_then = 0
        self._freed_then = 0
        self._frees_due = self._seal_at
        """What `Accounts.frees` is when it is time, if `crossing`; or bytes are due."""
        self.dropped: list[object] = []
        """Foreign stream objects that blocks need no more: to be dropped outside every lock (R9)."""
        self.crossing = False
        """Frees on a second stream have been stamped: from now on when one seals decides how much is reused."""
        self.pressed: Callable[[], bool] = bool
        """Is memory scarce?  Set by the pool."""
        self.bounded = False
        """Can it be?  See `bound`."""
        self._first: Owner | None = None
        accounts.bytes_due = self._seal_bytes
        self._pace()

    def bound(self, bounded: bool) -> None:
        """Can memory be scarce?  Under the pool's lock."""
        self.bounded = bounded
        self._pace()

    def _pace(self) -> None:
        self._accounts.calm = 0 if self.limbo or self.bounded else self._frees_due - 1

    def drain(self) -> bool:
        """Stamp and put down every queued block; True if it is time to seal (R13).

        Under the pool's lock; no driver call.  O(queue).
        """
        queue = self.queue
        accounts = self._accounts
        while self.strays:
            self._take_in(self.strays.pop())
        while queue:
            try:
                entry: tuple[Block, int, Timeline | Anyone | list[Holder] | None] = queue[0]
            except IndexError:  # a hit has the only one in its hands, and puts it back: for the next call
                break
            block, generation, named = entry
            if block.generation == generation:
                bin_ = block.bin
                if bin_ is None or named is not None or (owner := bin_.owner).ended:
                    if shield.depth:
                        self._retire(block, named)
                    else:  # the hot path: many steps, which Ctrl-C must not part
                        with shield:
                            self._retire(block, named)
                else:
                    if not bin_.filled:
                        bin_ = block.bin = self._shelves.note_bin(bin_)
                    # Without a call between the first change and the block's being put down.
                    block.stamp = owner.here if not bin_.assumed else self._order.stamp(owner, True)  # type: ignore[arg-type]  # owners are timelines
                    block.generation = generation + 1
                    accounts.frees += 1
                    accounts.freed_sum += block.requested
                    accounts.allocated = allocated = accounts.allocated - bin_.size
                    if allocated < accounts.low:
                        accounts.low = allocated
                    bin_.blocks.append(block)
                    if owner is not self._first:
                        self._met(owner)
            queue.popleft()
        if self.limbo and not RUNNING:
            with shield:
                self._revisit()
        return self.crossing and self._due()

    def _take_in(self, stray: Bin) -> None:
        """Note a bin that may hold a block; if it has gone meanwhile, what it holds goes where it belongs."""
        if stray.blocks and not stray.filled and self._shelves.note_bin(stray) is not stray:
            with shield:
                while stray.blocks:
                    block = stray.blocks.pop()
                    block.generation += 1
                    block.bin = None
                    self._accounts.mark()
                    self._shelves.place(block)
                    self._accounts.mark()

    def put_down_last(self) -> bool:
        """Put down the one free that lies in the lane; False if that is not all there is to do, and nothing is done.

        Without the lock, while nobody is inside: one step from where the block is taken to its being put down (gil.py).
        So it makes nothing that a collection could be counted for, asks nobody, and looks nothing up.  The rest is
        `drain`'s.
        """
        lane = self.lane
        if lane is None or self.limbo or self.bounded:
            return False
        last = lane.block; kept = lane.generation  # the entry, before whatever is read of the block  # noqa: E702  # fmt: skip
        if last is None:
            return False
        bin_ = last.bin
        if bin_ is None or not bin_.filled or lane.rest:
            return False
        owner = bin_.owner
        if owner.ended:
            return False
        stamp = owner.here
        if bin_.assumed:
            line: Timeline = owner  # type: ignore[assignment]  # owners are timelines
            made = line.here_assumed
            if made is None or made.context != self._context.pending or made.own != line.pending:
                return False  # a new one has to be made
            stamp = made
        accounts, freed = self._accounts, last.requested
        if self.crossing:
            if accounts.frees + 1 >= self._frees_due or accounts.freed_sum + freed >= accounts.bytes_due:
                return False
        elif owner is not self._first:
            return False
        busy = self.inside.busy; block = lane.block; then = lane.generation; lane.block = None  # noqa: E702  # fmt: skip
        if block is not last or then != kept or last.generation != kept or busy:
            if block is not None:  # another one, or not now
                self.put_down((block, then, None))
            return False
        last.stamp = stamp
        last.generation = kept + 1
        accounts.frees += 1
        accounts.freed_sum += freed
        accounts.allocated = allocated = accounts.allocated - bin_.size
        if allocated < accounts.low:
            accounts.low = allocated
        bin_.blocks.append(last)
        if bin_.filled:
            return True
        self.strays.append(bin_)  # somebody was let in by a tracer, and has emptied the bins
        return False

    def drain_some(self, most: int) -> None:
        """Stamp and put down the oldest of the queued blocks, `most` at most; for readings, whose work is bounded.

        Under the pool's lock; no driver call.  The queue is longer than usual only where nobody calls the pool.
        """
        queue = self.queue
        if len(queue) <= most:
            self.drain()
            return
        for _ in range(most):
            try:
                entry: tuple[Block, int, Timeline | Anyone | list[Holder] | None] = queue[0]
            except IndexError:
                return
            block, generation, named = entry
            if block.generation == generation:
                self._put_down(block, named)
            queue.popleft()

    def _put_down(self, block: Block, named: Timeline | Anyone | list[Holder] | None) -> None:
        """One block that is freed: what `drain` does, which has it inline for the sake of the hot path."""
        bin_ = block.bin
        if bin_ is None or named is not None or bin_.owner.ended:
            self._retire(block, named)
            return
        if not bin_.filled:
            bin_ = block.bin = self._shelves.note_bin(bin_)
        owner = bin_.owner
        block.stamp = self._order.stamp(owner, bin_.assumed)  # type: ignore[arg-type]  # owners are timelines
        block.generation += 1
        accounts = self._accounts
        accounts.frees += 1
        accounts.freed_sum += block.requested
        accounts.allocated -= bin_.size
        accounts.low = min(accounts.low, accounts.allocated)
        bin_.blocks.append(block)
        if owner is not self._first:
            self._met(owner)

    def _due(self) -> bool:
        """Enough frees or bytes since the last time?  Under pressure always: a late event covers later work as well."""
        frees, freed_bytes = self._accounts.frees, self._accounts.freed_sum
        if frees == self._frees_then:
            return False
        return frees >= self._frees_due or freed_bytes >= self._accounts.bytes_due or self.pressed()

    @property
    def heavy(self) -> bool:
        """Do the bytes freed since the streams were last sealed matter, next to what is reserved?"""
        freed = self._accounts.freed_sum - self._freed_then
        return self.crossing and freed >= max(self._accounts.reserved // SHARE, LEAST_SHARE)

    @property
    def unsealed(self) -> bool:
        """Has anything been freed since the streams were last sealed?"""
        return self._accounts.frees != self._frees_then

    def sealed(self) -> None:
        """The streams are about to be sealed.  Under the pool's lock."""
        self._frees_then, self._freed_then = self._accounts.frees, self._accounts.freed_sum
        self._rest = 1 if self._missing else min(2 * self._rest, RESTING)
        self._missing = False
        few = max(self._seal_frees, FREES_PER_STREAM * (len(self._registry.lines) - FEW_STREAMS))
        self._seal_at = few * self._rest
        self._frees_due = self._frees_then + self._seal_at
        self._accounts.bytes_due = self._freed_then + self._seal_bytes
        self._pace()

    def missed(self) -> None:
        """An allocation looks at what others have freed: mark that as often as is usual again.  Under the lock."""
        self._missing = True
        if self._rest > 1:
            self._seal_at //= self._rest
            self._frees_due = self._frees_then + self._seal_at
            self._rest = 1
            self._pace()

    def _met(self, owner: Owner) -> None:
        if self._first is None:
            self._first = owner
        else:
            self.crossing = self._shelves.crossing = True

    def _revisit(self) -> None:
        """Look again at what came back while a collection ran; what nobody has brought back to life is free."""
        limbo, self.limbo = self.limbo, []
        for at in range(len(limbo)):
            alone = not RUNNING and references(limbo, at) == _ALONE
            holder = limbo[at]
            block = holder._block
            if block.generation == holder._generation:  # else it has been closed since
                if not alone:
                    self.limbo.append(holder)
                    continue
                self._retire(block, None)
            self.dropped.append(holder)  # it may be the last to hold a foreign stream object (R9)
        self._pace()

    def _retire(self, block: Block, named: Timeline | Anyone | list[Holder] | None) -> None:
        """The general case: several users, a stream that has ended, something carried over, or a doubtful end."""
        if isinstance(named, list):
            self.limbo.append(named.pop())  # out of the entry, so that only the limbo holds it
            self._pace()
            return
        owner = block.owner
        assert owner is not None, block
        if named is None and block.users is None and not block.stamp.at:
            stamp = self._order.stamp(owner, block.assumed)  # type: ignore[arg-type]  # owners are timelines
            if owner is not self._first:
                self._met(owner)
        else:
            stamp = self._stamp_of_several(block, owner, named)
        self._shelves.stamped.update(stamp.at)
        block.stamp = stamp
        if block.kept is not None:
            self.dropped += block.kept
        block.users = block.kept = None
        block.bin = None
        block.generation += 1
        accounts = self._accounts
        accounts.mark()
        accounts.allocated = allocated = accounts.allocated - block.size
        if allocated < accounts.low:
            accounts.low = allocated
        accounts.freed_sum += block.requested
        accounts.frees += 1
        self._shelves.place(block)

    def _stamp_of_several(self, block: Block, owner: Owner, named: Timeline | Anyone | None) -> VectorClock:
        """The stamp where others than the owner used the block, or something was carried over (R3)."""
        stamp = owner.here if not block.stamp.at else owner.here.joined(block.stamp)
        users = block.users
        if users is not None or named is not None:
            users = dict(users or {})
            if isinstance(named, Timeline):
                users[named.number] = named
            users.pop(owner.number, None)
            stamp = stamp.joined(VectorClock({number: user.here.at[number] for number, user in users.items()}))
        if block.assumed or named is ANYONE:
            stamp = stamp.joined(VectorClock({CONTEXT: self._registry.context.pending}))
        if named is ANYONE:
            self._shelves.leaves(block)
            block.state = RETIRED
            block.owner = None  # the owner waits as well
        if users or named is ANYONE:
            block.sole = MANY
            self.crossing = self._shelves.crossing = True
            self._accounts.cross_frees += 1
        elif owner is not self._first:
            self._met(owner)
        return stamp

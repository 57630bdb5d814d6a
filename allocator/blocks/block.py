"""One piece of device memory, and the pieces next to it.

    LIVE      allocated: a caller has it
    RETIRED   freed, not yet known to be finished: in flight
    IDLE      safe for every stream

Blocks of one mapped range form a list in address order (`prev`, `next`).  A block's address never changes;
its size does, when it is split or merged.  `generation` grows whenever the block changes hands or shape, so a
note taken about a block earlier (a queued free, a watch) can tell that it is out of date.

Blocks know nothing of streams: an owner is whatever has a number and the stamp of a free made now.
Next: index.py (best fit), heap.py (split and merge).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final, Protocol

from allocator.events import EMPTY, VectorClock

LIVE: Final = 0
RETIRED: Final = 1
IDLE: Final = 2
STATES: Final = ("live", "retired", "idle")

MOST_MET: Final = 1024
"""Sizes remembered at most that a stream has asked for once."""
NOBODY: Final = -1
"""`sole` of memory that nobody has used since it was mapped."""
MANY: Final = -2
"""`sole` of memory that several streams have used."""


class Owner(Protocol):
    """What a block knows of the stream it was allocated on."""

    number: int
    here: VectorClock
    ended: bool


class Shelf(Protocol):
    """Where a free block lies."""

    def remove(self, block: Block) -> None:
        """Take the block off the shelf."""


class Block:
    """[ptr, ptr + size): bytes, multiples of 512.

    owner: where it was last allocated; None once parts of several owners were merged (R3).
    sole: the number of the only stream that used it, NOBODY or MANY.
    stamp: how far its users had got when it was freed; EMPTY once they are known to be finished.
    users: the streams that use it while it lives, other than the owner; None if there are none.
    """

    __slots__ = (
        "assumed",
        "bin",
        "generation",
        "kept",
        "kind",
        "next",
        "owner",
        "prev",
        "ptr",
        "requested",
        "shelf",
        "since",
        "size",
        "sole",
        "stamp",
        "state",
        "users",
    )

    def __init__(self, ptr: int, size: int, kind: int) -> None:
        self.ptr = ptr
        self.size = size
        self.kind = kind
        """Which size class's memory it is of: `SMALL` or `LARGE` of heap.py."""
        self.state = IDLE
        self.generation = 0
        self.requested = 0
        """Bytes asked for by whoever has it."""
        self.assumed = False
        """Handed out for a library that declares no uses (R3)."""
        self.owner: Owner | None = None
        self.sole = NOBODY
        self.stamp = EMPTY
        self.users: dict[int, Owner] | None = None
        self.kept: list[object] | None = None
        """What keeps the streams in `users` alive meanwhile (R9)."""
        self.prev: Block | None = None
        self.next: Block | None = None
        self.shelf: Shelf | None = None
        self.bin: Bin | None = None
        """The bin of its owner and size, kept while both stay, so that a free finds it at once."""
        self.since = 0
        """ns on the device's clock when it was put on a shelf of retired blocks."""

    @property
    def end(self) -> int:
        """The address behind the last byte."""
        return self.ptr + self.size

    def __repr__(self) -> str:
        owner = self.owner.number if self.owner is not None else None
        return f"<Block {self.ptr:#x}+{self.size} {STATES[self.state]} owner={owner} stamp={dict(self.stamp.at)}>"


class Bin:
    """Free blocks of one exact size whose only declared user is one stream (R7).

    They serve that stream only, at once: an exact fit is the best fit.
    """

    __slots__ = (
        "after",
        "assumed",
        "blocks",
        "filled",
        "hits",
        "home",
        "owner",
        "request",
        "seen",
        "size",
        "taker",
        "turns",
    )

    def __init__(self, home: Bins, owner: Owner, size: int, assumed: bool) -> None:
        self.blocks: list[Block] = []
        """Newest last."""
        self.home = home
        self.owner = owner
        self.size = size
        self.assumed = assumed
        """The stamps here name the users that are only assumed as well."""
        self.filled = False
        """Noted as one that may hold blocks, until all bins are emptied."""
        self.taker: Owner | None = owner
        """Who finds it under its size: the owner; nobody any more once it has gone."""
        self.hits = 0
        """Allocations served from here, but for `turns`."""
        self.turns = 0
        """Those of `request` bytes that got back, in one step, what had just been freed by one of as many."""
        self.request = 0
        self.seen = -1
        """`hits` and `turns` when bins out of use were last looked for; -1 if it has been of use since otherwise."""
        self.after: Bin | None = None
        """Another one of this size and of such uses, which was asked when a block had just come back to this one.
        Where streams take turns it mostly will be again.  None once this one has gone."""


class Bins:
    """The bins of one stream."""

    __slots__ = ("_met", "_sizes", "by_size", "noted")

    def __init__(self) -> None:
        self.by_size: dict[int, Bin] = {}
        self.noted: list[Bin] = []
        """Those that may hold blocks: all that do are here."""
        self._sizes: list[int] = []
        """In order.  A plain list: as many as a program has sizes, and `bisect` is C."""
        self._met: set[int] = set()
        """Sizes without a bin that were asked for once, some time ago at most."""

    def any(self) -> bool:
        """Is there a block in any of them?"""
        return any(bin_.blocks for bin_ in self.by_size.values())

    def met_again(self, size: int) -> bool:
        """Is this the second time that the stream asks for a size that has no bin?"""
        met = self._met
        if size in met:
            met.discard(size)
            return True
        if len(met) >= MOST_MET:
            met.clear()
        met.add(size)
        return False

    def open(self, owner: Owner, size: int, assumed: bool) -> Bin:
        """A new bin for blocks of exactly `size` bytes."""
        bin_ = self.by_size[size] = Bin(self, owner, size, assumed)
        insort(self._sizes, size)
        return bin_

    def close(self, size: int) -> None:
        """The bin of that size, which is empty, goes."""
        del self.by_size[size]
        del self._sizes[bisect_left(self._sizes, size)]

    def best_fit(self, size: int, most: int) -> Bin | None:
        """The bin of the least size from `size` up to less than `most` that has a block.

        Looks at those that may have one; where they are many, at 16 sizes at most.
        """
        noted = self.noted
        if len(noted) <= 16:
            best: Bin | None = None
            for bin_ in noted:
                if size <= bin_.size < most and bin_.blocks:
                    best, most = bin_, bin_.size
            return best
        sizes = self._sizes
        at = bisect_left(sizes, size)
        end = min(at + 16, len(sizes))
        while at < end and (candidate := sizes[at]) < most:
            bin_ = self.by_size[candidate]
            if bin_.blocks:
                return bin_
            at += 1
        return None

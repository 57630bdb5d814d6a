"""The memory of one pool, cut into blocks: split, merge, segments in and out.

Every byte of every segment belongs to exactly one block; blocks of a mapped range are linked in address order
and never overlap.  With virtual memory, segments at touching addresses form one range, and blocks merge across
their borders; plain allocations never do (S11).  Whether two blocks *should* merge is not decided here (R7).

Pure bookkeeping, no driver call, under the pool's lock.  Next: pages.py, ../caching/shelves.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from sortedcontainers import SortedDict

from allocator.blocks.block import LIVE, MANY, NOBODY, Block
from allocator.blocks.pages import Segment

SMALL: Final = 0
LARGE: Final = 1
KINDS: Final = (SMALL, LARGE)


class Heap:
    """Blocks and segments.  joined: touching segments form one range."""

    def __init__(self, *, joined: bool) -> None:
        self.joined = joined
        self.segments: SortedDict = SortedDict()
        """Address -> Segment."""
        self.heads: dict[int, Block] = {}
        """Start address -> first block, of each range."""
        self.tails: dict[int, Block] = {}
        """End address -> last block, of each range."""
        self.splits = 0
        self.merges = 0
        self.reserved = 0
        """Bytes of all segments."""

    def add(self, segment: Segment) -> Block:
        """Take in a new segment; returns the block that covers it, on no shelf, IDLE and used by nobody."""
        block = Block(segment.ptr, segment.size, segment.kind)
        self.segments[segment.ptr] = segment
        self.reserved += segment.size
        left = self.tails.get(segment.ptr) if self.joined else None
        right = self.heads.get(segment.end) if self.joined else None
        if left is not None:
            left.next, block.prev = block, left
            del self.tails[segment.ptr]
        else:
            self.heads[block.ptr] = block
        if right is not None:
            right.prev, block.next = block, right
            del self.heads[segment.end]
        else:
            self.tails[block.end] = block
        return block

    def remove(self, segments: Sequence[Segment], block: Block) -> None:
        """Let neighbouring segments go; `block` covers exactly their bytes and is on no shelf."""
        assert block.ptr == segments[0].ptr and block.size == sum(s.size for s in segments), (block, segments)
        for segment in segments:
            del self.segments[segment.ptr]
        self.reserved -= block.size
        block.generation += 1
        if block.prev is not None:
            block.prev.next = None
            self.tails[block.ptr] = block.prev
        else:
            del self.heads[block.ptr]
        if block.next is not None:
            block.next.prev = None
            self.heads[block.end] = block.next
        else:
            del self.tails[block.end]
        block.prev = block.next = None

    def split(self, block: Block, size: int) -> Block:
        """Cut a block on no shelf after `size` bytes; returns the rest, with the same users and stamp (R7)."""
        rest = Block(block.ptr + size, block.size - size, block.kind)
        rest.state, rest.owner, rest.sole, rest.stamp = block.state, block.owner, block.sole, block.stamp
        rest.since, rest.assumed = block.since, block.assumed
        block.size = size
        block.generation += 1
        rest.prev, rest.next = block, block.next
        if block.next is not None:
            block.next.prev = rest
        else:
            self.tails[rest.end] = rest
        block.next = rest
        self.splits += 1
        return rest

    def merge(self, left: Block, right: Block) -> Block:
        """Join two neighbours on no shelf; the left one stays, with the users and stamps of both (R7).

        Parts of two owners have none: an assumed user is then a user like any other (R3).
        """
        assert left.next is right and left.end == right.ptr, (left, right)
        left.size += right.size
        left.generation += 1
        right.generation += 1
        left.stamp = left.stamp.joined(right.stamp)
        left.state = min(left.state, right.state)
        left.since = min(left.since, right.since)
        if right.sole != NOBODY:
            if left.sole == NOBODY:
                left.sole, left.owner, left.assumed = right.sole, right.owner, right.assumed
            else:
                left.assumed = left.assumed and right.assumed
                if left.sole != right.sole:
                    left.sole = MANY
                if left.owner is not right.owner:
                    left.owner = None
        left.bin = None
        left.next = right.next
        if right.next is not None:
            right.next.prev = left
        else:
            self.tails[left.end] = left
        right.prev = right.next = None
        self.merges += 1
        return left

    def inside(self, block: Block) -> list[Segment]:
        """Segments that lie wholly inside a block, in address order.  O(log n + answer)."""
        found: list[Segment] = []
        for ptr in self.segments.irange(block.ptr, block.end, inclusive=(True, False)):
            segment = self.segments[ptr]
            if segment.end > block.end:
                break
            found.append(segment)
        return found

    def last_inside(self, block: Block, count: int, most: int) -> list[Segment]:
        """The last of those, in address order: `count` at most, and no more than it takes for `most` bytes.

        O(log n) for each.
        """
        found: list[Segment] = []
        begin, end, nbytes = block.ptr, block.end, 0
        at = self.segments.bisect_left(end)
        while at and len(found) < count and nbytes < most:
            at -= 1
            segment: Segment = self.segments.peekitem(at)[1]
            if segment.ptr < begin:
                break
            if segment.end <= end:  # the last that begins before the end may go beyond it
                found.append(segment)
                nbytes += segment.size
        found.reverse()
        return found

    def holding(self, address: int) -> Segment:
        """The segment that holds an address.  O(log n)."""
        segment: Segment = self.segments.peekitem(self.segments.bisect_right(address) - 1)[1]
        return segment

    def blocks(self) -> Iterator[Block]:
        """Every block, in address order within each range."""
        for head in list(self.heads.values()):
            block: Block | None = head
            while block is not None:
                yield block
                block = block.next

    def check(self) -> None:
        """Raise AssertionError unless blocks tile the segments exactly and all links agree.  O(blocks)."""
        spans: list[tuple[int, int]] = []
        total = 0
        for start, head in self.heads.items():
            assert head.ptr == start and head.prev is None, head
            block, end = head, start
            while True:
                assert block.ptr == end and block.size > 0 and block.ptr % 512 == 0 and block.size % 512 == 0, block
                assert (block.shelf is None) or block.state != LIVE, block
                end, total = block.end, total + block.size
                if block.next is None:
                    break
                assert block.next.prev is block, block
                block = block.next
            assert self.tails.get(end) is block, block
            spans.append((start, end))
        assert len(self.tails) == len(self.heads)
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), spans
        assert total == self.reserved == sum(s.size for s in self.segments.values()), (total, self.reserved)
        pieces = list(self.segments.values())
        for start, end in spans:
            covered = sum(s.size for s in pieces if start <= s.ptr < end)
            assert covered == end - start, (start, end, covered)

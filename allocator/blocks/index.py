"""Best fit: the smallest free block that is large enough, at the lowest address among equals.

One integer a block, size and address side by side: integers compare faster than tuples.  Up to 1,024 of them lie in a
plain list, where the interpreter's own `bisect` finds and moves them; beyond that in a `sortedcontainers.SortedList`.
O(log n) for everything but the moving, whose share up to there is smaller than a call.  Next: heap.py.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from sortedcontainers import SortedList

from allocator.blocks.block import Block, Owner

_ADDRESS_BITS: Final = 64
_ADDRESS: Final = (1 << _ADDRESS_BITS) - 1
_LOOKED_AT: Final = 8
LONG: Final = 1024
"""Blocks up to which a plain list is the faster place."""


class BestFit:
    """Free blocks by (size, address); also the shelf they lie on.

    >>> index = BestFit()
    >>> small, large = Block(4096, 512, 0), Block(0, 2048, 0)
    >>> index.add(small); index.add(large)
    >>> index.find(513) is large, index.find(4096), index.nbytes
    (True, None, 2560)
    """

    __slots__ = ("_blocks", "_keys", "_long", "by_owner", "nbytes")

    def __init__(self) -> None:
        self._keys: Any = []
        """A list, or a SortedList where `_long` says so."""
        self._long = False
        self._blocks: dict[int, Block] = {}
        self.nbytes = 0
        """Bytes of all blocks here."""
        self.by_owner: dict[Owner | None, int] = {}
        """Those bytes by the blocks' owners, which do not change while they lie here."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def add(self, block: Block) -> None:
        """Put a block here.  Its size must not change while it is here."""
        key = block.size << _ADDRESS_BITS | block.ptr
        if self._long:
            self._keys.add(key)
        else:
            insort(self._keys, key)
            if len(self._keys) > LONG:
                self._keys, self._long = SortedList(self._keys), True
        self._blocks[key] = block
        self.nbytes += block.size
        owner = block.owner
        self.by_owner[owner] = self.by_owner.get(owner, 0) + block.size
        block.shelf = self

    def remove(self, block: Block) -> None:
        """Take a block away; KeyError if it is not here."""
        key = block.size << _ADDRESS_BITS | block.ptr
        del self._blocks[key]
        keys = self._keys
        if self._long:
            keys.remove(key)
            if len(keys) < LONG // 2:
                self._keys, self._long = list(keys), False
        else:
            del keys[bisect_left(keys, key)]
        self.nbytes -= block.size
        owner = block.owner
        left = self.by_owner[owner] - block.size
        if left:
            self.by_owner[owner] = left
        else:
            del self.by_owner[owner]  # an owner that has gone must not be held here
        block.shelf = None

    def find(self, size: int, slack: int = 0) -> Block | None:
        """The smallest block of at least `size` bytes, at the lowest address; None if there is none.

        slack: percent.  Where nothing fits exactly, the lowest address among blocks at most that much larger than
        the smallest: memory that is used together then lies together.  At most 8 blocks are looked at.
        """
        keys = self._keys
        least_key = size << _ADDRESS_BITS
        if self._long:
            found: list[int] = list(islice(keys.irange(least_key), _LOOKED_AT if slack else 1))
        else:
            at = bisect_left(keys, least_key)
            found = keys[at : at + (_LOOKED_AT if slack else 1)]
        if not found:
            return None
        key = found[0]
        if slack:
            least = key >> _ADDRESS_BITS
            if least != size:
                most = least * (100 + slack) // 100 + 1 << _ADDRESS_BITS
                for other in found:
                    if other >= most:
                        break
                    if other & _ADDRESS < key & _ADDRESS:
                        key = other
        return self._blocks[key]

    def from_size(self, size: int) -> Iterator[Block]:
        """Blocks of at least `size` bytes, best fit first.  Nothing may be added or removed meanwhile."""
        least = size << _ADDRESS_BITS
        if self._long:
            for key in self._keys.irange(least):
                yield self._blocks[key]
        else:
            keys = self._keys
            for at in range(bisect_left(keys, least), len(keys)):
                yield self._blocks[keys[at]]

    def largest(self) -> int:
        """Bytes of the largest block, 0 if there is none."""
        return self._keys[-1] >> _ADDRESS_BITS if self._keys else 0

    def check(self) -> None:
        """Raise AssertionError unless keys, blocks and the total agree.  O(n)."""
        assert len(self._keys) == len(self._blocks)
        assert list(self._keys) == sorted(self._blocks)
        for key, block in self._blocks.items():
            assert key == block.size << _ADDRESS_BITS | block.ptr and block.shelf is self, block
        assert self.nbytes == sum(b.size for b in self._blocks.values())
        by_owner: dict[Owner | None, int] = {}
        for block in self._blocks.values():
            by_owner[block.owner] = by_owner.get(block.owner, 0) + block.size
        assert by_owner == self.by_owner, (by_owner, self.by_owner)

"""Best fit: the smallest free block that is large enough, at the lowest address among equals.

One integer a block, size and address side by side, in order: integers compare faster than tuples.  O(log n) for
everything.  Next: keys.py (the order), heap.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from allocator.blocks.block import Block, Owner
from allocator.blocks.keys import SortedKeys

_ADDRESS_BITS: Final = 64
_ADDRESS: Final = (1 << _ADDRESS_BITS) - 1
_LOOKED_AT: Final = 8


class BestFit:
    """Free blocks by (size, address); also the shelf they lie on.

    >>> index = BestFit()
    >>> small, large = Block(4096, 512, 0), Block(0, 2048, 0)
    >>> index.add(small); index.add(large)
    >>> index.find(513) is large, index.find(4096), index.nbytes
    (True, None, 2560)
    """

    __slots__ = ("_blocks", "_keys", "by_owner", "nbytes")

    def __init__(self) -> None:
        self._keys = SortedKeys()
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
        self._keys.add(key)
        self._blocks[key] = block
        self.nbytes += block.size
        owner = block.owner
        self.by_owner[owner] = self.by_owner.get(owner, 0) + block.size
        block.shelf = self

    def remove(self, block: Block) -> None:
        """Take a block away; KeyError if it is not here."""
        key = block.size << _ADDRESS_BITS | block.ptr
        del self._blocks[key]
        self._keys.remove(key)
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
        key = self._keys.first(size << _ADDRESS_BITS)
        if key is None:
            return None
        if slack:
            least = key >> _ADDRESS_BITS
            if least != size:
                most = least * (100 + slack) // 100 + 1 << _ADDRESS_BITS
                for other in islice(self._keys.starting_at(key + 1), _LOOKED_AT - 1):
                    if other >= most:
                        break
                    if other & _ADDRESS < key & _ADDRESS:
                        key = other
        return self._blocks[key]

    def from_size(self, size: int) -> Iterator[Block]:
        """Blocks of at least `size` bytes, best fit first.  Nothing may be added or removed meanwhile."""
        for key in self._keys.starting_at(size << _ADDRESS_BITS):
            yield self._blocks[key]

    def largest(self) -> int:
        """Bytes of the largest block, 0 if there is none."""
        key = self._keys.last()
        return 0 if key is None else key >> _ADDRESS_BITS

    def check(self) -> None:
        """Raise AssertionError unless keys, blocks and the total agree.  O(n)."""
        self._keys.check()
        assert list(self._keys.starting_at(0)) == sorted(self._blocks)
        for key, block in self._blocks.items():
            assert key == block.size << _ADDRESS_BITS | block.ptr and block.shelf is self, block
        assert self.nbytes == sum(b.size for b in self._blocks.values())
        by_owner: dict[Owner | None, int] = {}
        for block in self._blocks.values():
            by_owner[block.owner] = by_owner.get(block.owner, 0) + block.size
        assert by_owner == self.by_owner, (by_owner, self.by_owner)

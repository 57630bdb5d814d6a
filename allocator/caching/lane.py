"""The free queue: a deque, with a place in front for the one free that is mostly there.

What was freed last is mostly what is asked for next (front.py).  Such a free is two fields here, and nothing is made
for it: no tuple, and compiled no number of Python's.  The place is taken only while the deque is empty, so it is the
oldest free.

Rule: whoever looks whether the place is free, or what is in it, and changes it, does both in one line that calls
nothing, so that it is one step to all other threads, to Ctrl-C, and to tracers, who are called between lines (gil.py).
Where steps do not hold, the queue is a plain deque (sync.FreeQueue).  Next: frees.py, which empties it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from allocator import sync
from allocator.blocks import Block


class Lane:
    """What a deque of (block, generation, named) is to those who queue and drain, and `put`."""

    __slots__ = ("block", "generation", "rest")

    def __init__(self) -> None:
        self.block: Block | None = None
        """The oldest free, of `generation`, which names no stream; None: the place is free."""
        self.generation = 0
        self.rest: Any = sync.FreeQueue()
        """All others, oldest first."""

    def put(self, block: Block, generation: int) -> None:
        """Queue the free of a block, in this generation, that names no stream.  Finalisers have this inline."""
        if self.block is None and not self.rest: self.generation = generation; self.block = block; return  # noqa: E701, E702  # fmt: skip
        self.rest.append((block, generation, None))

    def _line_up(self) -> None:
        """Move what is in the place to the front of the deque."""
        while True:
            block = self.block
            if block is None:
                return
            generation = self.generation
            entry = (block, generation, None)  # may start a collection, whose finalisers queue, and other threads
            if self.block is block and self.generation == generation: self.block = None; self.rest.appendleft(entry)  # noqa: E701, E702  # fmt: skip

    def append(self, entry: Any) -> None:
        """As `deque.append`."""
        if isinstance(entry, tuple) and entry[2] is None:
            self.put(entry[0], entry[1])
        else:
            self.rest.append(entry)

    def extend(self, entries: Iterable[object]) -> None:
        """As `deque.extend`."""
        for entry in entries:
            self.append(entry)

    def popleft(self) -> object:
        """As `deque.popleft`."""
        self._line_up()
        return self.rest.popleft()

    def clear(self) -> None:
        """As `deque.clear`."""
        self.block = None
        self.rest.clear()

    def __getitem__(self, at: int) -> Any:
        self._line_up()
        return self.rest[at]

    def __len__(self) -> int:
        return len(self.rest) + (self.block is not None)

    def __bool__(self) -> bool:
        return self.block is not None or bool(self.rest)

"""The free queue: a deque, with a place behind it for the one free that is mostly all there is.

What was freed last is mostly what is asked for next (front.py).  Such a free is two fields here, and nothing is made
for it: no tuple, and compiled no number of Python's.  What is in the place is the newest free.

Rule: whoever puts something into the place, or takes what is there, reads and writes in one line, whatever it is, and
looks at it afterwards.  A line without a call or a branch is one step to all other threads, to Ctrl-C, and to tracers
and monitors as well, who are called between lines and at branches (gil.py).
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
        """The newest free, of `generation`, which names no stream; None: there is none here."""
        self.generation = 0
        self.rest: Any = sync.FreeQueue()
        """All others, oldest first."""

    def put(self, block: Block, generation: int) -> None:
        """Queue the free of a block, in this generation, that names no stream.  Finalisers have this inline."""
        before = self.block; then = self.generation; self.block = block; self.generation = generation  # noqa: E702  # fmt: skip
        if before is not None:
            self.rest.append((before, then, None))

    def _line_up(self) -> None:
        """Move what is in the place to the end of the deque."""
        block = self.block; then = self.generation; self.block = None  # noqa: E702  # fmt: skip
        if block is not None:
            self.rest.append((block, then, None))

    def append(self, entry: Any) -> None:
        """As `deque.append`."""
        self._line_up()
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
        if not self.rest:
            self._line_up()
        return self.rest.popleft()

    def clear(self) -> None:
        """As `deque.clear`."""
        self.block = None
        self.rest.clear()

    def __getitem__(self, at: int) -> Any:
        if not self.rest:
            self._line_up()
        return self.rest[at]

    def __len__(self) -> int:
        return len(self.rest) + (self.block is not None)

    def __bool__(self) -> bool:
        return self.block is not None or bool(self.rest)

"""Blocks and graph captures: what a captured graph may use stays its own until the graph dies (R10).

    live at any moment of a capture     the graph joins the block's users
    allocated on a captured stream      owned by the stream's timeline within the graph, which may reuse it there;
                                        what is still held when the capture ends gets its stream as a user as well
    freed while the graph lives         in flight until the graph has died and its last replay is over

So no captured address is given to anybody else while a replay may still use it, whatever the program declares.
Next: ../streams/captures.py, which says when captures begin and end.
"""

from __future__ import annotations

from allocator.blocks import LIVE, Block, Heap
from allocator.caching.accounting import Accounts
from allocator.caching.frees import Frees
from allocator.caching.front import Front
from allocator.caching.shelves import Shelves
from allocator.streams import Capture, Registry, Timeline
from allocator.sync import LockLike


class Capturing:
    """One pool's side of captures."""

    def __init__(
        self, registry: Registry, heap: Heap, shelves: Shelves, frees: Frees, accounts: Accounts, lock: LockLike
    ) -> None:
        self._registry = registry
        self._heap = heap
        self._shelves = shelves
        self._frees = frees
        self._accounts = accounts
        self._lock = lock

    def begins(self, capture: Capture, front: Front) -> None:
        """From now on the capture may use whatever is live, and there is something to look out for.  O(blocks)."""
        with self._lock:
            front.careful = True  # before the bins are emptied: later hits must see it
            for block in self._live():
                self._join(block, capture.line)

    def ends(self, capture: Capture) -> None:
        """The last moment of the capture.  O(blocks)."""
        streams = {inner.number: stream for stream, inner in capture.inside.values()}
        with self._lock:
            for block in self._live():
                self._join(block, capture.line)
                owner = block.owner
                stream = streams.get(owner.number) if owner is not None else None
                if stream is not None:
                    self._join(block, stream)

    def hand_out(self, block: Block) -> None:
        """A block handed out while captures are under way: they may use it, too.

        The capture that it was allocated in is not named before it ends: until then the block may come back to it.
        """
        owner = block.owner
        with self._registry.lock:
            captures = set(self._registry.captures.active.values())
            lines = [c.line for c in captures if all(inner is not owner for _, inner in c.inside.values())]
        with self._lock:
            for line in lines:
                self._join(block, line)

    def _live(self) -> list[Block]:
        """The blocks that callers hold.  The bins are emptied: what lies there looks live."""
        self._accounts.mark()
        self._frees.drain()
        self._shelves.flush()
        self._accounts.mark()
        return [block for block in self._heap.blocks() if block.state == LIVE]

    def _join(self, block: Block, line: Timeline) -> None:
        if block.users is None:
            block.users = {}
        elif len(block.users) >= 8:  # weights live through many captures: forget graphs that are long over
            lines = self._registry.lines
            block.users = {number: user for number, user in block.users.items() if number in lines}
        block.users[line.number] = line
        if line.keeper is not None:
            block.kept = [*(block.kept or ()), line.keeper]
        block.bin = None  # several users: no bin may hold it (R7)

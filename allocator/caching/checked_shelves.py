"""The shelves of checked mode: free memory lies where it can serve only once it is filled.

    own, shared   in flight, as ever; but not even the own stream may take a block from there
    dirty         finished, not filled yet
    aside         being filled or verified by some thread at this moment
    idle          filled; verified when it leaves
    damaged       written after the free: never handed out, goes back to the driver with the pool

All but `idle` count as in flight, so the totals add up.  There are no bins: each reuse passes `Canary.serve`.
A pool without `Config(canary=True)` uses none of this.

Under the pool's lock; no driver call.  Next: canary.py, which fills and verifies.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from allocator.blocks import KINDS, RETIRED, BestFit, Block, Heap
from allocator.caching.ranges import Ranges
from allocator.caching.shelves import Shelves
from allocator.config import Config
from allocator.streams import CONTEXT, Kind, Registry, Timeline


def describe(line: Timeline) -> str:
    """A stream in words: its name if it was given one, else its number in the statistics."""
    if line.kind is Kind.LEGACY:
        return "the legacy stream"
    if line.kind is Kind.GRAPH:
        return "a captured graph"
    return f"stream {line.name!r} ({line.kind.value})" if line.name else f"{line.kind.value} stream {line.number}"


class Tenant:
    """Who had some bytes last: texts and numbers only, so that remembering keeps no stream alive."""

    __slots__ = ("end", "generation", "left", "owner", "requested", "users")

    def __init__(self, owner: str, end: int, requested: int, generation: int) -> None:
        self.owner = owner
        self.end = end
        self.requested = requested
        self.generation = generation
        self.users: tuple[str, ...] = ()
        self.left = False


class CheckedShelves(Shelves):
    """All free blocks of one pool in checked mode."""

    def __init__(self, heap: Heap, registry: Registry, config: Config) -> None:
        super().__init__(heap, registry, config)
        self.fills: Ranges[int] = Ranges()
        """What holds the pattern: the look before it was filled."""
        self.tenants: Ranges[Tenant] = Ranges()
        self.dirty = [BestFit() for _ in KINDS]
        self.aside = [BestFit() for _ in KINDS]
        self.damaged = [BestFit() for _ in KINDS]
        self.leaving = False
        """The pool goes: what is finished is idle, filled or not."""
        self._met: dict[int, str] = {}

    @property
    def unfilled(self) -> bool:
        """Is there anything to fill?"""
        return any(self.dirty)

    @property
    def damaged_bytes(self) -> int:
        """Bytes put away for good."""
        return sum(shelf.nbytes for shelf in self.damaged)

    # -- putting down -----------------------------------------------------------------------------

    def place(self, block: Block) -> None:
        """As ever, but that the end of an allocation is noted first."""
        tenant = next((t for start, _, t in self.tenants.inside(block.ptr, block.end) if start == block.ptr), None)
        if tenant is not None and not tenant.left and tenant.end == block.end:
            tenant.left = True
            others = [n for n in block.stamp.at if n != CONTEXT and (block.owner is None or n != block.owner.number)]
            tenant.users = tuple(self._meet(self._registry.lines[n]) for n in others if n in self._registry.lines)
        super().place(block)

    def put_idle(self, block: Block) -> None:
        """What is finished is idle only where it is filled."""
        if self.leaving or not self.fills.gaps(block.ptr, block.end):
            super().put_idle(block)
        else:
            block.state = RETIRED
            self.dirty[block.kind].add(block)

    def set_aside(self) -> list[Block]:
        """Take what is to be filled, for one thread alone."""
        blocks = [block for shelf in self.dirty for block in shelf]
        for block in blocks:
            self.put_aside(block, self.dirty[block.kind])
        return blocks

    def put_aside(self, block: Block, shelf: BestFit) -> None:
        """Take a block from a shelf, for one thread alone."""
        shelf.remove(block)
        block.generation += 1
        block.state = RETIRED
        self.aside[block.kind].add(block)

    def put_back(self, block: Block) -> None:
        """What was set aside belongs where it belongs now."""
        self.aside[block.kind].remove(block)
        self.place(block)

    def put_away(self, block: Block) -> None:
        """A block on no shelf was damaged: nobody gets it any more."""
        block.state = RETIRED
        self.fills.forget(block.ptr, block.end)
        self.damaged[block.kind].add(block)

    def leave(self, *, damaged: bool) -> None:
        """Nothing is filled any more; damaged: what is may go back as well."""
        self.leaving = True
        for shelf in (*self.dirty, *(self.damaged if damaged else ())):
            for block in list(shelf):
                shelf.remove(block)
                self.place(block)

    # -- picking up -------------------------------------------------------------------------------

    def take(self, line: Timeline, size: int, kind: int, assumed: bool) -> tuple[Block, str] | None:
        """Best fit among what is idle."""
        idle = self.idle[kind]
        block = idle.find(size, self._slack[kind])
        if block is not None and not self._any_kind and not self._allowed(block, line):
            block = next((b for b in idle.from_size(size) if self._allowed(b, line)), None)
        return None if block is None else self._serve(block, line, size)

    def take_covered(self, line: Timeline, size: int, kind: int, assumed: bool) -> tuple[Block, str] | None:
        """What a stream has waited for is not known to the host to be over."""
        return None

    def takeable(self, block: Block | None, line: Timeline, assumed: bool) -> bool:
        """Only what is idle."""
        if block is None or block.shelf is not self.idle[block.kind]:
            return False
        return self._any_kind or self._allowed(block, line)

    def gather(self, line: Timeline, size: int, kind: int, assumed: bool) -> Block | None:
        """Idle neighbours are joined already."""
        return None

    def hand_out(self, block: Block, line: Timeline, size: int, assumed: bool) -> None:
        """As ever, but for no bin to come back to."""
        super().hand_out(block, line, size, assumed)
        block.bin = None

    def moved_in(self, block: Block) -> None:
        """A caller gets this block: what it held is nobody's concern any more."""
        self.fills.forget(block.ptr, block.end)
        line = block.owner
        owner = self._meet(line) if isinstance(line, Timeline) else "a stream unknown"
        self.tenants.set(block.ptr, block.end, Tenant(owner, block.end, block.requested, block.generation))

    def gone(self, start: int, end: int) -> None:
        """The driver has these bytes back."""
        self.fills.forget(start, end)
        self.tenants.forget(start, end)

    # -- numbers ----------------------------------------------------------------------------------

    def _meet(self, line: Timeline) -> str:
        name = self._met[line.number] = describe(line)
        if len(self._met) > 4096:
            self._met = {n: name for n, name in self._met.items() if n in self._registry.lines}
        return name

    def known(self, registry: Registry) -> Iterator[str]:
        """The streams that have not ended, legacy only where this pool has met it."""
        for number, line in list(registry.lines.items()):
            if not line.ended and (line.kind is not Kind.LEGACY or number in self._met):
                yield describe(line)

    def retired_shelves(self, but: Container[int] = ()) -> Iterator[BestFit]:
        """Where every block lies that is free and not idle."""
        yield from super().retired_shelves(but)
        yield from (*self.dirty, *self.aside, *self.damaged)

    def check(self) -> None:
        """As ever; and nothing lies in a bin, or is idle and not filled."""
        super().check()
        assert not any(sizes.any() for bins in self.bins for sizes in bins.values())
        for kind in KINDS:
            for shelf in (self.dirty[kind], self.aside[kind], self.damaged[kind]):
                shelf.check()
                for block in shelf:
                    assert block.kind == kind and block.state == RETIRED and self._registry.order.done(block.stamp), (
                        block
                    )
            for block in self.idle[kind]:
                assert self.leaving or not self.fills.gaps(block.ptr, block.end), ("idle and not filled", block)
            for block in self.damaged[kind]:
                assert not list(self.fills.inside(block.ptr, block.end)), ("damaged and filled", block)

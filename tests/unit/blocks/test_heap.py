"""The heap against a map of bytes: every byte belongs to one block, whatever is cut or joined.  R7, S11, S12."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from allocator.blocks import IDLE, LIVE, MANY, NOBODY, RETIRED, Block, Heap, Segment
from allocator.events import EMPTY, VectorClock
from allocator.streams import Kind, Timeline

UNIT = 4096


def _owner(number: int) -> Timeline:
    return Timeline(number, Kind.NON_BLOCKING)


def test_touching_segments_form_one_range_where_they_may() -> None:
    joined, apart = Heap(joined=True), Heap(joined=False)
    for heap in (joined, apart):
        heap.add(Segment(0, UNIT, 1, 0))
        heap.add(Segment(2 * UNIT, UNIT, 2, 0))
        heap.add(Segment(UNIT, UNIT, 3, 0))
        heap.check()
    assert len(joined.heads) == 1 and len(apart.heads) == 3
    assert [b.ptr for b in joined.blocks()] == [0, UNIT, 2 * UNIT]


def test_s11_blocks_of_two_plain_segments_are_no_neighbours() -> None:
    heap = Heap(joined=False)
    a, b = heap.add(Segment(0, UNIT, 0, 0)), heap.add(Segment(UNIT, UNIT, 0, 0))
    assert a.next is None and b.prev is None
    with pytest.raises(AssertionError):
        heap.merge(a, b)


def test_r7_split_copies_the_stamp() -> None:
    heap = Heap(joined=True)
    block = heap.add(Segment(0, UNIT, 1, 0))
    owner = _owner(5)
    block.state, block.owner, block.sole, block.stamp, block.since = RETIRED, owner, 5, VectorClock({5: 3}), 9
    generation = block.generation
    rest = heap.split(block, 512)
    assert (rest.ptr, rest.size, block.size) == (512, UNIT - 512, 512)
    assert (rest.state, rest.owner, rest.sole, rest.stamp, rest.since) == (RETIRED, owner, 5, VectorClock({5: 3}), 9)
    assert block.generation > generation
    heap.check()


@pytest.mark.parametrize(
    ("left", "right", "sole", "owner"),
    [
        ((5, 5), (5, 5), 5, 5),
        ((5, 5), (6, 6), MANY, None),
        ((NOBODY, None), (6, 6), 6, 6),
        ((5, 5), (NOBODY, None), 5, 5),
        ((NOBODY, None), (NOBODY, None), NOBODY, None),
        ((MANY, 5), (5, 5), MANY, 5),
        ((MANY, None), (5, 5), MANY, None),
    ],
)
def test_r7_merge_joins_users_and_stamps(
    left: tuple[int, int | None], right: tuple[int, int | None], sole: int, owner: int | None
) -> None:
    owners = {5: _owner(5), 6: _owner(6), None: None}
    heap = Heap(joined=True)
    a = heap.add(Segment(0, UNIT, 1, 0))
    b = heap.split(a, 512)
    for block, (its, own), stamp in ((a, left, VectorClock({1: 4, 2: 1})), (b, right, VectorClock({2: 7}))):
        block.sole, block.owner, block.stamp, block.state = its, owners[own], stamp, RETIRED
    merged = heap.merge(a, b)
    assert merged is a and (a.ptr, a.size) == (0, UNIT)
    assert a.stamp == VectorClock({1: 4, 2: 7})
    assert (a.sole, a.owner) == (sole, owners[owner])
    heap.check()


@pytest.mark.parametrize(
    ("one", "other", "both"), [(IDLE, IDLE, IDLE), (IDLE, RETIRED, RETIRED), (RETIRED, RETIRED, RETIRED)]
)
def test_r7_a_merged_block_is_as_busy_as_its_busiest_part(one: int, other: int, both: int) -> None:
    heap = Heap(joined=True)
    a = heap.add(Segment(0, UNIT, 1, 0))
    b = heap.split(a, 512)
    a.state, b.state = one, other
    assert heap.merge(a, b).state == both


def test_segments_inside_a_block_are_found() -> None:
    heap = Heap(joined=True)
    block = heap.add(Segment(0, UNIT, 1, 0))
    for i in range(1, 4):
        block = heap.merge(block, heap.add(Segment(i * UNIT, UNIT, i, 0)))
    assert [s.ptr for s in heap.inside(block)] == [0, UNIT, 2 * UNIT, 3 * UNIT]
    last = [heap.holding(n * UNIT) for n in range(4)]
    assert heap.last_inside(block, 1, 1) == last[3:] and heap.last_inside(block, 8, 1 << 40) == last
    assert heap.last_inside(block, 2, 1 << 40) == last[2:] == heap.last_inside(block, 8, UNIT + 1)
    assert heap.last_inside(block, 8, 2 * UNIT) == last[2:]
    rest = heap.split(block, 512)
    assert [s.ptr for s in heap.inside(block)] == [] and heap.last_inside(block, 8, 1 << 40) == []
    assert [s.ptr for s in heap.inside(rest)] == [UNIT, 2 * UNIT, 3 * UNIT]
    heap.split(rest, 2 * UNIT)  # up to the middle of the third
    assert heap.last_inside(rest, 8, 1 << 40) == last[1:2]
    half = heap.split(rest, UNIT)  # from the middle of the second to that of the third
    assert heap.last_inside(rest, 8, 1 << 40) == [] == heap.last_inside(half, 8, 1 << 40)
    assert heap.holding(0).handle == 1 and heap.holding(2 * UNIT + 5).ptr == 2 * UNIT


def test_only_a_block_of_exactly_the_segment_lets_it_go() -> None:
    heap = Heap(joined=True)
    block = heap.add(Segment(0, UNIT, 1, 0))
    heap.split(block, 512)
    with pytest.raises(AssertionError):
        heap.remove([heap.segments[0]], block)


def covers(segments: list[Segment], block: Block) -> bool:
    """Do they reach from its first byte to its last?"""
    return segments[0].ptr == block.ptr and segments[-1].end == block.end


class ByteMap(RuleBasedStateMachine):
    """Add, split, merge and remove at random; the naive model is one owner for each unit of 512 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.heap = Heap(joined=True)
        self.pieces: dict[int, int] = {}  # every unit's block, by start address
        self.segments: dict[int, Segment] = {}

    @initialize(joined=st.booleans())
    def begin(self, joined: bool) -> None:
        self.heap = Heap(joined=joined)

    @rule(slot=st.integers(0, 7), size=st.integers(1, 2))
    def add(self, slot: int, size: int) -> None:
        ptr, nbytes = slot * 2 * UNIT, size * UNIT
        if ptr in self.segments:
            return
        segment = Segment(ptr, nbytes, slot + 1, 0)
        block = self.heap.add(segment)
        assert (block.ptr, block.size, block.state, block.stamp) == (ptr, nbytes, IDLE, EMPTY)
        self.segments[ptr] = segment
        for unit in range(ptr, ptr + nbytes, 512):
            self.pieces[unit] = ptr

    def _blocks(self) -> list[Block]:
        return sorted(self.heap.blocks(), key=lambda b: b.ptr)

    @precondition(lambda self: self.segments)
    @rule(at=st.integers(0, 1 << 16), cut=st.integers(1, 15))
    def split(self, at: int, cut: int) -> None:
        blocks = self._blocks()
        block = blocks[at % len(blocks)]
        size = cut * 512
        if size >= block.size:
            return
        rest = self.heap.split(block, size)
        for unit in range(rest.ptr, rest.end, 512):
            self.pieces[unit] = rest.ptr

    @precondition(lambda self: self.segments)
    @rule(at=st.integers(0, 1 << 16))
    def merge(self, at: int) -> None:
        blocks = [b for b in self._blocks() if b.next is not None]
        if not blocks:
            return
        left = blocks[at % len(blocks)]
        right = left.next
        assert right is not None
        units = range(right.ptr, right.end, 512)
        self.heap.merge(left, right)
        for unit in units:
            self.pieces[unit] = left.ptr

    @precondition(lambda self: self.segments)
    @rule(at=st.integers(0, 1 << 16))
    def remove(self, at: int) -> None:
        whole = [(b, inside) for b in self._blocks() if (inside := self.heap.inside(b)) and covers(inside, b)]
        if not whole:
            return
        block, segments = whole[at % len(whole)]
        assert segments == self.heap.last_inside(block, 99, block.size) == [self.segments.pop(s.ptr) for s in segments]
        self.heap.remove(segments, block)
        for unit in range(block.ptr, block.end, 512):
            del self.pieces[unit]

    @invariant()
    def every_byte_has_its_block(self) -> None:
        self.heap.check()
        seen: dict[int, int] = {}
        for block in self.heap.blocks():
            for unit in range(block.ptr, block.end, 512):
                assert unit not in seen
                seen[unit] = block.ptr
        assert seen == self.pieces
        assert self.heap.reserved == sum(s.size for s in self.segments.values())


TestByteMap = ByteMap.TestCase


def test_check_notices_a_live_block_on_a_shelf_and_a_broken_link() -> None:
    heap = Heap(joined=True)
    block = heap.add(Segment(0, UNIT, 1, 0))
    rest = heap.split(block, 512)
    rest.prev = None
    with pytest.raises(AssertionError):
        heap.check()
    rest.prev = block
    block.state = LIVE
    heap.check()

"""Memory taken from the driver and given back.

Rules: the limit counts what is on its way as well; driver calls are made outside the pool's lock, and what they
will change is set aside under it before (S10, S16).  Only idle memory is given back: idle by `completed`, never
by clocks (R13).  With plain allocations, whose frees wait for the device, give back only when nothing is in
flight, or as the very last step (R13).

Next: ../blocks/pages.py (which addresses), ladder.py (when).
"""

from __future__ import annotations

import time
from typing import Final

from allocator.blocks import IDLE, KINDS, LARGE, SMALL, Backing, Block, Heap, PlainMemory, Segment, Space, VirtualMemory
from allocator.caching.accounting import Accounts
from allocator.caching.shelves import Shelves
from allocator.config import Config
from allocator.devices import Device
from allocator.errors import DriverError
from allocator.sizes import MIB, round_up
from allocator.streams import Registry, Timeline
from allocator.sync import LockLike

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
TOGETHER: Final = 32
TOGETHER_BYTES: Final = 1024 * MIB
"""Segments, and bytes of them, taken out of the pool at once to be given back: two milliseconds, without them."""


class Growth:
    """The segments of one pool."""

    def __init__(
        self,
        device: Device,
        config: Config,
        registry: Registry,
        heap: Heap,
        shelves: Shelves,
        accounts: Accounts,
        lock: LockLike,
    ) -> None:
        self._device = device
        self._registry = registry
        self._heap = heap
        self._shelves = shelves
        self._accounts = accounts
        self._lock = lock
        self._pages = {SMALL: config.small_page, LARGE: config.large_page}
        self._small_request = config.small_request
        self._spaces: list[Space] | None = None
        self._range = (0, 0)
        self._unreleased: list[Segment] = []
        """Unmapped, but the driver did not take the memory back: tried again at the next release."""
        self.backing: Backing = VirtualMemory(device) if config.backing == "vmm" else PlainMemory(device)
        self.limit = config.limit
        self.growing = 0
        """Bytes being got from the driver at this moment."""

    def kind(self, size: int) -> int:
        """Which size class's memory a request is served from."""
        return SMALL if size <= self._small_request else LARGE

    @property
    def held(self) -> int:
        """Bytes that count against the limit: reserved, and on the way in or out."""
        return self._heap.reserved + self.growing + self.unreleased

    @property
    def unreleased(self) -> int:
        """Bytes unmapped that the driver has not taken back yet."""
        return sum(segment.size for segment in self._unreleased)

    def grow(self, line: Timeline, size: int, kind: int, assumed: bool) -> Block | None:
        """Step 5: a block of at least `size` bytes, partly from free neighbours that `line` may take.

        On no shelf; the caller carves and hands it out.  None where the limit or the device has no room.
        Driver calls: `cuMemAddressReserve` the first time; those of `Backing.attach`.  DriverError if one fails
        for another reason than lack of memory; nothing has then changed.
        """
        self._reserve()
        with self._lock.checked():
            plan = self._plan(line, size, kind, assumed)
            if plan is None:
                return None
            ptr, nbytes, parts = plan
            self.growing += nbytes
        started = self._device.clock_ns()
        segment: Segment | None = None
        stuck: list[Segment] = []
        try:
            with self._device.scope():
                segment = self.backing.attach(ptr, nbytes, kind, stuck)
                self._accounts.device_free = self._device.mem_get_info()[0]
        except DriverError as error:
            self._registry.failed(error)
            if segment is None and error.code != OUT_OF_MEMORY:
                raise
        finally:
            with self._lock.checked():
                self.growing -= nbytes
                block = self._settle_plan(segment, stuck, ptr, nbytes, parts, (self._device.clock_ns() - started) / 1e9)
        return block

    def _virtual(self) -> bool:
        """Has a range of addresses been reserved?  Asked anew: another thread may have, since we looked."""
        return self._spaces is not None

    def _reserve(self) -> None:
        if self._virtual() or not self._heap.joined:
            return
        device = self._device
        with device.scope():
            base, size = self.backing.reserve()
        unit = device.granularity
        quarter = size // 4 // unit * unit
        with self._lock.checked():
            if not self._virtual():
                self._range = (base, size)
                self._spaces = [Space(base, quarter, unit), Space(base + quarter, size - quarter, unit)]
                return
        with device.scope():  # another thread was first
            self.backing.unreserve(base, size)

    def _plan(
        self, line: Timeline, size: int, kind: int, assumed: bool
    ) -> tuple[int, int, tuple[Block | None, Block | None]] | None:
        most = self.limit - self.held if self.limit else 1 << 62
        page = self._pages[kind]
        if self._spaces is None:
            nbytes = max(page, round_up(size, self._device.granularity))
            nbytes = nbytes if nbytes <= most else round_up(size)
            return (0, nbytes, (None, None)) if nbytes <= most else None
        heap, shelves = self._heap, self._shelves

        def before(address: int) -> Block | None:
            block = heap.tails.get(address)
            return block if shelves.takeable(block, line, assumed) else None

        def behind(address: int) -> Block | None:
            block = heap.heads.get(address)
            return block if shelves.takeable(block, line, assumed) else None

        plan = self._spaces[kind].plan(size, page, most, before, behind)
        if plan is None:
            return None
        self._accounts.mark()
        for block in (plan.left, plan.right):
            if block is not None and block.shelf is not None:
                block.shelf.remove(block)
                block.generation += 1
                shelves.transit.add(block)
        self._accounts.mark()
        return plan.ptr, plan.nbytes, (plan.left, plan.right)

    def _settle_plan(
        self,
        segment: Segment | None,
        stuck: list[Segment],
        ptr: int,
        nbytes: int,
        parts: tuple[Block | None, Block | None],
        seconds: float,
    ) -> Block | None:
        """Under the lock: take the new segment in and join its neighbours, or put everything back."""
        accounts = self._accounts
        accounts.mark()
        left, right = parts
        self._shelves.transit.difference_update(parts)
        if segment is None:
            self._unreleased += stuck
            if self._spaces is not None and not any(piece.ptr == ptr for piece in stuck):
                self._space_of(ptr).give_back(ptr, ptr + nbytes)
            for block in parts:
                if block is not None:
                    self._shelves.place(block)
            accounts.mark()
            return None
        block = self._heap.add(segment)
        block.generation += 1
        if left is not None:
            block = self._heap.merge(left, block)
        if right is not None:
            block = self._heap.merge(block, right)
        accounts.growths += 1
        accounts.growth_bytes += nbytes
        accounts.driver_seconds["cuMemCreate" if self._heap.joined else "cuMemAlloc"] += seconds
        accounts.growth_times.add(seconds)
        self._shelves.transit.add(block)  # until the caller hands it out
        accounts.mark()
        return block

    def _space_of(self, ptr: int) -> Space:
        assert self._spaces is not None
        return next(space for space in self._spaces if space.base <= ptr < space.base + space.size)

    # -- giving back ----------------------------------------------------------------------------

    def release(self, reason: str, most: int) -> int:
        """Give idle segments back until `most` bytes are; returns the bytes given back.

        A few at a time, so that what is not yet on its way can still serve other threads (S16).  The caller has
        flushed and refreshed the shelves.  Driver calls: those of `Backing.detach`.  A segment that the driver
        refuses to take stays in the pool, and ends the attempt.
        """
        freed = 0
        try:
            with self._device.scope():  # once, for all of them
                freed = self._give_back(self._take_unreleased(), reason, neighbours=False)[0]
                while freed < most:
                    with self._lock.checked():
                        self._accounts.mark()
                        leaving = self._take_some(min(most - freed, TOGETHER_BYTES))
                        self._accounts.mark()
                    given, whole = self._give_back(leaving, reason, neighbours=True)
                    freed += given
                    if not whole:
                        break
        except DriverError as error:  # the scope itself: the context is gone
            self._registry.failed(error)
        return freed

    def _give_back(self, segments: list[Segment], reason: str, *, neighbours: bool) -> tuple[int, bool]:
        """Give segments back that are out of the heap, the last one first; the bytes, and whether there may be more.

        After the first that the driver refuses the others stay as well, unless they are of no use to the pool.
        neighbours: they touch, so that one call can unmap them all.
        """
        if not segments:
            return 0, False
        device, accounts = self._device, self._accounts
        leaving = [(segment.ptr, segment) for segment in segments]
        gone: list[tuple[int, Segment]] = []
        refused = False
        started = device.clock_ns()
        try:
            with device.scope():  # again: a finaliser may have left another context current
                if neighbours and len(segments) > 1:
                    try:
                        self.backing.unmap(segments)
                    except DriverError as error:  # then one by one
                        self._registry.failed(error)
                while leaving and not (refused and self._of_use(leaving[-1][1])):
                    ptr, segment = leaving.pop()
                    if self._detach(segment, ptr, reason):
                        gone.append((ptr, segment))
                    else:
                        refused = True
        finally:  # whatever is found while memory is verified, or interrupts where nothing can put that off
            freed = sum(segment.size for _, segment in gone)
            if gone:
                with self._lock.checked():
                    if self._spaces is not None:
                        self._vacate(gone, neighbours)
                    self.growing -= freed
                    accounts.releases[reason] += len(gone)
                    accounts.release_bytes[reason] += freed
                    call = "cuMemUnmap" if self._heap.joined else "cuMemFree"
                    accounts.driver_seconds[call] += (device.clock_ns() - started) / 1e9
            for ptr, segment in leaving:
                self._keep(segment, ptr)
        return freed, not refused

    def _vacate(self, gone: list[tuple[int, Segment]], neighbours: bool) -> None:
        """These addresses are not mapped any more.  neighbours: they go down, and are of one space."""
        begin = end = 0
        for ptr, segment in gone:
            if ptr and neighbours and ptr + segment.size == begin:
                begin = ptr
                continue
            if begin:
                self._space_of(begin).give_back(begin, end)
            begin, end = ptr, ptr + segment.size
        if begin:
            self._space_of(begin).give_back(begin, end)

    @staticmethod
    def _of_use(segment: Segment) -> bool:
        """Is it memory that can be handed out again?"""
        return segment.usable and segment.ptr != 0 and not segment.unsure

    def _at_once(self) -> int:
        """How many segments are taken out of the pool together."""
        return TOGETHER

    def _detach(self, segment: Segment, ptr: int, reason: str) -> bool:
        """Give one segment back that is out of the heap; False if the driver refused, and it is kept.  In a scope.

        ptr: where it was mapped.
        """
        try:
            self.backing.detach(segment)
        except DriverError as error:
            self._registry.failed(error)
            self._keep(segment, ptr)
            return False
        except BaseException:  # Ctrl-C, where nothing can put it off
            self._keep(segment, ptr)
            raise
        return True

    def _take_unreleased(self) -> list[Segment]:
        with self._lock.checked():
            leaving, self._unreleased = self._unreleased, []
            self.growing += sum(segment.size for segment in leaving)  # still held, until the driver has it back
        return leaving

    def _take_some(self, most: int) -> list[Segment]:
        """Take neighbouring idle segments out of the heap, at the highest addresses of a block: a few, and no more than
        it takes for `most` bytes.  Under the lock."""
        least = self._device.granularity if self._heap.joined else 1
        for kind in KINDS:
            for block in self._shelves.idle[kind].from_size(least):
                segments = self._heap.last_inside(block, self._at_once(), most)
                if segments:
                    self.growing += self._cut_out(segments, block)  # still held, until the driver has it back
                    return segments
        return []

    def wait_for_others(self, seconds: float) -> bool:
        """Wait, bounded, while other threads' memory is on its way to or from the driver; True if it has changed."""
        before = self.growing
        until = time.monotonic() + seconds
        while self.growing and self.growing == before and time.monotonic() < until:
            time.sleep(0.0002)
        return self.growing != before

    def _cut_out(self, segments: list[Segment], block: Block) -> int:
        """Remove neighbouring segments from the idle block that holds them; returns their bytes.

        What is left of the block stays idle.
        """
        heap, idle = self._heap, self._shelves.idle[block.kind]
        idle.remove(block)
        begin, end = segments[0].ptr, segments[-1].end
        middle = block
        if block.ptr < begin:
            middle = heap.split(block, begin - block.ptr)
            idle.add(block)
        if end < middle.end:
            idle.add(heap.split(middle, end - begin))
        heap.remove(segments, middle)
        return end - begin

    def _keep(self, segment: Segment, ptr: int) -> None:
        """The driver refused: the segment is ours as before, or unmapped and to be released later."""
        with self._lock.checked():
            self._accounts.mark()
            self.growing -= segment.size
            if self._of_use(segment):
                block = self._heap.add(segment)
                block.state = IDLE
                self._shelves.place(block)
            else:
                self._unreleased.append(segment)
                if ptr and not segment.ptr and self._spaces is not None:
                    self._space_of(ptr).give_back(ptr, ptr + segment.size)
            self._accounts.mark()

    def check(self) -> None:
        """Raise AssertionError unless the addresses in use are those of the segments.  Under the lock; O(segments).

        Nothing can be said while memory is on its way.
        """
        if self._spaces is not None and not self.growing:
            for space in self._spaces:
                space.check([*self._heap.segments.values(), *self._unreleased])

    def close(self) -> None:
        """Free the address range; nothing may be reserved.  `cuMemAddressFree`."""
        base, size = self._range
        if base:
            with self._device.scope():
                self.backing.unreserve(base, size)
        self._range, self._spaces = (0, 0), None

    @property
    def empty(self) -> bool:
        """True if nothing is held from the driver, the address range apart."""
        return not (self._heap.reserved or self.growing or self._unreleased)

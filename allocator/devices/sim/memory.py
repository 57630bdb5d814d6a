"""Physical memory, address ranges and what is mapped where.

Rule: *strict*.  What a real driver would let pass although it can only be a mistake of ours (one handle
mapped twice, a free of memory in use) is refused: `Refusal` for mistakes, `Failure` for what an honest
caller may meet, such as a full device.

Next: calls.py, which turns both into `DriverError`.  Not thread-safe: callers hold the world's lock.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Final

from sortedcontainers import SortedDict

GRANULARITY: Final = 2 << 20
SLOT_BITS: Final = 47
"""Each device has an address space of its own, 2**47 bytes long."""


class Failure(Exception):
    """The driver says no: (code, detail)."""


class Refusal(Failure):
    """Only a mistake gets here."""


class Addresses:
    """Free address ranges, first fit, merged when given back."""

    def __init__(self, base: int, end: int) -> None:
        self._free: list[tuple[int, int]] = [(base, end)]

    def take(self, nbytes: int, align: int) -> int:
        """The lowest place for `nbytes`."""
        for i, (start, end) in enumerate(self._free):
            ptr = (start + align - 1) & -align
            if ptr + nbytes <= end:
                self._free[i : i + 1] = [(a, b) for a, b in ((start, ptr), (ptr + nbytes, end)) if a < b]
                return ptr
        raise Failure("CUDA_ERROR_OUT_OF_MEMORY", "no addresses left")

    def give(self, ptr: int, nbytes: int) -> None:
        """Give back what `take` gave."""
        i = bisect.bisect(self._free, (ptr, 0))
        start, end = ptr, ptr + nbytes
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, end))


@dataclass(slots=True)
class Physical:
    """What `cuMemCreate` makes.  It holds memory until it is released and unmapped."""

    handle: int
    nbytes: int
    mapped_at: int | None = None
    released: bool = False


@dataclass(slots=True)
class Mapping:
    """Bytes with memory behind them; `plain` for `cuMemAlloc`."""

    start: int
    end: int
    physical: Physical | None
    access: bool


class Memory:
    """One device's memory."""

    def __init__(self, total: int, slot: int, *, touching: bool) -> None:
        self.total = total
        self.others = 0
        self.used = 0
        self.touching = touching
        base = (slot << SLOT_BITS) + (1 << 40)
        middle = (slot << SLOT_BITS) + (1 << 46)
        self._virtual = Addresses(middle, (slot + 1) << SLOT_BITS)
        self._plain_addresses = Addresses(base, middle)
        self._reserved: SortedDict[int, int] = SortedDict()  # start -> end
        self._physical: dict[int, Physical] = {}
        self._mappings: SortedDict[int, Mapping] = SortedDict()
        self._plain: dict[int, int] = {}
        self._next_handle = 0x7E000000

    @property
    def free(self) -> int:
        """Bytes that can still be had."""
        return max(0, self.total - self.others - self.used)

    def _charge(self, nbytes: int) -> None:
        if nbytes > self.free:
            raise Failure("CUDA_ERROR_OUT_OF_MEMORY", f"{nbytes} bytes asked, {self.free} free")
        self.used += nbytes

    # -- virtual memory -----------------------------------------------------------------------

    def reserve(self, nbytes: int) -> int:
        """`cuMemAddressReserve`."""
        _check_size(nbytes, GRANULARITY)
        # One page stays free behind each reservation: running off its end must not hit another one.
        ptr = self._virtual.take(nbytes + GRANULARITY, GRANULARITY)
        self._reserved[ptr] = ptr + nbytes
        return ptr

    def unreserve(self, ptr: int, nbytes: int) -> None:
        """`cuMemAddressFree`."""
        if self._reserved.get(ptr) != ptr + nbytes:
            raise Refusal("CUDA_ERROR_INVALID_VALUE", f"{ptr:#x}, {nbytes} bytes is no reservation")
        if self._overlapping(ptr, ptr + nbytes):
            raise Refusal("CUDA_ERROR_INVALID_VALUE", "memory is still mapped there")
        del self._reserved[ptr]
        self._virtual.give(ptr, nbytes + GRANULARITY)

    def create(self, nbytes: int) -> int:
        """`cuMemCreate`."""
        _check_size(nbytes, GRANULARITY)
        self._charge(nbytes)
        self._next_handle += 1
        self._physical[self._next_handle] = Physical(self._next_handle, nbytes)
        return self._next_handle

    def release(self, handle: int) -> None:
        """`cuMemRelease`."""
        physical = self._handle(handle)
        physical.released = True
        self._drop(physical)

    def map(self, ptr: int, nbytes: int, handle: int) -> None:
        """`cuMemMap`."""
        physical = self._handle(handle)
        _check_size(nbytes, GRANULARITY)
        if nbytes != physical.nbytes:
            raise Refusal("CUDA_ERROR_INVALID_VALUE", f"a handle of {physical.nbytes} bytes is mapped whole")
        if physical.mapped_at is not None:
            raise Refusal("CUDA_ERROR_INVALID_VALUE", f"the handle is already mapped at {physical.mapped_at:#x}")
        if ptr % GRANULARITY or not self._in_reservation(ptr, nbytes):
            raise Refusal("CUDA_ERROR_INVALID_VALUE", f"{ptr:#x} is not aligned, or not in one reservation")
        if self._overlapping(ptr, ptr + nbytes):
            raise Refusal("CUDA_ERROR_ALREADY_MAPPED", f"something is mapped at {ptr:#x}")
        physical.mapped_at = ptr
        self._mappings[ptr] = Mapping(ptr, ptr + nbytes, physical, access=False)

    def set_access(self, ptr: int, nbytes: int) -> None:
        """`cuMemSetAccess`."""
        for mapping in self._whole(ptr, nbytes):
            mapping.access = True

    def unmap(self, ptr: int, nbytes: int) -> None:
        """`cuMemUnmap`."""
        for mapping in self._whole(ptr, nbytes):
            del self._mappings[mapping.start]
            assert mapping.physical is not None
            mapping.physical.mapped_at = None
            self._drop(mapping.physical)

    def _handle(self, handle: int) -> Physical:
        physical = self._physical.get(handle)
        if physical is None or physical.released:
            raise Refusal("CUDA_ERROR_INVALID_VALUE", f"{handle:#x} is no memory handle, or was released")
        return physical

    def _drop(self, physical: Physical) -> None:
        if physical.released and physical.mapped_at is None:
            del self._physical[physical.handle]
            self.used -= physical.nbytes

    def _in_reservation(self, ptr: int, nbytes: int) -> bool:
        index = self._reserved.bisect_right(ptr) - 1
        return bool(index >= 0 and ptr + nbytes <= self._reserved.peekitem(index)[1])

    def _whole(self, ptr: int, nbytes: int) -> list[Mapping]:
        """The mappings that make up exactly this range; Refusal if they do not."""
        found = self._overlapping(ptr, ptr + nbytes)
        at = ptr
        for mapping in found:
            if mapping.start != at or mapping.physical is None:
                break
            at = mapping.end
        if not found or at != ptr + nbytes:
            raise Refusal("CUDA_ERROR_INVALID_VALUE", f"{ptr:#x}, {nbytes} bytes is not made of whole mapped handles")
        return found

    # -- plain memory -------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> int:
        """`cuMemAlloc`."""
        _check_size(nbytes, 1)
        self._charge(nbytes)
        try:
            ptr = self._plain_addresses.take(self._span(nbytes), 512 if self.touching else GRANULARITY)
        except Failure:
            self.used -= nbytes
            raise
        self._plain[ptr] = nbytes
        self._mappings[ptr] = Mapping(ptr, ptr + nbytes, None, access=True)
        return ptr

    def plain_size(self, ptr: int) -> int:
        """Bytes of a plain allocation; Refusal if there is none at exactly `ptr`."""
        if ptr not in self._plain:
            raise Refusal("CUDA_ERROR_INVALID_VALUE", f"{ptr:#x} was not allocated, or was freed")
        return self._plain[ptr]

    def free_plain(self, ptr: int) -> None:
        """`cuMemFree`."""
        nbytes = self.plain_size(ptr)
        del self._plain[ptr], self._mappings[ptr]
        self.used -= nbytes
        self._plain_addresses.give(ptr, self._span(nbytes))

    def _span(self, nbytes: int) -> int:
        """Addresses used up by a plain allocation: touching its neighbour, or with a gap behind it."""
        return (nbytes + 511) & -512 if self.touching else ((nbytes - 1) | (GRANULARITY - 1)) + 1 + GRANULARITY

    # -- use ----------------------------------------------------------------------------------

    def accessible(self, ptr: int, nbytes: int) -> bool:
        """True if a kernel may touch all these bytes."""
        end = ptr + nbytes
        at = ptr
        for mapping in self._overlapping(ptr, end):
            if mapping.start > at or not mapping.access:
                return False
            at = mapping.end
        return at >= end

    def _overlapping(self, start: int, end: int) -> list[Mapping]:
        index = self._mappings.bisect_right(start) - 1
        found: list[Mapping] = []
        if index >= 0:
            before: Mapping = self._mappings.peekitem(index)[1]
            if before.start < start < before.end:
                found.append(before)
        found += [self._mappings[key] for key in self._mappings.irange(start, end, inclusive=(True, False))]
        return found


def _check_size(nbytes: int, multiple: int) -> None:
    if nbytes <= 0 or nbytes % multiple:
        raise Failure("CUDA_ERROR_INVALID_VALUE", f"{nbytes} bytes: not a positive multiple of {multiple}")

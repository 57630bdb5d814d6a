"""Where memory comes from: virtual memory, or plain allocations.

Every method that makes driver calls is called outside the pool's lock, inside `device.scope()` (R10), and on
an error leaves things as they were (S10).  Proving that nobody uses what is unmapped is the caller's task:
`cuMemUnmap` waits for nothing (R13).

Next: pages.py (which addresses), heap.py (blocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from allocator.blocks.pages import Segment
from allocator.devices import Device
from allocator.errors import DriverError


class Backing(Protocol):
    """The calls that get memory from the driver and give it back."""

    stalls: bool
    """True if giving memory back waits for the whole device."""

    def reserve(self) -> tuple[int, int]:
        """A new address range (base, bytes) for `attach` to map into; (0, 0) where the driver chooses addresses."""

    def attach(self, ptr: int, nbytes: int, kind: int, stuck: list[Segment]) -> Segment:
        """Get `nbytes` from the driver, at `ptr` if `reserve` gave a range.  DriverError if it has none.

        What a failed attempt could not undo either is added to `stuck`: not usable, to be detached later.
        """

    def unmap(self, segments: Sequence[Segment]) -> None:
        """Make neighbouring segments unreachable, which are about to be detached: where one call does for all.

        DriverError if the driver refuses; they are then as before.
        """

    def detach(self, segment: Segment) -> None:
        """Give a segment back.  DriverError if the driver refuses; it is then as before."""

    def unreserve(self, base: int, size: int) -> None:
        """Free a range that `reserve` gave; nothing may be mapped in it."""


class VirtualMemory:
    """`cuMemCreate`, `cuMemMap`, `cuMemSetAccess` into one reserved range.  Stalls nobody."""

    stalls = False

    def __init__(self, device: Device) -> None:
        self._device = device

    def reserve(self) -> tuple[int, int]:
        """`cuMemAddressReserve`: four times the device's memory, so that there is always a hole to grow into."""
        unit = self._device.granularity
        size = 4 * -(-self._device.total_memory // unit) * unit
        return self._device.mem_address_reserve(size), size

    def attach(self, ptr: int, nbytes: int, kind: int, stuck: list[Segment]) -> Segment:
        """`cuMemCreate`, `cuMemMap`, `cuMemSetAccess`; undone in reverse where one fails."""
        device = self._device
        segment = Segment(0, nbytes, device.mem_create(nbytes), kind)
        try:
            device.mem_map(ptr, nbytes, segment.handle)
            segment.ptr = ptr
            device.mem_set_access(ptr, nbytes)
        except DriverError:
            segment.usable = False
            try:
                self.detach(segment)
            except DriverError:
                stuck.append(segment)
            raise
        return segment

    def unmap(self, segments: Sequence[Segment]) -> None:
        """`cuMemUnmap`."""
        begin, end = segments[0].ptr, segments[-1].end
        for segment in segments:
            segment.unsure = True
        try:
            self._device.mem_unmap(begin, end - begin)
        except DriverError:
            for segment in segments:
                segment.unsure = False
            raise
        for segment in segments:
            segment.ptr = 0  # unmapped: a second try only releases
            segment.unsure = False

    def detach(self, segment: Segment) -> None:
        """`cuMemUnmap`, unless that is done; `cuMemRelease`."""
        if segment.unsure:
            with suppress(DriverError):  # it was done
                self._device.mem_unmap(segment.ptr, segment.size)
            segment.ptr = 0
            segment.unsure = False
        if segment.ptr:
            self.unmap([segment])
        handle = segment.handle
        segment.handle = 0  # should this be interrupted: not released twice, as it may be another's by then
        if handle:
            try:
                self._device.mem_release(handle)
            except DriverError:
                segment.handle = handle
                raise

    def unreserve(self, base: int, size: int) -> None:
        """`cuMemAddressFree`."""
        self._device.mem_address_free(base, size)


class PlainMemory:
    """`cuMemAlloc` and `cuMemFree`.  Giving back waits for the whole device."""

    stalls = True

    def __init__(self, device: Device) -> None:
        self._device = device

    def reserve(self) -> tuple[int, int]:
        """No driver call."""
        return 0, 0

    def attach(self, ptr: int, nbytes: int, kind: int, stuck: list[Segment]) -> Segment:
        """`cuMemAlloc`."""
        return Segment(self._device.mem_alloc(nbytes), nbytes, 0, kind)

    def unmap(self, segments: Sequence[Segment]) -> None:
        """No driver call."""

    def detach(self, segment: Segment) -> None:
        """`cuMemFree`."""
        ptr = segment.ptr
        segment.ptr = 0  # as with handles above
        if ptr:
            try:
                self._device.mem_free(ptr)
            except DriverError:
                segment.ptr = ptr
                raise

    def unreserve(self, base: int, size: int) -> None:
        """No driver call."""

"""Where a stress program runs: on the simulator, which sees every race, or on a GPU, where bytes are compared.

Rule: *whoever judges shares nothing with the pool*.  On the simulator it is the race oracle.  On a GPU it is a
canary of the program's own: each block is filled with one value on its stream, each write repeats it, and before a
block is freed some of its bytes are read back, behind the stream's work.  Whoever else had the memory meanwhile
wrote another value.

Next: player.py.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol

from allocator import Allocation, CudaDevice, SimDevice, Stream
from allocator.devices import Device, pieces_held
from allocator.errors import AllocatorError
from allocator.sizes import KIB

WINDOW: Final = 4 * KIB
"""Bytes of a block that are compared at its start, its middle and its end."""


class Corrupt(AllocatorError):
    """Bytes of a live block were written by somebody else."""


class Target(Protocol):
    """One device during a run."""

    device: Device

    def session(self) -> AbstractContextManager[object]:
        """A thread runs its operations within this."""

    def fill(self, allocation: Allocation, value: int) -> None:
        """A new block gets its value."""

    def launch(self, stream: Stream, ns: int, allocation: Allocation, value: int, *, write: bool) -> None:
        """Queue a kernel that uses the block for so long."""

    def compare(self, allocation: Allocation, value: int) -> None:
        """The block is about to be freed.  Raises Corrupt."""

    def advance(self, ns: int) -> None:
        """Virtual time passes."""

    def finish(self) -> None:
        """Let everything that is queued end."""

    @property
    def wrong(self) -> Sequence[object]:
        """What the judge has found so far."""

    def reset(self) -> None:
        """Forget it."""

    def leaked_bytes(self) -> int:
        """Memory that the driver still holds for pools that have none."""


class SimTarget:
    """Every launch is seen by the oracle; nothing has to be read back."""

    def __init__(self, device: SimDevice) -> None:
        self.device: Device = device
        self._gpu = device
        self._races = device.races
        self._used = device.used_bytes

    def session(self) -> AbstractContextManager[object]:
        return nullcontext()

    def fill(self, allocation: Allocation, value: int) -> None:
        """The oracle needs no values."""

    def launch(self, stream: Stream, ns: int, allocation: Allocation, value: int, *, write: bool) -> None:
        items = (allocation,)
        self._gpu.launch(stream, ns, () if write else items, items if write else ())

    def compare(self, allocation: Allocation, value: int) -> None:
        """The oracle needs no values."""

    def advance(self, ns: int) -> None:
        self._gpu.advance(ns)

    def finish(self) -> None:
        self._gpu.run_until_idle()

    @property
    def wrong(self) -> Sequence[object]:
        return self._races or self._gpu.violations

    def reset(self) -> None:
        self._races.clear()
        self._gpu.violations.clear()

    def leaked_bytes(self) -> int:
        return self._gpu.used_bytes - self._used


class CanaryTarget:
    """Bytes are compared.  every: one block in so many; reading back makes the host wait for a stream.

    Runs on a simulated device too, which knows what memsets leave in memory.
    """

    def __init__(self, device: Device, *, every: int = 8) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.device = device
        self._every = every
        self._mine = _Thread()
        self._held = pieces_held(device)

    def session(self) -> AbstractContextManager[object]:
        """The context stays current all the time, as in a program; it costs several calls an operation otherwise."""
        return self.device.scope()

    def fill(self, allocation: Allocation, value: int) -> None:
        with self.device.scope():
            self.device.mem_set_async(allocation.ptr, value, allocation.size, allocation.stream.handle)

    def launch(self, stream: Stream, ns: int, allocation: Allocation, value: int, *, write: bool) -> None:
        handle = stream.handle
        if isinstance(self.device, SimDevice):
            self.device.launch(handle, ns)
        else:
            _spin(self.device, handle, ns)
        if write:
            with self.device.scope():
                self.device.mem_set_async(allocation.ptr, value, allocation.size, handle)

    def compare(self, allocation: Allocation, value: int) -> None:
        mine = self._mine
        mine.seen += 1
        if mine.seen % self._every or allocation.stream.closed:
            return
        size = allocation.size
        expected = bytes((value,)) * WINDOW
        handle = allocation.stream.handle
        with self.device.scope():
            for start in sorted({0, max(0, (size - WINDOW) // 2), max(0, size - WINDOW)}):
                nbytes = min(WINDOW, size - start)
                self.device.mem_copy_to_host_async(mine.address, allocation.ptr + start, nbytes, handle)
                self.device.stream_synchronize(handle)
                found = mine.buffer.raw[:nbytes]
                if found != expected[:nbytes]:
                    at = next(i for i, byte in enumerate(found) if byte != value)
                    raise Corrupt(
                        f"the block of {allocation.requested} bytes at {allocation.ptr:#x}, of {allocation.stream!r}, "
                        f"was filled with {value:#04x}; byte {start + at} is {found[at]:#04x}"
                    )

    def advance(self, ns: int) -> None:
        if isinstance(self.device, SimDevice):
            self.device.advance(ns)

    def finish(self) -> None:
        with self.device.scope():
            self.device.ctx_synchronize()

    @property
    def wrong(self) -> Sequence[object]:
        return ()

    def reset(self) -> None:
        """What is wrong is raised at once."""

    def leaked_bytes(self) -> int:
        return (pieces_held(self.device) - self._held) * self.device.granularity


class _Thread(threading.local):
    """What one thread reads back into."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(WINDOW)
        self.address = ctypes.addressof(self.buffer)
        self.seen = 0


def _spin(device: Any, handle: int, ns: int) -> None:
    device.spin(handle, ns)


def open_target(ordinal: int | None, limit: int) -> Target:
    """The simulator for None, with memory enough for the limit; else that GPU.  Raises what `CudaDevice` raises."""
    if ordinal is None:
        return SimTarget(SimDevice(memory=max(8 << 30, 2 * limit)))
    return CanaryTarget(CudaDevice(ordinal))

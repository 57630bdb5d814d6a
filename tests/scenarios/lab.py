"""Where a scenario is played: simulated devices and pools whose end is judged, and a few words.

`Lab.finish` runs after every test: no race, no violation, every pool consistent, and once all is closed and the
work is over, one more public call leaves not a byte on the device.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

from allocator import Allocation, CachingAllocator, Config, SimDevice, Stream
from allocator.devices.sim.world import WORLD

KIB = 1 << 10
MIB = 1 << 20


class Lab:
    """Makes devices and pools, and judges them at the end."""

    def __init__(self) -> None:
        self._devices: list[SimDevice] = []
        self._pools: list[CachingAllocator] = []

    def gpu(self, memory: int = 1 << 30, **options: Any) -> SimDevice:
        """A device that must see no race and no violation."""
        device = SimDevice(memory=memory, **options)
        self._devices.append(device)
        return device

    def pool(self, gpu: SimDevice, name: str | None = None, **config: Any) -> CachingAllocator:
        """A pool that must be consistent at the end.  Nothing from the environment."""
        pool = CachingAllocator(gpu, config=Config(**config), name=name)
        self._pools.append(pool)
        return pool

    def forget(self, pool: CachingAllocator) -> None:
        """The test drops this pool itself."""
        self._pools.remove(pool)

    def finish(self) -> None:
        """Everything ends; nothing may be left."""
        assert not WORLD.thread.stack, "a scope was left open"
        for gpu in self._devices:
            gpu.before_call = None
            gpu.clear_faults()
            for handle in list(gpu._held):
                while gpu._held.get(handle):
                    gpu.resume(handle)
            assert gpu.races == []
            assert gpu.violations == []
        gc.collect()
        for pool in self._pools:
            pool.check()
            identity(pool)
            pool.close()
        for gpu in self._devices:
            gpu.run_until_idle()
            with CachingAllocator(gpu, config=Config()) as other:
                other.stats()  # one more public call: what has gone in the meantime is given back
            assert gpu.used_bytes == 0, f"{gpu.used_bytes} bytes leaked"
            assert gpu.races == []
            assert gpu.violations == []


def identity(pool: CachingAllocator) -> None:
    """reserved = allocated + in flight + idle + private, and the blocks say the same."""
    stats = pool.stats()
    assert stats.reserved_bytes == (
        stats.allocated_bytes + stats.in_flight_bytes + stats.idle_bytes + stats.private_bytes
    )
    assert min(stats.allocated_bytes, stats.in_flight_bytes, stats.idle_bytes) >= 0
    by_state = {"active_allocated": 0, "active_pending_free": 0, "inactive": 0}
    for segment in pool.snapshot()["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
            by_state[block["state"]] += block["size"]
        assert at == segment["address"] + segment["total_size"]
    assert sum(by_state.values()) == stats.reserved_bytes
    assert by_state["active_allocated"] == stats.allocated_bytes


def overlap(a: Allocation | tuple[int, int], b: Allocation | tuple[int, int]) -> bool:
    """Do the two share a byte?"""
    (p, n), (q, m) = span(a), span(b)
    return p < q + m and q < p + n


def span(a: Allocation | tuple[int, int]) -> tuple[int, int]:
    """(ptr, size), which stays true once the allocation is closed."""
    return a if isinstance(a, tuple) else (a.ptr, a.size)


def used(pool: CachingAllocator, stream: Stream, nbytes: int, duration_ns: int = 1000) -> Allocation:
    """An allocation that a kernel on `stream` writes."""
    a = pool.allocate(nbytes, stream=stream)
    gpu = pool.device
    assert isinstance(gpu, SimDevice)
    gpu.launch(stream, duration_ns=duration_ns, writes=[a])
    return a


def write(gpu: SimDevice, stream: object, *items: Any, duration_ns: int = 1000) -> None:
    """A kernel on `stream` that writes the items."""
    gpu.launch(stream, duration_ns=duration_ns, writes=items)


def read(gpu: SimDevice, stream: object, *items: Any, duration_ns: int = 1000) -> None:
    """A kernel on `stream` that reads the items."""
    gpu.launch(stream, duration_ns=duration_ns, reads=items)


def in_thread(work: Callable[[], Any], *, timeout_s: float = 30.0) -> Any:
    """Run something in a new thread to its end; its result, or its exception."""
    outcome: list[Any] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), "the thread hangs"
    if errors:
        raise errors[0]
    return outcome[0]


def calls_of(gpu: SimDevice) -> dict[str, int]:
    """A copy of the driver calls so far."""
    return dict(gpu.calls)

"""One suite for every backing and device: a simulated GPU, and a real one where there is one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from allocator import AllocatorError, CachingAllocator, Config, SimDevice, Stream
from allocator.devices import CudaDevice, Device

MIB = 1 << 20


class Bench:
    """A device under test, and how to give it work."""

    def __init__(self, device: Device, backing: str) -> None:
        self.device = device
        self.backing = backing
        self.simulated = device.simulated
        self._pools: list[CachingAllocator] = []

    def pool(self, name: str | None = None, **options: Any) -> CachingAllocator:
        """A pool with this backing; nothing from the environment."""
        pool = CachingAllocator(self.device, config=Config(backing=self.backing, **options), name=name)
        self._pools.append(pool)
        return pool

    def work(self, stream: Stream, ms: float = 1.0) -> None:
        """Keep the stream busy for that long."""
        if isinstance(self.device, SimDevice):
            self.device.launch(stream, duration_ns=int(ms * 1e6))
        else:
            assert isinstance(self.device, CudaDevice)
            self.device.spin(stream.handle, int(ms * 1e6))

    def run_dry(self) -> None:
        """Until no work is left anywhere."""
        if isinstance(self.device, SimDevice):
            self.device.run_until_idle()
        else:
            with self.device.scope():
                self.device.ctx_synchronize()

    def finish(self) -> None:
        """Every pool is consistent, and nothing stays."""
        gc.collect()
        for pool in self._pools:
            pool.check()
            stats = pool.stats()
            assert stats.reserved_bytes == (
                stats.allocated_bytes + stats.in_flight_bytes + stats.idle_bytes + stats.private_bytes
            )
            pool.close()
        self.run_dry()
        with CachingAllocator(self.device, config=Config(backing=self.backing)) as other:
            other.stats()
        assert all(pool._growth.empty for pool in self._pools), "a closed pool kept memory"
        if isinstance(self.device, SimDevice):
            assert self.device.used_bytes == 0
            assert self.device.races == [] and self.device.violations == []


def _cuda() -> CudaDevice:
    try:
        return CudaDevice(0)
    except AllocatorError as error:
        pytest.skip(f"needs a GPU: {error}")


@pytest.fixture(params=["sim", "cuda"])
def device(request: pytest.FixtureRequest) -> Device:
    return SimDevice(memory=1 << 30) if request.param == "sim" else _cuda()


@pytest.fixture(params=["vmm", "malloc"])
def bench(request: pytest.FixtureRequest, device: Device) -> Iterator[Bench]:
    bench = Bench(device, request.param)
    yield bench
    bench.finish()


@pytest.fixture
def pool(bench: Bench) -> CachingAllocator:
    return bench.pool()

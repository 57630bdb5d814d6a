"""A simulated device and a pool whose end is judged."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from allocator import CachingAllocator, Config, SimDevice

MIB = 1 << 20
MakePool = Callable[..., CachingAllocator]


@pytest.fixture
def gpu() -> Iterator[SimDevice]:
    device = SimDevice(memory=256 * MIB)
    yield device
    assert device.races == [] and device.violations == []


@pytest.fixture
def make(gpu: SimDevice) -> Iterator[MakePool]:
    pools: list[CachingAllocator] = []

    def make(**options: Any) -> CachingAllocator:
        pools.append(CachingAllocator(gpu, config=Config(**options)))
        return pools[-1]

    yield make
    gpu.clear_faults()
    gpu.run_until_idle()
    gc.collect()
    for pool in pools:
        pool.check()


@pytest.fixture
def pool(make: MakePool) -> CachingAllocator:
    return make()

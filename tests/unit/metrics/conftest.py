"""A simulated device, a pool, a registry of its own, and no environment that changes them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from allocator import CachingAllocator, Config, SimDevice


@pytest.fixture(autouse=True)
def single_process_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpu() -> SimDevice:
    return SimDevice(memory=1 << 30)


@pytest.fixture
def pool(gpu: SimDevice) -> Iterator[CachingAllocator]:
    with CachingAllocator(gpu, config=Config(), name="main") as pool:
        yield pool


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()

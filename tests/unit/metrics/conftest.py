"""A simulated device, a pool, a registry of its own, and no environment that changes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry

from allocator import CachingAllocator, Config, SimDevice
from allocator.metrics import serve
from allocator.metrics.server import serving
from tests.unit.metrics.serving import NoHistory, Start, draw


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


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> NoHistory:
    """The live page is a cheap one."""
    history = NoHistory()
    monkeypatch.setattr(serving, "live_page", lambda pools: (history, draw))
    return history


@pytest.fixture
def start(history: NoHistory) -> Iterator[Start]:
    """start(pool, ...): a server on a free port, with a cheap page, closed at the end."""
    with ExitStack() as stack:
        yield lambda pool, **options: stack.enter_context(serve(pool, **{"port": 0, **options}))

"""A device and a pool whose end is judged (lab.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from allocator import CachingAllocator, SimDevice
from tests.scenarios.lab import Lab


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab()
    yield lab
    lab.finish()


@pytest.fixture
def gpu(lab: Lab) -> SimDevice:
    return lab.gpu()


@pytest.fixture
def pool(lab: Lab, gpu: SimDevice) -> CachingAllocator:
    return lab.pool(gpu)

"""A device and a pool whose end is judged (lab.py)."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from allocator import CachingAllocator, SimDevice
from tests.scenarios.lab import Lab


@pytest.fixture(autouse=True)
def _only_the_tests_own_garbage() -> Iterator[None]:
    """A pool collects garbage before it gives up, and so do these tests: what was imported need not be looked at."""
    gc.freeze()
    yield
    gc.unfreeze()


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

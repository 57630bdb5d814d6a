"""These tests make thousands of pools: what was there before them is not looked at by every garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.model.programs import forget_pools


@pytest.fixture(scope="module", autouse=True)
def _only_our_own_garbage() -> Iterator[None]:
    forget_pools()
    gc.freeze()
    yield
    gc.unfreeze()

"""These tests make thousands of pools, and say themselves when the garbage collector runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _collector_on_request() -> Iterator[None]:
    gc.freeze()  # what was there before is not looked at, nor finalised in the middle
    gc.disable()
    yield
    gc.collect()
    gc.enable()
    gc.unfreeze()

"""A pytest plugin: CuPy's own tests with Weir as CuPy's memory.  Load it with `-p`; see README.md.

CUPY_SUITE_POOLS=1 makes `cupy.cuda.MemoryPool` ours as well.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import cupy
import pytest

import allocator.cupy
from allocator import CachingAllocator, Config
from allocator.integrations.cupy import library
from allocator.integrations.cupy.hook import Hook
from allocator.integrations.cupy.lease import Route
from allocator.integrations.cupy.pool import MemoryPool


class OwnPool(MemoryPool):
    """What `cupy.cuda.MemoryPool()` makes in the second mode: a pool of its own a device, made at first use."""

    def __init__(self, allocator: Any = None) -> None:
        if allocator not in (None, cupy.cuda.memory._malloc):
            raise TypeError("Weir takes memory from the driver itself: a pool over another allocator is CuPy's own")
        self._routes: dict[int, Route] = {}
        hook = Hook(library.current_stream, lambda _: self._route(), null=library.Stream.null)
        super().__init__(lambda: self._route().pool, hook.malloc)

    def _route(self) -> Route:
        ordinal = library.current_device()
        route = self._routes.get(ordinal)
        if route is None:
            route = self._routes[ordinal] = Route(CachingAllocator(ordinal, config=Config()))
        return route


def pytest_configure(config: pytest.Config) -> None:
    allocator.cupy.install()
    if os.environ.get("CUPY_SUITE_POOLS") == "1":
        cupy.cuda.MemoryPool = cupy.cuda.memory.MemoryPool = OwnPool


@pytest.fixture(autouse=True)
def _weir_is_cupys_memory() -> Iterator[None]:
    allocator.cupy.install()
    yield
    for pool in allocator.cupy.pools().values():
        pool.check()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.collect()
    for pool in allocator.cupy.pools().values():
        pool.check()

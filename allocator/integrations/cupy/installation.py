"""Switching CuPy over to Weir, and back.

    install     CuPy's allocator and its default pool are ours; one pool a device, made at first use
    uninstall   both are what they were; live arrays stay valid, and go back to the pool that made them

Rule: the process has one installation, as CuPy has one allocator.  What a program did before still holds: limits set
on CuPy's pool or in `CUPY_GPU_MEMORY_LIMIT`, an allocator that it chose itself after us.
Next: hook.py (the hot path), watch.py (the streams).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from allocator.caching import CachingAllocator
from allocator.config import Config
from allocator.devices import CudaDevice, Device
from allocator.integrations.cupy import library
from allocator.integrations.cupy.hook import Hook
from allocator.integrations.cupy.lease import HOOKS, Latest, Route
from allocator.integrations.cupy.memory import Memory
from allocator.integrations.cupy.pool import MemoryPool
from allocator.integrations.cupy.watch import Classes, Watch
from allocator.streams import Registry


class Installation:
    """The state of this process.  classes: what is watched; CuPy's own by default."""

    def __init__(self, classes: Classes) -> None:
        self._lock = threading.RLock()
        self._routes: dict[int, Route] = {}
        self._made: set[int] = set()
        """Devices whose pool is ours, not the user's."""
        self._past: list[CachingAllocator] = []
        """Pools of earlier installations that still had memory with arrays."""
        self._before: tuple[Any, Any] | None = None
        """(allocator, default pool) that CuPy had before; None while not installed."""
        self._simulated: Device | None = None
        self.hook = Hook(library.current_stream, self._route_of, null=library.Stream.null)
        self.malloc = self.hook.malloc
        """CuPy's allocator: one object for the life of the process."""
        self.face = MemoryPool(self.pool_now, self.malloc)
        self._latest = Latest()
        self.watch = Watch(
            classes,
            self._device_of,
            lambda: self._device_of(self.hook.current_stream()),
            library.captures_are_known,
            self._memory_hooks_are_in_use,
            self._latest,
        )
        self.hook.before_any = self.watch.catch_up

    # -- on and off --------------------------------------------------------------------------------

    def install(
        self, pool: CachingAllocator | None = None, *, current_stream: Callable[[], Any] | None = None
    ) -> CachingAllocator:
        """See `allocator.cupy.install`."""
        if pool is not None and not isinstance(pool, CachingAllocator):
            raise TypeError(f"install takes a CachingAllocator or None, not {type(pool).__name__}")
        if current_stream is not None and not callable(current_stream):
            raise TypeError("current_stream must be callable and return the stream to allocate on")
        with self._lock:
            before = (self.hook.current_stream, self._simulated, self.hook.only, dict(self._routes), set(self._made))
            try:
                if current_stream is not None:
                    self.hook.current_stream = current_stream
                if pool is not None:
                    self._use(pool)
                elif self._simulated is None:
                    library.device_count()  # says in one sentence what is missing
                result = pool if pool is not None else self.pool_now()
                self.watch.start()
                first = self._before is None
                found = (library.get_allocator(), library.default_pool())
                library.set_allocator(self.malloc)  # ValueError inside `using_allocator`
            except BaseException:
                self.hook.current_stream, self._simulated, only, self._routes, self._made = before
                self.hook.serve(only)
                raise
            if first:
                self._before = found
            library.set_default_pool(self.face)
            return result

    def _use(self, pool: CachingAllocator) -> None:
        ordinal = pool.device.ordinal
        self._retire(ordinal)
        self._routes[ordinal] = route = Route(pool, self._latest)
        self._simulated = pool.device if pool.device.simulated else None
        only = len(self._routes) == 1 if self._simulated is not None else library.device_count() == 1
        self.hook.serve(route if only else None)

    def _retire(self, ordinal: int) -> None:
        """Another pool takes this one's place; its arrays stay with it."""
        route = self._routes.pop(ordinal, None)
        self.hook.serve(None)
        if route is None:
            return
        self._past.append(route.pool)
        if ordinal in self._made:
            self._made.discard(ordinal)
            route.pool.close()

    def uninstall(self) -> None:
        """See `allocator.cupy.uninstall`."""
        with self._lock:
            if self._before is not None:
                allocator, pool = self._before
                if library.get_allocator() == self.malloc:
                    library.set_allocator(allocator)  # ValueError inside `using_allocator`: nothing has changed yet
                if library.default_pool() is self.face:
                    library.set_default_pool(pool)
                self._before = None
            for ordinal in list(self._routes):
                self._retire(ordinal)
            self._simulated = None
            self.hook.current_stream = library.current_stream
            self._past = [pool for pool in self._past if not _at_rest(pool)]
            if not self._past:  # else a stream that nobody saw could use an array of ours
                self.watch.stop()

    @property
    def installed(self) -> bool:
        """Is CuPy's allocator ours?"""
        return self._before is not None

    # -- which pool --------------------------------------------------------------------------------

    def pools(self) -> dict[int, CachingAllocator]:
        """The pools in use, by device ordinal."""
        with self._lock:
            return {ordinal: route.pool for ordinal, route in sorted(self._routes.items())}

    def pool_now(self) -> CachingAllocator:
        """The current device's pool, made at first use."""
        only = self.hook.only
        return (only if only is not None else self._route(self._device_now())).pool

    def _device_now(self) -> int:
        return self._simulated.ordinal if self._simulated is not None else library.current_device()

    def _ordinal_of(self, stream: Any) -> int:
        ordinal = getattr(stream, "device_id", -1)  # -1: legacy, per-thread and borrowed streams, of the current device
        return ordinal if isinstance(ordinal, int) and ordinal >= 0 else self._device_now()

    def _device_of(self, stream: Any) -> Device | None:
        try:
            ordinal = self._ordinal_of(stream)
        except Exception:  # CuPy cannot tell: no driver
            return None
        route = self._routes.get(ordinal)
        if route is not None:
            return route.pool.device
        for pool in self._past:  # switched off, and arrays of ours are still alive: their streams are watched on
            if pool.device.ordinal == ordinal:
                return pool.device
        return self._simulated if self._simulated is not None else CudaDevice(ordinal)

    def _route_of(self, stream: Any) -> Route:
        if not self.watch.on:
            self.watch.start()  # used by name, without `install`
        return self._route(self._ordinal_of(stream))

    def _route(self, ordinal: int) -> Route:
        route = self._routes.get(ordinal)
        if route is None:
            with self._lock:
                route = self._routes.get(ordinal)
                if route is None:
                    device = CudaDevice(ordinal)
                    pool = CachingAllocator(device, self._config(device), name=f"cupy:{ordinal}")
                    route = Route(pool, self._latest)
                    self._made.add(ordinal)
                    self._routes[ordinal] = route
                    if library.device_count() == 1:
                        self.hook.serve(route)
        return route

    def _config(self, device: Device) -> Config:
        """`WEIR_*`, and where that names no limit, the one that CuPy's own pool has."""
        config = Config.from_env(device_memory=device.total_memory)
        if config.limit:
            return config
        size, share = library.limit_setting(os.environ)
        limit = size if size is not None else int(share * device.total_memory) if share is not None else 0
        if not limit and ordinal_is_current(device.ordinal):
            pool = self._before[1] if self._before is not None else library.default_pool()
            limit = int(pool.get_limit()) if pool is not self.face else 0
        return replace(config, limit=limit) if limit else config

    def _memory_hooks_are_in_use(self) -> None:
        """From now on each allocation looks for them, in this process.

        No lock: a finaliser may use one, inside any section of ours, and so may a child after a fork.
        """
        HOOKS.seen = True
        self.hook.alone = None

    # -- what users call on arrays -----------------------------------------------------------------

    def record_stream(self, array: object, stream: object) -> None:
        """See `allocator.cupy.record_stream`."""
        memory = library.memory_of(array)
        if not isinstance(memory, Memory):
            raise ValueError(
                f"the array's memory is not Weir's but a {type(memory).__name__}: it was made before install(), or by "
                "another allocator, which has its own rules"
            )
        lease = memory.lease
        if memory.ptr and lease is not None:
            lease.route.pool.declare_use(lease, stream)


def ordinal_is_current(ordinal: int) -> bool:
    """Is it the calling thread's current device?"""
    try:
        return library.current_device() == ordinal
    except Exception:  # CuPy cannot tell: no driver
        return False


def _at_rest(pool: CachingAllocator) -> bool:
    """Does no array hold memory of the pool any more, and no graph?"""
    try:
        pool.stats()  # graphs that have gone are noted, and what is over is found out
        captures = Registry.of(pool.device).captures
        return pool.allocated_bytes == 0 and not captures.active and not captures.numbers
    except Exception:  # forked: nothing here will be used again
        return True

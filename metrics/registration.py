"""`register` and `unregister`: one collector a registry, which pools join and leave.

Two collectors in one registry would clash: prometheus_client refuses the second, and scrapers do not read a family
that is explained twice.  So a registry's collector is remembered here, weakly.
Next: collector.py.
"""

from __future__ import annotations

import os
import threading
import weakref

from prometheus_client import REGISTRY, CollectorRegistry

from allocator import CachingAllocator
from allocator.metrics.collector import AllocatorCollector, check_mode

_lock = threading.RLock()
"""Held while a registry is asked to take a collector; a registry never calls us back but for `describe`."""

_of_registry: weakref.WeakKeyDictionary[CollectorRegistry, AllocatorCollector] = weakref.WeakKeyDictionary()


def register(
    pool: CachingAllocator,
    registry: CollectorRegistry = REGISTRY,
    *,
    per_stream: bool = False,
    own_port: bool = False,
) -> AllocatorCollector:
    """Export a pool's metrics through `registry`; returns the registry's collector.  Twice is harmless.

    The pool is held weakly, and leaves by itself when it is closed or dies.
    per_stream: also three gauges a stream, of 33 names at most.
    own_port: see AllocatorCollector.  Raises MultiprocessModeError, PoolClosed, TypeError; ValueError if the
    registry holds another collector of the same metrics.

    >>> import allocator, prometheus_client
    >>> registry = prometheus_client.CollectorRegistry()
    >>> pool = allocator.CachingAllocator(allocator.SimDevice(), config=allocator.Config(), name="demo")
    >>> collector = register(pool, registry)
    >>> register(pool, registry) is collector, collector.pools == [pool]
    (True, True)
    """
    check_mode(own_port)
    with _lock:
        known = _of_registry.get(registry)
        collector = AllocatorCollector(own_port=own_port) if known is None else known
        collector.add(pool, per_stream=per_stream)
        try:
            registry.register(collector)
        except ValueError as error:
            if known is None:
                raise ValueError(
                    f"the registry has another collector of these metrics ({error}); "
                    "unregister that one, or add the pool to it with its add()"
                ) from error
            # Ours is there already; if the program had unregistered it, it is there again.
        _of_registry[registry] = collector
    return collector


def unregister(pool: CachingAllocator, registry: CollectorRegistry = REGISTRY) -> None:
    """Stop exporting a pool through `registry`.  Harmless if it was not exported."""
    with _lock:
        collector = _of_registry.get(registry)
    if collector is not None:
        collector.remove(pool)


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

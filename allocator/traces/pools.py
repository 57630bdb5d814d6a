"""The pools that a replay allocates from: one for all streams, or one for each.

Rule: `per-stream` is what libraries do that keep a cache a stream: the same pool, but nothing that was
freed on one stream ever serves another.  The caches share the device and the limit, and as such
libraries do, all are emptied before a request is refused.

Next: replay.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from allocator.allocation import Allocation
from allocator.caching import CachingAllocator
from allocator.config import REUSE_KINDS, Config
from allocator.devices import Device
from allocator.errors import OutOfMemoryError
from allocator.streams import Stream

POLICIES: Final = ("weir", "per-stream")
_SHARED: Final = -1


def gauges(pool: CachingAllocator) -> tuple[int, int]:
    """(reserved, in flight) bytes of a pool, as it knows them at this moment.

    Not `stats()`: that asks the driver how far the streams are, and asking changes what is reused.
    """
    return pool.reserved_bytes, pool.in_flight_bytes


class Pools:
    """Allocates for numbered streams under a policy, and keeps the sums over all its pools.

    reserved, in_flight: bytes now.  peak_reserved, peak_in_flight: the most seen since the beginning.
    """

    def __init__(self, device: Device, policy: str, config: Config) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown policy {policy!r}; known: {', '.join(POLICIES)}")
        self._device = device
        self._per_stream = policy == "per-stream"
        self._config = config
        self._pools: dict[int, CachingAllocator] = {}
        self._seen: dict[int, tuple[int, int]] = {}  # (reserved, in flight) as last added to the sums
        self._limits: dict[int, int] = {}
        self.reserved = self.in_flight = self.peak_reserved = self.peak_in_flight = 0

    def _key(self, number: int) -> int:
        return number if self._per_stream else _SHARED

    def _pool(self, key: int) -> CachingAllocator:
        pool = self._pools.get(key)
        if pool is None:
            # A limit is a matter of all caches together: see _leave_what_others_left.
            config = replace(self._config, limit=0) if self._per_stream else self._config
            name = f"replay, stream {key}" if self._per_stream else "replay"
            pool = self._pools[key] = CachingAllocator(self._device, config=config, name=name)
            self._seen[key] = (0, 0)
        return pool

    def allocate(self, nbytes: int, number: int, stream: Stream) -> Allocation:
        """Memory for stream `number`.  Raises OutOfMemoryError."""
        key = self._key(number)
        pool = self._pool(key)
        try:
            if self._per_stream and self._config.limit:
                self._leave_what_others_left(key)
            return pool.allocate(nbytes, stream=stream)
        except OutOfMemoryError:
            if not self._per_stream:
                raise
            for other, cache in self._pools.items():
                cache.trim()
                self.look(other)
            if self._config.limit:
                self._leave_what_others_left(key)
            return pool.allocate(nbytes, stream=stream)
        finally:
            self._look(key, pool)

    def _leave_what_others_left(self, key: int) -> None:
        left = max(self._config.limit - (self.reserved - self._seen[key][0]), 1)
        if self._limits.get(key) != left:
            self._pools[key].set_limit(left)
            self._limits[key] = left

    def look(self, number: int) -> None:
        """Bring the sums up to date after something happened in stream `number`'s pool.  No driver call."""
        key = self._key(number) if number != _SHARED else number
        self._look(key, self._pools[key])

    def _look(self, key: int, pool: CachingAllocator) -> None:
        before = self._seen[key]
        now = gauges(pool)
        if now == before:
            return
        self._seen[key] = now
        self.reserved += now[0] - before[0]
        self.in_flight += now[1] - before[1]
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)

    def totals(self) -> dict[str, Any]:
        """What the pools have counted, by the names of `Result`: the counters added up, and the peaks.

        Asks the driver, so only at the end.  A pool knows its own peaks best; of several only the sums that
        were seen from outside, after each call, are peaks at one moment.
        """
        every = [pool.stats() for pool in self._pools.values()]
        if len(every) == 1:
            self.peak_reserved = max(self.peak_reserved, every[0].peak_reserved_bytes)
            self.peak_in_flight = max(self.peak_in_flight, every[0].peak_in_flight_bytes)
        return {
            "peak_reserved_bytes": self.peak_reserved,
            "peak_in_flight_bytes": self.peak_in_flight,
            "reuse": {kind: sum(stats.allocations.get(kind, 0) for stats in every) for kind in REUSE_KINDS},
            "stream_waits": sum(stats.stream_waits for stats in every),
            "event_records": sum(stats.event_records for stats in every),
            "event_queries": sum(stats.event_queries for stats in every),
        }

    def check(self) -> None:
        """Walk every pool; AssertionError if one contradicts itself."""
        for pool in self._pools.values():
            pool.check()

    def close(self) -> None:
        """Close every pool."""
        for pool in self._pools.values():
            pool.close()

"""What a pool says about itself: plain numbers, consistent in themselves, read under one short lock.

The fields are the metric names without `weir_` and `_total`; labelled ones are dicts.  Sizes are bytes, times
seconds.  One identity always holds:

    reserved_bytes = allocated_bytes + in_flight_bytes + idle_bytes + private_bytes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

REQUEST_BUCKETS: Final = tuple(512 << (2 * i) for i in range(14))
"""Upper bounds of the request-size histogram in bytes: 512 B to 32 GiB, times four."""

SECONDS_BUCKETS: Final = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 60.0)
"""Upper bounds of the histograms of times, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Histogram(Mapping[float, int]):
    """Upper bound -> count of values up to it and above the bound before; `inf` is the last.  `sum` of all values."""

    counts: Mapping[float, int]
    sum: float

    def __getitem__(self, bound: float) -> int:
        return self.counts[bound]

    def __iter__(self) -> Iterator[float]:
        return iter(self.counts)

    def __len__(self) -> int:
        return len(self.counts)


@dataclass(frozen=True, kw_only=True)
class Stats:
    """A pool's statistics at one moment; see the names in docs/concepts.md."""

    allocated_bytes: int
    """Held by callers, after rounding."""
    requested_bytes: int
    """What those callers asked for."""
    reserved_bytes: int
    """Held from the driver."""
    in_flight_bytes: int
    """Freed, not yet known to be finished: an upper bound, brought up to date by reading it."""
    idle_bytes: int
    """Safe for any stream at once."""
    private_bytes: int
    """Idle for one graph's private pool only."""
    largest_free_block_bytes: int
    """The biggest single idle block."""
    releasable_bytes: int
    """Idle in pieces that could go back to the driver now."""
    stranded_bytes: int
    """Idle in pieces that are partly used."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_in_flight_bytes: int
    limit_bytes: int
    """The configured cap, 0 = none."""
    device_free_bytes: int
    """The driver's view when it was last asked (at growth, or -1 before)."""
    device_size_bytes: int
    external_fragmentation_ratio: float
    """1 - largest free block / idle; 0 if nothing is idle."""
    internal_fragmentation_ratio: float
    """1 - requested / allocated."""
    blocks: Mapping[str, int]
    """By state: live, retired, idle."""
    segments: int
    streams: int
    """Streams known in the context that have not ended."""
    device_lost: int
    """1 once a sticky error has ended the device's context: the figures stay, every allocation fails (R11)."""
    poisoned_streams: int
    orphaned_bytes: int
    """In flight behind streams that can no longer be marked (R9)."""
    events: Mapping[str, int]
    """Driver events by state: idle, in_use."""
    pending_frees: int
    """Frees queued and not yet seen to."""
    oldest_in_flight_seconds: float
    allocations: Mapping[str, int]
    """By reuse kind; of size > 0."""
    allocation_bytes: Mapping[str, int]
    frees: Mapping[str, int]
    """same_stream, cross_stream: did the stamp name another user?"""
    growths: int
    growth_bytes: int
    releases: Mapping[str, int]
    """By reason."""
    release_bytes: Mapping[str, int]
    page_moves: int
    page_move_bytes: int
    out_of_memory: int
    out_of_memory_retries: Mapping[str, int]
    """Allocations saved, by the step of the ladder that saved them."""
    stream_waits: int
    event_records: int
    event_queries: int
    host_synchronizations: int
    block_splits: int
    block_merges: int
    driver_seconds: Mapping[str, float]
    """Time inside slow driver calls, by call."""
    request_size_bytes: Histogram
    in_flight_seconds: Histogram
    """Slow path only: blocks that other streams had to wait for."""
    growth_seconds: Histogram
    stream_allocated_bytes: Mapping[str, int]
    stream_in_flight_bytes: Mapping[str, int]
    stream_idle_bytes: Mapping[str, int]
    """By the stream's name or number, at most 32, the rest under `other`; empty unless asked for."""

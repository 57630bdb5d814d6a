"""Every metric there is: name, type, unit, labels, and the sentence that explains it.

Rule: a metric's value is the field of `Stats` with the same name, without `weir_` and `_total`; a labelled one is a
dict there.  So this table and `Stats` can be compared, and a test does.
Next: collector.py, which fills it in.  For people: docs/metrics.md.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

PREFIX: Final = "weir_"
COMMON: Final = ("pool", "device")
"""The labels of every series."""


class Type(enum.Enum):
    """What kind of metric it is, in Prometheus's words."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True)
class Spec:
    """One metric.  name: without prefix, counters with `_total`.  label: the one beside pool and device."""

    name: str
    type: Type
    help: str
    label: str | None = None

    @property
    def field(self) -> str:
        """Where `Stats` has it."""
        return self.name.removesuffix("_total")

    @property
    def family(self) -> str:
        """The family's name in OpenMetrics: without the suffixes that its type implies."""
        return PREFIX + self.name.removesuffix("_total").removesuffix("_info")

    @property
    def unit(self) -> str:
        """The base unit, which ends the family's name; "" for plain numbers."""
        last = self.family.rpartition("_")[2]
        return last if last in ("bytes", "seconds", "ratio") else ""

    @property
    def labels(self) -> tuple[str, ...]:
        """All label names."""
        return COMMON if self.label is None else (*COMMON, self.label)


def _gauge(name: str, text: str, label: str | None = None) -> Spec:
    return Spec(name, Type.GAUGE, text, label)


def _counter(name: str, text: str, label: str | None = None) -> Spec:
    return Spec(f"{name}_total", Type.COUNTER, text, label)


def _histogram(name: str, text: str) -> Spec:
    return Spec(name, Type.HISTOGRAM, text)


POOL: Final = (
    _gauge("allocated_bytes", "Bytes held by callers, after rounding."),
    _gauge("requested_bytes", "Bytes that those callers asked for."),
    _gauge("reserved_bytes", "Bytes held from the driver: allocated, in flight, idle and private together."),
    _gauge("in_flight_bytes", "Bytes freed and not yet known to be finished on the device; an upper bound."),
    _gauge("idle_bytes", "Bytes that any stream can take at once."),
    _gauge("private_bytes", "Idle bytes that only one graph's private pool can take."),
    _gauge("largest_free_block_bytes", "The biggest single idle block."),
    _gauge("releasable_bytes", "Idle bytes in pieces that could go back to the driver now."),
    _gauge("stranded_bytes", "Idle bytes in pieces that are partly used, and so cannot go back."),
    _gauge("peak_allocated_bytes", "The most that allocated bytes have been, since the start or the last reset."),
    _gauge("peak_reserved_bytes", "The most that reserved bytes have been, since the start or the last reset."),
    _gauge("peak_in_flight_bytes", "The most that bytes in flight have been, since the start or the last reset."),
    _gauge("limit_bytes", "What reserved bytes never grow past; 0 means no limit."),
    _gauge("device_free_bytes", "Free memory of the device when the driver was last asked, as the pool last grew."),
    _gauge("device_size_bytes", "Memory of the device."),
    _gauge("external_fragmentation_ratio", "1 - largest free block / idle bytes; 0 if nothing is idle."),
    _gauge("internal_fragmentation_ratio", "1 - requested / allocated bytes; 0 if nothing is allocated."),
    _gauge("blocks", "Blocks by state: live, retired (freed, in flight), idle.", "state"),
    _gauge("segments", "Pieces of memory held from the driver."),
    _gauge("streams", "Streams known on the device that have not ended."),
    _gauge("device_lost", "1 once the device's context is lost: every allocation fails until the process restarts."),
    _gauge("poisoned_streams", "Streams whose progress can no longer be known after an error."),
    _gauge("orphaned_bytes", "Bytes in flight behind streams that nobody can mark any more."),
    _gauge("events", "Driver events by state: idle, in_use.", "state"),
    _gauge("pending_frees", "Frees that are queued and not yet seen to."),
    _gauge("oldest_in_flight_seconds", "Age of the oldest block in flight; 0 if there is none."),
    _counter("allocations", "Allocations, by what made their memory safe to use.", "reuse"),
    _counter("allocation_bytes", "Bytes allocated, by what made their memory safe to use.", "reuse"),
    _counter("frees", "Frees, by whether a stream other than the owner had used the memory.", "kind"),
    _counter("growths", "Times that memory was taken from the driver."),
    _counter("growth_bytes", "Bytes taken from the driver."),
    _counter("releases", "Pieces of memory given back to the driver, by reason.", "reason"),
    _counter("release_bytes", "Bytes given back to the driver, by reason.", "reason"),
    _counter("page_moves", "Idle pages moved to lie together."),
    _counter("page_move_bytes", "Bytes of idle pages moved to lie together."),
    _counter("out_of_memory", "Out-of-memory errors raised to the caller."),
    _counter("out_of_memory_retries", "Allocations that were saved from such an error, by the step that did.", "step"),
    _counter("stream_waits", "Waits put on a stream, for memory that another stream had not finished with."),
    _counter("event_records", "Events recorded."),
    _counter("event_queries", "Events and streams asked whether they are done."),
    _counter("host_synchronizations", "Waits of the host for the device."),
    _counter("block_splits", "Blocks cut in two."),
    _counter("block_merges", "Neighbouring blocks joined."),
    _counter("driver_seconds", "Time inside slow driver calls, by call.", "call"),
    _histogram("request_size_bytes", "Sizes asked for."),
    _histogram("in_flight_seconds", "How long memory that other streams had to wait for was in flight."),
    _histogram("growth_seconds", "Time to take one piece of memory from the driver."),
)
"""Read from `pool.stats()`."""

STREAMS: Final = (
    _gauge("stream_allocated_bytes", "Bytes held by callers, by the stream they were allocated on.", "stream"),
    _gauge("stream_in_flight_bytes", "Bytes in flight, by the stream they were allocated on.", "stream"),
    _gauge(
        "stream_idle_bytes",
        "Idle bytes, by the stream they were last allocated on where that is still known.",
        "stream",
    ),
)
"""Likewise, only where asked for."""

SCRAPE_FAILURES: Final = _counter("scrape_failures", "Scrapes that could not read this pool and left its figures out.")
BUILD_INFO: Final = Spec("build_info", Type.INFO, "What is running: for joins.")
BUILD_LABELS: Final = ("version", "python", "accelerated", "backing")

ALL: Final = (*POOL, *STREAMS, SCRAPE_FAILURES, BUILD_INFO)
"""The whole list, in the order in which it is written out."""

"""Every panel of the Grafana dashboard: the question, the expression, and what to do about the answer.

Rule: the description is read by somebody who has just been woken: what it shows, what is bad, what to do then.
Rows: at a glance; the memory of each pool; allocations and what safety costs; streams and sizes; the inside.
A test holds that every metric of catalogue.py is on a panel.  Next: grafana.py, which turns this into JSON.
"""

from __future__ import annotations

from typing import Final

from allocator.metrics.dashboards.grafana import Panel, Query, Row

BY: Final = "sum by (pool, device)"
CROSS: Final = 'reuse=~"event_dependency|opportunistic|internal_dependency"'
NAME: Final = "{{pool}} {{device}}"


def _gauge(metric: str, legend: str, color: str = "", *, limit: bool = False) -> Query:
    """A gauge, summed over processes."""
    return Query(f"{BY} (weir_{metric}{{s}})", f"{NAME} {legend}", color=color, limit=limit)


def _rate(metric: str, legend: str, *, by: str = "", unit: str = "") -> Query:
    """A counter by the second."""
    labels = f", {by}" if by else ""
    return Query(
        f"sum by (pool, device{labels}) (rate(weir_{metric}_total{{s}}[$__rate_interval]))",
        f"{NAME} {legend}" if legend else f"{NAME} {{{{{by}}}}}",
        unit=unit,
    )


def _quantile(q: float, metric: str, legend: str) -> Query:
    return Query(
        f"histogram_quantile({q}, sum by (pool, device, le) (rate(weir_{metric}_bucket{{s}}[$__rate_interval])))",
        f"{NAME} {legend}",
    )


def _by_stream(kind: str, legend: str) -> Query:
    return Query(f"sum by (pool, device, stream) (weir_stream_{kind}_bytes{{s}})", legend, instant=True)


GLANCE: Final = Row(
    "At a glance",
    (
        Panel(
            "Could be given back now",
            "What pool.trim() would return to the driver at once, for other pools and processes. 0 with much idle "
            "memory: it lies in partly used pieces (see Free memory).",
            "stat",
            (Query(f"{BY} (weir_releasable_bytes{{s}})", NAME),),
            "bytes",
            6,
            5,
        ),
        Panel(
            "Share used of what may be",
            "Allocated and in flight, against the limit, or against the device where there is none; the highest of "
            "the processes. Above 90 %: allocations will soon wait, then fail. See which of the two grows below.",
            "stat",
            (
                Query(
                    "max by (pool, device) ((weir_allocated_bytes{s} + weir_in_flight_bytes{s}) / "
                    "((weir_limit_bytes{s} > 0) or weir_device_size_bytes{s}))",
                    NAME,
                ),
            ),
            "percentunit",
            6,
            5,
            steps=((0.75, "orange"), (0.9, "red")),
        ),
        Panel(
            "Allocations saved by reuse across streams",
            "A second, served from memory that another stream had used. One pool for each stream would have had to "
            "take new memory, or fail.",
            "stat",
            (Query(f"{BY} (rate(weir_allocations_total{{s, {CROSS}}}[$__rate_interval]))", NAME),),
            "ops",
            6,
            5,
        ),
        Panel(
            "Oldest memory in flight",
            "How long ago the oldest block was freed whose work is not known to be finished. Minutes mean that a "
            "stream stands still: see Streams for which, and Trouble below.",
            "stat",
            (Query("max by (pool, device) (weir_oldest_in_flight_seconds{s})", NAME),),
            "s",
            6,
            5,
            steps=((60, "orange"), (300, "red")),
        ),
        Panel(
            "Out-of-memory errors",
            "Raised to the program in the time shown. The error's text says what pins the memory; raise the limit, "
            "free or synchronise earlier.",
            "stat",
            (Query(f"{BY} (increase(weir_out_of_memory_total{{s}}[$__range]))", NAME),),
            "short",
            6,
            4,
            steps=((1, "red"),),
        ),
        Panel(
            "Trouble",
            "Devices lost: restart the process. Poisoned streams: find the first CUDA error in the log, then "
            "pool.abandon(stream) or restart. Unreadable: the program's log has a warning that says why.",
            "stat",
            (
                Query("max by (pool, device) (weir_device_lost{s})", f"{NAME} device lost"),
                Query("max by (pool, device) (weir_poisoned_streams{s})", f"{NAME} poisoned streams"),
                Query(f"{BY} (increase(weir_scrape_failures_total{{s}}[$__range]))", f"{NAME} scrapes unreadable"),
            ),
            "short",
            18,
            4,
            steps=((1, "red"),),
        ),
    ),
)

MEMORY: Final = Row(
    "Memory of $pool",
    (
        Panel(
            "Reserved memory, by what it is",
            "The coloured areas add up to what is held from the driver. Allocated: the program has it. In flight: "
            "freed, work not finished. Idle: any stream can have it. Much idle for long: pool.trim(). Much in flight: "
            "work is queued far ahead, or a stream stands still.",
            "timeseries",
            (
                _gauge("allocated_bytes", "allocated", "blue"),
                _gauge("in_flight_bytes", "in flight", "orange"),
                _gauge("idle_bytes", "idle", "green"),
                _gauge("private_bytes", "private to graphs", "purple"),
                _gauge("reserved_bytes", "reserved", "text", limit=True),
                Query(f"{BY} (weir_limit_bytes{{s}} > 0)", f"{NAME} limit", color="red", limit=True),
                _gauge("device_size_bytes", "device size", "semi-dark-red", limit=True),
            ),
            "bytes",
            height=10,
            stacked=True,
        ),
        Panel(
            "Asked for, and allocated",
            "The gap is rounding up: weir_internal_fragmentation_ratio. Peaks are since the start or "
            "pool.reset_peaks(): they tell which limit the program would have needed.",
            "timeseries",
            (
                _gauge("requested_bytes", "requested", "light-blue"),
                _gauge("allocated_bytes", "allocated", "blue"),
                _gauge("peak_allocated_bytes", "peak allocated", "blue", limit=True),
                _gauge("peak_reserved_bytes", "peak reserved", "text", limit=True),
                _gauge("peak_in_flight_bytes", "peak in flight", "orange", limit=True),
            ),
            "bytes",
            height=10,
        ),
        Panel(
            "Fragmentation",
            "External: the share of idle memory outside the largest free block; near 1 with much idle memory, large "
            "requests take new memory. Internal: lost to rounding up; high with many requests below 512 bytes.",
            "timeseries",
            (
                Query("max by (pool, device) (weir_external_fragmentation_ratio{s})", f"{NAME} external"),
                Query("max by (pool, device) (weir_internal_fragmentation_ratio{s})", f"{NAME} internal"),
            ),
            "percentunit",
            most=1,
            steps=((0.8, "red"),),
        ),
        Panel(
            "Free memory",
            "Idle memory, its largest piece, and how it splits: releasable could go back to the driver, stranded lies "
            "in pieces that are partly used. Much stranded: small allocations that live long lie between large ones.",
            "timeseries",
            (
                _gauge("idle_bytes", "idle", "green"),
                _gauge("largest_free_block_bytes", "largest free block", "dark-green"),
                _gauge("releasable_bytes", "releasable", "blue"),
                _gauge("stranded_bytes", "stranded", "orange"),
            ),
            "bytes",
        ),
    ),
    repeat="pool",
)

WORK: Final = Row(
    "Allocations, and what safety costs",
    (
        Panel(
            "Allocations a second, by what made their memory safe",
            "new_memory in a steady state means that the pool grows: see Growth. internal_dependency means that a "
            "stream was made to wait because growing was impossible. The line is the share that needed no new memory.",
            "timeseries",
            (
                _rate("allocations", "", by="reuse"),
                Query(
                    f'1 - {BY} (rate(weir_allocations_total{{s, reuse="new_memory"}}[$__rate_interval])) / '
                    f"({BY} (rate(weir_allocations_total{{s}}[$__rate_interval])) > 0)",
                    f"{NAME} without new memory",
                    unit="percentunit",
                ),
            ),
            "ops",
            stacked=True,
        ),
        Panel(
            "Waits, queries and records a second",
            "What safety across streams costs. Stream waits stall a stream; host synchronisations stall the program; "
            "queries and records cost the host about a microsecond each. Waits that keep coming: the limit is too "
            "low.",
            "timeseries",
            (
                _rate("stream_waits", "stream waits"),
                _rate("host_synchronizations", "host synchronisations"),
                _rate("event_queries", "event queries"),
                _rate("event_records", "event records"),
            ),
            "ops",
        ),
        Panel(
            "Time in flight",
            "How long memory that other streams had to wait for was in flight. A p99 near the length of a step is "
            "usual for work queued ahead; beyond it, some stream falls behind. No line: nobody had to wait.",
            "timeseries",
            (_quantile(0.5, "in_flight_seconds", "p50"), _quantile(0.99, "in_flight_seconds", "p99")),
            "s",
        ),
        Panel(
            "Out-of-memory retries, by the step that helped",
            "Allocations saved from an error: each of them slowed the program down. Many: raise the limit, make "
            "batches smaller, or synchronise before the peak.",
            "timeseries",
            (
                Query(
                    "sum by (pool, device, step) (increase(weir_out_of_memory_retries_total{s}[$__rate_interval]))",
                    f"{NAME} {{{{step}}}}",
                ),
                Query(
                    f"{BY} (increase(weir_out_of_memory_total{{s}}[$__rate_interval]))", f"{NAME} raised", color="red"
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Growth and release",
            "Bytes a second from the driver, and back to it by reason. Both at once, again and again: the limit or "
            "the trim is too eager, and each turn costs driver time (next panel).",
            "timeseries",
            (_rate("growth_bytes", "growth"), _rate("release_bytes", "", by="reason")),
            "Bps",
        ),
        Panel(
            "Time inside slow driver calls",
            "Seconds a second, by call, and how long one growth takes. More than a few percent in a steady state: the "
            "pool takes and gives back the same memory.",
            "timeseries",
            (
                _rate("driver_seconds", "", by="call"),
                Query(
                    "histogram_quantile(0.99, "
                    "sum by (pool, device, le) (rate(weir_growth_seconds_bucket{s}[$__rate_interval])))",
                    f"{NAME} one growth, p99",
                    unit="s",
                ),
            ),
            "percentunit",
        ),
    ),
)

STREAMS: Final = Row(
    "Streams and sizes",
    (
        Panel(
            "Streams that hold most memory",
            "By the stream the memory was allocated on, most in flight first. Empty: register the pool with "
            "per_stream=True. Give streams names: allocator.Stream(gpu, name='copy').",
            "table",
            (
                _by_stream("in_flight", "In flight"),
                _by_stream("allocated", "Allocated"),
                _by_stream("idle", "Idle"),
            ),
            "bytes",
        ),
        Panel(
            "In flight, by stream",
            "The ten streams that hold most memory in flight. One that only grows stands still: what was it given "
            "last?",
            "timeseries",
            (
                Query(
                    "topk(10, sum by (pool, device, stream) (weir_stream_in_flight_bytes{s}))",
                    f"{NAME} {{{{stream}}}}",
                ),
            ),
            "bytes",
        ),
        Panel(
            "Sizes asked for",
            "How many requests fell into which size. Two bands far apart share a pool badly only where small ones "
            "live long: see Free memory, stranded.",
            "heatmap",
            (
                Query(
                    "sum by (le) (increase(weir_request_size_bytes_bucket{s}[$__rate_interval]))",
                    "{{le}}",
                    heatmap=True,
                ),
            ),
            "short",
            24,
        ),
    ),
)

INSIDE: Final = Row(
    "Inside the pool",
    (
        Panel(
            "Blocks and segments",
            "Blocks by state, and pieces held from the driver. Blocks that only grow in number: fragmentation, or a "
            "leak.",
            "timeseries",
            (
                Query("sum by (pool, device, state) (weir_blocks{s})", f"{NAME} {{{{state}}}}"),
                _gauge("segments", "segments"),
            ),
        ),
        Panel(
            "Streams, events, queued frees",
            "Streams that only grow in number are never closed. Queued frees are seen to by the next call of the "
            "pool: many that stay mean that the program allocates no more.",
            "timeseries",
            (
                _gauge("streams", "streams"),
                Query("sum by (pool, device, state) (weir_events{s})", f"{NAME} events {{{{state}}}}"),
                _gauge("pending_frees", "queued frees"),
            ),
        ),
        Panel(
            "Churn a second",
            "Splits and merges, growths and releases, pages moved, frees by whether another stream had used the "
            "memory.",
            "timeseries",
            (
                _rate("block_splits", "splits"),
                _rate("block_merges", "merges"),
                _rate("growths", "growths"),
                _rate("releases", "", by="reason"),
                _rate("page_moves", "page moves"),
                _rate("frees", "", by="kind"),
            ),
            "ops",
        ),
        Panel(
            "Bytes a second",
            "Allocated, by what made the memory safe, and moved to lie together.",
            "timeseries",
            (_rate("allocation_bytes", "", by="reuse"), _rate("page_move_bytes", "moved")),
            "Bps",
        ),
        Panel(
            "Memory that is stuck or not ours",
            "Orphaned: in flight behind streams that nobody can mark; pass stream objects, not bare handles. Device "
            "free: what the driver said when the pool last grew; if it falls while reserved does not, somebody else "
            "takes it.",
            "timeseries",
            (_gauge("orphaned_bytes", "orphaned", "red"), _gauge("device_free_bytes", "device free", "green")),
            "bytes",
        ),
    ),
    collapsed=True,
)

ROWS: Final = (GLANCE, MEMORY, WORK, STREAMS, INSIDE)
"""The dashboard from top to bottom."""

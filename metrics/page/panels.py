"""The panels over time, 1 to 8: one data source, to which each sample adds a row.

Rule: a row is sent once.  All panels share the source and the range of time; which of it is in sight is the browser's
business.  Rates are differences over the time they took.
Next: heatmap.py, address_map.py; history.py for the columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from bokeh.models import ColumnDataSource, DataRange1d, LogScale, Range1d
from bokeh.plotting import figure

from allocator.metrics.history import COLUMNS, REUSE, STEPS
from allocator.metrics.page.looks import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    hover,
    legend,
    right_axis,
    time_figure,
)

_GAUGES: Final = (
    "allocated_bytes",
    "requested_bytes",
    "reserved_bytes",
    "in_flight_bytes",
    "idle_bytes",
    "private_bytes",
    "largest_free_block_bytes",
    "releasable_bytes",
    "external_fragmentation_ratio",
    "internal_fragmentation_ratio",
    "in_flight_p50",
    "in_flight_p99",
    *(f"retry_{step}" for step in STEPS),
    "out_of_memory",
)
_RATES: Final = (
    *(f"reuse_{kind}" for kind in REUSE),
    "growth_bytes",
    "release_bytes",
    "stream_waits",
    "event_records",
    "event_queries",
)
SENT: Final = ("number", "time", *_GAUGES, *_RATES, "limit", "device", "served", "given_back")
"""Columns of the source.  time: milliseconds.  limit, device: NaN where there is none.  served: share of allocations
that needed no new memory.  given_back: released, below zero."""

Rows = dict[str, npt.NDArray[np.float64]]

REUSE_LOOKS: Final = {
    "same_stream": ("same stream", BLUE),
    "event_dependency": ("already waited for", SKY),
    "opportunistic": ("work was finished", GREEN),
    "internal_dependency": ("made to wait", PURPLE),
    "new_memory": ("new memory", ORANGE),
}
"""Reuse kinds, as the tables name them."""
STEP_LOOKS: Final = {
    "internal_dependency": ("made to wait", PURPLE),
    "move": ("pages moved", SKY),
    "release": ("idle memory released", GREEN),
    "host_wait": ("waited on the host", BLUE),
    "callback": ("callback", GREY),
    "collect": ("garbage collected", ORANGE),
}


def rows_of(columns: Mapping[str, Sequence[float]]) -> Rows:
    """Samples of a history as rows of the source."""
    if not columns:
        columns = dict.fromkeys(COLUMNS, ())
    given = {name: np.asarray(values, dtype=float) for name, values in columns.items()}
    seconds = given["seconds"]
    rows: Rows = {"number": given["number"], "time": given["time"] * 1000}
    rows |= {name: given[name] for name in _GAUGES}
    per_second = np.divide(1.0, seconds, out=np.zeros_like(seconds), where=seconds > 0)
    rows |= {name: given[name] * per_second for name in _RATES}
    rows["limit"] = np.where(given["limit_bytes"] > 0, given["limit_bytes"], np.nan)
    rows["device"] = np.where(given["device_size_bytes"] > 0, given["device_size_bytes"], np.nan)
    everything = np.sum([given[f"reuse_{kind}"] for kind in REUSE], axis=0)
    share = np.full_like(seconds, np.nan)
    rows["served"] = np.divide(everything - given["reuse_new_memory"], everything, out=share, where=everything > 0)
    rows["given_back"] = -rows["release_bytes"]
    return rows


class TimePanels:
    """The source and its figures, by name."""

    def __init__(self, rows: Rows, keep: int, window_s: float) -> None:
        self.keep = keep
        self.source = ColumnDataSource(rows, name="timeline")
        end = rows["time"][-1] if len(rows["time"]) else 0.0
        self.x_range = Range1d(end - window_s * 1000, end, name="window")
        self.figures: tuple[figure, ...] = (
            self._memory(),
            self._requested(),
            self._fragmentation(),
            self._largest(),
            self._reuse(),
            self._cost(),
            self._in_flight(),
            self._growth(),
            self._retries(),
        )

    def add(self, rows: Rows) -> None:
        """Send new rows, and only these."""
        if len(rows["time"]):
            self.source.stream({name: values.tolist() for name, values in rows.items()}, rollover=self.keep)

    def replace(self, rows: Rows) -> None:
        """Another pool: everything is new."""
        self.source.data = dict(rows)

    # -- the figures ----------------------------------------------------------------------------

    def _figure(self, name: str, unit: str, label: str, y_range: Any = None) -> figure:
        return time_figure(name, self.x_range, unit=unit, label=label, y_range=y_range)

    def _line(self, plot: figure, column: str, color: str, text: str = "", **looks: Any) -> Any:
        labelled = {"legend_label": text} if text else {}
        return plot.line("time", column, source=self.source, color=color, **({"line_width": 2} | labelled | looks))

    def _stack(self, plot: figure, looks: Iterable[tuple[str, str, str]]) -> None:
        columns, labels, colors = zip(*looks, strict=True)
        plot.varea_stack(
            list(columns), x="time", color=list(colors), legend_label=list(labels), source=self.source, fill_alpha=0.85
        )

    def _memory(self) -> figure:
        plot = self._figure("memory", "bytes", "memory")
        self._stack(
            plot,
            (
                ("allocated_bytes", "allocated", BLUE),
                ("in_flight_bytes", "in flight", ORANGE),
                ("idle_bytes", "idle", GREEN),
                ("private_bytes", "private", PURPLE),
            ),
        )
        reserved = self._line(plot, "reserved_bytes", GREY, "reserved")
        # Far above what is used, these two would flatten everything else: shown where they come into sight.
        plot.y_range.renderers = [reserved]
        self._line(plot, "limit", RED, "limit", line_dash="dashed")
        self._line(plot, "device", GREY, "device", line_dash="dotted")
        hover(
            plot,
            reserved,
            [
                ("allocated", "allocated_bytes", "bytes"),
                ("in flight", "in_flight_bytes", "bytes"),
                ("idle", "idle_bytes", "bytes"),
                ("reserved", "reserved_bytes", "bytes"),
                ("limit", "limit", "bytes"),
                ("device", "device", "bytes"),
            ],
        )
        legend(plot)
        return plot

    def _requested(self) -> figure:
        plot = self._figure("requested", "bytes", "memory")
        allocated = self._line(plot, "allocated_bytes", BLUE, "allocated")
        self._line(plot, "requested_bytes", ORANGE, "requested", line_dash="dashed")
        hover(plot, allocated, [("allocated", "allocated_bytes", "bytes"), ("requested", "requested_bytes", "bytes")])
        legend(plot)
        return plot

    def _fragmentation(self) -> figure:
        plot = self._figure("fragmentation", "share", "share", Range1d(0, 1.02))
        external = self._line(plot, "external_fragmentation_ratio", BLUE, "external")
        self._line(plot, "internal_fragmentation_ratio", ORANGE, "internal")
        hover(
            plot,
            external,
            [
                ("external", "external_fragmentation_ratio", "share"),
                ("internal", "internal_fragmentation_ratio", "share"),
            ],
        )
        legend(plot)
        return plot

    def _largest(self) -> figure:
        plot = self._figure("largest", "bytes", "memory")
        self._stack(plot, (("idle_bytes", "idle", GREEN),))
        largest = self._line(plot, "largest_free_block_bytes", BLUE, "largest free block")
        self._line(plot, "releasable_bytes", ORANGE, "could be given back", line_dash="dashed")
        hover(
            plot,
            largest,
            [
                ("idle", "idle_bytes", "bytes"),
                ("largest free block", "largest_free_block_bytes", "bytes"),
                ("could be given back", "releasable_bytes", "bytes"),
            ],
        )
        legend(plot)
        return plot

    def _reuse(self) -> figure:
        plot = self._figure("reuse", "per_second", "allocations a second")
        self._stack(plot, ((f"reuse_{kind}", text, color) for kind, (text, color) in REUSE_LOOKS.items()))
        plot.extra_y_ranges = {"share": Range1d(0, 1.02)}
        right_axis(plot, "share", unit="share", label="without new memory", color=RED)
        served = self._line(plot, "served", RED, "without new memory", y_range_name="share", line_dash="dashed")
        plot.y_range.renderers = [one for one in plot.renderers if one is not served]
        hover(
            plot,
            served,
            [
                *((text, f"reuse_{kind}", "rate") for kind, (text, _) in REUSE_LOOKS.items()),
                ("without new memory", "served", "share"),
            ],
        )
        legend(plot)
        return plot

    def _cost(self) -> figure:
        plot = self._figure("cost", "per_second", "a second")
        queries = self._line(plot, "event_queries", SKY, "queries")
        self._line(plot, "event_records", GREEN, "events recorded")
        self._line(plot, "stream_waits", RED, "waits put on streams")
        hover(
            plot,
            queries,
            [
                ("queries", "event_queries", "rate"),
                ("events recorded", "event_records", "rate"),
                ("waits", "stream_waits", "rate"),
            ],
        )
        legend(plot)
        return plot

    def _in_flight(self) -> figure:
        plot = self._figure("in-flight", "seconds", "time in flight", DataRange1d(range_padding=0.2))
        plot.y_scale = LogScale()
        median = self._line(plot, "in_flight_p50", BLUE, "p50")
        self._line(plot, "in_flight_p99", ORANGE, "p99")
        hover(plot, median, [("p50", "in_flight_p50", "seconds"), ("p99", "in_flight_p99", "seconds")])
        legend(plot)
        return plot

    def _growth(self) -> figure:
        plot = self._figure("growth", "bytes_per_second", "memory a second", DataRange1d(range_padding=0.1))
        grown = self._line(plot, "growth_bytes", ORANGE, "taken from the driver")
        self._line(plot, "given_back", GREEN, "given back")
        hover(
            plot,
            grown,
            [("taken", "growth_bytes", "bytes_per_second"), ("given back", "release_bytes", "bytes_per_second")],
        )
        legend(plot)
        return plot

    def _retries(self) -> figure:
        plot = self._figure(
            "retries", "count", "allocations saved", DataRange1d(start=0, range_padding=0.1, min_interval=1)
        )
        self._stack(plot, ((f"retry_{step}", text, color) for step, (text, color) in STEP_LOOKS.items()))
        errors = self._line(plot, "out_of_memory", RED, "errors raised")
        hover(
            plot,
            errors,
            [
                *((text, f"retry_{step}", "count") for step, (text, _) in STEP_LOOKS.items()),
                ("errors raised", "out_of_memory", "count"),
            ],
        )
        legend(plot)
        return plot

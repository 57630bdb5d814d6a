"""The panels over time, 1 to 8: one data source, to which each sample adds a row.

Rule: a row is sent once, and the source holds no more rows than the window of time that is shown: what a browser does
a second grows with them.  All panels share the source.  Rates are differences over the time they took.
Next: heatmap.py, address_map.py; history.py for the columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from bokeh.models import ColumnDataSource, DataRange1d, Line, Plot, Range1d, Stack, VArea

from allocator.metrics.history import COLUMNS, REUSE, STEPS
from allocator.metrics.page.looks import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, Looks, legend

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
)
_EVENTS: Final = (*(f"retry_{step}" for step in STEPS), "out_of_memory")
_RATES: Final = (
    *(f"reuse_{kind}" for kind in REUSE),
    "growth_bytes",
    "release_bytes",
    "stream_waits",
    "event_records",
    "event_queries",
)
SENT: Final = ("number", "time", *_GAUGES, *_EVENTS, *_RATES, "limit", "device", "served", "given_back")
"""Columns of the source.  time: milliseconds.  limit, device: NaN where there is none.  served: share of allocations
that needed no new memory.  given_back: released, below zero."""


@dataclass(frozen=True)
class Series:
    """What is drawn of one column.  kind: area (stacked), line or dashed."""

    column: str
    text: str
    color: str
    format: str
    kind: str = "line"
    y_range: str = ""


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


def rows_of(columns: Mapping[str, Sequence[float]], step: int = 1) -> Rows:
    """Samples of a history as rows of the source, one for each `step` samples; what is left over comes later.

    A row shows its fullest sample, the mean of its rates, and all of its events.  Which samples make a row depends on
    their numbers alone, so that it is the same whenever the page is opened.
    """
    if not columns or step > 1:
        columns = _complete(columns, step)
    given = {name: np.asarray(values, dtype=float) for name, values in columns.items()}
    if step > 1 and len(given["number"]):
        given = _joined(given, step)
    seconds = given["seconds"]
    rows: Rows = {"number": given["number"], "time": given["time"] * 1000}
    rows |= {name: given[name] for name in _GAUGES + _EVENTS}
    per_second = np.divide(1.0, seconds, out=np.zeros_like(seconds), where=seconds > 0)
    rows |= {name: given[name] * per_second for name in _RATES}
    rows["limit"] = np.where(given["limit_bytes"] > 0, given["limit_bytes"], np.nan)
    rows["device"] = np.where(given["device_size_bytes"] > 0, given["device_size_bytes"], np.nan)
    everything = np.sum([given[f"reuse_{kind}"] for kind in REUSE], axis=0)
    share = np.full_like(seconds, np.nan)
    rows["served"] = np.divide(everything - given["reuse_new_memory"], everything, out=share, where=everything > 0)
    rows["given_back"] = -rows["release_bytes"]
    return rows


def _complete(columns: Mapping[str, Sequence[float]], step: int) -> dict[str, Sequence[float]]:
    """Only the samples of rows that are complete."""
    if not columns:
        return dict.fromkeys(COLUMNS, ())
    numbers = columns["number"]
    first = next((at for at, number in enumerate(numbers) if (number - 1) % step == 0), len(numbers))
    length = (len(numbers) - first) // step * step
    return {name: values[first : first + length] for name, values in columns.items()}


def _joined(given: Rows, step: int) -> Rows:
    """Each `step` samples as one."""
    parts = {name: values.reshape(-1, step) for name, values in given.items()}
    fullest = np.argmax(parts["reserved_bytes"] - parts["idle_bytes"], axis=1)
    at = np.arange(len(fullest))
    joined = {name: values[at, fullest] for name, values in parts.items()}
    joined |= {name: parts[name].sum(axis=1) for name in ("seconds", *_EVENTS, *_RATES)}
    joined |= {name: parts[name][:, -1] for name in ("number", "time", "in_flight_p50", "in_flight_p99")}
    return joined


def _stack(columns: Sequence[str]) -> Any:
    """The sum of some columns; shared by the area below and the one above."""
    return {"expr": Stack(fields=list(columns))}


class TimePanels:
    """The source and its figures, each with its legend, by name."""

    def __init__(self, looks: Looks, rows: Rows, keep: int) -> None:
        self.keep = keep
        """Rows that the source holds at most."""
        self.source = ColumnDataSource(rows, name="timeline")
        self.legends: dict[str, str] = {}
        self._looks = looks
        self.figures: tuple[Plot, ...] = (
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

    def replace(self, rows: Rows, keep: int) -> None:
        """Another pool or window: everything is new."""
        self.keep = keep
        self.source.data = dict(rows)

    # -- the figures ----------------------------------------------------------------------------

    def _draw(self, plot: Plot, series: Iterable[Series]) -> list[Any]:
        """Draw the series, the areas on top of each other, with legend and tooltip; returns the lines."""
        series = list(series)
        below = _stack(())
        fields: list[str] = []
        for area in (one for one in series if one.kind == "area"):
            fields.append(area.column)
            above = _stack(fields)
            self._looks.glyph(
                plot, self.source, VArea(x="time", y1=below, y2=above, fill_color=area.color, fill_alpha=0.85)
            )
            below = above
        lines = [
            self._looks.glyph(
                plot,
                self.source,
                Line(
                    x="time",
                    y=one.column,
                    line_color=one.color,
                    line_width=2,
                    line_dash="dashed" if one.kind == "dashed" else "solid",
                ),
                **({"y_range_name": one.y_range} if one.y_range else {}),
            )
            for one in series
            if one.kind != "area"
        ]
        self._looks.hover(plot, lines[0], [(one.text, one.column, one.format) for one in series])
        self.legends[plot.name] = legend((one.text, one.color, one.kind) for one in series)
        return lines

    def _memory(self) -> Plot:
        plot = self._looks.over_time("memory", unit="bytes", label="memory")
        lines = self._draw(
            plot,
            (
                Series("allocated_bytes", "allocated", BLUE, "bytes", "area"),
                Series("in_flight_bytes", "in flight", ORANGE, "bytes", "area"),
                Series("idle_bytes", "idle", GREEN, "bytes", "area"),
                Series("private_bytes", "private", PURPLE, "bytes", "area"),
                Series("reserved_bytes", "reserved", GREY, "bytes"),
                Series("limit", "limit", RED, "bytes", "dashed"),
                Series("device", "device", SKY, "bytes", "dashed"),
            ),
        )
        # Far above what is used, the last two would flatten everything else: shown where they come into sight.
        plot.y_range.renderers = [lines[0]]
        return plot

    def _requested(self) -> Plot:
        plot = self._looks.over_time("requested", unit="bytes", label="memory")
        self._draw(
            plot,
            (
                Series("allocated_bytes", "allocated", BLUE, "bytes"),
                Series("requested_bytes", "requested", ORANGE, "bytes", "dashed"),
            ),
        )
        return plot

    def _fragmentation(self) -> Plot:
        plot = self._looks.over_time("fragmentation", unit="share", label="share", y_range=Range1d(0, 1.02))
        self._draw(
            plot,
            (
                Series("external_fragmentation_ratio", "external", BLUE, "share"),
                Series("internal_fragmentation_ratio", "internal", ORANGE, "share"),
            ),
        )
        return plot

    def _largest(self) -> Plot:
        plot = self._looks.over_time("largest", unit="bytes", label="memory")
        self._draw(
            plot,
            (
                Series("idle_bytes", "idle", GREEN, "bytes", "area"),
                Series("largest_free_block_bytes", "largest free block", BLUE, "bytes"),
                Series("releasable_bytes", "could be given back", ORANGE, "bytes", "dashed"),
            ),
        )
        return plot

    def _reuse(self) -> Plot:
        plot = self._looks.over_time("reuse", unit="number", label="allocations a second")
        plot.extra_y_ranges = {"share": Range1d(0, 1.02)}
        self._looks.axis(plot, "right", unit="share", label="without new memory", range_name="share")
        lines = self._draw(
            plot,
            (
                *(Series(f"reuse_{kind}", text, hue, "number", "area") for kind, (text, hue) in REUSE_LOOKS.items()),
                Series("served", "without new memory", RED, "share", "dashed", "share"),
            ),
        )
        plot.y_range.renderers = [one for one in plot.renderers if one is not lines[0]]
        return plot

    def _cost(self) -> Plot:
        plot = self._looks.over_time("cost", unit="number", label="a second")
        self._draw(
            plot,
            (
                Series("event_queries", "queries", SKY, "number"),
                Series("event_records", "events recorded", GREEN, "number"),
                Series("stream_waits", "waits put on streams", RED, "number"),
            ),
        )
        return plot

    def _in_flight(self) -> Plot:
        plot = self._looks.over_time(
            "in-flight", unit="seconds", label="time in flight", y_range=Range1d(8e-6, 80), log=True
        )
        self._draw(
            plot,
            (Series("in_flight_p50", "p50", BLUE, "seconds"), Series("in_flight_p99", "p99", ORANGE, "seconds")),
        )
        return plot

    def _growth(self) -> Plot:
        plot = self._looks.over_time(
            "growth", unit="bytes_per_second", label="memory a second", y_range=DataRange1d(range_padding=0.1)
        )
        self._draw(
            plot,
            (
                Series("growth_bytes", "taken from the driver", ORANGE, "bytes_per_second"),
                Series("given_back", "given back", GREEN, "bytes_per_second"),
            ),
        )
        return plot

    def _retries(self) -> Plot:
        y_range = DataRange1d(start=0, range_padding=0.1, min_interval=1)
        plot = self._looks.over_time("retries", unit="count", label="allocations", y_range=y_range)
        self._draw(
            plot,
            (
                *(Series(f"retry_{step}", text, hue, "number", "area") for step, (text, hue) in STEP_LOOKS.items()),
                Series("out_of_memory", "errors raised", RED, "number"),
            ),
        )
        return plot

"""Panel 10: request sizes over time, as cells of some seconds by a factor of four.

Rule: cells that are full are sent once; only those of the newest seconds are patched.
Next: address_map.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from bokeh.models import ColorBar, ColumnDataSource, FixedTicker, HoverTool, LinearColorMapper, Quad, Range1d
from bokeh.palettes import Cividis256

from allocator.metrics.history import SIZES
from allocator.metrics.page.looks import Looks
from allocator.sizes import format_size

CELLS: Final = 30
"""In a window of time, side by side."""
LEAST_CELL_S: Final = 2.0
ROWS: Final = len(SIZES)


def size_label(at: int) -> str:
    """The sizes of a row: above the bound before, up to this one.

    >>> size_label(0), size_label(1), size_label(14)
    ('up to 512 B', 'up to 2 KiB', 'above 32 GiB')
    """
    return f"above {whole(SIZES[at - 1])}" if SIZES[at] == math.inf else f"up to {whole(SIZES[at])}"


def whole(nbytes: float) -> str:
    """A power of two in its unit: 2 KiB."""
    return format_size(int(nbytes)).replace(".00", "")


class Heatmap:
    """The source of cells, `ROWS` for each piece of time, and its figure."""

    def __init__(self, columns: Mapping[str, Sequence[float]], window_s: float, looks: Looks) -> None:
        self._cell_s = max(LEAST_CELL_S, window_s / CELLS)
        self._counts: dict[int, list[float]] = {}
        """The newest cells, by their number since 1970."""
        self.source = ColumnDataSource(self._take(columns), name="cells")
        plot = looks.over_time("sizes", unit="size", label="request size", y_range=Range1d(0, ROWS))
        mapper = LinearColorMapper(palette=list(Cividis256[48:]), low=0.0, high=5.0, nan_color="rgba(0, 0, 0, 0)")
        cells = looks.glyph(
            plot,
            self.source,
            Quad(
                left="left",
                right="right",
                bottom="bottom",
                top="top",
                fill_color={"field": "shade", "transform": mapper},
                line_color=None,
            ),
        )
        plot.yaxis.ticker = FixedTicker(ticks=list(range(1, ROWS, 3)))
        plot.yaxis.major_label_overrides = {at: whole(SIZES[at - 1]) for at in range(1, ROWS, 3)}
        plot.center = []
        plot.add_layout(
            ColorBar(
                color_mapper=mapper,
                width=8,
                padding=4,
                ticker=FixedTicker(ticks=[0, 1, 2, 3, 4, 5]),
                major_label_overrides={at: text for at, text in enumerate(("1", "10", "100", "1k", "10k", "100k"))},
                title="requests",
                background_fill_alpha=0,
            ),
            "right",
        )
        plot.add_tools(
            HoverTool(
                renderers=[cells],
                tooltips=[("", "@left{custom}"), ("size", "@size"), ("requests", "@count{0,0}")],
                formatters={"@left": looks.tips("clock")},
            )
        )
        self.figure = plot

    def add(self, columns: Mapping[str, Sequence[float]]) -> None:
        """Count new samples: patches the newest cells, and streams those that begin."""
        known = set(self._counts)
        fresh = self._take(columns)
        if not len(fresh["count"]):
            return
        old = np.isin(fresh["cell"], list(known)) if known else np.zeros(len(fresh["cell"]), bool)
        if old.any():
            self._patch({name: values[old] for name, values in fresh.items()})
        if not old.all():
            self.source.stream(
                {name: values[~old].tolist() for name, values in fresh.items()}, rollover=(CELLS + 2) * ROWS
            )

    def replace(self, columns: Mapping[str, Sequence[float]], window_s: float) -> None:
        """Another pool or window: everything is new."""
        self._cell_s = max(LEAST_CELL_S, window_s / CELLS)
        self._counts.clear()
        self.source.data = self._take(columns)

    def _patch(self, cells: Mapping[str, Any]) -> None:
        length = len(self.source.data["cell"])
        where: dict[int, int] = {}
        for at in range(max(0, length - 2 * ROWS), length, ROWS):
            where[int(self.source.data["cell"][at])] = at
        patches: dict[str, list[tuple[int, float]]] = {"count": [], "shade": []}
        for cell, row, count, shade in zip(cells["cell"], cells["row"], cells["count"], cells["shade"], strict=True):
            start = where.get(int(cell))
            if start is not None:
                patches["count"].append((start + int(row), float(count)))
                patches["shade"].append((start + int(row), float(shade)))
        self.source.patch(patches)

    def _take(self, columns: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """Add samples to the counts; the cells that they touched, as rows of the source."""
        touched: dict[int, list[float]] = {}
        if columns:
            numbers = np.floor(np.asarray(columns["time"]) / self._cell_s).astype(np.int64)
            sizes = np.array([columns[f"size_{at}"] for at in range(ROWS)], dtype=float)
            for number in np.unique(numbers):
                counts = sizes[:, numbers == number].sum(axis=1)
                before = self._counts.get(int(number))
                touched[int(number)] = list(counts if before is None else counts + before)
        self._counts |= touched
        for number in sorted(self._counts)[:-2]:  # time never goes back: nothing is added to those any more
            del self._counts[number]
        cell = np.repeat(np.array(list(touched), dtype=float), ROWS)
        row = np.tile(np.arange(ROWS, dtype=float), len(touched))
        count = np.array([value for values in touched.values() for value in values], dtype=float)
        with np.errstate(divide="ignore"):
            shade = np.where(count > 0, np.log10(count), np.nan)
        return {
            "cell": cell,
            "row": row,
            "left": cell * self._cell_s * 1000,
            "right": (cell + 1) * self._cell_s * 1000,
            "bottom": row + 0.04,
            "top": row + 0.96,
            "count": count,
            "shade": shade,
            "size": np.array([size_label(int(at)) for at in row], dtype=object),
        }

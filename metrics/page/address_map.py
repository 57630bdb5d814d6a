"""Panel 11, the address map: every block at its address, coloured by stream and state.

How it is laid out: the segments lie end to end, in address order, and are wrapped into rows like text.

Rules:

* The browser is sent what the blocks are, in a few bytes each, and only the columns that changed.  It paints them as
  one picture, of the part that is in sight and in its screen's own pixels (map.js): tens of thousands of rectangles
  were most of what an update cost it, and half of what it cost here.
* Blocks fill their segments, so a block's place and its address follow from the sizes before it and are not sent.

Next: map.js; ../history.py, `AddressMap`; document.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    CustomJS,
    CustomJSHover,
    FixedTicker,
    HoverTool,
    ImageRGBA,
    PanTool,
    Range1d,
    ResetTool,
)

from allocator.metrics.history import AddressMap
from allocator.metrics.page.looks import BLUE, HUES, ORANGE, Looks, legend

MOST: Final = 50_000
"""Blocks that are drawn one by one; beyond it, neighbours of one stream and state are drawn as one."""
ROWS: Final = (8, 40)
"""The row length stays as it is while there are so many rows."""
LEAST_ROW: Final = 2 << 20
HEIGHT: Final = 460
COLUMNS: Final = ("size", "state", "stream", "count")
"""Of a block.  size: bytes.  state: index into `AddressMap.STATES`.  stream: its number.  count: of blocks drawn as
one."""
IDLE: Final = "#c3c7cc"
"""As the page has it in light; map.js takes the page's own."""


def paler(color: str) -> str:
    """Half-way to white.

    >>> paler("#000080")
    '#8080c0'
    """
    return "#" + "".join(f"{(int(color[at : at + 2], 16) + 256) // 2:02x}" for at in (1, 3, 5))


BY_STREAM: Final = (IDLE, *HUES, *(paler(hue) for hue in HUES))
"""Colours: of idle blocks, of live ones by their stream's number, of those in flight."""
LEGEND: Final = (
    f'<span class="by-stream">{legend((("live", BLUE, "area"), ("in flight: paler", paler(BLUE), "area")))}'
    '<span class="entry">the colour is the stream\'s, as in the table above</span></span>'
    f'<span class="by-state">{legend((("live", BLUE, "area"), ("in flight", ORANGE, "area")))}</span>'
    + legend((("idle", "var(--idle)", "area"),))
)
BY_STATE: Final = (IDLE, *([BLUE] * len(HUES)), *([ORANGE] * len(HUES)))


@dataclass(frozen=True)
class Layout:
    """What is drawn: a block, or several that are drawn as one, for each row of the columns."""

    row_bytes: int
    rows: int
    columns: dict[str, npt.NDArray[Any]]
    segments: dict[str, npt.NDArray[np.float64]]
    """address and size of each, in bytes."""
    names: dict[str, list[Any]]
    """number and name of the streams that have one."""
    row_starts: Sequence[int]
    """The address of each row's first byte."""
    merged: bool
    """Were there too many blocks to draw each?"""


def row_length(total: int, before: int = 0) -> int:
    """Bytes in a row: a power of two, such that there are about twenty rows; as before while that still does."""
    if before and ROWS[0] <= -(-total // before) <= ROWS[1]:
        return before
    length = LEAST_ROW
    while total > 24 * length:
        length *= 2
    return length


def compact(values: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """The same numbers in as few bytes as hold them all, of the kinds that a browser has.

    >>> compact(np.array([0, 255])).dtype, compact(np.array([1 << 33])).dtype
    (dtype('uint8'), dtype('float64'))
    """
    if not len(values):
        return values.astype(np.uint8)
    least, most = int(values.min()), int(values.max())
    for kind in (np.uint8, np.uint16, np.uint32, np.int32):
        if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max:
            return values.astype(kind)
    return values.astype(np.float64)


def lay_out(shown: AddressMap, row_bytes: int = 0) -> Layout:
    """A map as columns.  row_bytes: of the layout before, which is kept if it still does."""
    address = np.frombuffer(shown.address, dtype=np.uint64) if len(shown.address) else np.zeros(0, np.uint64)
    size = np.array(shown.size, dtype=np.int64)
    state = np.array(shown.state, dtype=np.int64)
    stream = np.array(shown.stream, dtype=np.int64)
    count = np.ones(len(size), dtype=np.int64)
    segment_sizes = np.array([nbytes for _, nbytes in shown.segments], dtype=np.int64)
    starts = np.array([at for at, _ in shown.segments], dtype=np.uint64)
    merged = len(size) > MOST
    if merged:
        first = np.ones(len(size), dtype=bool)
        first[1:] = (state[1:] != state[:-1]) | (stream[1:] != stream[:-1]) | np.isin(address[1:], starts)
        heads = np.flatnonzero(first)
        size, count = np.add.reduceat(size, heads), np.add.reduceat(count, heads)
        state, stream = state[heads], stream[heads]
    total = int(size.sum())
    row_bytes = row_length(total, row_bytes)
    rows = max(1, -(-total // row_bytes))
    at = np.arange(rows) * row_bytes
    ends = np.cumsum(segment_sizes)
    before = np.clip(np.searchsorted(ends, at, side="right"), 0, max(0, len(starts) - 1))
    base = ends - segment_sizes
    row_starts = [int(starts[s]) + int(a - base[s]) for s, a in zip(before, at, strict=True)] if len(starts) else [0]
    values = {"size": size, "state": state, "stream": stream, "count": count}
    return Layout(
        row_bytes=row_bytes,
        rows=rows,
        columns={name: compact(values[name]) for name in COLUMNS},
        segments={"address": starts.astype(float), "size": segment_sizes.astype(float)},
        names={"number": list(shown.names), "name": list(shown.names.values())},
        row_starts=row_starts,
        merged=merged,
    )


class MapPanel:
    """What the browser knows of the blocks, and the figure that shows the picture it paints of them."""

    def __init__(self, looks: Looks) -> None:
        self._row_bytes = self._rows = 0
        self.source = ColumnDataSource(_empty(COLUMNS), name="blocks")
        self._segments = ColumnDataSource(_empty(("address", "size")), name="segments")
        self._names = ColumnDataSource({"number": [], "name": []}, name="stream-names")
        # The browser's own; one pixel of nothing, so that it has an array of the right kind to begin with.
        picture = {"image": [np.zeros((1, 1), np.uint32)], "x": [0.0], "y": [0.0], "dw": [1.0], "dh": [1.0]}
        self._picture = ColumnDataSource(picture, name="picture")
        plot = looks.plain(
            "map",
            height=HEIGHT,
            x_range=Range1d(0, LEAST_ROW, reset_start=0, reset_end=LEAST_ROW),
            y_range=Range1d(1, 0, reset_start=1, reset_end=0),
            label="address",
            unit="nothing",
        )
        plot.center = []
        looks.axis(plot, "below", unit="bytes", label="from the start of the row")
        plot.toolbar_location = "right"
        plot.toolbar.logo = None
        painted = looks.glyph(plot, self._picture, ImageRGBA(image="image", x="x", y="y", dw="dw", dh="dh"))
        hover = HoverTool(
            renderers=[painted],
            tooltips=[(what, f"$x{{{what}}}") for what in ("address", "size", "state", "stream", "blocks")],
            formatters={"$x": CustomJSHover(code="return weir.map.tell(format, special_vars.x, special_vars.y);")},
        )
        plot.add_tools(hover, PanTool(), BoxZoomTool(), ResetTool())
        plot.toolbar.active_drag = None  # so that a finger scrolls the page
        self.figure = plot
        self.paint = CustomJS(
            args={
                "plot": plot,
                "blocks": self.source,
                "segments": self._segments,
                "names": self._names,
                "picture": self._picture,
                "looks": {"states": list(AddressMap.STATES), "palettes": [list(BY_STREAM), list(BY_STATE)]},
            },
            code="weir.map.show({plot, blocks, segments, names, picture, looks});",
        )
        """In the browser: paint the picture anew, soon."""
        for source in (self.source, self._segments, self._names):
            source.js_on_change("data", self.paint)
        for range_ in (plot.x_range, plot.y_range):
            for end in ("start", "end"):
                range_.js_on_change(end, self.paint)
        for side in ("inner_width", "inner_height"):
            plot.js_on_change(side, self.paint)

    def show(self, shown: AddressMap | None) -> None:
        """Bring the panel up to date, sending what has changed."""
        if shown is None:
            return
        layout = lay_out(shown, self._row_bytes)
        _send(self.source, layout.columns)
        _send(self._segments, layout.segments)
        _send(self._names, layout.names)
        self._frame(layout)

    def clear(self) -> None:
        """Another pool: nothing is known of it yet."""
        self._row_bytes = self._rows = 0
        _send(self.source, _empty(COLUMNS))
        _send(self._segments, _empty(("address", "size")))

    def _frame(self, layout: Layout) -> None:
        """Axes, where they have changed."""
        plot = self.figure
        if layout.row_bytes != self._row_bytes:
            self._row_bytes = layout.row_bytes
            plot.x_range.update(start=0, end=layout.row_bytes, reset_start=0, reset_end=layout.row_bytes)
            eighth = layout.row_bytes // 8
            pages = layout.row_bytes // LEAST_ROW
            plot.xaxis.ticker = FixedTicker(
                ticks=[at * eighth for at in range(9)],
                minor_ticks=[at * LEAST_ROW for at in range(pages)] if pages <= 64 else [],
            )
        if layout.rows != self._rows:  # and not what is in sight: who has zoomed in stays there
            self._rows = layout.rows
            plot.y_range.update(start=layout.rows, end=0, reset_start=layout.rows, reset_end=0)
        step = max(1, -(-layout.rows // 12))
        labels = {at + 0.5: f"{layout.row_starts[at]:#x}" for at in range(0, layout.rows, step)}
        axis = plot.yaxis[0]
        if axis.major_label_overrides != labels:
            axis.ticker = FixedTicker(ticks=list(labels), minor_ticks=[])
            axis.major_label_overrides = labels


def _send(source: ColumnDataSource, columns: dict[str, Any]) -> None:
    """The columns that are not as they were; all of them where their length has changed."""
    old = source.data
    changed = {name: values for name, values in columns.items() if not np.array_equal(old[name], values)}
    if any(len(values) != len(old[name]) for name, values in changed.items()):
        source.data = dict(columns)
    elif changed:
        old.update(changed)


def _empty(names: Sequence[str]) -> dict[str, Any]:
    return {name: np.zeros(0, np.uint8) for name in names}

"""Panel 11, the address map: every block at its address, coloured by stream and state.

How it is laid out: the segments lie end to end, in address order, and are wrapped into rows like text.  A block is one
rectangle, or up to three where it goes over the end of a row.

Rule: a rectangle keeps its place in the data source for as long as it is shown, so that only what changed since the
last map is sent.  Where most of it changed (another row length, a segment in between), all of it goes, as flat binary
columns: that is then the smaller message.
Next: ../history.py, `AddressMap`; document.py.
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
    CustomJSHover,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    PanTool,
    Range1d,
    ResetTool,
)
from bokeh.plotting import figure

from allocator.metrics.history import AddressMap
from allocator.metrics.page.looks import BLUE, HUES, ORANGE, Looks, legend

MOST: Final = 50_000
"""Blocks that are drawn one by one; beyond it, neighbours of one stream and state are drawn as one."""
ROWS: Final = (8, 40)
"""The row length stays as it is while there are so many rows."""
LEAST_ROW: Final = 2 << 20
HEIGHT: Final = 460
FEW: Final = 4_000
"""So many blocks have a border."""
COLUMNS: Final = ("left", "right", "top", "bottom", "shade", "address", "size", "state", "count")
STREAM: Final = "stream"
IDLE: Final = "#c3c7cc"
"""As the page has it in light; page.js puts the dark one in its place."""
IN_FLIGHT: Final = 1
IDLE_STATE: Final = 2


def paler(color: str) -> str:
    """Half-way to white.

    >>> paler("#000080")
    '#8080c0'
    """
    return "#" + "".join(f"{(int(color[at : at + 2], 16) + 256) // 2:02x}" for at in (1, 3, 5))


BY_STREAM: Final = (IDLE, *HUES, *(paler(hue) for hue in HUES))
LEGEND: Final = (
    f'<span class="by-stream">{legend((("live", BLUE, "area"), ("in flight: paler", paler(BLUE), "area")))}'
    '<span class="entry">the colour is the stream\'s, as in the table above</span></span>'
    f'<span class="by-state">{legend((("live", BLUE, "area"), ("in flight", ORANGE, "area")))}</span>'
    + legend((("idle", "var(--idle)", "area"),))
)
BY_STATE: Final = (IDLE, *([BLUE] * len(HUES)), *([ORANGE] * len(HUES)))


@dataclass(frozen=True)
class Layout:
    """Rectangles, one a row of each array.  keys: unlike for any two of a layout, alike for one block in two maps."""

    row_bytes: int
    rows: int
    keys: npt.NDArray[np.uint64]
    columns: dict[str, npt.NDArray[Any]]
    numbers: npt.NDArray[np.int64]
    """Streams, by number."""
    streams: Sequence[str]
    """Streams, as people know them."""
    borders: dict[str, npt.NDArray[np.float64]]
    """Of the segments: left, right, top, bottom."""
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


def wrap(
    offset: npt.NDArray[np.int64], size: npt.NDArray[np.int64], row_bytes: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], dict[str, npt.NDArray[np.float64]]]:
    """Cut ranges at the ends of rows.

    Returns the index of the range, which piece of it (0, 1, 2), and rectangles in bytes and rows.
    """
    end = offset + size
    first, last = offset // row_bytes, (end - 1) // row_bytes
    index = np.arange(len(offset))
    over = last > first
    middle = last - first > 1
    head_right = np.where(over, row_bytes, end - first * row_bytes)
    pieces = [
        (index, 0, offset - first * row_bytes, head_right, first, first + 1),
        (index[middle], 1, np.zeros(middle.sum()), np.full(middle.sum(), row_bytes), first[middle] + 1, last[middle]),
        (index[over], 2, np.zeros(over.sum()), (end - last * row_bytes)[over], last[over], last[over] + 1),
    ]
    which = np.concatenate([piece[0] for piece in pieces])
    part = np.concatenate([np.full(len(piece[0]), piece[1]) for piece in pieces])
    names = ("left", "right", "top", "bottom")
    rectangles = {name: np.concatenate([p[at + 2] for p in pieces]).astype(float) for at, name in enumerate(names)}
    return which, part, rectangles


def lay_out(shown: AddressMap, row_bytes: int = 0) -> Layout:
    """A map as rectangles.  row_bytes: of the layout before, which is kept if it still does."""
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
        address, state, stream = address[heads], state[heads], stream[heads]
    total = int(size.sum())
    row_bytes = row_length(total, row_bytes)
    offset = np.cumsum(size) - size  # blocks fill their segments, and segments lie end to end
    which, part, columns = wrap(offset, size, row_bytes)
    _, _, borders = wrap(np.cumsum(segment_sizes) - segment_sizes, segment_sizes, row_bytes)
    gap = 0.08
    columns["top"] += gap
    columns["bottom"] -= gap
    hue = stream % len(HUES)
    shade = np.where(state == IDLE_STATE, 0, 1 + hue + np.where(state == IN_FLIGHT, len(HUES), 0))
    names = {number: shown.names.get(number, str(number)) for number in set(stream.tolist())}
    labels = [names[number] for number in stream.tolist()]
    values = {"shade": shade, "address": address.astype(float), "size": size, "state": state, "count": count}
    columns |= {name: value[which] for name, value in values.items()}
    rows = max(1, -(-total // row_bytes))
    at = np.arange(rows) * row_bytes
    before = np.clip(np.searchsorted(np.cumsum(segment_sizes), at, side="right"), 0, max(0, len(starts) - 1))
    base = np.cumsum(segment_sizes) - segment_sizes
    row_starts = [int(starts[s]) + int(a - base[s]) for s, a in zip(before, at, strict=True)] if len(starts) else [0]
    return Layout(
        row_bytes=row_bytes,
        rows=rows,
        keys=address[which] * np.uint64(4) + part.astype(np.uint64),
        columns={name: columns[name].astype(float) for name in COLUMNS},
        numbers=stream[which],
        streams=[labels[at] for at in which.tolist()],
        borders=borders,
        row_starts=row_starts,
        merged=merged,
    )


@dataclass(frozen=True)
class Change:
    """What has to be sent.  whole: everything, in slots 0, 1, 2, ...; else some slots, and new ones behind the last."""

    whole: bool
    slots: npt.NDArray[np.int64]
    """Slot of each rectangle to send."""
    which: npt.NDArray[np.int64]
    """The rectangles to send, in the same order."""
    emptied: npt.NDArray[np.int64]
    """Slots that show nothing any more."""
    length: int
    """Slots afterwards."""


class Slots:
    """Which rectangle is in which place of the data source."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._slots: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._free: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._length = 0

    def update(self, new: Layout) -> Change:
        """Take the new layout in, and say what has to be sent."""
        old = self._layout
        self._layout = new
        if old is None or old.row_bytes != new.row_bytes or not len(old.keys) or not len(new.keys):
            return self._whole(new)
        order = np.argsort(old.keys)
        at = np.clip(np.searchsorted(old.keys, new.keys, sorter=order), 0, len(order) - 1)
        match = order[at]
        known = old.keys[match] == new.keys
        slots = np.full(len(new.keys), -1, dtype=np.int64)
        slots[known] = self._slots[match[known]]
        changed = ~known
        for name in COLUMNS:
            changed[known] |= new.columns[name][known] != old.columns[name][match[known]]
        changed[known] |= new.numbers[known] != old.numbers[match[known]]
        stays = np.zeros(len(old.keys), dtype=bool)
        stays[match[known]] = True
        free = np.concatenate([self._free, self._slots[~stays]])
        needed = int((~known).sum())
        fresh = self._length + np.arange(max(0, needed - len(free)))
        slots[~known] = np.concatenate([free, fresh])[:needed]
        length = self._length + len(fresh)
        # Emptied now: what was shown before, unless something else has taken its place.
        emptied = np.setdiff1d(self._slots[~stays], slots[~known])
        if 4 * (changed.sum() + len(emptied)) > length or length > 2 * len(new.keys) + 1000:
            return self._whole(new)
        self._slots, self._free, self._length = slots, free[needed:], length
        which = np.flatnonzero(changed)
        order = np.argsort(slots[which])
        return Change(False, slots[which][order], which[order], emptied, length)

    def _whole(self, new: Layout) -> Change:
        everything = np.arange(len(new.keys))
        self._slots, self._free, self._length = everything, np.zeros(0, np.int64), len(new.keys)
        return Change(True, everything, everything, np.zeros(0, np.int64), len(new.keys))


class MapPanel:
    """The source of rectangles, and the figure."""

    def __init__(self, looks: Looks) -> None:
        self._slots = Slots()
        self._row_bytes = 0
        self.source = ColumnDataSource(_empty(), name="blocks")
        self.borders = ColumnDataSource({name: [] for name in ("left", "right", "top", "bottom")}, name="segments")
        self.mapper = LinearColorMapper(
            palette=list(BY_STREAM), low=-0.5, high=len(BY_STREAM) - 0.5, name="blocks-colors"
        )
        plot = figure(
            name="map",
            height=HEIGHT,
            sizing_mode="stretch_width",
            x_range=Range1d(0, LEAST_ROW),
            y_range=Range1d(1, 0),
            tools="",
            toolbar_location="right",
            output_backend="canvas",
            lod_threshold=None,
            background_fill_color=None,
            border_fill_color=None,
        )
        plot.toolbar.logo = None
        blocks = plot.quad(
            name="blocks-map",
            left="left",
            right="right",
            top="top",
            bottom="bottom",
            source=self.source,
            fill_color={"field": "shade", "transform": self.mapper},
            line_color="#ffffff",
            line_width=0.5,
        )
        self._blocks = blocks.glyph
        border = plot.quad(
            left="left", right="right", top="top", bottom="bottom", source=self.borders, fill_color=None, line_width=1
        )
        border.glyph.name = "foreground"  # page.js gives it the colour of text
        looks.dress(plot.xaxis[0], "bytes")
        plot.xaxis.axis_label = "from the start of the row"
        plot.yaxis.axis_label = "address"
        plot.ygrid.visible = False
        plot.yaxis.formatter = looks.ticks("nothing")
        hover = HoverTool(
            renderers=[blocks],
            tooltips=[
                ("address", "@address{custom}"),
                ("size", "@size{custom}"),
                ("state", "@state{custom}"),
                ("stream", "@stream"),
                ("blocks", "@count"),
            ],
            formatters={
                "@address": looks.tips("hex"),
                "@size": looks.tips("bytes"),
                "@state": CustomJSHover(code=f"return {list(AddressMap.STATES)!r}[value];"),
            },
        )
        plot.add_tools(hover, PanTool(), BoxZoomTool(), ResetTool())
        plot.toolbar.active_drag = None  # so that a finger scrolls the page
        self.figure = plot

    def show(self, shown: AddressMap | None) -> bool:
        """Bring the panel up to date, sending what has changed.  Was everything sent?"""
        if shown is None:
            return False
        layout = lay_out(shown, self._row_bytes)
        change = self._slots.update(layout)
        if change.whole:
            self.source.data = {**layout.columns, STREAM: list(layout.streams)}
        else:
            self._send(layout, change)
        self._frame(layout)
        return change.whole

    def clear(self) -> None:
        """Another pool: nothing is known of it yet."""
        self._slots = Slots()
        self._row_bytes = 0
        self.source.data = _empty()
        self.borders.data = {name: [] for name in self.borders.data}

    def _send(self, layout: Layout, change: Change) -> None:
        length = len(self.source.data["left"])
        new = change.slots >= length
        if new.any():  # they come last, in order, and without a gap
            which = change.which[new]
            rows: dict[str, Any] = {name: layout.columns[name][which].tolist() for name in COLUMNS}
            rows[STREAM] = [layout.streams[at] for at in which.tolist()]
            self.source.stream(rows)
        old = change.slots[~new].tolist()
        if not old and not len(change.emptied):
            return
        which = change.which[~new]
        patches: dict[str, list[tuple[int, Any]]] = {
            name: list(zip(old, layout.columns[name][which].tolist(), strict=True)) for name in COLUMNS
        }
        patches[STREAM] = [(slot, layout.streams[at]) for slot, at in zip(old, which.tolist(), strict=True)]
        for name in ("left", "right"):
            patches[name] += [(slot, float("nan")) for slot in change.emptied.tolist()]
        self.source.patch({name: patch for name, patch in patches.items() if patch})

    def _frame(self, layout: Layout) -> None:
        """Axes, grid and the borders of segments, where they have changed."""
        plot = self.figure
        self._blocks.line_width = 0.5 if len(layout.keys) <= FEW else 0
        if layout.row_bytes != self._row_bytes:
            self._row_bytes = layout.row_bytes
            plot.x_range.update(start=0, end=layout.row_bytes, reset_start=0, reset_end=layout.row_bytes)
            eighth = layout.row_bytes // 8
            pages = layout.row_bytes // LEAST_ROW
            plot.xaxis.ticker = FixedTicker(
                ticks=[at * eighth for at in range(9)],
                minor_ticks=[at * LEAST_ROW for at in range(pages)] if pages <= 64 else [],
            )
        if plot.y_range.start != layout.rows or plot.yaxis[0].major_label_overrides == {}:
            plot.y_range.update(start=layout.rows, end=0, reset_start=layout.rows, reset_end=0)
        step = max(1, -(-layout.rows // 12))
        labels = {at + 0.5: f"{layout.row_starts[at]:#x}" for at in range(0, layout.rows, step)}
        axis = plot.yaxis[0]
        if axis.major_label_overrides != labels:
            axis.ticker = FixedTicker(ticks=list(labels), minor_ticks=[])
            axis.major_label_overrides = labels
        if any(not np.array_equal(self.borders.data[name], values) for name, values in layout.borders.items()):
            self.borders.data = dict(layout.borders)


def _empty() -> dict[str, Any]:
    return {name: np.zeros(0) for name in COLUMNS} | {STREAM: []}

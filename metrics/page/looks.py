"""Colours, units and axes: how every panel looks.

Rules:

* Each model costs the page, here and in the browser: what figures can share, they do.
* The series' colours are the same in light and dark, and told apart by people who see few colours (the palette
  of Okabe and Ito, less its yellow, which no white page shows).  What depends on light or dark (text, grid) is set in
  the browser: page.js.

Next: panels.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, TypeVar, cast

from bokeh.models import (
    AdaptiveTicker,
    AllIndices,
    AllLabels,
    Axis,
    BasicTicker,
    BasicTickFormatter,
    CDSView,
    ColumnDataSource,
    CustomJSHover,
    CustomJSTickFormatter,
    DataRange1d,
    DatetimeTicker,
    Glyph,
    GlyphRenderer,
    Grid,
    HoverTool,
    LinearAxis,
    LinearScale,
    LogAxis,
    LogScale,
    LogTicker,
    Model,
    Plot,
    Range1d,
    Ticker,
    TickFormatter,
)

M = TypeVar("M", bound=Model)
Place = Literal["below", "right"]

BLUE: Final = "#0072b2"
ORANGE: Final = "#e69f00"
GREEN: Final = "#009e73"
RED: Final = "#d55e00"
SKY: Final = "#56b4e9"
PURPLE: Final = "#cc79a7"
GREY: Final = "#9aa0a6"

HUES: Final = (BLUE, GREEN, PURPLE, RED, SKY, ORANGE, "#7a5195", "#8c6d31")
"""Of streams, by their number."""

HEIGHT: Final = 230
"""Of a panel, in pixels."""

_FORMATS: Final = {
    "bytes": "return weir.bytes(VALUE);",
    "bytes_per_second": 'return weir.bytes(VALUE) + "/s";',
    "seconds": "return weir.seconds(VALUE);",
    "share": "return weir.share(VALUE);",
    "clock": "return weir.clock(VALUE);",
    "nothing": 'return "";',
}
"""In the browser: page.js has the functions."""


class Looks:
    """Figures of one document, and what they share."""

    def __init__(self, x_range: Range1d) -> None:
        self.x_range = x_range
        self._models: dict[str, Model] = {}

    def ticks(self, unit: str) -> CustomJSTickFormatter:
        """Labels of an axis.  unit: bytes, bytes_per_second, seconds, share, clock (the reader's time), or nothing."""
        return self._shared(f"{unit} ticks", CustomJSTickFormatter, code=_FORMATS[unit].replace("VALUE", "tick"))

    def tips(self, unit: str) -> CustomJSHover:
        """Values in a tooltip.  unit: as for `ticks`."""
        return self._shared(f"{unit} tips", CustomJSHover, code=_FORMATS[unit].replace("VALUE", "value"))

    def _axis(self, kind: type[Axis], unit: str, **options: Any) -> Axis:
        return kind(
            ticker=self._ticker(unit),
            formatter=self._formatter(unit),
            major_label_policy=self._shared("labels", AllLabels),
            **options,
        )

    def _formatter(self, unit: str) -> TickFormatter:
        return self.ticks(unit) if unit in _FORMATS else self._shared("plain", BasicTickFormatter)

    def _ticker(self, unit: str) -> Ticker:
        match unit:
            case "bytes" | "bytes_per_second":  # 256 MiB, never 268.4 MB
                return self._shared(
                    "bytes",
                    AdaptiveTicker,
                    base=1024,
                    mantissas=[2**n for n in range(10)],
                    min_interval=1,
                    desired_num_ticks=4,
                    num_minor_ticks=0,
                )
            case "count":
                return self._shared(
                    "count",
                    AdaptiveTicker,
                    mantissas=[1, 2, 5],
                    min_interval=1,
                    desired_num_ticks=4,
                    num_minor_ticks=0,
                )
            case "seconds":
                return self._shared("log", LogTicker, mantissas=[1], desired_num_ticks=5, num_minor_ticks=0)
            case "clock":
                return self._shared("time", DatetimeTicker, desired_num_ticks=4, num_minor_ticks=0)
        return self._shared("number", BasicTicker, desired_num_ticks=5, num_minor_ticks=0)

    def _shared(self, key: str, kind: type[M], **options: Any) -> M:
        """The one model of this document under that name."""
        if key not in self._models:
            self._models[key] = kind(**options)
        return cast(M, self._models[key])

    def plain(
        self, name: str, *, height: int, x_range: Any, y_range: Any, label: str, unit: str = "", log: bool = False
    ) -> Plot:
        """An empty panel with two axes and lines across.  unit: of the y axis, as for `dress`; none of a figure that
        labels its own."""
        plot = Plot(  # not `figure`, whose axes, scales and title would be some thirty models more
            name=name,
            height=height,
            sizing_mode="stretch_width",
            x_range=x_range,
            y_range=y_range,
            x_scale=self._shared("linear", LinearScale),
            y_scale=LogScale() if log else self._shared("linear", LinearScale),
            title=None,
            toolbar_location=None,
            min_border_right=16,
            lod_threshold=None,
            background_fill_color=None,
            border_fill_color=None,
        )
        left = self._axis(LogAxis if log else LinearAxis, unit, axis_label=label)
        plot.add_layout(left, "left")
        plot.add_layout(Grid(axis=left, dimension=1), "center")
        return plot

    def axis(
        self, plot: Plot, place: Place, *, unit: str, label: str | None = None, range_name: str = "default"
    ) -> None:
        """One more axis.  place: below is along x, right along y.  range_name: of an extra range of the plot."""
        along = {"x_range_name" if place == "below" else "y_range_name": range_name}
        plot.add_layout(self._axis(LinearAxis, unit, axis_label=label, **along), place)

    def glyph(self, plot: Plot, source: ColumnDataSource, glyph: Glyph, **options: Any) -> GlyphRenderer[Any]:
        """Draw all rows of a source."""
        view = CDSView(filter=self._shared("all", AllIndices))
        return plot.add_glyph(source, glyph, view=view, **options)

    def over_time(self, name: str, *, unit: str, label: str, y_range: Any = None, log: bool = False) -> Plot:
        """An empty panel over time, whose y axis starts at 0 and follows what is in sight."""
        y_range = DataRange1d(start=0, range_padding=0.08) if y_range is None else y_range
        plot = self.plain(name, height=HEIGHT, x_range=self.x_range, y_range=y_range, label=label, unit=unit, log=log)
        self.axis(plot, "below", unit="clock")
        return plot

    def hover(self, plot: Plot, renderer: Any, rows: list[tuple[str, str, str]]) -> None:
        """One tooltip for the moment under the pointer.  rows: (label, column, kind)."""
        tips = [("", "@time{custom}")]
        formats: dict[str, Any] = {"@time": self.tips("clock")}
        for label, column, kind in rows:
            if kind in _FORMATS:
                tips.append((label, f"@{column}{{custom}}"))
                formats[f"@{column}"] = self.tips(kind)
            else:
                tips.append((label, f"@{column}{{0,0.[0]}}"))
        plot.add_tools(
            HoverTool(mode="vline", renderers=[renderer], tooltips=tips, formatters=formats, line_policy="nearest")
        )


def legend(entries: Iterable[tuple[str, str, str]]) -> str:
    """What the colours mean, as HTML, which wraps on a narrow page.  entries: (text, colour, area, line or dashed)."""
    return "".join(
        f'<span class="entry"><i class="{kind}" style="--hue:{color}"></i>{text}</span>'
        for text, color, kind in entries
    )

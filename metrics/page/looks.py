"""Colours, units and axes: how every panel looks.

Rule: the series' colours are the same in light and dark, and told apart by people who see few colours (the palette of
Okabe and Ito, less its yellow, which no white page shows).  What depends on light or dark (text, grid) is set in the
browser: page.js.
Next: panels.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from bokeh.models import (
    AdaptiveTicker,
    BasicTicker,
    CustomJSHover,
    CustomJSTickFormatter,
    DataRange1d,
    DatetimeTicker,
    HoverTool,
    LinearAxis,
    LogTicker,
    Range1d,
)
from bokeh.plotting import figure

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

# Bytes with a binary unit, chosen by the size of the number.
BYTES_JS: Final = """
function bytes(n) {
  if (!isFinite(n)) return "none";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0, size = Math.abs(n);
  while (size >= 1024 && at < 4) { size /= 1024; at += 1; }
  return (n < 0 ? "-" : "") + (size >= 100 || size === Math.round(size) ? size.toFixed(0)
    : size >= 10 ? size.toFixed(1) : size.toFixed(2)) + " " + units[at];
}
"""
SECONDS_JS: Final = """
function seconds(s) {
  if (!isFinite(s)) return "none";
  if (s === 0) return "0 s";
  const round = (x) => String(Number(x.toPrecision(3)));
  return s < 1e-3 ? round(s * 1e6) + " us" : s < 1 ? round(s * 1e3) + " ms" : round(s) + " s";
}
"""
CLOCK_JS: Final = (
    'return new Date(VALUE).toLocaleTimeString([], {hour: "2-digit", minute: "2-digit", second: "2-digit", '
    'hourCycle: "h23"});'
)
_FORMATS: Final = {
    "bytes": BYTES_JS + "return bytes(VALUE);",
    "bytes_per_second": BYTES_JS + 'return bytes(VALUE) + "/s";',
    "seconds": SECONDS_JS + "return seconds(VALUE);",
    "share": 'return isFinite(VALUE) ? (Math.round(VALUE * 1000) / 10) + " %" : "none";',
    "clock": CLOCK_JS,
    "hex": 'return "0x" + BigInt(Math.round(VALUE)).toString(16);',
    "nothing": 'return "";',
}


class Looks:
    """Formatters and figures of one document.  What can be shared by its figures is: each model costs the page."""

    def __init__(self, x_range: Range1d) -> None:
        self.x_range = x_range
        self._ticks: dict[str, CustomJSTickFormatter] = {}
        self._tips: dict[str, CustomJSHover] = {}

    def ticks(self, kind: str) -> CustomJSTickFormatter:
        """Labels of an axis.  kind: bytes, bytes_per_second, seconds, share, clock (the reader's time), or nothing."""
        if kind not in self._ticks:
            self._ticks[kind] = CustomJSTickFormatter(code=_FORMATS[kind].replace("VALUE", "tick"))
        return self._ticks[kind]

    def tips(self, kind: str) -> CustomJSHover:
        """Values in a tooltip.  kind: as for `ticks`, or hex."""
        if kind not in self._tips:
            self._tips[kind] = CustomJSHover(code=_FORMATS[kind].replace("VALUE", "value"))
        return self._tips[kind]

    def dress(self, axis: Any, unit: str) -> None:
        """Units on an axis: bytes, bytes_per_second, seconds, share, count (of whole things), or a plain number."""
        if unit in _FORMATS:
            axis.formatter = self.ticks(unit)
        if unit in ("bytes", "bytes_per_second"):  # 256 MiB, never 268.4 MB
            axis.ticker = AdaptiveTicker(
                base=1024, mantissas=[2**n for n in range(10)], min_interval=1, desired_num_ticks=4, num_minor_ticks=0
            )
        elif unit == "count":
            axis.ticker = AdaptiveTicker(mantissas=[1, 2, 5], min_interval=1, desired_num_ticks=4, num_minor_ticks=0)
        elif unit in ("share", "number"):
            axis.ticker = BasicTicker(desired_num_ticks=5, num_minor_ticks=0)
        elif unit == "seconds":
            axis.ticker = LogTicker(mantissas=[1], desired_num_ticks=5, num_minor_ticks=0)

    def over_time(self, name: str, *, unit: str, label: str, y_range: Any = None, log: bool = False) -> figure:
        """An empty panel over time, whose y axis starts at 0 and follows what is in sight."""
        plot = figure(
            name=name,
            height=HEIGHT,
            sizing_mode="stretch_width",
            x_range=self.x_range,
            y_range=DataRange1d(start=0, range_padding=0.08) if y_range is None else y_range,
            x_axis_type="datetime",
            y_axis_type="log" if log else "linear",
            window_axis="x",
            tools="",
            toolbar_location=None,
            min_border_right=16,
            lod_threshold=None,
            background_fill_color=None,
            border_fill_color=None,
        )
        plot.xaxis[0].update(
            formatter=self.ticks("clock"), ticker=DatetimeTicker(desired_num_ticks=4, num_minor_ticks=0)
        )
        plot.yaxis[0].axis_label = label
        self.dress(plot.yaxis[0], unit)
        plot.xgrid[0].visible = False
        return plot

    def right_axis(self, plot: figure, range_name: str, *, unit: str, label: str) -> None:
        """A second y axis, for the series that name `range_name`."""
        axis = LinearAxis(y_range_name=range_name, axis_label=label)
        self.dress(axis, unit)
        plot.add_layout(axis, "right")

    def hover(self, plot: figure, renderer: Any, rows: list[tuple[str, str, str]]) -> None:
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

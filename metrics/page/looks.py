"""Colours, units and axes: how every panel looks.

Rule: the series' colours are the same in light and dark, and told apart by people who see few colours (the palette of
Okabe and Ito, less its yellow, which no white page shows).  What depends on light or dark (text, grid) is set in the
browser: page.js.
Next: panels.py.
"""

from __future__ import annotations

from typing import Any, Final

from bokeh.models import (
    AdaptiveTicker,
    BasicTicker,
    CustomJSHover,
    CustomJSTickFormatter,
    DataRange1d,
    HoverTool,
    LinearAxis,
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
CLOCK_JS: Final = 'return new Date(%s).toLocaleTimeString([], {hour: "2-digit", minute: "2-digit", second: "2-digit"});'


def formatter(kind: str) -> CustomJSTickFormatter:
    """Tick labels.  kind: bytes, seconds, clock (the reader's local time), or bytes_per_second."""
    if kind == "clock":
        return CustomJSTickFormatter(code=CLOCK_JS % "tick")
    if kind == "seconds":
        return CustomJSTickFormatter(code=SECONDS_JS + "return seconds(tick);")
    suffix = ' + "/s"' if kind == "bytes_per_second" else ""
    return CustomJSTickFormatter(code=f"{BYTES_JS}return bytes(tick){suffix};")


def hover_formatter(kind: str) -> CustomJSHover:
    """Values in a tooltip.  kind: as in `formatter`, or hex."""
    if kind == "clock":
        return CustomJSHover(code=CLOCK_JS % "value")
    if kind == "hex":
        return CustomJSHover(code='return "0x" + BigInt(Math.round(value)).toString(16);')
    if kind == "seconds":
        return CustomJSHover(code=SECONDS_JS + "return seconds(value);")
    suffix = ' + "/s"' if kind == "bytes_per_second" else ""
    return CustomJSHover(code=f"{BYTES_JS}return bytes(value){suffix};")


def binary_ticker() -> AdaptiveTicker:
    """Ticks at 1, 2, 4, ... of a binary unit: 256 MiB, never 268.4 MB."""
    return AdaptiveTicker(base=1024, mantissas=[2**n for n in range(10)], min_interval=1, desired_num_ticks=5)


def dress(axis: Any, kind: str) -> None:
    """Units on an axis: bytes, bytes_per_second, seconds, share, or per_second."""
    if kind in ("bytes", "bytes_per_second"):
        axis.ticker = binary_ticker()
        axis.formatter = formatter(kind)
    elif kind == "seconds":
        axis.formatter = formatter("seconds")
    elif kind == "share":
        axis.formatter = CustomJSTickFormatter(code='return Math.round(tick * 100) + " %";')
    elif kind == "count":
        axis.ticker = BasicTicker(min_interval=1, desired_num_ticks=5)


def time_figure(name: str, x_range: Range1d, *, unit: str, label: str, y_range: Any = None) -> figure:
    """An empty panel over time, whose y axis starts at 0 and follows what is in sight."""
    plot = figure(
        name=name,
        height=HEIGHT,
        sizing_mode="stretch_width",
        x_range=x_range,
        y_range=DataRange1d(start=0, range_padding=0.08, only_visible=True) if y_range is None else y_range,
        x_axis_type="datetime",
        window_axis="x",
        tools="",
        toolbar_location=None,
        min_border_right=14,
        lod_threshold=None,
    )
    plot.xaxis.formatter = formatter("clock")
    plot.xaxis.ticker.desired_num_ticks = 5
    plot.yaxis.axis_label = label
    dress(plot.yaxis[0], unit)
    plot.xgrid.visible = False
    return plot


def right_axis(plot: figure, range_name: str, *, unit: str, label: str, color: str) -> None:
    """A second y axis, whose series name `range_name`."""
    axis = LinearAxis(y_range_name=range_name, axis_label=label)
    dress(axis, unit)
    axis.name = f"{plot.name}-{range_name}"
    plot.add_layout(axis, "right")


def legend(plot: figure) -> None:
    """One line above the panel; a click hides a series."""
    entries = plot.legend[0]
    plot.add_layout(entries, "above")
    entries.orientation = "horizontal"
    entries.ncols = "auto"
    entries.padding = 0
    entries.margin = 0
    entries.spacing = 10
    entries.border_line_color = None
    entries.background_fill_alpha = 0
    entries.label_text_font_size = "11px"
    entries.glyph_height = entries.glyph_width = 12
    entries.label_height = 12
    entries.click_policy = "hide"


def hover(plot: figure, renderer: Any, rows: list[tuple[str, str, str]]) -> None:
    """One tooltip for the moment under the pointer.  rows: (label, column, kind)."""
    tips = [("", "@time{custom}")]
    formats: dict[str, Any] = {"@time": hover_formatter("clock")}
    for label, column, kind in rows:
        if kind in ("bytes", "bytes_per_second", "seconds"):
            tips.append((label, f"@{column}{{custom}}"))
            formats[f"@{column}"] = hover_formatter(kind)
        else:
            tips.append((label, f"@{column}{{{'0.0 %' if kind == 'share' else '0,0.[0]'}}}"))
    plot.add_tools(
        HoverTool(mode="vline", renderers=[renderer], tooltips=tips, formatters=formats, line_policy="nearest")
    )

"""Panels with axes, as one self-contained SVG.

Rule: no script, no font file, no reference to anything outside; it follows the reader's light or dark
theme, and says in text what the colours say.

Next: plot.py (what the panels hold).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

WIDTH: Final = 960
_LEFT: Final = 84
_RIGHT: Final = 24
_HEAD: Final = 92
_PLOT: Final = 190
_GAP: Final = 52
_FOOT: Final = 56
_COLUMNS: Final = WIDTH - _LEFT - _RIGHT

_STYLE: Final = """
:root { color-scheme: light dark; }
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1d2430; }
.title { font-size: 17px; font-weight: 600; }
.name { font-weight: 600; }
.quiet { fill: #5b6675; }
.paper { fill: #ffffff; }
.grid { stroke: #d9dee5; stroke-width: 1; }
.axis { stroke: #8893a1; stroke-width: 1; }
.l0 { fill: #b9d6f2; } .l1 { fill: #23748f; }
.l2 { stroke: #d65f0e; stroke-width: 1.5; stroke-linejoin: round; }
.edge { stroke: #5d95c9; stroke-width: 1; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6eaf0; } .quiet { fill: #9aa6b5; } .paper { fill: #11161d; }
  .grid { stroke: #2a323d; } .axis { stroke: #6a7684; }
  .l0 { fill: #27486a; } .l1 { fill: #3fa3c2; } .l2 { stroke: #ff9d57; } .edge { stroke: #5d95c9; }
}
"""


@dataclass(frozen=True)
class Layer:
    """One value over time: its name, and "area" or "line"."""

    name: str
    kind: str


@dataclass(frozen=True)
class Panel:
    """One set of axes.  points: (ns, values) as `Series.points` gives them; top: bytes at the upper end."""

    name: str
    remark: str
    points: Sequence[tuple[int, tuple[int, ...]]]
    end_ns: int
    top: int


def draw(title: str, panels: Sequence[Panel], layers: Sequence[Layer]) -> str:
    """The whole picture as text."""
    height = _HEAD + len(panels) * (_PLOT + _GAP) - _GAP + _FOOT if panels else _HEAD + _FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text class="title" x="{_LEFT}" y="28">{escape(title)}</text>',
        *_legend(layers),
    ]
    for index, panel in enumerate(panels):
        parts += _panel(panel, layers, _HEAD + index * (_PLOT + _GAP))
    if panels:
        parts.append(
            f'<text class="quiet" x="{_LEFT + _COLUMNS / 2:.0f}" y="{height - 12}" text-anchor="middle">'
            "time on the device, seconds</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def _legend(layers: Sequence[Layer]) -> list[str]:
    parts = []
    x = _LEFT
    for index, layer in enumerate(layers):
        if layer.kind == "area":
            parts.append(f'<rect class="l{index}" x="{x}" y="39" width="14" height="12" rx="2"/>')
        else:
            parts.append(f'<path class="l{index}" d="M{x} 45h14"/>')
        parts.append(f'<text x="{x + 20}" y="50">{escape(layer.name)}</text>')
        x += 44 + 8 * len(layer.name)
    return parts


def _panel(panel: Panel, layers: Sequence[Layer], y0: int) -> list[str]:
    bottom = y0 + _PLOT
    step, unit, factor = _byte_ticks(panel.top)
    top = panel.top * 1.04
    parts = [
        f'<text class="name" x="{_LEFT}" y="{y0 - 8}">{escape(panel.name)}'
        f'<tspan class="quiet" font-weight="400" dx="10">{escape(panel.remark)}</tspan></text>'
    ]
    for tick in range(0, int(top / step) + 1):
        y = bottom - tick * step / top * _PLOT
        label = f"{tick * step / factor:g} {unit}"
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}h{_COLUMNS}"/>')
        parts.append(f'<text class="quiet" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    columns = _columns(panel)
    for index, layer in enumerate(layers):
        steps = _steps([values[index] for values in columns], top, bottom)
        if layer.kind == "area":
            parts.append(f'<path class="l{index}" d="M{_LEFT} {bottom}{steps}V{bottom}Z"/>')
            if index == 0:
                parts.append(f'<path class="edge" fill="none" d="M{_LEFT} {bottom}{steps}"/>')
        else:
            parts.append(f'<path class="l{index}" fill="none" d="M{_LEFT} {bottom}{steps}"/>')
    parts.append(f'<path class="axis" fill="none" d="M{_LEFT} {y0}V{bottom}h{_COLUMNS}"/>')
    seconds = panel.end_ns / 1e9
    step_s = _nice(seconds / 8)
    for tick in range(0, int(seconds / step_s + 1e-9) + 1):
        x = _LEFT + tick * step_s / seconds * _COLUMNS
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom}v5"/>')
        parts.append(f'<text class="quiet" x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{tick * step_s:g}</text>')
    return parts


def _columns(panel: Panel) -> list[tuple[int, ...]]:
    """The maxima in each pixel column; a value holds until the next point."""
    columns: list[tuple[int, ...]] = []
    last: tuple[int, ...] | None = None
    for time, values in panel.points:
        at = min(time * _COLUMNS // panel.end_ns, _COLUMNS - 1)
        if at < len(columns):
            columns[-1] = tuple(map(max, columns[-1], values))
        else:
            columns.extend([last or values] * (at - len(columns)))
            columns.append(values)
        last = values
    return columns + [last] * (_COLUMNS - len(columns)) if last is not None else []


def _steps(values: Sequence[int], top: float, bottom: int) -> str:
    """Path commands of a staircase, one step a change."""
    parts = []
    before: str | None = None
    for column, value in enumerate(values):
        y = f"{bottom - value / top * _PLOT:.1f}"
        if y != before:
            parts.append(f"H{_LEFT + column}V{y}")
            before = y
    return "".join(parts) + f"H{_LEFT + len(values)}"


def _nice(least: float) -> float:
    """1, 2 or 5 times a power of ten, not below `least`."""
    size = 10.0**-12
    while True:
        for factor in (1, 2, 5):
            if size * factor >= least:
                return size * factor
        size *= 10


def _byte_ticks(top: int) -> tuple[int, str, int]:
    """(bytes between two ticks, unit of the labels, bytes in that unit): four to eight ticks, binary units."""
    step = 1
    while top / step > 8:
        step *= 2
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if step >= factor or (step * 4 >= factor and top >= factor):
            return step, unit, factor
    return step, "B", 1

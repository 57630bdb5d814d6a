"""One picture of a run: a panel for each benchmark and door, ratios upwards on a logarithmic scale.

Rule: as allocator/traces/svg.py: one self-contained SVG, no script and no font, light and dark; what the colours say is
also said by the marks' shapes and by the legend.  A PNG needs matplotlib.

Next: report.py (the same numbers as text).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from allocator.stress.benchmarks.cases import PEERS
from allocator.stress.benchmarks.runner import Measured

WIDTH: Final = 960
_COLUMNS: Final = 2
_LEFT: Final = 56
_GAP: Final = 28
_PLOT: Final = 150
_HEAD: Final = 34
_FOOT: Final = 44
_WHOLE: Final = _HEAD + _PLOT + _FOOT
_INNER: Final = (WIDTH - _GAP * (_COLUMNS + 1)) // _COLUMNS - _LEFT

_LIGHT: Final = ("#b3261e", "#1f6f8b", "#8a5a00", "#5b3fa0", "#2b7a3d", "#a0307a", "#4a5568")
_DARK: Final = ("#ff8a80", "#5cc3e0", "#f0b44c", "#b79cff", "#7fd492", "#f08ccb", "#b6c0cf")
_SHAPES: Final = ("circle", "square", "diamond", "triangle", "cross")

_STYLE: Final = (
    """
:root { color-scheme: light dark; }
text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1d2430; }
.title { font-size: 17px; font-weight: 600; }
.name { font-weight: 600; }
.quiet { fill: #5b6675; }
.small { font-size: 11px; }
.paper { fill: #ffffff; }
.grid { stroke: #e3e7ec; stroke-width: 1; }
.one { stroke: #5b6675; stroke-width: 1.5; stroke-dasharray: 4 3; }
"""
    + "\n".join(f".f{i} {{ fill: {c}; }} .s{i} {{ stroke: {c}; fill: none; }}" for i, c in enumerate(_LIGHT))
    + """
@media (prefers-color-scheme: dark) {
  text { fill: #e6eaf0; } .quiet { fill: #9aa6b5; } .paper { fill: #11161d; }
  .grid { stroke: #2a323d; } .one { stroke: #9aa6b5; }
"""
    + "\n".join(f"  .f{i} {{ fill: {c}; }} .s{i} {{ stroke: {c}; }}" for i, c in enumerate(_DARK))
    + "\n}\n"
)


@dataclass(frozen=True)
class Dot:
    """One contender in one case: the case's place, ratio and quartiles."""

    at: int
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Panel:
    """lines: contender -> dots.  cases: the titles along the lower edge."""

    name: str
    remark: str
    cases: Sequence[str]
    lines: dict[str, list[Dot]]


def panels_of(measured: Sequence[Measured]) -> list[Panel]:
    """A panel for each benchmark, door and company in which something was compared."""
    groups: dict[tuple[str, str, bool, str], list[Measured]] = {}
    for one in measured:
        groups.setdefault((one.benchmark, one.door, one.guests, one.reference), []).append(one)
    panels = []
    for (benchmark, door, guests, reference), cases in groups.items():
        lines: dict[str, list[Dot]] = {}
        for at, case in enumerate(cases):
            for name, found in case.figures.items():
                if name != reference and found.ratio and found.low and found.high:
                    lines.setdefault(name, []).append(Dot(at, found.ratio, found.low, found.high))
        if lines:
            where = f"{benchmark} [{door}{', guests loaded' if guests else ''}]"
            panels.append(Panel(where, f"time / {reference}", [shortened(case.case) for case in cases], lines))
    return panels


def shortened(title: str) -> str:
    """A case's title for the lower edge."""
    return title if len(title) <= 30 else title[:29].rstrip() + "…"


def order(panels: Sequence[Panel]) -> list[str]:
    """All contenders, Weir first, then as the list of peers has them."""
    names = {name for panel in panels for name in panel.lines}
    known = ["weir", *PEERS]
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


def draw(title: str, remark: str, panels: Sequence[Panel]) -> str:
    """The whole picture as text."""
    names = order(panels)
    legend, legend_height = _legend(names)
    top = 64 + legend_height
    height = top + math.ceil(len(panels) / _COLUMNS) * _WHOLE + 8
    label = escape(title, {'"': "&quot;"})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{label}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text class="title" x="{_GAP}" y="28">{escape(title)}</text>',
        f'<text class="quiet small" x="{_GAP}" y="47">{escape(remark)}</text>',
        *legend,
    ]
    for index, panel in enumerate(panels):
        column, row = index % _COLUMNS, index // _COLUMNS
        x = _GAP + _LEFT + column * (_LEFT + _INNER + _GAP)
        parts += _panel(panel, names, x, top + row * _WHOLE + _HEAD)
    return "\n".join([*parts, "</svg>", ""])


def _legend(names: Sequence[str]) -> tuple[list[str], int]:
    parts, x, y = [], _GAP, 68
    for index, name in enumerate(names):
        width = 30 + 7 * len(name)
        if x + width > WIDTH - _GAP:
            x, y = _GAP, y + 20
        parts += [mark(index, x + 6, y), f'<text x="{x + 16}" y="{y + 4}">{escape(name)}</text>']
        x += width
    return parts, y - 68 + 20 if names else 0


def scale(panel: Panel) -> tuple[float, float, list[float]]:
    """(lower end, upper end, ticks) of the ratios; 1 is always within."""
    values = [v for dots in panel.lines.values() for dot in dots for v in (dot.low, dot.high)] + [1.0]
    low, high = min(values) / 1.15, max(values) * 1.15
    steps = [m * 10.0**e for e in range(-9, 10) for m in (1, 2, 5)]
    ticks = [step for step in steps if low <= step <= high]
    if len(ticks) > 7:
        ticks = [tick for tick in ticks if math.isclose(math.log10(tick) % 1, 0, abs_tol=1e-9)]
    if len(ticks) < 3:  # a narrow range: even steps, of which 1 is a multiple as long as they are below it
        step = next(s for s in steps if s >= (high - low) / 5)
        ticks = [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return low, high, ticks


def _panel(panel: Panel, names: Sequence[str], x0: int, y0: int) -> list[str]:
    low, high, ticks = scale(panel)
    span = math.log(high / low)

    def up(ratio: float) -> float:
        return y0 + _PLOT - math.log(ratio / low) / span * _PLOT

    room = _INNER / len(panel.cases)
    parts = [
        f'<text class="name" x="{x0 - _LEFT + 6}" y="{y0 - 12}">{escape(panel.name)}'
        f'<tspan class="quiet" font-weight="400" dx="8">{escape(panel.remark)}</tspan></text>'
    ]
    for tick in ticks:
        kind = "one" if math.isclose(tick, 1) else "grid"
        parts.append(f'<path class="{kind}" d="M{x0} {up(tick):.1f}h{_INNER}"/>')
        parts.append(f'<text class="quiet small" x="{x0 - 6}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    every = max(1, math.ceil(7 * max(map(len, panel.cases)) / (room * 1.9)))
    for at, title in enumerate(panel.cases):
        if at % every == 0:
            y = y0 + _PLOT + 16 + (at // every % 2) * 13
            x = x0 + room * (at + 0.5)
            parts.append(f'<text class="quiet small" x="{x:.1f}" y="{y}" text-anchor="middle">{escape(title)}</text>')
    present = [name for name in names if name in panel.lines]
    for place, name in enumerate(present):
        index = names.index(name)
        shift = (place - (len(present) - 1) / 2) * min(9.0, room / (len(present) + 1))
        points = [(x0 + room * (dot.at + 0.5) + shift, dot) for dot in panel.lines[name]]
        path = "L".join(f"{x:.1f} {up(dot.ratio):.1f}" for x, dot in points)
        if len(points) > 1:
            parts.append(f'<path class="s{index % len(_LIGHT)}" stroke-opacity="0.45" d="M{path}"/>')
        for x, dot in points:
            parts.append(
                f'<path class="s{index % len(_LIGHT)}" stroke-width="1.5" d="M{x:.1f} {up(dot.low):.1f}'
                f'V{up(dot.high):.1f}"/>'
            )
            parts.append(mark(index, x, up(dot.ratio), f"{name}, {panel.cases[dot.at]}: {dot.ratio:.3g}"))
    return parts


def mark(index: int, x: float, y: float, tip: str = "") -> str:
    """A contender's mark: its colour, and a shape that says the same."""
    shape, r = _SHAPES[index % len(_SHAPES)], 4.5
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    drawn = {
        "square": f"M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}Z",
        "diamond": f"M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6Z",
        "triangle": f"M{x:.1f} {y - 6:.1f}l6 10h-12Z",
        "cross": f"M{x - 5:.1f} {y - 2:.1f}h3v-3h4v3h3v4h-3v3h-4v-3h-3Z",
    }.get(shape)
    color = f"f{index % len(_LIGHT)}"
    if drawn is None:
        return f'<circle class="{color}" cx="{x:.1f}" cy="{y:.1f}" r="{r}">{inside}</circle>'
    return f'<path class="{color}" d="{drawn}">{inside}</path>'


def write(path: str, title: str, remark: str, measured: Sequence[Measured]) -> None:
    """Draw it into a file, by the name's ending.  OSError names the file."""
    panels = panels_of(measured)
    try:
        if Path(path).suffix.lower() == ".png":
            _write_png(path, title, remark, panels)
        else:
            Path(path).write_text(draw(title, remark, panels), encoding="utf-8")
    except OSError as error:
        raise OSError(f"{path}: {error.strerror or error}") from error


def _write_png(path: str, title: str, remark: str, panels: Sequence[Panel]) -> None:
    from matplotlib.figure import Figure

    names = order(panels)
    rows = max(1, math.ceil(len(panels) / _COLUMNS))
    figure = Figure(figsize=(12, 1 + 2.8 * rows), dpi=110, layout="constrained")
    figure.suptitle(f"{title}\n{remark}", fontsize=10)
    axes: Iterator[Any] = iter(figure.subplots(rows, _COLUMNS, squeeze=False).flat)
    for panel, axis in zip(panels, axes, strict=False):
        for name, dots in panel.lines.items():
            index = names.index(name)
            axis.errorbar(
                [dot.at for dot in dots],
                [dot.ratio for dot in dots],
                [[dot.ratio - dot.low for dot in dots], [dot.high - dot.ratio for dot in dots]],
                marker=("o", "s", "D", "^", "P")[index % 5],
                color=_LIGHT[index % len(_LIGHT)],
                label=name,
                markersize=4,
            )
        axis.set_yscale("log")
        low, high, ticks = scale(panel)
        axis.set_ylim(low, high)
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=6)
        axis.set_yticks([], minor=True)
        axis.axhline(1, linestyle="--", linewidth=1, color="#5b6675")
        axis.set_xticks(range(len(panel.cases)), panel.cases, fontsize=6)
        axis.set_title(f"{panel.name}  {panel.remark}", loc="left", fontsize=8)
        axis.legend(fontsize=6)
    for axis in axes:
        axis.set_visible(False)
    figure.savefig(path)

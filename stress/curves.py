"""The picture of a long run: memory of the pool, driver events, threads and memory of the process over time.

Rule: an SVG needs nothing but this package, no script and nothing from outside, and follows the reader's light or
dark theme; a PNG needs matplotlib.  Each panel has its own unit, and all share the axis of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from allocator.stress.soak import MEASURED

Points = Sequence[tuple[float, tuple[int, ...]]]

WIDTH: Final = 960
_LEFT: Final = 84
_COLUMNS: Final = WIDTH - _LEFT - 24
_HEAD: Final = 74
_PLOT: Final = 130
_GAP: Final = 58
_FOOT: Final = 54

_STYLE: Final = """
:root { color-scheme: light dark; }
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1d2430; }
.title { font-size: 17px; font-weight: 600; }
.name { font-weight: 600; }
.quiet { fill: #5b6675; font-weight: 400; }
.paper { fill: #ffffff; }
.grid { stroke: #d9dee5; }
.axis { stroke: #8893a1; fill: none; }
.a { stroke: #4a86bf; } .b { stroke: #1d6b5f; } .c { stroke: #d65f0e; }
.a, .b, .c { stroke-width: 1.5; stroke-linejoin: round; fill: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6eaf0; } .quiet { fill: #9aa6b5; } .paper { fill: #11161d; }
  .grid { stroke: #2a323d; } .axis { stroke: #6a7684; }
  .a { stroke: #7db2e6; } .b { stroke: #4fc3ad; } .c { stroke: #ff9d57; }
}
"""
_COLORS: Final = ("#4a86bf", "#1d6b5f", "#d65f0e")


@dataclass(frozen=True)
class Panel:
    """One set of axes.  lines: (its word, the field of a sample).  in_bytes: or a plain count."""

    name: str
    lines: tuple[tuple[str, str], ...]
    in_bytes: bool = False

    def values(self, field: str, points: Points) -> list[int]:
        """One value a point."""
        at = MEASURED.index(field)
        return [values[at] for _, values in points]

    def top(self, points: Points) -> int:
        """The greatest value of all lines, at least 1."""
        return max((n for _, field in self.lines for n in self.values(field, points)), default=0) or 1


PANELS: Final = (
    Panel(
        "memory of the pool",
        (("reserved", "reserved_bytes"), ("live", "live_bytes"), ("in flight", "in_flight_bytes")),
        in_bytes=True,
    ),
    Panel("driver events", (("idle and in use", "events"),)),
    Panel("threads of the process", (("threads", "threads"),)),
    Panel("memory of the process", (("resident", "rss_bytes"),), in_bytes=True),
)


def write(path: str, title: str, points: Points, seconds: float) -> None:
    """An SVG, or a PNG where the name ends so.  Raises OSError, which names the file."""
    try:
        if path.lower().endswith(".png"):
            _write_png(path, title, points, seconds)
        else:
            Path(path).write_text(draw(title, points, seconds), encoding="utf-8")
    except OSError as error:
        raise OSError(f"{path}: {error.strerror or error}") from error


def draw(title: str, points: Points, seconds: float) -> str:
    """The picture as SVG."""
    seconds = seconds or 1.0
    height = _HEAD + len(PANELS) * (_PLOT + _GAP) - _GAP + _FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label={quoteattr(title)}>',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text class="title" x="{_LEFT}" y="28">{escape(title)}</text>',
    ]
    for number, panel in enumerate(PANELS):
        parts += _drawn(panel, points, seconds, _HEAD + number * (_PLOT + _GAP))
    parts.append(
        f'<text class="quiet" x="{_LEFT + _COLUMNS / 2:.0f}" y="{height - 10}" text-anchor="middle">'
        "seconds since the run began</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def _drawn(panel: Panel, points: Points, seconds: float, y0: int) -> list[str]:
    bottom = y0 + _PLOT
    most = panel.top(points)
    step, unit, factor = ticks(most, in_bytes=panel.in_bytes)
    top = most * 1.05
    parts = [f'<text class="name" x="{_LEFT}" y="{y0 - 8}">{escape(panel.name)}</text>']
    x = _LEFT + 12 + 8 * len(panel.name)
    for mark, (word, _) in zip("abc", panel.lines, strict=False):
        parts.append(f'<path class="{mark}" d="M{x} {y0 - 12}h16"/>')
        parts.append(f'<text class="quiet" x="{x + 22}" y="{y0 - 8}">{escape(word)}</text>')
        x += 44 + 7 * len(word)
    for tick in range(int(top / step) + 1):
        y = bottom - tick * step / top * _PLOT
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}h{_COLUMNS}"/>')
        label = f"{tick * step / factor:g} {unit}".rstrip()
        parts.append(f'<text class="quiet" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for mark, (_, field) in zip("abc", panel.lines, strict=False):
        path = _path(points, panel.values(field, points), seconds, top, bottom)
        if path:
            parts.append(f'<path class="{mark}" d="{path}"/>')
    parts.append(f'<path class="axis" d="M{_LEFT} {y0}V{bottom}h{_COLUMNS}"/>')
    every = _nice(seconds / 8)
    for tick in range(int(seconds / every + 1e-9) + 1):
        at = _LEFT + tick * every / seconds * _COLUMNS
        parts.append(f'<path class="axis" d="M{at:.1f} {bottom}v5"/>')
        parts.append(f'<text class="quiet" x="{at:.1f}" y="{bottom + 19}" text-anchor="middle">{tick * every:g}</text>')
    return parts


def _path(points: Points, values: Sequence[int], seconds: float, top: float, bottom: int) -> str:
    """From point to point; of those in one column of pixels the greatest."""
    columns: dict[int, int] = {}
    for (moment, _), value in zip(points, values, strict=True):
        column = min(round(moment / seconds * _COLUMNS), _COLUMNS)
        columns[column] = max(value, columns.get(column, 0))
    places = [f"{_LEFT + column} {bottom - value / top * _PLOT:.1f}" for column, value in columns.items()]
    return f"M{'L'.join(places)}" if places else ""


def ticks(most: int, *, in_bytes: bool) -> tuple[int, str, int]:
    """(between two ticks, unit of the labels, one unit): at most eight ticks.

    >>> ticks(300 << 20, in_bytes=True), ticks(90, in_bytes=False), ticks(3, in_bytes=False)
    ((67108864, 'MiB', 1048576), (20, '', 1), (1, '', 1))
    """
    if not in_bytes:
        return max(1, round(_nice(most / 6))), "", 1
    step = 1
    while most / step > 6:
        step *= 2
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if step * 4 >= factor:
            return step, unit, factor
    return step, "B", 1


def _nice(least: float) -> float:
    """1, 2 or 5 times a power of ten, not below `least`."""
    size = 1e-9
    while size * 5 < least:
        size *= 10
    return next(size * factor for factor in (1, 2, 5) if size * factor >= least)


def _write_png(path: str, title: str, points: Points, seconds: float) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.8 + 2.0 * len(PANELS)), dpi=120, layout="constrained")
    times = [moment for moment, _ in points]
    for axis, panel in zip(figure.subplots(len(PANELS), 1, sharex=True), PANELS, strict=True):
        _, unit, factor = ticks(panel.top(points), in_bytes=panel.in_bytes)
        for color, (word, field) in zip(_COLORS, panel.lines, strict=False):
            axis.plot(times, [n / factor for n in panel.values(field, points)], color=color, label=word, linewidth=1)
        axis.set_ylim(0, panel.top(points) * 1.05 / factor)
        axis.set_ylabel(unit)
        axis.set_title(panel.name, loc="left", fontsize=10)
        axis.legend(loc="lower right", fontsize=8)
        axis.set_xlim(0, seconds or 1.0)
        axis.set_xlabel("seconds since the run began" if panel is PANELS[-1] else "")
    figure.suptitle(title)
    figure.savefig(path)

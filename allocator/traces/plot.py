"""Pictures of replays: reserved, live and in flight over time, a panel for each trace and policy.

Rule: an SVG needs nothing but this package; a PNG needs matplotlib.  Panels of one trace share both axes,
so heights can be compared.

Next: svg.py (how a panel is drawn), series.py (what is drawn).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from allocator.sizes import format_size
from allocator.traces.replay import Replay
from allocator.traces.svg import Layer, Panel, draw

SUFFIXES: Final = (".svg", ".png")
LAYERS: Final = (Layer("reserved", "area"), Layer("live", "area"), Layer("in flight", "line"))
"""In the order of the values in a replay's series, which is also the order of drawing."""


@dataclass(frozen=True)
class PlotFile:
    """Where a picture goes, checked before any work is done for it.

    Raises ValueError for a suffix that is no kind of picture, a folder that is not there or cannot be
    written to, or matplotlib missing where it is needed.
    """

    path: str

    def __post_init__(self) -> None:
        path = Path(self.path)
        if path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"{self.path}: a picture's name ends in {' or '.join(SUFFIXES)}")
        if path.is_dir():
            raise ValueError(f"{self.path}: is a folder")
        if not path.parent.is_dir():
            raise ValueError(f"{self.path}: there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{self.path}: may not be written")
        if path.suffix.lower() == ".png":
            try:
                import matplotlib.figure  # noqa: F401  # only to see that it is there
            except ImportError:
                raise ValueError(
                    f"{self.path}: a PNG needs matplotlib (pip install 'weir-allocator[plot]'); an SVG needs nothing"
                ) from None

    def write(self, replays: Sequence[Replay]) -> None:
        """Draw all replays that have a series.  Raises OSError, which names the file."""
        panels = panels_of(replays)
        try:
            if Path(self.path).suffix.lower() == ".png":
                _write_png(self.path, panels)
            else:
                Path(self.path).write_text(draw(title_of(replays), panels, LAYERS), encoding="utf-8")
        except OSError as error:  # a disk that is full does not say which file
            raise OSError(f"{self.path}: {error.strerror or error}") from error


def title_of(replays: Sequence[Replay]) -> str:
    """One line over the whole picture."""
    names = list(dict.fromkeys(trace_name(replay.result.trace) for replay in replays))
    return f"GPU memory over time: {', '.join(names)}"


def trace_name(path: str) -> str:
    """ "serve-8-streams" for "samples/serve-8-streams.csv.gz"."""
    return Path(path).name.removesuffix(".gz").removesuffix(".csv").removesuffix(".pickle") or path


def panels_of(replays: Sequence[Replay]) -> list[Panel]:
    """A panel for each replay with a series; those of one trace share their axes."""
    several = len({replay.result.trace for replay in replays}) > 1
    panels = []
    for replay in replays:
        if replay.series is None:
            continue
        result = replay.result
        family = [r for r in replays if r.result.trace == result.trace and r.series is not None]
        share = (
            f", {result.peak_reserved_bytes / result.peak_live_bytes:.2f} x the most that was live"
            if result.peak_live_bytes
            else ""
        )
        panels.append(
            Panel(
                name=f"{trace_name(result.trace)}, {result.policy}" if several else result.policy,
                remark=f"peak reserved {format_size(result.peak_reserved_bytes)}{share}",
                points=replay.series.points(),
                end_ns=max(round(r.result.virtual_seconds * 1e9) for r in family) or 1,
                top=max(max(r.result.peak_reserved_bytes, r.result.peak_live_bytes) for r in family) or 1,
            )
        )
    return panels


def _write_png(path: str, panels: Sequence[Panel]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.8 + 2.6 * len(panels)), dpi=120, layout="constrained")
    axes = figure.subplots(max(len(panels), 1), 1, squeeze=False)
    for (axis,), panel in zip(axes, panels, strict=False):
        times = [time / 1e9 for time, _ in panel.points]
        for index, (layer, color) in enumerate(zip(LAYERS, ("#9ec5e8", "#1f6f8b", "#d9730d"), strict=True)):
            values = [point[index] / (1 << 20) for _, point in panel.points]
            if layer.kind == "area":
                axis.fill_between(times, values, step="post", color=color, label=layer.name, linewidth=0)
            else:
                axis.step(times, values, where="post", color=color, label=layer.name, linewidth=1)
        axis.set_xlim(0, panel.end_ns / 1e9)
        axis.set_ylim(0, panel.top * 1.05 / (1 << 20))
        axis.set_ylabel("MiB")
        axis.set_title(f"{panel.name}: {panel.remark}", loc="left", fontsize=10)
        axis.legend(loc="upper right", fontsize=8)
    axes[-1][0].set_xlabel("time on the device, s")
    figure.savefig(path)

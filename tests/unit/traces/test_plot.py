"""Pictures: readable, self-contained, and refused before any work where they cannot be written."""

from __future__ import annotations

import os
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from allocator.traces import PlotFile, Replay, Result
from allocator.traces.plot import panels_of, trace_name
from allocator.traces.series import Series
from allocator.traces.svg import Layer, Panel, draw

MIB = 1 << 20
SVG = "{http://www.w3.org/2000/svg}"


def finished(
    policy: str, *, trace: str = "folder/run<1>.csv.gz", peak: int = 300 * MIB, seconds: float = 2.0
) -> Replay:
    series = Series(3)
    for step in range(100):
        series.add(step * 20_000_000, (peak if step > 50 else peak // 2, step * MIB, (step % 7) * MIB))
    result = Result(trace=trace, policy=policy, device="d", peak_live_bytes=99 * MIB, peak_reserved_bytes=peak)
    result.virtual_seconds = seconds
    return Replay(result, series=series, launches=1)


def texts(root: ET.Element) -> list[str]:
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def test_an_svg_has_title_legend_axes_with_units_and_a_panel_a_policy(tmp_path: Path) -> None:
    target = tmp_path / "picture.SVG"
    PlotFile(str(target)).write([finished("weir"), finished("per-stream", peak=700 * MIB)])
    root = ET.parse(target).getroot()
    found = texts(root)
    assert found[0] == "GPU memory over time: run<1>"
    assert {"reserved", "live", "in flight", "time on the device, seconds"} <= set(found)
    assert any(text.startswith("weir") and "peak reserved 300 MiB, 3.03 x" in text for text in found)
    assert any(text.startswith("per-stream") and "700 MiB" in text for text in found)
    labels = [text for text in found if re.fullmatch(r"[\d.]+ MiB", text)]
    assert labels == [f"{n} MiB" for n in range(0, 701, 128)] * 2  # both panels have the same scale
    assert found.count("0.5") == 2
    whole = target.read_text()
    assert "prefers-color-scheme: dark" in whole
    assert not re.search(r"(href|src|url\(|@import)", whole)


def test_an_svg_needs_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    PlotFile(str(tmp_path / "a.svg")).write([finished("weir")])
    with pytest.raises(ValueError, match=r"a PNG needs matplotlib .* an SVG needs nothing"):
        PlotFile(str(tmp_path / "a.png"))


def test_a_png_is_written_with_matplotlib(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "picture.png"
    PlotFile(str(target)).write([finished("weir"), finished("per-stream")])
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["picture.pdf", "picture", "svg", "picture.svg.gz"])
def test_another_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"ends in \.svg or \.png"):
        PlotFile(str(tmp_path / name))


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        PlotFile(str(tmp_path / "missing" / "a.svg"))
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        PlotFile(str(tmp_path / "folder.svg"))
    (tmp_path / "locked").mkdir(mode=0o500)
    if os.geteuid():
        with pytest.raises(ValueError, match="may not be written"):
            PlotFile(str(tmp_path / "locked" / "a.svg"))


def test_panels_of_one_trace_share_axes_and_several_traces_are_named() -> None:
    replays = [
        finished("weir", trace="a.csv", seconds=1),
        finished("per-stream", trace="a.csv", peak=800 * MIB, seconds=3),
        finished("weir", trace="b.csv", peak=5 * MIB, seconds=1),
    ]
    panels = panels_of(replays)
    assert [panel.name for panel in panels] == ["a, weir", "a, per-stream", "b, weir"]
    assert [panel.top for panel in panels] == [800 * MIB, 800 * MIB, 99 * MIB]
    assert [panel.end_ns for panel in panels] == [3_000_000_000, 3_000_000_000, 1_000_000_000]


def test_empty_and_tiny_replays_can_be_drawn() -> None:
    layers = (Layer("reserved", "area"),)
    for panel in (
        Panel("nothing", "", [], 1, 1),
        Panel("one", "", [(0, (512,))], 1, 512),
        Panel("huge", "", [(0, (1 << 62,))], 10**18, 1 << 62),
    ):
        ET.fromstring(draw("t & t", [panel], layers))
    ET.fromstring(draw("no panel", [], layers))


def test_a_trace_is_called_by_its_file() -> None:
    assert trace_name("a/b/run.csv.gz") == "run"
    assert trace_name("x.snapshot.pickle.gz") == "x.snapshot"
    assert trace_name(".csv") == ".csv"

"""The picture: whole without anything from outside, and nothing left out of it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from allocator.stress.benchmarks import picture
from allocator.stress.benchmarks.runner import Measured
from allocator.stress.benchmarks.timing import compare

SVG = "{http://www.w3.org/2000/svg}"


def case(benchmark: str, title: str, values: dict[str, list[float]], guests: bool = False) -> Measured:
    return Measured(benchmark, title, "core", "ns", "floor", compare(values, "floor"), guests=guests)


RUN = [
    case("steady", "512 B", {"floor": [1.0, 1.0], "weir": [2.0, 4.0], "a <peer>": [0.5, 0.5]}),
    case("steady", "a title that is far too long for the room below", {"floor": [1.0, 1.0], "weir": [3.0, 3.0]}),
    case("steady", "512 B", {"floor": [1.0, 1.0], "weir": [2.0, 2.0]}, guests=True),
    case("trim", "nothing waits", {"floor": [0.0, 0.0], "weir": [0.0, 0.0]}),
]


def test_a_panel_for_each_benchmark_in_which_something_was_compared() -> None:
    panels = picture.panels_of(RUN)
    assert [panel.name for panel in panels] == ["steady [core]", "steady [core, guests loaded]"]
    assert [(dot.at, dot.ratio) for dot in panels[0].lines["weir"]] == [(0, 3.0), (1, 3.0)]
    assert picture.order(panels) == ["weir", "a <peer>"]


def test_the_drawing_is_whole_and_says_every_ratio() -> None:
    text = picture.draw("Weir & peers", "here", picture.panels_of(RUN))
    root = ElementTree.fromstring(text)
    tips = [title.text for title in root.iter(f"{SVG}title")]
    assert {"weir, 512 B: 3", "a <peer>, 512 B: 0.5", "weir, 512 B: 2"} <= set(tips)
    assert "prefers-color-scheme: dark" in text
    assert "href" not in text and "<script" not in text and "url(" not in text
    said = {"".join(node.itertext()) for node in root.iter(f"{SVG}text")}
    assert {"weir", "a <peer>", "512 B", "Weir & peers", "here"} <= said
    for shape in root.iter():
        assert "nan" not in str(shape.attrib)


def test_everything_lies_on_the_paper() -> None:
    text = picture.draw("t", "r", picture.panels_of(RUN))
    root = ElementTree.fromstring(text)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for circle in root.iter(f"{SVG}circle"):
        assert 0 < float(circle.attrib["cx"]) < width and 0 < float(circle.attrib["cy"]) < height
    for label in root.iter(f"{SVG}text"):
        assert 0 < float(label.attrib["x"]) < width and 0 < float(label.attrib["y"]) < height


def test_each_mark_has_a_shape_and_a_colour_of_its_own_class() -> None:
    marks = [picture.mark(index, 10, 10) for index in range(5)]
    assert len({re.sub(r' class="f\d"', "", one) for one in marks}) == 5
    assert len({one.partition('class="')[2][:2] for one in marks}) == 5


def test_an_axis_always_has_one_on_it() -> None:
    for values in ([2.0, 900.0], [0.001, 0.002], [1.0, 1.0], [0.97, 1.01]):
        panel = picture.panels_of([case("x", "c", {"floor": [1.0, 1.0], "weir": values})])[0]
        low, high, ticks = picture.scale(panel)
        assert low < 1 < high and 2 <= len(ticks) <= 8 and all(low <= tick <= high for tick in ticks)


def test_an_empty_run_has_a_picture_too() -> None:
    ElementTree.fromstring(picture.draw("t", "r", []))


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_it_is_written_by_its_name(tmp_path: Path, suffix: str) -> None:
    if suffix == "png":
        pytest.importorskip("matplotlib")
    path = tmp_path / f"run.{suffix}"
    picture.write(str(path), "t", "r", RUN)
    assert path.read_bytes()[:4] in (b"<svg", b"\x89PNG")
    with pytest.raises(OSError, match="nowhere"):
        picture.write(str(tmp_path / "nowhere" / f"run.{suffix}"), "t", "r", RUN)

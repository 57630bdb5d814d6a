"""The live page as a visitor sees it, in a headless Chromium."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.metrics.page.address_map import BY_STREAM
from allocator.metrics.page.looks import BLUE, HUES, ORANGE
from tests.browser.chrome import Browser

MIB = 1 << 20
PANELS = (
    "memory",
    "requested",
    "fragmentation",
    "largest",
    "reuse",
    "cost",
    "in-flight",
    "growth",
    "retries",
    "sizes",
    "map",
)

Serve = Callable[..., str]


def pixel(color: str) -> int:
    """#rrggbb as a picture has it."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return 255 << 24 | blue << 16 | green << 8 | red


LIVE = [pixel(hue) for hue in HUES]
LIVE_BUT_ORANGE = [one for one in LIVE if one != pixel(ORANGE)]
"""By state, orange is in flight."""


def test_every_panel_has_data_and_is_drawn_without_a_complaint(
    chromium: Browser, served: Serve, busy: CachingAllocator
) -> None:
    chromium.open(served(busy))
    chromium.until("return Bokeh.documents[0].get_model_by_name('timeline').data.time.length >= 3")
    chromium.until("return weir.map.painted > 0")
    for name in PANELS:
        drawn = chromium.until(
            """
            const view = Object.values(Bokeh.index.roots ?? Bokeh.index).flat()
              .find((one) => one.model?.name === arguments[0]);
            const canvas = view.el.shadowRoot?.querySelector("canvas") ?? view.canvas_view?.primary?.canvas;
            return {glyphs: view.model.renderers.map((one) => one.data_source.get_length()),
                    width: view.el.getBoundingClientRect().width};
            """,
            name,
        )
        assert drawn["glyphs"] and all(drawn["glyphs"]), (name, drawn)
        assert drawn["width"] > 200, name
    assert max(chromium.column("timeline", "reserved_bytes")) > 10 * MIB
    assert max(chromium.column("cells", "count")) > 0
    text = chromium.until("return document.getElementById('head').textContent.trim()")
    for question in ("Could be given back now", "In flight", "Saved by reuse across streams"):
        assert question in text
    chromium.until("return document.querySelectorAll('#streams tbody tr').length")
    assert chromium.complaints() == []


def test_updates_arrive_every_second_and_are_confirmed(
    chromium: Browser, served: Serve, busy: CachingAllocator
) -> None:
    chromium.open(served(busy))
    first = chromium.until("return Bokeh.documents[0].get_model_by_name('timeline').data.number.length")
    chromium.until(
        "return Bokeh.documents[0].get_model_by_name('timeline').data.number.length >= arguments[0]", first + 8
    )
    numbers = chromium.column("timeline", "number")
    assert numbers == list(range(int(numbers[0]), int(numbers[0]) + len(numbers))), "each sample once, in order"
    end = chromium.ask("return Bokeh.documents[0].get_model_by_name('memory').x_range.end")
    assert end >= chromium.column("timeline", "time")[-2], "the panels follow"
    assert chromium.complaints() == []


def test_what_the_map_says_under_the_pointer_is_so(chromium: Browser, served: Serve) -> None:
    gpu = SimDevice(memory=8 << 30)
    with CachingAllocator(gpu, config=Config(), name="still") as pool:
        copy = Stream(gpu, name="copy")
        live = pool.allocate(3 * MIB, stream=copy)
        flying = pool.allocate(2 * MIB, stream=copy)
        gpu.launch(copy, duration_ns=10**12, writes=[flying])
        address = flying.ptr
        flying.close()
        chromium.open(served(pool))
        chromium.until("return weir.map.painted >= 2")
        for ptr, size, state in ((live.ptr, "3 MiB", "live"), (address, "2 MiB", "in flight")):
            place = chromium.ask(
                """
                const size = Bokeh.documents[0].get_model_by_name("blocks").data.size;
                const views = Object.values(Bokeh.index.roots ?? Bokeh.index).flat();
                const view = views.find((one) => one.model?.name === "map");
                view.el.scrollIntoView({block: "center"});
                const frame = view.frame;
                const box = view.canvas_view.el.getBoundingClientRect();
                const row = view.model.x_range.end;
                const begin = weir.map.sums(size)[arguments[0]];
                const piece = Math.min(size[arguments[0]], row - begin % row);
                return [box.left + frame.x_scale.compute(begin % row + piece / 2),
                        box.top + frame.y_scale.compute(Math.floor(begin / row) + 0.5)];
                """,
                [block["address"] for segment in pool.snapshot()["segments"] for block in segment["blocks"]].index(ptr),
            )
            chromium.driver.execute_cdp_cmd(
                "Input.dispatchMouseEvent", {"type": "mouseMoved", "x": place[0], "y": place[1]}
            )
            text = chromium.until(
                """
                const found = [];
                const walk = (node) => { for (const one of node.querySelectorAll("*")) {
                  if (one.className?.includes?.("bk-Tooltip") || one.matches?.(".bk-tooltip-content")) {
                    found.push((one.shadowRoot ?? one).textContent); }
                  if (one.shadowRoot) walk(one.shadowRoot); } };
                walk(document);
                return found.find((text) => text.includes(arguments[0]));
                """,
                f"{ptr:#x}",
            )
            assert size in text and state in text and "copy" in text
        live.close()
        assert chromium.complaints() == []


def painted(chromium: Browser, sizes: list[int], states: list[int], streams: list[int], **view: int) -> np.ndarray:
    """A picture of these blocks, as lines of pixels of red, green, blue and opacity."""
    pixels = chromium.ask(
        """
        const [size, state, stream, view, colors] = arguments;
        const pixels = new Uint32Array(view.width * view.height);
        const sums = weir.map.sums(size);
        const palette = colors.map((color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)));
        weir.map.paint(pixels, view.width, view.height, view, {size, state, stream}, sums,
          Float64Array.of(0, sums[size.length]), palette, [1, 2, 3]);
        return Array.from(pixels);
        """,
        sizes,
        states,
        streams,
        view,
        list(BY_STREAM),
    )
    return np.array(pixels, dtype="<u4").view(np.uint8).reshape(view["height"], view["width"], 4)


@pytest.mark.parametrize(
    ("row", "view"),
    [
        (1000, {"x0": 0, "x1": 1000, "y0": 0, "y1": 10}),
        (1000, {"x0": 250, "x1": 375, "y0": 3, "y1": 5}),
        (700, {"x0": 0, "x1": 700, "y0": 0, "y1": 15}),
        (1000, {"x0": -200, "x1": 1300, "y0": -2, "y1": 12}),
    ],
    ids=["all", "a part", "a last row that is not full", "more than there is"],
)
def test_a_pixel_of_the_map_is_the_mean_of_what_lies_there(
    row: int, view: dict[str, int], chromium: Browser, served: Serve
) -> None:
    random = np.random.default_rng(3)
    sizes = [2500]  # over several rows
    while sum(sizes) < 10_000:
        sizes.append(min(int(random.choice([1, 2, 3, 12, 40])), 10_000 - sum(sizes)))
    states = [int(n) for n in random.integers(3, size=len(sizes))]
    streams = [int(n) for n in random.integers(-3, 20, size=len(sizes))]
    with CachingAllocator(SimDevice(memory=1 << 30), config=Config(), name="idle") as pool:
        chromium.open(served(pool))
        width, height = 250, (view["y1"] - view["y0"]) * 12
        picture = painted(chromium, sizes, states, streams, width=width, height=height, row=row, **view)
    colors = np.array([[int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in BY_STREAM], dtype=float)
    shade = [
        0 if state == 2 else 1 + stream % len(HUES) + len(HUES) * (state == 1)
        for state, stream in zip(states, streams, strict=True)
    ]
    fine = 20  # looks at each byte this often; a line between blocks is half a pixel, which no sample may decide
    begin = np.repeat(np.cumsum(sizes) - sizes, sizes)
    color = np.repeat(colors[shade], sizes, axis=0)
    size = np.repeat(sizes, sizes)
    scale = width / (view["x1"] - view["x0"])
    for line in range(view["y0"], view["y1"]):
        at = view["x0"] + (np.arange(width * fine) + 0.5) / fine / scale
        byte = line * row + np.floor(at).astype(int)
        there = (line >= 0) & (at >= 0) & (at < row) & (byte >= 0) & (byte < 10_000)
        byte = np.where(there, byte, 0)
        weight = there.astype(float).reshape(width, fine)
        mean = (color[byte].reshape(width, fine, 3) * weight[..., None]).sum(1) / np.maximum(weight.sum(1), 1)[:, None]
        got = picture[(line - view["y0"]) * 12 + 6]
        # Whole pixels away from a line around a segment, or between two wide blocks.
        end = begin[byte] + size[byte]
        row_end = (line + 1) * row
        wide = (np.minimum(end, row_end) - np.maximum(begin[byte], line * row)) * scale >= 3.5
        near = there & wide & ((np.minimum(end, row_end) - (line * row + at)) * scale <= 1.5)
        sure = (weight.mean(1) == 1) & ~near.reshape(width, fine).any(1)
        edges = [0.0, 10_000.0 - line * row]
        places = [int((edge - view["x0"]) * scale) for edge in edges]
        for place in places:
            sure[max(0, place - 1) : max(0, place + 2)] = False
        assert np.abs(got[sure, :3] - mean[sure]).max(initial=0) <= 14, line
        assert (got[sure, 3] == 255).all()
        assert (got[(weight.sum(1) == 0) & ~np.isin(np.arange(width), places), 3] == 0).all(), "nothing is there"
    assert len(np.unique(picture.reshape(-1, 4), axis=0)) > 5, "there is something to see"


def test_the_map_is_painted_anew_for_what_is_in_sight(chromium: Browser, served: Serve) -> None:
    with CachingAllocator(SimDevice(memory=8 << 30), config=Config(), name="still") as pool:
        held = [pool.allocate(3 * MIB) for _ in range(3)]
        chromium.open(served(pool))
        chromium.until("return weir.map.painted > 0")
        chromium.ask(
            "const plot = Bokeh.documents[0].get_model_by_name('map');"
            "plot.x_range.setv({start: plot.x_range.end / 4, end: plot.x_range.end / 2});"
            "plot.y_range.setv({start: 2, end: 1});"
        )
        shown = chromium.until(
            """
            const {x, y, dw, dh, image} = Bokeh.documents[0].get_model_by_name("picture").data;
            const plot = Bokeh.documents[0].get_model_by_name("map");
            if (y[0] !== 1) return null;
            return {x: x[0] / plot.x_range.reset_end, dw: dw[0] / plot.x_range.reset_end, dh: dh[0],
                    shape: image[0].shape, inner: [plot.inner_height, plot.inner_width]};
            """
        )
        assert (shown["x"], shown["dw"], shown["dh"]) == (0.25, 0.25, 1)
        assert shown["shape"] == shown["inner"], "one pixel of the picture is one of the screen"
        assert chromium.complaints() == []
        del held


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_follows_light_and_dark_and_can_be_told(
    dark: bool, chromium: Browser, served: Serve, busy: CachingAllocator
) -> None:
    url = served(busy)
    chromium.open(url, dark=dark)
    look = """
      const style = (node) => getComputedStyle(node);
      const figure = Bokeh.documents[0].get_model_by_name("memory");
      return [document.documentElement.dataset.theme, style(document.body).backgroundColor,
              style(document.querySelector("section")).color, figure.below[0].major_label_text_color];
    """
    theme, page, text, axis = chromium.ask(look)
    assert theme == ("dark" if dark else "light")

    def light(color: str) -> float:
        parts = color.strip("rgba()").split(",")
        return sum(float(part) for part in parts[:3]) / 3

    assert abs(light(page) - light(text)) > 120, "text stands out"
    chromium.ask("document.getElementById('theme').click()")
    told = chromium.ask(look)
    assert told[0] != theme and told[3] != axis
    assert (light(told[1]) > light(page)) is dark
    chromium.ask("localStorage.clear()")
    assert chromium.complaints() == []


@pytest.mark.parametrize("width", [360, 390, 768, 1024, 1400])
def test_no_width_needs_scrolling_sideways(
    width: int, chromium: Browser, served: Serve, busy: CachingAllocator
) -> None:
    chromium.open(served(busy), width=width, height=900)
    assert chromium.ask("return document.documentElement.scrollWidth") <= width
    wide = chromium.ask(
        "return [...document.querySelectorAll('section')].filter("
        "(one) => one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.id)"
    )
    assert wide == []
    assert chromium.complaints() == []


def test_another_window_of_time_and_other_colours_can_be_chosen(
    chromium: Browser, served: Serve, busy: CachingAllocator
) -> None:
    chromium.open(served(busy))
    press = """
      const group = Object.values(Bokeh.index.roots ?? Bokeh.index).flat().find((v) => v.model?.name === arguments[0]);
      group.el.shadowRoot.querySelectorAll("button, .bk-btn")[arguments[1]].click();
    """
    chromium.until("return weir.map.painted > 0")
    used = """
      const [pixels] = Bokeh.documents[0].get_model_by_name("picture").data.image;
      const used = arguments[0].filter((color) => pixels.includes(color));
    """
    chromium.until(used + "return used.length > 1", LIVE)  # streams have colours of their own
    chromium.ask(press, "colors", 1)
    chromium.until(used + "return used.length === 1 && used[0] === arguments[1]", LIVE_BUT_ORANGE, pixel(BLUE))
    chromium.until("return Bokeh.documents[0].get_model_by_name('timeline').data.number.length >= 4")
    for at, seconds in ((3, 3600), (0, 60)):
        chromium.ask(press, "window", at)
        chromium.until("return Bokeh.documents[0].get_model_by_name('window').active === arguments[0]", at)
        chromium.until("return Bokeh.documents[0].get_model_by_name('timeline').data.number.length >= 4")
        times = chromium.column("timeline", "time")
        assert times[-1] - times[0] <= seconds * 1000
    assert chromium.complaints() == []


def test_a_server_that_goes_away_is_told(chromium: Browser, busy: CachingAllocator) -> None:
    from allocator.metrics import serve

    server = serve(busy, port=0)
    chromium.open(server.url)
    assert chromium.ask("return getComputedStyle(document.getElementById('lost')).display") == "none"
    server.close()
    chromium.until("return getComputedStyle(document.getElementById('lost')).display !== 'none'")


def test_nothing_is_asked_of_any_other_machine(chromium: Browser, served: Serve, busy: CachingAllocator) -> None:
    url = served(busy)
    chromium.open(url)
    asked = chromium.ask("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert asked and all(one.startswith((url, "data:", "blob:")) for one in asked), asked

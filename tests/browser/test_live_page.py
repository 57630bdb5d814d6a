"""The live page as a visitor sees it, in a headless Chromium."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from allocator import CachingAllocator, Config, SimDevice, Stream
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


def test_every_panel_has_data_and_is_drawn_without_a_complaint(
    chromium: Browser, served: Serve, busy: CachingAllocator
) -> None:
    chromium.open(served(busy))
    chromium.until("return Bokeh.documents[0].get_model_by_name('timeline').data.time.length >= 3")
    chromium.until("return Bokeh.documents[0].get_model_by_name('blocks').data.left.length > 0")
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
    text = chromium.until(
        "return Object.values(Bokeh.index.roots ?? Bokeh.index).flat()"
        ".find((one) => one.model?.name === 'head').el.shadowRoot.textContent.trim()"
    )
    for question in ("Could be given back now", "In flight", "Saved by reuse across streams"):
        assert question in text
    chromium.until("return document.querySelector('#panel-streams > .bk-Div, #panel-streams div')")
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
        chromium.until("return Bokeh.documents[0].get_model_by_name('blocks').data.left.length >= 2")
        for ptr, size, state in ((live.ptr, "3 MiB", "live"), (address, "2 MiB", "in flight")):
            place = chromium.ask(
                """
                const source = Bokeh.documents[0].get_model_by_name("blocks").data;
                const at = Array.from(source.address).indexOf(arguments[0]);
                const views = Object.values(Bokeh.index.roots ?? Bokeh.index).flat();
                const view = views.find((one) => one.model?.name === "map");
                view.el.scrollIntoView({block: "center"});
                const frame = view.frame;
                const box = view.canvas_view.el.getBoundingClientRect();
                return [box.left + frame.x_scale.compute((source.left[at] + source.right[at]) / 2),
                        box.top + frame.y_scale.compute((source.top[at] + source.bottom[at]) / 2)];
                """,
                ptr,
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
    before = chromium.ask("return Bokeh.documents[0].get_model_by_name('blocks-colors').palette.join()")
    chromium.ask(press, "colors", 1)
    chromium.until(
        "return Bokeh.documents[0].get_model_by_name('blocks-colors').palette.join() !== arguments[0]", before
    )
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

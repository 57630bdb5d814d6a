"""The live page without a browser: what its document holds, and what it sends when."""

from __future__ import annotations

import builtins
import math
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bokeh.document import Document
from bokeh.document.events import (
    ColumnDataChangedEvent,
    ColumnsPatchedEvent,
    ColumnsStreamedEvent,
    DocumentPatchedEvent,
    ModelChangedEvent,
)

from allocator import AllocatorError, CachingAllocator, Config, SimDevice, Stream
from allocator.metrics import History, make_document
from allocator.metrics.history import SIZES
from allocator.metrics.page.address_map import BY_STATE, BY_STREAM, MOST, compact, lay_out, row_length
from allocator.metrics.page.document import AHEAD, FIRST_WINDOW, WINDOWS, Page
from allocator.metrics.page.heatmap import size_label
from allocator.metrics.page.panels import SENT, rows_of
from allocator.metrics.page.words import TOP, head, stream_table

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20


class Clock:
    """A second a look."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


class Visitor:
    """A page, what it has sent since the last look, and a browser that confirms when told."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.doc = Document()
        self.page = Page(self.doc, history)
        self.page.open()
        self._events: list[Any] = []
        self.doc.on_change(self._note)

    def sample(self, times: int = 1, *, seen: bool = True) -> list[Any]:
        """Take samples, let the page have its turns, and return what it sent."""
        self._events.clear()
        for _ in range(times):
            self.history.sample()
            self.turn()
            if seen:
                self.confirm()
        return list(self._events)

    def _note(self, event: Any) -> None:
        if isinstance(event, DocumentPatchedEvent):  # others are the server's own business
            self._events.append(event)

    def turn(self) -> None:
        for callback in list(self.doc.session_callbacks):
            self.doc.remove_next_tick_callback(callback)  # type: ignore[arg-type]
            callback.callback()

    def confirm(self) -> None:
        words = self.model("words")
        words.tags = [words.data["update"][0]]

    def model(self, name: str) -> Any:
        return self.doc.get_model_by_name(name)

    def says(self, place: str) -> str:
        """What stands in words at a place of the page, as HTML."""
        (text,) = self.model("words").data[place]
        assert isinstance(text, str)
        return text

    def close(self) -> None:
        for callback in self.doc.session_destroyed_callbacks:
            callback(None)  # type: ignore[arg-type]


@pytest.fixture
def history(pool: CachingAllocator) -> History:
    return History(lambda: [pool], clock=Clock())


@pytest.fixture
def visitor(history: History) -> Iterator[Visitor]:
    history.sample()
    visitor = Visitor(history)
    yield visitor
    visitor.close()


def columns(model: Any) -> dict[str, list[Any]]:
    return {name: list(values) for name, values in model.data.items()}


# -- the document -----------------------------------------------------------------------------------


def test_a_document_has_every_panel_and_the_page_a_place_for_each(visitor: Visitor) -> None:
    names = {root.name for root in visitor.doc.roots}
    panels = {"memory", "requested", "fragmentation", "largest", "reuse", "cost", "in-flight", "growth", "retries"}
    assert names == panels | {"sizes", "map", "pool", "window", "colors"}
    template = (ROOT / "metrics/page/page.html").read_text()
    for name in names:
        assert f"roots.{name}" in template or f'panel("{name}"' in template, name
    for place in set(visitor.model("words").data) - {"update"}:
        assert f'id="{place}"' in template, place


def test_nothing_is_loaded_from_elsewhere() -> None:
    for path in (ROOT / "metrics/page").iterdir():
        if path.suffix in (".html", ".css", ".js"):
            assert "http:" not in path.read_text() and "https:" not in path.read_text(), path


def test_what_the_page_reads_at_run_time_is_packed() -> None:
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = packed["allocator.metrics.page"]
    files = [path.name for path in (ROOT / "metrics/page").iterdir() if path.suffix not in (".py", "")]
    assert len(files) >= 5
    assert [name for name in files if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_axes_have_units(visitor: Visitor) -> None:
    for root in visitor.doc.roots:
        for axis in getattr(root, "yaxis", []):
            assert axis.axis_label, root.name


def test_without_bokeh_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, history: History) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(AllocatorError, match=r'^the live page needs Bokeh: pip install "weir-allocator\[dashboard\]"$'):
        make_document(object(), history)  # type: ignore[arg-type]


def test_importing_the_package_needs_no_bokeh(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.split(".")[0] in ("bokeh", "tornado", "numpy"):
            raise ImportError(name)
        return real(name, *rest)

    for name in [name for name in sys.modules if name.startswith(("allocator.metrics.page", "allocator.metrics.hist"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    import allocator.metrics.history
    import allocator.metrics.page  # noqa: F401


# -- what is sent -----------------------------------------------------------------------------------


def test_a_sample_is_sent_as_one_row_and_never_the_past_again(visitor: Visitor, pool: CachingAllocator) -> None:
    a = pool.allocate(MIB)
    sent = visitor.sample()
    assert [len(e.data["time"]) for e in sent if isinstance(e, ColumnsStreamedEvent) and "number" in e.data] == [1]
    assert not [e for e in sent if isinstance(e, ColumnDataChangedEvent) and e.model.name == "timeline"]
    rows = columns(visitor.model("timeline"))
    assert set(rows) == set(SENT)
    assert rows["number"] == [1, 2]
    assert rows["allocated_bytes"] == [0, MIB]
    a.close()


def test_a_page_opened_later_shows_the_same_rows(visitor: Visitor, pool: CachingAllocator, history: History) -> None:
    for size in (1, 2, 3):
        kept = pool.allocate(size * MIB)
        visitor.sample()
        kept.close()
    later = Visitor(history)
    for name, values in columns(visitor.model("timeline")).items():
        assert np.array_equal(values, columns(later.model("timeline"))[name], equal_nan=True), name
    assert columns(visitor.model("cells"))["count"] == columns(later.model("cells"))["count"]
    later.close()


def test_the_source_holds_no_more_than_the_window(visitor: Visitor) -> None:
    visitor.sample(FIRST_WINDOW.seconds + 40)
    times = columns(visitor.model("timeline"))["time"]
    assert times[-1] - times[0] == FIRST_WINDOW.seconds * 1000
    cells = columns(visitor.model("cells"))
    assert len(cells["count"]) <= 32 * len(SIZES)


def test_another_window_shows_that_much_of_the_past_in_few_rows(pool: CachingAllocator, history: History) -> None:
    for _ in range(3600):
        history.sample()
    visitor = Visitor(history)
    for at, window in enumerate(WINDOWS):
        visitor.model("window").active = at
        times = columns(visitor.model("timeline"))["time"]
        step = window.step(1)
        assert len(times) <= 302
        assert window.seconds - 2 * step <= (times[-1] - times[0]) / 1000 <= window.seconds
        visitor.sample(step)
        assert columns(visitor.model("timeline"))["time"][-1] > times[-1]
    visitor.close()


def test_a_young_history_is_shown_at_once_and_joined_as_it_grows(visitor: Visitor) -> None:
    visitor.model("window").active = len(WINDOWS) - 1
    visitor.confirm()
    visitor.sample(3)
    assert columns(visitor.model("timeline"))["number"] == [1, 2, 3, 4]
    visitor.sample(300)
    assert columns(visitor.model("timeline"))["number"] == list(range(2, 305, 2))


def test_a_row_of_several_samples_is_the_fullest_of_them_with_all_their_events(
    pool: CachingAllocator, history: History
) -> None:
    history.sample()
    for size in (4, 9, 2):
        kept = [pool.allocate(MIB) for _ in range(size)]
        history.sample()
        del kept
    samples = history.pools()[0].since(0)
    rows = rows_of(samples, 4)
    assert rows["number"].tolist() == [4]
    assert rows["allocated_bytes"].tolist() == [9 * MIB]
    assert sum(rows[name][0] for name in SENT if name.startswith("reuse_")) == pytest.approx(15 / 3)
    assert (rows["reserved_bytes"] == rows["allocated_bytes"] + rows["in_flight_bytes"] + rows["idle_bytes"]).all()
    assert len(rows_of(samples, 5)["number"]) == 0, "a row that is not complete comes later"
    assert set(rows_of({}, 1)) == set(SENT)


def test_limits_that_are_none_are_not_drawn(pool: CachingAllocator, history: History) -> None:
    history.sample()
    pool.set_limit(64 * MIB)
    history.sample()
    rows = rows_of(history.pools()[0].since(0))
    assert math.isnan(rows["limit"][0]) and rows["limit"][1] == 64 * MIB
    assert rows["device"].tolist() == [1 << 30] * 2


# -- a browser that does not keep up ----------------------------------------------------------------


def test_a_browser_that_is_asleep_gets_nothing_more_and_what_it_missed_when_it_wakes(visitor: Visitor) -> None:
    visitor.confirm()
    visitor.sample(AHEAD + 2, seen=False)
    assert visitor.sample(50, seen=False) == []
    before = columns(visitor.model("timeline"))["number"][-1]
    visitor.confirm()
    numbers = columns(visitor.model("timeline"))["number"]
    assert numbers == list(range(1, len(numbers) + 1))
    assert numbers[-1] - before >= 50


@pytest.mark.parametrize("nonsense", [[], ["5"], [None], [True], [10**9], [float("inf")], [-3], [float("nan")]])
def test_what_a_browser_confirms_may_be_nonsense(visitor: Visitor, nonsense: list[Any]) -> None:
    visitor.model("words").tags = nonsense
    visitor.sample()
    assert visitor.page._seen <= visitor.page._sent


def test_a_page_that_is_closed_no_longer_watches(pool: CachingAllocator, history: History) -> None:
    history.sample()
    visitor = Visitor(history)
    assert history.watched
    visitor.close()
    assert not history.watched
    history.sample()
    assert not visitor.doc.session_callbacks


def test_a_document_that_is_being_taken_apart_does_not_disturb_the_history(
    pool: CachingAllocator, history: History, caplog: pytest.LogCaptureFixture
) -> None:
    visitor = Visitor(history)
    visitor.doc.callbacks.destroy()
    history.sample()
    assert not caplog.records
    assert history.pools()[0].count == 1
    visitor.page._watching.close()


# -- several pools ----------------------------------------------------------------------------------


def test_a_pool_can_be_chosen(gpu: SimDevice) -> None:
    pools = [CachingAllocator(gpu, config=Config(), name=name) for name in ("first", "second")]
    held = pools[1].allocate(3 * MIB)
    history = History(lambda: pools, clock=Clock())
    history.sample()
    visitor = Visitor(history)
    select = visitor.model("pool")
    assert (select.options, select.value) == (["first on sim:0", "second on sim:0"], "first on sim:0")
    assert columns(visitor.model("timeline"))["allocated_bytes"] == [0]
    select.value = "second on sim:0"
    visitor.sample()
    assert columns(visitor.model("timeline"))["allocated_bytes"] == [3 * MIB] * 2
    assert columns(visitor.model("blocks"))["size"][0] == 3 * MIB
    held.close()
    pools[1].close()
    visitor.sample()
    assert (select.options, select.value) == (["first on sim:0"], "first on sim:0")
    pools[0].close()
    visitor.sample()
    assert "no pool to show" in visitor.says("head")
    assert columns(visitor.model("timeline"))["time"] == []
    visitor.close()


def test_a_page_that_is_opened_before_there_is_a_pool_fills_later(gpu: SimDevice) -> None:
    pools: list[CachingAllocator] = []
    history = History(lambda: pools, clock=Clock())
    visitor = Visitor(history)
    pools.append(CachingAllocator(gpu, config=Config(), name="late"))
    visitor.sample(2)
    assert columns(visitor.model("timeline"))["number"] == [1, 2]
    pools[0].close()
    visitor.close()


# -- words ------------------------------------------------------------------------------------------


def test_the_head_answers_in_words(gpu: SimDevice, pool: CachingAllocator, visitor: Visitor) -> None:
    copy, other = Stream(gpu, name="copy"), Stream(gpu)
    x = pool.allocate(8 * MIB, stream=copy)
    x.close()
    gpu.run_until_idle()
    pool.stats()
    pool.allocate(8 * MIB, stream=other).close()  # finished, and of another stream: saved
    gpu.run_until_idle()
    held = pool.allocate(16 * MIB, stream=copy)
    gpu.launch(copy, duration_ns=10**9, writes=[held])
    held.close()
    pool.allocate(8 * MIB, stream=other).close()  # idle, in a piece of its own
    pool.set_limit(256 * MIB)
    visitor.sample()
    text = visitor.says("head")
    assert "<strong>8.00 MiB</strong>" in text and "of 24.00 MiB reserved" in text
    assert "<strong>16.00 MiB</strong>" in text and "16.00 MiB of it was allocated on stream copy" in text
    assert "<strong>2 times</strong>" in text and "of 4 allocations, 50.0%" in text and "2 in the last minute" in text
    assert "of the limit, 256 MiB" in text
    table = visitor.says("streams")
    assert "copy</th><td>0 B</td><td>16.00 MiB</td>" in table


def test_names_from_users_are_escaped_everywhere(gpu: SimDevice) -> None:
    evil = "<script>alert(1)</script>"
    pool = CachingAllocator(gpu, config=Config(), name=evil)
    stream = Stream(gpu, name=evil)
    held = pool.allocate(MIB, stream=stream)
    gpu.launch(stream, duration_ns=10**9, writes=[held])
    held.close()
    kept = pool.allocate(MIB, stream=stream)
    history = History(lambda: [pool], clock=Clock())
    visitor = Visitor(history)
    visitor.sample()
    for name in ("head", "streams"):
        assert "<script" not in visitor.says(name)
    assert "&lt;script" in visitor.says("streams")
    assert "<script" not in head(history.pools()[0])
    kept.close()
    visitor.close()
    pool.close()


def test_many_streams_are_summed_up(gpu: SimDevice, pool: CachingAllocator, visitor: Visitor) -> None:
    streams = [Stream(gpu, name=f"s{n}") for n in range(TOP + 5)]
    kept = [pool.allocate((n + 1) * MIB, stream=stream) for n, stream in enumerate(streams)]
    visitor.sample()
    table = visitor.says("streams")
    assert table.count("<tr>") == TOP + 2
    assert " more</th>" in table
    assert "No figures" in stream_table(None, {})
    del kept


def test_a_pool_that_was_never_read_says_so(gpu: SimDevice, history: History) -> None:
    history.sample()
    one = history.pools()[0]
    one._before = None
    assert "has not been read yet" in head(one)


# -- request sizes ----------------------------------------------------------------------------------


def test_requests_are_counted_in_the_cell_of_their_time_and_size(visitor: Visitor, pool: CachingAllocator) -> None:
    for _ in range(25):
        pool.allocate(100).close()
        pool.allocate(3 * MIB).close()
        visitor.sample()
    cells = columns(visitor.model("cells"))
    assert sum(cells["count"]) == 50
    by_size = {
        size: sum(c for c, s in zip(cells["count"], cells["size"], strict=True) if s == size) for size in cells["size"]
    }
    assert {size: n for size, n in by_size.items() if n} == {"up to 512 B": 25, "up to 8 MiB": 25}
    full = [(shade, count) for shade, count in zip(cells["shade"], cells["count"], strict=True) if count]
    assert all(shade == pytest.approx(math.log10(count)) for shade, count in full)
    assert all(right - left == 10_000 for left, right in zip(cells["left"], cells["right"], strict=True))
    assert size_label(len(SIZES) - 1) == "above 32 GiB"


def test_cells_that_are_full_are_not_sent_again(visitor: Visitor, pool: CachingAllocator) -> None:
    visitor.sample(25)
    pool.allocate(100).close()
    for event in visitor.sample():
        if isinstance(event, ColumnsPatchedEvent) and event.model.name == "cells":
            length = len(visitor.model("cells").data["count"])
            assert all(index >= length - 2 * len(SIZES) for index, _ in event.patches["count"])
        assert not (isinstance(event, ColumnDataChangedEvent | ModelChangedEvent) and event.model.name == "cells")


# -- the address map --------------------------------------------------------------------------------


def shown(visitor: Visitor) -> dict[int, tuple[float, float, str]]:
    """address -> (size, state, stream) of what the browser is told, put together as it does."""
    blocks, segments = columns(visitor.model("blocks")), columns(visitor.model("segments"))
    names = columns(visitor.model("stream-names"))
    called = dict(zip(names["number"], names["name"], strict=True))
    assert len({len(values) for values in blocks.values()}) == 1
    places = iter(zip(segments["address"], segments["size"], strict=True))
    found: dict[int, tuple[float, float, str]] = {}
    address = end = 0
    for size, state, stream in zip(blocks["size"], blocks["state"], blocks["stream"], strict=True):
        if address == end:
            start, length = next(places)
            address, end = int(start), int(start + length)
        found[address] = (int(size), int(state), called.get(int(stream), str(stream)))
        address += int(size)
    assert address == end and not list(places), "blocks fill their segments"
    return found


def expected(pool: CachingAllocator) -> dict[int, tuple[int, int]]:
    states = {"active_allocated": 0, "active_pending_free": 1, "inactive": 2}
    blocks = [block for segment in pool.snapshot()["segments"] for block in segment["blocks"]]
    return {block["address"]: (block["size"], states[block["state"]]) for block in blocks}


def test_the_map_follows_every_change_whatever_is_sent_for_it(
    gpu: SimDevice, pool: CachingAllocator, visitor: Visitor
) -> None:
    random = np.random.default_rng(5)
    streams = [Stream(gpu, name=f"s{n}") for n in range(3)]
    kept: list[Any] = []
    ways: set[tuple[str, ...]] = set()
    for step in range(60):
        if step == 30:
            kept.clear()
            gpu.run_until_idle()
            pool.trim()
        for _ in range(40 if step < 5 else 2):
            kept.append(pool.allocate(int(random.integers(1, 400_000)), stream=streams[random.integers(3)]))
        for _ in range(2 if step % 3 else 0):
            if kept:
                one = kept.pop(int(random.integers(len(kept))))
                gpu.launch(one.stream, duration_ns=1000, writes=[one])
                one.close()
        gpu.advance(500)
        sent = [event for event in visitor.sample() if about(event, "blocks")]
        ways |= {tuple(sorted(event.cols or ())) for event in sent}
        found = shown(visitor)
        assert {address: (size, state) for address, (size, state, _) in found.items()} == expected(pool)
    assert () in ways and any(ways), "all columns, and some of them"
    named = {stream for _, state, stream in found.values() if state == 0}
    assert named <= {"s0", "s1", "s2"} and named
    kept.clear()


def about(event: Any, name: str) -> bool:
    return getattr(getattr(event, "model", None), "name", "") == name


def test_only_columns_that_changed_are_sent_and_in_few_bytes(
    gpu: SimDevice, pool: CachingAllocator, visitor: Visitor
) -> None:
    stream = Stream(gpu)
    kept = [pool.allocate(1000, stream=stream) for _ in range(3000)]
    (sent,) = (event for event in visitor.sample() if about(event, "blocks"))
    assert sent.cols is None, "as many blocks as there were never before"
    count = len(visitor.model("blocks").data["size"])
    assert sum(values.nbytes for values in visitor.model("blocks").data.values()) <= 7 * count
    kept[1500].close()
    (sent,) = (event for event in visitor.sample() if about(event, "blocks"))
    assert sent.cols == ["state"]
    assert not [event for event in visitor.sample() if about(event, "blocks") or about(event, "segments")]
    del kept


@pytest.mark.parametrize("values", [[], [0, 255], [256], [1 << 31], [-1, 5], [1 << 33], [-(1 << 40), 0]])
def test_numbers_are_packed_without_a_loss(values: list[int]) -> None:
    packed = compact(np.array(values, dtype=np.int64))
    assert packed.tolist() == values
    assert packed.dtype in (np.uint8, np.uint16, np.uint32, np.int32, np.float64), (
        "no other kinds are read by a browser"
    )


def test_rows_keep_their_length_while_they_are_neither_few_nor_many() -> None:
    length = row_length(100 * MIB)
    assert 8 <= 100 * MIB / length <= 40
    assert row_length(200 * MIB, length) == length
    assert row_length(1000 * MIB, length) > length
    assert row_length(0) == 2 * MIB


def test_more_blocks_than_can_be_drawn_are_drawn_together(history: History, pool: CachingAllocator) -> None:
    from array import array

    from allocator.metrics.history import AddressMap

    count = MOST + 10
    one = AddressMap(
        time=0,
        address=array("Q", (512 * n for n in range(count))),
        size=array("Q", [512] * count),
        state=array("B", (n // 100 % 2 for n in range(count))),
        stream=array("q", [1] * count),
        names={1: "only"},
        segments=[(0, 512 * count)],
    )
    layout = lay_out(one)
    assert layout.merged
    assert len(layout.columns["size"]) < 1000
    assert set(layout.columns["count"]) <= {100, 10}
    assert layout.columns["size"].sum() == 512 * count
    assert layout.names == {"number": [1], "name": ["only"]}


def test_who_has_zoomed_in_stays_there_until_the_rows_are_others(pool: CachingAllocator, visitor: Visitor) -> None:
    kept = [pool.allocate(3 * MIB)]
    visitor.sample()
    y_range = visitor.model("map").y_range
    y_range.update(start=1.5, end=0.5)  # from the browser
    visitor.sample()
    assert (y_range.start, y_range.end) == (1.5, 0.5)
    kept.append(pool.allocate(5 * MIB))
    visitor.sample()
    assert (y_range.start, y_range.end) == (y_range.reset_start, 0)


def test_an_empty_pool_has_an_empty_map(visitor: Visitor) -> None:
    visitor.sample()
    assert shown(visitor) == {}
    assert visitor.model("map").x_range.end == 2 * MIB


def test_every_stream_and_state_has_a_colour() -> None:
    assert len(BY_STREAM) == len(BY_STATE)
    assert len(set(BY_STREAM)) == len(BY_STREAM)

"""One visitor's page: a Bokeh document that follows a `History`.

Rules:

* A sample is sent once, as rows added to a source; never the hour again.  Only another pool, chosen by the visitor or
  come in the place of one that is gone, sends everything.
* The browser says which row it has seen.  One that does not keep up gets nothing more until it does: what it missed
  comes in one piece then, and nothing piles up here for a visitor who is asleep.
* The document is touched by its own event loop only; the history's thread just asks for a turn.

Next: panels.py, heatmap.py, address_map.py, words.py, and page.html with page.css and page.js.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib import resources
from typing import Any, Final, cast

from bokeh.document import Document
from bokeh.models import ColumnDataSource, CustomJS, Div, InlineStyleSheet, RadioButtonGroup, Range1d, Select

from allocator.metrics.history import History, PoolHistory
from allocator.metrics.page.address_map import BY_STATE, BY_STREAM, LEGEND, MapPanel
from allocator.metrics.page.heatmap import Heatmap
from allocator.metrics.page.looks import Looks
from allocator.metrics.page.panels import TimePanels, rows_of
from allocator.metrics.page.words import head, stream_table

TITLE: Final = "Weir: memory pools"
AHEAD: Final = 5
"""Rows that may be on their way to the browser."""
WINDOWS: Final = (("1 min", 60), ("5 min", 300), ("15 min", 900), ("1 h", 3600))
FIRST_WINDOW: Final = 1

# Runs in the browser when rows have come, and once at the start.
_SEEN_JS: Final = """
const times = timeline.data["time"], numbers = timeline.data["number"];
if (times.length) {
  const end = times[times.length - 1];
  window.weirSpan ??= span;
  const first = Math.min(times[0], end - 30000);
  range.setv({start: Math.max(first, end - 1000 * window.weirSpan), end: end}, {sync: false});
  seen.tags = [numbers[numbers.length - 1]];
}
"""


class Page:
    """The document and what it shows.  `open()` once; it ends with the document's session."""

    def __init__(self, doc: Document, history: History) -> None:
        self._doc = doc
        self._history = history
        self._pool: PoolHistory | None = None
        self._last = 0
        """Number of the newest row that was sent."""
        self._seen = 0
        """Number of the newest row that the browser has."""
        self._asked = False
        """A turn of the event loop is on its way."""
        self._map_time = 0.0
        self._watching = ExitStack()
        sheets = [InlineStyleSheet(css=_read("words.css"))]
        self._head = Div(name="head", stylesheets=sheets, sizing_mode="stretch_width")
        self._streams = Div(name="streams", stylesheets=sheets, sizing_mode="stretch_width")
        widgets = [InlineStyleSheet(css=_read("widgets.css"))]
        self._select = Select(name="pool", options=[], visible=False, width=220, stylesheets=widgets)
        self._windows = RadioButtonGroup(
            name="window", labels=[text for text, _ in WINDOWS], active=FIRST_WINDOW, stylesheets=widgets
        )
        self._colors = RadioButtonGroup(name="colors", labels=["by stream", "by state"], active=0, stylesheets=widgets)
        self._pool = next(iter(history.pools()), None)
        columns = {} if self._pool is None else self._pool.since(0)
        rows = rows_of(columns)
        end = float(rows["time"][-1]) if columns else 0.0
        self._looks = looks = Looks(Range1d(end - WINDOWS[FIRST_WINDOW][1] * 1000, end, name="window"))
        self._panels = TimePanels(looks, rows, max(2, round(history.keep_s / history.interval_s)))
        self._last = self._seen = 0 if not columns else int(columns["number"][-1])
        self._sizes = Heatmap(columns, history.keep_s, looks)
        self._map = MapPanel(looks)
        self._ack = ColumnDataSource({}, name="seen", tags=[self._last])
        doc.title = TITLE
        doc.template = cast(Any, _read("page.html"))  # text is a template that extends Bokeh's own page
        doc.template_variables.update(
            style=_read("page.css"), script=_read("page.js"), legends=self._panels.legends | {"map": LEGEND}
        )

    def open(self) -> None:
        """Put everything into the document, and follow the history until the session ends."""
        roots = (
            self._head,
            self._select,
            self._windows,
            *self._panels.figures,
            self._streams,
            self._sizes.figure,
            self._colors,
            self._map.figure,
        )
        self._listen()
        with self._doc.models.freeze():  # look for models once, not for each root
            for root in roots:
                self._doc.add_root(root)
        self._doc.on_session_destroyed(self._close)
        self._watching.enter_context(self._history.watch(self._ask))
        self._refresh()

    def _listen(self) -> None:
        arguments = {
            "timeline": self._panels.source,
            "range": self._looks.x_range,
            "seen": self._ack,
            "span": WINDOWS[FIRST_WINDOW][1],
        }
        seen = CustomJS(args=arguments, code=_SEEN_JS)
        for event in ("streaming", "change:data"):
            self._panels.source.js_on_change(event, seen)
        self._doc.js_on_event("document_ready", seen, CustomJS(code="window.weirReady();"))
        self._doc.js_on_event("connection_lost", CustomJS(code="window.weirLost();"))
        self._windows.js_on_change(
            "active",
            CustomJS(
                args=arguments | {"seconds": [seconds for _, seconds in WINDOWS]},
                code=f"window.weirSpan = seconds[cb_obj.active];{_SEEN_JS}",
            ),
        )
        self._colors.js_on_change(
            "active",
            CustomJS(
                args={"mapper": self._map.mapper, "palettes": [list(BY_STREAM), list(BY_STATE)]},
                code="mapper.palette = palettes[cb_obj.active]; window.weirColors(cb_obj.active);",
            ),
        )
        self._ack.on_change("tags", self._acknowledged)
        self._select.on_change("value", self._choose)

    def _close(self, context: Any) -> None:
        self._watching.close()

    # -- what the browser says ------------------------------------------------------------------

    def _acknowledged(self, attribute: str, old: object, new: list[Any]) -> None:
        number = new[0] if new else None
        if isinstance(number, int | float) and not isinstance(number, bool):
            self._seen = max(self._seen, min(int(number), self._last))
            if self._pool is not None and self._pool.count > self._last:
                self._refresh()

    def _choose(self, attribute: str, old: object, new: object) -> None:
        for one in self._history.pools():
            if one.label == new and one is not self._pool:
                self._show(one)
                self._refresh()

    # -- what the history says ------------------------------------------------------------------

    def _ask(self) -> None:
        """In the history's thread: a sample was taken."""
        if not self._asked:
            self._asked = True  # before the turn is asked for, which may come at once
            try:
                self._doc.add_next_tick_callback(self._turn)
            except Exception:  # of a document that its server takes apart at this moment, any part may be missing
                self._asked = False

    def _turn(self) -> None:
        self._asked = False
        self._refresh()

    def _refresh(self) -> None:
        """Send what is new, unless the browser is behind."""
        pools = self._history.pools()
        if self._pool not in pools:
            self._show(next(iter(pools), None))
        labels = [one.label for one in pools]
        if self._select.options != labels:
            self._select.update(options=labels, visible=bool(labels))
        if self._pool is not None and self._select.value != self._pool.label:
            self._select.value = self._pool.label
        if self._last - self._seen > AHEAD:
            return
        self._doc.hold("combine")
        try:
            self._send()
        finally:
            self._doc.unhold()

    def _send(self) -> None:
        one = self._pool
        if one is None:
            self._head.text = head(None)
            self._streams.text = stream_table(None, {})
            return
        columns = one.since(self._last)
        if columns:
            self._last = int(columns["number"][-1])
            self._panels.add(rows_of(columns))
            self._sizes.add(columns)
        shown = one.map
        if shown is not None and shown.time != self._map_time:
            self._map_time = shown.time
            self._map.show(shown)
        self._head.text = head(one)
        numbers = {} if shown is None else {name: number for number, name in shown.names.items()}
        self._streams.text = stream_table(one.latest, numbers)

    def _show(self, one: PoolHistory | None) -> None:
        """Another pool: everything of it."""
        self._pool = one
        columns = {} if one is None else one.since(0)
        self._last = self._seen = 0 if not columns else int(columns["number"][-1])
        self._panels.replace(rows_of(columns))
        self._sizes.replace(columns)
        self._map.clear()
        self._map_time = 0.0


def _read(name: str) -> str:
    return resources.files("allocator.metrics.page").joinpath(name).read_text(encoding="utf-8")

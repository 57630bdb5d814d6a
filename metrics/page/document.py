"""One visitor's page: a Bokeh document that follows a `History`.

Rules:

* A sample is sent once, as rows added to a source.  Only another pool or another window of time, chosen by the visitor
  or come in the place of a pool that is gone, sends all that is shown.
* The browser says which update it has seen.  One that does not keep up gets nothing more until it does: what it missed
  comes in one piece then, and nothing piles up here for a visitor who is asleep.
* The document is touched by its own event loop only; the history's thread just asks for a turn.

Next: panels.py, heatmap.py, address_map.py, words.py, and page.html with page.css, page.js and map.js.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final, cast

from bokeh.document import Document
from bokeh.models import ColumnDataSource, CustomJS, InlineStyleSheet, RadioButtonGroup, Range1d, Select

from allocator.metrics.history import History, PoolHistory
from allocator.metrics.page.address_map import LEGEND, MapPanel
from allocator.metrics.page.heatmap import Heatmap
from allocator.metrics.page.looks import Looks
from allocator.metrics.page.panels import Rows, TimePanels, rows_of
from allocator.metrics.page.words import head, stream_table

TITLE: Final = "Weir: memory pools"
AHEAD: Final = 5
"""Updates that may be on their way to the browser."""
ROWS: Final = 300
"""In the panels at most: a longer window has a row for several samples."""


@dataclass(frozen=True)
class Window:
    """How much of the past is shown."""

    text: str
    seconds: int

    def step(self, interval_s: float) -> int:
        """Samples in one row."""
        return max(1, round(self.seconds / interval_s / ROWS))


WINDOWS: Final = (Window("1 min", 60), Window("5 min", 300), Window("15 min", 900), Window("1 h", 3600))
FIRST_WINDOW: Final = WINDOWS[1]

# In the browser, when rows have come and at the start: the panels show all that there is of the window.
_RANGE_JS: Final = """
const times = timeline.data["time"];
if (times.length) {
  const end = times[times.length - 1];
  range.setv({start: Math.min(times[0], end - 30000), end: end}, {sync: false});
}
"""
# After each update, and at the start.
_SEEN_JS: Final = """
weir.say(words.data);
words.tags = [words.data["update"][0]];
"""


class Page:
    """The document and what it shows.  `open()` once; it ends with the document's session."""

    def __init__(self, doc: Document, history: History) -> None:
        self._doc = doc
        self._history = history
        self._pool: PoolHistory | None = None
        self._last = self._counted = 0
        """Number of the newest sample that is in the panels, and in the heatmap."""
        self._sent = self._seen = 0
        """Updates that were sent, and that the browser has seen."""
        self._asked = False
        """A turn of the event loop is on its way."""
        self._map_time = 0.0
        self._watching = ExitStack()
        widgets = [InlineStyleSheet(css=_read("widgets.css"))]
        self._select = Select(name="pool", options=[], visible=False, width=220, stylesheets=widgets)
        self._buttons = RadioButtonGroup(
            name="window",
            labels=[one.text for one in WINDOWS],
            active=WINDOWS.index(FIRST_WINDOW),
            stylesheets=widgets,
        )
        self._colors = RadioButtonGroup(name="colors", labels=["by stream", "by state"], active=0, stylesheets=widgets)
        self._pool = next(iter(history.pools()), None)
        self._window = FIRST_WINDOW
        self._step = 1
        columns = self._past()
        rows = rows_of(columns, self._step)
        self._set_last(columns, rows)
        self._looks = looks = Looks(Range1d(0, 1))
        self._panels = TimePanels(looks, rows, self._keep)
        self._sizes = Heatmap(columns, self._window.seconds, looks)
        self._map = MapPanel(looks)
        self._words = ColumnDataSource({"head": [""], "streams": [""], "update": [0]}, name="words", tags=[0])
        """HTML for two places of the page.  It comes last of an update, with its number; tags: what was seen."""
        doc.title = TITLE
        doc.template = cast(Any, _read("page.html"))  # text is a template that extends Bokeh's own page
        doc.template_variables.update(
            style=_read("page.css"),
            script=_read("page.js") + _read("map.js"),
            legends=self._panels.legends | {"map": LEGEND},
        )

    def open(self) -> None:
        """Put everything into the document, and follow the history until the session ends."""
        roots = (
            self._select,
            self._buttons,
            *self._panels.figures,
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
        # What only callbacks of the document name is no part of it; `words` is, as one of a figure's names it too.
        arguments = {"timeline": self._panels.source, "range": self._looks.x_range, "words": self._words}
        newest = CustomJS(args=arguments, code=_RANGE_JS)
        for event in ("streaming", "change:data"):
            self._panels.source.js_on_change(event, newest)
        seen = CustomJS(args={"words": self._words}, code=_SEEN_JS)
        self._words.js_on_change("data", seen)
        self._doc.js_on_event("document_ready", newest, seen, self._map.paint, CustomJS(code="weir.ready();"))
        self._doc.js_on_event("connection_lost", CustomJS(code="weir.lost();"))
        self._colors.js_on_change("active", CustomJS(code="weir.colors(cb_obj.active);"))
        self._words.on_change("tags", self._acknowledged)
        self._select.on_change("value", self._choose)
        self._buttons.on_change("active", self._look_back)

    def _close(self, context: Any) -> None:
        self._watching.close()

    # -- what the browser says ------------------------------------------------------------------

    def _acknowledged(self, attribute: str, old: object, new: list[Any]) -> None:
        number = new[0] if new else None
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
            behind = self._behind
            self._seen = max(self._seen, min(int(number), self._sent))
            if behind and not self._behind:
                self._refresh()

    @property
    def _behind(self) -> bool:
        return self._sent - self._seen > AHEAD

    def _choose(self, attribute: str, old: object, new: object) -> None:
        for one in self._history.pools():
            if one.label == new and one is not self._pool:
                self._show(one)
                self._refresh()

    def _look_back(self, attribute: str, old: object, new: object) -> None:
        if isinstance(new, int) and 0 <= new < len(WINDOWS):
            self._window = WINDOWS[new]
            self._show(self._pool)
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
        if self._behind:
            return
        self._doc.hold("combine")
        try:
            self._send()
            self._sent += 1
            self._words.data = {**self._said(), "update": [self._sent]}
        finally:
            self._doc.unhold()

    def _send(self) -> None:
        one = self._pool
        if one is None:
            return
        if self._fitting_step() > 2 * self._step or (self._fitting_step() > self._step == 1):
            self._show(one)  # a young history has outgrown its rows
        columns = one.since(self._last)
        if len((rows := rows_of(columns, self._step))["number"]):
            self._last = int(rows["number"][-1])
            self._panels.add(rows)
        if columns := one.since(self._counted):
            self._counted = int(columns["number"][-1])
            self._sizes.add(columns)
        shown = one.map
        if shown is not None and shown.time != self._map_time:
            self._map_time = shown.time
            self._map.show(shown)

    def _said(self) -> dict[str, list[Any]]:
        one = self._pool
        if one is None:
            return {"head": [head(None)], "streams": [stream_table(None, {})]}
        numbers = {} if one.map is None else {name: number for number, name in one.map.names.items()}
        return {"head": [head(one)], "streams": [stream_table(one.latest, numbers)]}

    def _show(self, one: PoolHistory | None) -> None:
        """Another pool or another window: everything of it."""
        if one is not self._pool:
            self._map.clear()
            self._map_time = 0.0
        self._pool = one
        columns = self._past()
        rows = rows_of(columns, self._step)
        self._set_last(columns, rows)
        self._panels.replace(rows, self._keep)
        self._sizes.replace(columns, self._window.seconds)

    # -- the window of time ---------------------------------------------------------------------

    @property
    def _keep(self) -> int:
        """Rows that the panels hold: a window of them, and one that begins to leave it."""
        return max(2, round(self._window.seconds / self._history.interval_s / self._step)) + 1

    def _fitting_step(self) -> int:
        """Samples in a row: as few as the panels can hold of what there is."""
        there = 0 if self._pool is None else self._pool.count
        return min(self._window.step(self._history.interval_s), max(1, -(-there // ROWS)))

    def _past(self) -> dict[str, array[float]]:
        """The samples of the window, and how many of them make a row from now on."""
        self._step = self._fitting_step()
        one = self._pool
        return {} if one is None else one.since(max(0, one.count - self._keep * self._step))

    def _set_last(self, columns: Mapping[str, Sequence[float]], rows: Rows) -> None:
        numbers = rows["number"]
        first = int(columns["number"][0]) - 1 if columns else 0
        self._last = int(numbers[-1]) if len(numbers) else first - first % self._step
        self._counted = int(columns["number"][-1]) if columns else 0


@cache
def _read(name: str) -> str:
    return resources.files("allocator.metrics.page").joinpath(name).read_text(encoding="utf-8")

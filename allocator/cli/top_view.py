"""What `weir top` shows: from a metrics page to lines of styled text.  Knows no terminal and no network.

Rule: a frame never has more lines or wider ones than it is asked for.  Names come from elsewhere: what cannot be
printed is shown as `?`.
Next: top.py.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from allocator.sizes import format_size

Line = list[tuple[str, str]]
"""Pieces of text, each with its style: words out of bold, dim, and one colour."""

Pool = tuple[str, str]
"""Name and device."""

PREFIX: Final = "weir_"
REUSE: Final = (
    ("same_stream", "same stream"),
    ("event_dependency", "already waited for"),
    ("opportunistic", "work was finished"),
    ("internal_dependency", "made to wait"),
    ("new_memory", "new memory"),
)
PARTS: Final = (
    ("allocated", "allocated_bytes", "blue", "█", "#"),
    ("in flight", "in_flight_bytes", "yellow", "▓", "="),
    ("idle", "idle_bytes", "green", "░", "."),
)
LEAST_WIDTH: Final = 20


@dataclass(frozen=True)
class Reading:
    """One metrics page: pool -> metric (without `weir_`) -> value of its own label, or "" -> value."""

    pools: Mapping[Pool, Mapping[str, Mapping[str, float]]]
    at: float = field(default_factory=time.monotonic)

    def value(self, pool: Pool, name: str, label: str = "") -> float:
        """One value; 0 if the page has none."""
        return self.pools.get(pool, {}).get(name, {}).get(label, 0.0)

    def total(self, pool: Pool, name: str) -> float:
        """The sum over the metric's label."""
        return sum(self.pools.get(pool, {}).get(name, {}).values())


def read_metrics(text: str) -> Reading:
    """Parse a metrics page; ValueError if it is none.

    >>> page = 'weir_idle_bytes{pool="a",device="0"} 512\\n'
    >>> read_metrics(page).value(("a", "0"), "idle_bytes")
    512.0
    """
    pools: dict[Pool, dict[str, dict[str, float]]] = {}
    found = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found += 1
            if not sample.name.startswith(PREFIX) or "pool" not in sample.labels:
                continue
            labels = dict(sample.labels)
            pool = (printable(labels.pop("pool")), printable(labels.pop("device", "")))
            label = printable(next(iter(labels.values()), ""))
            pools.setdefault(pool, {}).setdefault(sample.name.removeprefix(PREFIX), {})[label] = sample.value
    if text.strip() and not found:
        raise ValueError("no metrics")
    return Reading(pools)


def printable(text: str) -> str:
    """A name without anything that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:80])


def columns(text: str) -> int:
    """Cells of a terminal that a text takes."""
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def fit(text: str, width: int) -> str:
    """Exactly so many cells: cut, or filled up."""
    while columns(text) > width:
        text = text[:-1]
    return text + " " * (width - columns(text))


def plain(line: Line) -> str:
    """A line without styles."""
    return "".join(text for text, _ in line).rstrip()


def clip(line: Line, width: int) -> Line:
    """No wider than that."""
    clipped: Line = []
    for text, style in line:
        room = width - sum(columns(shown) for shown, _ in clipped)
        if columns(text) > room:
            return [*clipped, (fit(text, room), style)]
        clipped.append((text, style))
    return clipped


class Screen:
    """What was chosen and what was read before, between two frames."""

    def __init__(self, url: str, *, color: bool = False, ascii_only: bool = False) -> None:
        self.color = color
        self.ascii_only = ascii_only
        self._url = url
        self._chosen = 0
        self._now: Reading | None = None
        self._before: Reading | None = None

    def move(self, by: int) -> None:
        """Choose the next pool, or the one before."""
        self._chosen += by

    def frame(self, reading: Reading | None, problem: str | None, width: int, height: int) -> list[Line]:
        """The whole picture.  height: 0 for as many lines as it takes.  problem: why the reading is no newer."""
        if reading is not self._now:
            self._before, self._now = self._now, reading
        width = max(width, LEAST_WIDTH)
        lines = list(self._lines(reading, problem, width, height or 1000))
        if reading is not None and reading.pools:
            lines += self._streams(reading, sorted(reading.pools)[self._chosen], width, (height or 1000) - len(lines))
        return [clip(line, width) for line in (lines[:height] if height else lines)]

    # -- parts ----------------------------------------------------------------------------------

    def _lines(self, reading: Reading | None, problem: str | None, width: int, height: int) -> Iterator[Line]:
        clock = time.strftime("%H:%M:%S")
        title = f"weir top  {self._url}"
        yield [(fit(title, width - len(clock) - 1), "bold"), (f" {clock}", "dim")]
        if problem is not None:
            yield [(f"{'still trying' if reading is None else 'old figures'}: {problem}", "red")]
        if reading is None:
            if problem is None:
                yield [("asking ...", "dim")]
            return
        pools = sorted(reading.pools)
        if not pools:
            yield [("no pools there yet", "dim")]
            return
        self._chosen = min(max(self._chosen, 0), len(pools) - 1)
        if len(pools) > 1:
            yield from self._list(reading, pools, width, max(2, height // 4))
        yield from self._detail(reading, pools[self._chosen], width)

    def _list(self, reading: Reading, pools: list[Pool], width: int, most: int) -> Iterator[Line]:
        first = min(max(0, self._chosen - most // 2), max(0, len(pools) - most))
        name_width = max(12, width - 40)
        head = f"{fit('pool', name_width)}{'reserved':>13}{'allocated':>13}{'in flight':>13}"
        yield [(head, "dim")]
        for at in range(first, min(first + most, len(pools))):
            pool = pools[at]
            sizes = (reading.value(pool, f"{part}_bytes") for part in ("reserved", "allocated", "in_flight"))
            text = ("> " if at == self._chosen else "  ") + f"{pool[0]} on {pool[1]}"
            figures = "".join(f"{format_size(int(size)):>13}" for size in sizes)
            yield [(fit(text, name_width) + figures, "bold" if at == self._chosen else "")]
        if len(pools) > most:
            yield [(f"  {self._chosen + 1} of {len(pools)} pools", "dim")]

    def _detail(self, reading: Reading, pool: Pool, width: int) -> Iterator[Line]:
        def size(name: str) -> str:
            return format_size(int(reading.value(pool, f"{name}_bytes")))

        yield []
        yield [(f"{pool[0]} on {pool[1]}", "bold")]
        reserved, limit = reading.value(pool, "reserved_bytes"), reading.value(pool, "limit_bytes")
        against = f" of the limit, {size('limit')} ({reserved / limit:.0%})" if limit else ""
        device = f"   device {size('device_size')}" if reading.value(pool, "device_size_bytes") else ""
        yield [("reserved ", ""), (size("reserved"), "bold"), (f"{against}   peak {size('peak_reserved')}{device}", "")]
        yield self._bar(reading, pool, limit or reading.value(pool, "peak_reserved_bytes") or reserved, width)
        parts: Line = []
        for text, name, color, full, simple in PARTS:
            parts += [(simple if self.ascii_only else full, color), (f" {text} ", ""), (size(name[:-6]), "bold")]
            parts.append(("   ", ""))
        yield parts
        yield [
            ("could be given back ", ""),
            (size("releasable"), "bold"),
            (f"   largest free block {size('largest_free_block')}   stranded {size('stranded')}", ""),
        ]
        external = reading.value(pool, "external_fragmentation_ratio")
        internal = reading.value(pool, "internal_fragmentation_ratio")
        oldest = reading.value(pool, "oldest_in_flight_seconds")
        yield [
            (f"fragmentation external {external:.0%}, internal {internal:.1%}   oldest in flight {oldest:.1f} s", "")
        ]
        yield []
        yield from self._reuse(reading, pool, width)
        yield self._costs(reading, pool)
        yield from self._trouble(reading, pool)
        yield []

    def _bar(self, reading: Reading, pool: Pool, scale: float, width: int) -> Line:
        room = width - 2
        line: Line = [("[", "dim")]
        drawn, so_far = 0, 0.0
        for _, name, color, full, simple in PARTS:
            so_far += reading.value(pool, name)
            end = min(room, round(room * so_far / scale)) if scale else 0
            line.append(((simple if self.ascii_only else full) * (end - drawn), color))
            drawn = end
        return [*line, (" " * (room - drawn), ""), ("]", "dim")]

    def _reuse(self, reading: Reading, pool: Pool, width: int) -> Iterator[Line]:
        total = reading.total(pool, "allocations_total")
        yield [(f"{fit('allocations', 20)}{'a second':>12}{'ever':>16}{'share':>9}", "dim")]
        room = max(0, width - 59)
        for kind, text in REUSE:
            ever = reading.value(pool, "allocations_total", kind)
            share = ever / total if total else 0.0
            bar = ("#" if self.ascii_only else "█") * round(room * share)
            color = "cyan" if kind != "new_memory" else "yellow"
            figures = f"{fit(text, 20)}{self._rate(pool, 'allocations_total', kind):>12}{int(ever):>16,}{share:>9.1%}"
            yield [(figures, ""), ("  ", ""), (bar, color)]

    def _costs(self, reading: Reading, pool: Pool) -> Line:
        kinds = (("waits", "stream_waits"), ("events", "event_records"), ("queries", "event_queries"))
        rates = ", ".join(f"{text} {self._rate(pool, f'{name}_total')}" for text, name in kinds)
        return [(f"a second: {rates}   growths ever {int(reading.value(pool, 'growths_total')):,}", "")]

    def _trouble(self, reading: Reading, pool: Pool) -> Iterator[Line]:
        errors = int(reading.value(pool, "out_of_memory_total"))
        retries = int(reading.total(pool, "out_of_memory_retries_total"))
        poisoned = int(reading.value(pool, "poisoned_streams"))
        told = [f"{retries:,} allocations saved from out-of-memory"] if retries else []
        told += [f"{errors:,} out-of-memory errors raised"] if errors else []
        told += [f"{poisoned} streams answer with an error"] if poisoned else []
        if told:
            yield [("; ".join(told), "red" if errors or poisoned else "yellow")]

    def _streams(self, reading: Reading, pool: Pool, width: int, most: int) -> Iterator[Line]:
        kinds = ("stream_allocated_bytes", "stream_in_flight_bytes", "stream_idle_bytes")
        figures = [reading.pools[pool].get(kind, {}) for kind in kinds]
        if not figures[0]:
            yield [("no figures by stream: the server was started without them", "dim")]
            return
        names = sorted(
            figures[0], key=lambda name: (name == "other", -sum(figure.get(name, 0.0) for figure in figures), name)
        )
        name_width = max(12, min(40, width - 42))
        yield [(f"{fit('stream', name_width)}{'allocated':>13}{'in flight':>13}{'idle':>13}", "dim")]
        most = max(1, most - 1)  # less the line of titles
        for name in names[:most] if len(names) <= most else names[: most - 1]:
            sizes = "".join(f"{format_size(int(figure.get(name, 0.0))):>13}" for figure in figures)
            yield [(fit(name, name_width) + sizes, "")]
        if len(names) > most:
            yield [(f"{len(names) - most + 1} more", "dim")]

    def _rate(self, pool: Pool, name: str, label: str = "") -> str:
        """A second, between the last two readings; "-" while there is one only, or the counter began anew."""
        now, before = self._now, self._before
        if now is None or before is None or pool not in before.pools or now.at <= before.at:
            return "-"
        grown = now.value(pool, name, label) - before.value(pool, name, label)
        return "-" if grown < 0 else f"{grown / (now.at - before.at):,.0f}"


class Keys:
    """From what a terminal sends to what was meant: quit, up, down."""

    _MEANINGS: Final = {
        b"q": "quit",
        b"Q": "quit",
        b"\x1b[A": "up",
        b"\x1bOA": "up",
        b"k": "up",
        b"\x1b[B": "down",
        b"\x1bOB": "down",
        b"j": "down",
        b"\t": "down",
    }

    def __init__(self) -> None:
        self._typed = b""

    def feed(self, typed: bytes) -> list[str]:
        """What these bytes mean, after those before; the start of a sequence waits for its rest."""
        self._typed += typed
        meant = []
        while self._typed:
            for sequence, meaning in self._MEANINGS.items():
                if self._typed.startswith(sequence):
                    meant.append(meaning)
                    self._typed = self._typed[len(sequence) :]
                    break
            else:
                if len(self._typed) < 3 and self._typed[:1] == b"\x1b":
                    return meant
                self._typed = self._typed[1:]
        return meant

"""What the page says in words: the answers at its top, and the table of streams (panel 9).

Rule: every name comes from a user, and is escaped.
Next: document.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Final

from allocator.metrics.collector import label_text
from allocator.metrics.history import SAVED, PoolHistory
from allocator.metrics.page.looks import HUES
from allocator.sizes import format_size
from allocator.stats import Stats

TOP: Final = 12
"""Streams shown one by one."""
MINUTE: Final = 60.0


def head(one: PoolHistory | None) -> str:
    """The three answers, as HTML: what could go back, who holds memory in flight, what reuse across streams saved."""
    stats = None if one is None else one.latest
    if one is None:
        return '<p class="answer">There is no pool to show. It will appear here when the program makes one.</p>'
    if stats is None:
        return f'<p class="answer">Pool {escape(one.label)} has not been read yet.</p>'
    answers = (
        ("Could be given back now", *_given_back(stats)),
        ("In flight", *_in_flight(stats)),
        ("Saved by reuse across streams", *_saved(one, stats)),
    )
    return "".join(
        f'<div class="answer"><span class="question">{question}</span>'
        f'<strong>{short}</strong><span class="detail">{detail}</span></div>'
        for question, short, detail in answers
    )


def _given_back(stats: Stats) -> tuple[str, str]:
    detail = f"of {format_size(stats.reserved_bytes)} reserved: what <code>pool.trim()</code> gives to the driver"
    if stats.stranded_bytes:
        detail += f". Another {format_size(stats.stranded_bytes)} is idle in pieces that are partly used"
    if stats.limit_bytes:
        detail += f". {stats.reserved_bytes / stats.limit_bytes:.0%} of the limit, {format_size(stats.limit_bytes)}"
    return format_size(stats.releasable_bytes), detail + "."


def _in_flight(stats: Stats) -> tuple[str, str]:
    if not stats.in_flight_bytes:
        return "0 B", "no stream holds freed memory."
    held = {name: nbytes for name, nbytes in stats.stream_in_flight_bytes.items() if nbytes}
    detail = "freed, and not known to be finished"
    if held:
        most = max(held, key=lambda name: (name != "other", held[name]))
        others = len(held) - 1
        whose = "streams that are gone or summed up" if most == "other" else f"stream {escape(label_text(most))}"
        detail = f"{format_size(held[most])} of it was allocated on {whose}"
        if others:
            detail += f", the rest on {others} other{'s' if others > 1 else ''}"
    if stats.oldest_in_flight_seconds >= 1:
        detail += f"; the oldest for {stats.oldest_in_flight_seconds:.0f} s"
    if stats.poisoned_streams:
        detail += f". {stats.poisoned_streams} stream(s) answer with an error: see <code>pool.abandon()</code>"
    return format_size(stats.in_flight_bytes), detail + "."


def _saved(one: PoolHistory, stats: Stats) -> tuple[str, str]:
    saved = sum(stats.allocations[kind] for kind in SAVED)
    everything = sum(stats.allocations.values())
    lately = int(sum(one.total(f"reuse_{kind}", MINUTE) for kind in SAVED))
    share = f", {saved / everything:.1%}" if everything else ""
    return (
        f"{saved:,} times",
        f"of {everything:,} allocations{share}: they got memory that another stream had used, instead of new memory. "
        f"{lately:,} in the last minute.",
    )


def stream_table(stats: Stats | None, numbers: Mapping[str, int]) -> str:
    """The streams that hold most, as HTML.  numbers: name -> number, which is the colour in the address map."""
    if stats is None or not stats.stream_allocated_bytes:
        return '<p class="detail">No figures by stream yet.</p>'
    figures = (stats.stream_allocated_bytes, stats.stream_in_flight_bytes, stats.stream_idle_bytes)
    names = sorted(
        stats.stream_allocated_bytes,
        key=lambda name: (name == "other", -sum(figure.get(name, 0) for figure in figures)),
    )
    shown, rest = names[:TOP], names[TOP:]
    rows = [(name, tuple(figure.get(name, 0) for figure in figures)) for name in shown]
    if rest:
        rows.append((f"{len(rest)} more", tuple(sum(figure.get(name, 0) for name in rest) for figure in figures)))
    widest = max(1, *(sum(values) for _, values in rows))
    body = "".join(_row(name, values, widest, numbers.get(name)) for name, values in rows)
    return (
        "<table><thead><tr><th>stream</th><th>allocated</th><th>in flight</th><th>idle</th>"
        f'<th class="bars">share</th></tr></thead><tbody>{body}</tbody></table>'
    )


def _row(name: str, values: tuple[int, ...], widest: int, number: int | None) -> str:
    if number is None and name.isdecimal():
        number = int(name)
    color = "transparent" if number is None else HUES[number % len(HUES)]
    bars = "".join(
        f'<i class="{kind}" style="width:{100 * value / widest:.1f}%"></i>'
        for kind, value in zip(("allocated", "in-flight", "idle"), values, strict=True)
    )
    cells = "".join(f"<td>{format_size(value)}</td>" for value in values)
    return (
        f'<tr><th><i class="hue" style="background:{color}"></i>{escape(label_text(name))}</th>{cells}'
        f'<td class="bars">{bars}</td></tr>'
    )

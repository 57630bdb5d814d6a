"""A pool in a notebook cell: what it holds, how it reuses, which streams hold memory in flight.

Rule: one self-contained piece of HTML, no script, no style sheet: it changes nothing else on the page, and takes its
text colour from it, so that it reads in light and dark alike.  Every text that a user gave is escaped.
Next: pool.py, which asks for it; ../stats.py, where the figures are from.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from allocator.sizes import format_size
from allocator.stats import Stats

MOST_STREAMS = 8
"""Streams listed; the rest are summed."""

_COLORS = {"allocated": "#4c78d8", "in flight": "#e8871e", "idle": "#3d9a58", "private": "#9a5fc0"}
"""Of middling lightness: they stand out on white and on black."""

_LINE = "rgba(128,128,128,0.35)"
_REUSE = {
    "same_stream": "the same stream had it",
    "event_dependency": "the stream had waited for it",
    "opportunistic": "another stream had finished with it",
    "internal_dependency": "the stream was made to wait for it",
    "new_memory": "never used before",
}


def page(title: str, lines: Iterable[str]) -> str:
    """A box with a title.  title: plain text; lines: HTML."""
    return (
        f'<div style="display:inline-block;min-width:30em;max-width:100%;padding:0.6em 0.9em;border:1px solid {_LINE};'
        'border-radius:6px;font-family:system-ui,sans-serif;font-size:0.9em;line-height:1.5;color:inherit">'
        f'<div style="font-weight:600">{escape(title)}</div>{"".join(lines)}</div>'
    )


def notice(text: str) -> str:
    """A sentence that must be seen."""
    return f'<div style="margin-top:0.3em;border-left:3px solid #d64545;padding-left:0.5em">{escape(text)}</div>'


def summary(title: str, stats: Stats, notices: Iterable[str]) -> str:
    """The whole of it.  notices: plain text, shown first."""
    kinds = {
        "allocated": stats.allocated_bytes,
        "in flight": stats.in_flight_bytes,
        "idle": stats.idle_bytes,
        "private": stats.private_bytes,
    }
    most = max(stats.limit_bytes, stats.reserved_bytes)
    limit = f" of {format_size(stats.limit_bytes)} allowed" if stats.limit_bytes else ""
    rows = [
        _row(kind, format_size(nbytes), nbytes / most if most else 0, _COLORS[kind])
        for kind, nbytes in kinds.items()
        if nbytes or kind != "private"
    ]
    parts = [
        *map(notice, notices),
        f"<div>{format_size(stats.reserved_bytes)} reserved{limit}, {format_size(stats.releasable_bytes)} could be "
        f"given back now; peak {format_size(stats.peak_reserved_bytes)}</div>",
        _stack(kinds, most),
        _table(rows),
        _fragmentation(stats),
        _reuse(stats),
        _streams(stats),
    ]
    return page(title, parts)


def _bar(share: float, color: str) -> str:
    return (
        f'<div style="width:10em;height:0.7em;border-radius:2px;background:{_LINE}">'
        f'<div style="width:{min(max(share, 0), 1):.1%};height:100%;border-radius:2px;background:{color}"></div></div>'
    )


def _row(name: str, value: str, share: float, color: str, note: str = "") -> str:
    cell = '<td style="text-align:{};padding:0 0.8em 0 0;border:none;background:none">{}</td>'
    cells = [
        cell.format("left", escape(name)),
        cell.format("right", escape(value)),
        cell.format("left", _bar(share, color)),
    ]
    if note:
        cells.append(cell.format("left", f'<span style="opacity:0.7">{escape(note)}</span>'))
    return f'<tr style="background:none">{"".join(cells)}</tr>'


def _table(rows: Iterable[str]) -> str:
    return f'<table style="border-collapse:collapse;color:inherit;margin:0.2em 0">{"".join(rows)}</table>'


def _heading(text: str) -> str:
    return f'<div style="margin-top:0.5em;font-weight:600">{escape(text)}</div>'


def _stack(kinds: dict[str, int], most: int) -> str:
    """All of it in one bar, as wide as the limit, or as what is reserved where there is none."""
    parts = "".join(
        f'<div title="{kind}: {format_size(n)}" style="width:{n / most:.2%};background:{_COLORS[kind]}"></div>'
        for kind, n in kinds.items()
        if n
    )
    return (
        f'<div style="display:flex;height:1em;margin:0.3em 0;border-radius:3px;overflow:hidden;background:{_LINE}">'
        f"{parts}</div>"
    )


def _fragmentation(stats: Stats) -> str:
    return (
        f"<div>fragmentation: external {stats.external_fragmentation_ratio:.0%} (largest free block "
        f"{format_size(stats.largest_free_block_bytes)}), internal {stats.internal_fragmentation_ratio:.0%}</div>"
    )


def _reuse(stats: Stats) -> str:
    total = sum(stats.allocations.values())
    if not total:
        return "<div>nothing has been allocated yet</div>"
    rows = [
        _row(reuse, f"{n:,}", n / total, _COLORS["allocated"], _REUSE.get(reuse, ""))
        for reuse, n in stats.allocations.items()
    ]
    return _heading(f"{total:,} allocations, by what made their memory safe") + _table(rows)


def _streams(stats: Stats) -> str:
    """Those that hold memory in flight, most first."""
    held = sorted(((n, name) for name, n in stats.stream_in_flight_bytes.items() if n > 0), reverse=True)
    if not held:
        return "<div>no stream holds memory in flight</div>"
    most = held[0][0]
    rows = [_row(name, format_size(n), n / most, _COLORS["in flight"]) for n, name in held[:MOST_STREAMS]]
    if rest := held[MOST_STREAMS:]:
        rows.append(_row(f"{len(rest)} more", format_size(sum(n for n, _ in rest)), 0, _COLORS["in flight"]))
    age = stats.oldest_in_flight_seconds
    oldest = f", the oldest for {age:,.1f} s" if age >= 0.1 else ""
    return _heading(f"in flight, by stream{oldest}") + _table(rows)

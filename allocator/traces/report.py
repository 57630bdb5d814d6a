"""The numbers of a replay: a table for people, lines of JSON for programs.

Next: replay.py (where they come from), plot.py (the same over time).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from allocator.config import REUSE_KINDS
from allocator.sizes import format_size
from allocator.traces.replay import Replay, Result

_KIND_WORDS = {
    "same_stream": "reused, same stream",
    "new_memory": "new memory",
    "event_dependency": "reused, already waited for",
    "opportunistic": "reused, work was finished",
    "internal_dependency": "reused, made to wait",
}


def json_line(result: Result) -> str:
    """One object in one line; keys in a fixed order."""
    return json.dumps(asdict(result))


def table(replays: Sequence[Replay]) -> str:
    """The replays of one trace, a column each."""
    results = [replay.result for replay in replays]
    first = results[0]
    lines = [
        f"{first.trace}: {first.rows:,} rows, {first.allocations + first.oom:,} allocations, "
        f"at most {format_size(first.peak_live_bytes)} live",
        f"on {first.device}",
    ]
    if not replays[0].launches:
        lines.append("No launches are recorded, so every event is complete at once: reuse across streams looks free.")
    rows: list[list[str]] = [["", *(result.policy for result in results)]]

    def add(name: str, cells: Iterable[str]) -> None:
        rows.append([name, *cells])

    add("peak reserved", (format_size(r.peak_reserved_bytes) for r in results))
    if first.peak_live_bytes:
        add("  over peak live", (f"{r.peak_reserved_bytes / first.peak_live_bytes:.2f} x" for r in results))
    add("peak in flight", (format_size(r.peak_in_flight_bytes) for r in results))
    for kind in REUSE_KINDS:
        add(_KIND_WORDS[kind], (f"{r.reuse.get(kind, 0):,}" for r in results))
    add("waits put on streams", (f"{r.stream_waits:,}" for r in results))
    add("events recorded, queried", (f"{r.event_records:,}, {r.event_queries:,}" for r in results))
    launches = "cuLaunchKernel"  # the program's own
    add("other driver calls", (f"{sum(r.driver_calls.values()) - r.driver_calls.get(launches, 0):,}" for r in results))
    add("time on the device", (_seconds(r.virtual_seconds) for r in results))
    add("  of it stalled", (_seconds(r.stalled_seconds) for r in results))
    add("races", ("not checked" if r.races is None else f"{r.races:,}" for r in results))
    add("leaked", (format_size(r.leaked_bytes) for r in results))
    add("allocations refused", (f"{r.oom:,}" for r in results))
    if any(r.skipped for r in results):
        add("frees of unknown blocks", (f"{r.skipped:,}" for r in results))
    add("replayed in", (_seconds(r.seconds) for r in results))
    return "\n".join([*lines, "", *_aligned(rows)])


def verdict(results: Sequence[Result]) -> str | None:
    """One sentence on what the first policy saves against the last; None if nothing can be said."""
    if len(results) < 2:
        return None
    ours, theirs = results[0], results[-1]
    if not ours.peak_reserved_bytes or ours.oom or theirs.oom:
        return None
    ratio = theirs.peak_reserved_bytes / ours.peak_reserved_bytes
    return f"{theirs.policy} needs {ratio:.2f} x the memory of {ours.policy}."


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.1f} s"

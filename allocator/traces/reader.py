"""Which layout a file has, told by its content, and what is in it as a whole.

Rule: names and suffixes mean nothing; a first byte or a header does.

Next: weir_csv.py, rmm_log.py, snapshot.py, intervals.py (the layouts), replay.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from allocator.sizes import round_up
from allocator.traces import intervals, rmm_log, snapshot, weir_csv
from allocator.traces.checks import checked
from allocator.traces.row import ALLOC, FREE, FREE_COMPLETED, LAUNCH, Progress, Row, Trace, TraceError
from allocator.traces.text import column_order, open_trace, read_header, shorten

LATE_NS: Final = 50_000
"""A completion that follows its free within this says that the host was slow, not that a stream was busy."""

_Reader = Callable[[str, Progress | None], Iterator[Row]]
_TABLES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...], _Reader]]] = {  # needed, ignored
    "weir": (weir_csv.COLUMNS, (), weir_csv.read_weir_csv),
    "rmm": (rmm_log.COLUMNS, (), rmm_log.read_rmm_log),
    "intervals": (intervals.COLUMNS, intervals.SOLUTION, intervals.read_intervals),
}


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Open a trace of any known layout, plain or gzip; its rows are read when asked for.

    Raises TraceError if the file cannot be read or is of no known layout.  A snapshot is read whole, here.
    """
    name = os.fspath(path)
    if "\0" in name:
        raise TraceError(shorten(name), 0, "cannot be read: no such file")
    with open_trace(name) as (stream, _):
        start = stream.read(1)
    if not start:
        raise TraceError(name, 0, "the file is empty")
    if start == snapshot.MAGIC:
        content = snapshot.Snapshot(name)
        rows = content.rows
        return Trace(
            path=name,
            layout="pytorch",
            has_launches=False,
            source=lambda progress: checked(name, rows, unit="event"),
            count=len(rows),
            notes=tuple(content.notes),
        )
    names = read_header(name)
    layout = max(_TABLES, key=lambda key: len(set(names) & set(_TABLES[key][0])))
    columns, ignored, reader = _TABLES[layout]
    if not set(names) & set(columns):
        raise TraceError(name, 1, f"no known layout: the first line is {shorten(','.join(names))}")
    column_order(name, names, columns, ignored)
    return Trace(
        path=name,
        layout=layout,
        has_launches=layout == "weir",
        source=lambda progress: checked(name, reader(name, progress)),
    )


@dataclass
class Summary:
    """What one pass over a trace tells, before any replay.

    rows: all of them.  allocations, launches: of that kind.  streams: numbers seen, in order.
    peak_live_bytes: most bytes live at once, each block rounded to 512 (from the trace alone).
    late: lines of frees whose completion came more than 50 us later, because another stream held the block.
    end_ns: time of the last row.
    """

    rows: int = 0
    allocations: int = 0
    launches: int = 0
    streams: dict[int, None] = field(default_factory=dict)
    peak_live_bytes: int = 0
    late: set[int] = field(default_factory=set)
    end_ns: int = 0


def summarize(trace: Trace, progress: Progress | None = None) -> Summary:
    """Go through a trace once; raises TraceError if any row of it is wrong.

    Memory: what is live, and one number for each late free.
    """
    summary = Summary()
    live: dict[int, int] = {}
    live_bytes = 0
    waiting: dict[int, Row] = {}  # address -> its latest free
    for row in trace.rows(progress):
        summary.rows += 1
        summary.end_ns = row.time_ns
        if row.op == ALLOC:
            summary.allocations += 1
            summary.streams.setdefault(row.stream)
            if row.pointer and row.nbytes:
                live[row.pointer] = round_up(row.nbytes)
                live_bytes += live[row.pointer]
                summary.peak_live_bytes = max(summary.peak_live_bytes, live_bytes)
                waiting.pop(row.pointer, None)  # whatever completes later is another free
        elif row.op == FREE:
            if row.pointer in live:
                live_bytes -= live.pop(row.pointer)
                waiting[row.pointer] = row
        elif row.op == FREE_COMPLETED:
            free = waiting.pop(row.pointer, None)
            if free is not None and row.time_ns - free.time_ns > LATE_NS:
                summary.late.add(free.line)
        elif row.op == LAUNCH:
            summary.launches += 1
            summary.streams.setdefault(row.stream)
    return summary

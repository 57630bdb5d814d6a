"""Whether rows contradict each other: memory handed out twice, inside a free, time that runs backwards.

Rule: a trace may be incomplete (a free of a block from before recording began is fine), but what it
does say must be possible.

Next: replay.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Final, NoReturn

from allocator.traces.row import ALLOC, FREE, Row, TraceError

TOLERATED_NS: Final = 1_000_000_000
"""How far time may fall from one row to the next: threads write into one log, and the order is the log's."""


def checked(path: str, rows: Iterable[Row], *, unit: str = "line") -> Iterator[Row]:
    """The same rows, with times that never fall.  Raises TraceError at the first row that cannot be true.

    `unit` is what `Row.line` counts.

    O(log n) a row in the number of live blocks (and a memmove of their addresses); memory is theirs.
    """
    now = 0
    starts: list[int] = []  # sorted addresses of live blocks
    ends: dict[int, int] = {}  # address -> first byte behind

    def fail(row: Row, problem: str) -> NoReturn:
        raise TraceError(path, row.line, problem, unit=unit)

    for row in rows:
        if row.time_ns < now:
            if now - row.time_ns > TOLERATED_NS:
                fail(row, f"time runs backwards by {(now - row.time_ns) / 1e9:.3f} s")
            row = row._replace(time_ns=now)
        now = row.time_ns
        if row.op == ALLOC and row.nbytes:
            pointer, end = row.pointer, row.pointer + row.nbytes
            if not pointer:
                fail(row, f"{row.nbytes} bytes were allocated at the null pointer")
            if pointer in ends:
                fail(row, f"{pointer:#x} is allocated again, but it has not been freed")
            at = bisect_left(starts, pointer)
            for other in starts[max(at - 1, 0) : at + 1]:
                if other < end and pointer < ends[other]:
                    size = ends[other] - other
                    fail(row, f"{pointer:#x}, {row.nbytes} bytes, overlaps the live block at {other:#x}, {size} bytes")
            starts.insert(at, pointer)
            ends[pointer] = end
        elif row.op == FREE:
            if ends.pop(row.pointer, 0):
                del starts[bisect_left(starts, row.pointer)]
            elif starts:
                at = bisect_left(starts, row.pointer)
                if at and row.pointer < ends[starts[at - 1]]:
                    fail(row, f"free of {row.pointer:#x}, which is inside the live block at {starts[at - 1]:#x}")
        yield row

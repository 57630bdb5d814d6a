"""Our own layout: one row an action, allocator history merged with kernel timings.

    time_ns,op,stream,pointer,bytes,gpu_start_ns,gpu_duration_ns

Memory rows have a pointer and bytes, launches have the two times of the device; the other fields are empty.

Next: checks.py (whether the rows contradict each other).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from allocator.traces.row import (
    ALLOC,
    ALLOC_FAILED,
    FREE,
    FREE_COMPLETED,
    LAUNCH,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    Progress,
    Row,
    TraceError,
)
from allocator.traces.text import address, natural, read_table, shorten

COLUMNS: Final = ("time_ns", "op", "stream", "pointer", "bytes", "gpu_start_ns", "gpu_duration_ns")
_MEMORY: Final = frozenset({ALLOC, FREE, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, ALLOC_FAILED})


def read_weir_csv(path: str, progress: Progress | None = None) -> Iterator[Row]:
    """The rows of a file in our layout."""
    for line, (time, op, stream, pointer, nbytes, start, duration) in read_table(path, COLUMNS, progress):
        time_ns = natural(path, line, "time_ns", time)
        stream_number = natural(path, line, "stream", stream)
        if op in _MEMORY:
            if start or duration:
                raise TraceError(path, line, f"{op} has times of the device; only a launch does")
            yield Row(
                time_ns,
                op,
                stream_number,
                address(path, line, "pointer", pointer),
                natural(path, line, "bytes", nbytes),
                0,
                0,
                line,
            )
        elif op == LAUNCH:
            if pointer or nbytes:
                raise TraceError(path, line, "a launch has no pointer and no bytes")
            yield Row(
                time_ns,
                op,
                stream_number,
                0,
                0,
                natural(path, line, "gpu_start_ns", start),
                natural(path, line, "gpu_duration_ns", duration),
                line,
            )
        else:
            raise TraceError(path, line, f"unknown op {shorten(op)}; known: {', '.join(sorted({*_MEMORY, LAUNCH}))}")

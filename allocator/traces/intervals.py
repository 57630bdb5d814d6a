"""Packing problems, `id,lower,upper,size`: a buffer lives in [lower, upper).

Time has no unit; we take it as nanoseconds.  At each time point frees come first, then allocations in
file order.  Ids are names, so buffers get addresses here, one behind the other.  Sorting needs the
whole file in memory.

Next: checks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from allocator.sizes import QUANTUM, round_up
from allocator.traces.row import ALLOC, FREE, LARGEST, Progress, Row, TraceError
from allocator.traces.text import natural, read_table, shorten

COLUMNS: Final = ("id", "lower", "upper", "size")
SOLUTION: Final = ("offset",)
"""A column that solvers add to the problem; it says nothing about the program."""


def read_intervals(path: str, progress: Progress | None = None) -> Iterator[Row]:
    """The rows of an interval table: an alloc and a free for each line."""
    events: list[tuple[int, bool, int, int, int]] = []  # time, is an alloc, line, pointer, size: sorts as it must
    seen: set[str] = set()
    pointer = QUANTUM
    for line, (name, lower_text, upper_text, size_text) in read_table(path, COLUMNS, progress, ignored=SOLUTION):
        lower = natural(path, line, "lower", lower_text)
        upper = natural(path, line, "upper", upper_text)
        size = natural(path, line, "size", size_text)
        if upper <= lower:
            raise TraceError(path, line, f"upper ({upper}) must be above lower ({lower})")
        if name in seen:
            raise TraceError(path, line, f"a second buffer is called {shorten(name)}")
        seen.add(name)
        events.append((lower, True, line, pointer, size))
        events.append((upper, False, line, pointer, size))
        pointer += round_up(max(size, 1))
        if pointer > LARGEST:
            raise TraceError(path, line, "all sizes together are more than any address space")
    events.sort()
    start = events[0][0] if events else 0
    for time, is_alloc, line, pointer, size in events:
        yield Row(time - start, ALLOC if is_alloc else FREE, 0, pointer, size, 0, 0, line)

"""What every layout is read into: `Row`, `Trace`, and the one error, `TraceError`.

Rule: a row that reaches a caller is well formed; whoever replays it checks nothing again.

Times are nanoseconds of host time since the file's first row; sizes are bytes as requested.

Next: reader.py (which layout is it), replay.py (what is done with rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from allocator.errors import AllocatorError

ALLOC: Final = "alloc"
FREE: Final = "free"
"""The owner let go of the block; work that uses it may still be queued."""
FREE_COMPLETED: Final = "free_completed"
"""The recorded allocator's own events behind that free had completed."""
SEGMENT_ALLOC: Final = "segment_alloc"
"""The recorded allocator asked its driver for memory, as it does whenever this is told and not replayed."""
SEGMENT_FREE: Final = "segment_free"
ALLOC_FAILED: Final = "alloc_failed"
"""The recorded allocator refused a request."""
LAUNCH: Final = "launch"

LARGEST: Final = (1 << 63) - 1
"""No time, address or size in a trace is larger."""


class TraceError(AllocatorError, ValueError):
    """A trace that cannot be read, or that contradicts itself.

    One line: the file, the line where there is one, what is wrong.  The parts are attributes too;
    `line` is 0 where the whole file is meant.  In a layout that is no text it counts events from 1,
    and `unit` says so.
    """

    def __init__(self, path: str | Path, line: int, problem: str, *, unit: str = "line") -> None:
        self.path = str(path)
        self.line = line
        self.problem = problem
        where = f"{path}, {unit} {line}" if line else str(path)
        super().__init__(f"{where}: {problem}")


class Row(NamedTuple):
    """One recorded action.  Fields that an op does not have are 0."""

    time_ns: int
    op: str
    stream: int
    pointer: int
    nbytes: int
    gpu_start_ns: int
    gpu_duration_ns: int
    line: int


Progress = Callable[[float], None]
"""Called now and then with the share of the file read so far, 0..1."""

RowSource = Callable[[Progress | None], Iterator[Row]]


@dataclass(frozen=True)
class Trace:
    """A trace on disk: where it is, what it is, and how to go through it (as often as you like).

    layout: "weir", "rmm", "pytorch" or "intervals".  has_launches: whether the layout records launches;
    without them nothing is known about when the GPU used a block.  count: rows, where they had to be read
    to tell, else None.  notes: one line each, what a person should know about this file.
    """

    path: str
    layout: str
    has_launches: bool
    source: RowSource = field(repr=False)
    count: int | None = None
    notes: tuple[str, ...] = ()

    def rows(self, progress: Progress | None = None) -> Iterator[Row]:
        """All rows in order, in constant memory where the layout allows.  Raises TraceError at the row at fault."""
        return self.source(progress)

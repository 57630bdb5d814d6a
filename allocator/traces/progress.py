"""How far a long job is, on stderr.

Rule: silent for what ends soon; on a terminal, after a second, one line that is rewritten, elsewhere a line
every five seconds; never on stdout.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

_PATIENCE_S: Final = 1.0
_TERMINAL_S: Final = 0.2
_ELSEWHERE_S: Final = 5.0


class Meter:
    """Shows `label`, the share done where it is known, and rows a second.

    A context manager: at the end the terminal's line is wiped.
    """

    def __init__(self, label: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._label = label
        self._out = sys.stderr if stream is None else stream
        self._clock = clock
        self._terminal = self._out.isatty()
        self._began = clock()
        self._next = self._began + (_PATIENCE_S if self._terminal else _ELSEWHERE_S)
        self._written = 0

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._terminal and self._written:
            self._out.write("\r" + " " * self._written + "\r")
            self._out.flush()

    def share(self, share: float) -> None:
        """A share (0..1) of the file has been read."""
        if self._clock() >= self._next:
            self._show(f"{self._label}: {100 * share:.0f} %")

    def rows(self, done: int, total: int) -> None:
        """`done` of `total` rows have been replayed."""
        now = self._clock()
        if now >= self._next:
            share = f"{100 * done / total:.0f} %, " if total else ""
            self._show(f"{self._label}: {share}{done / (now - self._began):,.0f} rows/s")

    def _show(self, text: str) -> None:
        self._next = self._clock() + (_TERMINAL_S if self._terminal else _ELSEWHERE_S)
        if self._terminal:
            self._out.write("\r" + text.ljust(self._written))
            self._written = max(self._written, len(text))
        else:
            self._out.write(text + "\n")
        self._out.flush()

"""What is under way, on stderr.

Rule: on a terminal one line that is rewritten, elsewhere a line now and then; never on stdout.
"""

from __future__ import annotations

import sys
import time
from typing import Final, TextIO

_ELSEWHERE_S: Final = 10.0


class Ticker:
    """Call it with what is under way; `wipe` before anything else is written to the terminal."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._terminal = self._out.isatty()
        self._next = time.monotonic() + _ELSEWHERE_S
        self._written = 0

    def __call__(self, text: str) -> None:
        """Show it, if it is time."""
        if self._terminal:
            self._out.write("\r" + text.ljust(self._written))
            self._written = len(text)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _ELSEWHERE_S
            self._out.write(f"{text}\n")
        self._out.flush()

    def wipe(self) -> None:
        """Nothing of it stays on a terminal."""
        if self._terminal and self._written:
            self._out.write("\r" + " " * self._written + "\r")
            self._out.flush()
            self._written = 0

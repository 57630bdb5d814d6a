"""What the garbage collector is doing: is a collection running?

Between its first finaliser and its end, what it found dead may still be used: by the finaliser of something else in
the same cycle, and, should that put itself back among the living, for ever after (PEP 442).  So memory that comes back
while a collection runs is only *doubtful*: it is free once the collection is over and nobody else holds the object that
held it (caching/frees.py).  A library's own pool is as careful without trying: its memory objects are written in C, and
give back what they hold when they are torn down, after all finalisers.

Next: allocation.py, whose finaliser asks.
"""

from __future__ import annotations

import gc
from typing import Final


class Collector:
    """running: a collection is under way, in some thread."""

    __slots__ = ("running",)

    def __init__(self) -> None:
        self.running = False


COLLECTOR: Final = Collector()


def _note(phase: str, info: dict[str, int]) -> None:
    COLLECTOR.running = phase == "start"


gc.callbacks.append(_note)

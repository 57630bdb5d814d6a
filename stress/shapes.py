"""Load shapes: how many users there are at a time.

Rule: a shape is a function of the seconds since the test began: (users, users started or stopped a second), or None
once it is over.  Used by: locustfile.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

Shape = Callable[[float, int, float], tuple[int, float] | None]
"""(seconds, most users, length in seconds) -> users and rate, or None at the end."""


def steps(seconds: float, most: int, length: float) -> tuple[int, float] | None:
    """One more fifth of the users each fifth of the time.

    >>> steps(0, 10, 100), steps(99, 10, 100), steps(100, 10, 100)
    ((2, 10.0), (10, 10.0), None)
    """
    if seconds >= length:
        return None
    return max(1, math.ceil(most * (1 + int(5 * seconds / length)) / 5)), float(most)


def spikes(seconds: float, most: int, length: float) -> tuple[int, float] | None:
    """A tenth of the users, and all of them in every second tenth of the time.

    >>> spikes(0, 10, 100), spikes(15, 10, 100), spikes(100, 10, 100)
    ((1, 10.0), (10, 10.0), None)
    """
    if seconds >= length:
        return None
    return most if int(10 * seconds / length) % 2 else max(1, most // 10), float(most)


def waves(seconds: float, most: int, length: float) -> tuple[int, float] | None:
    """Three slow waves between one user and all.

    >>> waves(0, 11, 60), waves(10, 11, 60), waves(60, 11, 60)
    ((1, 11.0), (11, 11.0), None)
    """
    if seconds >= length:
        return None
    return 1 + round((most - 1) * (1 - math.cos(6 * math.pi * seconds / length)) / 2), float(most)


SHAPES: Final[dict[str, Shape]] = {"steps": steps, "spikes": spikes, "waves": waves}

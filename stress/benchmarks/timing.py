"""From what contenders took in each repeat to medians, and to ratios with their spread.

Rule: a ratio is taken within one repeat, in which all contenders ran one after the other, and the median of these
ratios counts: what slows the machine for a while slows both sides of each.  The spread is the quartiles.

Next: cases.py (what is compared), runner.py (who runs when).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figures:
    """One contender.  values: one a repeat.  ratio: median over the repeats, to the reference; low, high: quartiles.

    ratio, low, high: None where the reference is missing or has taken nothing at all.
    """

    values: tuple[float, ...]
    median: float
    ratio: float | None
    low: float | None
    high: float | None
    notes: dict[str, Any] = field(default_factory=dict)


def compare(
    values: Mapping[str, Sequence[float]], reference: str, notes: Mapping[str, dict[str, Any]] | None = None
) -> dict[str, Figures]:
    """The figures of each contender that has values.

    >>> compare({"a": [1.0, 1.0], "b": [2.0, 4.0]}, "a")["b"].ratio
    3.0
    """
    base = values.get(reference, ())
    result = {}
    for name, taken in values.items():
        if not taken:
            continue
        ratio = low = high = None
        if len(base) == len(taken) and all(base):
            low, ratio, high = quartiles([ours / theirs for ours, theirs in zip(taken, base, strict=True)])
        told = dict(notes.get(name, {})) if notes else {}
        result[name] = Figures(tuple(taken), statistics.median(taken), ratio, low, high, told)
    return result


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(first quartile, median, third quartile); one value is all three.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high

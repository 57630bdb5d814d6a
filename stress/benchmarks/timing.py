"""Interleaved timing: each contender runs once a round, so that what slows the machine slows all of them.

CPU time of the thread, not wall time: other programs on the machine then cost less precision.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """ns: median CPU time an operation.  ratio: median over rounds of ours to the baseline; low, high: quartiles."""

    ns: float
    ratio: float
    low: float
    high: float


def interleaved(
    contenders: Mapping[str, Callable[[int], object]], baseline: str, *, operations: int, rounds: int
) -> dict[str, Timing]:
    """Run each contender for `operations` in each of `rounds`, after one round that does not count."""
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds + 1):
        for name, run in contenders.items():
            began = time.thread_time_ns()
            run(operations)
            if round_:
                spent[name].append((time.thread_time_ns() - began) / operations)
    base = spent[baseline]
    result = {}
    for name, times in spent.items():
        ratios = [ours / theirs for ours, theirs in zip(times, base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result[name] = Timing(statistics.median(times), middle, low, high)
    return result


def lines(title: str, timings: Mapping[str, Timing], baseline: str) -> str:
    """A table for people."""
    text = [title, f"  {'':34} {'ns':>9}  ratio to {baseline!r} (quartiles)"]
    for name, t in timings.items():
        text.append(f"  {name:34} {t.ns:9.0f}  {t.ratio:6.2f}  ({t.low:.2f} .. {t.high:.2f})")
    return "\n".join(text)

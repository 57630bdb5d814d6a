"""`weir stress --soak`: the hammer for hours, with samples over time, a picture, and a judgement on what grows.

Rule: *a run is worth more than its record*: names that cannot be written are refused before it begins; a disk that
fills up or a reader that goes away in the middle costs the file, is said at the end, and makes the exit status 2.
Next: stress/soak.py (what a sample is, what growth is), stress/curves.py (the picture).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allocator.sizes import format_size
from allocator.stress import (
    MEASURED,
    Growth,
    Hammer,
    Outcome,
    SampleFile,
    Sampler,
    Violation,
    aligned,
    growth_of,
    least_rounds,
    write_curves,
)
from allocator.traces import PlotFile


class Soak:
    """The files and the findings of one soak.

    samples, plot: names of files, or None.  Raises ValueError and OSError for names that cannot be written.
    """

    def __init__(self, every: float, samples: str | None, plot: str | None) -> None:
        self._every = every
        self._plot = None if plot is None else PlotFile(plot)
        self._samples = None if samples is None else SampleFile(samples)
        self._taken = 0
        self._growth: list[Growth] | None = None
        self._least_rounds = 0
        self.problems: list[str] = []
        """What could not be written, a line each."""

    def run(
        self,
        hammer: Hammer,
        seconds: float,
        stopped: Callable[[], bool],
        progress: Callable[[Outcome, int], object],
        remark: Callable[[Callable[[], str]], object],
    ) -> Outcome:
        """`Hammer.run` under samples; what grows, or cannot be read, is a violation of the outcome.

        remark: is given what tells the last sample in a few words, for the progress.
        """
        sampler = Sampler(hammer.pool, self._every, (lambda _: None) if self._samples is None else self._samples.write)
        remark(sampler.remark)

        def both(outcome: Outcome, more: int) -> None:
            sampler(outcome, more)
            progress(outcome, more)

        try:
            with sampler:
                outcome = hammer.run(seconds, stopped, both)
        finally:
            self._write(hammer.outcome, sampler)
        self._taken = sampler.taken
        self._least_rounds = least_rounds(outcome)
        self._growth = growth_of(sampler, outcome)
        grown = [str(one) for one in self._growth or () if one.grows]
        if outcome.violation is None:
            outcome.violation = Violation("growth", "; ".join(grown)) if grown else sampler.error
        return outcome

    def _write(self, outcome: Outcome, sampler: Sampler) -> None:
        """The picture, also of a run that was interrupted."""
        if self._samples is not None:
            self._samples.close()
            if self._samples.problem is not None:
                self.problems.append(self._samples.problem)
        if self._plot is not None:
            setting = outcome.plan.setting
            title = f"weir stress --soak: {setting.workers} threads, {setting.streams} streams, seed {setting.seed}"
            try:
                write_curves(self._plot.path, title, list(sampler.curve.points), sampler.seconds)
            except OSError as error:
                self.problems.append(str(error))

    def remarks(self, outcome: Outcome) -> list[str]:
        """What the table says of it."""
        if self._growth is None:
            return [f"growth is not judged: {outcome.rounds:,} rounds, and it takes {self._least_rounds:,}"]
        rows = [["in the middle of each quarter of the run", *["" for _ in range(4)]]]
        for one in self._growth:
            shown = [format_size(n) if one.name.endswith("_bytes") else f"{n:,}" for n in one.medians]
            rows.append([f"  {one.words}", *shown, "grows" if one.grows else "levels off"])
        return aligned(rows)

    def figures(self) -> dict[str, Any]:
        """The object `soak` of the JSON."""
        return {
            "every_seconds": self._every,
            "samples": self._taken,
            "measured": list(MEASURED),
            "judged": self._growth is not None,
            "least_rounds": self._least_rounds,
            "growth": {one.name: {"medians": list(one.medians), "grows": one.grows} for one in self._growth or ()},
            "problems": self.problems,
        }

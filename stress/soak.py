"""What a long run must not do besides being wrong: grow.  Samples over time, and the judgement on them.

Rule: *what levels off is fine, what keeps growing is not*, however slowly it grows: driver events, threads and the
memory of the process are judged by their medians in the quarters of a run.  Not by their peaks: what comes and goes has
a highest moment by chance, and three of them are in rising order once in six times.  Memory of the pool is judged
elsewhere (rounds.py); it is sampled for the picture.

Threads: samples are taken by a thread of their own, which a pool that hangs may keep for ever; it is a daemon, and
nobody waits for it for long.  A sample reads the pool's statistics, as an operator would, and asks the driver what
those ask.
Next: curves.py (the picture), allocator/cli/soak.py (files, and what is said).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import median_low
from typing import Final, NamedTuple, TextIO

from allocator import CachingAllocator
from allocator.sizes import MIB, format_size
from allocator.stress.hammer import Outcome
from allocator.stress.player import Violation
from allocator.stress.rounds import violation_of

EVERY_S: Final = 1.0
MOST_POINTS: Final = 2048
"""Kept of a run of any length, for its picture and its judgement."""

SUFFIXES: Final = (".csv", ".jsonl")


class Sample(NamedTuple):
    """One moment.  seconds: since the run began.  events: of the driver, idle and in use.  threads: of the process.
    rss_bytes: the memory of the process that is in RAM, without what the C library only keeps for later, where that
    can be told; where only its peak is known, that."""

    seconds: float
    rounds: int
    operations: int
    reserved_bytes: int
    live_bytes: int
    in_flight_bytes: int
    events: int
    threads: int
    rss_bytes: int


FIELDS: Final = Sample._fields
MEASURED: Final = FIELDS[3:]
JUDGED: Final = {"events": (16, 0.05), "threads": (1, 0.05), "rss_bytes": (4 * MIB, 0.02)}
"""How much one quarter's median may be above the one before and still count as the same: the more of an absolute
amount and a share."""
_WORDS: Final = {"events": "driver events", "threads": "threads", "rss_bytes": "the memory of the process"}


@dataclass(frozen=True)
class Growth:
    """What became of one quantity: its medians in the four quarters of the run."""

    name: str
    medians: tuple[int, ...]

    @property
    def words(self) -> str:
        """For people."""
        return _WORDS[self.name]

    @property
    def tolerance(self) -> int:
        """See JUDGED."""
        amount, share = JUDGED[self.name]
        return max(amount, round(share * self.medians[1]))

    @property
    def grows(self) -> bool:
        """Has each of the last two quarters gone clearly beyond the one before?  The first one warms up."""
        _, *later = self.medians
        return all(after - before > self.tolerance for before, after in pairwise(later))

    def __str__(self) -> str:
        shown = [format_size(n) if self.name.endswith("_bytes") else f"{n:,}" for n in self.medians]
        return f"{self.words}: {', '.join(shown)} in the middle of the four quarters of the run"


class Curve:
    """Samples in bounded memory: beyond `most`, two neighbours become one, with the greater of each value.

    >>> curve = Curve(most=2)
    >>> for second, value in enumerate((5, 7, 1)):
    ...     curve.add(float(second), (value,))
    >>> curve.points
    [(0.0, (7,)), (2.0, (1,))]
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self.points: list[tuple[float, tuple[int, ...]]] = []
        self._most = most
        self._in_one = 1
        self._in_last = 0

    def add(self, seconds: float, values: tuple[int, ...]) -> None:
        """Times never fall."""
        if self._in_last and self._in_last < self._in_one:
            start, before = self.points[-1]
            self.points[-1] = start, tuple(map(max, before, values))
            self._in_last += 1
            return
        if len(self.points) >= self._most:
            pairs = [self.points[i : i + 2] for i in range(0, len(self.points), 2)]
            self.points = [(pair[0][0], tuple(map(max, *(p[1] for p in pair), pair[0][1]))) for pair in pairs]
            self._in_one *= 2
        self.points.append((seconds, values))
        self._in_last = 1


def judge(points: Sequence[tuple[float, tuple[int, ...]]], seconds: float) -> list[Growth]:
    """The medians of what is judged, in the quarters of so many seconds.  A quarter without a sample is like the one
    before."""
    quarters: list[list[tuple[int, ...]]] = [[], [], [], []]
    for moment, values in points:
        quarters[min(int(4 * moment / seconds), 3) if seconds > 0 else 3].append(values)
    found = []
    for name in JUDGED:
        at = MEASURED.index(name)
        medians: list[int] = []
        for quarter in quarters:
            before = medians[-1] if medians else 0
            medians.append(median_low(values[at] for values in quarter) if quarter else before)
        found.append(Growth(name, tuple(medians)))
    return found


class SampleFile:
    """Samples as they are taken, each written at once: a line of CSV, or a JSON object a line, by the name's end.

    Raises ValueError for another end, and OSError where the file cannot be made.  Later errors raise nothing: the
    first one is kept in `problem`, and nothing more is written, because the run is worth more than its record.
    """

    def __init__(self, path: str) -> None:
        if not path.lower().endswith(SUFFIXES):
            raise ValueError(f"{path}: the name of a file of samples ends in {' or '.join(SUFFIXES)}")
        self.path = path
        self.problem: str | None = None
        self._json = path.lower().endswith(".jsonl")
        self._file: TextIO | None = None
        try:
            self._file = open(path, "w", encoding="utf-8", newline="\n")  # noqa: SIM115  # as long as the run
        except OSError as error:
            raise OSError(f"{path}: {error.strerror or error}") from error
        if not self._json:
            self._put(",".join(FIELDS))

    def write(self, sample: Sample) -> None:
        """One more line."""
        if self._json:
            self._put(json.dumps(sample._asdict()))
        else:
            self._put(",".join(map(str, sample)))

    def close(self) -> None:
        """Nothing more is written."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:  # some file systems say so only now
                self._lost(error)

    def _put(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            self._lost(error)
            file, self._file = self._file, None
            with suppress(OSError):  # what could not be written is tried again, and fails again
                file.close()

    def _lost(self, error: OSError) -> None:
        self.problem = self.problem or f"{self.path}: {error.strerror or error}"


class Sampler:
    """Takes a sample now, then one every so many seconds, and one at the end.

    A context manager around a run; call it with the run's progress, as `Hammer.run` does.  error: what a reading of
    the statistics raised, which no reading should.
    """

    def __init__(
        self,
        pool: CachingAllocator,
        every: float = EVERY_S,
        write: Callable[[Sample], object] = lambda sample: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not every > 0:
            raise ValueError(f"samples are taken every so many seconds above 0, not {every}")
        self._pool = pool
        self._every = every
        self._write = write
        self._clock = clock
        self._began = clock()
        self._progress = (0, 0)
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._work, name="stress-samples", daemon=True)
        self.curve = Curve()
        self.taken = 0
        self.last: Sample | None = None
        self.error: Violation | None = None

    def __call__(self, outcome: Outcome, more: int) -> None:
        """How far the run is."""
        self._progress = outcome.rounds, outcome.operations + more

    def __enter__(self) -> Sampler:
        self._began = self._clock()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._enough.set()
        self._thread.join(5.0)  # longer only behind a lock that nobody gives back

    @property
    def seconds(self) -> float:
        """From the beginning to the last sample."""
        return self.last.seconds if self.last is not None else 0.0

    def remark(self) -> str:
        """The last sample in a few words."""
        last = self.last
        return "" if last is None else f"{last.events:,} events, {last.threads} threads, {format_size(last.rss_bytes)}"

    def _work(self) -> None:
        try:
            while True:
                self.take()
                if self._enough.wait(self._every):
                    break
        except Exception as error:
            self.error = violation_of(error)

    def take(self) -> Sample:
        """One sample, kept and written.  Raises what `stats` raises."""
        trim_malloc()
        stats = self._pool.stats()
        rounds, operations = self._progress
        sample = Sample(
            round(self._clock() - self._began, 3),
            rounds,
            operations,
            stats.reserved_bytes,
            stats.allocated_bytes,
            stats.in_flight_bytes,
            sum(stats.events.values()),
            threads(),
            rss_bytes(),
        )
        self.last = sample
        self.taken += 1
        self.curve.add(sample.seconds, tuple(sample[3:]))
        self._write(sample)
        return sample


def growth_of(sampler: Sampler, outcome: Outcome) -> list[Growth] | None:
    """What became of all that is judged; None if the run was too short: each quarter has to have seen each workload
    twice, once by all workers and once among others."""
    if outcome.rounds < least_rounds(outcome):
        return None
    return judge(sampler.curve.points, sampler.seconds)


def least_rounds(outcome: Outcome) -> int:
    """Of a run that is judged."""
    return 4 * 2 * len(outcome.plan.workloads)


def threads() -> int:
    """Of this process: all that the system knows, or where it does not say, those of Python."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def trim_malloc() -> None:
    """The C library gives back what it keeps for later, if it can.  Each thread frees into a part of its own: with
    many threads that is several times what is in use, and it grows for a long time."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc has it, others do not."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def rss_bytes() -> int:
    """Memory of this process in RAM, in bytes; where the system does not say, the most that it was, or 0."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return _peak_rss_bytes()


def _peak_rss_bytes() -> int:
    """0 where nothing is known."""
    try:
        import resource
    except ImportError:
        return 0
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

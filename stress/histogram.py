"""Latencies of a few microseconds, counted exactly enough: a histogram whose buckets grow with the value.

Rule: *a bucket is never wider than 1/32 of the values in it*, from 1 ns to hours, in 2,000 integers.  One thread
adds; whoever wants the whole merges the histograms of all threads.  Adding costs about a third of a microsecond.

Used by: player.py, and the report of the locust users, because locust rounds to whole milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

_BITS: Final = 5
_PARTS: Final = 1 << _BITS
_LONGEST: Final = 63
"""Bits of the longest time; anything longer is counted as that."""


def bucket_of(value: int) -> int:
    """The bucket's index.

    >>> bucket_of(0), bucket_of(31), bucket_of(32), bucket_of(64), bucket_of(65), bucket_of(66)
    (0, 31, 32, 64, 64, 65)
    """
    if value < _PARTS:
        return max(value, 0)
    shift = value.bit_length() - _BITS - 1
    return (shift << _BITS) + (value >> shift)


def bounds_of(bucket: int) -> tuple[int, int]:
    """The smallest and the largest value in it.

    >>> bounds_of(bucket_of(1000))
    (992, 1007)
    """
    if bucket < 2 * _PARTS:
        return bucket, bucket
    shift = (bucket >> _BITS) - 1
    low = (bucket - (shift << _BITS)) << shift
    return low, low + (1 << shift) - 1


_BUCKETS: Final = bucket_of((1 << _LONGEST) - 1) + 1


class Latencies:
    """Times in ns.  Not for several threads at once.

    >>> times = Latencies()
    >>> for ns in range(1, 101):
    ...     times.add(ns * 1000)
    >>> times.count, round(times.percentile_us(50)), round(times.percentile_us(99)), times.most_us
    (100, 50, 100, 100.0)
    """

    __slots__ = ("_counts", "most", "total")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self.total = 0
        """Sum in ns."""
        self.most = 0
        """The longest, in ns, exact."""

    def add(self, ns: int) -> None:
        """One more."""
        if ns > self.most:
            self.most = ns
        self.total += ns
        if ns < _PARTS:
            self._counts[max(ns, 0)] += 1
            return
        shift = ns.bit_length() - _BITS - 1
        try:
            self._counts[(shift << _BITS) + (ns >> shift)] += 1
        except IndexError:
            self._counts[-1] += 1

    @property
    def count(self) -> int:
        """How many."""
        return sum(self._counts)

    @property
    def mean_us(self) -> float:
        """0 if there are none."""
        count = self.count
        return self.total / count / 1000 if count else 0.0

    @property
    def most_us(self) -> float:
        """The longest."""
        return self.most / 1000

    def percentile_us(self, percent: float) -> float:
        """At most so many microseconds took `percent` of them; 0 if there are none.

        The upper end of the bucket, and never more than the longest.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"a percentile lies between 0 and 100, not at {percent}")
        wanted = self.count * percent / 100
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return min(bounds_of(bucket)[1], self.most) / 1000
        return 0.0

    def merge(self, *others: Latencies) -> Latencies:
        """Take in what others have counted; returns itself."""
        for other in others:
            self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
            self.total += other.total
            self.most = max(self.most, other.most)
        return self

    def to_json(self) -> dict[str, object]:
        """For a message to another process: only buckets that are not empty."""
        buckets = {str(bucket): count for bucket, count in enumerate(self._counts) if count}
        return {"buckets": buckets, "total": self.total, "most": self.most}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Latencies:
        """What `to_json` gave; ValueError if it is something else."""
        self = cls()
        buckets, total, most = data.get("buckets"), data.get("total"), data.get("most")
        if not isinstance(buckets, Mapping) or not isinstance(total, int) or not isinstance(most, int):
            raise ValueError("these are no latencies")
        for bucket, count in buckets.items():
            if not 0 <= int(bucket) < _BUCKETS:
                raise ValueError(f"there is no bucket {bucket!r}")
            self._counts[int(bucket)] = int(count)
        self.total, self.most = total, most
        return self


def merged(histograms: Iterable[Latencies]) -> Latencies:
    """A new one with all of them."""
    return Latencies().merge(*histograms)

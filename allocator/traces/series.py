"""Values over time in bounded memory, for pictures: what is kept of each span of time is the maximum.

Rule: a peak never gets lost; only the moment at which it happened gets blurred, by one bucket at most.

Next: replay.py (fills it), plot.py (draws it).
"""

from __future__ import annotations

from typing import Final

BUCKETS: Final = 2048


class Series:
    """`width` values sampled at times that never fall, in at most `BUCKETS` buckets of equal length.

    When time outgrows the buckets, neighbours are merged and the buckets get twice as long.

    >>> series = Series(1, buckets=2)
    >>> for time, value in ((0, 5), (1, 7), (2, 1), (3, 2)):
    ...     series.add(time, (value,))
    >>> series.bucket_ns, series.points()
    (2, [(0, (7,)), (2, (2,))])
    """

    def __init__(self, width: int, *, buckets: int = BUCKETS) -> None:
        if buckets < 2 or buckets % 2:
            raise ValueError(f"buckets must be even and at least 2, got {buckets}")
        self.bucket_ns = 1
        self._most = buckets
        self._maxima: list[tuple[int, ...]] = []
        self._last: tuple[int, ...] = (0,) * width  # valid from its sample until the next one

    def add(self, time_ns: int, values: tuple[int, ...]) -> None:
        """The values hold from `time_ns` on, until the next call.  O(1) amortised."""
        index = time_ns // self.bucket_ns
        while index >= self._most:
            self._halve()
            index = time_ns // self.bucket_ns
        maxima = self._maxima
        if index < len(maxima):
            if values != self._last:
                maxima[-1] = tuple(map(max, maxima[-1], values))
        else:
            # Nothing changed in between; the bucket that begins inside such a span starts with the old values.
            maxima.extend([self._last] * (index - len(maxima)))
            begins_here = time_ns == index * self.bucket_ns
            maxima.append(values if begins_here or not maxima else tuple(map(max, self._last, values)))
        self._last = values

    def points(self) -> list[tuple[int, tuple[int, ...]]]:
        """(start of the bucket in ns, the maxima in it), in order."""
        return [(index * self.bucket_ns, values) for index, values in enumerate(self._maxima)]

    def _halve(self) -> None:
        pairs = self._maxima
        if len(pairs) % 2:
            pairs = [*pairs, pairs[-1]]
        self._maxima = [tuple(map(max, pairs[i], pairs[i + 1])) for i in range(0, len(pairs), 2)]
        self.bucket_ns *= 2

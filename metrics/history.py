"""`History`: what pools have said over the last hour, for whoever wants to look back.

Rules:

* One sample a second and pool: gauges as they are, counters as the difference to the sample before.  Memory is
  bounded: a pool keeps `keep_s` seconds in flat arrays, about 2 MiB for an hour, however long it lives.
* What costs a walk over all blocks (figures by stream, the address map) is read only while somebody watches.
* Pools are held weakly, and no frame of the sampling thread keeps one between two samples.  A pool that is closed
  or gone leaves with its history.
* A pool that cannot be read leaves a gap and one line in the log; nothing ends the thread but `stop`.

Threads: the sampling thread writes, anybody reads; one lock, never held while a pool is read or a listener called.
Longer than other modules: the ring, what it samples and who is told share one lock and one idea of time.
Next: page/document.py, which shows it.  For people: docs/metrics.md.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from allocator import CachingAllocator
from allocator.metrics.collector import AT_ONCE, label_text
from allocator.stats import REQUEST_BUCKETS, SECONDS_BUCKETS, Histogram, Stats
from allocator.streams import Registry

_log = logging.getLogger("allocator.metrics")

GAUGES: Final = (
    "allocated_bytes",
    "requested_bytes",
    "reserved_bytes",
    "in_flight_bytes",
    "idle_bytes",
    "private_bytes",
    "largest_free_block_bytes",
    "releasable_bytes",
    "limit_bytes",
    "device_size_bytes",
    "external_fragmentation_ratio",
    "internal_fragmentation_ratio",
    "oldest_in_flight_seconds",
)
"""Fields of `Stats` that are kept as they are."""

COUNTERS: Final = (
    "growths",
    "growth_bytes",
    "out_of_memory",
    "stream_waits",
    "event_records",
    "event_queries",
    "host_synchronizations",
)
"""Fields of `Stats` that are kept as differences."""

REUSE: Final = ("same_stream", "event_dependency", "opportunistic", "internal_dependency", "new_memory")
SAVED: Final = ("event_dependency", "opportunistic", "internal_dependency")
"""Reuse kinds that a cache for each stream does not have: without them it would have been new memory."""
STEPS: Final = ("internal_dependency", "move", "release", "host_wait", "callback", "collect")
SIZES: Final = (*REQUEST_BUCKETS, math.inf)

COLUMNS: Final = (
    "number",
    "time",
    "seconds",
    *GAUGES,
    *COUNTERS,
    "release_bytes",
    *(f"reuse_{kind}" for kind in REUSE),
    *(f"retry_{step}" for step in STEPS),
    *(f"size_{at}" for at in range(len(SIZES))),
    "in_flight_p50",
    "in_flight_p99",
)
"""What a sample holds.  number: 1 for a pool's first.  time: seconds since 1970.  seconds: since the sample before.
reuse_, retry_: allocations.  size_N: requests up to `SIZES[N]` bytes.  in_flight_p: seconds, over the last 10 samples;
NaN where other streams waited for nothing."""

PERCENTILE_SAMPLES: Final = 10


def steady_clock() -> Callable[[], float]:
    """Seconds since 1970 that never go back, whatever happens to the system's clock afterwards."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset


def quantile(counts: Sequence[float], q: float) -> float:
    """The q-quantile of times counted in `SECONDS_BUCKETS`, interpolated within its decade; NaN if there are none.

    >>> round(quantile([0, 0, 10, 0, 0, 0, 0, 0, 0], 0.5), 6)  # all between 0.1 and 1 ms
    0.000316
    """
    total = sum(counts)
    if not total:
        return math.nan
    rank, below = q * total, 0.0
    for at, count in enumerate(counts):
        if count and below + count >= rank:
            if at == len(SECONDS_BUCKETS):
                break
            high = SECONDS_BUCKETS[at]
            low = SECONDS_BUCKETS[at - 1] if at else high / 10
            return low * math.exp(math.log(high / low) * (rank - below) / count)
        below += count
    return SECONDS_BUCKETS[-1]


@dataclass(frozen=True)
class AddressMap:
    """Every block of a pool at its address, in address order.  Flat arrays of one length.

    state: index into `STATES`.  names: stream number -> the name it was given, where it has one.
    segments: (address, bytes) of each mapped range.
    """

    time: float
    address: array[int]
    size: array[int]
    state: array[int]
    stream: array[int]
    names: Mapping[int, str]
    segments: Sequence[tuple[int, int]]

    STATES = ("live", "in flight", "idle")


_STATE_OF: Final = {"active_allocated": 0, "active_pending_free": 1, "inactive": 2}


def address_map(pool: CachingAllocator, now: float) -> AddressMap:
    """Read a pool's map.  O(blocks), and the pool's bins are emptied: only for somebody who looks."""
    segments = pool.snapshot()["segments"]
    address, size, state, stream = array("Q"), array("Q"), array("B"), array("q")
    for segment in segments:
        blocks: list[dict[str, Any]] = segment["blocks"]
        address.extend(block["address"] for block in blocks)
        size.extend(block["size"] for block in blocks)
        state.extend(_STATE_OF[block["state"]] for block in blocks)
        stream.extend(block["stream"] for block in blocks)
    registry = Registry.of(pool.device)
    with registry.lock:
        names = {line.number: label_text(line.name) for line in registry.seen() if line.name}
    return AddressMap(
        time=now,
        address=address,
        size=size,
        state=state,
        stream=stream,
        names=names,
        segments=[(segment["address"], segment["total_size"]) for segment in segments],
    )


@dataclass(eq=False)
class PoolHistory:
    """One pool's samples.  Made and filled by a `History`; the methods may be called from any thread."""

    label: str
    """What to call the pool: its name and device, unlike any other living pool's."""
    keep: int
    """Samples that are kept."""
    lock: threading.RLock = field(repr=False)
    _ref: weakref.ref[CachingAllocator] = field(repr=False)
    _columns: dict[str, array[float]] = field(init=False, repr=False)
    _before: Stats | None = field(default=None, init=False, repr=False)
    _time: float = field(default=0.0, init=False)
    _count: int = field(default=0, init=False)
    _waits: deque[list[float]] = field(init=False, repr=False)
    _map: AddressMap | None = field(default=None, init=False, repr=False)
    _told: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self._columns = {name: array("d") for name in COLUMNS}
        self._waits = deque(maxlen=PERCENTILE_SAMPLES)

    @property
    def count(self) -> int:
        """Samples ever taken; the newest has this number."""
        return self._count

    @property
    def latest(self) -> Stats | None:
        """The newest statistics, whole; None before the first sample.  By stream only while somebody watches."""
        return self._before

    @property
    def map(self) -> AddressMap | None:
        """The newest address map; None while nobody watches."""
        return self._map

    def pool(self) -> CachingAllocator | None:
        """None once it has been closed or has gone."""
        pool = self._ref()
        return None if pool is None or pool.closed else pool

    def since(self, number: int = 0) -> dict[str, array[float]]:
        """The samples after that number, as far as they are kept: column -> values, oldest first."""
        with self.lock:
            new = min(self._count - number, self.keep, len(self._columns["time"]))
            return {name: column[len(column) - new :] for name, column in self._columns.items()} if new > 0 else {}

    def total(self, column: str, seconds: float) -> float:
        """The sum of a column over the last so many seconds."""
        with self.lock:
            values, times = self._columns[column], self._columns["time"]
            start = len(times)
            while start and times[start - 1] > self._time - seconds:
                start -= 1
            return sum(values[start:])

    def add(self, stats: Stats, now: float) -> None:
        """Append a sample.  Times never go back: a clock that does stands still instead."""
        with self.lock:
            now = max(now, self._time)
            row = self._row(stats, now)
            for name, column in self._columns.items():
                column.append(row[name])
                if len(column) >= 2 * self.keep:  # cut rarely, so that a sample costs the same every time
                    del column[: len(column) - self.keep]
            self._before, self._time = stats, now

    def _row(self, stats: Stats, now: float) -> dict[str, float]:
        before = stats if self._before is None else self._before  # what was before the first sample has no time
        self._count += 1
        row: dict[str, float] = {"number": self._count, "time": now}
        row["seconds"] = now - self._time if self._before is not None else 0.0
        for name in GAUGES:
            row[name] = getattr(stats, name)
        for name in COUNTERS:
            row[name] = getattr(stats, name) - getattr(before, name)
        row["release_bytes"] = sum(stats.release_bytes.values()) - sum(before.release_bytes.values())
        for kind in REUSE:
            row[f"reuse_{kind}"] = stats.allocations[kind] - before.allocations[kind]
        for step in STEPS:
            row[f"retry_{step}"] = stats.out_of_memory_retries[step] - before.out_of_memory_retries[step]
        for at, difference in enumerate(_differences(stats.request_size_bytes, before.request_size_bytes)):
            row[f"size_{at}"] = difference
        self._waits.append(_differences(stats.in_flight_seconds, before.in_flight_seconds))
        waits = [sum(counts) for counts in zip(*self._waits, strict=True)]
        row["in_flight_p50"] = quantile(waits, 0.5)
        row["in_flight_p99"] = quantile(waits, 0.99)
        return row


def _differences(now: Histogram, before: Histogram) -> list[float]:
    return [now.counts[bound] - before.counts[bound] for bound in now.counts]


class History:
    """Samples of every pool that `pools()` names, once every `interval_s` seconds, for `keep_s` seconds.

    clock: seconds since 1970, for the samples' times.  Reading a pool makes the driver calls of `pool.stats()`.

    >>> import allocator
    >>> pool = allocator.CachingAllocator(allocator.SimDevice(), config=allocator.Config(), name="demo")
    >>> history = History(lambda: [pool])
    >>> a = pool.allocate(1 << 20)
    >>> history.sample()
    >>> [(one.label, one.since(0)["allocated_bytes"][-1]) for one in history.pools()]
    [('demo on sim:0', 1048576.0)]
    """

    def __init__(
        self,
        pools: Callable[[], Sequence[CachingAllocator]],
        *,
        interval_s: float = 1.0,
        keep_s: float = 3600.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if not 0 < interval_s <= keep_s:
            raise ValueError(f"interval_s must be above 0 and up to keep_s: {interval_s} of {keep_s}")
        self.interval_s = interval_s
        self.keep_s = keep_s
        self._pools = pools
        self._keep = max(2, math.ceil(keep_s / interval_s))
        self._clock = steady_clock() if clock is None else clock
        self._lock = threading.RLock()  # a finaliser that runs inside may come back
        self._sampling = threading.Lock()
        self._members: list[PoolHistory] = []
        self._watchers = 0
        self._listeners: list[Callable[[], object]] = []
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._wake = threading.Event()

    # -- the thread -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to sample, in one daemon thread.  Twice is harmless."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            self._stopped, self._wake = threading.Event(), threading.Event()
            self._thread = threading.Thread(
                target=_run,
                args=(weakref.ref(self), self._stopped, self._wake, self.interval_s),
                name="weir-history",
                daemon=True,
            )
            self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for it.  Twice is harmless; the samples stay, and `start` goes on."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stopped.set()
            self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # -- sampling -------------------------------------------------------------------------------

    def sample(self) -> None:
        """Take one sample of every pool now, then tell the listeners.  Never raises for a pool that cannot be read."""
        with self._sampling:
            for member in self._refresh():
                self._read(member, watched=self._watchers > 0)
        self._tell()

    def look(self) -> None:
        """What only a watcher needs, read now: so that a page that has just been opened need not wait for it."""
        with self._sampling:
            for member in self._refresh():
                if self._watchers and member.map is None:
                    self._read(member, watched=True, row=not member.count)
        self._tell()

    def _refresh(self) -> list[PoolHistory]:
        """The pools there are now; new ones join, those that have gone leave."""
        pools = [pool for pool in self._pools() if not pool.closed]
        with self._lock:
            known = {id(pool): one for one in self._members if (pool := one.pool()) is not None}
            kept: list[PoolHistory] = []
            for pool in pools:
                member = known.get(id(pool))
                if member is None:
                    label = _label(pool, {one.label for one in known.values()})
                    known[id(pool)] = member = PoolHistory(label, self._keep, self._lock, weakref.ref(pool))
                if member not in kept:
                    kept.append(member)
            self._members = kept
            return list(kept)

    def _read(self, member: PoolHistory, *, watched: bool, row: bool = True) -> None:
        pool = member.pool()
        if pool is None:
            return
        try:
            now = self._clock()
            stats = pool.stats(per_stream=watched, most=AT_ONCE)
            shown = address_map(pool, now) if watched else None
        except Exception as error:  # whatever it is, the next sample may succeed
            if not member._told:
                member._told = True
                # Texts only: a log record that outlives the call must not keep its frames, and so memory, alive.
                _log.warning("pool %r is left out of the history for now: %s", member.label, str(error))
            return
        member._told = False
        if row:
            member.add(stats, now)
        else:
            with member.lock:
                if member._before is not None:  # the figures by stream only; the rest belongs to a sample
                    member._before = _with_streams(member._before, stats)
        member._map = shown

    def _tell(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            try:
                listener()
            except Exception as error:  # a page that goes away must not end the history
                _log.warning("a listener of the history failed: %s", str(error))

    # -- reading --------------------------------------------------------------------------------

    def pools(self) -> list[PoolHistory]:
        """The histories of the pools that still live, in the order in which `pools` named them."""
        with self._lock:
            members = list(self._members)
        return [member for member in members if member.pool() is not None]

    @property
    def watched(self) -> bool:
        """Does anybody watch?"""
        return self._watchers > 0

    @contextmanager
    def watch(self, listener: Callable[[], object] | None = None) -> Iterator[None]:
        """While inside, samples also hold the figures by stream and the address map.

        listener: called after each sample, in the thread that took it.
        """
        with self._lock:
            self._watchers += 1
            if listener is not None:
                self._listeners.append(listener)
            self._wake.set()
        try:
            yield
        finally:
            with self._lock:
                self._watchers -= 1
                if listener is not None:
                    self._listeners.remove(listener)
                if not self._watchers:
                    for member in self._members:
                        member._map = None  # old by the time that anybody looks again


def _with_streams(old: Stats, new: Stats) -> Stats:
    return replace(
        old,
        stream_allocated_bytes=new.stream_allocated_bytes,
        stream_in_flight_bytes=new.stream_in_flight_bytes,
        stream_idle_bytes=new.stream_idle_bytes,
    )


def _label(pool: CachingAllocator, taken: set[str]) -> str:
    base = f"{label_text(pool.name)} on {label_text(pool.device.label)}"
    label, number = base, 1
    while label in taken:
        number += 1
        label = f"{base} #{number}"
    return label


def _run(ref: weakref.ref[History], stopped: threading.Event, wake: threading.Event, interval_s: float) -> None:
    """The thread: sample on time, look when somebody begins to watch, end when stopped or when nobody holds it."""
    due = time.monotonic()
    while not stopped.is_set():
        woken = wake.wait(max(0.0, due - time.monotonic()))
        wake.clear()
        history = ref()
        if history is None or stopped.is_set():
            return
        try:
            if woken and time.monotonic() < due:
                history.look()
            else:
                began = time.monotonic()
                history.sample()
                ended = time.monotonic()
                # A sample that takes long may take half of the time, not all of it.
                due = max(due + interval_s, ended + (ended - began))
        except Exception as error:  # from pools(), or memory running out
            _log.warning("the history missed a sample: %s", str(error))
            due = time.monotonic() + interval_s
        del history

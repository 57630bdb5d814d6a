"""`AllocatorCollector`: reads pools when somebody scrapes, and only then.

Rules:

* Nothing here runs on an allocation's path.  A scrape takes one consistent `pool.stats()` of each pool, before any
  family is written, so that a reader that stops half-way holds no pool.
* Pools are held weakly.  One that is closed, has died, or came through a fork is gone from the output.
* One pool that cannot be read must not cost the others their figures: it is left out, counted, and logged once.
* Every text that becomes a label is a name that a user gave, printable, at most 40 characters, and unique.

* Scrapes are spaced, so that many clients at full speed cannot take the interpreter from the program: each gets a time
  to start, no sooner than `GAP` after the one before, or twice as long as that took.  Nothing is served from a cache.

Threads: `collect` may run in many at once.  The collector's lock guards its list of pools and is never held while a
pool is read; a registry calls `describe` under its own lock, so that takes none.
Next: catalogue.py (the metrics), registration.py (one collector a registry).
"""

from __future__ import annotations

import logging
import math
import os
import platform
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from allocator import CachingAllocator, __version__
from allocator.errors import AllocatorError, ForkError, PoolClosed
from allocator.gil import COMPILED
from allocator.metrics.catalogue import ALL, BUILD_INFO, COMMON, POOL, SCRAPE_FAILURES, STREAMS, Spec, Type
from allocator.stats import Histogram, Stats

_log = logging.getLogger("allocator.metrics")

LONGEST = 40
"""Characters of a label."""

GAP = 0.01
"""Seconds between the starts of two scrapes at least."""

AT_ONCE = 128
"""Queued frees, and finished blocks, that a scrape sees to at most: so its length does not depend on a backlog."""

LONGEST_WAIT = 1.0
"""Seconds that a scrape waits for its time to start at most."""

MULTIPROCESS = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")

_collectors: weakref.WeakKeyDictionary[AllocatorCollector, None] = weakref.WeakKeyDictionary()
_forked = False
"""Is this process a child of one that used this module?"""


class MultiprocessModeError(AllocatorError):
    """prometheus_client's multi-process mode is on, where a collector's metrics would be missing without a word."""


@dataclass(eq=False)
class _Member:
    """A pool of the collector, and the labels it keeps for as long as it is one."""

    ref: weakref.ref[CachingAllocator]
    labels: tuple[str, str]
    backing: str
    per_stream: bool
    failures: int = 0
    told: bool = field(default=False, repr=False)

    def pool(self) -> CachingAllocator | None:
        """None once it has been closed or has gone."""
        pool = self.ref()
        return None if pool is None or pool.closed else pool


class AllocatorCollector:
    """A prometheus_client collector of one or more pools, for a registry of your own.

    `register` is the usual way: it keeps one collector a registry.  Two in one registry are refused by it, as their
    series would clash.

    per_stream: also three gauges a stream, of 33 names at most.
    own_port: needed where prometheus_client's multi-process mode is on; says that the registry is served by this
    very process, on a port of its own.  Raises MultiprocessModeError without it, PoolClosed, TypeError.

    >>> import allocator, prometheus_client
    >>> pool = allocator.CachingAllocator(allocator.SimDevice(), config=allocator.Config(), name="demo")
    >>> registry = prometheus_client.CollectorRegistry()
    >>> registry.register(AllocatorCollector(pool))
    >>> a = pool.allocate(1000)
    >>> registry.get_sample_value("weir_requested_bytes", {"pool": "demo", "device": "sim:0"})
    1000.0
    """

    def __init__(self, *pools: CachingAllocator, per_stream: bool = False, own_port: bool = False) -> None:
        check_mode(own_port)
        self._lock = threading.RLock()  # a finaliser that runs inside may come back
        self._members: list[_Member] = []
        self._next_start = 0.0
        self._took = 0.0
        _collectors[self] = None
        for pool in pools:
            self.add(pool, per_stream=per_stream)

    # -- pools join and leave -------------------------------------------------------------------

    def add(self, pool: CachingAllocator, *, per_stream: bool = False) -> None:
        """Read this pool too.  Twice is harmless; per_stream stays on once asked for.

        A second living pool of the same name on the same device is called `name#2`.
        """
        if not isinstance(pool, CachingAllocator):
            raise TypeError(f"metrics are read from a CachingAllocator, not from {type(pool).__name__}")
        if pool.closed:
            raise PoolClosed(f"pool {pool.name!r} has been closed and has no metrics; register a new one")
        if _forked:
            pool.stats()  # of a pool that came through the fork: ForkError, which says what to do
        with self._lock:
            members = self._prune()
            for member in members:
                if member.ref() is pool:
                    member.per_stream |= per_stream
                    return
            labels = _labels(pool, {member.labels for member in members})
            self._members = [*members, _Member(weakref.ref(pool), labels, pool.config.backing, per_stream)]

    def remove(self, pool: CachingAllocator) -> None:
        """Do not read this pool any more.  Harmless if it is not read."""
        with self._lock:
            self._members = [member for member in self._prune() if member.ref() is not pool]

    @property
    def pools(self) -> list[CachingAllocator]:
        """Those that the next scrape will read."""
        with self._lock:
            members = self._prune()
        return [pool for member in members if (pool := member.pool()) is not None]

    def _prune(self) -> list[_Member]:
        """Forget the pools that have gone.  Under the lock."""
        self._members = [member for member in self._members if member.pool() is not None]
        return self._members

    def after_fork_in_child(self) -> None:
        """The pools stay with the parent, whose counts are not ours; the lock may have been held by any thread."""
        self._lock = threading.RLock()
        self._members = []

    # -- what a registry calls ------------------------------------------------------------------

    def describe(self) -> Iterable[Metric]:
        """Every family there may be, empty.  Looks at no pool and takes no lock."""
        return [_family(spec) for spec in ALL]

    def collect(self) -> Iterable[Metric]:
        """All families with values.  Driver calls: those of `pool.stats()`, none that can block.

        Waits for its time to start where scrapes come faster than one in `GAP` seconds; outside every lock.
        """
        self._wait_for_a_turn()
        started = time.monotonic()
        with self._lock:
            members = list(self._prune())
        readings = [(member, stats) for member in members for stats in self._read(member)]
        families: list[Metric] = []
        for spec in (*POOL, *STREAMS):
            family = _family(spec)
            for member, stats in readings:
                if stats is not None:
                    _add(family, spec, member.labels, getattr(stats, spec.field))
            families.append(family)
        failures, build = _family(SCRAPE_FAILURES), _family(BUILD_INFO)
        for member, _ in readings:
            _add(failures, SCRAPE_FAILURES, member.labels, member.failures)
            _add(build, BUILD_INFO, member.labels, _build(member.backing))
        self._took = time.monotonic() - started
        return [family for family in (*families, failures, build) if family.samples]

    def _wait_for_a_turn(self) -> None:
        with self._lock:
            now = time.monotonic()
            start = min(max(now, self._next_start), now + LONGEST_WAIT)
            self._next_start = start + max(GAP, 2 * self._took)
        if start > now:
            time.sleep(start - now)

    def _read(self, member: _Member) -> list[Stats | None]:
        """One reading; one None if the pool could not be read; nothing if it has gone."""
        pool = member.pool()
        if pool is None:
            return []
        try:
            stats = pool.stats(per_stream=member.per_stream, most=AT_ONCE)
        except ForkError:
            return []
        except Exception as error:  # whatever it is, the other pools have figures
            member.failures += 1
            if not member.told:
                member.told = True
                # Texts only: a log record that outlives the call must not keep its frames, and so memory, alive.
                _log.warning("pool %r is left out of this scrape, and counted: %s", pool.name, str(error))
            return [None]
        member.told = False
        return [] if pool.closed else [stats]


def check_mode(own_port: bool) -> None:
    """Raise MultiprocessModeError where prometheus_client would leave these metrics out without a word."""
    variable = next((name for name in MULTIPROCESS if name in os.environ), None)
    if variable is not None and not own_port:
        raise MultiprocessModeError(
            f"{variable} is set: prometheus_client's multi-process mode merges files and never asks a collector, so "
            "the metrics of this pool would be missing. Give each process one port of its own: "
            "registry = prometheus_client.CollectorRegistry(); "
            "allocator.metrics.register(pool, registry, own_port=True); "
            f"prometheus_client.start_http_server(port, registry=registry). Or unset {variable}"
        )


# -- from a reading to samples ----------------------------------------------------------------------


def _family(spec: Spec) -> Metric:
    if spec.type is Type.GAUGE:
        return GaugeMetricFamily(spec.family, spec.help, labels=spec.labels, unit=spec.unit)
    if spec.type is Type.COUNTER:
        return CounterMetricFamily(spec.family, spec.help, labels=spec.labels, unit=spec.unit)
    if spec.type is Type.HISTOGRAM:
        return HistogramMetricFamily(spec.family, spec.help, labels=spec.labels, unit=spec.unit)
    return InfoMetricFamily(spec.family, spec.help, labels=COMMON)


def _add(family: Metric, spec: Spec, labels: tuple[str, str], value: object) -> None:
    """The samples of one pool."""
    if isinstance(family, InfoMetricFamily):
        assert isinstance(value, dict)
        family.add_metric(labels, value)
    elif isinstance(family, HistogramMetricFamily):
        assert isinstance(value, Histogram)
        family.add_metric(labels, _cumulative(value), value.sum)
    elif isinstance(family, GaugeMetricFamily | CounterMetricFamily):
        if isinstance(value, Mapping):
            values = _by_text(value) if spec.label == "stream" else value
            for text, number in values.items():
                family.add_metric((*labels, text), number)
        else:
            assert isinstance(value, int | float)
            if spec.field == "device_free_bytes" and value < 0:
                return  # the driver has not been asked yet; no number is better than a wrong one
            family.add_metric(labels, value)


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """Buckets as Prometheus counts them: everything up to the bound; `+Inf` is the last."""
    total = 0
    buckets = []
    for bound, count in histogram.items():
        total += count
        buckets.append(("+Inf" if bound == math.inf else repr(float(bound)), float(total)))
    return buckets


def _by_text(values: Mapping[str, int]) -> dict[str, int]:
    """Streams by printable name; those that look the same are one series."""
    summed: dict[str, int] = {}
    for name, value in values.items():
        text = label_text(name)
        summed[text] = summed.get(text, 0) + value
    return summed


def _build(backing: str) -> dict[str, str]:
    return {
        "version": __version__,
        "python": platform.python_version(),
        "accelerated": str(COMPILED).lower(),
        "backing": backing,
    }


def label_text(name: str) -> str:
    """A name as a label: printable, up to 40 characters, never empty (an empty label is no label).

    >>> label_text("prefetch"), label_text("two\\nlines"), label_text("")
    ('prefetch', 'two?lines', 'unnamed')
    """
    text = "".join(letter if letter.isprintable() else "?" for letter in name[:LONGEST])
    return text or "unnamed"


def _labels(pool: CachingAllocator, taken: set[tuple[str, str]]) -> tuple[str, str]:
    """(pool, device), told apart from the living pools' by a number behind the name."""
    base, device = label_text(pool.name), label_text(pool.device.label)
    text, number = base, 1
    while (text, device) in taken:
        number += 1
        suffix = f"#{number}"
        text = base[: LONGEST - len(suffix)] + suffix
    return text, device


def _after_fork_in_child() -> None:
    global _forked
    _forked = True
    for collector in list(_collectors):
        collector.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

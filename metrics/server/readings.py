"""What is read from pools for an answer: the metrics page, the snapshot, and whether all is well.

Runs on the worker's thread.  Rule: a pool is read under its own short lock, turned into bytes after that, and never
kept.  Next: app.py, which sends the bytes.
"""

from __future__ import annotations

import contextlib
import gzip
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.exposition import generate_latest as _text
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as _openmetrics

from allocator import CachingAllocator
from allocator.errors import AllocatorError
from allocator.metrics.collector import AT_ONCE, AllocatorCollector
from allocator.metrics.server.sources import Pools

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
LEVEL: Final = 5
"""Of compression: a page of 50 kB becomes 5 kB in about a millisecond."""


@dataclass(frozen=True)
class Form:
    """How a page is asked for."""

    content_type: str
    zipped: bool


def form_of(accept: str, accept_encoding: str) -> Form:
    """What these two headers ask for; plain text wherever OpenMetrics is not preferred.

    >>> form_of("application/openmetrics-text;version=1.0.0,text/plain;q=0.5,*/*;q=0.1", "gzip")
    Form(content_type='application/openmetrics-text; version=1.0.0; charset=utf-8', zipped=True)
    >>> form_of("*/*", "gzip;q=0").zipped
    False
    """
    types, encodings = _qualities(accept), _qualities(accept_encoding)
    openmetrics = types.get("application/openmetrics-text", 0.0)
    plain = types.get("text/plain", types.get("text/*", types.get("*/*", 0.0)))
    return Form(
        OPENMETRICS if openmetrics > 0 and openmetrics >= plain else TEXT,
        encodings.get("gzip", encodings.get("*", 0.0)) > 0,
    )


def _qualities(header: str) -> dict[str, float]:
    """Name -> the most that it is wanted, 0..1, of an Accept header."""
    found: dict[str, float] = {}
    for item in header.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    quality = float(parameter[2:])
                except ValueError:
                    quality = 0.0
        if name:
            found[name] = max(quality, found.get(name, 0.0))
    return found


class Metrics:
    """The metrics page of the present pools."""

    def __init__(self, pools: Pools, *, per_stream: bool) -> None:
        self._pools = pools
        self._per_stream = per_stream
        self._collector = AllocatorCollector(own_port=True)

    def read(self, forms: Iterable[Form]) -> dict[Form, bytes]:
        """Read every pool once, and write that in each form."""
        current = self._pools()
        for pool in self._collector.pools:
            if not any(pool is other for other in current):
                self._collector.remove(pool)
        for pool in current:
            with contextlib.suppress(AllocatorError):  # closed this very moment
                self._collector.add(pool, per_stream=self._per_stream)
        families = _Families(list(self._collector.collect()))
        texts: dict[str, bytes] = {}
        pages: dict[Form, bytes] = {}
        for form in forms:
            text = texts.get(form.content_type)
            if text is None:
                write: Any = _openmetrics if form.content_type == OPENMETRICS else _text
                text = texts[form.content_type] = write(families)
            pages[form] = gzip.compress(text, LEVEL, mtime=0) if form.zipped else text
        return pages


class _Families:
    """A collection in the shape of a registry."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class Unknown(Exception):
    """There is no such pool."""


class Snapshots:
    """The file that `torch.cuda.memory._dump_snapshot` would write, by pool."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def read(self, names: Iterable[str | None]) -> dict[str | None, bytes | Unknown]:
        """One file a name; None means the only pool."""
        return {name: self._one(name) for name in names}

    def _one(self, name: str | None) -> bytes | Unknown:
        pools = self._pools.by_name()
        if name is None and len(pools) == 1:
            (name,) = pools
        if not pools:
            return Unknown("there is no pool")
        if name not in pools:
            known = " or ".join(f"?pool={other}" for other in list(pools)[:20])
            return Unknown(f"{'several pools' if name is None else f'no pool {name[:40]!r}'}: add {known}")
        return pickled(pools[name].snapshot())


def pickled(value: object) -> bytes:
    """A pickle, written piece by piece, so that other threads get their turn in a long one."""
    pieces = _Pieces()
    pickle.Pickler(pieces, protocol=4).dump(value)
    return b"".join(pieces.all)


class _Pieces:
    """A file of Python's own making: each write gives the interpreter a chance to switch threads."""

    def __init__(self) -> None:
        self.all: list[bytes] = []

    def write(self, piece: bytes) -> int:
        self.all.append(bytes(piece))
        return len(piece)


class Health:
    """Whether what is served can still be used."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def read(self, keys: Iterable[None]) -> dict[None, str | None]:
        """What is wrong, or None."""
        return {None: self._wrong()}

    def _wrong(self) -> str | None:
        gone = self._pools.gone()
        if gone is not None:
            return gone
        lost = [pool for pool in self._pools() if _lost(pool)]
        if not lost:
            return None
        return "; ".join(
            f"the device {pool.device.label} of pool {pool.name!r} is lost: restart the process" for pool in lost
        )


def _lost(pool: CachingAllocator) -> bool:
    try:
        return bool(pool.stats(most=AT_ONCE).device_lost)  # asks the streams, so a loss is noticed here
    except AllocatorError:
        return False  # closed meanwhile; a driver's error that is not final counts in the metrics

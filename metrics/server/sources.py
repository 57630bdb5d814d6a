"""Which pools a server speaks of: those it was given, or those that a callable names each time.

Rule: serving keeps no pool alive.  One that has been closed, or that nobody holds any more, is gone from the next
answer, as it is from a registry.
Next: readings.py, which reads them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import TypeAlias

from allocator import CachingAllocator

_log = logging.getLogger("allocator.metrics")

Source: TypeAlias = CachingAllocator | Iterable[CachingAllocator] | Callable[[], Iterable[CachingAllocator]]
"""A pool, several, or a callable that returns the present ones."""


class Pools:
    """The open pools of a source; calling it looks anew.  TypeError for what is none."""

    def __init__(self, source: Source) -> None:
        self._call: Callable[[], Iterable[CachingAllocator]] | None = None
        self._fixed: list[weakref.ref[CachingAllocator]] = []
        self._names: list[str] = []
        self._told = False
        if isinstance(source, CachingAllocator):
            source = (source,)
        if callable(source):
            self._call = source
            return
        try:
            given = list(source)
        except TypeError:
            raise TypeError(f"a pool, pools, or a callable that returns them, not {type(source).__name__}") from None
        for pool in given:
            _check(pool)
            self._fixed.append(weakref.ref(pool))
            self._names.append(pool.name)

    def __call__(self) -> list[CachingAllocator]:
        """Those that are open now, each once.  Never raises: a callable that fails names none, and is logged once."""
        if self._call is None:
            found: list[CachingAllocator] = [pool for ref in self._fixed if (pool := ref()) is not None]
        else:
            try:
                found = list(self._call())
                for pool in found:
                    _check(pool)
            except Exception as error:  # of the program that serves
                if not self._told:
                    self._told = True
                    _log.warning("the pools to serve could not be found out, so none is shown: %s", str(error))
                return []
            self._told = False
        return list({id(pool): pool for pool in found if not pool.closed}.values())

    def by_name(self) -> dict[str, CachingAllocator]:
        """The open pools by name; one that shares its name is `name#2`."""
        named: dict[str, CachingAllocator] = {}
        for pool in self():
            name, number = pool.name, 1
            while name in named:
                number += 1
                name = f"{pool.name}#{number}"
            named[name] = pool
        return named

    def gone(self) -> str | None:
        """Why there is nothing to serve any more, or None.  A callable may still name a pool later."""
        if self._call is not None or not self._fixed or self():
            return None
        names = ", ".join(map(repr, self._names[:4]))
        return f"pool {names} has been closed" if len(self._names) == 1 else f"all pools have been closed: {names}"


def _check(pool: object) -> None:
    if not isinstance(pool, CachingAllocator):
        raise TypeError(f"pools are CachingAllocators, not {type(pool).__name__}")

"""Real locks and threads in a process whose threading module gevent has replaced, as `import locust` does.

Rule: *what the pool works with is what it works with in a program*.  gevent's locks know greenlets, and a pool under
them would not be the pool that is to be tested; also, batches run in real threads, between which only real locks
order anything.  So the modules are imported, and the pools made, while the originals are back in place; and later
locks are made from the original type.  Without gevent, or before it has replaced anything, nothing changes here.

Used by: locustfile.py (around its imports), load.py.
"""

from __future__ import annotations

import _thread
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_REPLACED: Final = {
    "threading": (
        "Event", "Lock", "Thread", "Timer", "_CRLock", "_allocate_lock", "_set_sentinel", "_start_new_thread",
        "_start_joinable_thread", "get_ident", "local",
    ),
    "_thread": ("allocate_lock", "get_ident", "start_new_thread"),
    "_threading_local": ("local",),
    "time": ("sleep",),
}  # fmt: skip

_before: list[tuple[Any, str, object]] = []


def replaced() -> bool:
    """Has gevent replaced the threading module?"""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def swap_in() -> None:
    """Put the originals in place, until `swap_out`.  Nothing happens where nothing was replaced."""
    if not replaced():
        return
    monkey: Any = sys.modules["gevent.monkey"]
    for name, items in _REPLACED.items():
        module = sys.modules.get(name)
        for item in items:
            if module is not None and hasattr(module, item):
                _before.append((module, item, getattr(module, item)))
                setattr(module, item, monkey.get_original(name, item))


def swap_out() -> None:
    """Put back what `swap_in` found."""
    while _before:
        module, item, value = _before.pop()
        setattr(module, item, value)


@contextmanager
def native_threads() -> Iterator[None]:
    """The originals are back inside a `with`.  No greenlet may switch within it."""
    swap_in()
    try:
        yield
    finally:
        swap_out()


def native_lock() -> Any:
    """A lock between real threads; re-entrant.  The one type that gevent leaves alone."""
    return _thread.RLock()

"""What turns a pool's statistics into something an operator can watch.

Rule: everything here only reads `pool.stats()`; the allocator never imports it.
Imported as `allocator.metrics` (docs/decisions/0001-import-names.md).  Next: registration.py, server/; docs/metrics.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from allocator.metrics.collector import AllocatorCollector, MultiprocessModeError
from allocator.metrics.dashboards import grafana_dashboard, prometheus_rules
from allocator.metrics.history import History
from allocator.metrics.page import make_document
from allocator.metrics.registration import register, unregister

if TYPE_CHECKING:
    from allocator.metrics.server import Server as Server
    from allocator.metrics.server import serve as serve

__all__ = [
    "AllocatorCollector",
    "History",
    "MultiprocessModeError",
    "Server",
    "grafana_dashboard",
    "make_document",
    "prometheus_rules",
    "register",
    "serve",
    "unregister",
]


def __getattr__(name: str) -> object:
    if name in ("Server", "serve"):  # at first use: nobody pays for an event loop who does not serve
        return getattr(importlib.import_module("allocator.metrics.server"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

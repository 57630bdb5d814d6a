"""What turns a pool's statistics into something an operator can watch.

Rule: everything here only reads `pool.stats()`; the allocator never imports it.
Imported as `allocator.metrics` (docs/decisions/0001-import-names.md).  Next: registration.py; docs/metrics.md.
"""

from __future__ import annotations

from allocator.metrics.collector import AllocatorCollector, MultiprocessModeError
from allocator.metrics.dashboards import grafana_dashboard, prometheus_rules
from allocator.metrics.registration import register, unregister

__all__ = [
    "AllocatorCollector",
    "MultiprocessModeError",
    "grafana_dashboard",
    "prometheus_rules",
    "register",
    "unregister",
]

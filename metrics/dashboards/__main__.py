"""`python -m allocator.metrics.dashboards`: write grafana.json anew, after a change of grafana.py."""

from __future__ import annotations

from pathlib import Path

from allocator.metrics.dashboards import GRAFANA_FILE
from allocator.metrics.dashboards.grafana import text
from allocator.metrics.dashboards.panels import ROWS

if __name__ == "__main__":
    Path(__file__).with_name(GRAFANA_FILE).write_text(text(ROWS), encoding="utf-8")

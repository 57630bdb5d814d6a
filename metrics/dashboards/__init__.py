"""The Grafana dashboard and the Prometheus rules, as files that travel with the package.

    grafana.json   the dashboard; built by `grafana.py`, kept as a file so that it can be had without Python
    rules.yml      recording rules and alerts; written by hand, explained by its own comments

Rule: the dashboard needs no rule to be loaded and the rules need no dashboard; both use the names of catalogue.py only.
`python -m allocator.metrics.dashboards` writes grafana.json anew, and a test compares.  Next: grafana.py.
"""

from __future__ import annotations

from importlib import resources
from typing import Final

GRAFANA_FILE: Final = "grafana.json"
RULES_FILE: Final = "rules.yml"


def grafana_dashboard() -> str:
    """The dashboard as JSON text, for Grafana 10 and newer: Dashboards, New, Import; or provisioned as a file.

    >>> import json
    >>> json.loads(grafana_dashboard())["title"]
    'Weir: GPU memory'
    """
    return _text(GRAFANA_FILE)


def prometheus_rules() -> str:
    """The recording rules and alerts as YAML text, for `rule_files` of a Prometheus 2.42 or newer.

    >>> "alert: WeirOutOfMemory" in prometheus_rules()
    True
    """
    return _text(RULES_FILE)


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")

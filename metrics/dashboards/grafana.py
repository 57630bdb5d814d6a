"""The Grafana dashboard, written down once: which question each panel answers, and by which expression.

Rule: a panel is a question of an operator; its description says what to do about a bad answer.  Expressions are kept
to pool and device, summed over what else is selected.  Layout, ids and reference letters follow from the order.
Grafana 10 and newer import it as it is; nothing in it names a data source, so it asks for one.

Next: panels.py (the list), __init__.py (where the result is read).  `python -m allocator.metrics.dashboards` writes it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
SELECTED: Final = 'job=~"$job", instance=~"$instance", pool=~"$pool", device=~"$device"'
"""What the variables at the top choose."""
SCHEMA: Final = 38
"""The version of Grafana 10.0; newer ones bring it up to date when they read it."""
_SELECTION: Final = re.compile(r"\{s\b")
WIDTH: Final = 24
"""Columns of Grafana's grid."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Query:
    """One expression.  `{s}` in it, or `{s, reuse="..."}`, stands for the selection.

    unit: a unit of its own, on a second axis to the right.  limit: a dashed line that is not stacked on the others.
    """

    expr: str
    legend: str
    unit: str = ""
    limit: bool = False
    color: str = ""
    instant: bool = False
    heatmap: bool = False

    @property
    def text(self) -> str:
        """The expression with the selection in it."""
        return _SELECTION.sub("{" + SELECTED, self.expr)


@dataclass(frozen=True)
class Panel:
    """One panel.  steps: (from this value on, colour), after green, which is from the least value on."""

    title: str
    description: str
    kind: str
    queries: tuple[Query, ...]
    unit: str = "short"
    width: int = 12
    height: int = 8
    stacked: bool = False
    steps: tuple[tuple[float, str], ...] = ()
    most: float | None = None
    least: float | None = 0


@dataclass(frozen=True)
class Row:
    """A heading and its panels.  repeat: the variable for each of whose values it is shown once."""

    title: str
    panels: tuple[Panel, ...]
    repeat: str = ""
    collapsed: bool = False


@dataclass
class _Place:
    """Where the next panel goes."""

    y: int = 0
    number: int = 0
    taken: list[Json] = field(default_factory=list)

    def next_id(self) -> int:
        """Ids are counted through the whole dashboard."""
        self.number += 1
        return self.number


def _variable(name: str, label: str, source: str) -> Json:
    query = f"label_values({source}, {name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
        "options": [],
        "regex": "",
        "skipUrlSync": False,
    }


def variables() -> list[Json]:
    """Data source, job, instance, pool, device: each offers what the ones before it leave."""
    build = "weir_build_info"
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "current": {},
            "hide": 0,
            "includeAll": False,
            "multi": False,
            "options": [],
            "refresh": 1,
            "regex": "",
            "skipUrlSync": False,
        },
        _variable("job", "Job", build),
        _variable("instance", "Instance", build + '{job=~"$job"}'),
        _variable("pool", "Pool", build + '{job=~"$job", instance=~"$instance"}'),
        _variable("device", "Device", build + '{job=~"$job", instance=~"$instance", pool=~"$pool"}'),
    ]


def _targets(panel: Panel) -> list[Json]:
    targets = []
    for at, query in enumerate(panel.queries):
        target: Json = {
            "refId": chr(ord("A") + at),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": query.text,
            "legendFormat": query.legend or "__auto",
            "instant": query.instant,
            "range": not query.instant,
        }
        if query.heatmap:
            target["format"] = "heatmap"
        elif panel.kind == "table":
            target["format"] = "table"
        targets.append(target)
    return targets


def _override(ref: str, properties: dict[str, Any]) -> Json:
    return {
        "matcher": {"id": "byFrameRefID", "options": ref},
        "properties": [{"id": name, "value": value} for name, value in properties.items()],
    }


def _overrides(panel: Panel) -> list[Json]:
    found = []
    for at, query in enumerate(panel.queries):
        properties: dict[str, Any] = {}
        if query.color:
            properties["color"] = {"mode": "fixed", "fixedColor": query.color}
        if query.limit:
            properties["custom.lineStyle"] = {"fill": "dash", "dash": [10, 10]}
            properties["custom.stacking"] = {"mode": "none", "group": "limit"}
            properties["custom.fillOpacity"] = 0
        if query.unit:
            properties["unit"] = query.unit
            if panel.kind == "timeseries":
                properties["custom.axisPlacement"] = "right"
                properties["custom.stacking"] = {"mode": "none", "group": "right"}
                properties["custom.fillOpacity"] = 0
        if properties:
            found.append(_override(chr(ord("A") + at), properties))
    return found


def _thresholds(panel: Panel) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    steps += [{"color": color, "value": value} for value, color in panel.steps]
    return {"mode": "absolute", "steps": steps}


def _defaults(panel: Panel) -> Json:
    defaults: Json = {"unit": panel.unit, "thresholds": _thresholds(panel), "mappings": []}
    if panel.kind in ("timeseries", "stat", "table"):
        defaults["color"] = {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"}
    if panel.least is not None:
        defaults["min"] = panel.least
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 40 if panel.stacked else 5,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if panel.steps else "off"},
        }
    elif panel.kind == "table":
        defaults["custom"] = {"align": "auto", "cellOptions": {"type": "auto"}, "filterable": True}
    return defaults


_OPTIONS: Final[dict[str, Json]] = {
    "timeseries": {
        "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    },
    "table": {"showHeader": True, "cellHeight": "sm", "footer": {"show": False, "reducer": ["sum"], "fields": ""}},
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "reverse": False, "fill": "dark-orange"},
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"show": True, "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": "bytes"},
    },
}


def _panel(panel: Panel, place: _Place, x: int) -> Json:
    built: Json = {
        "id": place.next_id(),
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": place.y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        "options": _OPTIONS[panel.kind],
        "targets": _targets(panel),
    }
    if panel.kind == "table":
        # One row a stream: the queries' values become columns beside the labels, which are named as people say them.
        names = {f"Value #{chr(ord('A') + at)}": query.legend for at, query in enumerate(panel.queries)}
        built["transformations"] = [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": names}},
            {"id": "sortBy", "options": {"sort": [{"field": panel.queries[0].legend, "desc": True}]}},
        ]
    return built


def _laid_out(row: Row, place: _Place) -> list[Json]:
    """The row and its panels, left to right, the next line beginning where the width is used up."""
    heading: Json = {
        "id": place.next_id(),
        "type": "row",
        "title": row.title,
        "collapsed": row.collapsed,
        "gridPos": {"x": 0, "y": place.y, "w": WIDTH, "h": 1},
        "panels": [],
    }
    if row.repeat:
        heading["repeat"] = row.repeat
        heading["repeatDirection"] = "h"
    place.y += 1
    built, x, height = [], 0, 0
    for panel in row.panels:
        if x + panel.width > WIDTH:
            place.y += height
            x = height = 0
        built.append(_panel(panel, place, x))
        x += panel.width
        height = max(height, panel.height)
    place.y += height
    if row.collapsed:
        heading["panels"] = built
        return [heading]
    return [heading, *built]


def dashboard(rows: tuple[Row, ...]) -> Json:
    """The whole dashboard as Grafana's JSON model."""
    place = _Place()
    return {
        "id": None,
        "uid": "weir-gpu-memory",
        "title": "Weir: GPU memory",
        "description": "What a pool holds, why, and what reuse across streams saves. Names: docs/concepts.md of Weir.",
        "tags": ["weir", "gpu", "memory"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timepicker": {},
        "timezone": "",
        "weekStart": "",
        "fiscalYearStartMonth": 0,
        "liveNow": False,
        "links": [],
        "annotations": {"list": []},
        "templating": {"list": variables()},
        "panels": [panel for row in rows for panel in _laid_out(row, place)],
    }


def text(rows: tuple[Row, ...]) -> str:
    """The dashboard as it is kept in the file."""
    return json.dumps(dashboard(rows), indent=2, ensure_ascii=False) + "\n"

"""The Grafana dashboard: what Grafana needs of the JSON, and what people need of the panels.

That the expressions give right answers is tested against a live server in tests/prometheus.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from allocator.cli import main
from allocator.metrics import grafana_dashboard, prometheus_rules
from allocator.metrics.catalogue import ALL, BUILD_INFO, Spec
from allocator.metrics.dashboards import GRAFANA_FILE, grafana
from allocator.metrics.dashboards.panels import ROWS
from tests.unit.metrics.test_rules import exported, names_in

DASHBOARD: dict[str, Any] = json.loads(grafana_dashboard())
VARIABLES = ("datasource", "job", "instance", "pool", "device")
UNITS = {"bytes", "percentunit", "ops", "s", "short", "Bps"}
"""Of Grafana's own list."""


def panels(*, rows: bool = False) -> Iterator[dict[str, Any]]:
    """Every panel, those in collapsed rows among them; the rows themselves on request."""
    for panel in DASHBOARD["panels"]:
        if panel["type"] != "row" or rows:
            yield panel
        yield from panel.get("panels", [])


def targets() -> Iterator[tuple[str, dict[str, Any]]]:
    """(panel's title, target) of every query."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target


def resolved(expression: str) -> str:
    """The expression as Grafana sends it, with everything selected."""
    for name in VARIABLES[1:]:
        expression = expression.replace(f"${name}", ".+")
    return expression.replace("$__rate_interval", "1m").replace("$__range", "30m")


TITLES = [panel["title"] for panel in panels()]
EXPRESSIONS = [pytest.param(target["expr"], id=f"{title} {target['refId']}") for title, target in targets()]


def test_the_file_is_what_the_list_of_panels_says() -> None:
    """After a change of panels.py or grafana.py: python -m allocator.metrics.dashboards"""
    assert grafana_dashboard() == grafana.text(ROWS)


def test_the_module_writes_the_file(tmp_path: Path) -> None:
    package = Path(grafana.__file__).parent
    copy = tmp_path / "__main__.py"
    copy.write_text((package / "__main__.py").read_text())
    done = subprocess.run([sys.executable, str(copy)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / GRAFANA_FILE).read_text() == grafana_dashboard()


# -- what Grafana needs -----------------------------------------------------------------------------


def test_the_model_is_one_that_grafana_10_imports() -> None:
    assert DASHBOARD["id"] is None
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", DASHBOARD["uid"])
    assert 36 <= DASHBOARD["schemaVersion"] <= 38  # 38 is Grafana 10.0's; an older Grafana refuses a newer one
    assert set(DASHBOARD["time"]) == {"from", "to"}
    assert DASHBOARD["editable"] is True
    assert "__inputs" not in DASHBOARD  # so a provisioned file works as it is
    assert not set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {
        *VARIABLES,
        "__rate_interval",
        "__range",
        "__all",
    }


def test_ids_are_unique() -> None:
    ids = [panel["id"] for panel in panels(rows=True)]
    assert len(ids) == len(set(ids))
    assert all(isinstance(number, int) and number > 0 for number in ids)


def test_panels_lie_on_the_grid_and_do_not_overlap() -> None:
    places = []
    for panel in panels(rows=True):
        place = panel["gridPos"]
        assert set(place) == {"x", "y", "w", "h"}
        assert all(isinstance(number, int) for number in place.values())
        assert place["x"] >= 0 <= place["y"]
        assert place["w"] > 0 < place["h"]
        assert place["x"] + place["w"] <= 24
        places.append((panel["title"], place))
    for (one, a), (other, b) in combinations(places, 2):
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart_x or apart_y, (one, other)


def test_panels_follow_their_row_and_only_a_collapsed_row_holds_its_own() -> None:
    last = -1
    for panel in DASHBOARD["panels"]:
        assert panel["gridPos"]["y"] >= last
        last = panel["gridPos"]["y"]
        if panel["type"] == "row":
            assert bool(panel["panels"]) == panel["collapsed"]
            assert panel["gridPos"]["x"] == 0 and panel["gridPos"]["w"] == 24 and panel["gridPos"]["h"] == 1
    assert DASHBOARD["panels"][0]["type"] == "row"


@pytest.mark.parametrize("panel", list(panels()), ids=lambda panel: str(panel["title"]))
def test_a_panel_is_complete(panel: dict[str, Any]) -> None:
    assert panel["type"] in ("timeseries", "stat", "table", "heatmap")  # all of them built into Grafana
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert steps[0]["value"] is None
    assert [step["value"] for step in steps[1:]] == sorted(step["value"] for step in steps[1:])
    assert panel["options"]
    refs = [target["refId"] for target in panel["targets"]]
    assert refs and len(refs) == len(set(refs))
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        assert target["expr"]
        assert target["legendFormat"]
        assert target["instant"] != target["range"]
    for override in panel["fieldConfig"]["overrides"]:
        assert override["matcher"]["id"] == "byFrameRefID"
        assert override["matcher"]["options"] in refs
        assert override["properties"]


def test_a_heatmap_is_asked_for_as_one() -> None:
    (panel,) = (panel for panel in panels() if panel["type"] == "heatmap")
    assert [target["format"] for target in panel["targets"]] == ["heatmap"]
    assert panel["options"]["calculate"] is False
    assert panel["options"]["yAxis"]["unit"] == "bytes"


def test_a_table_has_a_row_a_stream_and_a_named_column_a_figure() -> None:
    (panel,) = (panel for panel in panels() if panel["type"] == "table")
    assert {target["format"] for target in panel["targets"]} == {"table"}
    assert all(target["instant"] for target in panel["targets"])
    merge, organize, sort = panel["transformations"]
    assert merge["id"] == "merge"
    names = organize["options"]["renameByName"]
    assert names == {f"Value #{t['refId']}": t["legendFormat"] for t in panel["targets"]}
    assert sort["options"]["sort"] == [{"field": "In flight", "desc": True}]


def test_the_variables_narrow_each_other_down() -> None:
    listed = DASHBOARD["templating"]["list"]
    assert tuple(variable["name"] for variable in listed) == VARIABLES
    assert listed[0]["type"] == "datasource" and listed[0]["query"] == "prometheus"
    for at, variable in enumerate(listed[1:], 1):
        assert variable["type"] == "query"
        assert variable["multi"] and variable["includeAll"] and variable["allValue"] == ".+"
        assert variable["refresh"] == 2  # pools come and go while somebody watches
        query = variable["query"]["query"]
        selector = re.fullmatch(rf"label_values\((.+), {variable['name']}\)", query)
        assert selector is not None
        promql_parser.parse(resolved(selector[1]))
        assert re.findall(r"\$(\w+)", query) == list(VARIABLES[1:at])


# -- what people need -------------------------------------------------------------------------------


def test_titles_are_unique_and_say_what_is_shown() -> None:
    assert len(TITLES) == len(set(TITLES))
    assert all(title[0].isupper() for title in TITLES)


@pytest.mark.parametrize("panel", list(panels()), ids=lambda panel: str(panel["title"]))
def test_a_description_says_what_to_make_of_it(panel: dict[str, Any]) -> None:
    text = panel["description"]
    assert len(text.split()) >= 10
    assert text.endswith((".", "?"))


@pytest.mark.parametrize(
    ("title", "wanted"),
    [
        ("Reserved memory, by what it is", "allocated_bytes in_flight_bytes idle_bytes limit_bytes device_size_bytes"),
        ("Asked for, and allocated", "requested_bytes allocated_bytes"),
        ("Fragmentation", "external_fragmentation_ratio internal_fragmentation_ratio"),
        ("Free memory", "largest_free_block_bytes idle_bytes"),
        ("Allocations a second, by what made their memory safe", "allocations_total"),
        ("Waits, queries and records a second", "stream_waits_total event_queries_total"),
        ("Time in flight", "in_flight_seconds_bucket"),
        ("Growth and release", "growth_bytes_total release_bytes_total"),
        ("Out-of-memory retries, by the step that helped", "out_of_memory_retries_total"),
        ("Streams that hold most memory", "stream_in_flight_bytes stream_allocated_bytes stream_idle_bytes"),
        ("Sizes asked for", "request_size_bytes_bucket"),
    ],
)
def test_the_panels_that_a_user_expects_are_there(title: str, wanted: str) -> None:
    (panel,) = (panel for panel in panels() if panel["title"] == title)
    used = set().union(*(names_in(resolved(target["expr"])) for target in panel["targets"]))
    assert {f"weir_{name}" for name in wanted.split()} <= used


def test_allocated_in_flight_idle_and_private_are_stacked_and_the_limit_is_not() -> None:
    (panel,) = (panel for panel in panels() if panel["title"] == "Reserved memory, by what it is")
    assert panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    apart = {
        override["matcher"]["options"]
        for override in panel["fieldConfig"]["overrides"]
        for entry in override["properties"]
        if entry["id"] == "custom.stacking" and entry["value"]["mode"] == "none"
    }
    stacked = {t["expr"].split("(")[2].split("{")[0] for t in panel["targets"] if t["refId"] not in apart}
    assert stacked == {f"weir_{kind}_bytes" for kind in ("allocated", "in_flight", "idle", "private")}
    assert len(apart) == 3


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_is_parsed_and_reads_only_what_there_is(expression: str) -> None:
    used = names_in(resolved(expression))
    assert used
    assert used <= exported()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_selector_follows_all_the_variables(expression: str) -> None:
    selectors = re.findall(r"weir_\w+(\{[^}]*\})?", expression)
    assert selectors
    for selector in selectors:
        for name in VARIABLES[1:]:
            assert f'{name}=~"${name}"' in selector, selector


@pytest.mark.parametrize("spec", [spec for spec in ALL if spec is not BUILD_INFO], ids=lambda spec: spec.name)
def test_every_metric_is_on_a_panel(spec: Spec) -> None:
    shown = set().union(*(names_in(resolved(target["expr"])) for _, target in targets()))
    assert f"weir_{spec.name}" in shown or f"weir_{spec.name}_bucket" in shown


# -- weir dashboard ---------------------------------------------------------------------------------


def test_weir_dashboard_prints_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "grafana"]) == 0
    assert capsys.readouterr() == (grafana_dashboard(), "")
    assert main(["dashboard", "alerts"]) == 0
    assert capsys.readouterr() == (prometheus_rules(), "")


def test_weir_dashboard_writes_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "weir.json"
    assert main(["dashboard", "grafana", "--output", str(target)]) == 0
    assert target.read_text() == grafana_dashboard()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert str(target) in shown.err


def test_weir_dashboard_says_in_one_line_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "alerts", "--output", str(tmp_path / "none" / "rules.yml")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "cannot write" in said and "No such file" in said
    assert main(["dashboard", "bananas"]) == 2
    assert "grafana" in capsys.readouterr().err

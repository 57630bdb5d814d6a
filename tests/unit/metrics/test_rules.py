"""The alerts fire when they should and are quiet when they should be, as Prometheus's own rule tester sees it.

Each case is one history of a few series, a value a minute.  What an alert says is compared whole, so that a template
that does not work is noticed.  Against a live server: tests/prometheus.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from allocator.metrics import prometheus_rules
from allocator.metrics.catalogue import ALL, Type

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing (Debian: package prometheus)"
)

RULES: dict[str, Any] = yaml.safe_load(prometheus_rules())
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule
}
RECORDED: dict[str, str] = {
    rule["record"]: rule["expr"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule
}
TARGET = {"job": "train", "instance": "host:9478"}
POOL = {**TARGET, "pool": "main", "device": "0"}


@dataclass(frozen=True)
class Case:
    """A history.  series: metric, or metric{label="value"} -> values in promtool's notation, one a minute.

    at: the minute at which to look.  said: how the alert's value reads in its text, for those that fire.
    """

    name: str
    series: dict[str, str]
    at: int
    said: str = ""
    labels: tuple[str, ...] = tuple(POOL)


FIRING: dict[str, list[Case]] = {
    "WeirInFlightNotDraining": [
        Case("stuck", {"weir_oldest_in_flight_seconds": "0+60x30", "weir_in_flight_bytes": "512x30"}, 12, "12m 0s"),
    ],
    "WeirFragmentationGrowing": [
        Case(
            "pieces become more",
            {
                "weir_idle_bytes": "1000+100x200",
                "weir_largest_free_block_bytes": "500x200",
                "weir_reserved_bytes": "20000x200",
            },
            120,
            "11.47ki",
        ),
    ],
    "WeirOutOfMemory": [
        Case("one error", {"weir_out_of_memory_total": "0x20 1x5"}, 22, "1"),
        Case("the first that is seen is not 0", {"weir_out_of_memory_total": "_x20 3x5"}, 22, "3"),
    ],
    "WeirOutOfMemoryRetries": [
        Case(
            "of two steps together",
            {
                'weir_out_of_memory_retries_total{step="release"}': "0+6x30",
                'weir_out_of_memory_retries_total{step="host_wait"}': "0+6x30",
            },
            25,
            "0.20",
        ),
    ],
    "WeirLimitNearlyReached": [
        Case(
            "of the limit",
            {
                "weir_allocated_bytes": "850x20",
                "weir_in_flight_bytes": "60x20",
                "weir_limit_bytes": "1000x20",
                "weir_device_size_bytes": "9000x20",
            },
            7,
            "91%",
        ),
        Case(
            "of the device, without a limit",
            {
                "weir_allocated_bytes": "8000x20",
                "weir_in_flight_bytes": "640x20",
                "weir_limit_bytes": "0x20",
                "weir_device_size_bytes": "9000x20",
            },
            7,
            "96%",
        ),
    ],
    "WeirTimelinePoisoned": [Case("for minutes", {"weir_poisoned_streams": "0 2x10"}, 4, "2")],
    "WeirFreesNotDrained": [Case("never fewer", {"weir_pending_frees": "5000x20"}, 8, "5k")],
    "WeirDeviceLost": [Case("at once", {"weir_device_lost": "0x5 1x5"}, 6)],
    "WeirPoolUnreadable": [Case("again and again", {"weir_scrape_failures_total": "0+1x30"}, 25)],
    "WeirTargetDown": [
        Case(
            "had a pool an hour ago",
            {"up": "1x20 0x90", 'weir_build_info{pool="main", device="0"}': "1x20 stale"},
            90,
            labels=tuple(TARGET),
        ),
    ],
}

QUIET: dict[str, list[Case]] = {
    "WeirInFlightNotDraining": [
        Case("long kernels that end", {"weir_oldest_in_flight_seconds": "120x30", "weir_in_flight_bytes": "9x30"}, 20),
        Case(
            "it drained before five minutes were over",
            {"weir_oldest_in_flight_seconds": "0+60x10 0x20", "weir_in_flight_bytes": "512x10 0x20"},
            12,
        ),
        Case("not yet", {"weir_oldest_in_flight_seconds": "0+60x30", "weir_in_flight_bytes": "512x30"}, 10),
        Case("nothing in flight", {"weir_oldest_in_flight_seconds": "900x30", "weir_in_flight_bytes": "0x30"}, 20),
    ],
    "WeirFragmentationGrowing": [
        Case(
            name,
            {"weir_idle_bytes": idle, "weir_largest_free_block_bytes": "500x200", "weir_reserved_bytes": reserved},
            at,
        )
        for name, idle, reserved, at in (
            ("cut up, but stable", "15000x200", "20000x200", 180),
            ("getting better", "19000-50x200", "20000x200", 180),
            ("growing, a small part of all", "1000+100x200", "1000000x200", 180),
            ("not for long enough", "1000+100x200", "20000x200", 80),
            ("idle in one piece", "500x200", "1000x200", 180),
        )
    ],
    "WeirOutOfMemory": [
        Case("none", {"weir_out_of_memory_total": "0x30"}, 25),
        Case("long ago", {"weir_out_of_memory_total": "0x5 4x40"}, 40),
        Case("a new process starts at 0", {"weir_out_of_memory_total": "4x20 0x20"}, 30),
    ],
    "WeirOutOfMemoryRetries": [
        Case("a few", {'weir_out_of_memory_retries_total{step="release"}': "0+3x30"}, 25),
        Case("a burst", {'weir_out_of_memory_retries_total{step="release"}': "0x5 600x30"}, 16),
    ],
    "WeirLimitNearlyReached": [
        Case(
            name,
            {
                "weir_allocated_bytes": allocated,
                "weir_in_flight_bytes": "50x20",
                "weir_limit_bytes": limit,
                "weir_device_size_bytes": "9000x20",
            },
            at,
        )
        for name, allocated, limit, at in (
            ("the rest is idle", "500x20", "1000x20", 15),
            ("no limit, a large device", "1000x20", "0x20", 15),
            ("a peak of four minutes", "500x5 990x4 500x10", "1000x20", 10),
            ("not yet", "990x20", "1000x20", 4),
        )
    ],
    "WeirTimelinePoisoned": [
        Case("none", {"weir_poisoned_streams": "0x10"}, 8),
        Case("it answered again", {"weir_poisoned_streams": "0 1 0x10"}, 4),
    ],
    "WeirFreesNotDrained": [
        Case("bursts that are seen to", {"weir_pending_frees": "5000 0 5000 0 5000 0 5000 0 5000 0 5000 0 5000"}, 12),
        Case("a few at all times", {"weir_pending_frees": "900x20"}, 15),
    ],
    "WeirDeviceLost": [Case("it is there", {"weir_device_lost": "0x10"}, 8)],
    "WeirPoolUnreadable": [
        Case("once", {"weir_scrape_failures_total": "0x5 1x30"}, 16),
        Case("never", {"weir_scrape_failures_total": "0x30"}, 25),
    ],
    "WeirTargetDown": [
        Case("it answers", {"up": "1x20", 'weir_build_info{pool="main", device="0"}': "1x20"}, 15),
        Case("somebody else's", {"up": "0x20"}, 15),
        Case("not yet", {"up": "1x5 0x9", 'weir_build_info{pool="main", device="0"}': "1x5 stale"}, 9),
    ],
}


def _series(name: str, labels: dict[str, str]) -> str:
    metric, _, more = name.partition("{")
    listed = ", ".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{metric}{{{listed}{', ' + more if more else '}'}"


def _annotations(alert: str, said: str, labels: dict[str, str]) -> dict[str, str]:
    """What the alert's text must be, once its templates are filled in."""
    texts = {}
    for name, text in ALERTS[alert]["annotations"].items():
        for label, value in labels.items():
            text = text.replace(f"{{{{ $labels.{label} }}}}", value)
        texts[name] = re.sub(r"\{\{ \$value[^}]*\}\}", said, text)
        assert "{{" not in texts[name], texts[name]
    return texts


def _check(folder: Path, alert: str, case: Case, *, fires: bool) -> None:
    labels = {name: value for name, value in POOL.items() if name in case.labels}
    expected = []
    if fires:
        expected = [
            {
                "exp_labels": {**labels, **ALERTS[alert]["labels"]},
                "exp_annotations": _annotations(alert, case.said, labels),
            }
        ]
    of_series = TARGET if alert == "WeirTargetDown" else POOL
    test = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "group_eval_order": [group["name"] for group in RULES["groups"]],
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": _series(name, of_series), "values": values} for name, values in case.series.items()
                ],
                "alert_rule_test": [{"eval_time": f"{case.at}m", "alertname": alert, "exp_alerts": expected}],
            }
        ],
    }
    (folder / "rules.yml").write_text(prometheus_rules())
    (folder / "test.yml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _cases(of: dict[str, list[Case]]) -> list[Any]:
    return [pytest.param(alert, case, id=f"{alert}: {case.name}") for alert, cases in of.items() for case in cases]


@needs_promtool
@pytest.mark.parametrize(("alert", "case"), _cases(FIRING))
def test_an_alert_fires(tmp_path: Path, alert: str, case: Case) -> None:
    _check(tmp_path, alert, case, fires=True)


@needs_promtool
@pytest.mark.parametrize(("alert", "case"), _cases(QUIET))
def test_an_alert_stays_quiet(tmp_path: Path, alert: str, case: Case) -> None:
    _check(tmp_path, alert, case, fires=False)


@needs_promtool
@pytest.mark.parametrize("alert", ALERTS)
def test_a_case_that_expects_the_opposite_fails(tmp_path: Path, alert: str) -> None:
    """So a mistake in how the cases are played would be noticed."""
    with pytest.raises(AssertionError, match="FAILED"):
        _check(tmp_path, alert, FIRING[alert][0], fires=False)
    with pytest.raises(AssertionError, match="FAILED"):
        _check(tmp_path, alert, QUIET[alert][0], fires=True)


def test_every_alert_has_both_kinds_of_cases() -> None:
    assert set(FIRING) == set(QUIET) == set(ALERTS)


@needs_promtool
def test_promtool_accepts_the_file(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(prometheus_rules())
    done = subprocess.run(
        ["promtool", "check", "rules", "--lint=all", "--lint-fatal", "rules.yml"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS) + len(RECORDED)} rules found" in done.stdout


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_says_how_bad_it_is_what_is_wrong_and_what_to_do(alert: str) -> None:
    rule = ALERTS[alert]
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    assert len(rule["annotations"]["summary"]) <= 130
    assert len(rule["annotations"]["description"].split()) >= 20
    assert "$labels." in rule["annotations"]["summary"]


def names_in(expression: str) -> set[str]:
    """The metrics that an expression reads."""
    tree = promql_parser.parse(expression)
    assert tree is not None
    return set(re.findall(r"\b(?:pool:)?weir_[a-z0-9_]+(?::\w+)?", expression))


def exported() -> set[str]:
    """Every series name of a scrape."""
    found: set[str] = set()
    for spec in ALL:
        name = f"weir_{spec.name}"
        found |= {f"{name}_{end}" for end in ("bucket", "sum", "count")} if spec.type is Type.HISTOGRAM else {name}
    return found


@pytest.mark.parametrize("name", [*ALERTS, *RECORDED])
def test_an_expression_is_parsed_and_reads_only_what_there_is(name: str) -> None:
    expression = ALERTS[name]["expr"] if name in ALERTS else RECORDED[name]
    used = names_in(expression)
    assert used
    assert used <= exported() | set(RECORDED)


def test_every_recorded_series_is_named_by_its_level_and_operation() -> None:
    for name in RECORDED:
        assert re.fullmatch(r"pool:weir_[a-z0-9_]+:[a-z0-9_]+", name), name

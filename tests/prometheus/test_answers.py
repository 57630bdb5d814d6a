"""Every expression of the dashboard and of the rules, asked of a real Prometheus that has watched live pools.

Each must have an answer, and the right one: equal to `pool.stats()` for gauges, and for rates over the whole time
within what Prometheus adds by extrapolating beyond the last scrape.  An expression that no check here understands
fails, so a new panel needs a right answer too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import yaml

from allocator import Stats
from allocator.metrics import grafana_dashboard, prometheus_rules
from allocator.stats import Histogram
from tests.prometheus.conftest import Watched
from tests.prometheus.scene import EXPECTED
from tests.prometheus.server import Vector

WINDOW_S = 600
"""Longer than everything here: rates are taken over the whole load."""

CROSS = ("event_dependency", "opportunistic", "internal_dependency")
POOL = {"pool": "live", "device": "sim:0"}
RULES = [rule for group in yaml.safe_load(prometheus_rules())["groups"] for rule in group["rules"]]
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
ALERTS = {rule["alert"]: rule["expr"] for rule in RULES if "alert" in rule}
LOOKS_FAR_BACK = {"WeirFragmentationGrowing", "WeirFreesNotDrained"}
"""They look back to before the trouble began, an hour and five minutes: those are seen in the scaled rules only."""

pytestmark = pytest.mark.slow


def targets() -> list[Any]:
    """(id, expression) of every query of the dashboard."""
    found = []
    for panel in json.loads(grafana_dashboard())["panels"]:
        for one in (panel, *panel.get("panels", ())):
            found += [
                pytest.param(target["expr"], id=f"{one['title']} {target['refId']}")
                for target in one.get("targets", ())
            ]
    return found


def selected(expression: str) -> str:
    """As Grafana sends it with the live pool chosen, and everything else left at All."""
    for name, value in {"job": ".+", "instance": ".+", "pool": "live", "device": ".+"}.items():
        expression = expression.replace(f"${name}", value)
    return expression.replace("$__rate_interval", "10m").replace("$__range", "10m")


def key(**labels: str) -> frozenset[tuple[str, str]]:
    """An answer's labels."""
    return frozenset({**POOL, **labels}.items())


class Answers:
    """What the answers have to be.  Counters: between the readings before and after, times the extrapolation."""

    def __init__(self, watched: Watched) -> None:
        self.before = watched.before
        self.after = watched.scene.pools["live"].stats(per_stream=True)
        (scrapes,) = watched.prometheus.ask(
            'count_over_time(weir_reserved_bytes{pool="live"}[10m])', watched.now
        ).values()
        assert scrapes > 20
        self.factor = 1 + 1.2 / (scrapes - 1)

    def figure(self, name: str) -> tuple[Any, Any]:
        """Of `Stats`, before and after."""
        field = name.removeprefix("weir_").removesuffix("_total")
        if field == "scrape_failures":
            return 0, 0
        return getattr(self.before, field), getattr(self.after, field)

    def gauge(self, answer: Vector, name: str, label: str | None) -> None:
        low, high = self.figure(name)
        assert low == high, name
        if isinstance(low, Mapping):
            assert label is not None
            assert answer == {key(**{label: text}): value for text, value in low.items()}
        else:
            assert answer == {key(): pytest.approx(low, rel=1e-12)}

    def within(self, value: float, low: float, high: float) -> None:
        assert low * (1 - 1e-9) <= value <= high * self.factor + 1e-9, (low, value, high * self.factor)

    def counter(self, answer: Vector, name: str, label: str | None, scale: float, only: tuple[str, ...] = ()) -> None:
        low, high = self.figure(name)
        if label is None:
            assert set(answer) == {key()}
            if isinstance(low, Mapping):
                chosen = only or tuple(low)
                low, high = (sum(figure[text] for text in chosen) for figure in (low, high))
            self.within(answer[key()] * scale, low, high)
        else:
            assert set(answer) == {key(**{label: text}) for text in low}
            for text in low:
                self.within(answer[key(**{label: text})] * scale, low[text], high[text])

    def quantile(self, answer: Vector, q: float, name: str) -> None:
        low, high = self.figure(name)
        assert dict(low) == dict(high)
        assert answer == {key(): pytest.approx(quantile(q, low), rel=1e-6)}

    def special(self, answer: Vector, expression: str) -> bool:
        """Those that are no plain reading of one metric."""
        stats = self.after
        if expression.startswith("max by (pool, device) ((weir_allocated_bytes"):
            used = stats.allocated_bytes + stats.in_flight_bytes
            assert answer == {key(): pytest.approx(used / stats.device_size_bytes)}
        elif expression.startswith("1 - sum by (pool, device) (rate("):
            share = 1 - stats.allocations["new_memory"] / sum(stats.allocations.values())
            assert answer == {key(): pytest.approx(share, abs=1e-6)}
        elif expression.startswith("topk(10, "):
            streams = sorted(stats.stream_in_flight_bytes.items(), key=lambda item: item[1], reverse=True)[:10]
            assert sorted(answer.values(), reverse=True) == [nbytes for _, nbytes in streams]
            assert answer[key(stream="beta")] == 3 << 20
        elif expression.startswith("sum by (le) (increase(weir_request_size_bytes_bucket"):
            running = 0
            for bound, count in stats.request_size_bytes.items():
                running += count
                le = "+Inf" if bound == math.inf else repr(float(bound))
                self.within(answer[frozenset({("le", le)})], running, running)
            assert len(answer) == len(stats.request_size_bytes)
        else:
            return False
        return True


def quantile(q: float, histogram: Histogram) -> float:
    """As Prometheus has it: linear between the bounds of the bucket that the rank falls into."""
    total = sum(histogram.values())
    assert total, "nothing was observed"
    rank, below, start = q * total, 0.0, 0.0
    for bound, count in histogram.items():
        if below + count >= rank:
            return start if bound == math.inf else start + (bound - start) * (rank - below) / count
        below += count
        start = bound
    raise AssertionError("no bucket holds the rank")


@pytest.fixture(scope="module")
def answers(watched: Watched) -> Answers:
    return Answers(watched)


@pytest.mark.parametrize("expression", targets())
def test_a_panel_shows_what_is_so(watched: Watched, answers: Answers, expression: str) -> None:
    expression = selected(expression)
    if (
        expression
        == 'sum by (pool, device) (weir_limit_bytes{job=~".+", instance=~".+", pool=~"live", device=~".+"} > 0)'
    ):
        # The live pool has no limit, and no line is drawn: another one has.
        assert watched.prometheus.ask(expression, watched.now) == {}
        tight = watched.prometheus.ask(expression.replace("live", "tight"), watched.now)
        assert list(tight.values()) == [64 << 20]
        return
    answer = watched.prometheus.ask(expression, watched.now)
    assert answer
    assert all(math.isfinite(value) for value in answer.values())
    if answers.special(answer, expression):
        return
    by = re.match(r"(?:sum|max) by \(pool, device(?:, (\w+))?\) \(", expression)
    label = by[1] if by else None
    if gauge := re.fullmatch(r"(?:sum|max) by \([^)]*\) \((weir_\w+)\{[^}]*\}\)", expression):
        answers.gauge(answer, gauge[1], label)
    elif over := re.fullmatch(r"sum by \([^)]*\) \((rate|increase)\((weir_\w+)\{([^}]*)\}\[10m\]\)\)", expression):
        only = CROSS if "event_dependency|" in over[3] else ()
        answers.counter(answer, over[2], label, WINDOW_S if over[1] == "rate" else 1, only)
    elif over := re.fullmatch(
        r"histogram_quantile\(([\d.]+), sum by \([^)]*\) \(rate\((weir_\w+)_bucket\{[^}]*\}\[10m\]\)\)\)", expression
    ):
        answers.quantile(answer, float(over[1]), over[2])
    else:
        pytest.fail(f"no check understands {expression}")


def test_what_was_watched_had_something_to_show(answers: Answers) -> None:
    """Zeros that equal zeros would prove little."""
    stats = answers.after
    assert min(stats.allocated_bytes, stats.in_flight_bytes, stats.idle_bytes, stats.releasable_bytes) > 0
    assert min(stats.allocations[kind] for kind in ("same_stream", "new_memory", "opportunistic")) > 0
    assert min(stats.event_records, stats.event_queries, stats.block_splits, stats.growths) > 0
    assert min(stats.frees.values()) > 0
    assert stats.releases["trim"] > 0
    assert {"alpha", "beta"} <= set(stats.stream_idle_bytes) | set(stats.stream_allocated_bytes)


@pytest.mark.parametrize("name", ["job", "instance", "pool", "device"])
def test_a_variable_offers_what_there_is(watched: Watched, name: str) -> None:
    for variable in json.loads(grafana_dashboard())["templating"]["list"][1:]:
        if variable["name"] == name:
            source = re.fullmatch(rf"label_values\((.+), {name}\)", variable["query"]["query"])
            assert source is not None
            selector = source[1]
            for other in ("job", "instance", "pool"):
                selector = selector.replace(f"${other}", ".+")
            found = watched.prometheus.get(f"label/{name}/values", **{"match[]": selector})
            expected = {
                "job": {"main", "gone"},
                "instance": set(watched.scene.targets.values()),
                "pool": set(watched.scene.pools),
                "device": {"sim:0"},
            }
            assert set(found) == expected[name]


# -- rules ------------------------------------------------------------------------------------------


def _used(stats: Stats) -> float:
    return (stats.allocated_bytes + stats.in_flight_bytes) / (stats.limit_bytes or stats.device_size_bytes)


def _reused(stats: Stats) -> float:
    return 1 - stats.allocations["new_memory"] / sum(stats.allocations.values())


EXACT: dict[str, Callable[[Stats], float]] = {
    "pool:weir_used_bytes:ratio": _used,
    "pool:weir_fragmented_bytes:sum": lambda stats: stats.idle_bytes - stats.largest_free_block_bytes,
    "pool:weir_reused_allocations:ratio_rate5m": _reused,
    "pool:weir_in_flight_seconds:p99_rate5m": lambda stats: quantile(0.99, stats.in_flight_seconds),
}
RATES: dict[str, Callable[[Stats], float]] = {
    "pool:weir_allocations:rate5m": lambda stats: sum(stats.allocations.values()),
    "pool:weir_cross_stream_allocations:rate5m": lambda stats: sum(stats.allocations[kind] for kind in CROSS),
    "pool:weir_out_of_memory_retries:rate5m": lambda stats: sum(stats.out_of_memory_retries.values()),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_rule_says_what_is_so(watched: Watched, answers: Answers, name: str) -> None:
    """Its expression, over the whole load."""
    expression = RECORDED[name].replace("[5m]", "[10m]")
    for other, text in RECORDED.items():  # a rule that uses another's series
        expression = expression.replace(other, f"({text.replace('[5m]', '[10m]')})")
    answer = watched.prometheus.ask(expression, watched.now)
    labels = key(job="main", instance=watched.scene.targets["main"])
    if name in EXACT:
        assert answer[labels] == pytest.approx(EXACT[name](answers.after), rel=1e-6)
    else:
        answers.within(answer[labels] * WINDOW_S, RATES[name](answers.before), RATES[name](answers.after))


@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_rule_has_been_recorded(watched: Watched, name: str) -> None:
    """By the server itself, with all labels of the pool."""
    recorded = watched.prometheus.ask(f'last_over_time({name}{{pool="live"}}[10m])', watched.now)
    assert [dict(labels) for labels in recorded] == [{**POOL, "job": "main", "instance": watched.scene.targets["main"]}]


def test_the_server_finds_no_fault_with_any_rule(watched: Watched) -> None:
    rules = [rule for group in watched.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(RULES)
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"] == []


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_fires_for_what_went_wrong_and_for_nothing_else(watched: Watched, alert: str) -> None:
    """At the moment at which all of them fired."""
    fired = [one["labels"] for one in watched.alerts if one["labels"]["alertname"] == alert]
    if alert == "WeirTargetDown":
        # A busy machine may keep our own target from answering in time: then it was down indeed, and is rightly named.
        missed = watched.prometheus.ask("min_over_time(up[10m]) == 0", watched.now)
        down = {dict(labels)["instance"] for labels in missed}
        assert watched.scene.targets["gone"] in {labels["instance"] for labels in fired} <= down
        assert not any("pool" in labels for labels in fired)
    else:
        assert {labels["pool"] for labels in fired} == {EXPECTED[alert]}


def test_what_an_alert_says_is_filled_in(watched: Watched) -> None:
    for one in watched.alerts:
        for text in one["annotations"].values():
            assert "{{" not in text and "<error" not in text and "<no value>" not in text, text
        labels = one["labels"]
        assert any(labels.get("pool", labels["instance"]) in text for text in one["annotations"].values())


@pytest.mark.parametrize("alert", [name for name in ALERTS if name not in LOOKS_FAR_BACK])
def test_an_alerts_expression_as_it_is_shipped_has_an_answer(watched: Watched, alert: str) -> None:
    """Windows and all."""
    expression = ALERTS[alert]
    for other, text in RECORDED.items():
        expression = expression.replace(other, f"({text})")
    answer = watched.prometheus.ask(expression, watched.now)
    pools = {dict(labels).get("pool", "gone") for labels in answer}
    assert EXPECTED.get(alert, "gone") in pools

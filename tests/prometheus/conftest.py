"""One Prometheus and one scene for all tests here: starting them takes longer than asking."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from allocator import Stats
from allocator.metrics import prometheus_rules
from tests.prometheus.scene import EXPECTED, Scene
from tests.prometheus.server import Prometheus, until

SCALE = 200
"""How much faster than in the file time passes for the rules: its five minutes are a second and a half here."""


def scaled(rules: str) -> str:
    """The rules with every duration divided by SCALE; thresholds, as 300 seconds, stay what they are."""
    seconds = {"s": 1, "m": 60, "h": 3600}

    def shorter(match: re.Match[str]) -> str:
        return f"{match[1]}{int(match[2]) * seconds[match[3]] * 1000 // SCALE}ms"

    return re.sub(r"(\[|offset |for: )(\d+)([smh])\b", shorter, rules)


@dataclass
class Watched:
    """now: a moment at which nothing changed any more and everything had been scraped, in seconds since 1970.

    alerts: those that have fired, each as it was last seen.
    before: the live pool's statistics from between the end of the load and `now`.
    """

    prometheus: Prometheus
    scene: Scene
    now: float
    alerts: list[dict[str, Any]]
    before: Stats


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Scraped from before the load began until after it ended; every alert has fired meanwhile."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is missing (Debian: package prometheus)")
    scene = Scene()
    try:
        prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), scene.targets, scaled(prometheus_rules()))
        try:
            prometheus.wait_until_ready()

            def scraped(n: int) -> bool:
                counts = prometheus.ask("count_over_time(weir_reserved_bytes[10m])")
                return len(counts) == len(scene.pools) and min(counts.values()) >= n

            until(lambda: scraped(2), lambda: "every pool has been scraped at rest")
            scene.start()
            fired: dict[tuple[str, str], dict[str, Any]] = {}

            def missing() -> set[str]:
                for alert in prometheus.firing():
                    labels = alert["labels"]
                    fired[labels["alertname"], labels.get("pool", labels["instance"])] = alert
                return {*EXPECTED, "WeirTargetDown"} - {name for name, _ in fired}

            until(lambda: not missing(), lambda: f"these alerts fire: {missing()}")
            scene.freeze()
            before = scene.pools["live"].stats(per_stream=True)
            count = 'count_over_time(weir_reserved_bytes{pool="live"}[10m])'
            (so_far,) = prometheus.ask(count).values()
            until(lambda: min(prometheus.ask(count).values()) >= so_far + 3, lambda: "the last state has been scraped")
            (now,) = prometheus.ask('timestamp(weir_reserved_bytes{pool="live"})').values()
            yield Watched(prometheus, scene, now, list(fired.values()), before)
        finally:
            prometheus.stop()
    finally:
        scene.close()

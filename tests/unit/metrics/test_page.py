"""docs/metrics.md names every metric and no other, and its expressions are PromQL."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from allocator.metrics import prometheus_rules
from allocator.metrics.catalogue import ALL, PREFIX

PAGE = Path(__file__).resolve().parents[3] / "docs/metrics.md"


def expressions() -> list[str]:
    """What stands in backquotes in the table of questions and speaks of metrics."""
    section = PAGE.read_text().partition("## Questions")[2].partition("\n## ")[0]
    codes = re.findall(r"`([^`]+)`", section.replace(r"\|", "|"))
    return [code for code in codes if PREFIX in code]


def test_every_metric_is_explained_with_its_label() -> None:
    explained = PAGE.read_text().partition("## All metrics")[2]
    found = set(re.findall(r"`(weir_[a-z_]+(?:\{[a-z, ]+\})?)`", explained))
    wanted = {f"{PREFIX}{spec.name}" + (f"{{{spec.label}}}" if spec.label else "") for spec in ALL}
    wanted = (wanted - {"weir_build_info"}) | {"weir_build_info{version, python, accelerated, backing}"}
    assert found == wanted


def test_no_other_metric_is_named() -> None:
    known = {f"{PREFIX}{spec.name}" for spec in ALL}
    page = PAGE.read_text()
    recorded = set(re.findall(r"\bpool:weir_\w+:\w+", page))  # results of the recording rules have names of their own
    assert recorded == set(re.findall(r"record: (\S+)", prometheus_rules()))
    named = set(re.findall(r"(?<!pool:)\bweir_[a-z_]+", page))
    assert {name.removesuffix("_bucket") for name in named} - {PREFIX} <= known


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing (Debian: package prometheus)")
def test_the_expressions_are_promql(tmp_path: Path) -> None:
    rules = [{"record": f"weir:question:{n}", "expr": text} for n, text in enumerate(expressions())]
    assert len(rules) > 15
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "page", "rules": rules}]}))  # JSON is YAML
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr

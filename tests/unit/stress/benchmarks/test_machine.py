"""Where and with what a run was: read from records, with a word for what cannot be read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

import allocator
from allocator import SimDevice
from allocator.stress.benchmarks import machine
from allocator.stress.benchmarks.ticker import Ticker


@pytest.mark.parametrize(
    ("told", "build"),
    [
        ({}, "plain"),
        ({"COMPILED": True}, "compiled"),
        ({"COMPILED": False}, "plain"),
        ({"build_info": lambda: {"compiled": True}}, "compiled"),
        ({"build_info": lambda: {"accelerated": "no"}, "COMPILED": True}, "plain"),
        ({"build_info": {"accelerated": "1"}}, "compiled"),
        ({"build_info": lambda: {"other": 1}, "COMPILED": True}, "compiled"),
    ],
)
def test_the_build_is_read_however_it_is_told(
    told: dict[str, Any], build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COMPILED", "build_info"):
        monkeypatch.delattr(allocator, name, raising=False)
    monkeypatch.setattr(machine, "COMPILED", False)
    for name, value in told.items():
        monkeypatch.setattr(allocator, name, value, raising=False)
    assert machine.build() == build


def test_the_code_that_runs_says_it_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COMPILED", "build_info"):
        monkeypatch.delattr(allocator, name, raising=False)
    monkeypatch.setattr(machine, "COMPILED", True)
    assert machine.build() == "compiled"


def test_everything_is_in_one_sentence() -> None:
    gpu: Any = SimDevice(memory=1 << 34)
    gpu.driver_version = (13, 0)
    about = machine.about(gpu)
    assert about["hardware"]["device_label"] == "sim:0" and about["hardware"]["driver"] == "13.0"
    said = machine.sentence(about)
    assert "\n" not in said and "16.00 GiB" in said and about["date"][:10] in said


def test_the_processor_is_named_or_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nmodel name\t: A Processor  \n")
    assert machine.processor(path) == "A Processor"
    assert machine.processor(tmp_path / "none")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_is_rewritten_and_wiped() -> None:
    out = Terminal()
    tick = Ticker(out)
    tick("a long line")
    tick("short")
    tick.wipe()
    tick.wipe()
    assert out.getvalue() == "\ra long line\rshort      \r     \r"


def test_elsewhere_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("allocator.stress.benchmarks.ticker.time.monotonic", lambda: now[0])
    out = io.StringIO()
    tick = Ticker(out)
    tick("at once")
    now[0] += 11
    tick("later")
    tick("again")
    tick.wipe()
    assert out.getvalue() == "later\n"

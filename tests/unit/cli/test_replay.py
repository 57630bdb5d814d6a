"""`weir replay`: flags, output, statuses."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import allocator.cli.replay as command
from allocator.cli import main
from allocator.traces import Replay, Result

HEADER = "time_ns,op,stream,pointer,bytes,gpu_start_ns,gpu_duration_ns\n"
SMALL = HEADER + (
    "0,launch,0,,,1,1000\n0,alloc,0,0x1000,1000000,,\n10,launch,0,,,12,5000\n20,free,0,0x1000,1000000,,\n"
    "9000,launch,1,,,1,1000\n9000,alloc,1,0x2000,1000000,,\n9010,launch,1,,,12,5000\n9020,free,1,0x2000,1000000,,\n"
)


@dataclass
class Ran:
    status: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def weir(capsys: pytest.CaptureFixture[str]) -> Any:
    def weir(*argv: object) -> Ran:
        status = main(["replay", *map(str, argv)])
        shown = capsys.readouterr()
        return Ran(status, shown.out, shown.err)

    return weir


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.csv"
    path.write_text(SMALL)
    return path


def test_both_policies_by_default_as_a_table(weir: Any, small: Path) -> None:
    ran = weir(small)
    assert ran.status == 0
    assert ran.err == ""
    assert ran.out.startswith(f"{small}: 8 rows, 2 allocations")
    assert "per-stream needs 2.00 x the memory of weir." in ran.out
    header = next(line for line in ran.out.splitlines() if "weir" in line and "per-stream" in line)
    assert header.split() == ["weir", "per-stream"]


def test_json_is_an_object_a_line_and_nothing_else(weir: Any, small: Path) -> None:
    ran = weir(small, small, "--json")
    assert ran.status == 0
    assert [(found["trace"], found["policy"]) for found in ran.objects] == [
        (str(small), "weir"),
        (str(small), "per-stream"),
    ] * 2
    for found in ran.objects:
        assert (found["rows"], found["allocations"], found["peak_live_bytes"]) == (8, 2, 1000448)
        assert (found["races"], found["leaked_bytes"], found["oom"], found["skipped"]) == (0, 0, 0, 0)
        assert sum(found["reuse"].values()) == 2
        assert found["virtual_seconds"] == pytest.approx(9010e-9 + 5e-6, rel=0.2)
        assert all(type(found[key]) is float for key in ("virtual_seconds", "stalled_seconds", "seconds"))
        assert all(type(count) is int for count in found["driver_calls"].values())


def test_policies_may_be_named_and_repeated(weir: Any, small: Path) -> None:
    ran = weir(small, "--policy", "per-stream", "--policy", "weir", "--policy", "weir", "--json")
    assert [found["policy"] for found in ran.objects] == ["per-stream", "weir"]


def test_a_limit_that_is_too_small_is_status_3(weir: Any, small: Path) -> None:
    ran = weir(small, "--limit", "512KiB", "--json")
    assert ran.status == 3
    assert [found["oom"] for found in ran.objects] == [2, 2]
    assert [found["leaked_bytes"] for found in ran.objects] == [0, 0]


def test_a_limit_holds_for_all_streams_of_per_stream_together(weir: Any, small: Path) -> None:
    ran = weir(small, "--limit", "2MiB", "--json")
    assert ran.status == 0  # idle caches are emptied before a request is refused
    assert all(found["peak_reserved_bytes"] <= 2 << 20 for found in ran.objects)


def test_memory_is_that_of_the_simulated_device(weir: Any, small: Path) -> None:
    assert weir(small, "--memory", "2MiB", "--json", "--policy", "weir").status == 0
    assert weir(small, "--memory", "1MiB", "--json").status == 3


def test_assumed_uses_are_passed_on(weir: Any, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(*args: Any, **options: Any) -> Replay:
        seen.append((options["config"].uses, options["config"].limit, options["speed"]))
        return Replay(Result("t", "weir", "d"))

    monkeypatch.setattr(command, "replay_trace", spy)
    weir(small, "--uses", "assumed", "--limit", "1GiB", "--speed", "1.5")
    weir(small, "--policy", "weir")
    assert seen == [("assumed", 1 << 30, 1.5)] * 2 + [("declared", 0, 1.0)]


def test_a_picture_is_written_and_its_place_printed(weir: Any, small: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.svg"
    ran = weir(small, "--plot", target)
    assert ran.status == 0
    assert ran.out.endswith(f"The picture is in {target}\n")
    ET.parse(target)
    ran = weir(small, "--plot", target, "--json")
    assert len(ran.objects) == 2
    assert ran.err == f"The picture is in {target}\n"


def test_no_launches_is_said(weir: Any, tmp_path: Path) -> None:
    path = tmp_path / "intervals"
    path.write_text("id,lower,upper,size\na,0,4,5\n")
    assert "No launches are recorded" in weir(path).out


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["missing.csv"], "weir: missing.csv: cannot be read: No such file or directory"),
        (["{small}", "--plot", "x.pdf"], "weir: x.pdf: a picture's name ends in .svg or .png"),
        (["{small}", "--plot", "nowhere/x.svg"], "weir: nowhere/x.svg: there is no folder nowhere"),
        (["{small}", "--limit", "lots"], "argument --limit: 'lots' is not a size"),
        (["{small}", "--limit", "50%"], "argument --limit: '50%': a share of the device is not possible"),
        (["{small}", "--limit", "0"], "argument --limit: must be above 0"),
        (["{small}", "--memory", "-1"], "argument --memory"),
        (["{small}", "--speed", "0"], "argument --speed"),
        (["{small}", "--speed", "nan"], "argument --speed"),
        (["{small}", "--speed", "fast"], "argument --speed: 'fast' is not a number"),
        (["{small}", "--device", "gpu"], "argument --device: 'gpu' is neither sim nor the number of a GPU"),
        (["{small}", "--device", "0", "--memory", "1GiB"], "weir: --memory is for the simulated device"),
        (["{small}", "--uses", "guessed"], "argument --uses: invalid choice"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    weir: Any, small: Path, argv: Sequence[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small.parent)
    ran = weir(*[word.format(small=small) for word in argv])
    assert ran.status == 2
    assert ran.out == ""
    assert ran.err.count("\n") == 1
    assert problem in ran.err


def test_a_lying_trace_is_named_with_its_line(weir: Any, tmp_path: Path) -> None:
    path = tmp_path / "lie.csv"
    path.write_text(HEADER + "0,alloc,0,0x1000,8,,\n1,alloc,0,0x1000,8,,\n")
    ran = weir(path)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == f"weir: {path}, line 3: 0x1000 is allocated again, but it has not been freed\n"


def test_a_setting_in_the_environment_counts_and_a_wrong_one_is_status_2(
    weir: Any, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_SEAL_FREEZE", "1")
    ran = weir(small)
    assert ran.status == 2
    assert "WEIR_SEAL_FREEZE" in ran.err


def test_the_worst_of_all_replays_is_the_status() -> None:
    good = Result("t", "weir", "d", races=0)
    raced, leaked = replace(good, races=1), replace(good, leaked_bytes=1)
    refused = replace(good, oom=1)
    unchecked = replace(good, races=None)
    assert command.status_of([Replay(good), Replay(unchecked)]) == 0
    assert command.status_of([Replay(good), Replay(refused)]) == 3
    for bad in (raced, leaked):
        assert command.status_of([Replay(refused), Replay(bad), Replay(good)]) == 1
    assert command.status_of([Replay(good, broken="x")]) == 1


def test_a_note_about_the_trace_goes_to_stderr(weir: Any, tmp_path: Path) -> None:
    import pickle

    path = tmp_path / "snapshot"
    event = {"action": "alloc", "addr": 512, "size": 5, "stream": 0}
    path.write_bytes(pickle.dumps({"device_traces": [[event]]}))
    ran = weir(path, "--json", "--policy", "weir")
    assert ran.status == 0
    assert ran.err == f"weir: {path}: no times are recorded: all rows happen at once\n"


def test_a_missing_gpu_is_one_line(weir: Any, small: Path) -> None:
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is a GPU")
    ran = weir(small, "--device", "0")
    assert ran.status == 2
    assert ran.err.count("\n") == 1

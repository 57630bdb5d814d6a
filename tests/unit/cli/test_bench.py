"""`weir bench`: what was asked for is measured, told and written; a mistake is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allocator.cli import main
from allocator.stress.benchmarks.registry import BENCHMARKS
from allocator.stress.benchmarks.runner import Measured
from allocator.stress.benchmarks.session import Session

QUICK = ["bench", "hot-path", "--quick"]


def test_help_teaches_and_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "weir bench --device 0 --table" in shown and all(len(line) <= 120 for line in shown.splitlines())
    assert main(["bench", "--list"]) == 0
    shown = capsys.readouterr().out
    for name in (*BENCHMARKS, "cupy-async", "cuda-core"):
        assert f" {name} " in shown
    assert "* steady" in shown and "* live-page" not in shown


def test_a_run_is_told_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, drawn = tmp_path / "run.json", tmp_path / "run.svg"
    assert main([*QUICK, "--json", str(written), "--plot", str(drawn)]) == 0
    shown = capsys.readouterr()
    assert "hot-path [core]" in shown.out and "= 1" in shown.out and shown.out.startswith("Weir ")
    document = json.loads(written.read_text())
    for key in ("date", "weir", "build", "hardware", "versions", "settings", "results", "acceptance", "left_out"):
        assert key in document, key
    assert document["build"] in ("plain", "compiled") and document["versions"]["python"]
    assert document["hardware"]["cores"] and document["settings"]["repeats"] == 2
    (case,) = document["results"]
    assert len(case["peers"]["CachingAllocator"]["repeats"]) == 2 and case["peers"]["CachingAllocator"]["ratio"] > 0
    assert drawn.read_text().startswith("<svg") and "CachingAllocator" in drawn.read_text()
    assert not list(tmp_path.glob("*.part"))


def test_the_table_has_a_line_for_each_aim(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "growth", "trim", "--quick", "--table"]) == 0
    rows = capsys.readouterr().out.rpartition("\n\n")[2].splitlines()[1:]
    assert len(rows) == 12
    verdicts = [row.partition("growth")[0] == "" and "  reached" in row for row in rows]
    assert verdicts.count(True) == 1
    assert sum("not measured: " in row for row in rows) == 9, "three of them are measured on the simulator too"


def test_the_table_alone_runs_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(Session, "run", lambda self, *args: asked.append([one.name for one in self.benchmarks]))
    assert main(["bench", "--table"]) == 0
    assert main(["bench"]) == 0
    needed, usual = asked
    assert set(needed) == set(Session.needed_for_table) < set(usual)


def test_earlier_runs_are_put_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, both = (str(tmp_path / f"{name}.json") for name in ("one", "two", "both"))
    assert main([*QUICK, "--json", one]) == 0
    broken = json.loads(Path(one).read_text()) | {"failed": {"hot-path": "an earlier one", "arrays": "still"}}
    Path(one).write_text(json.dumps(broken))
    assert main(["bench", "trim", "hot-path", "--quick", "--json", two]) == 0
    capsys.readouterr()
    picture = tmp_path / "both.svg"
    assert main(["bench", "--from", one, two, "--table", "--json", both, "--plot", str(picture)]) == 1
    shown, said = capsys.readouterr()
    assert "FAILED: arrays: still" in said and "an earlier one" not in said, "measured since"
    assert shown.count("hot-path [core]") == 1 and shown.count("trim [core]") == 2 and "10 GiB" in shown
    earlier, later, whole = (json.loads(Path(path).read_text()) for path in (one, two, both))
    assert len(whole["results"]) == 3 and whole["settings"]["benchmarks"] == ["hot-path", "trim"]
    hot = next(case for case in whole["results"] if case["benchmark"] == "hot-path")
    assert hot == next(case for case in later["results"] if case["benchmark"] == "hot-path") != earlier["results"][0]
    assert whole["acceptance"] == later["acceptance"] and picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weir": "9"}, "weir is '9'"),
        ({"build": "other"}, "build is 'other'"),
        ({"hardware": {"processor": "P", "device": "D", "device_label": "7"}}, "another machine"),
        ({"results": [{}]}, "not the JSON of weir bench"),
        ({"results": None}, "not the JSON of weir bench"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(
    change: dict[str, object], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    assert main([*QUICK, "--json", str(one)]) == 0
    other.write_text(json.dumps(json.loads(one.read_text()) | change))
    capsys.readouterr()
    assert main(["bench", "--from", str(one), str(other)]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and says in shown.err and not shown.out


@pytest.mark.parametrize(("text", "says"), [("{", "not JSON"), ("[]", "not the JSON"), ('{"weir": 1}', "not the JSON")])
def test_a_file_that_is_no_run_is_one_line(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    assert main(["bench", "--from", str(path)]) == 2
    assert says in capsys.readouterr().err
    assert main(["bench", "--from", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["stedy"], "unknown benchmark 'stedy'"),
        (["--peers", "cupy,jemalloc"], "unknown peer 'jemalloc'"),
        (["--repeats", "0"], "from 1 to 1000"),
        (["--repeats", "x"], "from 1 to 1000"),
        (["--seconds", "0"], "no sensible number"),
        (["--seconds", "x"], "is not a number"),
        (["--device", "gpu"], "neither sim nor"),
        (["--plot", "run.txt"], ".svg or .png"),
        (["hot-path", "--quick", "--json", "/nowhere/at/all.json"], "/nowhere/at/all.json"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *argv]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and says in shown.err, shown.err


def test_without_a_gpu_a_gpu_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(ordinal: int | None) -> None:
        from allocator import AllocatorError

        raise AllocatorError(f"there is no\nGPU {ordinal}")

    monkeypatch.setattr("allocator.stress.benchmarks.session.open_device", missing)
    assert main(["bench", "--device", "7"]) == 2
    assert capsys.readouterr().err == "weir: there is no GPU 7\n"


def test_what_failed_is_told_and_is_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: Session, *args: object) -> None:
        self.results.failed["hot-path"] = "ValueError: why not"

    monkeypatch.setattr(Session, "run", run)
    assert main(QUICK) == 1
    assert capsys.readouterr().err == "FAILED: hot-path: ValueError: why not\n"


def test_an_interrupted_run_writes_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: Session, say: object, done: object) -> None:
        one = Measured("hot-path", "half", "core", "ns", "floor", {})
        self.results.measured.append(one)
        assert callable(done)
        done(one)
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "run", run)
    path = tmp_path / "run.json"
    assert main([*QUICK, "--json", str(path)]) == 130
    assert [case["case"] for case in json.loads(path.read_text())["results"]] == ["half"]
    shown = capsys.readouterr()
    assert "half" in shown.out and shown.err.splitlines()[-1] == "weir: interrupted"

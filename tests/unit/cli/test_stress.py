"""`weir stress`: what it says, writes and returns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import allocator.cli.stress as command
from allocator.cli import main
from allocator.errors import AllocatorError
from allocator.streams import Registry
from allocator.stress import WORKLOADS, Recording, Setting, Shape, Step, read_recording

ROOT = Path(__file__).resolve().parents[3]
QUICK = ("--seconds", "0.2", "--threads", "2", "--seed", "1", "--operations", "60")
CATCH = ("--threads", "1", "--streams", "4", "--limit", "64MiB", "--seed", "3", "--workload", "many-users")


@pytest.fixture
def weir(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs in an empty folder: (status, stdout, stderr)."""
    for name in [name for name in os.environ if name.startswith("WEIR_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def weir(*argv: object) -> tuple[int, str, str]:
        status = main(["stress", *map(str, argv)])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return weir


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "known", lambda *args, **more: True)


def test_a_run_without_a_fault_prints_a_table_and_returns_0(weir: Any, tmp_path: Path) -> None:
    status, out, err = weir(*QUICK, "--workload", "steady", "--workload", "churn")
    assert status == 0
    assert "2 threads, 8 streams, limit 128 MiB, seed 1, on Simulated device 0 (sim:0)" in out
    assert "workloads: steady, churn\n" in out and out.rstrip().endswith("every check passed")
    assert err.splitlines()[0] == "weir: seed 1"
    assert list(tmp_path.iterdir()) == []


def test_json_is_one_object_on_stdout(weir: Any) -> None:
    status, out, _ = weir(*QUICK, "--json", "--workload", "pipeline", "--limit", "32MiB", "--streams", "3")
    figures = json.loads(out)
    assert status == 0 and figures["violation"] is None and figures["workloads"] == ["pipeline"]
    assert (figures["seed"], figures["threads"], figures["streams"], figures["limit"]) == (1, 2, 3, 32 << 20)
    assert figures["operations"] > 0 and figures["latency_us"]["allocate"]["p99.9"] > 0


def test_without_a_seed_each_run_has_another_and_says_it(weir: Any) -> None:
    _, _, err = weir("--seconds", "0.05", "--threads", "1", "--operations", "20", "--workload", "steady")
    assert re.match(r"weir: seed \d+\n", err)


def test_settings_from_the_environment_count(weir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIR_REUSE", "same_stream")
    _, out, _ = weir(*QUICK, "--json", "--workload", "steady", "--operations", "600")
    reuse = json.loads(out)["reuse"]
    assert reuse["same_stream"] and not reuse["opportunistic"] and not reuse["event_dependency"]


@pytest.mark.usefixtures("careless")
def test_a_violation_returns_1_with_the_seed_and_a_short_program_that_can_be_played_again(
    weir: Any, tmp_path: Path
) -> None:
    status, out, err = weir(*CATCH, "--operations", "120", "--seconds", "60")
    assert status == 1 and out.rstrip().splitlines()[-1].startswith("VIOLATION in round ")
    assert "weir stress --seed 3 --threads 1 --streams 4 --limit 67108864 --operations 120 --workload many-users" in err
    recording = read_recording(tmp_path / "weir-stress-3.txt")
    for step in recording.steps:
        assert f"  {step}\n" in err
    assert f"weir: {len(recording.steps)} operations fail, played by one thread: race: " in err

    status, out, _ = weir("--replay", "weir-stress-3.txt")
    assert status == 1 and "played by one thread; it was race: " in out
    assert f"VIOLATION after {len(recording.steps)} operations: race: " in out


@pytest.mark.usefixtures("careless")
def test_json_and_a_file_that_cannot_be_written_keep_the_status(weir: Any, tmp_path: Path) -> None:
    where = tmp_path / "no folder" / "file"
    status, out, err = weir(*CATCH, "--operations", "120", "--seconds", "60", "--json", "--save", where)
    assert status == 1 and json.loads(out)["violation"]["kind"] == "race"
    assert "weir: VIOLATION in round " in err and "cannot be written: No such file" in err


def recorded(path: Path, *, alone: bool, wrong: str = "race: once") -> Path:
    workload = WORKLOADS["steady"]
    setting = Setting(workers=2, streams=2, limit=64 << 20, alone=alone)
    programs = [workload.operations("1", Shape(2, worker, 2, 32 << 20)) for worker in range(2)]
    steps = tuple(Step(worker, next(programs[worker])) for _ in range(20) for worker in range(2))
    Recording(setting, steps, wrong).write(path)
    return path


def test_a_replay_that_finds_nothing_returns_0(weir: Any, tmp_path: Path) -> None:
    status, out, _ = weir("--replay", recorded(tmp_path / "r", alone=True))
    assert status == 0 and "40 operations, played by one thread; it was race: once\nnothing wrong" in out


def test_a_program_that_took_threads_is_played_by_threads_until_the_time_is_up(weir: Any, tmp_path: Path) -> None:
    status, out, _ = weir("--replay", recorded(tmp_path / "r", alone=False, wrong=""), "--seconds", "0.05")
    assert status == 0
    match = re.search(r"played by 2 threads, (\d+) times\nnothing wrong", out)
    assert match and int(match[1]) >= 1


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--device", "gpu"], "'gpu' is neither sim nor the number of a GPU"),
        (["--seconds", "soon"], "'soon' is not a number"),
        (["--seconds", "-1"], "-1 is no sensible number of seconds"),
        (["--threads", "0"], "'0' is no whole number from 1 to 256"),
        (["--streams", "many"], "'many' is no whole number from 1 to 512"),
        (["--limit", "0"], "must be above 0"),
        (["--workload", "nothing"], "invalid choice: 'nothing'"),
        (["--limit", "1MiB"], "less than 1 MiB for each worker"),
        (["--replay", "nowhere"], "nowhere: cannot be read: No such file"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(weir: Any, argv: list[str], why: str) -> None:
    status, out, err = weir(*argv)
    assert status == 2 and out == ""
    assert why in err and len(err.splitlines()) == 1


def test_a_device_that_is_not_there_is_one_line_too(weir: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise AllocatorError("there is no GPU here")

    monkeypatch.setattr(command, "open_target", refuse)
    assert weir("--device", "0")[0] == 2
    assert weir("--device", "0", "--replay", recorded(tmp_path / "r", alone=True))[0] == 2


def test_help_names_every_workload_and_the_statuses(weir: Any) -> None:
    status, out, _ = weir("--help")
    assert status == 0
    for one in WORKLOADS.values():
        assert f"{one.name} " in out and one.about in out
    assert "exit status:" in out and "--replay" in out


def test_where_the_file_for_locust_is(weir: Any) -> None:
    status, out, _ = weir("--locustfile")
    assert status == 0 and Path(out.strip()).name == "locustfile.py" and Path(out.strip()).is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_early_with_its_checks_and_its_table(number: signal.Signals) -> None:
    code = "import sys; from allocator.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ("stress", "--seconds", "600", "--threads", "2", "--seed", "1")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WEIR_", "COV_", "COVERAGE"))}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=clean | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "weir: seed 1\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count("nothing wrong: no race") == 1


def test_the_second_signal_does_what_it_does_otherwise() -> None:
    before = signal.getsignal(signal.SIGINT)
    with command._stopped_by_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before

"""`weir stress`: what it says, writes and returns."""

from __future__ import annotations

import io
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
from allocator import streams
from allocator.cli import main
from allocator.errors import AllocatorError
from allocator.stress import WORKLOADS, Growth, Hammer, Recording, Setting, Shape, Step, read_recording

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
    monkeypatch.setattr(getattr(streams, "Order", streams.Registry), "known", lambda *args, **more: True)


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
    made: list[Hammer] = []

    class Watched(Hammer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(command, "Hammer", Watched)
    monkeypatch.setenv("WEIR_REUSE", "same_stream")
    assert weir(*QUICK, "--workload", "steady")[0] == 0
    assert [set(one.pool.config.reuse) for one in made] == [{"same_stream", "new_memory"}]


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


# -- soaks -----------------------------------------------------------------------------------------

SOAK = (*QUICK, "--soak", "--every", "0.02", "--workload", "steady")
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")


def found(monkeypatch: pytest.MonkeyPatch, rss: tuple[int, int, int, int]) -> None:
    """Any run is long enough, and this is what its quarters had: a real one of such a length takes minutes."""
    growth = [Growth("events", (9, 10, 10, 10)), Growth("threads", (4, 5, 4, 5)), Growth("rss_bytes", rss)]
    monkeypatch.setattr("allocator.stress.soak.least_rounds", lambda outcome: 1)
    monkeypatch.setattr("allocator.stress.soak.judge", lambda points, seconds: growth)


def test_a_soak_leaves_its_samples_and_a_picture_and_says_what_levels_off(
    weir: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(monkeypatch, (30 << 20, 40 << 20, 41 << 20, 41 << 20))
    status, out, err = weir(*SOAK, "--samples", "s.csv", "--plot", "s.svg")
    assert status == 0, out + err
    assert "in the middle of each quarter of the run" in out and out.count("levels off") == 3
    assert out.rstrip().endswith("every check passed")
    header, first, *_ = (tmp_path / "s.csv").read_text().splitlines()
    assert header.startswith("seconds,rounds,operations,reserved_bytes") and first.count(",") == header.count(",")
    assert "weir stress --soak: 2 threads, 8 streams, seed 1" in (tmp_path / "s.svg").read_text()


def test_a_soak_in_json_has_what_was_judged(weir: Any) -> None:
    status, out, _ = weir(*SOAK, "--json", "--workload", "churn", "--operations", "2000")
    soak = json.loads(out)["soak"]
    assert status == 0 and soak["every_seconds"] == 0.02 and soak["samples"] >= 2 and soak["problems"] == []
    assert soak["judged"] is False and soak["least_rounds"] == 16 and soak["growth"] == {}
    assert "rss_bytes" in soak["measured"]


def test_a_soak_that_was_too_short_says_that_nothing_was_judged(weir: Any) -> None:
    status, out, _ = weir(*SOAK, "--operations", "2000", "--seconds", "0.05", "--workload", "churn")
    assert status == 0 and re.search(r"growth is not judged: \d+ rounds, and it takes 16\n", out)


def test_growth_is_named_and_fails_the_run(weir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, (30 << 20, 60 << 20, 90 << 20, 120 << 20))
    status, out, err = weir(*SOAK)
    assert status == 1 and out.count("levels off") == 2
    assert re.search(r"the memory of the process .* grows\n", out)
    assert "VIOLATION at the end: growth: the memory of the process: 30.00 MiB, 60.00 MiB" in out.splitlines()[-1]
    assert "--workload steady --soak" in err and "no round failed" in err


def test_a_reading_that_fails_in_the_middle_fails_the_run(weir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allocator.stress.soak.threads", lambda: 1 // 0)
    status, out, _ = weir(*SOAK)
    assert status == 1 and "VIOLATION at the end: exception: ZeroDivisionError" in out


@needs_full
@pytest.mark.parametrize("what", ["samples", "plot"])
def test_a_disk_that_is_full_costs_a_soak_its_file_only(weir: Any, what: str, tmp_path: Path) -> None:
    name = {"samples": "s.jsonl", "plot": "s.svg"}[what]
    (tmp_path / name).symlink_to("/dev/full")
    status, out, err = weir(*SOAK, f"--{what}", name)
    assert status == 2 and out.rstrip().endswith("every check passed")
    assert f"weir: {name}: No space left on device; the run went on without it\n" in err


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--plot", "a.svg"], "--plot goes with --soak"),
        (["--every", "1"], "--every goes with --soak"),
        (["--soak", "--samples", "a.txt"], "a.txt: the name of a file of samples ends in .csv or .jsonl"),
        (["--soak", "--plot", "a.gif"], "a.gif: a picture's name ends in .svg or .png"),
        (["--soak", "--samples", "no/a.csv"], "no/a.csv: No such file"),
    ],
)
def test_a_soak_that_could_not_keep_its_findings_does_not_begin(weir: Any, argv: list[str], why: str) -> None:
    status, out, err = weir(*argv)
    assert status == 2 and out == "" and why in err and len(err.splitlines()) == 1


class Gone(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_run_goes_on_where_nobody_reads_its_progress(weir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allocator.stress.report._ELSEWHERE_S", 0.0)
    monkeypatch.setattr(sys, "stderr", Gone())
    status, out, _ = weir(*SOAK)
    assert status == 0 and out.rstrip().endswith("every check passed")


@pytest.mark.source  # what it breaks cannot be replaced where it is compiled
def test_a_violation_is_kept_and_returned_where_nobody_reads_the_table(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    code = (
        "import sys; from allocator import streams; "
        "getattr(streams, 'Order', streams.Registry).known = lambda *a, **k: True; "
        "from allocator.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WEIR_", "COV_", "COVERAGE"))}
    done = subprocess.run(
        [sys.executable, "-c", code, "stress", *CATCH, "--operations", "120", "--seconds", "60"],
        stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=120,
        env=clean | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    os.close(write)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert "weir: play it again with: weir stress --replay weir-stress-3.txt" in done.stderr
    assert (tmp_path / "weir-stress-3.txt").is_file()


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

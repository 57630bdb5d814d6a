"""The command line as a whole: statuses, streams, and no traceback for anybody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from allocator.cli import ctrl_c_is_heard, main, version

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = ROOT / "allocator/traces/samples/serve-8-streams.csv.gz"
OTHER = ROOT / "tests/data/resnet50-train-prefetch.csv.gz"
COMMAND = [sys.executable, "-c", "import sys; from allocator.cli import main; sys.exit(main())"]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}


def test_version_is_the_installed_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"weir {version()}\n"

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert version() == "unknown"


@pytest.mark.parametrize("argv", [["--help"], ["replay", "--help"]])
def test_help_teaches(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert "weir replay" in shown.out
    assert not shown.err
    assert all(len(line) <= 120 for line in shown.out.splitlines())


@pytest.mark.parametrize("argv", [[], ["dance"], ["replay"], ["replay", "x", "--policy", "best"], ["--loud"]])
def test_wrong_usage_is_one_line_and_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.count("\n") == 1
    assert "--help" in shown.err


def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    argv = [*COMMAND, "replay", str(OTHER), str(OTHER), "--policy", "weir", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        said = [line for line in command.stderr.read().decode().splitlines() if "rows/s" not in line]
        assert said == []
    assert command.returncode == 128 + signal.SIGPIPE


def test_an_interrupt_ends_the_command_in_one_line() -> None:
    # A shell that runs the tests in the background starts them with the signal ignored; this command listens.
    listening = COMMAND[2].replace("import sys;", "import signal, sys; signal.signal(2, signal.default_int_handler);")
    argv = [sys.executable, "-c", listening, "replay", str(OTHER), *[str(SAMPLE)] * 50, "--policy", "weir"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as command:
        assert command.stdout is not None
        command.stdout.read(1)  # the first table: everything is imported and under way
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=60)
    said = [line for line in err.decode().splitlines() if "rows/s" not in line]
    assert said == ["weir: interrupted"]
    assert command.returncode == 128 + signal.SIGINT


def test_an_interrupt_in_a_finaliser_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    """Python drops it there: an allocation that ends each microsecond is where many a signal comes."""
    finished = []

    class Ends:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)
            finished.append(self)

    class Fails:
        def __del__(self) -> None:
            raise ValueError("not ours")

    before = sys.unraisablehook
    heard: list[sys.UnraisableHookArgs] = []
    sys.unraisablehook = heard.append
    try:
        with pytest.raises(KeyboardInterrupt), ctrl_c_is_heard():
            Fails()
            Ends()
            assert not finished, "interrupted"
            time.sleep(30)
        assert sys.unraisablehook == heard.append
    finally:
        sys.unraisablehook = before
    assert [one.exc_type for one in heard] == [ValueError]
    assert capfd.readouterr().err == ""

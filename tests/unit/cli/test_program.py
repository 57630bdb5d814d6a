"""How somebody's program is run, inside this process: what test_run.py shows from outside."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import allocator
from allocator.cli import program, run
from allocator.cli.status import USAGE


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sys.argv`, `sys.path` and `__main__` are the program's while it runs."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_a_script_is_main(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a.py", "import sys; print(__name__, sys.argv[1:], sys.path[0])")
    assert program.outcome(program.script(path, ["x", "-y"])) == 0
    assert capsys.readouterr().out == f"__main__ ['x', '-y'] {tmp_path}\n"


def test_a_folder_and_a_module_are_main(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "app/__main__.py", "print('app', __name__)")
    write(tmp_path, "some_module_of_theirs.py", "import sys; print('module', __name__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    assert program.outcome(program.script("app", [])) == 0
    assert program.outcome(program.module("some_module_of_theirs", ["1"])) == 0
    assert capsys.readouterr().out == "app __main__\nmodule __main__ ['1']\n"


@pytest.mark.parametrize(
    ("text", "status", "err"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(300)", 300 & 0xFF, ""),
        ("raise SystemExit('why')", 1, "why\n"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_the_end_of_a_program_is_pythons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, status: int, err: str
) -> None:
    assert program.outcome(program.script(write(tmp_path, "a.py", text), [])) == status
    said = capsys.readouterr().err
    assert err in said and "program.py" not in said


def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scripts, modules = ("none.py", "none.zip", str(tmp_path)[:-1] + "/x"), ("none_such", "none.such")
    for name in scripts:
        with pytest.raises(program.NoProgram, match="no such file"):
            program.script(name, [])
    for name in modules:
        with pytest.raises(program.NoProgram, match="no module named"):
            program.module(name, [])


def _arguments(*words: str, **options: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run.add_to(parser.add_subparsers())
    return parser.parse_args(["run", *words])


def test_run_installs_runs_and_sums_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = allocator.SimDevice()
    with allocator.CachingAllocator(gpu, name="cupy:0") as pool:
        pool.allocate(1 << 20, stream=allocator.Stream(gpu)).close()
        monkeypatch.setattr(run, "_install", lambda ends: SimpleNamespace(pools=lambda: {0: pool}))
        path = write(tmp_path, "a.py", "raise SystemExit(3)")
        assert run.run(_arguments("--summary", path)) == 3
    assert "weir: device 0: 1 allocations, 0.0 % without new memory" in capsys.readouterr().err


def test_run_says_in_one_line_what_stands_in_the_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.run(_arguments("none.py")) == USAGE
    assert run.run(_arguments("-m", "none_such")) == USAGE

    def fails(ends: object) -> None:
        raise allocator.AllocatorError("no\nGPU")

    monkeypatch.setattr(run, "_install", fails)
    assert run.run(_arguments(write(tmp_path, "a.py", ""))) == USAGE
    assert capsys.readouterr().err.splitlines()[-1] == "weir run: no GPU"
    with pytest.raises(SystemExit):
        run.run(_arguments())


def test_importing_may_install(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[int] = []
    monkeypatch.setitem(sys.modules, "allocator.cupy", SimpleNamespace(install=lambda: installed.append(1)))
    for value, times in (("0", 0), ("1", 1)):
        monkeypatch.setenv("WEIR_AUTOINSTALL", value)
        allocator._install_as_asked()
        assert len(installed) == times
    monkeypatch.setenv("WEIR_AUTOINSTALL", "maybe")
    with pytest.warns(RuntimeWarning, match="write 1 or 0"):
        allocator._install_as_asked()

"""`weir run`: somebody's program, as if `python` ran it.  The pool is a simulated one: the rest is as with a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from allocator import CachingAllocator, SimDevice
from allocator.cli import main, run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy's package (no GPU)")

# What differs from the command itself: CuPy is told that the device is a simulated one.
START = """
import sys
import allocator, allocator.cupy
from allocator.cli import main, run

def install(ends):
    gpu = allocator.SimDevice()
    pool = allocator.CachingAllocator(gpu, name="cupy:0")
    allocator.cupy.install(pool, current_stream=lambda: allocator.Stream.legacy(gpu))
    return allocator.cupy

run._install = install
sys.exit(main(["run", *sys.argv[1:]]))
"""


def weir_run(
    *argv: str, cwd: Path | None = None, start: str = START, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).resolve().parents[3])
    environ = {k: v for k, v in os.environ.items() if not k.startswith("WEIR_")} | {"PYTHONPATH": root} | (env or {})
    command = [sys.executable, "-c", start, *argv]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environ, timeout=120)


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_every_array_of_the_program_comes_from_weir(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "train.py",
        "import cupy\na = cupy.ndarray((1000,))\n"
        "print(type(a.data.mem).__module__, cupy.get_default_memory_pool().used_bytes())",
    )
    done = weir_run(script)
    assert done.stdout.split() == ["allocator.integrations.cupy.memory", "8192"], done.stderr
    assert done.returncode == 0 and done.stderr == ""


def test_the_program_sees_what_python_would_show_it(tmp_path: Path) -> None:
    write(tmp_path, "metrics.py", "X = 'their metrics'")
    write(tmp_path, "stress.py", "X = 'their stress'")
    script = write(
        tmp_path,
        "train.py",
        "import sys, metrics, stress\n"
        "mine = sys.modules['__main__'].__dict__ is globals()\n"
        "print([__name__, __file__, sys.argv, sys.path[0], metrics.X, stress.X, mine])",
    )
    argv = ["--flag", "-m", "x", "--metrics-port", "no number", "--summary", "--", "-h"]
    done = weir_run(script, *argv, cwd=Path("/"))
    expected = ["__main__", script, [script, *argv], str(tmp_path), "their metrics", "their stress", True]
    assert done.stdout == f"{expected}\n", done.stderr


def test_a_module_runs_as_with_python_m(tmp_path: Path) -> None:
    write(tmp_path, "pack/__init__.py", "")
    write(tmp_path, "pack/go.py", "import sys\nprint(__name__, __package__, sys.argv[1:])")
    done = weir_run("-m", "pack.go", "--flag", "-m", cwd=tmp_path)
    assert done.stdout == "__main__ pack ['--flag', '-m']\n", done.stderr


def test_a_folder_with_a_main_runs(tmp_path: Path) -> None:
    write(tmp_path, "app/__main__.py", "import sys; print(__name__, sys.argv[1:])")
    assert weir_run(str(tmp_path / "app"), "1").stdout == "__main__ ['1']\n"


@pytest.mark.parametrize(
    ("text", "status", "err"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('done for')", 1, "done for\n"),
        ("raise SystemExit(0)", 0, ""),
    ],
)
def test_the_exit_status_is_the_programs(tmp_path: Path, text: str, status: int, err: str) -> None:
    done = weir_run(write(tmp_path, "a.py", text))
    assert (done.returncode, done.stderr) == (status, err)


def test_an_error_of_the_program_is_shown_from_its_own_first_line(tmp_path: Path) -> None:
    script = write(tmp_path, "a.py", "def f():\n    raise ValueError('theirs')\nf()\n")
    done = weir_run(script)
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 1 == plain.returncode
    assert done.stderr == plain.stderr


def test_a_syntax_error_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    script = write(tmp_path, "a.py", "def f(:\n")
    done = weir_run(script)
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == plain.stderr


def test_the_programs_own_excepthook_and_exit_handlers_run(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "a.py",
        "import atexit, sys, threading, time\n"
        "X = 'still here'\n"
        "sys.excepthook = lambda *e: print('hook', e[0].__name__)\n"
        "atexit.register(lambda: print('exit', X))\n"
        "threading.Thread(target=lambda: (threading.main_thread().join(), print('thread', X))).start()\n"
        "raise KeyError(1)",
    )
    done = weir_run(script)
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == ["exit still here", "hook KeyError", "thread still here"]


def test_an_allocator_error_of_the_program_is_its_own(tmp_path: Path) -> None:
    script = write(
        tmp_path, "a.py", "import cupy\ncupy.get_default_memory_pool().set_limit(size=4096)\ncupy.ndarray((1 << 20,))"
    )
    done = weir_run(script)
    assert done.returncode == 1
    assert "OutOfMemoryError: Out of memory allocating 8,388,608 bytes" in done.stderr
    assert "Traceback" in done.stderr and "cli/program.py" not in done.stderr


def test_a_summary_says_what_the_program_needed(tmp_path: Path) -> None:
    script = write(tmp_path, "a.py", "import cupy\nfor _ in range(10):\n    cupy.ndarray((1 << 20,), dtype='b')")
    done = weir_run("--summary", script)
    assert done.stdout == ""
    line = done.stderr.strip()
    assert line.startswith("weir: device 0: 10 allocations, 90.0 % without new memory")
    assert "2.00 MiB reserved" in line and line.endswith("0 out of memory")


@pytest.mark.skipif(importlib.util.find_spec("bokeh") is None, reason="needs the dashboard extra")
def test_metrics_are_served_from_inside_the_program(tmp_path: Path) -> None:
    text = (
        "import re, sys, urllib.request, cupy\n"
        "held = cupy.ndarray((1 << 20,), dtype='b')\n"
        "url = re.search('http://[^ ]*', SAID.getvalue()).group().strip()\n"
        "page = urllib.request.urlopen(url.rstrip('/') + '/metrics').read().decode()\n"
        "print([l for l in page.splitlines() if l.startswith('weir_allocated_bytes')])\n"
    )
    script = write(tmp_path, "a.py", text)
    start = START.replace(
        "sys.exit(main(",
        "import io, builtins\nbuiltins.SAID = sys.stderr = io.StringIO()\nsys.exit(main(",
    )
    done = weir_run("--metrics-port", "0", script, start=start)
    assert "1.048576e+06" in done.stdout or "1048576.0" in done.stdout, (done.stdout, done.stderr)
    assert 'pool="cupy:0"' in done.stdout


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "name what to run"),
        (["-m"], "name what to run"),
        (["no/such.py"], "no/such.py: no such file"),
        (["-m", "no_such_module"], "no module named no_such_module"),
        (["--metrics-port", "x", "a.py"], "invalid int value"),
    ],
)
def test_what_cannot_be_started_is_one_line(argv: list[str], says: str) -> None:
    done = weir_run(*argv)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and says in done.stderr


PLAIN = "import sys; from allocator.cli import main; sys.exit(main(['run', *sys.argv[1:]]))"


def test_a_wrong_setting_is_one_line(tmp_path: Path) -> None:
    script = write(tmp_path, "a.py", "print('ran')")
    done = weir_run(script, env={"WEIR_LIMT": "1"})
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and "WEIR_LIMT" in done.stderr


def test_without_a_gpu_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    import cupy

    if cupy.cuda.is_available():
        pytest.skip("a GPU is here")
    done = weir_run(write(tmp_path, "a.py", "print('ran')"), start=PLAIN)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and "finds no GPU" in done.stderr


def test_help_teaches_with_examples() -> None:
    done = weir_run("--help")
    assert done.returncode == 0
    for word in ("weir run train.py", "--metrics-port", "WEIR_LIMIT", "exit status"):
        assert word in done.stdout


# -- in this process -------------------------------------------------------------------------------


class Installed:
    """What `allocator.cupy` is to the command, with one pool on the simulator."""

    def __init__(self) -> None:
        self.pool = CachingAllocator(SimDevice(), name="cupy:0")

    def pools(self) -> dict[int, CachingAllocator]:
        return {0: self.pool}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    one = Installed()
    monkeypatch.setattr(run, "_install", lambda ends: one)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    yield one
    one.pool.close()


def test_metrics_are_served_as_long_as_the_program_runs_and_no_longer(
    installed: Installed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(
        tmp_path,
        "train.py",
        "import re, sys, urllib.request\n"
        "url = re.search(r'http://\\S+', sys.stderr.getvalue())[0].rstrip('/')\n"
        "print(url, 'weir_reserved_bytes{' in urllib.request.urlopen(url + '/metrics').read().decode())\n",
    )
    heard = io.StringIO()
    with contextlib.redirect_stderr(heard):
        assert main(["run", "--metrics-port", "0", script]) == 0
    url, served = capsys.readouterr().out.split()
    assert served == "True" and f"weir: metrics and live page at {url}" in heard.getvalue()
    with pytest.raises(OSError):
        urllib.request.urlopen(url + "/metrics", timeout=5)


def test_the_summary_counts_what_the_program_did(
    installed: Installed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.pool.allocate(1 << 20).close()
    installed.pool.allocate(1 << 20).close()
    assert main(["run", "--summary", write(tmp_path, "train.py", "raise SystemExit(7)")]) == 7
    assert "weir: device 0: 2 allocations, 50.0 % without new memory, 0 of them from" in capsys.readouterr().err


def test_a_module_that_is_not_there_and_a_port_that_cannot_be_are_one_line_each(
    installed: Installed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-m", "no_such_module_anywhere"]) == 2
    assert capsys.readouterr().err.splitlines() == ["weir run: no module named no_such_module_anywhere"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["run", "--metrics-port", str(taken.getsockname()[1]), write(tmp_path, "train.py", "")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_it_is_cupy_that_gets_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("allocator.cupy", exc_type=ImportError)
    told: list[str] = []
    monkeypatch.setattr(cupy, "install", lambda: told.append("install"))
    with contextlib.ExitStack() as ends:
        assert run._install(ends) is cupy
    assert told == ["install"]

"""`weir serve`: a trace in, pages out, and an end without a word."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from allocator import CachingAllocator, Config, SimDevice, metrics
from allocator.cli import main
from allocator.cli import serve as module
from allocator.metrics import Server
from allocator.traces import LiveReplay, Summary, read_trace
from tests.unit.metrics.serving import NoHistory, draw

ROOT = Path(__file__).resolve().parents[3]
HEADER = "time_ns,op,stream,pointer,bytes,gpu_start_ns,gpu_duration_ns\n"
ROWS = "0,alloc,1,0x1000,1000,,\n10,launch,1,,,10,5000\n40,free,1,0x1000,1000,,\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.csv"
    file.write_text(HEADER + ROWS)
    return file


@contextmanager
def command(*argv: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """The command, in a process of its own, and its stderr."""
    code = "import sys; from allocator.cli import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, "serve", "--port", "0", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    ) as process:
        assert process.stderr is not None
        try:
            yield process, process.stderr
        finally:
            process.kill()


def address(stderr: IO[str]) -> str:
    """The address that it prints, once it serves."""
    for line in stderr:
        if found := re.search(r"live page +(http://127\.0\.0\.1:\d+/)", line):
            return found[1]
    raise AssertionError("it ended without serving")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_sample_is_served_until_a_signal_and_then_it_ends_quietly(number: signal.Signals) -> None:
    with command("--loop") as (process, stderr):
        url = address(stderr)
        assert 'weir_reserved_bytes{device="sim:0",pool="serve-8-streams"}' in get(f"{url}metrics")
        assert get(f"{url}healthz") == "ok\n"
        assert "Weir" in get(url)
        process.send_signal(number)
        last = [line.split()[0] for line in stderr]  # to the end
        assert process.wait(timeout=60) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""
    assert last == ["metrics", "health", "snapshot"]


def test_without_loop_it_says_when_the_trace_is_over_and_goes_on_serving(trace: Path) -> None:
    with command("--trace", str(trace), "--speed", "1000") as (process, stderr):
        url = address(stderr)
        assert any("the trace has been played; --loop would play it again" in line for line in stderr)
        page = get(f"{url}metrics")
        assert 'weir_allocations_total{device="sim:0",pool="tiny",reuse="new_memory"} 1.0' in page
        assert 'weir_allocated_bytes{device="sim:0",pool="tiny"} 0.0' in page
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_token_from_a_file_is_asked_for_and_not_printed(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("correct-horse-battery\nsecond line\n")
    with command("--trace", str(trace), "--token-file", str(file)) as (process, stderr):
        printed = ""
        for line in stderr:
            printed += line
            if "snapshot" in line:
                break
        assert "?token=TOKEN" in printed
        assert "correct" not in printed
        found = re.search(r"metrics +(http\S+)metrics", printed)
        assert found is not None
        url = found[1]
        assert "weir_reserved_bytes" in get(f"{url}metrics")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}snapshot", timeout=30)
        with refused.value:
            assert refused.value.code == 401
        request = urllib.request.Request(f"{url}snapshot", headers={"Authorization": "Bearer correct-horse-battery"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0


# -- in this process --------------------------------------------------------------------------------


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cheap page, and looks that do not take long."""
    monkeypatch.setattr("allocator.metrics.server.serving.live_page", lambda pools: (NoHistory(), draw))
    monkeypatch.setattr(module, "LOOK_S", 0.01)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (HEADER + "0,alloc,1,0x1000,much,,\n", ", line 2: "),
        ("", "the file is empty"),
        ("a,b\n", "no known layout"),
    ],
)
def test_a_bad_trace_is_one_line_and_status_2(
    tmp_path: Path, content: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(content)
    assert main(["serve", "--port", "0", "--trace", str(file)]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.count("\n") == 1
    assert words in shown.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "x"], "'x' is no port; ports are 0 to 65535"),
        (["--port", "65536"], "is no port"),
        (["--speed", "0"], "is no sensible speed"),
        (["--limit", "much"], "much"),
        (["--memory", "0"], "must be above 0"),
        (["--token", "short"], "token must be at least 8"),
        (["--token", "long-enough-token", "--token-file", "x"], "not allowed with argument"),
        (["--token-file", "/nonexistent"], "/nonexistent: the token cannot be read: No such file or directory"),
        (["--addr", "0.0.0.0"], "give a token"),
        (["--addr", "no such name"], "there is no address 'no such name'"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    argv: list[str], words: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", "--trace", str(trace), *argv]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.count("\n") == 1
    assert words in shown.err


def test_a_token_file_without_a_token_or_of_no_text_is_refused(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    for content, words in ((b"\n", "there is no token in its first line"), (b"\xff\xff", "it is not text")):
        file.write_bytes(content)
        assert main(["serve", "--trace", str(trace), "--token-file", str(file)]) == 2
        assert words in capsys.readouterr().err


def test_a_port_in_use_is_one_line_and_status_2(serving: None, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--trace", str(trace), "--port", str(port)]) == 2
    expected = f"weir: port {port} on 127.0.0.1 is in use: choose another one, or 0 for any that is free\n"
    assert capsys.readouterr().err == expected


def test_a_missing_library_is_one_line_and_status_2(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh.server.tornado", None)
    assert main(["serve", "--port", "0", "--trace", str(trace)]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert 'pip install "weir-allocator[dashboard]"' in shown


def test_options_reach_the_pool_and_signals_are_given_back(
    serving: None, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}
    real: Callable[..., Server] = metrics.serve

    def serve(pool: Any, port: int, addr: str, token: str | None) -> Server:
        seen.update(limit=pool.config.limit, memory=pool.device.total_memory, port=port, addr=addr, token=token)
        server = real(pool, port, addr, token)
        threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()
        return server

    monkeypatch.setattr(metrics, "serve", serve)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    argv = ["serve", "--trace", str(trace), "--port", "0", "--limit", "4MiB", "--memory", "1GiB"]
    assert main([*argv, "--token", "long-enough-token"]) == 0
    assert seen == {"limit": 4 << 20, "memory": 1 << 30, "port": 0, "addr": "127.0.0.1", "token": "long-enough-token"}
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert "Ctrl-C ends" in capsys.readouterr().err


def test_a_replay_that_fails_ends_it_with_the_reason(
    serving: None, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = read_trace

    def changed(path: str) -> Any:
        found = real(path)
        trace.unlink()  # after it was opened, and before its rows are played
        return found

    summary = Summary(rows=3, streams={1: None})
    monkeypatch.setattr(module, "read_trace", changed)
    monkeypatch.setattr(module, "summarize", lambda trace, progress: summary)
    assert main(["serve", "--trace", str(trace), "--port", "0"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"weir: {trace}: ")
    assert "No such file" in last


def looks(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The signal comes after so many looks at the replay, each of which sees it at its end."""
    real = LiveReplay.wait

    class Stop:
        def wait(self, seconds: float) -> bool:
            nonlocal count
            count -= 1
            return count < 0

    @contextmanager
    def stopped() -> Iterator[Stop]:
        yield Stop()

    def start(self: LiveReplay) -> LiveReplay:
        LiveReplay.start(self)
        assert self._loop or real(self, 60)
        return self

    monkeypatch.setattr(module, "stopped_by_signals", stopped)
    monkeypatch.setattr(LiveReplay, "__enter__", start)


def test_the_end_of_the_trace_is_said_once(
    serving: None, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks(monkeypatch, 3)
    assert main(["serve", "--trace", str(trace), "--port", "0", "--speed", "1000"]) == 0
    assert capsys.readouterr().err.count("the trace has been played") == 1


def test_in_a_loop_the_sample_has_no_end(
    serving: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks(monkeypatch, 3)
    assert main(["serve", "--port", "0", "--loop"]) == 0
    shown = capsys.readouterr().err
    assert "weir: playing serve-8-streams.csv.gz on a simulated GPU; Ctrl-C ends" in shown
    assert "has been played" not in shown


def test_notes_on_a_trace_are_printed(
    serving: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks(monkeypatch, 1)
    pool = CachingAllocator(SimDevice(), config=Config())
    held = pool.allocate(1 << 20)
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(pool.snapshot()))
    notes = read_trace(file).notes
    assert main(["serve", "--port", "0", "--trace", str(file)]) == 0
    shown = capsys.readouterr().err
    assert notes
    assert all(f"weir: {file}: {note}" in shown for note in notes)
    held.close()
    pool.close()


@pytest.mark.parametrize(("peak", "expected"), [(0, 8 << 30), (5 << 30, 16 << 30), (100 << 30, 256 << 30)])
def test_a_gpu_is_large_enough_for_its_trace(peak: int, expected: int) -> None:
    assert module.enough_for(Summary(peak_live_bytes=peak)) == expected

"""Traces, settings, snapshots and HTTP requests that nobody would write: right, or refused in one line.

Hypothesis, bounded; the corpus; and, where atheris is installed, a few seconds of the coverage-guided fuzzer, to see
that it runs.  `python -m tests.fuzz.traces --seconds 60` goes on from there.
"""

from __future__ import annotations

import importlib.util
import logging
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.metrics import serve
from allocator.metrics.server import Server, serving
from allocator.sizes import KIB, MIB
from tests.fuzz import engine
from tests.fuzz.engine import CORPUS, MISSING
from tests.fuzz.targets import TARGETS, snapshot, traces, use
from tests.unit.metrics.serving import NoHistory, ask, draw

HEADER = "time_ns,op,stream,pointer,bytes,gpu_start_ns,gpu_duration_ns"


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda p: f"{p.parent.name}-{p.name}")
def test_the_corpus_goes_through(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


# -- traces ---------------------------------------------------------------------------------------

ROW = st.one_of(
    st.tuples(
        st.just("alloc"), st.integers(1, 4), st.integers(1, 6), st.sampled_from([1, 512, 3 << 20, 9 << 20, 1 << 50])
    ),
    st.tuples(st.just("free"), st.integers(1, 4), st.integers(1, 6), st.just(512)),
    st.tuples(st.just("free_completed"), st.integers(1, 4), st.integers(1, 6), st.just(512)),
    st.tuples(st.just("launch"), st.integers(1, 4), st.integers(0, 1 << 20), st.just(0)),
)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 100_000), ROW), max_size=25))
def test_a_trace_of_any_order_brings_about_no_race_and_no_leak(
    rows: list[tuple[int, tuple[str, int, int, int]]],
) -> None:
    lines, now = [HEADER], 0
    for step, (op, stream, what, nbytes) in rows:
        now += step
        if op == "launch":
            lines.append(f"{now},launch,{stream},,,{now + what},{what}")
        else:
            lines.append(f"{now},{op},{stream},{what * 512:#x},{nbytes},,")
    traces("\n".join(lines).encode() + b"\n")


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(path.name for path in (CORPUS / "traces").iterdir())),
    st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 6), st.binary(max_size=6)), min_size=1, max_size=4),
)
def test_a_good_trace_with_bytes_changed_is_replayed_or_refused(name: str, edits: list[tuple[int, int, bytes]]) -> None:
    data = bytearray((CORPUS / "traces" / name).read_bytes())
    for at, gone, new in edits:
        at %= len(data) + 1
        data[at : at + gone] = new
    traces(bytes(data))


# -- settings and snapshots -------------------------------------------------------------------------

NAMES = [f.name for f in fields(Config)]
SIZE = st.builds(
    lambda number, unit: f"{number}{unit}",
    st.integers(-1, 1 << 70),
    st.sampled_from(["", "KiB", "MiB", "GiB", "TiB", "%", "B"]),
)
TEXT = st.one_of(
    SIZE,
    st.floats().map(str),
    st.sampled_from(
        ["", "0", "1", "true", "no", "vmm", "malloc", "auto", "declared", "opportunistic,event_dependency", "none"]
    ),
    st.text(max_size=8).filter(lambda text: not any(c in text for c in "\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029")),
)


@settings(max_examples=60)
@given(st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text("ABC_", max_size=4)), TEXT, max_size=4))
def test_any_environment_makes_a_pool_or_is_refused_in_one_line(environ: dict[str, str]) -> None:
    TARGETS["configuration"]("\n".join(f"{name}={value}" for name, value in environ.items()).encode("utf-8", "replace"))


VALUE: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 1 << 65),
    st.floats(),
    st.sampled_from(["vmm", "malloc", "assumed", "declared", "auto"]),
    st.frozensets(st.sampled_from(["opportunistic", "same_stream", "event_dependency", "nonsense"])),
    st.sampled_from([2 * MIB, 4 * MIB, 64 * KIB]),
)


@settings(max_examples=80)
@given(st.dictionaries(st.sampled_from(NAMES), VALUE, max_size=3))
def test_any_arguments_make_a_configuration_or_are_refused_in_one_line(arguments: dict[str, Any]) -> None:
    try:
        config = Config(**arguments)
    except (ValueError, TypeError) as error:
        assert "\n" not in str(error)
        return
    use(config)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 1), st.sampled_from([1, 700, MIB, 3 * MIB, 5 * MIB])), max_size=20
    )
)
def test_a_snapshot_of_any_pool_can_be_read(steps: list[tuple[int, int, int]]) -> None:
    gpu = SimDevice(memory=256 * MIB)
    with CachingAllocator(gpu) as pool:
        streams = [Stream(gpu) for _ in range(2)]
        live: dict[int, Any] = {}
        for name, number, nbytes in steps:
            if name in live:
                live.pop(name).close()
            else:
                live[name] = pool.allocate(nbytes, stream=streams[number])
                gpu.launch(streams[number], writes=[live[name]])
        snapshot(pickle.dumps(pool.snapshot()))
        live.clear()


# -- HTTP -----------------------------------------------------------------------------------------

TOKEN = st.text("abcdefgXYZ-_0123456789", min_size=1, max_size=12).map(str.encode)
JUNK = st.binary(max_size=12)
METHOD = st.one_of(st.sampled_from([b"GET", b"HEAD", b"POST", b"OPTIONS", b"CONNECT", b"PUT", b"get"]), TOKEN, JUNK)
PATHS = [
    b"/",
    b"/metrics",
    b"/healthz",
    b"/snapshot",
    b"/ws",
    b"*",
    b"//",
    b"/../..",
    b"http://localhost/",
    b"/%00",
    b"/?token=",
]
PATH = st.one_of(st.sampled_from(PATHS), JUNK)
VERSION = st.one_of(st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2"]), JUNK)
FIELDS = [
    (b"Host", b"localhost"),
    (b"Host", b"evil.example"),
    (b"Content-Length", b"5"),
    (b"Content-Length", b"-1"),
    (b"Content-Length", b"1e3"),
    (b"Transfer-Encoding", b"chunked"),
    (b"Transfer-Encoding", b"gzip, chunked"),
    (b"Connection", b"Upgrade"),
    (b"Upgrade", b"websocket"),
    (b"Sec-WebSocket-Key", b"x"),
    (b"Sec-WebSocket-Version", b"99"),
    (b"Accept", b"application/openmetrics-text; version=\xff"),
    (b"Accept-Encoding", b"gzip;q=nan"),
    (b"Origin", b"null"),
    (b"Cookie", b"weir=\x00"),
    (b"Authorization", b"Bearer \xe9"),
    (b"Expect", b"100-continue"),
    (b"Range", b"bytes=9-1"),
]
HEADERS = st.lists(st.one_of(st.sampled_from(FIELDS), st.tuples(TOKEN, JUNK), st.tuples(JUNK, JUNK)), max_size=6)
BODY = st.one_of(st.just(b""), st.just(b"5\r\nhello\r\n0\r\n\r\n"), st.just(b"ffffffffffffffffff\r\n"), JUNK)
END = st.sampled_from([b"\r\n", b"\n"])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pytest.importorskip("tornado")
    with (
        patch.object(serving, "live_page", lambda pools: (NoHistory(), draw)),  # a page that is cheap
        CachingAllocator(SimDevice()) as pool,
        serve(pool, port=0) as server,
    ):
        yield server


def answer(server: Server, request: bytes) -> bytes:
    """What comes back for these bytes, with nothing sent after them."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        pieces = []
        try:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            while piece := client.recv(1 << 16):
                pieces.append(piece)
        except ConnectionError:
            pass  # it has closed already
        return b"".join(pieces)


@settings(max_examples=100)
@given(METHOD, PATH, VERSION, HEADERS, BODY, END)
def test_a_request_of_any_shape_gets_an_answer_or_nothing_and_harms_nobody(
    server: Server,
    method: bytes,
    path: bytes,
    version: bytes,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    end: bytes,
) -> None:
    log = _Errors()
    root = logging.getLogger()
    root.addHandler(log)
    try:
        lines = [b" ".join((method, path, version)), *(b": ".join(pair) for pair in headers)]
        got = answer(server, end.join(lines) + end + end + body)
        status = got.split(b" ", 2)[1] if got.startswith(b"HTTP/1.") else b""
        assert got == b"" or (status.isdigit() and status != b"500"), got[:200]
        assert ask(server, "/healthz")[0] == 200
    finally:
        root.removeHandler(log)
    assert log.texts == []


class _Errors(logging.Handler):
    """What is logged as an error, or with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.texts.append(record.getMessage())


# -- the coverage-guided fuzzer -----------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason=MISSING)
@pytest.mark.parametrize("name", TARGETS)
def test_the_coverage_guided_fuzzer_runs_and_finds_nothing_at_once(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.fuzz.{name}", "--seconds", "2"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_without_the_fuzzer_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "atheris", None)
    assert engine.main("traces", ["--seconds", "1"]) == 2
    assert "atheris is not installed" in capsys.readouterr().err


def test_one_input_can_be_looked_at_again(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"limit=1GiB")
    assert engine.main("configuration", [str(path)]) == 0

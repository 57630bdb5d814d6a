"""`serve`: how a server begins, and how it ends."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tornado.websocket import websocket_connect

import allocator
from allocator import CachingAllocator
from allocator.metrics import serve
from allocator.metrics.server import Server, serving
from allocator.metrics.server.serving import DashboardMissingError
from tests.unit.metrics.serving import NoHistory, Start, ask, dial, first_message, page_token, read_all

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "correct-horse-battery"


# -- beginning --------------------------------------------------------------------------------------


@pytest.mark.parametrize("addr", ["0.0.0.0", "", "::"])
def test_an_address_that_others_reach_needs_a_token(pool: CachingAllocator, addr: str) -> None:
    if addr == "::" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with pytest.raises(ValueError, match="can be reached from other machines: give a token"):
        serve(pool, port=0, addr=addr)


def test_with_a_token_it_serves_every_address(start: Start, pool: CachingAllocator) -> None:
    server = start(pool, addr="0.0.0.0", token=TOKEN)
    assert server.url == f"http://127.0.0.1:{server.port}/"
    assert ask(server, "/metrics", headers={"Host": "node7.cluster"})[0] == 200
    _, headers, _ = ask(server, "/", headers={"Authorization": f"Bearer {TOKEN}"})
    assert headers["Content-Security-Policy"].endswith("frame-ancestors 'self'")


def test_ipv6_loopback_works_where_there_is_one(start: Start, pool: CachingAllocator) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    server = start(pool, addr="::1")
    assert server.url == f"http://[::1]:{server.port}/"
    with socket.create_connection(("::1", server.port), timeout=30) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 200")


def test_a_port_that_is_in_use_is_said_in_one_line(start: Start, pool: CachingAllocator) -> None:
    port = start(pool).port
    with pytest.raises(OSError, match=f"port {port} on 127.0.0.1 is in use: choose another one, or 0") as caught:
        serve(pool, port=port)
    assert caught.value.errno == errno.EADDRINUSE
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EACCES, "port 80 on 127.0.0.1 is not for this user"),
        (errno.EADDRNOTAVAIL, "this machine has no address '127.0.0.1'"),
        (errno.ENOBUFS, "port 80 on 127.0.0.1 cannot be had: full"),
    ],
)
def test_other_troubles_with_a_port_are_too(
    pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    class Socket(socket.socket):
        def bind(self, address: Any) -> None:
            raise OSError(code, "full")

    monkeypatch.setattr(socket, "socket", Socket)
    with pytest.raises(OSError, match=words):
        serve(pool, port=80)


def test_an_unknown_address_is_an_oserror(pool: CachingAllocator) -> None:
    with pytest.raises(OSError, match="there is no address 'no such name'"):
        serve(pool, port=0, addr="no such name")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"port": -1}, ValueError, "port must be 0 to 65535, got -1"),
        ({"port": 1 << 16}, ValueError, "port must be"),
        ({"port": "80"}, TypeError, "port must be a number, not str"),
        ({"port": True}, TypeError, "port must be a number, not bool"),
        ({"addr": 7}, TypeError, "addr must be text, not int"),
        ({"token": "short"}, ValueError, "token must be at least"),
        ({"token": b"bytes-are-not-text"}, TypeError, "token must be text, not bytes"),
    ],
)
def test_wrong_arguments_are_refused(
    pool: CachingAllocator, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        serve(pool, **{"port": 0, **options})
    with pytest.raises(TypeError, match="a pool, pools, or a callable that returns them, not int"):
        serve(7, port=0)  # type: ignore[arg-type]


def test_a_missing_library_is_said_in_one_line(pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bokeh.server.tornado", None)
    with pytest.raises(DashboardMissingError, match=r'pip install "weir-allocator\[dashboard\]"') as caught:
        serve(pool, port=0)
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, allocator.AllocatorError)


def test_importing_needs_none_of_the_libraries() -> None:
    code = (
        "import sys\nfor name in ('bokeh', 'tornado'): sys.modules[name] = None\n"
        "import allocator.metrics\nallocator.metrics.Server, allocator.metrics.serve\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}
    )


def test_what_fails_in_the_servers_thread_is_the_callers_error(
    pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(pools: object) -> Any:
        raise LookupError("no page today")

    monkeypatch.setattr(serving, "live_page", broken)
    with pytest.raises(LookupError, match="no page today"):
        serve(pool, port=0)
    assert not any(thread.name == "weir-metrics" for thread in threading.enumerate())


def test_what_fails_at_the_end_is_logged_and_the_rest_ends(
    pool: CachingAllocator, history: NoHistory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stop() -> None:
        raise LookupError("no end today")

    monkeypatch.setattr(history, "stop", stop)
    before = set(threading.enumerate())
    server = serve(pool, port=0)
    server.close()
    assert f"the metrics server on port {server.port} has ended: no end today" in caplog.text
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert set(threading.enumerate()) <= before


def test_an_interrupt_while_it_starts_closes_it(
    pool: CachingAllocator, history: NoHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ready(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            super().wait(timeout)
            raise KeyboardInterrupt

    before = set(threading.enumerate())
    own = SimpleNamespace(Event=Ready, Thread=threading.Thread, current_thread=threading.current_thread)
    monkeypatch.setattr(serving, "threading", own)
    with pytest.raises(KeyboardInterrupt):
        serve(pool, port=0)
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert set(threading.enumerate()) <= before


def test_localhost_is_where_everybody_looks(start: Start, pool: CachingAllocator) -> None:
    assert start(pool, addr="localhost").url.startswith("http://127.0.0.1:")


def test_it_serves_under_a_running_event_loop(start: Start, pool: CachingAllocator) -> None:
    async def cell() -> Server:
        loop = asyncio.get_running_loop()
        server = start(pool)
        assert asyncio.get_running_loop() is loop
        status, _, _ = await loop.run_in_executor(None, ask, server, "/metrics")
        assert status == 200
        server.close()
        return server

    assert asyncio.run(cell()).closed


def test_several_servers_serve_at_once(start: Start, pool: CachingAllocator) -> None:
    one, two = start(pool), start(pool)
    assert one.port != two.port
    one.close()
    assert ask(two, "/healthz")[0] == 200


def test_the_real_page_is_served_too(pool: CachingAllocator) -> None:
    with serve(pool, port=0) as server:
        status, _, page = ask(server, "/")
        assert status == 200
        assert '"ACK"' in asyncio.run(first_message(server, page_token(page)))


# -- ending -----------------------------------------------------------------------------------------


def test_closing_ends_every_thread_and_frees_the_port(start: Start, pool: CachingAllocator) -> None:
    before = set(threading.enumerate())
    server = start(pool)
    idle = dial(server)
    token = page_token(ask(server, "/")[2])

    async def watch() -> None:
        client = await websocket_connect(f"ws://127.0.0.1:{server.port}/ws", subprotocols=["bokeh", token])
        await client.read_message()
        await asyncio.get_running_loop().run_in_executor(None, server.close)
        while await client.read_message() is not None:
            pass  # what was under way; then the other side has gone
        client.close()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(watch())
    assert idle.recv(1) == b""
    idle.close()
    server.close()
    assert server.closed
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=30)
    assert not {thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("weir")}
    with serve(pool, port=server.port) as again:
        assert ask(again, "/healthz")[0] == 200


def test_closing_does_not_wait_for_a_pool_that_hangs(
    start: Start, pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(pool)
    hung, go_on = threading.Event(), threading.Event()
    original = pool.stats

    def stats(**options: Any) -> Any:
        hung.set()
        go_on.wait()
        return original(**options)

    monkeypatch.setattr(pool, "stats", stats)
    try:
        with dial(server) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert hung.wait(30)
            server.close()
            assert read_all(client) == b""
        assert not caplog.records
    finally:
        go_on.set()


def test_a_forked_child_does_not_serve(start: Start, pool: CachingAllocator) -> None:
    server = start(pool)
    token = page_token(ask(server, "/")[2])
    with dial(server) as client, dial(server) as page:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        page.sendall(
            b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\n"
            b"Sec-WebSocket-Protocol: bokeh, " + token.encode() + b"\r\n\r\n"
        )
        assert page.recv(1000).startswith(b"HTTP/1.1 101")
        go_on, tell = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads, which is the point
            child = os.fork()
        if child == 0:
            status = 1
            try:
                os.close(tell)
                server.close()
                os.read(go_on, 1)  # until the parent has looked
                status = 0 if server.closed else 2
            finally:
                os._exit(status)
        os.close(go_on)
        assert not server.closed
        assert ask(server, "/healthz")[0] == 200
        server.close()
        # The child lives, and holds neither the connection nor the port.
        assert client.recv(1) == b""
        read_all(page)  # to the end
        with pytest.raises(ConnectionRefusedError):
            dial(server)
    os.close(tell)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("closing", ["", "server.close()", "del server, pool", "raise SystemExit(0)"])
def test_the_interpreter_ends_at_once_and_quietly(closing: str) -> None:
    code = f"""
import http.client, socket
import allocator
pool = allocator.CachingAllocator(allocator.SimDevice(), config=allocator.Config(), name="end")
server = allocator.metrics.serve(pool, port=0)
port = server.port
idle = socket.create_connection(("127.0.0.1", port))
for path in ("/", "/metrics"):
    client = http.client.HTTPConnection("127.0.0.1", port)
    client.request("GET", path)
    assert client.getresponse().read()
    client.close()
idle.close()
{closing}
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

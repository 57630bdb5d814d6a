"""`serve`: what it answers, to whom, and how it begins and ends."""

from __future__ import annotations

import asyncio
import errno
import gc
import gzip
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tornado.websocket import websocket_connect

import allocator
from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.metrics import serve
from allocator.metrics.server import Server, serving
from allocator.metrics.server.readings import form_of
from allocator.metrics.server.serving import DashboardMissingError
from tests.unit.metrics.serving import NoHistory, ask, dial, draw, page_token, read_all

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "correct-horse-battery"
Start = Callable[..., Server]


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> NoHistory:
    """The live page is a cheap one."""
    history = NoHistory()
    monkeypatch.setattr(serving, "live_page", lambda pools: (history, draw))
    return history


@pytest.fixture
def start(history: NoHistory) -> Iterator[Start]:
    """start(pool, ...): a server on a free port, closed at the end."""
    with ExitStack() as stack:
        yield lambda pool, **options: stack.enter_context(serve(pool, **{"port": 0, **options}))


def text(server: Server, path: str) -> str:
    status, _, body = ask(server, path)
    assert status == 200, body
    return body.decode()


def value(server: Server, name: str, **labels: str) -> float | None:
    for family in parse_text(text(server, "/metrics")):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return None


# -- /metrics ---------------------------------------------------------------------------------------


def test_metrics_are_the_pools_present_figures(start: Start, pool: CachingAllocator) -> None:
    server = start(pool)
    assert value(server, "weir_requested_bytes", pool="main") == 0
    held = pool.allocate(1000)
    assert value(server, "weir_requested_bytes", pool="main", device="sim:0") == held.requested
    held.close()
    assert value(server, "weir_requested_bytes") == 0
    assert value(server, "weir_in_flight_bytes") == 0


def test_prometheus_and_openmetrics_text_by_what_is_accepted(start: Start, pool: CachingAllocator) -> None:
    server = start(pool)
    _, headers, body = ask(server, "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert len(list(parse_openmetrics(body.decode()))) > 40  # type: ignore[no-untyped-call]
    for accept in ("", "*/*", "text/plain", "application/openmetrics-text;q=0", "text/html,*/*;q=0.1"):
        _, headers, body = ask(server, "/metrics", headers={"Accept": accept})
        assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert len(list(parse_text(body.decode()))) > 40


def test_the_page_is_compressed_where_that_is_wanted(start: Start, pool: CachingAllocator) -> None:
    server = start(pool)
    _, headers, body = ask(server, "/metrics", headers={"Accept-Encoding": "br, gzip"})
    assert headers["Content-Encoding"] == "gzip"
    assert b"weir_reserved_bytes" in gzip.decompress(body)
    assert "Accept-Encoding" in headers["Vary"]
    for encoding in ("gzip;q=0", "identity", "gzip;q=x"):
        _, headers, body = ask(server, "/metrics", headers={"Accept-Encoding": encoding})
        assert "Content-Encoding" not in headers
        assert b"weir_reserved_bytes" in body


def test_prometheuss_own_header_asks_for_openmetrics() -> None:
    accept = (
        "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
        "text/plain;version=1.0.0;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
    )
    form = form_of(accept, "gzip")
    assert form.content_type.startswith("application/openmetrics-text")
    assert form.zipped


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing (Debian: package prometheus)")
def test_promtool_has_nothing_to_say(start: Start, gpu: SimDevice, pool: CachingAllocator) -> None:
    stream = Stream(gpu, name="copy")
    kept = [pool.allocate(4096 << i, stream=stream) for i in range(4)]
    del kept[::2]
    with CachingAllocator(gpu, config=Config(), name="main") as twin:
        page = ask(start([pool, twin]), "/metrics")[2]
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_figures_by_stream_are_there_unless_they_are_not_wanted(
    start: Start, gpu: SimDevice, pool: CachingAllocator
) -> None:
    kept = pool.allocate(1 << 20, stream=Stream(gpu, name="copy"))
    assert value(start(pool), "weir_stream_allocated_bytes", stream="copy") == kept.size
    assert value(start(pool, per_stream=False), "weir_stream_allocated_bytes") is None


def test_pools_come_and_go_with_what_the_callable_says(start: Start, gpu: SimDevice) -> None:
    current: list[CachingAllocator] = []
    server = start(lambda: current)
    assert text(server, "/healthz") == "ok\n"
    assert value(server, "weir_reserved_bytes") is None
    one = CachingAllocator(gpu, config=Config(), name="one")
    current.append(one)
    assert value(server, "weir_reserved_bytes", pool="one") == 0
    current[:] = [CachingAllocator(gpu, config=Config(), name="two")]
    assert value(server, "weir_reserved_bytes", pool="one") is None
    assert value(server, "weir_reserved_bytes", pool="two") == 0
    one.close()
    current[0].close()
    assert value(server, "weir_reserved_bytes") is None
    assert text(server, "/healthz") == "ok\n"


def test_serving_keeps_no_pool_alive(start: Start, gpu: SimDevice) -> None:
    pool = CachingAllocator(gpu, config=Config(), name="short")
    server = start(pool)
    assert value(server, "weir_reserved_bytes", pool="short") == 0
    assert ask(server, "/snapshot")[0] == 200
    del pool
    gc.collect()
    assert value(server, "weir_reserved_bytes") is None
    assert ask(server, "/healthz")[0] == 503


def test_the_identity_holds_in_every_scrape_under_load(start: Start, gpu: SimDevice, pool: CachingAllocator) -> None:
    server = start(pool)
    streams = [Stream(gpu, name=f"s{i}") for i in range(4)]
    stop = threading.Event()
    failures: list[BaseException] = []

    def load(stream: Stream) -> None:
        try:
            held: list[Any] = []
            number = 0
            while not stop.is_set():
                number += 1
                held.append(pool.allocate(512 + number * 7919 % 100_000, stream=stream))
                gpu.launch(stream, duration_ns=1000, writes=[held[-1]])
                if len(held) > 20:
                    held[number % 20].record_stream(streams[number % 4])
                    del held[number % 20]
                if not number % 50:
                    gpu.advance(10_000)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    try:
        names = [f"weir_{kind}_bytes" for kind in ("reserved", "allocated", "in_flight", "idle", "private")]
        for _ in range(20):
            found: dict[str, float] = {}
            for family in parse_text(text(server, "/metrics")):
                found |= {sample.name: sample.value for sample in family.samples if sample.name in names}
            reserved, *parts = (found[name] for name in names)
            assert reserved == sum(parts) > 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    pool.check()


# -- /healthz ---------------------------------------------------------------------------------------


def test_a_closed_pool_is_not_well(start: Start, pool: CachingAllocator) -> None:
    server = start(pool)
    assert ask(server, "/healthz")[::2] == (200, b"ok\n")
    pool.close()
    assert ask(server, "/healthz")[::2] == (503, b"pool 'main' has been closed\n")


def test_a_lost_device_is_not_well(start: Start, gpu: SimDevice, pool: CachingAllocator) -> None:
    server = start(pool)
    pool.allocate(1000).close()
    gpu.fail("cuMemCreate", error="CUDA_ERROR_ILLEGAL_ADDRESS", sticky=True)
    with pytest.raises(allocator.DriverError):
        pool.allocate(1 << 28)
    status, _, body = ask(server, "/healthz")
    assert (status, body) == (503, b"the device sim:0 of pool 'main' is lost: restart the process\n")
    assert value(server, "weir_device_lost") == 1


def test_a_pool_that_cannot_be_read_in_time_is_not_well(
    start: Start, gpu: SimDevice, pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allocator.metrics.server.app.HEALTH_S", 0.01)
    server = start(pool)
    hung, go_on = threading.Event(), threading.Event()
    original = pool.stats

    def stats(**options: Any) -> Any:
        hung.set()
        go_on.wait()
        return original(**options)

    monkeypatch.setattr(pool, "stats", stats)
    try:
        status, _, body = ask(server, "/healthz")
        assert hung.is_set()
        assert (status, body) == (503, b"the pools could not be read within 0 s: a driver call may hang\n")
        assert ask(server, "/nothing")[0] == 404  # the loop is well
    finally:
        go_on.set()


# -- /snapshot --------------------------------------------------------------------------------------


def test_the_snapshot_is_the_pools(start: Start, pool: CachingAllocator, tmp_path: Path) -> None:
    from allocator.traces import read_trace

    held = [pool.allocate(1 << i) for i in range(10, 20)]
    server = start(pool)
    status, headers, body = ask(server, "/snapshot")
    assert status == 200
    assert headers["Content-Disposition"] == 'attachment; filename="snapshot.pickle"'
    assert pickle.loads(body) == pool.snapshot()
    file = tmp_path / "snapshot"
    file.write_bytes(body)
    assert read_trace(file).layout == "pytorch"
    assert len(held) == 10


def test_of_several_pools_one_is_named(start: Start, gpu: SimDevice, pool: CachingAllocator) -> None:
    with CachingAllocator(gpu, config=Config(), name="main") as twin:
        twin.allocate(1 << 22)
        server = start([pool, twin])
        assert ask(server, "/snapshot")[::2] == (404, b"several pools: add ?pool=main or ?pool=main#2\n")
        assert ask(server, "/snapshot?pool=none")[::2] == (404, b"no pool 'none': add ?pool=main or ?pool=main#2\n")
        assert pickle.loads(ask(server, "/snapshot?pool=main")[2]) == pool.snapshot()
        assert pickle.loads(ask(server, "/snapshot?pool=main%232")[2]) == twin.snapshot()
    pool.close()
    assert ask(server, "/snapshot")[::2] == (404, b"there is no pool\n")


# -- the live page ----------------------------------------------------------------------------------


def test_the_live_page_is_served_with_all_it_needs(start: Start, pool: CachingAllocator, history: NoHistory) -> None:
    server = start(pool)
    status, headers, page = ask(server, "/")
    assert status == 200
    assert b"<title>a page</title>" in page
    policy = headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'self' http://localhost:*" in policy
    assert b"https://" not in page  # nothing from elsewhere: it works without a network
    scripts = [part.split(b'"')[0].decode() for part in page.split(b'src="')[1:]]
    assert scripts
    for script in scripts:
        status, headers, body = ask(server, script)
        assert (status, headers["X-Content-Type-Options"]) == (200, "nosniff")
        assert len(body) > 1000
    assert ask(server, "/static/js/none.js")[::2] == (404, b"not found\n")
    assert ask(server, "/static/../../serving.py")[0] in (403, 404)
    assert ask(server, "/favicon.ico")[0] == 200
    assert history.calls == ["start"]
    server.close()
    assert history.calls == ["start", "stop"]


def test_resources_come_from_the_server_whatever_the_environment_says(
    start: Start, pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOKEH_RESOURCES", "cdn")
    assert b"https://" not in ask(start(pool), "/")[2]


async def first_message(server: Server, token: str, **headers: str) -> str:
    from tornado.httpclient import HTTPRequest

    request = HTTPRequest(f"ws://127.0.0.1:{server.port}/ws", headers=headers)
    client = await websocket_connect(request, subprotocols=["bokeh", token])
    try:
        message = await client.read_message()
        assert isinstance(message, str)
        return message
    finally:
        client.close()
        while await client.read_message() is not None:
            pass  # until it is closed


def test_the_pages_websocket_opens_with_its_token_only(start: Start, pool: CachingAllocator) -> None:
    server = start(pool)
    token = page_token(ask(server, "/")[2])
    assert '"ACK"' in asyncio.run(first_message(server, token))
    own = f"http://127.0.0.1:{server.port}"
    assert '"ACK"' in asyncio.run(first_message(server, token, Origin=own))
    upgrade = {
        "Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "x3JJHMbDL1EzLkh9GBhXDw==",
    }  # fmt: skip
    for protocols in (
        "",
        "bokeh",
        "bokeh, x",
        "bokeh, x.y",
        f"bokeh, {token}x",
        f"other, {token}",
        f"bokeh, {token}, a",
    ):
        assert ask(server, "/ws", headers={**upgrade, "Sec-WebSocket-Protocol": protocols})[0] == 403
    right = {**upgrade, "Sec-WebSocket-Protocol": f"bokeh, {token}"}
    assert ask(server, "/ws", headers={**right, "Origin": "http://evil.example"})[0] == 403
    assert ask(server, "/ws", headers={**right, "Host": "evil.example"})[0] == 403
    assert ask(server, "/ws")[0] == 400


def test_a_session_holds_no_header_and_no_cookie_of_the_visitor(start: Start, pool: CachingAllocator) -> None:
    from bokeh.util.token import get_token_payload

    page = ask(start(pool), "/", headers={"Cookie": "secret=1", "X-Secret": "2"})[2]
    payload = get_token_payload(page_token(page))
    assert payload["cookies"] == payload["headers"] == {}


def test_live_pages_are_bounded(start: Start, pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allocator.metrics.server.app.PAGES", 2)
    server = start(pool)
    pages = [ask(server, "/") for _ in range(3)]
    assert [status for status, _, _ in pages] == [200, 200, 503]
    assert pages[2][1]["Retry-After"] == "10"
    assert ask(server, "/", "HEAD")[0] == 200
    assert ask(server, "/metrics")[0] == 200


# -- other requests ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/snapshot", "/", "/favicon.ico"])
def test_head_is_get_without_a_body(start: Start, pool: CachingAllocator, path: str) -> None:
    status, _, body = ask(start(pool), path, "HEAD")
    assert (status, body) == (200 if path != "/favicon.ico" else 405, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
@pytest.mark.parametrize("path", ["/metrics", "/", "/nothing"])
def test_other_methods_are_refused(start: Start, pool: CachingAllocator, method: str, path: str) -> None:
    status, headers, _ = ask(start(pool), path, method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "path", ["/nothing", "/metrics/", "//metrics", "/autoload.js", "/metadata", "/Metrics", "/%6detrics"]
)
def test_other_paths_do_not_exist(start: Start, pool: CachingAllocator, path: str) -> None:
    status, headers, body = ask(start(pool), path)
    assert (status, body) == (404, b"there are /, /metrics, /healthz and /snapshot\n")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in headers


def test_a_token_is_asked_for_once(start: Start, pool: CachingAllocator) -> None:
    server = start(pool, token=TOKEN)
    assert ask(server, "/metrics")[0] == ask(server, "/healthz")[0] == 200
    for path in ("/", "/snapshot", "/ws", "/static/js/bokeh.min.js", "/nothing"):
        assert ask(server, path)[0] == 401
    assert ask(server, "/snapshot", headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200
    status, headers, _ = ask(server, f"/?token={TOKEN}")
    assert (status, headers["Location"]) == (303, "/")
    cookie = {"Cookie": headers["Set-Cookie"].partition(";")[0]}
    status, _, page = ask(server, "/", headers=cookie)
    assert status == 200
    assert '"ACK"' in asyncio.run(first_message(server, page_token(page), **cookie))
    assert TOKEN not in server.url + repr(server)


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
    assert value(two, "weir_reserved_bytes") == 0


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
    with dial(server) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
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

"""`serve`: what it answers, and to whom."""

from __future__ import annotations

import asyncio
import gc
import gzip
import pickle
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

import allocator
from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.metrics.server import Server
from allocator.metrics.server.readings import form_of
from tests.unit.metrics.serving import NoHistory, Start, ask, first_message, page_token

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "correct-horse-battery"


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
        assert hung.wait(30)
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

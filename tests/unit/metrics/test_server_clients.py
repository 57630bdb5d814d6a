"""Bad clients cost one connection each, and nobody else anything."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from allocator import CachingAllocator
from allocator.metrics.server import Server, connections
from allocator.metrics.server.worker import Shared, Worker
from tests.unit.metrics.serving import Start, ask, dial, page_token, read_all

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def server(start: Start, pool: CachingAllocator) -> Server:
    return start(pool)


def well(server: Server) -> bool:
    return ask(server, "/healthz")[0] == 200


@pytest.mark.parametrize(
    "request_",
    [
        b"\r\n\r\n",
        b"NONSENSE\r\n\r\n",
        b"GET /healthz\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nBroken\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1, 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: local host\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"\xff\xfe\x00\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_a_malformed_request_gets_an_error_or_nothing(
    server: Server, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with dial(server) as client:
        client.sendall(request_)
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client)
    assert answer == b"" or answer.split(b" ")[1] in (b"400", b"403", b"404", b"405"), answer
    assert b"Traceback" not in answer
    assert well(server)
    assert not [record for record in caplog.records if record.levelname != "INFO"]  # a stranger writes no log


@pytest.mark.parametrize(
    ("path", "status"),
    [("/snapshot?pool=%ff", 400), ("/?token=%ff", 200), ("/static/js/none.js", 404), ("/x%00y", 404)],
)
def test_odd_paths_are_answered_without_a_word_in_the_log(
    server: Server, path: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    found, _, body = ask(server, path)
    assert found == status
    assert b"Traceback" not in body
    assert not [record for record in caplog.records if record.levelname != "INFO"]


def test_headers_without_an_end_are_cut_off(server: Server) -> None:
    with dial(server) as client:
        with suppress(ConnectionError):  # cut off while we were sending
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 20))
        answer = read_all(client)
    assert b"200" not in answer[:20]
    assert well(server)


def test_two_requests_on_one_connection_are_both_answered(server: Server) -> None:
    with dial(server) as client:
        client.sendall(GET + GET[:-2] + b"Connection: close\r\n\r\n")
        assert read_all(client).count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("path", ["/healthz", "/metrics", "/snapshot", "/", "/nothing", "/static/js/bokeh.min.js"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_who_says_that_nothing_more_will_come_is_answered(server: Server, path: str, version: str) -> None:
    with dial(server) as client:
        client.sendall(f"GET {path} HTTP/{version}\r\nHost: localhost\r\n\r\n".encode())
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client)  # and then the server's half ends as well
    status = 404 if path == "/nothing" else 200
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    assert length is None or int(length[1]) == len(body) > 0


def test_all_that_came_before_the_end_is_answered_in_pieces_too(server: Server) -> None:
    with dial(server) as client:
        for piece in (GET[:30], GET[30:] + GET + GET[:10], GET[10:]):
            client.sendall(piece)
            time.sleep(0.02)  # so that they come in several
        client.shutdown(socket.SHUT_WR)
        assert read_all(client).count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize("sent", [b"", GET[:20], GET + GET[:20], GET[:-2] + b"Content-Length: 9\r\n\r\nhalf"])
def test_what_is_cut_off_by_the_end_is_not_waited_for(server: Server, sent: bytes) -> None:
    with dial(server) as client:
        client.settimeout(10)  # far from IDLE_S
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert read_all(client).count(b"HTTP/1.1 200") == (sent[: len(GET)] == GET)
    assert well(server)


def test_an_answer_that_takes_long_keeps_the_server_idle_after_the_end(
    start: Start, pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of what comes is seen once, not again at every turn of the event loop."""
    server = start(pool)
    hung, go_on = hang(pool, monkeypatch)
    ends: list[int | None] = []
    original = connections._HalfOpen.read_from_fd

    def read(stream: connections._HalfOpen, buf: bytearray) -> int | None:
        ends.append(original(stream, buf))
        return ends[-1]

    monkeypatch.setattr(connections._HalfOpen, "read_from_fd", read)
    try:
        with dial(server) as client:
            client.sendall(GET.replace(b"healthz", b"metrics"))
            assert hung.wait(30)
            client.shutdown(socket.SHUT_WR)
            time.sleep(0.2)
            assert len(ends) < 6
            go_on.set()
            assert read_all(client).startswith(b"HTTP/1.1 200")
    finally:
        go_on.set()


def test_who_sends_his_headers_too_slowly_is_cut_off(
    start: Start, pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.05)
    server = start(pool)
    with dial(server) as client:
        client.sendall(GET[:20])
        assert read_all(client) == b""  # the server's doing: we still have something to say
    with dial(server) as client:
        client.sendall(GET)
        assert read_all(client).startswith(b"HTTP/1.1 200")  # and then it does not wait for another one for ever
    assert well(server)


def test_a_body_that_does_not_come_is_not_waited_for(
    start: Start, pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.05)
    with dial(start(pool)) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nhalf")
        assert b"200" not in read_all(client)[:20]


def test_a_thousand_idle_connections_keep_nobody_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        clients = []
        for _ in range(1000):
            clients.append(stack.enter_context(dial(server)))
            if len(clients) > 200:
                clients.pop(0)  # stays open; only looked at no more
        assert well(server)
        assert server._http.connections <= connections.MOST
        clients[-1].sendall(GET)
        assert clients[-1].recv(1000).startswith(b"HTTP/1.1 200")  # the youngest was not given up


def test_the_connection_that_has_been_idle_longest_gives_way(
    start: Start, pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections.BoundedServer, "most", 2)
    server = start(pool)
    with dial(server) as oldest, dial(server) as younger:
        younger.sendall(GET)
        assert younger.recv(1000).startswith(b"HTTP/1.1 200")
        assert well(server)  # on a third one
        assert oldest.recv(1) == b""
        younger.sendall(GET)
        assert younger.recv(1000).startswith(b"HTTP/1.1 200")


def hang(pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """(set once a reading hangs, lets it go on)."""
    hung, go_on = threading.Event(), threading.Event()
    original = pool.stats

    def stats(**options: Any) -> Any:
        hung.set()
        go_on.wait()
        return original(**options)

    monkeypatch.setattr(pool, "stats", stats)
    return hung, go_on


def test_where_all_are_busy_a_new_one_is_told_to_come_back(
    start: Start, pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections.BoundedServer, "most", 1)
    server = start(pool)
    hung, go_on = hang(pool, monkeypatch)
    try:
        with dial(server) as busy:
            busy.sendall(GET.replace(b"healthz", b"metrics"))
            assert hung.wait(30)
            with dial(server) as other:
                answer = read_all(other)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nRetry-After: 1\r\n" in answer
            assert answer.endswith(b"too many connections\n")
            go_on.set()
            assert busy.recv(1000).startswith(b"HTTP/1.1 200")
    finally:
        go_on.set()


def test_an_answer_that_nobody_takes_gives_way_and_is_ended(
    start: Start, pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections.BoundedServer, "most", 1)
    monkeypatch.setattr(connections, "STUCK_S", -1.0)
    server = start(pool)
    hung, go_on = hang(pool, monkeypatch)
    try:
        with dial(server) as stuck:
            stuck.sendall(GET.replace(b"healthz", b"metrics"))
            assert hung.wait(30)
            with dial(server) as other:
                other.sendall(GET.replace(b"healthz", b"nothing"))
                assert other.recv(1000).startswith(b"HTTP/1.1 404")
            assert stuck.recv(1) == b""
    finally:
        go_on.set()


def test_an_answer_under_way_for_too_long_is_ended(
    start: Start, pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SWEEP_S", 0.01)
    monkeypatch.setattr(connections, "BUSY_S", 0.02)
    server = start(pool)
    hung, go_on = hang(pool, monkeypatch)
    try:
        with dial(server) as slow:
            slow.sendall(GET.replace(b"healthz", b"metrics"))
            assert hung.wait(30)
            assert slow.recv(1) == b""
    finally:
        go_on.set()


def test_a_snapshot_is_sent_no_faster_than_it_is_taken(
    start: Start, pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = bytes(range(256)) * (1 << 16)  # 16 MiB: more than any socket buffers
    monkeypatch.setattr("allocator.metrics.server.readings.pickled", lambda value: big)
    monkeypatch.setattr("allocator.metrics.server.app.DOWNLOADS", 1)
    server = start(pool)
    with dial(server) as slow:
        slow.sendall(b"GET /snapshot HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        first = slow.recv(1000)
        assert first.startswith(b"HTTP/1.1 200")
        assert ask(server, "/snapshot")[::2] == (503, b"too many snapshots are being sent\n")
        assert well(server)
        assert (first + read_all(slow)).partition(b"\r\n\r\n")[2] == big
    with dial(server) as gone:
        gone.sendall(b"GET /snapshot HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert gone.recv(1000).startswith(b"HTTP/1.1 200")
    status = 503
    while status == 503:  # until the server has seen that he has gone
        status, _, body = ask(server, "/snapshot")
    assert body == big


def test_websockets_are_bounded_and_leave_room_when_they_go(
    start: Start, pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tornado.httpclient import HTTPClientError
    from tornado.websocket import websocket_connect

    monkeypatch.setattr("allocator.metrics.server.app.PAGES", 1)
    server = start(pool)
    token = page_token(ask(server, "/")[2])
    url = f"ws://127.0.0.1:{server.port}/ws"

    async def watch() -> None:
        one = await websocket_connect(url, subprotocols=["bokeh", token])
        assert await one.read_message()
        with pytest.raises(HTTPClientError, match="503"):
            await websocket_connect(url, subprotocols=["bokeh", token])
        one.close()
        while await one.read_message() is not None:
            pass
        two = None
        while two is None:  # until the server has seen that it has gone
            try:
                two = await websocket_connect(url, subprotocols=["bokeh", token])
            except HTTPClientError:
                await asyncio.sleep(0)
        assert await two.read_message()
        two.close()
        while await two.read_message() is not None:
            pass

    asyncio.run(watch())


def test_a_websocket_that_sends_nonsense_is_closed(server: Server) -> None:
    from tornado.websocket import WebSocketClosedError, websocket_connect

    token = page_token(ask(server, "/")[2])

    async def watch() -> None:
        client = await websocket_connect(f"ws://127.0.0.1:{server.port}/ws", subprotocols=["bokeh", token])
        with suppress(WebSocketClosedError):  # it need not wait for the end of that
            await client.write_message("x" * (2 << 20))  # more than it takes
        while await client.read_message() is not None:
            pass
        client.close()

    asyncio.run(watch())
    assert well(server)


def test_a_live_page_that_does_not_answer_any_more_is_given_up(
    start: Start, pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allocator.metrics.server.app.PING_S", 0.05)
    server = start(pool)
    token = page_token(ask(server, "/")[2])
    with dial(server) as asleep:
        asleep.sendall(
            b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\n"
            b"Sec-WebSocket-Protocol: bokeh, " + token.encode() + b"\r\n\r\n"
        )
        seen = read_all(asleep)  # until the server gives it up: we answer no ping
    assert seen.startswith(b"HTTP/1.1 101")
    assert b"ACK" in seen
    assert well(server)


def test_threads_do_not_grow_with_clients(server: Server) -> None:
    assert well(server) and ask(server, "/metrics")[0] == 200  # whoever answers that is there now
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(50):
            client = stack.enter_context(dial(server))
            client.sendall(GET.replace(b"healthz", b"metrics"))
        assert well(server)
        assert threading.active_count() == before


# -- one reading for all who wait -------------------------------------------------------------------


def test_a_reading_begins_after_it_was_asked_for_and_is_shared() -> None:
    worker = Worker("test-reader")
    begun, go_on = threading.Event(), threading.Semaphore(0)
    readings: list[list[str]] = []

    def work(keys: Any) -> dict[str, int]:
        readings.append(list(keys))
        begun.set()
        go_on.acquire()
        return dict.fromkeys(readings[-1], len(readings))

    async def ask_all() -> None:
        loop = asyncio.get_running_loop()
        shared: Shared[str, int] = Shared(worker, work, 0.0)
        first = loop.create_task(shared.get("a"))
        await loop.run_in_executor(None, begun.wait)
        late = [loop.create_task(shared.get(key)) for key in "abb"]
        gone = loop.create_task(shared.get("c"))
        await asyncio.sleep(0)
        gone.cancel()
        go_on.release(2)
        assert await first == 1
        assert await asyncio.gather(*late) == [2, 2, 2]
        assert readings == [["a"], ["a", "b", "c"]]

    asyncio.run(ask_all())
    worker.stop()


def test_a_reading_that_fails_is_the_error_of_those_who_asked() -> None:
    worker = Worker("test-reader")
    answers: list[Any] = [LookupError("not today"), {"a": 1}]

    def work(keys: Any) -> dict[str, int]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, dict)
        return answer

    async def ask_twice() -> None:
        shared: Shared[str, int] = Shared(worker, work, 0.0)
        with pytest.raises(LookupError, match="not today"):
            await shared.get("a")
        assert await shared.get("a") == 1

    asyncio.run(ask_twice())
    worker.stop()


def test_readings_are_spaced_by_what_they_took(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("test-reader")
    slept: list[float] = []
    now = 0.0

    def work(keys: Any) -> dict[str, int]:
        nonlocal now
        now += 0.03  # what it takes
        return {"a": 1}

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    async def ask_thrice() -> None:
        nonlocal now
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
        monkeypatch.setattr("allocator.metrics.server.worker.asyncio.sleep", sleep)
        shared: Shared[str, int] = Shared(worker, work, 0.05)
        for _ in range(2):
            await shared.get("a")
        now += 10
        await shared.get("a")

    asyncio.run(ask_thrice())
    assert slept == [pytest.approx(0.12)]
    worker.stop()

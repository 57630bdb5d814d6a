"""Helpers for the tests of the server: a page that is cheap, and clients."""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

from allocator.metrics.server import Server

Start = Callable[..., Server]
"""start(pool, ...): a server on a free port, closed at the test's end."""

TIMEOUT = 30
"""Seconds until a client of a test gives up."""


class NoHistory:
    """Counts how often it was started and stopped."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


def draw(document: Any) -> None:
    """The least that is a page."""
    from bokeh.models import Div

    document.title = "a page"
    document.add_root(Div(text="hello"))


def ask(
    server: Server, path: str, method: str = "GET", headers: Mapping[str, str] | None = None
) -> tuple[int, Mapping[str, str], bytes]:
    """(status, headers, body) of one request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
    try:
        connection.request(method, path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()  # type: ignore[return-value]  # a Message is one
    finally:
        connection.close()


def dial(server: Server) -> socket.socket:
    """A bare connection."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT)


def read_all(sock: socket.socket) -> bytes:
    """What comes until the other side closes."""
    pieces = []
    try:
        while piece := sock.recv(1 << 16):
            pieces.append(piece)
    except ConnectionError:
        pass  # closed while we were still sending
    return b"".join(pieces)


def page_token(page: bytes) -> str:
    """The session token that a live page carries."""
    found = re.search(rb'"token":"([^"]+)"', page)
    assert found is not None
    return found[1].decode()


async def first_message(server: Server, token: str, **headers: str) -> str:
    """What a live page's websocket says first."""
    from tornado.httpclient import HTTPRequest
    from tornado.websocket import websocket_connect

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

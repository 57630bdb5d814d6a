"""The listening side: how many connections there may be, and for how long.

Rules, so that a bad client costs one connection and nobody else's:

* At most `MOST` connections.  A new one takes the place of the one that has been idle longest, so that a thousand idle
  ones keep nobody out; where none is idle, it is told to come back.
* Headers must be complete within `IDLE_S`, an answer must have been taken within `BUSY_S`.
* Headers and bodies are small; nothing that this server answers has a body.
* Whoever says that nothing more will come (`shutdown(SHUT_WR)`) still gets the answers to all that has come.

Websockets are counted by app.py: they leave here when they are one.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final

from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPConnection, HTTPMessageDelegate
from tornado.ioloop import IOLoop, PeriodicCallback
from tornado.iostream import IOStream

MOST: Final = 128
IDLE_S: Final = 60.0
"""For the headers of a request, and between two requests."""
BUSY_S: Final = 120.0
"""From a request's headers to the last byte of its answer."""
STUCK_S: Final = 10.0
"""After so long an answer that nobody takes may give way to a new connection."""
SWEEP_S: Final = 5.0
HEADERS: Final = 16 << 10
BODY: Final = 1 << 10
BUFFER: Final = 1 << 20

_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Type: text/plain; charset=utf-8\r\nContent-Length: 21\r\n\r\ntoo many connections\n"
)


class _Connection:
    """Since when it is busy, or idle."""

    __slots__ = ("busy", "since")

    def __init__(self) -> None:
        self.busy = False
        self.since = time.monotonic()

    def turn(self, *, busy: bool) -> None:
        self.busy, self.since = busy, time.monotonic()


class _HalfOpen(IOStream):
    """A connection whose other side may have ended its half: that ends this one only where more is needed.

    tornado closes at the end of what comes, also while an answer is being made, and the answer is lost.
    """

    _ended = False

    def read_from_fd(self, buf: bytearray | memoryview) -> int | None:
        """As a socket's: 0 at the end, which is told only to who waits for more, and not before he has had a look at
        all that came until now; meanwhile None, as if more might come."""
        size = super().read_from_fd(buf)
        if size != 0 or (self._ended and self.reading()):
            return size
        self._ended = True
        if not self.reading():  # an answer is under way; nor does the event loop look for what will not come
            events = IOLoop.ERROR | IOLoop.WRITE if self.writing() else IOLoop.ERROR
            self.io_loop.update_handler(self.fileno(), events)
        return None


class BoundedServer(HTTPServer):
    """Tornado's server within the bounds above.  `most` may be set before it listens."""

    most = MOST

    def initialize(self, request_callback: Any, **options: Any) -> None:  # type: ignore[override]  # passed on
        """As tornado's, which calls this instead of __init__."""
        super().initialize(
            request_callback,
            max_header_size=HEADERS,
            max_body_size=BODY,
            max_buffer_size=BUFFER,
            idle_connection_timeout=IDLE_S,
            body_timeout=IDLE_S,
            **options,
        )
        self._open: dict[Any, _Connection] = {}
        self._sweeper = PeriodicCallback(self._sweep, SWEEP_S * 1e3)

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._open)

    def begin(self) -> None:
        """Start closing those whose time is over."""
        self._sweeper.start()

    def end(self) -> None:
        """Stop listening, and close every connection."""
        self._sweeper.stop()
        self.stop()
        for stream in list(self._open):
            stream.close()

    def streams(self) -> list[IOStream]:
        """The open ones."""
        return list(self._open)

    # -- what tornado calls ---------------------------------------------------------------------

    def handle_stream(self, stream: IOStream, address: tuple[Any, ...]) -> None:
        if len(self._open) >= self.most and not self._make_room():
            with contextlib.suppress(OSError):
                stream.socket.send(_FULL)
            stream.close()
            return
        stream = _HalfOpen(stream.socket, max_buffer_size=BUFFER)
        self._open[stream] = _Connection()
        super().handle_stream(stream, address)

    def start_request(self, server_conn: object, request_conn: HTTPConnection) -> HTTPMessageDelegate:
        """The answer before has been taken; this waits for the next request's headers."""
        if (connection := self._open.get(_stream(server_conn))) is not None:
            connection.turn(busy=False)
        return super().start_request(server_conn, request_conn)

    def on_close(self, server_conn: object) -> None:
        self._open.pop(_stream(server_conn), None)
        super().on_close(server_conn)

    # -- what the application calls --------------------------------------------------------------

    def headers_came(self, stream: object) -> None:
        """A request is being answered."""
        if (connection := self._open.get(stream)) is not None:
            connection.turn(busy=True)

    # -- bounds ----------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        """Close the connection that is missed least; False if all are being answered."""
        now = time.monotonic()
        idle = [item for item in self._open.items() if not item[1].busy]
        stuck = [item for item in self._open.items() if item[1].busy and now - item[1].since > STUCK_S]
        for candidates in (idle, stuck):
            if candidates:
                stream, _ = min(candidates, key=lambda item: item[1].since)
                del self._open[stream]
                stream.close()
                return True
        return False

    def _sweep(self) -> None:
        now = time.monotonic()
        for stream, connection in list(self._open.items()):
            if connection.busy and now - connection.since > BUSY_S:
                stream.close()


def _stream(server_conn: object) -> object:
    return getattr(server_conn, "stream", None)

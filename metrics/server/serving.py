"""`serve` and `Server`: a port, a thread, an event loop in it.

Rules:

* The port is bound by the caller, so that what is wrong with it is the caller's error; everything else happens in the
  server's own daemon thread, with its own event loop, also under a notebook's.
* The server ends when told, or with the interpreter, within moments, whoever is connected.
* A forked child does not serve: it lets go of the parent's sockets and leaves everything else alone.

Bokeh and tornado are imported at the first `serve`, and a missing one is said in one line.
Next: app.py.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import importlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Final

from allocator.errors import AllocatorError
from allocator.metrics.server.access import Access, check_token, is_loopback
from allocator.metrics.server.sources import Pools, Source

_log = logging.getLogger("allocator.metrics")

PORT: Final = 9478
BACKLOG: Final = 128
STOP_S: Final = 5.0

_servers: set[Server] = set()
"""Those that serve.  Nobody has to keep a server to keep it serving."""


class DashboardMissingError(AllocatorError, ImportError):
    """The libraries of the extra `dashboard` are not installed."""


def serve(
    pool: Source, port: int = PORT, addr: str = "127.0.0.1", token: str | None = None, *, per_stream: bool = True
) -> Server:
    """Serve `/metrics`, the live page `/`, `/healthz` and `/snapshot` of a pool, until `close()` or the end.

    pool: a CachingAllocator, several, or a callable that returns the present ones, asked anew each time.  None of
    them is kept alive.  port: 0 picks a free one.  addr: an address other than a loopback one needs a token, which
    then everything but `/metrics` and `/healthz` asks for.  per_stream: with figures by stream, which cost a walk
    over all blocks at each scrape.

    Raises OSError for a port that cannot be had, ValueError and TypeError for wrong arguments, and
    DashboardMissingError (an ImportError) without the extra `dashboard`.

    >>> import allocator, urllib.request
    >>> pool = allocator.CachingAllocator(allocator.SimDevice(), config=allocator.Config(), name="demo")
    >>> with allocator.metrics.serve(pool, port=0) as server:
    ...     urllib.request.urlopen(server.url + "healthz").read()
    b'ok\\n'
    """
    return Server(pool, port, addr, token, per_stream=per_stream)


class Server:
    """A running server; see `serve`.  Also `with`."""

    def __init__(
        self,
        pool: Source,
        port: int = PORT,
        addr: str = "127.0.0.1",
        token: str | None = None,
        *,
        per_stream: bool = True,
    ) -> None:
        self._closed = True
        pools = Pools(pool)
        check_token(token)
        if isinstance(port, bool) or not isinstance(port, int):
            raise TypeError(f"port must be a number, not {type(port).__name__}")
        if not 0 <= port < 1 << 16:
            raise ValueError(f"port must be 0 to 65535, got {port}")
        places = _resolve(addr, port)
        loopback = all(is_loopback(place[1][0]) for place in places)
        if not loopback and token is None:
            raise ValueError(
                f"{addr or 'every address'!r} can be reached from other machines: give a token, as in "
                "serve(pool, addr=..., token=...), or serve on 127.0.0.1"
            )
        _check_libraries()
        self._socket = _bind(*places[0], addr, port)
        self._port = int(self._socket.getsockname()[1])
        self._addr = str(places[0][1][0])
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._app: Any = None
        self._http: Any = None
        self._error: BaseException | None = None
        self._ready = threading.Event()
        access = Access(token, self._port, loopback=loopback)
        self._thread = threading.Thread(
            target=self._run,
            args=(pools, access, loopback, per_stream),
            name="weir-metrics",
            daemon=True,
        )
        self._closed = False
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:  # Ctrl-C: nobody else could close it
            self.close()
            raise
        if self._error is not None:
            self._closed = True
            self._thread.join()
            error, self._error = self._error, None
            raise error
        _servers.add(self)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._port

    @property
    def url(self) -> str:
        """Where this machine finds it, with a slash at the end.  Without the token."""
        name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._addr, self._addr)
        return f"http://[{name}]:{self._port}/" if ":" in name else f"http://{name}:{self._port}/"

    @property
    def closed(self) -> bool:
        """True once it does not serve any more; in a forked child from the beginning."""
        return self._closed

    def close(self) -> None:
        """Stop serving, within moments, whoever is connected.  Twice is harmless, as it is in a forked child."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        _servers.discard(self)
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(stop.set)
        if self._thread is not threading.current_thread():
            self._thread.join(STOP_S)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Server {'closed' if self._closed else self.url}>"

    # -- the server's own thread ------------------------------------------------------------------

    def _run(self, pools: Pools, access: Access, loopback: bool, per_stream: bool) -> None:
        loop = asyncio.SelectorEventLoop() if os.name == "posix" else asyncio.new_event_loop()
        self._loop = loop
        try:
            loop.run_until_complete(self._serve(pools, access, loopback, per_stream))
        except BaseException as error:
            if not self._ready.is_set():
                self._error = error
            else:
                _log.error("the metrics server on port %d has ended: %s", self._port, error, exc_info=error)
        finally:
            self._socket.close()
            with contextlib.suppress(Exception):
                _cancel_rest(loop)
            loop.close()
            self._ready.set()

    async def _serve(self, pools: Pools, access: Access, loopback: bool, per_stream: bool) -> None:
        from tornado.ioloop import IOLoop

        from allocator.metrics.server.app import App
        from allocator.metrics.server.connections import BoundedServer

        stop = self._stop = asyncio.Event()
        history, draw = live_page(pools)
        app = self._app = App(
            pools,
            access,
            draw,
            loopback=loopback,
            per_stream=per_stream,
            headers_came=lambda stream: self._http.headers_came(stream),
        )
        http = self._http = BoundedServer(app)
        app.initialize(IOLoop.current())
        app.start()
        http.add_socket(self._socket)
        http.begin()
        async with AsyncExitStack() as ends:
            ends.push_async_callback(app.end)
            history.start()
            ends.callback(history.stop)  # before the pages that it would still tell
            ends.callback(http.end)
            self._ready.set()
            await stop.wait()

    def after_fork_in_child(self) -> None:
        """Let go of the parent's sockets.  Not of its event loop: the two processes share what that waits on."""
        self._closed = True
        with contextlib.suppress(Exception):
            for stream in (*self._http.streams(), *self._app.streams()):
                stream.socket.close()
        self._socket.close()


def live_page(pools: Pools) -> tuple[Any, Callable[[Any], None]]:
    """The history behind the live page, to be started and stopped, and what fills a page's document."""
    from allocator.metrics.history import History
    from allocator.metrics.page import make_document

    history = History(pools)

    def draw(document: Any) -> None:
        with document.models.freeze():  # its models are counted once, not after each piece: a third of the time
            make_document(document, history)

    return history, draw


def _check_libraries() -> None:
    try:
        for name in ("bokeh.server.tornado", "tornado.httpserver"):
            importlib.import_module(name)
    except ImportError as error:
        raise DashboardMissingError(
            f'the server needs {error.name or "Bokeh"}: pip install "weir-allocator[dashboard]"', name=error.name
        ) from None


def _resolve(addr: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """(family, address) of every address that `addr` stands for."""
    if not isinstance(addr, str):
        raise TypeError(f"addr must be text, not {type(addr).__name__}")
    try:
        found = socket.getaddrinfo(addr or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise OSError(errno.EADDRNOTAVAIL, f"there is no address {addr!r}; 127.0.0.1 is this machine") from error
    places = [(family, tuple(place)) for family, _, _, _, place in found]
    return sorted(places, key=lambda place: place[0] != socket.AF_INET)  # of localhost's two, the one that all know


def _bind(family: int, place: tuple[Any, ...], addr: str, port: int) -> socket.socket:
    """A listening socket; OSError in one line that names the port and what to do."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not while another listens, on these
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setblocking(False)
        sock.bind(place)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, _why(error, addr, port)) from None
    return sock


def _why(error: OSError, addr: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {addr or '0.0.0.0'} is in use: choose another one, or 0 for any that is free"
    if error.errno == errno.EACCES:
        return (
            f"port {port} on {addr or '0.0.0.0'} is not for this user: choose one above 1023, or 0 for any that is free"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"this machine has no address {addr!r}; 127.0.0.1 is this machine"
    return f"port {port} on {addr or '0.0.0.0'} cannot be had: {error.strerror}"


def _cancel_rest(loop: asyncio.AbstractEventLoop) -> None:
    """End what handlers are still waiting for, quietly."""
    rest = asyncio.all_tasks(loop)
    for task in rest:
        task.cancel()
    if rest:
        loop.run_until_complete(asyncio.wait(rest, timeout=1.0))
    loop.run_until_complete(loop.shutdown_asyncgens())


def _close_all() -> None:
    for server in list(_servers):
        server.close()


def _after_fork_in_child() -> None:
    for server in list(_servers):
        server.after_fork_in_child()
    _servers.clear()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

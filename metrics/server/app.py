"""What answers what: a Bokeh application with a few more pages, behind one door.

    /metrics    Prometheus or OpenMetrics text       /healthz    200, or 503 and why
    /snapshot   what PyTorch's memory viewer reads   /           the live page, with /ws and /static behind it

Rule: every request, a websocket's too, passes `find_handler`, which asks access.py first; a path that is not in its
table is 404.  Bokeh's own routes are not used: some of them are made for pages of other sites.

Next: access.py, readings.py; ../page/ draws the live page.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.resources import Resources
from bokeh.server.contexts import ApplicationContext
from bokeh.server.tornado import BokehTornado
from bokeh.server.views.doc_handler import DocHandler
from bokeh.server.views.ico_handler import IcoHandler
from bokeh.server.views.static_handler import StaticHandler
from bokeh.server.views.ws import WSHandler
from bokeh.util.token import check_token_signature, generate_secret_key
from tornado.httputil import HTTPServerRequest
from tornado.iostream import StreamClosedError
from tornado.web import HTTPError, RequestHandler
from tornado.websocket import WebSocketClosedError

from allocator.metrics.server.access import Access, Verdict
from allocator.metrics.server.readings import Form, Health, Metrics, Snapshots, Unknown, form_of
from allocator.metrics.server.sources import Pools
from allocator.metrics.server.worker import Shared, Worker

_log = logging.getLogger("allocator.metrics")

PAGES: Final = 32
"""Live pages that may be open at once."""
DOWNLOADS: Final = 4
"""Snapshots that may be under way at once."""
COMPONENTS: Final = ("bokeh", "bokeh-widgets")
"""Scripts of Bokeh's that the page loads: without its tables, WebGL and formulas, which are more than half of them."""
GAP_S: Final = 0.05
HEALTH_S: Final = 5.0
"""A device that has not answered after so long is not well."""
PING_S: Final = 20.0
GOODBYE_S: Final = 1.0
PIECE: Final = 64 << 10

_ALWAYS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_POLICY: Final = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; connect-src 'self' ws: wss:; base-uri 'none'; form-action 'none'; "
)
"""Nothing is loaded from elsewhere; Bokeh's page needs inline scripts."""
_FRAMES: Final = ("frame-ancestors 'self'", "frame-ancestors 'self' http://localhost:* http://127.0.0.1:*")
"""Who may show the page in a frame; on loopback also a notebook on another port."""


class App(BokehTornado):
    """The application of one server.  Made, used and stopped in the event loop's thread.

    headers_came: told of each request's stream.  Attributes are for the handlers below.
    """

    def __init__(
        self,
        pools: Pools,
        access: Access,
        draw: Callable[[Document], None],
        *,
        loopback: bool,
        per_stream: bool,
        headers_came: Callable[[object], None],
    ) -> None:
        super().__init__(
            {"/": Application(FunctionHandler(draw))},
            extra_websocket_origins=["*"],  # access.py has looked, and is stricter
            secret_key=generate_secret_key().encode(),
            sign_sessions=True,
            include_headers=[],  # what is in a session can be read by the page's scripts
            include_cookies=[],
            use_index=False,
            keep_alive_milliseconds=0,  # tornado's pings end a connection that does not answer, Bokeh's do not
            websocket_ping_interval=PING_S,
            websocket_ping_timeout=PING_S,
            websocket_max_message_size_bytes=1 << 20,
            check_unused_sessions_milliseconds=5000,
            unused_session_lifetime_milliseconds=10_000,
            log_function=_no_log,
        )
        self.policy = _POLICY + _FRAMES[loopback]
        self.worker = Worker("weir-metrics-reader")
        self.metrics: Shared[Form, bytes] = Shared(self.worker, Metrics(pools, per_stream=per_stream).read, GAP_S)
        self.snapshots: Shared[str | None, bytes | Unknown] = Shared(self.worker, Snapshots(pools).read, 4 * GAP_S)
        self.health: Shared[None, str | None] = Shared(self.worker, Health(pools).read, GAP_S)
        self.downloads = 0
        self.sockets: set[Socket] = set()
        self._access = access
        self._headers_came = headers_came
        page = {"application_context": self.page, "bokeh_websocket_path": "/ws"}
        self._table: dict[str, tuple[type[RequestHandler], Mapping[str, Any]]] = {
            "/": (Page, page),
            "/ws": (Socket, {**page, "compression_level": None, "mem_level": None}),
            "/metrics": (MetricsPage, {}),
            "/healthz": (HealthPage, {}),
            "/snapshot": (SnapshotFile, {}),
            "/favicon.ico": (IcoHandler, {"app": self}),
        }

    @property
    def page(self) -> ApplicationContext:
        """Bokeh's side of the live page."""
        return self.applications["/"]

    def resources(self, absolute_url: str | bool | None = None) -> Resources:
        """From this server, whatever the environment says: it may be all the network there is."""
        return Resources(
            mode="server", root_url="/", path_versioner=StaticHandler.append_version, components=list(COMPONENTS)
        )

    def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> Any:
        """Every request comes through here, once its headers are there."""
        self._headers_came(getattr(request.connection, "stream", None))
        path = request.path
        static = path.startswith("/static/")
        known = static or path in self._table
        verdict = self._access.judge(request.method or "", path if known else "", request.arguments, request.headers)
        if verdict is None and not known:
            verdict = Verdict(404, "there are /, /metrics, /healthz and /snapshot")
        if verdict is None and path in ("/", "/ws"):
            verdict = self._room(request)
        if verdict is not None:
            return self.get_handler_delegate(request, Answer, {"verdict": verdict})
        if static:
            rest = path.removeprefix("/static/").encode()
            return self.get_handler_delegate(request, Static, {}, [rest])
        if path == "/" and request.method == "HEAD":
            return self.get_handler_delegate(
                request, Answer, {"verdict": Verdict(200, "", {"Content-Type": "text/html"})}
            )
        target, options = self._table[path]
        return self.get_handler_delegate(request, target, dict(options))

    def _room(self, request: HTTPServerRequest) -> Verdict | None:
        """A live page costs memory for as long as it is open."""
        if request.path == "/":
            if len(list(self.page.sessions)) >= PAGES and request.method == "GET":
                return Verdict(503, "too many live pages are open", {"Retry-After": "10"})
            return None
        if len(self.sockets) >= PAGES:
            return Verdict(503, "too many live pages are open", {"Retry-After": "10"})
        if request.headers.get("Upgrade", "").lower() != "websocket":
            return Verdict(400, "this is for the live page's websocket")
        protocols = [part.strip() for part in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        if len(protocols) != 2 or protocols[0] != "bokeh" or not self._signed(protocols[1]):
            return Verdict(403, "the live page has to be loaded again")
        return None

    def _signed(self, token: str) -> bool:
        try:
            return bool(check_token_signature(token, secret_key=self.secret_key, signed=True))
        except (ValueError, KeyError, TypeError):  # not even a token
            return False

    def streams(self) -> list[Any]:
        """The connections that have become websockets."""
        return [socket.ws_connection.stream for socket in self.sockets if socket.ws_connection is not None]

    async def end(self) -> None:
        """Close every live page and let the worker go."""
        self.worker.stop()
        self.stop(wait=False)
        deadline = self.io_loop.time() + GOODBYE_S
        for socket in list(self.sockets):
            socket.drop()
        while self.sockets and self.io_loop.time() < deadline:  # they say goodbye to their sessions
            await asyncio.sleep(0.001)
        for session in list(self.page.sessions):
            with contextlib.suppress(Exception):  # a page's own clean-up must not keep the server
                session.destroy()


def _no_log(handler: RequestHandler) -> None:
    """A stranger's request is no line in the program's log."""


class _Quiet(RequestHandler):
    """Errors in one line, and none of a stranger's making in the program's log."""

    def log_exception(self, kind: Any, value: Any, trace: Any) -> None:
        """Only what is this server's fault."""
        if not isinstance(value, HTTPError):
            super().log_exception(kind, value, trace)

    def write_error(self, status_code: int, **options: Any) -> None:
        """What went wrong inside is in the log."""
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(f"{http.HTTPStatus(status_code).phrase.lower()}\n")


class _Safe(_Quiet):
    """Headers that every answer has."""

    application: App

    def set_default_headers(self) -> None:
        for name, value in _ALWAYS.items():
            self.set_header(name, value)
        self.set_header("Server", "weir")

    def compute_etag(self) -> str | None:
        """None: the next answer is another one."""
        return None

    def say(self, text: str) -> None:
        """Answer with one line."""
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(f"{text}\n")


class Answer(_Safe):
    """A verdict, whatever was asked for."""

    def initialize(self, verdict: Verdict) -> None:
        self._verdict = verdict

    async def prepare(self) -> None:
        verdict = self._verdict
        self.set_status(verdict.status)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        for name, value in verdict.headers.items():
            self.set_header(name, value)
        self.finish(f"{verdict.text}\n" if verdict.text else "")


class MetricsPage(_Safe):
    """`/metrics`."""

    async def get(self) -> None:
        headers = self.request.headers
        form = form_of(headers.get("Accept", ""), headers.get("Accept-Encoding", ""))
        page = await self.application.metrics.get(form)
        self.set_header("Content-Type", form.content_type)
        self.set_header("Vary", "Accept, Accept-Encoding")
        if form.zipped:
            self.set_header("Content-Encoding", "gzip")
        self.finish(page)

    head = get


class HealthPage(_Safe):
    """`/healthz`."""

    async def get(self) -> None:
        try:
            wrong = await asyncio.wait_for(self.application.health.get(None), HEALTH_S)
        except TimeoutError:
            wrong = f"the pools could not be read within {HEALTH_S:.0f} s: a driver call may hang"
        self.set_status(200 if wrong is None else 503)
        self.say("ok" if wrong is None else wrong)

    head = get


class SnapshotFile(_Safe):
    """`/snapshot`, sent no faster than it is taken."""

    async def get(self) -> None:
        application = self.application
        if application.downloads >= DOWNLOADS:
            self.set_status(503)
            self.set_header("Retry-After", "5")
            self.say("too many snapshots are being sent")
            return
        application.downloads += 1
        try:
            content = await application.snapshots.get(self.get_query_argument("pool", None))
            if isinstance(content, Unknown):
                self.set_status(404)
                self.say(str(content))
                return
            self.set_header("Content-Type", "application/octet-stream")
            self.set_header("Content-Disposition", 'attachment; filename="snapshot.pickle"')
            self.set_header("Content-Length", str(len(content)))
            if self.request.method == "GET":
                view = memoryview(content)
                for at in range(0, len(content), PIECE):
                    self.write(bytes(view[at : at + PIECE]))
                    await self.flush()
            self.finish()
        except StreamClosedError:
            pass  # whoever asked has gone
        finally:
            application.downloads -= 1

    head = get


class Page(_Safe, DocHandler):
    """`/`, in Bokeh's hands."""

    application: App

    async def get(self, *args: Any, **kwargs: Any) -> None:
        self.set_header("Content-Security-Policy", self.application.policy)
        answer = super().get(*args, **kwargs)
        if answer is not None:
            await answer


class Static(_Quiet, StaticHandler):
    """Bokeh's scripts.  They may be kept: their addresses change with their content."""

    def set_extra_headers(self, path: str) -> None:
        for name in ("X-Content-Type-Options", "Cross-Origin-Resource-Policy", "Referrer-Policy"):
            self.set_header(name, _ALWAYS[name])


class Socket(_Quiet, WSHandler):
    """`/ws`: counted, so that the number of live pages is bounded."""

    application: App

    def open(self) -> None:
        self.application.sockets.add(self)
        super().open()

    async def send_message(self, message: Any) -> None:
        """Without a word in the log where the page has just been closed."""
        with contextlib.suppress(WebSocketClosedError):
            await message.send(self)

    def drop(self) -> None:
        """Close at once, without waiting for the other side's goodbye."""
        if self.ws_connection is not None:
            self.ws_connection._abort()

    def on_close(self) -> None:
        self.application.sockets.discard(self)
        super().on_close()

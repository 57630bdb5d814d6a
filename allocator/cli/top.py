"""`weir top`: a server's pools in a terminal, refreshed in place.

It reads `/metrics` like any scraper.  curses draws it: it is in the standard library, so that this works wherever the
pool does, with no extra to install; it knows terminals, and what to do when one changes its size.

Rule: a thread of its own asks the server, so that keys are answered at once however slow the server is.  What is shown
is a list of lines (top_view.py), the same for a terminal and for `--once`.
Next: top_view.py.
"""

from __future__ import annotations

import argparse
import contextlib
import locale
import os
import selectors
import shutil
import signal
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any, Final

from allocator.cli.status import OK, USAGE
from allocator.cli.top_view import Keys, Line, Reading, Screen, plain, read_metrics

DEFAULT: Final = "http://127.0.0.1:9478"
TIMEOUT_S: Final = 5.0
LARGEST: Final = 16 << 20
"""Bytes of an answer; a metrics page has tens of thousands."""
HANGUP: Final = 128 + signal.SIGHUP

_DESCRIPTION: Final = """\
Watch the pools of a running program in the terminal: what is reserved, allocated, in
flight and idle, by stream, and what reuse across streams saves.

URL is where the program serves its metrics: weir serve, or allocator.metrics.serve(pool).
"""
_EPILOG: Final = f"""\
keys: q quits, up and down choose a pool

examples:
  weir top                              {DEFAULT}
  weir top http://gpu7:9478 --interval 5
  weir top --once | grep reserved       one frame, as plain text

exit status:
  0  all went well
  2  wrong usage; with --once, also a server that cannot be read
"""


def add_to(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "top",
        help="watch the pools of a running program in the terminal",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", nargs="?", default=DEFAULT, type=_url, metavar="URL", help=f"default: {DEFAULT}")
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="S", help="seconds between two looks (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print one frame as plain text, and end")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the pools until told to stop; returns the exit status."""
    if arguments.once:
        reading = fetch(arguments.url)
        width = shutil.get_terminal_size((100, 0)).columns
        simple = not (sys.stdout.encoding or "").lower().startswith("utf")
        frame = Screen(arguments.url, ascii_only=simple).frame(reading, None, width, 0)
        text = "\n".join(plain(line) for line in frame)
        print(text.encode(sys.stdout.encoding or "ascii", "replace").decode(sys.stdout.encoding or "ascii"))
        return OK
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("weir: top needs a terminal; --once prints one frame as text", file=sys.stderr)
        return USAGE
    return _in_terminal(arguments.url, arguments.interval)


# -- asking ------------------------------------------------------------------------------------------


def fetch(url: str) -> Reading:
    """Read the server once.  Raises OSError with one line that says what is wrong."""
    handlers = [urllib.request.ProxyHandler({})] if _is_local(url) else []
    request = urllib.request.Request(url, headers={"Accept": "text/plain;version=0.0.4"})
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT_S) as answer:
            body: bytes = answer.read(LARGEST + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise OSError(f"{url} answers {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise OSError(f"{url} cannot be reached: {_why(error.reason)}") from None
    except (OSError, ValueError) as error:  # a connection that breaks, an answer that is no HTTP
        raise OSError(f"{url} cannot be read: {_why(error)}") from None
    except Exception as error:  # http.client's own errors are no OSErrors
        raise OSError(f"{url} does not answer as a web server does: {_why(error)}") from None
    if len(body) > LARGEST:
        raise OSError(f"{url} answers with more than {LARGEST >> 20} MiB: this is no metrics page")
    try:
        return read_metrics(body.decode())
    except ValueError:
        raise OSError(f"{url} is no metrics page") from None


def _why(error: object) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:80]


def _is_local(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


class Poller:
    """The thread that asks.  Whoever shows takes the newest answer, and is woken through `wake`, a file descriptor."""

    def __init__(self, url: str, interval: float) -> None:
        self._url = url
        self._interval = interval
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._reading: Reading | None = None
        self._error: str | None = None
        self.wake, self._write = os.pipe()
        os.set_blocking(self._write, False)
        os.set_blocking(self.wake, False)
        self._thread = threading.Thread(target=self._run, name="weir-top", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> tuple[Reading | None, str | None]:
        """The newest reading, and why there is no newer one; None where there is."""
        with self._lock:
            return self._reading, self._error

    def nudge(self) -> None:
        """Wake whoever shows."""
        with contextlib.suppress(OSError):  # full: it will wake anyway
            os.write(self._write, b".")

    def close(self) -> None:
        """No more questions.  The thread ends by itself, within the time an answer may take."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                reading, problem = fetch(self._url), None
            except OSError as error:
                reading, problem = None, str(error)
            with self._lock:
                self._reading, self._error = reading or self._reading, problem
            self.nudge()
            self._stop.wait(self._interval)


# -- the terminal -------------------------------------------------------------------------------------


class _HangupError(Exception):
    """The terminal has gone."""


@contextlib.contextmanager
def _signals(poller: Poller) -> Iterator[None]:
    def gone(number: int, frame: object) -> None:
        raise _HangupError

    before = {
        signal.SIGHUP: signal.signal(signal.SIGHUP, gone),
        signal.SIGTERM: signal.signal(signal.SIGTERM, gone),
        signal.SIGWINCH: signal.signal(signal.SIGWINCH, lambda number, frame: poller.nudge()),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_terminal(url: str, interval: float) -> int:
    import curses

    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_CTYPE, "")  # curses writes in the terminal's encoding
    try:
        curses.setupterm()
    except curses.error:
        print(f"weir: TERM={os.environ.get('TERM', '')!r} is no terminal that is known; use --once", file=sys.stderr)
        return USAGE
    poller = Poller(url, interval)
    try:
        with _signals(poller):
            window = curses.initscr()
            try:
                return _loop(
                    window,
                    Screen(url, color=_colors(), ascii_only=not window.encoding.lower().startswith("utf")),
                    poller,
                )
            finally:
                with contextlib.suppress(curses.error, OSError):
                    curses.nocbreak()
                    curses.echo()
                    curses.endwin()
    except KeyboardInterrupt:
        return OK
    except _HangupError:
        return HANGUP
    finally:
        poller.close()


def _colors() -> bool:
    import curses

    if os.environ.get("NO_COLOR"):
        return False
    with contextlib.suppress(curses.error):
        curses.start_color()
        if curses.has_colors():
            curses.use_default_colors()
            for number in range(1, 8):
                curses.init_pair(number, number, -1)
            return True
    return False


def _loop(window: Any, screen: Screen, poller: Poller) -> int:
    import curses

    curses.noecho()
    curses.cbreak()
    with contextlib.suppress(curses.error):
        curses.curs_set(0)
    keys = Keys()
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        selector.register(poller.wake, selectors.EVENT_READ)
        while True:
            _draw(window, screen, poller)
            for ready, _ in selector.select():
                if ready.fd == poller.wake:
                    os.read(poller.wake, 4096)
                    continue
                try:
                    typed = os.read(ready.fd, 64)
                except OSError:
                    raise _HangupError from None
                if not typed:
                    raise _HangupError
                for key in keys.feed(typed):
                    if key == "quit":
                        return OK
                    screen.move(1 if key == "down" else -1)


def _draw(window: Any, screen: Screen, poller: Poller) -> None:
    import curses

    try:
        width, height = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        raise _HangupError from None
    if (height, width) != window.getmaxyx() and height > 0 and width > 0:
        curses.resizeterm(height, width)
        window.clear()
    reading, problem = poller.newest
    window.erase()
    for row, line in enumerate(screen.frame(reading, problem, width, height)[:height]):
        _draw_line(window, row, line, width, screen.color)
    window.refresh()


def _draw_line(window: Any, row: int, line: Line, width: int, color: bool) -> None:
    import curses

    column = 0
    for text, style in line:
        attribute = curses.A_BOLD if "bold" in style else curses.A_DIM if "dim" in style else curses.A_NORMAL
        if color:
            for number, name in enumerate(("red", "green", "yellow", "blue", "magenta", "cyan"), 1):
                if name in style:
                    attribute |= curses.color_pair(number)
        with contextlib.suppress(curses.error):  # the last cell of a terminal cannot be written without an error
            window.addnstr(row, column, text, max(0, width - column), attribute)
        column += len(text)


def _url(text: str) -> str:
    """The address of the metrics page."""
    parts = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or any(letter.isspace() for letter in text):
        raise argparse.ArgumentTypeError(f"{text!r} is no address of a server; {DEFAULT} is one")
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith("/metrics") else f"{path}/metrics", fragment="").geturl()


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is no sensible interval: 0.1 to 3600 seconds")
    return seconds

"""`weir top`: what it shows, in a real terminal too, and how it ends."""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyte
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.cli import main, top
from allocator.cli.top_view import Keys, Reading, Screen, clip, fit, plain, printable, read_metrics
from allocator.metrics import AllocatorCollector

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
COMMAND = [sys.executable, "-c", "import sys; from allocator.cli import main; sys.exit(main())", "top"]


class Server:
    """A web server that answers with `page`, or as told."""

    def __init__(self) -> None:
        self.page = b""
        self.status = 200
        self.asked = threading.Condition()
        self.count = 0
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(owner.status)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(owner.page)
                with owner.asked:
                    owner.count += 1
                    owner.asked.notify_all()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def pools() -> Iterator[list[CachingAllocator]]:
    gpu = SimDevice(memory=8 << 30)
    pools = [CachingAllocator(gpu, config=Config(), name=name) for name in ("train", "serve")]
    yield pools
    for pool in pools:
        pool.close()


def page_of(*pools: CachingAllocator, per_stream: bool = True) -> bytes:
    registry = CollectorRegistry()
    registry.register(AllocatorCollector(*pools, per_stream=per_stream))
    return generate_latest(registry)


@pytest.fixture
def page(pools: list[CachingAllocator]) -> Iterator[bytes]:
    """Two pools with all kinds of memory."""
    gpu = pools[0].device
    assert isinstance(gpu, SimDevice)
    copy, other = Stream(gpu, name="copy"), Stream(gpu, name="compute")
    kept = [pools[0].allocate(96 * MIB, stream=copy), pools[0].allocate(32 * MIB, stream=other)]
    flying = pools[0].allocate(64 * MIB, stream=copy)
    gpu.launch(copy, duration_ns=10**9, writes=[flying])
    flying.close()
    pools[0].set_limit(512 * MIB)
    pools[1].allocate(MIB).close()
    yield page_of(*pools)
    del kept


# -- the picture ------------------------------------------------------------------------------------


def text_of(
    screen: Screen, reading: Reading | None, problem: str | None = None, width: int = 80, height: int = 0
) -> str:
    return "\n".join(plain(line) for line in screen.frame(reading, problem, width, height))


def test_a_frame_shows_totals_bar_reuse_and_streams(page: bytes) -> None:
    screen = Screen("http://here/metrics")
    screen.move(1)
    text = text_of(screen, read_metrics(page.decode()))
    assert "train on sim:0" in text
    assert "reserved 192 MiB of the limit, 512 MiB (38%)" in text
    assert "allocated 128 MiB" in text and "in flight 64.00 MiB" in text and "idle 0 B" in text
    bar = next(line for line in text.splitlines() if line.startswith("["))
    assert len(bar) == 80
    assert (bar.count("█"), bar.count("▓")) == (round(78 * 128 / 512), round(78 * 192 / 512) - round(78 * 128 / 512))
    assert "new memory                     -               3   100.0%" in text
    copy = next(line for line in text.splitlines() if line.startswith("copy"))
    assert copy.split() == ["copy", "96.00", "MiB", "64.00", "MiB", "0", "B"]


def test_rates_are_between_two_readings(pools: list[CachingAllocator]) -> None:
    screen = Screen("here")
    first = read_metrics(page_of(pools[0]).decode())
    text_of(screen, first)
    for _ in range(20):
        pools[0].allocate(MIB).close()
    later = read_metrics(page_of(pools[0]).decode())
    second = Reading(later.pools, at=first.at + 2)
    rows = {line[:20].strip(): line.split() for line in text_of(screen, second).splitlines()}
    assert rows["same stream"][2] == "10" and rows["new memory"][2] == "0"
    restarted = Reading(first.pools, at=second.at + 1)
    rows = {line[:20].strip(): line.split() for line in text_of(screen, restarted).splitlines()}
    assert rows["same stream"][2] == "-", "a counter that began anew has no rate"


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (20, 3), (200, 60), (3, 1)])
def test_a_frame_is_never_larger_than_its_terminal(page: bytes, size: tuple[int, int]) -> None:
    width, height = size
    lines = Screen("http://here/metrics").frame(read_metrics(page.decode()), None, width, height)
    assert len(lines) <= height
    assert all(len(plain(line)) <= max(width, 20) for line in lines)


def test_everything_important_fits_into_80_by_24(page: bytes) -> None:
    text = text_of(Screen("http://127.0.0.1:9478/metrics"), read_metrics(page.decode()), width=80, height=24)
    for wanted in ("reserved", "could be given back", "same stream", "new memory", "stream  ", "a second:"):
        assert wanted in text, wanted


def test_a_pool_is_chosen_up_and_down(page: bytes) -> None:
    screen = Screen("here")
    reading = read_metrics(page.decode())
    assert "> serve on sim:0" in text_of(screen, reading)
    screen.move(1)
    assert "> train on sim:0" in text_of(screen, reading)
    screen.move(5)
    assert "> train on sim:0" in text_of(screen, reading)
    screen.move(-9)
    assert "> serve on sim:0" in text_of(screen, reading)


def test_many_pools_and_streams_leave_room_for_the_rest() -> None:
    gpu = SimDevice(memory=8 << 30)
    many = [CachingAllocator(gpu, config=Config(), name=f"pool{n:02}") for n in range(20)]
    streams = [Stream(gpu, name=f"s{n}") for n in range(30)]
    kept = [many[0].allocate(MIB, stream=stream) for stream in streams]
    text = text_of(Screen("here"), read_metrics(page_of(*many).decode()), height=40)
    assert "1 of 20 pools" in text
    assert " more" in text.splitlines()[-1]
    assert len(text.splitlines()) <= 40
    del kept
    for pool in many:
        pool.close()


def test_trouble_is_told() -> None:
    gpu = SimDevice(memory=8 * MIB)
    with CachingAllocator(gpu, config=Config(), name="small") as pool:
        kept = pool.allocate(6 * MIB)
        with pytest.raises(MemoryError):
            pool.allocate(6 * MIB)
        text = text_of(Screen("here"), read_metrics(page_of(pool, per_stream=False).decode()))
        del kept
    assert "1 out-of-memory errors raised" in text
    assert "no figures by stream" in text


def test_a_server_that_is_away_is_told_with_the_last_figures(page: bytes) -> None:
    screen = Screen("here")
    assert "asking" in text_of(screen, None)
    assert "still trying: refused" in text_of(screen, None, "refused")
    both = text_of(screen, read_metrics(page.decode()), "refused")
    assert "old figures: refused" in both and "reserved" in both
    assert "no pools there yet" in text_of(screen, Reading({}))


def test_names_cannot_command_the_terminal() -> None:
    reading = read_metrics('weir_idle_bytes{pool="a\x1b[2Jb",device="0"} 512\nweir_streams{pool="漢字",device="0"} 1\n')
    text = text_of(Screen("here"), reading)
    assert "\x1b" not in text and "a?[2Jb on 0" in text and "漢字" in text
    assert printable("ok") == "ok"
    assert fit("漢字漢", 5) == "漢字 "
    assert plain(clip([("漢字", "bold"), ("abc", "")], 5)) == "漢字a"


def test_plain_ascii_where_the_terminal_knows_no_more(page: bytes) -> None:
    screen = Screen("here", ascii_only=True)
    screen.move(1)
    text = text_of(screen, read_metrics(page.decode()))
    assert text.isascii() and "####" in text and "====" in text


def test_keys_come_in_pieces() -> None:
    keys = Keys()
    assert keys.feed(b"\x1b") == []
    assert keys.feed(b"[B\x1b[A") == ["down", "up"]
    assert keys.feed(b"xyz\x1b[5~q") == ["quit"]


# -- the command ------------------------------------------------------------------------------------


def test_once_prints_one_frame_as_text(server: Server, page: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    server.page = page
    assert main(["top", server.url, "--once"]) == 0
    out = capsys.readouterr().out
    assert "serve on sim:0" in out and "\x1b" not in out


@pytest.mark.parametrize(
    ("status", "page", "said"),
    [
        (404, b"", "answers 404"),
        (200, b"<html><body>hello</body></html>", "is no metrics page"),
        (200, b"\xff\xfe", "is no metrics page"),
    ],
)
def test_once_says_in_one_line_why_a_server_cannot_be_read(
    status: int, page: bytes, said: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status, server.page = status, page
    assert main(["top", server.url, "--once"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_an_answer_without_end_is_not_read_to_its_end(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "LARGEST", 1000)
    server.page = b"x" * 5000
    assert main(["top", server.url, "--once"]) == 2
    assert "this is no metrics page" in capsys.readouterr().err


def test_a_server_that_is_away_or_no_web_server_is_one_line(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # never asked for what is on this machine
    assert main(["top", "http://127.0.0.1:9", "--once"]) == 2
    assert "cannot be reached" in capsys.readouterr().err

    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-x\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert main(["top", f"127.0.0.1:{listener.getsockname()[1]}", "--once"]) == 2
        thread.join()
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "argv", [["ftp://x"], ["http://"], ["a b"], ["http://x:99999"], ["--interval", "0"], ["--interval", "x"]]
)
def test_wrong_arguments_are_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *argv]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("http://h:1", "http://h:1/metrics"),
        ("h:1", "http://h:1/metrics"),
        ("http://h/metrics/", "http://h/metrics"),
        ("https://h/gpu?x=1#y", "https://h/gpu/metrics?x=1"),
    ],
)
def test_the_metrics_page_is_found(given: str, asked: str) -> None:
    assert top._url(given) == asked


def test_without_a_terminal_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 2
    assert "--once" in capsys.readouterr().err


# -- in a real terminal -----------------------------------------------------------------------------


class Terminal:
    """The command in a pseudo terminal, with an emulator that reads what it writes."""

    def __init__(self, *argv: str, width: int = 80, height: int = 24, **environment: str) -> None:
        self.master, slave = pty.openpty()
        self.screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._size(slave, width, height)
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        env |= {"PYTHONPATH": path, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"} | environment
        self.process = subprocess.Popen(
            [*COMMAND, *argv], stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True, close_fds=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
        )  # fmt: skip
        os.close(slave)

    def _size(self, fd: int, width: int, height: int) -> None:
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def resize(self, width: int, height: int) -> None:
        self.screen.resize(height, width)
        self._size(self.master, width, height)

    def send(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def read(self, timeout: float = 1.0) -> bool:
        """Take what was written; False at the end."""
        if select.select([self.master], [], [], timeout)[0]:
            try:
                data = os.read(self.master, 65536)
            except OSError:
                return False
            self.raw += data
            self._stream.feed(data)
            return bool(data)
        return True

    def until(self, condition: Callable[[str], bool]) -> str:
        deadline = time.monotonic() + 60
        while not condition(text := "\n".join(self.screen.display)):
            assert time.monotonic() < deadline and self.read(), f"not seen in:\n{text}"
        return text

    def end(self) -> int:
        while self.read(5) and self.process.poll() is None:
            pass
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self.master)


@pytest.fixture
def terminals() -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(*argv: str, **options: Any) -> Terminal:
        made.append(Terminal(*argv, **options))
        return made[-1]

    yield make
    for terminal in made:
        terminal.close()


def test_it_shows_follows_resizes_and_quits_with_q(
    server: Server, page: bytes, pools: list[CachingAllocator], terminals: Callable[..., Terminal]
) -> None:
    server.page = page
    terminal = terminals(server.url, "--interval", "0.1")
    text = terminal.until(lambda text: "serve on sim:0" in text and "same stream" in text)
    assert len(text.splitlines()) == 24
    assert b"\x1b[3" in terminal.raw, "colours, on a terminal"
    terminal.send(b"\x1b[B")
    terminal.until(lambda text: "> train on sim:0" in text)
    held = pools[0].allocate(128 * MIB)
    server.page = page_of(*pools)
    terminal.until(lambda text: "256 MiB" in text)
    terminal.resize(120, 40)
    terminal.until(lambda text: any(len(line.rstrip()) == 120 for line in text.splitlines()))
    terminal.send(b"q")
    assert terminal.end() == 0
    assert b"Traceback" not in terminal.raw
    del held


def test_ctrl_c_ends_it_cleanly(server: Server, page: bytes, terminals: Callable[..., Terminal]) -> None:
    server.page = page
    terminal = terminals(server.url)
    terminal.until(lambda text: "reserved" in text)
    terminal.send(b"\x03")
    assert terminal.end() == 0
    assert b"Traceback" not in terminal.raw


def test_no_color_is_honoured(server: Server, page: bytes, terminals: Callable[..., Terminal]) -> None:
    server.page = page
    terminal = terminals(server.url, NO_COLOR="1")
    terminal.until(lambda text: "reserved" in text)
    assert b"\x1b[31m" not in terminal.raw and b"\x1b[34m" not in terminal.raw and b"\x1b[32m" not in terminal.raw
    terminal.send(b"q")
    assert terminal.end() == 0


def test_a_server_that_goes_and_comes_back_is_waited_for(
    server: Server, page: bytes, terminals: Callable[..., Terminal]
) -> None:
    server.page = page
    terminal = terminals(server.url, "--interval", "0.1")
    terminal.until(lambda text: "reserved" in text)
    server.status = 503
    terminal.until(lambda text: "answers 503" in text and "old figures" in text)
    server.status = 200
    terminal.until(lambda text: "503" not in text and "reserved" in text)
    terminal.send(b"q")
    assert terminal.end() == 0


@pytest.mark.parametrize("how", [signal.SIGHUP, signal.SIGTERM, "hang up"])
def test_a_terminal_that_goes_ends_it(
    how: Any, server: Server, page: bytes, terminals: Callable[..., Terminal]
) -> None:
    server.page = page
    terminal = terminals(server.url)
    terminal.until(lambda text: "reserved" in text)
    if how == "hang up":
        os.close(terminal.master)
    else:
        terminal.process.send_signal(how)
    assert terminal.process.wait(60) == top.HANGUP


class Window:
    """What a curses window is asked for, and the text that it shows."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.size = (5, 10)
        self.rows: dict[int, str] = {}
        self.attributes: set[int] = set()

    def getmaxyx(self) -> tuple[int, int]:
        return self.size

    def erase(self) -> None:
        self.rows.clear()

    def clear(self) -> None:
        pass

    refresh = clear

    def addnstr(self, row: int, column: int, text: str, most: int, attribute: int) -> None:
        self.rows[row] = self.rows.get(row, "").ljust(column) + text[:most]
        self.attributes.add(attribute)
        if row == 23:
            raise FakeCurses.error


class FakeCurses:
    """Enough of curses to run the loop in this process."""

    class error(Exception):
        pass

    A_BOLD, A_DIM, A_NORMAL = 1 << 20, 1 << 21, 0

    def __init__(self, window: Window, *, colors: bool = True) -> None:
        self.window = window
        self.colors = colors
        self.called: list[str] = []

    def initscr(self) -> Window:
        return self.window

    def has_colors(self) -> bool:
        return self.colors

    def resizeterm(self, height: int, width: int) -> None:
        self.window.size = (height, width)

    def color_pair(self, number: int) -> int:
        return number << 8

    def curs_set(self, how: int) -> None:
        raise self.error

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.called.append(name)


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, Callable[..., FakeCurses]]]:
    """(the terminal's other end, what makes a curses): standard input and output are a terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    monkeypatch.delenv("NO_COLOR", raising=False)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGWINCH)}
    with open(slave, closefd=False) as stdin, open(slave, "w", closefd=False) as stdout:

        def make(**options: Any) -> FakeCurses:
            # In the test itself: what pytest captures by it puts in place after the fixtures.
            monkeypatch.setattr(sys, "stdin", stdin)
            monkeypatch.setattr(sys, "stdout", stdout)
            fake = FakeCurses(Window(), **options)
            monkeypatch.setitem(sys.modules, "curses", fake)
            return fake

        yield master, make
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    for fd in (master, slave):
        with contextlib.suppress(OSError):
            os.close(fd)


def asked_twice(server: Server, then: Callable[[], object]) -> threading.Thread:
    """Do something once the server has been asked again, and so has been shown."""

    def wait() -> None:
        with server.asked:
            assert server.asked.wait_for(lambda: server.count >= 2, timeout=60)
        then()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_the_loop_draws_what_was_read_and_ends_with_a_key(
    server: Server, page: bytes, inside: tuple[int, Callable[..., FakeCurses]]
) -> None:
    server.page = page
    master, make = inside
    fake = make()
    thread = asked_twice(server, lambda: os.write(master, b"jkq\n"))
    assert main(["top", server.url, "--interval", "0.1"]) == 0
    thread.join()
    assert fake.window.size == (24, 80)
    assert "weir top" in fake.window.rows[0]
    assert "endwin" in fake.called
    assert any(attribute & 0xFF00 for attribute in fake.window.attributes)


def test_without_colours_there_are_none(
    server: Server, page: bytes, inside: tuple[int, Callable[..., FakeCurses]]
) -> None:
    server.page = page
    master, make = inside
    fake = make(colors=False)
    thread = asked_twice(server, lambda: os.write(master, b"q\n"))
    assert main(["top", server.url, "--interval", "0.1"]) == 0
    thread.join()
    assert not any(attribute & 0xFF00 for attribute in fake.window.attributes)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_signals_end_the_loop_and_leave_the_terminal_as_it_was(
    number: signal.Signals, server: Server, page: bytes, inside: tuple[int, Callable[..., FakeCurses]]
) -> None:
    server.page = page
    fake = inside[1]()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread = asked_twice(server, lambda: signal.pthread_kill(threading.main_thread().ident or 0, number))
        status = main(["top", server.url, "--interval", "0.1"])
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert status == (0 if number == signal.SIGINT else top.HANGUP)
    assert "endwin" in fake.called


def test_the_end_of_the_input_ends_the_loop(
    server: Server, page: bytes, inside: tuple[int, Callable[..., FakeCurses]]
) -> None:
    server.page = page
    fake = inside[1]()
    thread = asked_twice(server, lambda: os.close(inside[0]))
    assert main(["top", server.url, "--interval", "0.1"]) == top.HANGUP
    thread.join()
    assert "endwin" in fake.called


def test_an_unknown_terminal_is_one_line(server: Server, terminals: Callable[..., Terminal]) -> None:
    terminal = terminals(server.url, TERM="no-such-terminal")
    assert terminal.end() == 2
    while terminal.read(0.2) and b"--once" not in terminal.raw:
        pass
    assert b"is no terminal that is known; use --once" in terminal.raw

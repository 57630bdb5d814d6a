"""`weir serve`: a simulated pool under a trace, to be looked at.

Rule: what a program gets from `allocator.metrics.serve` is what is served here; only the pool is simulated.
Next: allocator/traces/live.py (the replay), allocator/metrics/server/ (the server).
"""

from __future__ import annotations

import argparse
import importlib.resources
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from allocator import CachingAllocator, metrics
from allocator.cli.options import size, speed
from allocator.cli.status import OK, USAGE
from allocator.config import Config
from allocator.devices import SimDevice
from allocator.errors import AllocatorError
from allocator.traces import LiveReplay, Meter, Summary, Trace, read_trace, summarize

SAMPLE: Final = "serve-8-streams.csv.gz"
PORT: Final = 9478
LEAST_MEMORY: Final = 8 << 30
LOOK_S: Final = 1.0

_DESCRIPTION: Final = """\
Play recorded memory traffic on a simulated GPU, in real time, and serve what a program
would with allocator.metrics.serve(pool): the live page, Prometheus metrics, health, and
a snapshot for PyTorch's memory viewer. Needs no GPU. Ctrl-C ends it.
"""

_EPILOG: Final = """\
examples:
  weir serve --loop                          the sample, again and again
  weir serve --trace run.csv.gz --speed 0.1  a tenth as fast, to see more
  weir serve --loop --limit 512MiB           how it goes with less memory
  weir serve --addr 0.0.0.0 --token-file t   for other machines; t holds the token

sizes are digits, with KiB, MiB, GiB or TiB if you like: 512MiB
Without --loop the trace is played once; then its pool stays, to be looked at.

exit status:
  0  ended by Ctrl-C or SIGTERM
  2  wrong usage, a trace that cannot be read, or a port that cannot be had
"""


def add_to(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="serve metrics and a live page of a simulated pool under a trace",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--port", type=_port, default=PORT, metavar="N", help=f"0: any free one (default: {PORT})")
    parser.add_argument(
        "--addr", default="127.0.0.1", help="the address to listen on; others than loopback need a token"
    )
    token = parser.add_mutually_exclusive_group()
    token.add_argument("--token", help="what the live page and the snapshot ask for; other users can see it in ps")
    token.add_argument("--token-file", metavar="FILE", help="the same, from a file's first line")
    parser.add_argument("--trace", metavar="TRACE", help="any layout that weir replay reads (default: the sample)")
    parser.add_argument("--loop", action="store_true", help="play it again and again")
    parser.add_argument(
        "--speed", type=speed, default=1.0, metavar="FACTOR", help="how many times faster time goes (default: 1.0)"
    )
    parser.add_argument(
        "--limit", type=size, default=0, metavar="SIZE", help="most memory to reserve (default: no limit)"
    )
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="memory of the simulated GPU (default: enough for the trace)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status."""
    token = arguments.token if arguments.token_file is None else _read_token(arguments.token_file)
    with ExitStack() as stack:
        trace, summary = _read(arguments.trace, stack)
        gpu = SimDevice(memory=arguments.memory or enough_for(summary))
        config = replace(Config.from_env(device_memory=gpu.total_memory), limit=arguments.limit)
        name = Path(trace.path).name.partition(".")[0]
        pool = stack.enter_context(CachingAllocator(gpu, config=config, name=name))
        stop = stack.enter_context(stopped_by_signals())
        try:
            server = stack.enter_context(metrics.serve(pool, arguments.port, arguments.addr, token))
        except OSError as error:
            raise AllocatorError(error.strerror or str(error)) from None
        replay = LiveReplay(trace, pool, speed=arguments.speed, loop=arguments.loop, summary=summary)
        stack.enter_context(replay)
        print(_welcome(server.url, trace, token=token is not None), file=sys.stderr, flush=True)
        told = False
        while not stop.wait(LOOK_S):
            if replay.error is not None:
                print(f"weir: {trace.path}: {' '.join(str(replay.error).split())}", file=sys.stderr)
                return USAGE
            if not told and not replay.running:
                told = True
                print("weir: the trace has been played; --loop would play it again. Ctrl-C ends", file=sys.stderr)
    return OK


def enough_for(summary: Summary) -> int:
    """Bytes of a GPU on which the trace fits well: a power of two, at least 8 GiB."""
    return max(LEAST_MEMORY, 1 << (2 * summary.peak_live_bytes).bit_length())


def _read(path: str | None, stack: ExitStack) -> tuple[Trace, Summary]:
    if path is None:
        sample = importlib.resources.files("allocator.traces") / "samples" / SAMPLE
        path = str(stack.enter_context(importlib.resources.as_file(sample)))
    trace = read_trace(path)
    for note in trace.notes:
        print(f"weir: {path}: {note}", file=sys.stderr)
    with Meter(f"reading {path}") as meter:
        return trace, summarize(trace, meter.share)


def _welcome(url: str, trace: Trace, *, token: bool) -> str:
    first = url + ("?token=TOKEN" if token else "")
    return (
        f"weir: playing {Path(trace.path).name} on a simulated GPU; Ctrl-C ends\n"
        f"  live page  {first}\n"
        f"  metrics    {url}metrics\n"
        f"  health     {url}healthz\n"
        f"  snapshot   {url}snapshot"
    )


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, instead of what they do otherwise."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read_token(path: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise AllocatorError(f"{path}: the token cannot be read: {reason}") from None
    if not lines or not lines[0].strip():
        raise AllocatorError(f"{path}: there is no token in its first line")
    return lines[0].strip()


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) < 1 << 16:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port; ports are 0 to 65535")

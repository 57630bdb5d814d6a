"""The command `weir`: one module a command, and what they share.

Rule: results on stdout, progress and messages on stderr; a mistake is one line, never a traceback.
Exit status: 0; 1 race, leak or mismatch; 2 usage or unreadable input; 3 an allocation failed.

Next: replay.py.
"""

from __future__ import annotations

import _thread
import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from threading import main_thread
from typing import Final, NoReturn

from allocator.cli import bench, dashboard, doctor, replay, run, serve, stress, top
from allocator.cli.status import USAGE
from allocator.errors import AllocatorError

_COMMANDS: Final = (replay, run, serve, top, stress, bench, dashboard, doctor)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and how to learn more."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def version() -> str:
    """The installed version, or "unknown" in a checkout that was never installed."""
    try:
        return metadata.version("weir-allocator")
    except metadata.PackageNotFoundError:
        return "unknown"


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = _Parser(
        prog="weir",
        description="One GPU memory pool for every library in the process, and tools around it.",
        epilog="Each command explains itself: weir replay --help",
    )
    top.add_argument("--version", action="version", version=f"weir {version()}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for command in _COMMANDS:
        command.add_to(commands)
    return top


@contextmanager
def ctrl_c_is_heard() -> Iterator[None]:
    """Ctrl-C that comes in a finaliser, where Python prints and drops it, comes once more when that is over."""
    others = sys.unraisablehook

    def again() -> None:
        time.sleep(0.01)
        signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)  # so that it ends a wait as well

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(again, ())
        else:
            others(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = others


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status.  `argv` is without the program's name."""
    try:
        arguments = parser().parse_args(argv)
    except SystemExit as stop:  # --help, --version and usage
        return stop.code if isinstance(stop.code, int) else USAGE
    try:
        with ctrl_c_is_heard():
            status = int(arguments.run(arguments))
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read our output has gone.  Nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("weir: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except (AllocatorError, ValueError, OSError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"weir: {text}", file=sys.stderr)
        return USAGE

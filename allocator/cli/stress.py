"""`weir stress`: real threads that try to break a pool.

Rule: every run ends with one verdict, however it ends; what is wrong can be played again.
Next: stress/hammer.py (what a run is), stress/workloads.py (what the threads do).
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from allocator.cli.options import size
from allocator.cli.soak import Soak
from allocator.cli.status import MISMATCH, OK, USAGE
from allocator.stress import (
    SHARE,
    WORKLOADS,
    Hammer,
    Outcome,
    Plan,
    Progress,
    Recording,
    Setting,
    Target,
    figures,
    open_target,
    play,
    play_threaded,
    read_recording,
    shrink,
    table,
    verdict,
)

SHOWN: Final = 40
"""Operations printed of a failing program; the file has all."""

_DESCRIPTION: Final = """\
Try to break the pool: threads allocate, use and free memory on shared streams as fast as
they can, under seeded workloads, round after round. On the simulated GPU every reuse of
memory is checked for races; on a real one (--device 0) blocks are filled, and compared
before they are freed. Each round ends with everything freed, waited for and given back.

When something is wrong, the seed and the shortest failing program that was found are
printed, and written to a file that --replay plays again.

With --soak also what only long runs show is looked for: driver events, threads or memory
of the process that keep growing. Samples are taken while it runs, for a file and a picture.
"""

_EPILOG: Final = """\
workloads:
{workloads}

examples:
  weir stress                                    10 seconds of everything, simulated
  weir stress --device 0 --seconds 1200 --threads 8 --streams 16
  weir stress --workload churn --workload garbage --seed 7
  weir stress --limit 64MiB --workload near-limit
  weir stress --json | jq .latency_us.allocate
  weir stress --replay weir-stress-7.txt         play again what went wrong
  weir stress --soak --seconds 3600 --plot soak.svg --samples soak.csv
  WEIR_CANARY=1 weir stress                      with settings: every WEIR_* variable counts
  locust -f "$(weir stress --locustfile)"        the same from locust, with its web page

sizes are digits, with KiB, MiB, GiB or TiB if you like: 512MiB
Ctrl-C ends a run early, with its checks and its table; a second one at once, without.

exit status:
  0  nothing wrong
  1  a race, a corruption, a leak, growth, a failed check, or an error that should not be
  2  wrong usage, or a file of a soak that could not be written to its end
"""


def add_to(commands: Any) -> None:
    """Add this command to the parser."""
    width = max(map(len, WORKLOADS))
    listed = "\n".join(f"  {one.name:{width}}  {one.about}" for one in WORKLOADS.values())
    parser = commands.add_parser(
        "stress",
        help="try to break the pool, with real threads",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(workloads=listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", default="sim", type=_device, metavar="sim|N", help="sim, or the number of a GPU (default: sim)"
    )
    parser.add_argument("--seconds", type=_seconds, default=10.0, metavar="N", help="how long (default: 10)")
    parser.add_argument("--threads", type=_between(1, 256), default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--streams", type=_between(1, 512), default=8, metavar="N", help="shared ones (default: 8)")
    parser.add_argument("--seed", type=_between(0, 1 << 62), metavar="N", help="(default: a new one each time)")
    parser.add_argument(
        "--limit", type=size, metavar="SIZE", help="most memory to reserve (default: 64MiB for each thread)"
    )
    parser.add_argument(
        "--workload", action="append", choices=WORKLOADS, metavar="NAME", help="may be repeated (default: all)"
    )
    parser.add_argument(
        "--operations", type=_between(1, 1 << 24), default=2000, metavar="N",
        help="of each thread in a round (default: 2000)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--save", metavar="FILE", help="where a failing program goes (default: weir-stress-SEED.txt)")
    parser.add_argument("--replay", metavar="FILE", help="play a failing program again, and nothing else")
    parser.add_argument("--soak", action="store_true", help="sample what must not grow, and judge it")
    parser.add_argument("--every", type=_seconds, metavar="N", help="seconds between samples of a soak (default: 1)")
    parser.add_argument("--samples", metavar="FILE", help="samples of a soak; FILE ends in .csv or .jsonl")
    parser.add_argument("--plot", metavar="FILE", help="a soak over time; FILE ends in .svg or .png")
    parser.add_argument("--locustfile", action="store_true", help="print where the file for locust is, and end")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Hammer, or replay; returns the exit status."""
    if arguments.locustfile:
        print(importlib.resources.files("allocator.stress") / "locustfile.py")
        return OK
    if arguments.replay is not None:
        return _replay(arguments)
    options = [name for name in ("every", "samples", "plot") if getattr(arguments, name) is not None]
    if options and not arguments.soak:
        raise ValueError(f"--{options[0]} goes with --soak")
    seed = time.time_ns() % 1_000_000_007 if arguments.seed is None else arguments.seed
    limit = arguments.limit or SHARE * arguments.threads
    setting = Setting(workers=arguments.threads, streams=arguments.streams, limit=limit, seed=seed)
    workloads = tuple(dict.fromkeys(arguments.workload or WORKLOADS))
    plan = Plan(setting, workloads, arguments.operations)
    target = open_target(arguments.device, limit)
    soak = Soak(arguments.every or 1.0, arguments.samples, arguments.plot) if arguments.soak else None
    hammer = Hammer(target, plan)
    progress = Progress()
    with _stopped_by_signals() as stop:
        _tell(f"seed {seed}")
        if soak is None:
            outcome = hammer.run(arguments.seconds, stop.is_set, progress)
        else:
            outcome = soak.run(hammer, arguments.seconds, stop.is_set, progress, partial(setattr, progress, "remark"))
    progress.wipe()
    lost = _print_result(outcome, soak, arguments)
    for problem in soak.problems if soak else ():
        _tell(f"{problem}; the run went on without it")
    if outcome.violation is not None:
        if arguments.json:
            _tell(verdict(outcome))
        _explain(outcome, arguments)
        return MISMATCH
    if lost is not None:
        raise lost
    return USAGE if soak is not None and soak.problems else OK


def _print_result(outcome: Outcome, soak: Soak | None, arguments: argparse.Namespace) -> OSError | None:
    """On stdout.  A disk that is full or a reader that has gone is no reason to keep a violation back: it is returned,
    and nothing more can be written there."""
    try:
        if arguments.json:
            print(json.dumps(figures(outcome) | ({} if soak is None else {"soak": soak.figures()})), flush=True)
        else:
            print(table(outcome, () if soak is None else soak.remarks(outcome)), flush=True)
    except OSError as error:
        if outcome.violation is not None:  # else whoever catches the error does that
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def _tell(text: str) -> None:
    """A line on stderr, where somebody reads it."""
    with suppress(OSError):
        print(f"weir: {text}", file=sys.stderr, flush=True)


def _explain(outcome: Outcome, arguments: argparse.Namespace) -> None:
    """The seed and the shortest failing program, on stderr and in a file."""
    setting = outcome.plan.setting
    names = "".join(f" --workload {name}" for name in outcome.plan.workloads) if arguments.workload else ""
    where = "" if arguments.device is None else f" --device {arguments.device}"
    again = (
        f"weir stress{where} --seed {setting.seed} --threads {setting.workers} --streams {setting.streams} "
        f"--limit {setting.limit} --operations {outcome.plan.operations}{names}{' --soak' if arguments.soak else ''}"
    )
    _tell(f"seed {setting.seed}; the same operations again: {again}")
    if outcome.failed_round is None:
        _tell("no round failed, so there is no program to shorten")
        return
    progress = Progress()
    _tell("looking for the shortest program that fails, on the simulator")
    recording = shrink(outcome, progress=lambda steps: progress.say(f"{steps} operations left"))
    progress.wipe()
    path = Path(arguments.save or f"weir-stress-{setting.seed}.txt")
    _show(recording)
    try:
        recording.write(path)
    except OSError as error:
        _tell(f"{path}: cannot be written: {error.strerror}")
    else:
        _tell(f"play it again with: weir stress --replay {path}")


def _show(recording: Recording) -> None:
    steps = recording.steps
    if not recording.setting.alone:
        _tell(
            f"one thread that plays the {len(steps):,} operations of the round in the order in which they began "
            "finds nothing wrong: it takes real threads, or this GPU. The file has the whole round"
        )
        return
    _tell(f"{len(steps):,} operations fail, played by one thread: {recording.wrong}")
    with suppress(OSError):
        for number, step in enumerate(steps[-SHOWN:], max(len(steps) - SHOWN, 0) + 1):
            print(f"  {number:>4}  {step}", file=sys.stderr)


def _replay(arguments: argparse.Namespace) -> int:
    recording = read_recording(arguments.replay)
    setting = recording.setting

    def make(setting: Setting) -> Target:
        return open_target(arguments.device, setting.limit)

    rounds = done = 0
    violation = None
    with _stopped_by_signals() as stop:
        if setting.alone:
            rounds, (done, violation) = 1, play(recording, make)
        else:  # threads never meet in the same way twice: again and again
            deadline = time.monotonic() + arguments.seconds
            while violation is None and not stop.is_set() and (not rounds or time.monotonic() < deadline):
                rounds += 1
                done, violation = play_threaded(recording, stop.is_set, make)
    how = "by one thread" if setting.alone else f"by {setting.workers} threads, {rounds} times"
    was = f"; it was {recording.wrong}" if recording.wrong else ""
    print(f"{arguments.replay}: {len(recording.steps):,} operations, played {how}{was}")
    if violation is None:
        print("nothing wrong")
        return OK
    print(f"VIOLATION after {done:,} operations: {violation.kind}: {violation.text}")
    return MISMATCH


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second one does what it does otherwise."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def first(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, first)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _device(text: str) -> int | None:
    """None for the simulator, else a GPU's number."""
    if text == "sim":
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither sim nor the number of a GPU")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < seconds <= 1e7:
        raise argparse.ArgumentTypeError(f"{text} is no sensible number of seconds")
    return seconds


def _between(least: int, most: int) -> Any:
    def number(text: str) -> int:
        if text.isascii() and text.isdigit() and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")

    return number

"""`weir replay`: what a recorded program would need here.

Next: allocator/traces/replay.py says what a replay is.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any, Final

from allocator.cli.options import size, speed
from allocator.cli.status import MISMATCH, OK, REFUSED
from allocator.config import Config
from allocator.devices import CudaDevice, Device, SimDevice
from allocator.traces import (
    POLICIES,
    Meter,
    PlotFile,
    Replay,
    Result,
    json_line,
    read_trace,
    replay_trace,
    summarize,
    table,
    verdict,
)

_DESCRIPTION: Final = """\
Replay recorded memory traffic, and tell how much memory the same program would have
needed: with one pool for all streams (weir), and with a cache for each stream as
CuPy and PyTorch have it (per-stream).

A trace is a file in any of these layouts, plain or gzip; its content decides, not its name:
  weir        time_ns,op,stream,pointer,bytes,gpu_start_ns,gpu_duration_ns
  RMM's log   Thread,Time,Action,Pointer,Size,Stream
  PyTorch     the pickle that torch.cuda.memory._dump_snapshot() writes
  intervals   id,lower,upper,size

By default it runs on a simulated GPU, in virtual time, and every reuse of memory is
checked for races. With --device 0 it runs on that GPU, in real time.
"""

_EPILOG: Final = """\
examples:
  weir replay run.csv.gz                            both policies, as a table
  weir replay run.csv.gz --plot run.svg             and over time, as a picture
  weir replay log.csv --limit 4GiB --policy weir    does it fit in 4 GiB?
  weir replay run.csv.gz --speed 1.05               on a GPU that is 5 % faster
  weir replay *.csv.gz --json | jq .peak_reserved_bytes

sizes are digits, with KiB, MiB, GiB or TiB if you like: 512MiB

exit status:
  0  all went well
  1  a race, a leak, or a pool that contradicts itself
  2  wrong usage, or a trace that cannot be read
  3  an allocation failed
"""


def add_to(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "replay",
        help="replay a trace, and tell how much memory it would have needed",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="a file; several are replayed one after the other")
    parser.add_argument(
        "--policy",
        action="append",
        choices=POLICIES,
        help="which rules to replay under; may be repeated (default: weir and per-stream)",
    )
    parser.add_argument(
        "--device", default="sim", type=_device, metavar="sim|N", help="sim, or the number of a GPU (default: sim)"
    )
    parser.add_argument("--memory", type=size, metavar="SIZE", help="memory of the simulated GPU (default: 1TiB)")
    parser.add_argument(
        "--limit", type=size, default=0, metavar="SIZE", help="most memory to reserve (default: no limit)"
    )
    parser.add_argument(
        "--speed", type=speed, default=1.0, metavar="FACTOR",
        help="how many times faster the GPU is than the recorded one (default: 1.0)",
    )  # fmt: skip
    parser.add_argument(
        "--uses",
        choices=("declared", "assumed"),
        default="declared",
        help="declared: the program says which streams use a block. assumed: any stream might, as under CuPy "
        "(default: declared)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    parser.add_argument("--plot", metavar="FILE", help="draw memory over time; FILE ends in .svg or .png")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replay every trace under every policy; returns the exit status."""
    if arguments.memory is not None and arguments.device is not None:
        raise ValueError("--memory is for the simulated device; a GPU has what it has")
    plot = PlotFile(arguments.plot) if arguments.plot else None
    policies = list(dict.fromkeys(arguments.policy or ("weir", "per-stream")))
    replays: list[Replay] = []
    for path in arguments.traces:
        found = _replay_one(path, policies, arguments, with_series=plot is not None)
        replays += found
        if not arguments.json:
            if path != arguments.traces[0]:
                print()
            print(table(found))
            if sentence := verdict([one.result for one in found]):
                print(f"\n{sentence}")
            sys.stdout.flush()
    if plot is not None:
        plot.write(replays)
        where = sys.stderr if arguments.json else sys.stdout
        print(f"{'' if arguments.json else chr(10)}The picture is in {plot.path}", file=where)
    return status_of(replays)


def _replay_one(path: str, policies: list[str], arguments: argparse.Namespace, *, with_series: bool) -> list[Replay]:
    trace = read_trace(path)
    for note in trace.notes:
        print(f"weir: {path}: {note}", file=sys.stderr)
    with Meter(f"reading {path}") as meter:
        summary = summarize(trace, meter.share)
    found = []
    for policy in policies:
        device = _open(arguments)
        config = replace(Config.from_env(device_memory=device.total_memory), limit=arguments.limit, uses=arguments.uses)
        with Meter(f"{policy}, {path}") as meter:
            one = replay_trace(
                trace,
                summary,
                device,
                policy=policy,
                config=config,
                speed=arguments.speed,
                series=with_series,
                meter=meter,
            )
        if one.broken:
            print(f"weir: {path}, {policy}: a pool contradicts itself: {one.broken.splitlines()[0]}", file=sys.stderr)
        if arguments.json:
            print(json_line(one.result), flush=True)
        found.append(one)
    return found


def status_of(replays: list[Replay]) -> int:
    """The worst of what was found."""
    results: list[Result] = [one.result for one in replays]
    if any(one.broken for one in replays) or any(result.races or result.leaked_bytes for result in results):
        return MISMATCH
    return REFUSED if any(result.oom for result in results) else OK


def _open(arguments: argparse.Namespace) -> Device:
    """A device for one replay: a new simulated one each time, so that no replay sees another's traces."""
    if arguments.device is not None:
        return CudaDevice(arguments.device)
    return SimDevice(memory=arguments.memory or 1 << 40)


def _device(text: str) -> int | None:
    """None for the simulator, else a GPU's number."""
    if text == "sim":
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither sim nor the number of a GPU")

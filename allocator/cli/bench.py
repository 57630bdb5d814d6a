"""`weir bench`: how fast the pool is, next to its peers and to the least that can be done.

Rule: nothing is told without its spread; what could not be measured is told with the reason.
Next: stress/benchmarks (what is measured, and how); docs/benchmarks.md (how to read it).
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, Final

from allocator.cli.status import MISMATCH, OK
from allocator.traces import PlotFile

if TYPE_CHECKING:
    from allocator.stress import BenchSession

_DESCRIPTION: Final = """\
Measure the pool next to its peers. Weir and each peer take turns at the same work, in
one process; where they cannot share one, in processes that alternate. A figure is the
median over the repeats, a ratio is taken within each repeat to the one marked "= 1",
and the two numbers behind it are its quartiles.

Without a GPU: the core on the simulator against a floor of one dict and one lock and
against pools that never cross streams; and through CuPy, where it is installed, on
made-up addresses against a floor and an empty hook. With a GPU (--device 0): against
CuPy's own pools, and then, in the same process, against RMM, PyTorch and cuda.core as
far as they are installed.
"""

_EPILOG: Final = """\
examples:
  weir bench                                   the usual ones, simulated: about 20 minutes
  weir bench steady threads --repeats 21       two of them, more carefully
  weir bench --list                            all benchmarks, all peers
  weir bench --quick                           small cases, a minute: does it work here?
  weir bench --device 0 --table                the aims: value, aim, reached or not
  weir bench --device 0 --json all.json --plot all.svg
  weir bench --from one.json two.json --table  runs put together; nothing is measured
  weir bench steady --device 0 --peers weir,cupy,rmm

Settings (WEIR_*) are not read: every pool has the defaults. Times drift on a machine
that others use; ratios drift less. Ctrl-C ends a run; what was measured is written.

exit status:
  0  all that was asked for and is possible here was measured
  1  a benchmark, or one contender in it, failed; a line says why
  2  wrong usage, or no such GPU
"""


def add_to(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "bench",
        help="measure the pool next to its peers",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which benchmarks (default: the usual ones)")
    parser.add_argument("--list", action="store_true", help="print all benchmarks and peers, and end")
    parser.add_argument(
        "--table", action="store_true", help="the aims, a line each; where no NAME is given, what they need is run"
    )
    parser.add_argument("--repeats", type=_repeats, default=7, metavar="N", help="turns that count (default: 7)")
    parser.add_argument(
        "--seconds", type=_seconds, default=2.0, metavar="S", help="about how long each case runs (default: 2)"
    )
    parser.add_argument("--quick", action="store_true", help="small cases only, 2 repeats, no time for care")
    parser.add_argument(
        "--device", default="sim", type=_device, metavar="sim|N", help="sim, or the number of a GPU (default: sim)"
    )
    parser.add_argument(
        "--peers", type=_names, default=(), metavar="NAME,NAME", help="only these (default: all that are installed)"
    )
    parser.add_argument(
        "--from", dest="earlier", nargs="+", metavar="FILE", help="measure nothing: show what earlier runs have written"
    )
    parser.add_argument("--json", metavar="FILE", help="everything: machine, versions, each repeat; kept up to date")
    parser.add_argument("--plot", metavar="FILE", help="a picture of all ratios, .svg or .png")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, tell, write; returns the exit status.  ValueError, AllocatorError, OSError: one line each."""
    from allocator.stress import BenchSession, BenchSettings  # the other commands do without what they bring

    if arguments.list:
        print(BenchSession.listed())
        return OK
    if arguments.plot is not None:
        PlotFile(arguments.plot)  # before any work is done for it
    if arguments.earlier is not None:
        session = BenchSession.read(arguments.earlier)
        print(f"{session.sentence}\n{session.headline}", *map(session.text, session.results.measured), sep="\n")
        _tell(session, arguments)
        return MISMATCH if session.failed else OK
    settings = BenchSettings(
        repeats=2 if arguments.quick else arguments.repeats,
        seconds=0.02 if arguments.quick else arguments.seconds,
        quick=arguments.quick,
        peers=arguments.peers,
    )
    names = arguments.names or (BenchSession.needed_for_table if arguments.table else ())
    session = BenchSession(names, settings, arguments.device)
    print(f"{session.sentence}\n{session.headline}", flush=True)
    try:
        session.run_and_tell(lambda text: print(text, flush=True), arguments.json)
    finally:  # also after Ctrl-C: what was measured is not lost
        _tell(session, arguments)
    return MISMATCH if session.failed else OK


def _tell(session: BenchSession, arguments: argparse.Namespace) -> None:
    """What is told at the end."""
    if arguments.table:
        print(f"\n{session.table()}")
    missing = session.missing()
    if missing:
        print(missing, file=sys.stderr)
    if arguments.json is not None:
        session.write_json(arguments.json)
    if arguments.plot is not None:
        session.draw(arguments.plot)
    sys.stdout.flush()


def _device(text: str) -> int | None:
    """None for the simulator, else a GPU's number."""
    if text == "sim":
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither sim nor the number of a GPU")


def _repeats(text: str) -> int:
    if text.isascii() and text.isdigit() and 1 <= int(text) <= 1000:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to 1000")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is no sensible number of seconds for a case")
    return seconds


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))

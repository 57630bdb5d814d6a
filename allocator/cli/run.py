"""`weir run`: a CuPy program on this pool, without editing it.

Rule: nothing but the memory is different.  What Weir itself says goes to stderr, and only if asked for.
Next: program.py (how a program is run), allocator/integrations/cupy/ (what is switched on).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from contextlib import ExitStack
from typing import Any, Final

from allocator.cli import program
from allocator.cli.status import USAGE
from allocator.errors import AllocatorError
from allocator.sizes import format_size

_DESCRIPTION: Final = """\
Run a CuPy program with all its arrays on Weir, as if it began with

    import allocator; allocator.cupy.install()

Memory freed on one stream then serves the others as soon as that is safe. Settings are
read from WEIR_* variables, and the limit from CUPY_GPU_MEMORY_LIMIT as before.
"""

_EPILOG: Final = """\
examples:
  weir run train.py --epochs 3               options behind the script are the script's
  weir run -m package.module                 as python -m
  weir run --metrics-port 9478 serve.py      watch it: open http://127.0.0.1:9478
  weir run --summary train.py                say at the end what it needed
  WEIR_LIMIT=4GiB weir run train.py          with no more than 4 GiB
  WEIR_CANARY=1 weir run train.py            look for writes to freed memory

exit status: the program's; 2 if it cannot be started
"""


def add_to(commands: Any) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "run",
        help="run a CuPy program on this pool, without editing it",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="weir run [--metrics-port N] [--summary] (SCRIPT | -m MODULE) [ARGS...]",
    )
    parser.add_argument(
        "--metrics-port", type=int, metavar="N", help="serve metrics and the live page on this port (0 picks one)"
    )
    parser.add_argument("--summary", action="store_true", help="one line a device on stderr at the end")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module instead of a file"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS", help=argparse.SUPPRESS)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the program; its exit status."""
    words = list(arguments.program if arguments.module is None else arguments.module)
    if not words:
        arguments.parser.error("name what to run, for example: weir run train.py, or: weir run -m package.module")
    with ExitStack() as ends:
        try:
            if arguments.module is not None:
                start = program.module(words[0], words[1:])
            else:
                start = program.script(words[0], words[1:])
            cupy = _install(ends)
            if arguments.metrics_port is not None:
                _serve(arguments.metrics_port, cupy, ends)
        except (program.NoProgram, ImportError, AllocatorError, ValueError, OSError) as error:
            print(f"weir run: {' '.join(str(error).split())}", file=sys.stderr)
            return USAGE
        status = program.outcome(start)
        if arguments.summary:
            for ordinal, pool in cupy.pools().items():
                print(f"weir: device {ordinal}: {summary(pool)}", file=sys.stderr)
        return status


def _install(ends: ExitStack) -> Any:
    cupy = importlib.import_module("allocator.cupy")
    cupy.install()
    return cupy


def _serve(port: int, cupy: Any, ends: ExitStack) -> None:
    metrics = importlib.import_module("allocator.metrics")
    server = ends.enter_context(metrics.serve(lambda: list(cupy.pools().values()), port=port))
    print(f"weir: metrics and live page at {server.url}", file=sys.stderr)


def summary(pool: Any) -> str:
    """What a program needed, in one line."""
    stats = pool.stats()
    served = sum(stats.allocations.values())
    reused = served - stats.allocations["new_memory"]
    crossed = reused - stats.allocations["same_stream"]
    share = f"{100 * reused / served:.1f} %" if served else "none"
    return (
        f"{served} allocations, {share} without new memory, {crossed} of them from another stream; "
        f"at most {format_size(stats.peak_reserved_bytes)} reserved, {format_size(stats.peak_allocated_bytes)} in "
        f"arrays, {format_size(stats.peak_in_flight_bytes)} in flight; {stats.out_of_memory} out of memory"
    )

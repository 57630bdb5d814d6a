"""`python -m allocator.stress.benchmarks NAME... [--json]`: run benchmarks on the simulator and print ratios.

`weir bench` does the same, on a GPU too, with a picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from allocator.stress.benchmarks import report
from allocator.stress.benchmarks.cases import Settings
from allocator.stress.benchmarks.registry import BENCHMARKS, chosen
from allocator.stress.benchmarks.session import Session


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks named; all of them if none is."""
    parser = argparse.ArgumentParser(
        prog="python -m allocator.stress.benchmarks",
        description="Benchmarks on the simulator: ratios of interleaved runs.",
        epilog="\n".join(f"{name:14} {one.about}" for name, one in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; all if none is named")
    parser.add_argument("--json", action="store_true", help="one JSON object a benchmark on stdout")
    parser.add_argument("--quick", action="store_true", help="small cases, for a first look")
    options = parser.parse_args(argv)
    try:
        benchmarks = chosen(options.names or BENCHMARKS)
    except ValueError as error:
        parser.error(str(error))
    settings = Settings(repeats=2, seconds=0.01, quick=True) if options.quick else Settings(repeats=15)
    for benchmark in benchmarks:
        session = Session([benchmark.name], settings)
        results = session.run()
        if options.json:
            about = {
                "python": session.about["versions"]["python"],
                "machine": session.about["hardware"]["machine"],
                "version": session.about["weir"],
            }
            figures = [report.case(one) for one in results.measured]
            told = {"skipped": results.skipped, "failed": results.failed}
            print(json.dumps({"benchmark": benchmark.name, **about, "figures": figures, **told}))
        else:
            results.left_out.clear()  # `weir bench` tells of those
            print(report.table(results))
        if session.failed:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

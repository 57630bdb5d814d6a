"""`python -m allocator.stress.benchmarks NAME... [--json]`: run benchmarks and print ratios."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

import allocator
from allocator.stress.benchmarks import best_fit, hot_path, live_page, replays, scrape_cost, scrapes

BENCHMARKS: dict[str, tuple[str, Callable[[], tuple[str, dict[str, Any]]]]] = {
    "hot-path": ("alloc + free of an exact size against a floor", hot_path.main),
    "best-fit": ("a miss with split and merge against a bare SortedList", best_fit.main),
    "live-page": ("the live page in a headless Chromium: load and update", live_page.main),
    "replay-ratios": ("reserved over live for the traces, over 15 speeds", replays.ratios),
    "replay-rows": ("replay speed, and the cost of a row as traces grow", replays.rows),
    "scrape-cost": ("one scrape of 100,000 blocks and 200 streams, with backlogs", scrape_cost.main),
    "scrapes": ("an allocating thread while clients scrape over HTTP", scrapes.main),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks named; all of them if none is."""
    parser = argparse.ArgumentParser(
        prog="python -m allocator.stress.benchmarks",
        description="Benchmarks on the simulator: ratios of interleaved runs.",
        epilog="\n".join(f"{name:14} {text}" for name, (text, _) in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; all if none is named")
    parser.add_argument("--json", action="store_true", help="one JSON object a benchmark on stdout")
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; known: {', '.join(BENCHMARKS)}")
    for name in options.names or BENCHMARKS:
        text, figures = BENCHMARKS[name][1]()
        if options.json:
            about = {
                "python": platform.python_version(),
                "machine": platform.machine(),
                "version": allocator.__version__,
            }
            print(json.dumps({"benchmark": name, **about, "figures": figures}))
        else:
            print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

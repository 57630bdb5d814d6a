"""Lines and branches of a coverage report, judged apart: `coverage` itself has one figure for both.

    python -m pytest --cov --cov-report=json:coverage.json ...
    python -m tests.coverage_check coverage.json --lines 97 --branches 92 --apart 'allocator/integrations/*'

Prints the two shares, and the files with the most that is missing; exit status 1 below either bound.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

APART: Final = ("allocator/devices/cuda.py", "allocator/integrations/*")
"""What needs a GPU: the tests that run on one report it."""
SHOWN: Final = 12


def shares(files: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Percent of lines and of branches; what has none is whole."""
    summaries = [file["summary"] for file in files]
    figures = []
    for covered, all_ in (("covered_lines", "num_statements"), ("covered_branches", "num_branches")):
        total = sum(one[all_] for one in summaries)
        figures.append(100 * sum(one[covered] for one in summaries) / total if total else 100.0)
    return figures[0], figures[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge a report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.coverage_check")
    parser.add_argument("report", help="what --cov-report=json wrote")
    parser.add_argument("--lines", type=float, default=97.0, metavar="PERCENT")
    parser.add_argument("--branches", type=float, default=92.0, metavar="PERCENT")
    parser.add_argument("--apart", action="append", metavar="PATTERN", help="files that are left out")
    options = parser.parse_args(arguments)
    files = json.loads(Path(options.report).read_text(encoding="utf-8"))["files"]
    apart = options.apart or APART
    counted = {name: file for name, file in files.items() if not any(fnmatch(name, pattern) for pattern in apart)}
    if not counted:
        print(f"{options.report}: there is no file to judge", file=sys.stderr)
        return 2
    lines, branches = shares(counted.values())
    worst = sorted(counted, key=lambda name: -len(counted[name]["missing_lines"]))
    for name in worst[:SHOWN]:
        missing = counted[name]["missing_lines"]
        if missing:
            first = ", ".join(map(str, missing[:10]))
            print(f"  {name}: {len(missing)} lines missing, {first}{' ...' if len(missing) > 10 else ''}")
    print(f"{len(counted)} files: {lines:.2f} % of lines, {branches:.2f} % of branches")
    wrong = [
        f"{what} below {bound:g} %"
        for what, share, bound in (("lines", lines, options.lines), ("branches", branches, options.branches))
        if share < bound
    ]
    print(f"coverage: {' and '.join(wrong)}" if wrong else "coverage: enough", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Run CuPy's own tests on CuPy's pool and on Weir, and compare which fail.  Needs a GPU; see README.md.

Status: 0 nothing fails on Weir that passes on CuPy's pool, but for what `expected.txt` lists; 1 something does;
2 usage.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PARTS = (
    "core_tests",
    "cuda_tests/test_memory.py",
    "cuda_tests/test_stream.py",
    "cuda_tests/test_graph.py",
    "cuda_tests/test_pinned_memory.py",
    "cuda_tests/memory_hooks_tests",
    "fft_tests",
    "linalg_tests",
    "random_tests",
    "statistics_tests",
    "sorting_tests",
    "indexing_tests",
)


def unpack(archive: Path, folder: Path) -> Path:
    """`tests/` and `pyproject.toml` of the source distribution, and nothing else; returns their folder."""
    with tarfile.open(archive) as tar:
        members = [m for m in tar.getmembers() if m.name.split("/", 1)[-1].startswith(("tests/", "pyproject.toml"))]
        if not members:
            raise SystemExit(f"{archive}: has no tests/; it is not CuPy's source distribution")
        tar.extractall(folder, members=members, filter="data")
    return folder / members[0].name.split("/", 1)[0]


def run(where: Path, parts: Sequence[str], jobs: int, report: Path, *, weir: bool, pools_too: bool) -> dict[str, str]:
    """One run of pytest; the outcome of every test by its id."""
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=0", f"--junitxml={report}"]
    if jobs > 1:
        command += ["-n", str(jobs)]
    environ = os.environ | {"CUPY_TEST_GPU_LIMIT": "1", "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}"}
    if weir:
        command += ["-p", "weir_plugin"]
        environ["WEIR_SUITE_POOLS"] = "1" if pools_too else "0"
    command += [str(Path("tests/cupy_tests") / part) for part in parts]
    done = subprocess.run(command, cwd=where, env=environ)
    if done.returncode not in (0, 1) or not report.exists():
        raise SystemExit(f"pytest ended with status {done.returncode} and no report: nothing was compared")
    return outcomes(report)


def outcomes(report: Path) -> dict[str, str]:
    """Test id -> passed, failed or skipped."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        ident = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
        kinds = {child.tag for child in case}
        found[ident] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return found


def patterns() -> list[str]:
    """What `expected.txt` lists."""
    lines = (HERE / "expected.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def differences(ours: dict[str, str], theirs: dict[str, str], expected: Sequence[str]) -> tuple[list[str], list[str]]:
    """(tests that fail on Weir only and are not listed, those that are)."""
    worse = [t for t, outcome in sorted(ours.items()) if outcome == "failed" and theirs.get(t) != "failed"]

    def listed(test: str) -> bool:
        return any(fnmatch.fnmatchcase(test, pattern) for pattern in expected)

    return [t for t in worse if not listed(t)], [t for t in worse if listed(t)]


def main(argv: Sequence[str] | None = None) -> int:
    """Unpack, run twice, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("archive", type=Path, help="CuPy's source distribution, cupy-14.2.0.tar.gz")
    parser.add_argument("parts", nargs="*", default=list(PARTS), help="below tests/cupy_tests; default: many")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--pools-too", action="store_true", help="cupy.cuda.MemoryPool is ours, too")
    options = parser.parse_args(argv)
    if not options.archive.exists():
        parser.error(f"{options.archive}: no such file; README.md says how to get it")
    with tempfile.TemporaryDirectory() as folder:
        where = unpack(options.archive, Path(folder))
        theirs = run(where, options.parts, options.jobs, Path(folder, "a.xml"), weir=False, pools_too=False)
        ours = run(where, options.parts, options.jobs, Path(folder, "b.xml"), weir=True, pools_too=options.pools_too)
    new, known = differences(ours, theirs, patterns())
    for name, found in (("CuPy's pool", theirs), ("Weir", ours)):
        counts = {kind: sum(o == kind for o in found.values()) for kind in ("passed", "failed", "skipped")}
        print(f"{name:12} {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    print(f"fail on Weir only: {len(new)} unexpected, {len(known)} listed in expected.txt")
    for test in new:
        print(f"  {test}")
    if not ours or set(ours) != set(theirs):
        print("the two runs did not run the same tests", file=sys.stderr)
        return 1
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())

"""Run CuPy's own tests on CuPy's pool and, in one or two ways, on Weir, and compare which fail.  Needs a GPU.

README.md says what the two ways are.

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


# Apart, and with one job: some of them want most of the GPU for themselves.
MEMORY = ("cuda_tests/test_memory.py",)


def unpack(archive: Path, folder: Path) -> Path:
    """`tests/` and `pyproject.toml` of the source distribution, and nothing else; returns their folder."""
    with tarfile.open(archive) as tar:
        members = [m for m in tar.getmembers() if m.name.split("/", 1)[-1].startswith(("tests/", "pyproject.toml"))]
        if not members:
            raise SystemExit(f"{archive}: has no tests/; it is not CuPy's source distribution")
        tar.extractall(folder, members=members, filter="data")
    return folder / members[0].name.split("/", 1)[0]


def run(
    where: Path, tests: Sequence[str], jobs: int, report: Path, mode: str | None, seconds: float = 0
) -> dict[str, str]:
    """One run of pytest, on CuPy's pool where `mode` is None; the outcome of every test by its id."""
    # Verbose: the log has every outcome so far, should the run not live to write its report.
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--maxfail=0", f"--junitxml={report}"]
    # In workers, also where there is one: a crash ends a test, not the run (by class, xdist loses count of them).
    command += ["-n", str(jobs), "--dist", "load"]
    if seconds:
        command += [f"--timeout={seconds:g}", "--timeout-method=thread"]
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT / "src")])
    # Some tests are made from sets: workers must find them in the same order.
    environ = os.environ | {"CUPY_TEST_GPU_LIMIT": "1", "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    if mode is not None:
        command += ["-p", "weir_plugin"]
        environ["CUPY_SUITE_POOLS"] = "1" if mode == "pools" else "0"
    command += tests
    with report.with_suffix(".log").open("w") as log:
        done = subprocess.run(command, cwd=where, env=environ, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode not in (0, 1) or not report.exists():
        raise SystemExit(f"pytest ended with status {done.returncode} and no report: {log.name} says why")
    return outcomes(report)


def outcomes(report: Path) -> dict[str, str]:
    """Test id -> passed, failed or skipped."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        ident = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
        kinds = {child.tag for child in case}
        found[ident] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return found


def failed(report: Path, where: Path) -> list[str]:
    """What pytest is asked for to run again what failed: file::class::name, the file below `where`."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        if not any(child.tag in ("failure", "error") for child in case):
            continue
        names = case.get("classname", "").split(".")
        # A class made from parameters has dots in its name.
        files = (n for n in range(1, len(names) + 1) if (where / "/".join(names[:n])).with_suffix(".py").is_file())
        until = next(files, None)
        if until is None:
            raise SystemExit(f"{report}: {case.get('name')} is of no file below {where}; its log says why it failed")
        owner = ".".join(names[until:])
        found.append("::".join(filter(None, ["/".join(names[:until]) + ".py", owner, case.get("name")])))
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
    """Unpack, run, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("archive", type=Path, help="CuPy's source distribution, cupy-14.2.0.tar.gz")
    parser.add_argument("parts", nargs="*", default=list(PARTS), help="below tests/cupy_tests; default: many")
    parser.add_argument("--memory", action="store_true", help="the tests of CuPy's pools, and nothing beside them")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=0, help="seconds a test may take; needs pytest-timeout")
    parser.add_argument("--modes", default="allocator,pools", help="ways to use Weir (default: both)")
    parser.add_argument(
        "--weir-first", action="store_true", help="CuPy's pool runs only what fails on Weir: half the time"
    )
    parser.add_argument("--reports", type=Path, help="keep reports and logs in this folder")
    options = parser.parse_args(argv)
    modes = options.modes.split(",")
    if options.memory:
        options.parts, options.jobs = list(MEMORY), 1
    if not options.archive.exists():
        parser.error(f"{options.archive}: no such file; README.md says how to get it")
    if unknown := set(modes) - {"allocator", "pools"}:
        parser.error(f"{', '.join(sorted(unknown))}: no such mode; there are allocator and pools")
    with tempfile.TemporaryDirectory() as folder:
        where = unpack(options.archive, Path(folder))
        reports = options.reports.resolve() if options.reports else Path(folder)
        reports.mkdir(parents=True, exist_ok=True)
        tests = [str(Path("tests/cupy_tests") / part) for part in options.parts]
        status = 0
        if not options.weir_first:
            # First: it compiles the kernels that the others find compiled.
            theirs = run(where, tests, options.jobs, reports / "cupy.xml", None, options.timeout)
            print(summary("CuPy's pool", theirs), flush=True)
        for mode in modes:
            ours = run(where, tests, options.jobs, reports / f"{mode}.xml", mode, options.timeout)
            print(summary(f"Weir ({mode})", ours), flush=True)
            if options.weir_first:
                again = failed(reports / f"{mode}.xml", where)
                report = reports / f"cupy-{mode}.xml"
                theirs = run(where, again, options.jobs, report, None, options.timeout) if again else {}
                print(summary("these with CuPy's", theirs))
            status |= told(ours, theirs, some=options.weir_first)
    return status


def told(ours: dict[str, str], theirs: dict[str, str], *, some: bool) -> int:
    """Print how one way to use Weir compares; 1 if anything fails that should not.

    some: CuPy's pool ran only what failed on Weir.
    """
    new, known = differences(ours, theirs, patterns())
    print(f"fail on Weir only: {len(new)} unexpected, {len(known)} listed in expected.txt")
    for test in (*new, *(f"{test} (listed)" for test in known)):
        print(f"  {test}")
    asked = {t for t, outcome in ours.items() if outcome == "failed"} if some else set(ours)
    others = len(asked ^ set(theirs))
    if others:
        print(f"{others} tests ran in one of the two only")
    sys.stdout.flush()
    return 1 if new or others or not ours else 0


def summary(name: str, found: dict[str, str]) -> str:
    """One line."""
    counts = {kind: sum(o == kind for o in found.values()) for kind in ("passed", "failed", "skipped")}
    return f"{name:17} {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"


if __name__ == "__main__":
    sys.exit(main())

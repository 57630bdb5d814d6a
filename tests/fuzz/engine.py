"""The coverage-guided fuzzer, where atheris is installed: not a dependency, as it has wheels for some systems only.

It starts from the corpus in this folder, keeps what reaches new code in a folder of its own, and stops at the first
input that is neither right nor refused in one line, which it writes down.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
MISSING = "atheris is not installed: pip install atheris, where there is a wheel for this Python"


def main(name: str, arguments: Sequence[str] | None = None) -> int:
    """Run one target for some seconds; 0: nothing found.  Does not return where something is: the fuzzer ends it."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.fuzz.{name}", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, metavar="N")
    parser.add_argument("--found", metavar="FOLDER", help="where new inputs are kept (default: a temporary folder)")
    parser.add_argument("inputs", nargs="*", metavar="FILE", help="only these, once each: to look at a finding")
    options = parser.parse_args(arguments)
    if options.inputs:
        from tests.fuzz.targets import TARGETS

        for path in options.inputs:
            TARGETS[name](Path(path).read_bytes())
        return 0
    try:
        atheris = importlib.import_module("atheris")
    except ImportError:
        print(MISSING, file=sys.stderr)
        return 2
    with atheris.instrument_imports(include=["allocator"]):
        target = importlib.import_module("tests.fuzz.targets").TARGETS[name]
    with tempfile.TemporaryDirectory() as folder:
        found = options.found or folder
        flags = [f"-max_total_time={options.seconds}", "-max_len=4096", "-verbosity=1"]
        atheris.Setup([sys.argv[0], *flags, found, str(CORPUS / name)], target)
        atheris.Fuzz()
    return 0

"""Run the tests on the compiled build: `python tests/compiled.py [pytest's arguments]`, as `make compiled` does.

The checkout is copied to build/compiled, compiled there beside its source, and tested there: an editable install always
runs the source.  Tests that change the source to see that a test notices are left out there, with that reason.
Without a compiler it says so and passes: nobody needs one.  `.ci/run` installs one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
COPY: Final = ROOT / "build" / "compiled"
NEEDED: Final = (
    "allocator", "metrics", "stress", "src", "tests", "docs", "pyproject.toml", "setup.py", "mypyc.ini", "MANIFEST.in",
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", ".ci",
)  # fmt: skip


def what_is_missing() -> str | None:
    """What compiling needs and this machine lacks; None if it is all there."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None and shutil.which("cc") is None:
        return f"a C compiler: there is no {compiler} (Debian, Ubuntu: apt-get install gcc libc6-dev)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's headers (Debian, Ubuntu: apt-get install python3-dev)"
    return None


def main(arguments: list[str]) -> int:
    """Copy, compile, test; returns pytest's exit status."""
    missing = what_is_missing()
    if missing:
        print(f"NOT RUN: the tests of the compiled build need {missing}", file=sys.stderr)
        return 0
    shutil.rmtree(COPY, ignore_errors=True)
    COPY.mkdir(parents=True)
    leave = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, COPY / name, symlinks=True, ignore=leave)
        else:
            shutil.copy(ROOT / name, COPY / name)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    build = subprocess.run(command, cwd=COPY, env=os.environ | {"WEIR_COMPILE": "1"}, check=False)
    if build.returncode:
        return build.returncode
    environment = os.environ | {"PYTHONPATH": str(COPY / "src")}
    look = "from allocator.gil import COMPILED; import sys; sys.exit(not COMPILED)"
    if subprocess.run([sys.executable, "-c", look], cwd=COPY / "tests", env=environment, check=False).returncode:
        print("what is imported is not what was compiled", file=sys.stderr)
        return 1
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=COPY, env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Run the tests on the compiled build: `python tests/compiled.py [pytest's arguments]`, as `make compiled` does.

The checkout is copied to build/compiled, a wheel is built of it as `pip install` does, and what is compiled in that is
put beside the source and tested there: an editable install always runs the source.  Tests that change the source to see
that a test notices are left out there, with that reason.
Without a compiler it says so and passes: nobody needs one.  `.ci/run` installs one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
COPY: Final = ROOT / "build" / "compiled"
WHEEL: Final = "COMPILED_WHEEL"
"""The environment variable that names that wheel to the tests."""
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
    out = COPY / "wheel"
    command = [sys.executable, "-m", "build", "--quiet", "--no-isolation", "--wheel", "--outdir", str(out), str(COPY)]
    build = subprocess.run(command, cwd=COPY, env=os.environ | {"WEIR_COMPILE": "1"}, check=False)
    if build.returncode:
        return build.returncode
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(COPY, [name for name in packed.namelist() if name.endswith(".so")])
    environment = os.environ | {"PYTHONPATH": str(COPY / "src"), WHEEL: str(wheel)}
    look = "from allocator.gil import COMPILED; import sys; sys.exit(not COMPILED)"
    if subprocess.run([sys.executable, "-c", look], cwd=COPY / "tests", env=environment, check=False).returncode:
        print("what is imported is not what was compiled", file=sys.stderr)
        return 1
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=COPY, env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The compiled build.  What a package is, and holds, is in pyproject.toml; here is only: which modules are compiled.

    pip install .                      compiled where a compiler and Python's headers are there, else as source
    WEIR_COMPILE=0 pip install .       as source
    WEIR_COMPILE=1 pip install .       compiled, or it fails and says why
    MYPYC_OPT_LEVEL=0    the C compiler's level, 3 by default: to be done sooner where speed does not matter
    python setup.py build_ext --inplace    compiled beside the source of this very folder, as `make compiled` does

The same files run either way; an editable install always runs the source.  Why these: docs/decisions/0016-compiled.md.
"""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext

COMPILED = (
    "allocator/blocks/block.py",
    "allocator/blocks/heap.py",
    "allocator/blocks/index.py",
    "allocator/caching/accounting.py",
    "allocator/caching/checked.py",
    "allocator/caching/checked_shelves.py",
    "allocator/caching/frees.py",
    "allocator/caching/front.py",
    "allocator/caching/growth.py",
    "allocator/caching/ladder.py",
    "allocator/caching/lane.py",
    "allocator/caching/settling.py",
    "allocator/caching/shelves.py",
    "allocator/collector.py",
    "allocator/events/clock.py",
    "allocator/gil.py",
    "allocator/integrations/cupy/hook.py",
    "allocator/integrations/cupy/lease.py",
    "allocator/streams/borrowing.py",
    "allocator/streams/context.py",
    "allocator/streams/order.py",
    "allocator/streams/registry.py",
    "allocator/streams/sealing.py",
    "allocator/streams/timeline.py",
)
BUILDING = {"bdist_wheel", "build", "build_ext", "install"}
WANTED = os.environ.get("WEIR_COMPILE", "").strip()


def why_not() -> str | None:
    """Why this build is one of source; None if it is not."""
    if WANTED == "0":
        return "WEIR_COMPILE=0"
    if platform.python_implementation() != "CPython":
        return "only CPython is compiled for"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "a free-threaded Python: what is compiled relies on the interpreter's lock"
    return "an editable install" if "editable_wheel" in sys.argv else None


def say(text: str) -> None:
    """For whoever reads pip's output with -v."""
    print(f"weir: {text}", file=sys.stderr)


def extensions() -> list[Any]:
    """What is to be compiled; nothing, with the reason said, where that cannot be."""
    if not BUILDING & set(sys.argv) and "editable_wheel" not in sys.argv:
        return []  # somebody asks what this package is
    reason = why_not()
    if reason is None:
        os.chdir(Path(__file__).parent)
        try:
            from mypyc.build import mypycify

            return list(
                mypycify(
                    ["--config-file=mypyc.ini", *COMPILED],
                    opt_level=os.environ.get("MYPYC_OPT_LEVEL", "3"),
                    debug_level="0",
                    group_name="allocator.weir",
                )
            )
        except (Exception, SystemExit) as error:  # mypycify leaves with SystemExit where a type is wrong
            if WANTED == "1":
                raise
            reason = f"{type(error).__name__}: {error}"
    if WANTED == "1":
        raise SystemExit(f"weir: WEIR_COMPILE=1, but {reason}")
    say(f"not compiled: {reason}")
    return []


class AllOrNothing(build_ext):
    """Compiles all modules, or leaves all of them as source: parts of both would not fit together."""

    def run(self) -> None:
        """As ever; without a working compiler the build goes on without."""
        try:
            super().run()
        except Exception as error:
            if WANTED == "1":
                raise
            say(f"not compiled: {type(error).__name__}: {error}")
            for built in self.get_outputs():
                Path(built).unlink(missing_ok=True)
            self.extensions: list[Any] = []


setup(ext_modules=extensions(), cmdclass={"build_ext": AllOrNothing})

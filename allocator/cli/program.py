"""Running somebody's Python program in this process, as `python` itself would.

Rule: the program cannot tell the difference: `__main__`, `sys.argv`, `sys.path[0]`, its exit status, and a traceback
that begins in its own first line.  Next: run.py.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from allocator.cli.status import OK, USAGE

FAILED: Final = 1
INTERRUPTED: Final = 130


class NoProgram(Exception):
    """There is nothing to run under that name; the text says why."""


def script(path: str, arguments: Sequence[str]) -> Callable[[], None]:
    """Prepare to run a file, a folder or a zip file with a `__main__.py`.  NoProgram if it cannot be read."""
    file = Path(path)
    sys.argv = [path, *arguments]
    if file.is_dir() or file.suffix in (".zip", ".pyz"):
        if not file.exists():
            raise NoProgram(f"{path}: no such file")
        return lambda: void(runpy.run_path(path, run_name="__main__"))
    try:
        source = file.read_bytes()
    except FileNotFoundError:
        raise NoProgram(f"{path}: no such file") from None
    except OSError as error:
        raise NoProgram(f"{path}: {error.strerror or error}") from None
    sys.path[0] = str(file.resolve().parent)
    return lambda: _as_main(source, path)


def module(name: str, arguments: Sequence[str]) -> Callable[[], None]:
    """Prepare to run a module, as `python -m` does.  NoProgram if there is none."""
    sys.path[0] = str(Path.cwd())
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise NoProgram(f"no module named {name} ({error})") from None
    if found is None:
        raise NoProgram(f"no module named {name}")
    sys.argv = [name, *arguments]
    return lambda: void(runpy.run_module(name, run_name="__main__", alter_sys=True))


def void(_: object) -> None:
    """Nothing of a finished program is of use."""


def _as_main(source: bytes, path: str) -> None:
    """The module stays `__main__` to the end: threads and exit handlers of the program still use it."""
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]  # as the interpreter sets it
    sys.modules["__main__"] = main
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def outcome(program: Callable[[], None]) -> int:
    """Run it; its exit status, after whatever `python` would have printed about its end."""
    try:
        program()
    except SystemExit as stop:
        if stop.code is None:
            return OK
        if isinstance(stop.code, int):
            return stop.code & 0xFF
        print(stop.code, file=sys.stderr)
        return FAILED
    except BaseException as error:
        _show(error)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    return OK


def _show(error: BaseException) -> None:
    """The program's own excepthook, from the program's own first frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, "runpy", "<frozen runpy>"):
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.excepthook(type(error), error, trace)


__all__ = ["FAILED", "INTERRUPTED", "USAGE", "NoProgram", "module", "outcome", "script"]

"""Ctrl-C, at each place where the interpreter looks for signals: when a Python function begins and after each call.

A real signal strikes where it likes.  Here a profile function raises `KeyboardInterrupt` at the n-th such place inside
the allocator, which is exactly where the interpreter would have raised it: an event "call" or "c_return", the end of a
constructor, and the end of a driver call (in the simulator a Python function, in the real bindings one written in C).
The interpreter also looks at the end of each round of a loop; our loops all call something.

The simulator itself is not interrupted: it stands for a driver.  Nor are finalisers: what is raised in one is printed
and swallowed by the interpreter, whatever we do.

    at = 0
    while interrupted(operation, at := at + 1):
        ...      # look at what is left

Next: test_interrupts.py, which does that to every public call.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import allocator

HOME = str(Path(allocator.__file__).parent)
DRIVER = f"{HOME}/devices/"
PROTOCOL = f"{HOME}/devices/sim/calls.py"


class Interrupt:
    """Counts the places, and raises at one of them.  driver: the ends of driver calls count as well."""

    def __init__(self, at: int, *, driver: bool = False) -> None:
        self._at = at
        self._driver = driver
        self.count = 0
        self.where = ""
        self.struck = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """As `sys.setprofile` wants it."""
        if self.struck or not self._is_place(frame, event):
            return
        self.count += 1
        if self.count == self._at:
            self.struck = True
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name} {event}"
            signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)  # type: ignore[operator, misc]  # pytest leaves it callable

    def _is_place(self, frame: FrameType, event: str) -> bool:
        code = frame.f_code
        file = code.co_filename
        if not file.startswith(HOME) or _finalises(frame):
            return False
        if file.startswith(DRIVER):
            if not self._driver or event != "return" or file != PROTOCOL:
                return False
            caller = frame.f_back
            return caller is not None and not caller.f_code.co_filename.startswith(DRIVER)
        return event in ("call", "c_return") or (event == "return" and code.co_name == "__init__")


def _finalises(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.startswith(HOME):
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def interrupted(operation: Callable[[], object], at: int, *, driver: bool = False) -> Interrupt | None:
    """Do it and interrupt it at the n-th place.  None: it has fewer, and went through."""
    interrupt = Interrupt(at, driver=driver)
    sys.setprofile(interrupt)
    try:
        operation()
    except KeyboardInterrupt:
        if not interrupt.struck:
            raise
    finally:
        sys.setprofile(None)
    return interrupt if interrupt.struck else None

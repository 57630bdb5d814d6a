"""The log of RMM's logging adaptor: `Thread,Time,Action,Pointer,Size,Stream`.

Its versions differ in how they write the time (hh:mm:ss.ffffff, hh:mm:ss:ffffff, or seconds), pointers
(hex, "(nil)", 0) and streams (hex or decimal), and some put a space behind each comma.  There are no
launches, and no date: a clock that falls by more than half a day has passed midnight.

Next: checks.py (whether the rows contradict each other).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from allocator.traces.row import ALLOC, ALLOC_FAILED, FREE, Progress, Row, TraceError
from allocator.traces.text import address, natural, read_table, shorten

COLUMNS: Final = ("Thread", "Time", "Action", "Pointer", "Size", "Stream")
_OPS: Final = {"allocate": ALLOC, "free": FREE, "allocate failure": ALLOC_FAILED}
_CLOCK: Final = re.compile(r"(\d\d):([0-5]\d):([0-5]\d)(?:\.(\d{1,9})|:(\d{1,6}))?", re.ASCII)
_SECONDS: Final = re.compile(r"(\d{1,9})(?:\.(\d{1,9}))?", re.ASCII)
_SECOND: Final = 1_000_000_000
_DAY: Final = 86_400 * _SECOND


def read_rmm_log(path: str, progress: Progress | None = None) -> Iterator[Row]:
    """The rows of an RMM log."""
    first = before = None
    midnights = 0
    for line, (thread, time, action, pointer, size, stream) in read_table(path, COLUMNS, progress):
        natural(path, line, "Thread", thread)
        op = _OPS.get(action) or _OPS.get(action.strip())
        if op is None:
            raise TraceError(path, line, f"unknown action {shorten(action)}; known: {', '.join(_OPS)}")
        now, has_date = _time(path, line, time)
        if not has_date and before is not None and now < before - _DAY // 2:
            midnights += _DAY
        before = now
        now += midnights
        if first is None:
            first = now
        yield Row(
            max(now - first, 0) if first - now < _SECOND else _backwards(path, line, time),
            op,
            _stream(path, line, stream),
            address(path, line, "Pointer", pointer),
            natural(path, line, "Size", size),
            0,
            0,
            line,
        )


def _time(path: str, line: int, text: str) -> tuple[int, bool]:
    """(ns, False if it starts again at midnight)."""
    text = text.strip()
    if match := _CLOCK.fullmatch(text):
        hours, minutes, seconds, fraction, micros = match.groups()
        ns = int((fraction or "0").ljust(9, "0")) if micros is None else int(micros) * 1000
        return ((int(hours) * 60 + int(minutes)) * 60 + int(seconds)) * _SECOND + ns, False
    if match := _SECONDS.fullmatch(text):
        return int(match[1]) * _SECOND + int((match[2] or "0").ljust(9, "0")), True
    raise TraceError(path, line, f"Time is neither hh:mm:ss with a fraction nor seconds: {shorten(text)}")


def _backwards(path: str, line: int, text: str) -> int:
    raise TraceError(path, line, f"time runs backwards: {shorten(text)} is before the first row")


def _stream(path: str, line: int, text: str) -> int:
    text = text.strip()
    if text.isascii() and text.isdigit():
        return natural(path, line, "Stream", text)
    if text.startswith("0x") or text == "(nil)":
        return address(path, line, "Stream", text)
    raise TraceError(path, line, f"Stream is neither a number nor an address: {shorten(text)}")

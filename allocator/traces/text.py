"""Bytes and lines of a trace file, plain or gzip, in constant memory.

Rule: whatever a file holds, the only error is `TraceError`, and no line is trusted to end.

Next: weir_csv.py, rmm_log.py, intervals.py (what the lines mean).
"""

from __future__ import annotations

import contextlib
import gzip
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Final, cast

from allocator.traces.row import LARGEST, Progress, TraceError

_GZIP_MAGIC: Final = b"\x1f\x8b"
_CHUNK: Final = 1 << 18
_LONGEST_LINE: Final = 1 << 16
"""Bytes.  A real line has a hundred; without a bound, a file with no line end would be read whole."""


@contextlib.contextmanager
def open_trace(path: str) -> Iterator[tuple[BinaryIO, Callable[[], float]]]:
    """The bytes inside, and how much of the file has been read (0..1).

    Whatever reading raises inside the `with` comes out as TraceError.
    """
    try:
        with open(path, "rb") as raw:
            status = os.fstat(raw.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise TraceError(path, 0, "not a regular file (a trace is read more than once)")
            size = max(status.st_size, 1)
            packed = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            inside = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
            yield inside, lambda: raw.tell() / size
    except EOFError:
        raise TraceError(path, 0, "the gzip data ends too early: the file is cut off") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(path, 0, f"the gzip data is damaged ({error})") from None
    except OSError as error:
        raise TraceError(path, 0, f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a path with a null byte
        if isinstance(error, TraceError):
            raise
        raise TraceError(path, 0, f"cannot be read: {error}") from None


def read_lines(path: str, progress: Progress | None = None) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of every line that is not blank, without its end."""
    with open_trace(path) as (stream, share):
        number, rest = 0, b""
        while True:
            chunk = stream.read(_CHUNK)
            block, rest = _whole_lines(rest + chunk, at_end=not chunk)
            if len(rest) > _LONGEST_LINE:
                raise TraceError(path, number + block.count(b"\n") + 1, "no end of line: this is not a table of text")
            for line in _decode(path, number, block).split("\n") if block else ():
                number += 1
                if line and not line.isspace():
                    yield number, line.rstrip("\r")
            if not chunk:
                return
            if progress is not None:
                progress(share())


def _whole_lines(data: bytes, *, at_end: bool) -> tuple[bytes, bytes]:
    """(complete lines without the last line's end, the rest)."""
    if at_end:
        return data.removesuffix(b"\n"), b""
    cut = data.rfind(b"\n")
    return (b"", data) if cut < 0 else (data[:cut], data[cut + 1 :])


def _decode(path: str, before: int, block: bytes) -> str:
    try:
        text = block.decode("utf-8-sig" if before == 0 else "utf-8")
    except UnicodeDecodeError as error:
        line = before + block[: error.start].count(b"\n") + 1
        raise TraceError(path, line, "not text: this is no table, nor a pickle") from None
    if "\0" in text:
        raise TraceError(path, before + text[: text.index("\0")].count("\n") + 1, "not text: it has null bytes")
    return text


def read_header(path: str) -> list[str]:
    """The names in the first line.  Raises TraceError if there is none."""
    for number, line in read_lines(path):
        if number > 1:
            break
        return [name.strip() for name in line.split(",")]
    raise TraceError(path, 1, "no line with column names: the file is empty or starts with a blank line")


def read_table(
    path: str,
    columns: Sequence[str],
    progress: Progress | None = None,
    *,
    ignored: Sequence[str] = (),
) -> Iterator[tuple[int, list[str]]]:
    """(line number, fields in the order of `columns`) of each line below the header.

    Columns may stand in any order; those named in `ignored` may be there.  Anything else is a TraceError,
    a line with another number of fields too.
    """
    names = read_header(path)
    order = column_order(path, names, columns, ignored)
    width = len(names)
    straight = order == list(range(width))
    lines = read_lines(path, progress)
    next(lines)
    for number, line in lines:
        fields = line.split(",")
        if len(fields) != width:
            raise TraceError(path, number, f"{len(fields)} fields, but the header names {width} columns")
        yield number, fields if straight else [fields[i] for i in order]


def column_order(path: str, names: Sequence[str], columns: Sequence[str], ignored: Sequence[str]) -> list[int]:
    """Where each of `columns` stands among `names`."""
    for name in names:
        if names.count(name) > 1:
            raise TraceError(path, 1, f"two columns are called {shorten(name)}")
    unknown = [name for name in names if name not in columns and name not in ignored]
    if unknown:
        raise TraceError(path, 1, f"unknown column {shorten(unknown[0])}; known here: {', '.join(columns)}")
    missing = [name for name in columns if name not in names]
    if missing:
        raise TraceError(path, 1, f"column {missing[0]} is missing")
    return [names.index(name) for name in columns]


def shorten(text: str) -> str:
    """Text from a file, fit for a message of one line."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


def natural(path: str, line: int, column: str, text: str) -> int:
    """The integer in a field: digits only, not negative, at most `LARGEST`."""
    if text.isascii() and text.isdigit():
        if len(text) <= 19 and (value := int(text)) <= LARGEST:
            return value
        raise TraceError(path, line, f"{column} is too large: {shorten(text)}")
    bare = text.strip()
    if bare != text:
        return natural(path, line, column, bare)
    if text.startswith("-") and text[1:].isascii() and text[1:].isdigit():
        raise TraceError(path, line, f"{column} is negative: {shorten(text)}")
    raise TraceError(path, line, f"{column} is not a whole number: {shorten(text)}")


_NULL: Final = ("(nil)", "0x0", "0", "0x(nil)")


def address(path: str, line: int, column: str, text: str) -> int:
    """The number in a field as C prints pointers: 0x and hex digits, or one of the ways to say null."""
    try:
        if text[:2] == "0x" and text.isalnum() and text.isascii() and (value := int(text, 16)) <= LARGEST:
            return value
    except ValueError:
        pass
    if text.strip() in _NULL:
        return 0
    if text.strip() != text:
        return address(path, line, column, text.strip())
    raise TraceError(path, line, f"{column} is not an address such as 0x7f00a000: {shorten(text)}")

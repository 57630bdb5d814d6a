"""PyTorch's memory snapshot: a pickle of dicts, lists, text and numbers.

Rule: a pickle is a program, so it is judged before it runs.  Only opcodes that build plain data are
let through; a global of any kind is refused, and the unpickler refuses it once more.

The history of one device is read, where there is one; else the blocks that live in its segments.
There are no launches.

Next: checks.py.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any, Final, NoReturn

from allocator.traces.row import (
    ALLOC,
    ALLOC_FAILED,
    FREE,
    FREE_COMPLETED,
    LARGEST,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    Progress,
    Row,
    TraceError,
)
from allocator.traces.text import open_trace, shorten

MAGIC: Final = b"\x80"
_OPS: Final = {
    "alloc": ALLOC,
    "free_requested": FREE,
    "free_completed": FREE_COMPLETED,
    "segment_alloc": SEGMENT_ALLOC,
    "segment_map": SEGMENT_ALLOC,
    "segment_free": SEGMENT_FREE,
    "segment_unmap": SEGMENT_FREE,
    "oom": ALLOC_FAILED,
}
_UNTOLD: Final = frozenset({"snapshot"})


# Opcodes of plain data: a run of those with a fixed length, then one that has its length in front.
_RUN: Final = re.compile(
    rb"(?:[(012Nade\]lst)u}\x85-\x89\x94]|[Khq\x80].|M..|[Jj].{4}|[G\x95].{8})*+",
    re.DOTALL,
)
_COUNTED: Final = {0x8A: 1, 0x8B: 4, 0x8C: 1, 0x58: 4, 0x8D: 8}  # LONG1, LONG4, SHORT_BINUNICODE, BINUNICODE(8)
_STOP: Final = 0x2E
_LONG_BINPUT: Final = 0x72
_CODE: Final = {
    **dict.fromkeys(b"ci\x93", "a global"),
    **dict.fromkeys(b"Ro\x81\x92b\x82\x83\x84", "an object of a class"),
    **dict.fromkeys(b"PQ", "a persistent reference"),
}


class _PlainData(pickle.Unpickler):
    """Builds numbers, text, lists, tuples and dicts; everything else it meets is an error."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise pickle.UnpicklingError("it has a persistent reference")


class Snapshot:
    """What a snapshot file says: the rows of one device, and notes for people."""

    def __init__(self, path: str, progress: Progress | None = None) -> None:
        self._path = path
        self.notes: list[str] = []
        content = _load(path, progress)
        if not isinstance(content, dict):
            raise TraceError(path, 0, "a pickle, but not of a PyTorch snapshot: no dict")
        traces = content.get("device_traces", [])
        segments = content.get("segments", [])
        if (
            not isinstance(traces, list)
            or not isinstance(segments, list)
            or not ({"segments", "device_traces"} & set(content))
        ):
            raise TraceError(path, 0, "a pickle, but not of a PyTorch snapshot: no lists `segments` or `device_traces`")
        histories = {device: trace for device, trace in enumerate(traces) if trace}
        self.rows = self._history(histories) if histories else self._segments(segments)

    def _fail(self, event: int, problem: str, unit: str = "event") -> NoReturn:
        raise TraceError(self._path, event, problem, unit=unit)

    def _history(self, histories: dict[int, Any]) -> list[Row]:
        """The longest history: one program's memory is nearly always on one device."""
        device = max(histories, key=lambda d: len(histories[d]) if isinstance(histories[d], list) else 0)
        events = histories[device]
        if len(histories) > 1:
            others = ", ".join(str(d) for d in histories if d != device)
            self.notes.append(f"histories of several devices; read: device {device}, not read: {others}")
        if not isinstance(events, list):
            self._fail(0, f"the history of device {device} is no list")
        rows: list[Row] = []
        first: int | None = None
        for number, event in enumerate(events, 1):
            if not isinstance(event, dict):
                self._fail(number, "no dict")
            action = event.get("action")
            if not isinstance(action, str) or (action not in _OPS and action not in _UNTOLD):
                self._fail(number, f"unknown action {shorten(str(action))}")
            if action in _UNTOLD:
                continue
            now = self._number(event, "time_us", number) if "time_us" in event else 0
            if first is None:
                first = now
            op = _OPS[action]
            pointer = 0 if op == ALLOC_FAILED else self._number(event, "addr", number)
            size, stream = self._number(event, "size", number), self._number(event, "stream", number)
            rows.append(Row((now - first) * 1000, op, stream, pointer, size, 0, 0, number))
        if rows and not any("time_us" in event for event in events):
            self.notes.append("no times are recorded: all rows happen at once")
        return rows

    def _segments(self, segments: list[Any]) -> list[Row]:
        """No history: the blocks that were live when the snapshot was made, all allocated at once."""
        self.notes.append("no history is recorded: read are the blocks that were live")
        rows: list[Row] = []
        for number, segment in enumerate(segments, 1):
            if not isinstance(segment, dict) or not isinstance(segment.get("blocks"), list):
                self._fail(number, "no dict with a list `blocks`", "segment")
            stream = self._number(segment, "stream", number, "segment")
            address = self._number(segment, "address", number, "segment")
            total = self._number(segment, "total_size", number, "segment")
            rows.append(Row(0, SEGMENT_ALLOC, stream, address, total, 0, 0, number))
            for block in segment["blocks"]:
                if not isinstance(block, dict):
                    self._fail(number, "a block is no dict", "segment")
                size = self._number(block, "size", number, "segment")
                if block.get("state") == "active_allocated":
                    asked = (
                        self._number(block, "requested_size", number, "segment") if "requested_size" in block else size
                    )
                    rows.append(Row(0, ALLOC, stream, address, asked, 0, 0, number))
                address += size
        return rows

    def _number(self, record: dict[str, Any], key: str, number: int, unit: str = "event") -> int:
        value = record.get(key)
        if type(value) is not int:
            self._fail(number, f"{key} is {'missing' if value is None else 'not a whole number'}", unit)
        if not 0 <= value <= LARGEST:
            self._fail(number, f"{key} is {'negative' if value < 0 else 'too large'}", unit)
        return value


def _load(path: str, progress: Progress | None) -> object:
    with open_trace(path) as (stream, share):
        parts = []
        while part := stream.read(1 << 20):
            parts.append(part)
            if progress is not None:
                progress(share())
    data = b"".join(parts)
    _judge(path, data)
    try:
        return _PlainData(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(path, 0, f"the pickle is damaged ({text})") from None


def _judge(path: str, data: bytes) -> None:
    """Raise TraceError unless all opcodes up to the end build plain data, within the bytes that are there.

    The bounds matter as well as the kinds: a memo index near 2**32 makes the unpickler fill gigabytes.
    """
    at, end = 0, len(data)
    while True:
        if at < end and (run := _RUN.match(data, at)):
            at = run.end()
        if at >= end:
            raise TraceError(path, 0, "the pickle is cut off")
        code = data[at]
        if code == _STOP:
            return
        if code == _LONG_BINPUT:
            if int.from_bytes(data[at + 1 : at + 5], "little") > at:
                raise TraceError(path, 0, "the pickle is damaged (a memo index that nothing needs)")
            at += 5
        elif code in _COUNTED:
            width = _COUNTED[code]
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
        elif code in _CODE:
            raise TraceError(path, 0, f"refused: the pickle has {_CODE[code]}, so reading it could run code")
        else:
            raise TraceError(
                path, 0, f"not a snapshot: the pickle has an opcode that plain data does not need ({code:#x})"
            )

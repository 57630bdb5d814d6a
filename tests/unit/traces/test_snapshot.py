"""PyTorch's snapshots: a pickle is a program, so it is judged before it runs."""

from __future__ import annotations

import collections
import os
import pickle
import struct
from collections.abc import Callable
from typing import Any

import pytest

from allocator.traces import TraceError, read_trace, summarize

Write = Callable[..., str]


def event(action: str, addr: int = 0x200, size: int = 8, stream: int = 0, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": stream, **more}


def test_a_history_is_read_in_order(write: Write) -> None:
    events = [
        event("segment_alloc", time_us=1_000_000),
        event("alloc", time_us=1_000_010),
        event("free_requested", time_us=1_000_020, frames=[{"name": "f", "line": 3}]),
        event("free_completed", time_us=1_000_090),
        event("snapshot", time_us=1_000_095),
        {"action": "oom", "size": 99, "stream": 0, "device_free": 4, "time_us": 1_000_100},
    ]
    trace = read_trace(write({"segments": [], "device_traces": [events]}))
    assert (trace.layout, trace.has_launches, trace.count, trace.notes) == ("pytorch", False, 5, ())
    assert [(row.time_ns, row.op, row.line) for row in trace.rows()] == [
        (0, "segment_alloc", 1),
        (10_000, "alloc", 2),
        (20_000, "free", 3),
        (90_000, "free_completed", 4),
        (100_000, "alloc_failed", 6),
    ]
    assert summarize(trace).late == {3}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_is_read(tmp_path: Any, protocol: int) -> None:
    names = [f"name{i}" for i in range(400)]  # enough for long memo indices
    content = {"segments": [], "device_traces": [[event("alloc", frames=[*names, *names], time_us=1 << 50)]], "f": 1.5}
    path = tmp_path / "snapshot"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    assert read_trace(path).count == 1


def test_without_history_the_live_blocks_are_read(write: Write) -> None:
    blocks = [
        {"size": 512, "requested_size": 300, "state": "active_allocated"},
        {"size": 1024, "requested_size": 0, "state": "inactive"},
        {"size": 2048, "state": "active_allocated"},
        {"size": 512, "requested_size": 1, "state": "active_pending_free"},
    ]
    segment = {"address": 0x10000, "total_size": 4096, "stream": 5, "blocks": blocks}
    trace = read_trace(write({"segments": [segment]}))
    assert "no history" in trace.notes[0]
    assert [(row.op, row.pointer, row.nbytes, row.stream) for row in trace.rows()] == [
        ("segment_alloc", 0x10000, 4096, 5),
        ("alloc", 0x10000, 300, 5),
        ("alloc", 0x10000 + 1536, 2048, 5),
    ]


def test_of_several_devices_the_busiest_is_read_and_the_others_named(write: Write) -> None:
    traces = [[], [event("alloc")], [event("alloc"), event("free_requested")]]
    trace = read_trace(write({"device_traces": traces}))
    assert trace.count == 2
    assert trace.notes == (
        "histories of several devices; read: device 2, not read: 1",
        "no times are recorded: all rows happen at once",
    )


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_could_run_code_is_refused_and_does_not_run(tmp_path: Any, protocol: int) -> None:
    mark = tmp_path / "was-here"
    path = tmp_path / "snapshot"
    path.write_bytes(pickle.dumps({"segments": [Evil(str(mark))]}, protocol=protocol))
    with pytest.raises(TraceError, match="refused: the pickle has a global"):
        read_trace(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        {"segments": [collections.OrderedDict()]},
        {"segments": [collections.Counter()]},
        b"\x80\x04c__builtin__\neval\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02K\x01Q.",
        b"\x80\x02(i__main__\nX\n.",
    ],
)
def test_every_kind_of_reference_is_refused(write: Write, content: object) -> None:
    with pytest.raises(TraceError, match="refused: "):
        read_trace(write(content))


def test_a_memo_index_that_would_fill_memory_is_refused(write: Write) -> None:
    with pytest.raises(TraceError, match="memo index"):
        read_trace(write(b"\x80\x02}r" + struct.pack("<I", 1 << 31) + b"."))


@pytest.mark.parametrize(
    "content",
    [
        b"\x80",
        b"\x80\x04",
        b"\x80\x04.",
        b"\x80\x04N",
        b"\x80\x04\x8c\xff.",
        b"\x80\x04h\x05.",
        b"\x80\x63N.",
        b"\x80\x04" + b"X" + struct.pack("<I", 1 << 31) + b"abc",
        b"\x80\x04I12\n.",
        pickle.dumps({"segments": []})[:-4],
        7,
        [],
        {},
        {"other": 1},
        {"segments": 3},
        {"device_traces": {"0": []}},
        {"segments": [3]},
        {"segments": [{"blocks": 1}]},
        {"segments": [{"blocks": [], "stream": 0, "address": 0}]},
        {"segments": [{"blocks": [3], "stream": 0, "address": 0, "total_size": 1}]},
        {"device_traces": [3]},
        {"device_traces": [[3]]},
        {"device_traces": [[{}]]},
        {"device_traces": [[event("dance")]]},
        {"device_traces": [[event("alloc", addr=-1)]]},
        {"device_traces": [[event("alloc", addr=1 << 80)]]},
        {"device_traces": [[event("alloc", size=1.5)]]},  # type: ignore[arg-type]
        {"device_traces": [[event("alloc", size=True)]]},
        {"device_traces": [[{"action": "alloc", "addr": 1, "size": 1}]]},
        {"device_traces": [[event("alloc", time_us=5_000_000), event("free_requested", time_us=1)]]},
        {"device_traces": [[event("alloc"), event("alloc")]]},
    ],
    ids=lambda content: repr(content)[:40],
)
def test_a_damaged_or_lying_snapshot_is_one_line(write: Write, content: object) -> None:
    path = write(content)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path).rows())
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)


def test_an_event_at_fault_is_called_an_event(write: Write) -> None:
    with pytest.raises(TraceError, match="event 2: 0x200 is allocated again"):
        list(read_trace(write({"device_traces": [[event("alloc"), event("alloc")]]})).rows())

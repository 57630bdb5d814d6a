"""Arbitrary bytes, and real files with bytes changed: readers raise TraceError or nothing."""

from __future__ import annotations

import gzip
import pickle
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.traces import Row, TraceError, read_trace, summarize

VALID = {
    "weir": b"time_ns,op,stream,pointer,bytes,gpu_start_ns,gpu_duration_ns\n"
    b"0,launch,1,,,5,7\n10,alloc,1,0x200,300,,\n20,free,1,0x200,300,,\n90000,free_completed,1,0x200,300,,\n",
    "rmm": b"Thread,Time,Action,Pointer,Size,Stream\n"
    b"1,10:00:00.000001,allocate,0x200,8,0x0\n1,10:00:00:000003,free,0x200,8,0x0\n"
    b"1,10:00:01,allocate failure,(nil),8,2\n",
    "intervals": b"id,lower,upper,size\nb,10,20,4\na,5,10,600\nc,10,12,0\n",
    "pytorch": pickle.dumps(
        {
            "segments": [
                {"address": 512, "total_size": 512, "stream": 0, "blocks": [{"size": 512, "state": "inactive"}]}
            ],
            "device_traces": [
                [
                    {"action": "alloc", "addr": 512, "size": 5, "stream": 1, "time_us": 77},
                    {"action": "free_requested", "addr": 512, "size": 5, "stream": 1, "time_us": 99},
                ]
            ],
        }
    ),
}


def survives(data: bytes) -> list[Row] | None:
    """The rows, or None if the file was refused in one line; any other error fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(data)
        try:
            trace = read_trace(path)
            rows = list(trace.rows())
            summary = summarize(trace)
        except TraceError as error:
            assert str(error).startswith(str(path))
            assert "\n" not in str(error)
            return None
    times = [row.time_ns for row in rows]
    assert times == sorted(times)
    assert summary.rows == len(rows)
    assert all(isinstance(n, int) and n >= 0 for row in rows for n in row if not isinstance(n, str))
    return rows


def test_the_files_are_good_as_they_are() -> None:
    for layout, data in VALID.items():
        assert survives(data), layout
        assert survives(gzip.compress(data)), layout


@given(st.binary(max_size=400))
def test_arbitrary_bytes(data: bytes) -> None:
    survives(data)
    survives(gzip.compress(data))
    survives(b"\x80\x04" + data)
    survives(b"\x1f\x8b" + data)


@settings(max_examples=100)
@given(
    layout=st.sampled_from(sorted(VALID)),
    edits=st.lists(st.tuples(st.integers(0, 10_000), st.binary(max_size=4), st.integers(0, 4)), max_size=4),
    packed=st.booleans(),
    keep=st.integers(0, 10_000),
)
def test_good_files_with_bytes_changed_and_cut(
    layout: str, edits: list[tuple[int, bytes, int]], packed: bool, keep: int
) -> None:
    data = bytearray(VALID[layout])
    for at, new, gone in edits:
        at %= len(data) + 1
        data[at : at + gone] = new
    survives(bytes(data))
    whole = gzip.compress(bytes(data)) if packed else bytes(data)
    survives(whole[: keep % (len(whole) + 1)])


FIELD = st.one_of(
    st.integers(-2, 1 << 64).map(str),
    st.integers(0, 1 << 12).map(hex),
    st.sampled_from(
        ["alloc", "free", "launch", "allocate", "free_completed", "00:00:01.5", "(nil)", "", " ", "-", "é"]
    ),
)


@settings(max_examples=100)
@given(layout=st.sampled_from(["weir", "rmm", "intervals"]), rows=st.lists(st.lists(FIELD, max_size=8), max_size=12))
def test_tables_of_arbitrary_fields(layout: str, rows: list[list[str]]) -> None:
    header = VALID[layout].split(b"\n")[0].decode()
    survives("\n".join([header, *(",".join(row) for row in rows)]).encode())


LEAF = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3))
RECORD = st.dictionaries(
    st.sampled_from(["action", "addr", "size", "stream", "time_us", "blocks", "address", "total_size", "state"]),
    st.one_of(LEAF, st.sampled_from(["alloc", "free_requested"]), st.lists(LEAF, max_size=2)),
)


@settings(max_examples=100)
@given(
    st.dictionaries(st.sampled_from(["segments", "device_traces"]), st.lists(st.one_of(LEAF, st.lists(RECORD), RECORD)))
)
def test_pickles_of_arbitrary_plain_data(content: dict[str, object]) -> None:
    survives(pickle.dumps(content))


@given(st.binary(max_size=60), st.integers(0, 5))
def test_arbitrary_opcodes_in_a_pickle_end_in_one_line_or_plain_data(code: bytes, protocol: int) -> None:
    survives(b"\x80" + bytes([protocol]) + code + b".")

"""What each layout's rows say, and what is refused, with the line at fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from allocator.traces import Row, TraceError, read_trace, summarize

Write = Callable[..., str]

WEIR = "time_ns,op,stream,pointer,bytes,gpu_start_ns,gpu_duration_ns\n"
RMM = "Thread,Time,Action,Pointer,Size,Stream\n"
INTERVALS = "id,lower,upper,size\n"


def rows(path: str) -> list[Row]:
    return list(read_trace(path).rows())


def test_our_layout_is_read_as_it_stands(write: Write) -> None:
    path = write(
        WEIR + "0,launch,1,,,5,7\n10,alloc,1,0x200,300,,\n20,free,1,0x200,300,,\n90000,free_completed,1,0x200,300,,\n"
    )
    trace = read_trace(path)
    assert (trace.layout, trace.has_launches, trace.path) == ("weir", True, path)
    assert list(trace.rows()) == [
        Row(0, "launch", 1, 0, 0, 5, 7, 2),
        Row(10, "alloc", 1, 0x200, 300, 0, 0, 3),
        Row(20, "free", 1, 0x200, 300, 0, 0, 4),
        Row(90000, "free_completed", 1, 0x200, 300, 0, 0, 5),
    ]
    assert list(trace.rows()) == list(trace.rows())


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("0,grab,0,0x200,1,,", "unknown op 'grab'"),
        ("-1,alloc,0,0x200,1,,", "time_ns is negative"),
        ("0.5,alloc,0,0x200,1,,", "time_ns is not a whole number"),
        ("0,alloc,x,0x200,1,,", "stream is not a whole number"),
        ("0,alloc,0,512,1,,", "pointer is not an address"),
        ("0,alloc,0,0x200,-1,,", "bytes is negative"),
        ("0,alloc,0,0x200,,,", "bytes is not a whole number"),
        ("0,alloc,0,0x200,1,5,6", "only a launch does"),
        ("0,launch,0,0x200,,5,6", "a launch has no pointer"),
        ("0,launch,0,,,5,", "gpu_duration_ns is not a whole number"),
        ("0,alloc,0,(nil),1,,", "allocated at the null pointer"),
        ("0,alloc,0", "3 fields"),
    ],
)
def test_a_wrong_row_in_our_layout_is_one_line(write: Write, row: str, problem: str) -> None:
    path = write(WEIR + "0,alloc,0,0x100000,8,,\n" + row + "\n")
    with pytest.raises(TraceError, match=problem) as caught:
        rows(path)
    assert (caught.value.path, caught.value.line) == (path, 3)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("first", "second", "ns"),
    [
        ("10:00:00.000001", "10:00:00.000003", 2000),
        ("10:00:00:000001", "10:00:00:000003", 2000),
        ("10:00:00:1", "10:00:00:3", 2000),
        ("10:00:00", "10:01:02", 62_000_000_000),
        ("10:00:00.1", "10:00:00.25", 150_000_000),
        ("23:59:59.999999", "00:00:00.000001", 2000),
        ("1.5", "2.000000001", 500_000_001),
        ("7", "9", 2_000_000_000),
    ],
)
def test_rmm_times_in_all_their_forms(write: Write, first: str, second: str, ns: int) -> None:
    path = write(RMM + f"1,{first},allocate,0x200,8,0x0\n1,{second},free,0x200,8,0x0\n")
    assert [row.time_ns for row in rows(path)] == [0, ns]


def test_rmm_rows_with_spaces_null_pointers_and_decimal_streams(write: Write) -> None:
    path = write(
        "Thread, Time, Action, Pointer, Size, Stream\n"
        "7, 00:00:01.0, allocate, 0x200, 1000, 0x55d0\n"
        "7, 00:00:01.0, allocate failure, (nil), 99, 2\n"
        "8, 00:00:01.0, allocate, (nil), 0, (nil)\n"
        "8, 00:00:01.0, free, 0, 0, 0\n"
    )
    trace = read_trace(path)
    assert (trace.layout, trace.has_launches) == ("rmm", False)
    assert [(row.op, row.stream, row.pointer, row.nbytes, row.line) for row in trace.rows()] == [
        ("alloc", 0x55D0, 0x200, 1000, 2),
        ("alloc_failed", 2, 0, 99, 3),
        ("alloc", 0, 0, 0, 4),
        ("free", 0, 0, 0, 5),
    ]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("1,00:00:01,grow,0x400,8,0x0", "unknown action 'grow'"),
        ("x,00:00:01,free,0x400,8,0x0", "Thread is not a whole number"),
        ("1,noon,free,0x400,8,0x0", "Time is neither"),
        ("1,00:61:00,free,0x400,8,0x0", "Time is neither"),
        ("1,00:00:01,free,0x400,-8,0x0", "Size is negative"),
        ("1,00:00:01,free,here,8,0x0", "Pointer is not an address"),
        ("1,00:00:01,free,0x400,8,main", "Stream is neither"),
        ("1,00:00:01,free,0x400,8", "5 fields"),
    ],
)
def test_a_wrong_row_in_an_rmm_log_is_one_line(write: Write, row: str, problem: str) -> None:
    with pytest.raises(TraceError, match=problem) as caught:
        rows(write(RMM + "1,00:00:00,allocate,0x200,8,0x0\n" + row + "\n"))
    assert caught.value.line == 3


def test_an_rmm_log_with_an_unknown_column_is_refused(write: Write) -> None:
    with pytest.raises(TraceError, match="unknown column 'Colour'"):
        rows(write("Thread,Time,Action,Pointer,Size,Stream,Colour\n"))


def test_rmm_time_before_the_first_row_is_backwards(write: Write) -> None:
    with pytest.raises(TraceError, match="backwards"):
        rows(write(RMM + "1,10:00:05,allocate,0x200,8,0\n1,10:00:00,free,0x200,8,0\n"))


def test_intervals_free_first_and_allocate_in_file_order(write: Write) -> None:
    trace = read_trace(write(INTERVALS + "b,10,20,4\na,5,10,600\nc,10,12,0\n"))
    assert (trace.layout, trace.has_launches) == ("intervals", False)
    assert [(row.time_ns, row.op, row.line, row.nbytes) for row in trace.rows()] == [
        (0, "alloc", 3, 600),
        (5, "free", 3, 600),
        (5, "alloc", 2, 4),
        (5, "alloc", 4, 0),
        (7, "free", 4, 0),
        (15, "free", 2, 4),
    ]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("b,5,5,1", "must be above lower"),
        ("b,9,5,1", "must be above lower"),
        ("a,0,5,1", "a second buffer is called 'a'"),
        ("b,-1,5,1", "lower is negative"),
        ("b,0,five,1", "upper is not a whole number"),
        ("b,0,5,1.5", "size is not a whole number"),
        (f"b,0,5,{(1 << 63) - 1}", "more than any address space"),
    ],
)
def test_a_wrong_interval_is_one_line(write: Write, row: str, problem: str) -> None:
    with pytest.raises(TraceError, match=problem) as caught:
        rows(write(INTERVALS + "a,0,9,1\n" + row + "\n"))
    assert caught.value.line == 3


def test_a_solvers_offsets_are_ignored(write: Write) -> None:
    assert len(rows(write("id,lower,upper,size,offset\na,0,9,1,77\n"))) == 2


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("alloc,0,0x200,8,,\n20,alloc,0,0x200,8,,", 3, "allocated again"),
        ("alloc,0,0x400,1024,,\n20,alloc,1,0x600,8,,", 3, "overlaps the live block at 0x400"),
        ("alloc,0,0x600,8,,\n20,alloc,1,0x400,1024,,", 3, "overlaps the live block at 0x600"),
        ("alloc,0,0x400,1024,,\n20,free,0,0x600,8,,", 3, "inside the live block at 0x400"),
        ("alloc,0,0x400,8,,\n20,free,0,0x400,8,,\n20,free,0,0x404,8,,\n", 0, ""),
        ("alloc,0,0x400,512,,\n20,alloc,0,0x600,8,,\n20,alloc,0,0x200,512,,\n", 0, ""),
        ("alloc,0,0x400,8,,\n3000000000,alloc,0,0x800,8,,\n20,free,0,0x400,8,,\n", 4, "backwards by 3.000 s"),
    ],
)
def test_rows_that_contradict_each_other_are_refused(write: Write, text: str, line: int, problem: str) -> None:
    path = write(WEIR + "20," + text)
    if not problem:
        assert rows(path)
        return
    with pytest.raises(TraceError, match=problem) as caught:
        rows(path)
    assert caught.value.line == line


def test_small_steps_back_in_time_are_levelled(write: Write) -> None:
    path = write(WEIR + "500,alloc,0,0x400,8,,\n400,free,0,0x400,8,,\n600,free,0,0x999,8,,\n")
    assert [row.time_ns for row in rows(path)] == [500, 500, 600]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty"),
        ("\n", "no line with column names"),
        ("hello\n", "no known layout"),
        ("a,b,c\n1,2,3\n", "no known layout"),
        (b"\x00\x01\x02\x03" * 100, "not text"),
        ("id,lower,upper\n", "column size is missing"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_files_of_no_known_layout_are_one_line(write: Write, content: bytes | str, problem: str, packed: bool) -> None:
    with pytest.raises(TraceError, match=problem):
        read_trace(write(content, packed=packed))


def test_content_decides_and_not_the_name(write: Write) -> None:
    text = INTERVALS + "a,0,9,1\n"
    assert read_trace(write(text, packed=True, name="plain.csv")).layout == "intervals"
    assert read_trace(write(text, name="packed.csv.gz")).layout == "intervals"
    assert read_trace(Path(write(text))).layout == "intervals"


def test_a_header_alone_is_an_empty_trace(write: Write) -> None:
    for header in (WEIR, RMM, INTERVALS):
        summary = summarize(read_trace(write(header)))
        assert (summary.rows, summary.peak_live_bytes) == (0, 0)


def test_a_summary_knows_the_peak_and_which_frees_were_held_up(write: Write) -> None:
    summary = summarize(
        read_trace(
            write(
                WEIR + "0,alloc,0,0x400,1,,\n0,alloc,3,0x1000,513,,\n1,launch,0,,,1,1\n"
                "10,free,0,0x400,1,,\n50010,free_completed,0,0x400,1,,\n"  # 50 us: only a slow host
                "50010,free,3,0x1000,513,,\n"
                "100011,free_completed,3,0x1000,513,,\n"  # later: held up
                "100012,alloc,0,0x400,1,,\n100013,free,0,0x400,1,,\n"  # no completion at all
                "100014,free,0,0xbad,1,,\n900000,free_completed,0,0xbad,1,,\n"  # from before recording
            )
        )
    )
    assert (summary.rows, summary.allocations, summary.launches) == (11, 3, 1)
    assert summary.peak_live_bytes == 512 + 1024
    assert summary.late == {7}
    assert list(summary.streams) == [0, 3]
    assert summary.end_ns == 900000

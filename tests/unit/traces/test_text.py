"""Bytes and lines: whatever a file holds, the only error is TraceError, with the line at fault."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from allocator.traces import TraceError
from allocator.traces.text import address, natural, open_trace, read_lines, read_table

Write = Callable[..., str]


def test_lines_are_numbered_and_blank_ones_skipped(write: Write) -> None:
    assert list(read_lines(write("a,b\n\n1,2\r\n  \n3,4"))) == [(1, "a,b"), (3, "1,2"), (5, "3,4")]


def test_a_byte_order_mark_is_no_part_of_the_first_name(write: Write) -> None:
    assert list(read_lines(write(b"\xef\xbb\xbfid\n"))) == [(1, "id")]


@pytest.mark.parametrize("packed", [False, True])
def test_lines_that_cross_chunks_stay_whole(write: Write, packed: bool) -> None:
    lines = [f"{n}," + "x" * (n % 200) for n in range(20_000)]
    shares: list[float] = []
    read = list(read_lines(write("\n".join(lines) + "\n", packed=packed), shares.append))
    assert [text for _, text in read] == lines
    assert [number for number, _ in read] == list(range(1, 20_001))
    assert shares == sorted(shares)
    assert shares[-1] == 1


def fails(path: str) -> TraceError:
    with pytest.raises(TraceError) as caught:
        list(read_lines(path))
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_gzip_file_that_is_cut_off_says_so(write: Write) -> None:
    data = gzip.compress(os.urandom(50_000).hex().encode() + b"\n")
    assert "cut off" in str(fails(write(data[: len(data) // 2])))


def test_a_gzip_file_that_is_damaged_says_so(write: Write) -> None:
    data = bytearray(gzip.compress(b"a,b\n" * 10_000))
    data[-6] ^= 0xFF  # the checksum
    assert "damaged" in str(fails(write(bytes(data))))
    assert "damaged" in str(fails(write(gzip.compress(b"a\n") + b"more")))


def test_bytes_that_are_no_text_are_named_by_line(write: Write) -> None:
    assert fails(write(b"a\nb\n\xff\xfe\n")).line == 3
    assert fails(write(b"a\nb\0c\n")).line == 2


def test_a_line_without_end_is_not_read_whole(write: Write) -> None:
    assert "no end of line" in str(fails(write("a,b\n" + "x" * 1_000_000)))


def test_what_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    assert "No such file" in str(fails(str(tmp_path / "missing")))
    assert str(tmp_path) in str(fails(str(tmp_path)))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    keeper = os.open(pipe, os.O_RDWR)  # so that opening does not wait
    try:
        assert "not a regular file" in str(fails(str(pipe)))
    finally:
        os.close(keeper)
    with pytest.raises(TraceError, match="cannot be read"), open_trace("null\0byte"):
        pass


def test_columns_may_stand_in_any_order(write: Write) -> None:
    path = write("b, a\n2,1\n")
    assert list(read_table(path, ("a", "b"))) == [(2, ["1", "2"])]
    assert list(read_table(write("a,b,c\n1,2,3\n"), ("a", "b"), ignored=("c",))) == [(2, ["1", "2"])]


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("a,b,c\n", 1, "unknown column 'c'"),
        ("a\n", 1, "column b is missing"),
        ("a,b,a\n", 1, "two columns are called 'a'"),
        ("a,b\n1\n", 2, "1 fields, but the header names 2"),
        ("a,b\n1,2\n1,2,3\n", 3, "3 fields"),
        ("\na,b\n", 1, "no line with column names"),
    ],
)
def test_a_table_of_another_shape_is_refused(write: Write, text: str, line: int, problem: str) -> None:
    with pytest.raises(TraceError, match=problem) as caught:
        list(read_table(write(text), ("a", "b")))
    assert caught.value.line == line


def test_numbers_are_digits_and_nothing_else() -> None:
    assert natural("f", 1, "size", "0") == 0
    assert natural("f", 1, "size", " 12 ") == 12
    assert natural("f", 1, "size", str((1 << 63) - 1)) == (1 << 63) - 1
    for text in ("", "1.5", "1_000", "+1", "1e3", "0x10", "one", "\u00b2", "\u0661"):
        with pytest.raises(TraceError, match="size is not a whole number"):
            natural("f", 1, "size", text)
    with pytest.raises(TraceError, match="negative"):
        natural("f", 1, "size", "-1")
    for text in (str(1 << 63), "9" * 5000):
        with pytest.raises(TraceError, match="too large"):
            natural("f", 1, "size", text)


def test_addresses_are_what_c_prints() -> None:
    assert address("f", 1, "pointer", "0x7f00A0") == 0x7F00A0
    assert [address("f", 1, "pointer", text) for text in ("(nil)", "0x0", "0", " (nil) ")] == [0, 0, 0, 0]
    for text in ("", "7f00", "0x", "0xg", "0x-1", "0x1_0", "-0x1", "0x" + "f" * 17, "nil"):
        with pytest.raises(TraceError, match="pointer is not an address"):
            address("f", 1, "pointer", text)

"""Rounding, and sizes as text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.sizes import GIB, KIB, MIB, QUANTUM, TIB, check_request, format_size, parse_size, round_up


@given(st.integers(0, 1 << 60), st.sampled_from([512, 4096, 2 * MIB]))
def test_rounding_up_gives_the_next_multiple(nbytes: int, quantum: int) -> None:
    got = round_up(nbytes, quantum)
    assert got % quantum == 0 and nbytes <= got < nbytes + quantum


def test_rounding_is_to_512_by_default() -> None:
    assert QUANTUM == 512
    assert [round_up(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


@given(st.integers(0, 1 << 80))
def test_an_integer_is_a_request(nbytes: int) -> None:
    assert check_request(nbytes) == nbytes


@pytest.mark.parametrize("wrong", [1.0, "1", None, True, b"", [], 1j])
def test_anything_else_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match=type(wrong).__name__):
        check_request(wrong)


def test_a_negative_request_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="-3"):
        check_request(-3)


@given(
    st.integers(0, 1 << 50),
    st.sampled_from([("", 1), ("B", 1), ("KiB", KIB), ("MiB", MIB), ("GiB", GIB), ("TiB", TIB)]),
)
def test_text_means_bytes(count: int, unit: tuple[str, int]) -> None:
    for text in (f"{count}{unit[0]}", f" {count} {unit[0]} ", f"{count}{unit[0].lower()}"):
        assert parse_size(text) == count * unit[1]


@given(st.integers(0, 100), st.integers(0, 1 << 40))
def test_a_share_is_of_the_whole(percent: int, whole: int) -> None:
    assert parse_size(f"{percent}%", whole=whole) == whole * percent // 100


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1.5GiB", "1GB", "1 G", "GiB", "1e9", "101%", "%", "5%", "0x10", "1,000"]
)
def test_other_text_is_one_clear_value_error(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_size(text, whole=None if text == "5%" else 1024)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536 * KIB, "1.50 MiB"), (5 * GIB, "5.00 GiB"),
     (300 * MIB, "300 MiB"), (3 * TIB, "3.00 TiB")],
)  # fmt: skip
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text

"""Operations are data: printed, recorded, read again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.stress.operations import (
    LEGACY,
    OWN,
    VERBS,
    Op,
    Recording,
    RecordingError,
    Setting,
    Step,
    parse,
    read_recording,
)

SETTING = Setting(workers=3, streams=4, limit=0, seed=7)


@st.composite
def operations(draw: st.DrawFn) -> Op:
    verb = draw(st.sampled_from(sorted(VERBS)))
    operands = [
        draw(st.sampled_from([OWN, LEGACY, 0, 3, 1005]) if kind == "s" else st.integers(0, 2)) for kind in VERBS[verb]
    ]
    return Op(verb, *operands)


@given(operations())
def test_an_operation_is_read_as_it_was_printed(op: Op) -> None:
    assert parse(str(op)) == op


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("burn b1", "no operation is called 'burn'"),
        ("alloc b1 s0", "alloc takes 3 operands, not 2"),
        ("free s1", "'s1' should be b and a number"),
        ("free b-1", "should be b and a number"),
        ("alloc b1 s0 n99999999999999999999", "should be n and a number"),
        ("alloc b1 s0 n9999999999999999999", "should be n and a number"),
        ("free bown", "should be b and a number"),
    ],
)
def test_what_is_no_operation_is_refused_in_one_line(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(text)


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    steps = (Step(0, Op("alloc", 1, 2, 4096)), Step(2, Op("free", 1)), Step(1, Op("take", 3)))
    recording = Recording(SETTING, steps, "race: somewhere")
    recording.write(tmp_path / "r.txt")
    assert read_recording(tmp_path / "r.txt") == recording


HEAD = '# weir stress 1\n# {"workers": 2, "streams": 4, "limit": 0}\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "line 1: no recording"),
        ("# something else\n{}", "line 1: no recording"),
        ("# weir stress 1\n# no json", "line 2: "),
        ("# weir stress 1\n# []", "line 2: "),
        ('# weir stress 1\n# {"workers": 2, "streams": 4, "limit": 0, "colour": 1}', "unknown setting 'colour'"),
        ('# weir stress 1\n# {"workers": 0, "streams": 4, "limit": 0}', "workers must be a whole number from 1 on"),
        ('# weir stress 1\n# {"workers": true, "streams": 4, "limit": 0}', "workers must be a whole number"),
        ('# weir stress 1\n# {"workers": 2000, "streams": 4, "limit": 0}', "at most 1024 workers"),
        (HEAD + "0 free b1\n\n2 free b1", "line 5: '2' is no worker: they are 0 to 1"),
        (HEAD + "x free b1", "line 3: 'x' is no worker"),
        (HEAD + "0", "line 3: there is no operation"),
        (HEAD + "0 burn", "line 3: no operation is called 'burn'"),
        (HEAD + "0 give b1 w2", "line 3: give: w2 is no worker"),
        (HEAD + "0 sync s4", "line 3: sync: s4 is no stream"),
    ],
)
def test_a_broken_recording_is_one_line_that_names_the_place(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "r.txt"
    path.write_text(text)
    with pytest.raises(RecordingError) as caught:
        read_recording(path)
    assert why in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_recording_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="cannot be read: No such file"):
        read_recording(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordingError, match="it is not text"):
        read_recording(tmp_path / "binary")

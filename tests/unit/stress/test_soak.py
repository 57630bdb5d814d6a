"""Samples over time, what counts as growth, and the picture of it."""

from __future__ import annotations

import builtins
import json
import os
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allocator import CachingAllocator, SimDevice
from allocator.stress import Growth, Hammer, Sample, SampleFile, Sampler, growth_of, open_target, soak, write_curves
from allocator.stress.curves import PANELS, draw, ticks
from allocator.stress.hammer import Outcome
from allocator.stress.soak import FIELDS, JUDGED, MEASURED, Curve, judge
from tests.unit.stress.conftest import MIB, a_plan

A_SAMPLE = Sample(1.5, 2, 300, 4096, 2048, 1024, 7, 3, 50 * MIB)


def points(seconds: int, **of: Callable[[int], int]) -> list[tuple[float, tuple[int, ...]]]:
    """A sample a second; what is not given stays at 100 MiB, which is no growth of anything."""
    return [
        (float(second), tuple(of[name](second) if name in of else 100 * MIB for name in MEASURED))
        for second in range(seconds)
    ]


def verdicts(**of: Callable[[int], int]) -> dict[str, bool]:
    return {one.name: one.grows for one in judge(points(400, **of), 400.0)}


# -- growth ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "leak"),
    [
        ("events", lambda s: 100 + s),
        ("threads", lambda s: 10 + s // 30),
        ("rss_bytes", lambda s: (100 + s) * MIB),
        ("rss_bytes", lambda s: 100 * MIB + s * 70_000),  # 27 MiB in all
    ],
)
def test_what_keeps_growing_is_named_and_nothing_else_is(name: str, leak: Callable[[int], int]) -> None:
    assert verdicts(**{name: leak}) == {one: one == name for one in JUDGED}


@pytest.mark.parametrize(
    ("name", "fine"),
    [
        ("events", lambda s: min(100 + 5 * s, 900)),  # warms up, then stays
        ("events", lambda s: 50 + s % 40),  # comes and goes
        ("threads", lambda s: 9 + (s > 300)),  # one more, once
        ("rss_bytes", lambda s: (100 + min(s, 190)) * MIB),
        ("rss_bytes", lambda s: 100 * MIB + s * 8192),  # 0.8 MiB a quarter: less than the allocator of Python moves
        ("rss_bytes", lambda s: (300 - s // 2) * MIB),
        ("rss_bytes", lambda s: (100 + (s if s % 50 == 7 else 0)) * MIB),  # ever higher, for a moment each
    ],
)
def test_what_levels_off_is_fine(name: str, fine: Callable[[int], int]) -> None:
    assert not any(verdicts(**{name: fine}).values())


def test_growth_says_its_figures_in_words() -> None:
    assert str(Growth("events", (5, 10, 2000, 3000))) == (
        "driver events: 5, 10, 2,000, 3,000 in the middle of the four quarters of the run"
    )
    assert "1.00 MiB, 2.00 MiB, 3.00 MiB, 4.00 MiB" in str(Growth("rss_bytes", (MIB, 2 * MIB, 3 * MIB, 4 * MIB)))


def test_quarters_without_a_sample_are_like_the_one_before() -> None:
    found = judge([(0.0, tuple(range(1, 7))), (9.9, tuple(range(11, 17)))], 10.0)
    at = MEASURED.index("events")
    assert found[0].medians == (at + 1, at + 1, at + 1, at + 11)
    assert judge([], 0.0)[0].medians == (0, 0, 0, 0)


def test_a_curve_keeps_every_peak_in_bounded_memory() -> None:
    curve = Curve(most=8)
    for second in range(1000):
        curve.add(float(second), (second % 100, 999 if second == 517 else 0))
    assert len(curve.points) <= 8
    moments = [moment for moment, _ in curve.points]
    assert moments == sorted(moments) and moments[0] == 0.0
    assert max(values[1] for _, values in curve.points) == 999
    assert all(values[0] == 99 for _, values in curve.points[:-1])
    before = [moment for moment, values in curve.points if values[1] == 999]
    assert before[0] <= 517.0


# -- samples ---------------------------------------------------------------------------------------


def test_a_sample_has_the_pools_figures_and_the_process() -> None:
    with CachingAllocator(SimDevice()) as pool:
        sampler = Sampler(pool)
        assert sampler.remark() == "" and sampler.seconds == 0.0
        block = pool.allocate(3 * MIB)
        sample = sampler.take()
        block.close()
        del block
    assert sample.live_bytes == 3 * MIB and sample.reserved_bytes >= 3 * MIB
    assert sample.threads >= threading.active_count() >= 1
    assert sample.rss_bytes > 5 * MIB
    assert sampler.last is sample and sampler.remark().startswith(f"{sample.events:,} events, {sample.threads} threads")


def test_samples_are_taken_while_the_hammer_runs() -> None:
    plan = a_plan("steady", operations=100)
    hammer = Hammer(open_target(None, plan.setting.limit), plan)
    written: list[Sample] = []
    sampler = Sampler(hammer.pool, 0.01, written.append)

    def progress(outcome: Outcome, more: int) -> None:
        sampler(outcome, more)

    with sampler:
        while len(written) < 3:  # as slow as the machine is
            time.sleep(0.001)
        outcome = hammer.run(600, progress=progress, rounds=8)
    assert outcome.violation is None and sampler.error is None
    assert sampler.taken == len(written)
    assert [s.seconds for s in written] == sorted(s.seconds for s in written)
    assert written[-1].operations > 0
    assert growth_of(sampler, outcome) is not None


def test_a_run_in_which_no_quarter_has_seen_everything_is_not_judged() -> None:
    plan = a_plan("steady", "churn")
    hammer = Hammer(open_target(None, plan.setting.limit), plan)
    with Sampler(hammer.pool) as sampler:
        outcome = hammer.run(600, rounds=1)
    assert soak.least_rounds(outcome) == 16
    assert growth_of(sampler, outcome) is None
    outcome.rounds = 16
    assert [one.name for one in growth_of(sampler, outcome) or ()] == list(JUDGED)


def test_a_reading_that_fails_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(pool: CachingAllocator, **options: Any) -> None:
        raise ZeroDivisionError("figures that make no sense")

    with CachingAllocator(SimDevice()) as pool, monkeypatch.context() as patch:
        patch.setattr(CachingAllocator, "stats", broken)
        with Sampler(pool) as sampler:
            pass
    assert sampler.error is not None and sampler.error.kind == "exception"
    assert "ZeroDivisionError: figures that make no sense" in sampler.error.text


def test_nobody_samples_every_no_seconds() -> None:
    with CachingAllocator(SimDevice()) as pool, pytest.raises(ValueError, match="above 0"):
        Sampler(pool, 0.0)


def test_what_the_c_library_only_keeps_is_given_back_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(soak, "_malloc_trim", lambda: told.append)
    with CachingAllocator(SimDevice()) as pool:
        Sampler(pool).take()
        assert told == [0]
        monkeypatch.setattr(soak, "_malloc_trim", lambda: None)
        Sampler(pool).take()


@pytest.mark.parametrize("library", [object(), OSError("none")])
def test_a_c_library_without_it_is_left_alone(library: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: None) -> object:
        if isinstance(library, Exception):
            raise library
        return library

    monkeypatch.setattr("ctypes.CDLL", load)
    soak._malloc_trim.cache_clear()
    try:
        soak.trim_malloc()
        assert soak._malloc_trim() is None
    finally:
        soak._malloc_trim.cache_clear()


def test_where_the_system_says_less_what_python_knows_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    now = soak.rss_bytes()

    def refuse(*_: object, **__: object) -> Any:
        raise FileNotFoundError("/proc")

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        patch.setattr(builtins, "open", refuse)
        assert soak.threads() == threading.active_count()
        assert soak.rss_bytes() > now // 2
        patch.setattr(sys, "platform", "darwin")  # counts bytes, others KiB
        assert soak.rss_bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        patch.setitem(sys.modules, "resource", None)
        assert soak.rss_bytes() == 0


# -- files -----------------------------------------------------------------------------------------


def test_samples_go_to_their_file_at_once_as_csv_or_as_json(tmp_path: Path) -> None:
    table, lines = SampleFile(str(tmp_path / "s.csv")), SampleFile(str(tmp_path / "s.JSONL"))
    for file in (table, lines):
        file.write(A_SAMPLE)
        file.write(A_SAMPLE._replace(seconds=2.5))
    assert (tmp_path / "s.csv").read_text().splitlines() == [
        ",".join(FIELDS),
        f"1.5,2,300,4096,2048,1024,7,3,{50 * MIB}",
        f"2.5,2,300,4096,2048,1024,7,3,{50 * MIB}",
    ]
    read = [json.loads(line) for line in (tmp_path / "s.JSONL").read_text().splitlines()]
    assert read[0] == A_SAMPLE._asdict() and read[1]["seconds"] == 2.5
    for file in (table, lines, table):
        file.close()
    table.write(A_SAMPLE)
    assert table.problem is None


def test_a_file_of_samples_that_cannot_be_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.csv or \.jsonl"):
        SampleFile(str(tmp_path / "s.txt"))
    with pytest.raises(OSError, match=r"nowhere/s\.csv: No such file"):
        SampleFile(str(tmp_path / "nowhere" / "s.csv"))


class Full:
    """A file on a disk that is full; or one that says so only when it is closed."""

    def __init__(self, late: bool) -> None:
        self.late = late

    def write(self, text: str) -> None:
        """Into the buffer."""

    def flush(self) -> None:
        if not self.late:
            raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("late", [False, True])
def test_a_full_disk_ends_the_file_and_not_the_run(tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", lambda *_, **__: Full(late))
        file = SampleFile("s.csv")
    file.write(A_SAMPLE)
    file.write(A_SAMPLE)
    file.close()
    assert file.problem == "s.csv: No space left on device"


# -- pictures --------------------------------------------------------------------------------------


def test_a_picture_says_in_words_what_its_lines_are_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    path = tmp_path / "soak.svg"
    write_curves(str(path), "a < b & c", points(50, events=lambda s: s * 3, threads=lambda s: 4), 50.0)
    text = path.read_text()
    root = ET.fromstring(text)
    shown = [e.text for e in root.iter() if e.tag.endswith("text")]
    assert shown[0] == "a < b & c" and shown[-1] == "seconds since the run began"
    for panel in PANELS:
        assert panel.name in shown
        for word, _ in panel.lines:
            assert word in shown
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "") and "<script" not in text


def test_lines_go_where_the_values_are() -> None:
    few = points(3, events=lambda s: 100 * s)
    root = ET.fromstring(draw("t", few, 2.0))
    paths = [e.get("d") or "" for e in root.iter() if e.tag.endswith("path") and e.get("class") == "a"]
    events = next(d for d in paths if d.count("L") == 2 and len({p.split()[1] for p in d[1:].split("L")}) == 3)
    places = [tuple(map(float, p.split())) for p in events[1:].split("L")]
    assert [x for x, _ in places] == [84.0, 510.0, 936.0]
    assert places[0][1] - places[1][1] == pytest.approx(places[1][1] - places[2][1], abs=0.2)


def test_a_picture_of_nothing_is_a_picture() -> None:
    ET.fromstring(draw("nothing", [], 0.0))


def test_ticks_are_few_and_round() -> None:
    for most in (1, 2, 7, 99, 12345):
        step, unit, factor = ticks(most, in_bytes=False)
        assert step >= 1 and most // step <= 8 and (unit, factor) == ("", 1)
    assert ticks(5, in_bytes=True) == (1, "B", 1)
    assert ticks(6 << 10, in_bytes=True)[1:] == ("KiB", 1 << 10)
    assert ticks(40 << 30, in_bytes=True)[1:] == ("GiB", 1 << 30)


def test_a_png_needs_matplotlib_and_an_error_names_the_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "soak.png"
    write_curves(str(path), "t", points(20), 20.0)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OSError, match=r"nowhere/soak\.svg: No such file"):
        write_curves(str(tmp_path / "nowhere" / "soak.svg"), "t", [], 1.0)

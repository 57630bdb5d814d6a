"""What a run says, and the aims: a row is never guessed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from allocator.stress.benchmarks import acceptance, report
from allocator.stress.benchmarks.many_streams import ONE
from allocator.stress.benchmarks.runner import Measured, Results
from allocator.stress.benchmarks.timing import compare


def measured(
    benchmark: str, door: str, reference: str, values: dict[str, float], *, case: str = "case", **more: object
) -> Measured:
    unit = str(more.pop("unit", "ns"))
    figures = compare({name: [value] * 3 for name, value in values.items()}, reference)
    return Measured(benchmark, case, door, unit, reference, figures, **more)  # type: ignore[arg-type]  # the keywords of `Measured`


def everything(**changes: float) -> list[Measured]:
    """A run on a GPU in which every aim of the plain build is just reached."""
    v = {
        "steady": 2.0, "each": 3.0, "arrays": 1.3, "rmm": 5.0, "async": 3.0, "many": 3.0, "streams": 1.5, "eight": 1.0,
        "growth": 90.0, "trim": 19.0, "moved": 2010.0,
    } | changes  # fmt: skip
    threads = [
        measured("threads", "core", "floor", {"floor": 1.0, "weir": v["eight"] if n == 8 else 1.0}, at=n)
        for n in (1, 2, 4, 8, 16)
    ]
    return [
        measured("steady", "cupy", "cupy", {"cupy": 1.0, "weir": 9.0}, at=512),
        measured("steady", "cupy", "cupy", {"cupy": 1.0, "weir": v["steady"], "cupy-async": v["async"]}, at=4096),
        measured("steady", "cupy", "cupy", {"cupy": 1.0, "weir": 2.0, "rmm": v["rmm"]}, at=4096, guests=True),
        measured("round-robin", "cupy", "cupy", {"cupy": 1.0, "weir": v["each"]}, case="each", at=262144),
        measured("round-robin", "cupy", "cupy", {"cupy": 1.0, "weir": 2.0}, case="one in 16", at=262144),
        measured("arrays", "cupy", "cupy", {"cupy": 1.0, "weir": v["arrays"]}, at=4096),
        measured("best-fit", "core", "bare", {"bare": 1.0, "pool": 10.0}, at=1000),
        measured("best-fit", "core", "bare", {"bare": 1.0, "pool": 10.0 * v["many"]}, at=1_000_000),
        measured("streams", "cupy", "cupy", {"cupy": 1.0, "weir": 9.0}, case="1,000 streams", at=1000),
        measured("streams", "cupy", ONE, {ONE: 2.0, "weir": 2.0 * v["streams"]}, case="1,000 streams beside one"),
        *threads,
        measured("growth", "core", "driver", {"driver": 1.0, "weir": v["growth"]}, unit="ms"),
        measured("trim", "core", "driver", {"driver": 2000.0, "weir": v["trim"]}, case="10 GiB: the call", unit="ms"),
        measured(
            "trim", "core", "alone", {"alone": 2000.0, "weir": v["moved"]}, case="10 GiB: the other stream's work"
        ),
    ]


def test_a_run_on_a_gpu_answers_every_row() -> None:
    rows = acceptance.table(everything(), "plain", simulated=False)
    assert [row.reached for row in rows] == [True] * 12
    assert len({row.what for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("change", "value", "row"),
    [
        ("steady", 2.1, 0), ("each", 3.1, 1), ("arrays", 1.31, 2), ("rmm", 4.9, 3), ("async", 2.8, 4), ("many", 3.1, 5),
        ("streams", 1.6, 6), ("eight", 1.1, 7), ("eight", 2.1, 8), ("growth", 2000.0, 9), ("trim", 21.0, 10),
        ("moved", 2021.0, 11),
    ],
)  # fmt: skip
def test_a_row_says_when_it_is_not_reached(change: str, value: float, row: int) -> None:
    rows = acceptance.table(everything(**{change: value}), "plain", simulated=False)
    assert rows[row].reached is False
    text = report.acceptance_table(rows, "plain")
    assert text.splitlines()[1 + row].count("NOT REACHED") == 1


def test_what_the_driver_takes_of_a_trim_stands_beside_it() -> None:
    found = everything()
    assert "driver" not in acceptance.table(found, "plain", simulated=False)[10].remark
    figures = {"driver": 2000.0, "driver-vmm": 13.44, "weir": 16.0}
    found = [one for one in found if one.case != "10 GiB: the call"]
    found.append(measured("trim", "core", "driver", figures, case="10 GiB: the call", unit="ms"))
    row = acceptance.table(found, "plain", simulated=False)[10]
    assert row.reached and row.remark == "10 GiB; the driver's calls alone take 13.4 ms"


def test_the_compiled_build_has_its_own_aims() -> None:
    rows = acceptance.table(everything(), "compiled", simulated=False)
    assert [row.reached for row in rows[:5]] == [False] * 5
    assert [row.aim for row in rows[:5]] == [1.1, 1.5, 1.05, 0.25, 0.4] and rows[7].aim == 1.3


def test_nothing_measured_is_never_reached() -> None:
    rows = acceptance.table([], "plain", simulated=True)
    assert {row.reached for row in rows} == {None} and all(row.remark for row in rows)
    assert report.acceptance_table(rows, "plain").count("not measured: ") == len(rows)


def test_made_up_addresses_answer_nothing_about_cupys_pool() -> None:
    found = [replace(one, door="made-up") if one.door == "cupy" else one for one in everything()]
    rows = acceptance.table(found, "plain", simulated=True)
    assert [row.reached for row in rows[:5]] == [None] * 5 and rows[6].reached is None
    assert rows[5].reached and rows[9].remark.startswith("on the simulator")


def test_a_case_is_told_with_value_ratio_and_spread() -> None:
    one = replace(
        measured("steady", "cupy", "cupy", {"cupy": 600.0, "weir": 1234.0}, case="4 KiB", guests=True),
        failed={"rmm": "MemoryError: none"},
    )
    assert report.lines(one) == [
        "steady [cupy, guests loaded]: 4 KiB",
        "  cupy        600 ns     1.000  (1.000 .. 1.000)  = 1",
        "  weir       1.23 us     2.057  (2.057 .. 2.057)",
        "  rmm   failed: MemoryError: none",
    ]


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (12.4, "ns", "12 ns"), (1234.0, "ns", "1.23 us"), (2.5e6, "ns", "2.5 ms"), (3e9, "ns", "3 s"),
        (0.0, "ms", "0 ms"), (1234.5, "ms", "1,234 ms"), (1.234, "s", "1.23 s"),
    ],
)  # fmt: skip
def test_values_have_three_digits(number: float, unit: str, text: str) -> None:
    assert report.value(number, unit) == text


def test_json_holds_every_repeat() -> None:
    results = Results(everything(), skipped={"x": "y"}, failed={"a": "b"}, left_out={"torch": "no"})
    rows = acceptance.table(results.measured, "plain", simulated=False)
    document = json.loads(report.json_text(report.as_json({"weir": "1"}, {"repeats": 3}, results, rows)))
    assert document["weir"] == "1" and document["settings"] == {"repeats": 3}
    assert document["skipped"] == {"x": "y"} and document["failed"] == {"a": "b"}
    assert document["left_out"] == {"torch": "no"} and len(document["acceptance"]) == 12
    case = document["results"][1]
    assert (case["benchmark"], case["at"], case["reference"], case["door"]) == ("steady", 4096, "cupy", "cupy")
    assert case["peers"]["weir"]["repeats"] == [2.0, 2.0, 2.0] and case["peers"]["weir"]["spread"] == [2.0, 2.0]


def test_the_same_reason_is_told_once() -> None:
    results = Results(left_out={"rmm": "needs a GPU", "torch": "needs a GPU", "cupy": "is broken"})
    assert report.missing(results) == ["left out: rmm, torch: needs a GPU", "left out: cupy: is broken"]

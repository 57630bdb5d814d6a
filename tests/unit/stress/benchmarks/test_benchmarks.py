"""Every benchmark in small, on the simulator: it runs to its end, and measures what it says it does.

No figure is judged here.  What is judged is what was done: how allocations were served, which driver calls waited.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from allocator import SimDevice
from allocator.stress.benchmarks import (
    best_fit,
    cold_start,
    cupy_streams,
    live_page,
    replays,
    reports,
    rmm_cases,
    scrape_cost,
    scrapes,
)
from allocator.stress.benchmarks.__main__ import main
from allocator.stress.benchmarks.cases import Missing, Settings
from allocator.stress.benchmarks.many_streams import ONE
from allocator.stress.benchmarks.registry import BENCHMARKS, chosen
from allocator.stress.benchmarks.runner import Results, run
from allocator.stress.benchmarks.session import Session, stages

CUPY = importlib.util.find_spec("cupy") is not None
TINY = Settings(repeats=1, seconds=1e-6, quick=True)
SELF_MADE = ("scrapes", "scrape-cost", "replay-ratios", "replay-rows", "live-page", "cupy-programs")
"""Their modules have `main()`s of their own, which take longer than a test may; see the last tests."""


def measured(*names: str, settings: Settings = TINY) -> Results:
    session = Session(names, settings)
    results = session.run()
    assert not session.failed, (results.failed, [one.failed for one in results.measured])
    return results


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name not in SELF_MADE])
def test_it_runs_on_the_simulator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "SIMULATED", {"python": "pass"})
    results = measured(name)
    if not CUPY and "cupy" in BENCHMARKS[name].needs:
        assert results.skipped
        return
    assert results.measured and not results.skipped
    doors = {one.door for one in results.measured}
    if CUPY and name in ("steady", "live", "random", "streams", "round-robin", "handover", "threads", "rmm-random"):
        assert doors == {"core", "made-up"}
    for one in results.measured:
        assert one.reference in one.figures
        assert all(len(figures.values) == 1 for figures in one.figures.values())


@pytest.mark.parametrize("door", ["core", *(["made-up"] if CUPY else [])])
def test_memory_really_goes_from_stream_to_stream(door: str) -> None:
    results = measured("round-robin", settings=Settings(repeats=1, seconds=1e-6, quick=True, peers=("floor", "weir")))
    for one in results.measured:
        if one.door == door:
            served = one.figures["weir"].notes["reuse"]
            others = served["opportunistic"] + served["event_dependency"] + served["internal_dependency"]
            assert others > served["new_memory"]
            assert served["same_stream"] > others, "until every stream has its own (0017)"


@pytest.mark.parametrize("door", ["core", *(["made-up"] if CUPY else [])])
def test_streams_with_memory_of_their_own_find_it_again(door: str) -> None:
    results = measured("streams", settings=Settings(repeats=1, seconds=1e-6, quick=True, peers=("floor", "weir")))
    for one in results.measured:
        if one.door == door:
            several = one.at or 11  # ten beside one
            for name in {"weir", ONE} & one.figures.keys():
                served = one.figures[name].notes["reuse"]
                assert served["new_memory"] == several and served["same_stream"] >= 2 * several
                assert sum(served.values()) == served["new_memory"] + served["same_stream"]
    assert sum(ONE in one.figures for one in results.measured if one.door == door) == 1


def test_growing_and_giving_back_wait_for_nothing_and_the_driver_does() -> None:
    grown, call, work = measured("growth", "trim").measured
    assert grown.figures["weir"].values == (0.0,) and grown.figures["weir"].notes == {"work_was_over_in_turns": 0}
    assert call.figures["weir"].values == (0.0,)
    assert call.figures["driver"].values == (2000.0,), "cuMemFree waits for all of it"
    assert call.figures["driver-vmm"].values == (0.0,) == grown.figures["driver-vmm"].values
    assert {figures.ratio for figures in work.figures.values()} == {1.0} and "alone" in work.figures


def test_a_miss_is_a_miss_however_many_blocks_are_free() -> None:
    blocks, sizes = best_fit.draw(50)
    free = {size for size, _ in blocks}
    assert not free & set(sizes) and max(sizes) < max(free)
    with best_fit.fragmented(blocks) as (pool, stream):
        before = pool.stats()
        best_fit.miss(pool, stream, sizes)(20)
        after = pool.stats()
    assert before.blocks["idle"] == 51 and after.growths == before.growths
    assert after.block_splits - before.block_splits >= 20


def test_the_programs_of_rmm_hold_what_they_promise() -> None:
    steps, slots = rmm_cases.program(500)
    live: dict[int, int] = {}
    most = 0
    for slot, nbytes in steps:
        assert (slot in live) is (nbytes == 0) and slot < slots
        if nbytes:
            live[slot] = nbytes
        else:
            del live[slot]
        most = max(most, sum(live.values()))
    assert sum(1 for _, nbytes in steps if nbytes) == 500
    assert 0 < most <= rmm_cases.MOST_LIVE
    assert rmm_cases.program(500) == (steps, slots), "everybody plays the same one"


def test_nothing_stays_behind() -> None:
    gpu = SimDevice(memory=1 << 34)
    names = ["live", "streams", "threads", "rmm-holes", "growth", "trim"]
    results = Results()
    run(chosen(names), stages(gpu, TINY), results)
    assert not results.failed
    from allocator import CachingAllocator

    with CachingAllocator(gpu) as pool:  # one more public call: what closed pools left goes back
        pool.trim()
    assert gpu.used_bytes == 0 and gpu.violations == []
    assert gpu.races == []


def test_a_peer_that_is_not_wanted_is_not_there() -> None:
    results = measured("steady", settings=Settings(repeats=1, seconds=1e-6, quick=True, peers=("weir", "floor")))
    assert {name for one in results.measured for name in one.figures} == {"weir", "floor"}
    assert not results.left_out


def test_names_are_chosen_once_and_unknown_ones_refused() -> None:
    assert [one.name for one in chosen(["trim", "steady", "trim"])] == ["trim", "steady"]
    assert {one.name for one in chosen([])} == {name for name, one in BENCHMARKS.items() if one.usual}
    with pytest.raises(ValueError, match="unknown benchmark 'stedy'"):
        chosen(["stedy"])
    with pytest.raises(ValueError, match="unknown peer 'jemalloc'"):
        Session([], Settings(peers=("jemalloc",)))


# -- those with a main() of their own -----------------------------------------------------------------------------


def test_scrapes_become_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(*args: Any) -> tuple[str, dict[str, Any]]:
        windows = [{"rate": 1e6}, {"rate": 5e5}]
        alone = [{"rate": 2e6}, {"rate": 2e6}, {"rate": 2e6}]
        return "the text", {"10 clients": {"ratio": 0.5, "windows": windows, "windows_alone": alone}, "reading ms": {}}

    monkeypatch.setattr(scrapes, "main", told)
    (one,) = measured("scrapes").measured
    assert one.figures["scraped"].values == (1000.0, 2000.0) and one.figures["scraped"].ratio == 3.0
    assert one.figures["scraped"].notes == {"ratio": 0.5} and one.text == "the text"


def test_the_others_become_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape_cost, "main", lambda blocks: ("t", {"live": {"then_ms": 3.0, "series": 7}}))
    ratios = {"a trace": {"ratios": [1.0, 1.2], "races": 0}}
    monkeypatch.setattr(replays, "ratios", lambda: ("t", ratios))
    monkeypatch.setattr(replays, "rows", lambda: ("t", {"serve_seconds": 4.0, "10000": 46.5}))
    page = {"load": [1.0], "blocks": [2.0], "rows": [3.0]}
    monkeypatch.setattr(live_page, "main", lambda: ("t", page))
    results = measured("scrape-cost", "replay-ratios", "replay-rows")
    assert [(one.case, one.unit) for one in results.measured] == [
        ("live", "ms"), ("a trace", "reserved / live"), ("serve_seconds", "s"), ("10000", "us a row"),
    ]  # fmt: skip
    monkeypatch.setattr(reports, "find_spec", lambda name: object())
    (loaded,) = measured("live-page").measured
    assert loaded.figures["page"].values == (1.0,)
    monkeypatch.setattr(reports, "find_spec", lambda name: None)
    assert measured("live-page").skipped == {"live-page": "needs selenium, and Chromium with its driver"}


def test_growth_curves_become_readings_of_one_figure_each() -> None:
    results = measured("scale")
    found = {one.case: one for one in results.measured}
    assert found["1,000 blocks: hit us"].unit == "us" and found["2 GiB: segments"].unit == "each"
    assert found["1,000 blocks: host bytes a live block"].figures["weir"].median < 1_000
    assert "1,000 blocks" in results.measured[0].text and not results.measured[1].text


def test_programs_on_cupy_become_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    def turns(options: Any) -> list[dict[str, Any]]:
        assert options.turns == 1
        one = {"program": options.program, "last_bytes": 0, "waits": 0, "out_of_memory": 0, "failure": None}
        return [
            {"pool": "cupy", "per_second": 1000.0, "peak_bytes": 9, **one},
            {"pool": "weir", "per_second": 500.0, "peak_bytes": 3, **one},
            {"pool": "weir-256", "per_second": 0.0, "peak_bytes": 1, **one | {"failure": "none left"}},
        ]

    monkeypatch.setattr(cupy_streams, "turns", turns)
    assert measured("cupy-programs").skipped == {"cupy-programs": "needs a GPU (--device 0)"}
    (first, *_) = BENCHMARKS["cupy-programs"].cases(next(iter(stages(SimDevice(), TINY))))
    values: Any = first
    assert values.values == {"cupy": [1000.0], "weir": [2000.0]} and values.notes["weir"] == {"peak_bytes": [3]}


def test_a_benchmark_that_lacks_something_says_what() -> None:
    with pytest.raises(Missing, match="no_such_library cannot be imported"):
        from allocator.stress.benchmarks.guests import load

        load("no_such_library")


# -- the module as a command --------------------------------------------------------------------------------------


def test_the_module_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hot-path", "--quick"]) == 0
    assert "CachingAllocator" in capsys.readouterr().out
    assert main(["hot-path", "--quick", "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and '"benchmark": "hot-path"' in out and '"figures"' in out
    with pytest.raises(SystemExit):
        main(["dance"])
    assert "unknown benchmark 'dance'" in capsys.readouterr().err

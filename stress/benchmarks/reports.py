"""Benchmarks that tell their own story: their figures, brought into the form of all others.

Each of these modules has a `main()` that returns text for people and figures, because what they measure is more than a
ratio: worst pauses, series, rows a second.  Here each becomes readings, and keeps its text.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from allocator.stress.benchmarks import cupy_streams, live_page, replays, scale, scrape_cost, scrapes
from allocator.stress.benchmarks.cases import Missing, Reading, Stage

Report = Callable[[], tuple[str, dict[str, Any]]]


def scrape_under_load(stage: Stage) -> Iterator[Reading]:
    """An operation of an allocating thread while clients scrape, against the windows before and after."""
    quick = stage.settings.quick
    text, figures = scrapes.main(2, 0.05, 1_000, 8) if quick else scrapes.main()
    for title, found in figures.items():
        if "windows" not in found:
            continue
        rates = [window["rate"] for window in found["windows_alone"]]
        alone = [2e9 / (before + after) for before, after in pairwise(rates)]
        scraped = [1e9 / window["rate"] for window in found["windows"]]
        notes = {key: value for key, value in found.items() if not key.startswith("windows")}
        yield Reading(title, {"alone": alone, "scraped": scraped}, "alone", "ns", notes={"scraped": notes}, text=text)
        text = ""


def one_scrape(stage: Stage) -> Iterator[Reading]:
    """CPU time of one scrape, in the states that cost most."""
    text, figures = scrape_cost.main(2_000 if stage.settings.quick else scrape_cost.BLOCKS)
    for title, found in figures.items():
        yield Reading(title, {"scrape": [found["then_ms"]]}, "scrape", "ms", notes={"scrape": found}, text=text)
        text = ""


def reserved_over_live(stage: Stage) -> Iterator[Reading]:
    """Traces at 15 speeds."""
    text, figures = replays.ratios()
    for title, found in figures.items():
        notes = {key: value for key, value in found.items() if key != "ratios"}
        yield Reading(title, {"weir": found["ratios"]}, "live", "reserved / live", notes={"weir": notes}, text=text)
        text = ""


def replayed_rows(stage: Stage) -> Iterator[Reading]:
    """Microseconds a row, and the whole sample in seconds."""
    text, figures = replays.rows()
    for title, value in figures.items():
        whole = title == "serve_seconds"
        yield Reading(title, {"replay": [value]}, "replay", "s" if whole else "us a row", text=text)
        text = ""


def growth_curves(stage: Stage) -> Iterator[Reading]:
    """What blocks, streams, devices and bytes cost as they get more."""
    text, figures = scale.main(stage.settings.quick)
    for title, found in figures.items():
        for name, value in found.items():
            unit = name.rsplit(" ", 1)[-1] if name.endswith((" us", " ms")) else "each"
            yield Reading(f"{title}: {name}", {"weir": [value]}, "weir", unit, text=text)
            text = ""


def page(stage: Stage) -> Iterator[Reading]:
    """Milliseconds until the live page is there, and until it is up to date."""
    for library in ("selenium", "bokeh"):
        if find_spec(library) is None:
            raise Missing(f"needs {library}, and Chromium with its driver")
    text, figures = live_page.main()
    for title, values in figures.items():
        if title not in ("blocks", "rows"):
            yield Reading(title, {"page": values}, "page", "ms", text=text)
            text = ""


def cupy_programs(stage: Stage) -> Iterator[Reading]:
    """Whole programs on CuPy, each run in a process of its own."""
    for program in cupy_streams.PROGRAMS:
        options = argparse.Namespace(
            program=program, pools=list(cupy_streams.POOLS), turns=min(5, stage.settings.repeats),
            rounds=100, steps=200, seconds=stage.settings.seconds, together=False, samples=False,
        )  # fmt: skip
        results = cupy_streams.turns(options)
        values: dict[str, list[float]] = {}
        peaks: dict[str, dict[str, Any]] = {}
        for result in results:
            if not result["failure"]:
                values.setdefault(result["pool"], []).append(1e6 / result["per_second"])
                peaks.setdefault(result["pool"], {}).setdefault("peak_bytes", []).append(result["peak_bytes"])
        yield Reading(program, values, "cupy", "us a step", "cupy", notes=peaks, text=cupy_streams.table(results))

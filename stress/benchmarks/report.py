"""What a run says: a table of ratios for people, one object of JSON for machines.

Rule: a ratio never stands without its spread and without the value that it comes from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from allocator.stress.benchmarks.acceptance import Row
from allocator.stress.benchmarks.runner import Measured, Results
from allocator.stress.benchmarks.timing import compare


def value(number: float, unit: str) -> str:
    """ "1.23 us" for 1234 ns: three digits that mean something."""
    if unit == "ns":
        for factor, name in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
            if number >= factor:
                return f"{number / factor:.3g} {name}" if number < 1e3 * factor else f"{number / factor:,.0f} {name}"
        return f"{number:.0f} ns"
    digits = f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"
    return f"{digits} {unit}"


def lines(measured: Measured) -> list[str]:
    """One case."""
    beside = ", guests loaded" if measured.guests else ""
    rows = [f"{measured.benchmark} [{measured.door}{beside}]: {measured.case}"]
    width = max((len(name) for name in [*measured.figures, *measured.failed]), default=0)
    for name, one in measured.figures.items():
        text = f"  {name:{width}}  {value(one.median, measured.unit):>12}"
        if one.ratio is not None and one.low is not None and one.high is not None and len(measured.figures) > 1:
            text += f"  {one.ratio:8.3f}  ({one.low:.3f} .. {one.high:.3f})"
        rows.append(text + ("  = 1" if name == measured.reference else ""))
    rows += [f"  {name:{width}}  failed: {why}" for name, why in measured.failed.items()]
    return rows


def table(results: Results) -> str:
    """Everything that was measured, and what was not."""
    rows: list[str] = []
    for measured in results.measured:
        rows += [measured.text] if measured.text else []
        rows += lines(measured)
    return "\n".join([*rows, *missing(results)])


HEADLINE = "value; ratio to the one marked = 1: median over the repeats, and the quartiles"


def missing(results: Results) -> list[str]:
    """What was not measured, and why; those with the same reason in one line."""
    rows = []
    for title, found in (("left out", results.left_out), ("skipped", results.skipped), ("FAILED", results.failed)):
        reasons: dict[str, list[str]] = {}
        for name, why in found.items():
            reasons.setdefault(why, []).append(name)
        rows += [f"{title}: {', '.join(names)}: {why}" for why, names in reasons.items()]
    return rows


def acceptance_table(rows: Sequence[Row], build: str) -> str:
    """A line each: what, value, aim, reached or not."""
    width = max(len(row.what) for row in rows)
    text = [f"{'':{width}}  {'value':>10}  {'aim':>10}  ({build})"]
    for row in rows:
        number = "-" if row.value is None else f"{row.value:.3g}{row.unit}"
        verdict = {True: "reached", False: "NOT REACHED", None: "not measured"}[row.reached]
        remark = f": {row.remark}" if row.remark else ""
        text.append(f"{row.what:{width}}  {number:>10}  {row.sign + f'{row.aim:g}{row.unit}':>10}  {verdict}{remark}")
    return "\n".join(text)


def as_json(
    about: Mapping[str, Any], settings: Mapping[str, Any], results: Results, rows: Sequence[Row]
) -> dict[str, Any]:
    """Later versions only add keys."""
    return {
        **about,
        "settings": dict(settings),
        "results": [case(one) for one in results.measured],
        "acceptance": [asdict(row) for row in rows],
        "left_out": results.left_out,
        "skipped": results.skipped,
        "failed": results.failed,
    }


def case(measured: Measured) -> dict[str, Any]:
    """One case as plain data: `at` is its size or count, `peers` has each one's repeats, median, ratio and spread."""
    return {
        "benchmark": measured.benchmark,
        "case": measured.case,
        "at": measured.at,
        "door": measured.door,
        "guests": measured.guests,
        "unit": measured.unit,
        "reference": measured.reference,
        "operations": measured.operations,
        "peers": {
            name: {
                "repeats": list(one.values),
                "median": one.median,
                "ratio": one.ratio,
                "spread": None if one.low is None else [one.low, one.high],
                "notes": one.notes,
            }
            for name, one in measured.figures.items()
        },
        "failed": measured.failed,
    }


def read(document: Any) -> list[Measured]:
    """The cases of a document that `as_json` made.  ValueError for anything else."""
    try:
        return [_measured(one) for one in document["results"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the JSON of weir bench ({type(error).__name__}: {error})") from None


def _measured(one: Mapping[str, Any]) -> Measured:
    values = {name: [float(value) for value in peer["repeats"]] for name, peer in one["peers"].items()}
    notes = {name: dict(peer["notes"]) for name, peer in one["peers"].items()}
    return Measured(
        benchmark=str(one["benchmark"]),
        case=str(one["case"]),
        door=str(one["door"]),
        unit=str(one["unit"]),
        reference=str(one["reference"]),
        figures=compare(values, str(one["reference"]), notes),
        at=one["at"],
        guests=bool(one["guests"]),
        operations=dict(one["operations"]),
        failed=dict(one["failed"]),
    )


def json_text(document: Mapping[str, Any]) -> str:
    """The document as a file's text."""
    return json.dumps(document, indent=1) + "\n"

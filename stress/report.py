"""What a run says: progress on stderr while it lasts, then a table for people, or one object of JSON.

Rule: latencies are microseconds with one digit behind the point, never rounded to nothing; a violation comes last,
where it is seen.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TextIO

from allocator.config import REUSE_KINDS
from allocator.sizes import format_size
from allocator.stress.hammer import Outcome
from allocator.stress.histogram import Latencies

_TERMINAL_S: Final = 0.5
_ELSEWHERE_S: Final = 5.0
_TIMED_WORDS: Final = {
    "allocate": "allocate",
    "free": "free",
    "streams": "events, waits, declarations",
    "look": "statistics, scrapes, trims",
}
_REUSE_WORDS: Final = {
    "same_stream": "same stream",
    "event_dependency": "already waited for",
    "opportunistic": "work was finished",
    "internal_dependency": "made to wait",
    "new_memory": "new memory",
}


class Progress:
    """Operations so far, on one line that is rewritten on a terminal, else a line every five seconds.

    remark: what else is said there.  Where nothing can be written any more, nothing is: a run goes on without.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self.remark: Callable[[], str] = lambda: ""
        self._terminal = self._out.isatty()
        self._began = time.monotonic()
        self._next = self._began + (_TERMINAL_S if self._terminal else _ELSEWHERE_S)
        self._written = 0

    def __call__(self, outcome: Outcome, more: int) -> None:
        """Show it, if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (_TERMINAL_S if self._terminal else _ELSEWHERE_S)
        done, since = outcome.operations + more, now - self._began
        more_words = self.remark()
        self.say(
            f"{since:.0f} s, round {outcome.rounds + 1}: {done:,} operations, {done / since:,.0f}/s"
            + (f", {more_words}" if more_words else "")
        )

    def say(self, text: str) -> None:
        """One line now."""
        if self._terminal:
            self._put("\r" + text.ljust(self._written))
            self._written = max(self._written, len(text))
        else:
            self._put(text + "\n")

    def wipe(self) -> None:
        """Nothing of it stays on a terminal."""
        if self._terminal and self._written:
            self._put("\r" + " " * self._written + "\r")

    def _put(self, text: str) -> None:
        with suppress(OSError):
            self._out.write(text)
            self._out.flush()


def figures(outcome: Outcome) -> dict[str, Any]:
    """A run as plain numbers; later versions only add keys."""
    setting, stats = outcome.plan.setting, outcome.stats
    return {
        "device": outcome.device,
        "seed": setting.seed,
        "threads": setting.workers,
        "streams": setting.streams,
        "limit": setting.limit,
        "workloads": list(outcome.plan.workloads),
        "rounds": outcome.rounds,
        "operations": outcome.operations,
        "seconds": outcome.seconds,
        "operations_per_second": outcome.operations / outcome.seconds if outcome.seconds else 0.0,
        "verbs": {verb: n for verb, n in sorted(outcome.counts.items()) if verb not in ("refused", "skipped")},
        "skipped": outcome.counts["skipped"],
        "refused": outcome.counts["refused"],
        "latency_us": {name: latency(one) for name, one in outcome.latencies.items()},
        "reuse": dict(stats.allocations) if stats else None,
        "stream_waits": stats.stream_waits if stats else None,
        "event_records": stats.event_records if stats else None,
        "event_queries": stats.event_queries if stats else None,
        "host_synchronizations": stats.host_synchronizations if stats else None,
        "out_of_memory": stats.out_of_memory if stats else None,
        "out_of_memory_retries": dict(stats.out_of_memory_retries) if stats else None,
        "peak_reserved_bytes": stats.peak_reserved_bytes if stats else None,
        "peak_in_flight_bytes": stats.peak_in_flight_bytes if stats else None,
        "violation": outcome.violation and {"kind": outcome.violation.kind, "text": outcome.violation.text},
        "failed_round": outcome.failed_round,
    }


def latency(one: Latencies) -> dict[str, float]:
    """Count, and microseconds."""
    return {
        "count": one.count,
        "mean": one.mean_us,
        "p50": one.percentile_us(50),
        "p99": one.percentile_us(99),
        "p99.9": one.percentile_us(99.9),
        "max": one.most_us,
    }


def json_line(outcome: Outcome) -> str:
    """`figures` in one line."""
    return json.dumps(figures(outcome))


def latency_table(latencies: dict[str, Latencies], seconds: float) -> list[str]:
    """A line each; microseconds."""
    rows = [["", "calls", "a second", "p50 us", "p99 us", "p99.9 us", "max us"]]
    for name, one in latencies.items():
        if one.count:
            numbers = (one.percentile_us(50), one.percentile_us(99), one.percentile_us(99.9), one.most_us)
            rate = f"{one.count / seconds:,.0f}" if seconds else "-"
            rows.append([_TIMED_WORDS.get(name, name), f"{one.count:,}", rate, *(f"{n:,.1f}" for n in numbers)])
    return aligned(rows)


def table(outcome: Outcome, remarks: Sequence[str] = ()) -> str:
    """A run for people.  remarks: lines above the verdict."""
    setting, stats = outcome.plan.setting, outcome.stats
    rate = outcome.operations / outcome.seconds if outcome.seconds else 0.0
    lines = [
        f"{outcome.operations:,} operations in {outcome.seconds:.1f} s, {rate:,.0f} a second; "
        f"{outcome.rounds:,} rounds",
        f"{setting.workers} threads, {setting.streams} streams, limit "
        f"{format_size(setting.limit) if setting.limit else 'none'}, seed {setting.seed}, on {outcome.device}",
        f"workloads: {', '.join(outcome.plan.workloads)}",
        "",
        *latency_table(dict(outcome.latencies), outcome.seconds),
    ]
    if stats is not None:
        served = sum(stats.allocations.values())
        rows = [["allocations served by", ""]]
        for kind in REUSE_KINDS:
            n = stats.allocations.get(kind, 0)
            rows.append([f"  {_REUSE_WORDS[kind]}", f"{n:,}", f"{100 * n / served:.1f} %" if served else ""])
        retries = [f"{step.replace('_', ' ')} {n:,}" for step, n in stats.out_of_memory_retries.items() if n]
        rows += [
            ["refused, out of memory", f"{stats.out_of_memory:,}"],
            ["waits put on streams", f"{stats.stream_waits:,}"],
            ["events recorded, queried", f"{stats.event_records:,}, {stats.event_queries:,}"],
            ["waits of the host", f"{stats.host_synchronizations:,}"],
            ["most reserved, in flight", f"{format_size(stats.peak_reserved_bytes)}, "
             f"{format_size(stats.peak_in_flight_bytes)}"],
        ]  # fmt: skip
        lines += ["", *aligned(rows), f"saved from out of memory by: {', '.join(retries) or 'nothing needed to be'}"]
    if remarks:
        lines += ["", *remarks]
    lines += ["", verdict(outcome)]
    return "\n".join(lines)


def verdict(outcome: Outcome) -> str:
    """One sentence."""
    if outcome.violation is None:
        return "nothing wrong: no race, no corruption, no leak, every check passed"
    where = "at the end" if outcome.failed_round is None else f"in round {outcome.failed_round}"
    return f"VIOLATION {where}: {outcome.violation.kind}: {outcome.violation.text}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns: the first to the left, the others to the right."""
    width = [max((len(row[i]) for row in rows if len(row) > i), default=0) for i in range(max(map(len, rows)))]
    return [
        "  ".join(cell.ljust(width[i]) if not i else cell.rjust(width[i]) for i, cell in enumerate(row)).rstrip()
        for row in rows
    ]

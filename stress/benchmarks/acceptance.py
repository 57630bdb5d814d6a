"""The aims, one row each: the value that a run has found, the aim, and whether it is reached.

Rule: a row says "not measured" and why, and never guesses: what was measured on the simulator or on made-up addresses
is no answer to a question about CuPy's pool on a GPU.

Medians of ratios within one run.  An aim has two numbers, for the compiled and for the plain build.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from allocator.stress.benchmarks.runner import Measured
from allocator.stress.benchmarks.timing import Figures, compare

NEEDED: Final = ("steady", "round-robin", "arrays", "best-fit", "streams", "threads", "growth", "trim")
"""The benchmarks that the rows are made from."""


@dataclass(frozen=True)
class Row:
    """reached: None where nothing was measured; then `remark` says why."""

    what: str
    value: float | None
    sign: str
    aim: float
    reached: bool | None
    remark: str = ""
    unit: str = ""


class Found:
    """Looks things up among what was measured."""

    def __init__(self, measured: Sequence[Measured]) -> None:
        self._measured = measured

    def case(
        self, benchmark: str, door: str, *, at: float | None = None, title: str = "", guests: bool = False
    ) -> Measured | None:
        """One case; None if it was not measured."""
        for one in self._measured:
            if (
                one.benchmark == benchmark
                and one.door == door
                and one.guests is guests
                and (at is None or one.at == at)
                and title in one.case
            ):
                return one
        return None

    def figures(self, benchmark: str, door: str, peer: str, **which: object) -> Figures | None:
        """One contender of one case."""
        case = self.case(benchmark, door, **which)  # type: ignore[arg-type]  # the keywords of `case`
        return None if case is None else case.figures.get(peer)


def table(measured: Sequence[Measured], build: str, *, simulated: bool) -> list[Row]:
    """All rows, in the order of the aims.  simulated: the device was."""
    where = "on the simulator, where only waiting takes time" if simulated else ""
    found = Found(measured)
    compiled = build == "compiled"
    rows = [
        _against_cupy(
            found, "alloc + free through cupy.cuda.alloc / CuPy's pool", "steady", 1.1 if compiled else 2.0, at=4096
        ),
        _round_robin(found, 1.5 if compiled else 3.0),
        _against_cupy(found, "cupy.empty + del / CuPy's pool", "arrays", 1.05 if compiled else 1.3, at=4096),
        _between(found, "alloc + free / RMM's pool through CuPy", "rmm", 0.25 if compiled else 0.4, guests=True),
        _between(found, "alloc + free / CuPy's async pool", "cupy-async", 0.4 if compiled else 0.7, guests=False),
        _growing(found, "best-fit miss, 10^6 free blocks / 10^3", "best-fit", ("core",), "pool", 1e6, 1e3, 3.0),
        _many_streams(found, 1.5),
        _threads(found, 1.3 if compiled else 1.0),
        _scaling(found),
        _growth(found, where),
        _trim(found, where),
        _others(found, where),
    ]
    return rows


def _row(what: str, value: float | None, sign: str, aim: float, remark: str = "", unit: str = "") -> Row:
    reached = None if value is None else (value <= aim if sign == "<= " else value >= aim)
    return Row(what, value, sign, aim, reached, remark, unit)


def _missing(what: str, sign: str, aim: float, why: str, unit: str = "") -> Row:
    return _row(what, None, sign, aim, why, unit)


_NO_GPU: Final = "needs CuPy's own pool, and so a GPU (--device 0)"


def _spread(figures: Figures) -> str:
    return "" if figures.low is None else f"quartiles {figures.low:.3g} .. {figures.high:.3g}"


def _against_cupy(found: Found, what: str, benchmark: str, aim: float, at: float) -> Row:
    figures = found.figures(benchmark, "cupy", "weir", at=at)
    if figures is None or figures.ratio is None:
        return _missing(what, "<= ", aim, _NO_GPU)
    return _row(what, figures.ratio, "<= ", aim, _spread(figures))


def _round_robin(found: Found, aim: float) -> Row:
    what = "16 streams round robin, 256 KiB on each / CuPy's pool"
    figures = found.figures("round-robin", "cupy", "weir", title="each", at=262144)
    if figures is None or figures.ratio is None:
        return _missing(what, "<= ", aim, _NO_GPU)
    remark = _spread(figures)
    for title, at, what_of in (("one in", 262144, "16 on each"), ("each", 4194304, "4 MiB that go round")):
        other = found.figures("round-robin", "cupy", "weir", title=title, at=at)
        if other is not None and other.ratio is not None:
            remark += f"; {other.ratio:.3g} with {what_of}"
    return _row(what, figures.ratio, "<= ", aim, remark)


def _between(found: Found, what: str, peer: str, aim: float, *, guests: bool) -> Row:
    """Weir against a peer that is not the reference: repeat by repeat."""
    case = found.case("steady", "cupy", at=4096, guests=guests)
    ours, theirs = (None if case is None else case.figures.get(name) for name in ("weir", peer))
    if ours is None or theirs is None or len(ours.values) != len(theirs.values):
        return _missing(what, "<= ", aim, f"needs a GPU with {peer}")
    ratio = compare({peer: theirs.values, "weir": ours.values}, peer)["weir"]
    return _row(what, ratio.ratio, "<= ", aim, _spread(ratio))


def _growing(
    found: Found, what: str, benchmark: str, doors: Sequence[str], peer: str, many: float, few: float, aim: float
) -> Row:
    """The same contender in two cases, by medians: they cannot be interleaved."""
    for door in doors:
        high, low = (found.figures(benchmark, door, peer, at=at) for at in (many, few))
        if high is not None and low is not None:
            where = "" if door == "cupy" else "on the simulator" if benchmark == "best-fit" else f"through the {door}"
            return _row(what, high.median / low.median, "<= ", aim, where)
    return _missing(what, "<= ", aim, f"both cases of {benchmark} are needed")


def _many_streams(found: Found, aim: float) -> Row:
    what = "an operation, 1000 streams / 1"
    told = []
    for door in ("cupy", "core"):
        figures = found.figures("streams", door, "weir", title="1,000 streams beside one")
        if figures is not None and figures.ratio is not None:
            told.append((door, figures))
    if not told:
        return _missing(what, "<= ", aim, "streams are needed, in full")
    remark = f"{_spread(told[0][1])}, through {'CuPy' if told[0][0] == 'cupy' else 'the core'}"
    for _, figures in told[1:]:
        remark += f"; {figures.ratio:.3g} through the core"
    return _row(what, told[0][1].ratio, "<= ", aim, remark)


def _threads(found: Found, aim: float) -> Row:
    what = "8 threads: operations a second / a floor of one lock and one dict"
    figures = found.figures("threads", "core", "weir", at=8)
    if figures is None or not figures.ratio:
        return _missing(what, ">= ", aim, "threads at 8 are needed")
    return _row(what, 1 / figures.ratio, ">= ", aim, "through the core")


def _scaling(found: Found) -> Row:
    """Through the core, as the row above; what CuPy's own threads cost, with whatever pool, stands beside it."""
    what = "the same, least over 2 to 16 threads / one thread"
    worst = _least_of_threads(found, "core", "weir")
    if worst is None:
        return _missing(what, ">= ", 0.5, "threads at 1 and more are needed")
    others = [(peer, _least_of_threads(found, "cupy", peer)) for peer in ("weir", "cupy", "floor")]
    told = ", ".join(f"{peer} {least:.2f}" for peer, least in others if least is not None)
    return _row(what, worst, ">= ", 0.5, f"through the core; through CuPy: {told}" if told else "through the core")


def _least_of_threads(found: Found, door: str, peer: str) -> float | None:
    """The worst of several threads, in operations a second, to one thread's."""
    one = found.figures("threads", door, peer, at=1)
    several = [found.figures("threads", door, peer, at=count) for count in (2, 4, 8, 16)]
    if one is None or not any(several):
        return None
    return min(one.median / figures.median for figures in several if figures is not None)


def _growth(found: Found, where: str) -> Row:
    what = "growth while the device is busy: its longest call, of the time that all work takes"
    case = found.case("growth", "core")
    figures = None if case is None else case.figures.get("weir")
    if figures is None:
        return _missing(what, "<= ", 0.05, "growth is needed")
    over = figures.notes.get("work_was_over_in_turns")
    return _row(what, max(figures.values) / 2000, "<= ", 0.05, where or f"the work was over first in {over} turns")


def _trim(found: Found, where: str) -> Row:
    what = "trim of 10 GiB while another stream is busy"
    case = found.case("trim", "core", title="the call")
    figures = None if case is None else case.figures.get("weir")
    if case is None or figures is None:
        return _missing(what, "<= ", 20, "trim is needed", " ms")
    calls = case.figures.get("driver-vmm")
    least = "" if calls is None else f"; the driver's calls alone take {calls.median:.3g} ms"
    return _row(what, figures.median, "<= ", 20, where or f"{_amount(case)}{least}", " ms")


def _others(found: Found, where: str) -> Row:
    what = "the same: how far the other stream's end moves"
    case = found.case("trim", "core", title="the other stream")
    figures = None if case is None else case.figures.get("weir")
    if case is None or figures is None or figures.ratio is None:
        return _missing(what, "<= ", 1, "trim is needed", " %")
    return _row(what, 100 * (figures.ratio - 1), "<= ", 1, where or _amount(case), " %")


def _amount(case: Measured) -> str:
    return case.case.partition(":")[0]

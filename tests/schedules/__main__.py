"""Long searches of thread schedules, and the replay of one.

    python -m tests.schedules --switches 3                 every plan of two threads, all programs
    python -m tests.schedules --switches 3 --part 2/16     the second sixteenth of them: one process a core
    python -m tests.schedules --seeds 100000 --threads 4   random ones of four threads
    python -m tests.schedules hits_on_one_stream --plan '17:1 23:0'    one again, with the places it passed
    python -m tests.schedules --garbage                    the garbage collector at every place

Exit status 1 at the first thing that goes wrong, which is printed with the words that replay it.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

from tests.schedules.explorer import Outcome, by_seed, collect, explore, run
from tests.schedules.programs import BY_NAME, COLLECTED, FOUR, THREE, TWO, Play
from tests.schedules.scheduler import Scheduler

TELL_S: Final = 30.0
"""Between two lines that say how far a long search is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Search, say how many orders were played, and stop at the first that goes wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.schedules", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("names", nargs="*", metavar="PROGRAM", help="default: all that fit")
    parser.add_argument("--threads", type=int, choices=(2, 3, 4), default=2)
    parser.add_argument("--switches", type=int, metavar="N", help="every plan of up to N switches")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="the K-th of N parts of these plans")
    parser.add_argument("--seeds", type=int, metavar="N", help="that many random orders in all")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N")
    parser.add_argument("--garbage", action="store_true", help="the garbage collector at every place")
    parser.add_argument("--plan", metavar="DECISION:THREAD ...", help="one plan, again")
    parser.add_argument("--collect", type=int, nargs="*", default=(), metavar="PLACE", help="with --plan")
    parser.add_argument("--after-release", action="store_true", help="with --plan, where the message says so")
    parser.add_argument(
        "--lane", action="store_true", help="hits take no lock: with --switches; with --plan, where the message says so"
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in BY_NAME]
    if unknown:
        parser.error(f"no such program: {', '.join(unknown)}; there are {', '.join(BY_NAME)}")
    gc.collect()
    gc.freeze()
    gc.disable()  # it runs where it is told, or between two runs
    try:
        return _replay(options) if options.plan is not None else _search(options)
    finally:
        gc.enable()
        gc.unfreeze()


def _search(options: argparse.Namespace) -> int:
    usual = COLLECTED if options.garbage else {2: TWO, 3: THREE, 4: FOUR}[options.threads]
    plays = [BY_NAME[name] for name in options.names] or list(usual)
    for play in plays:
        started, count, switched = time.monotonic(), 0, 0
        told = started
        for outcome in _outcomes(play, options, len(plays)):
            count += 1
            switched = max(switched, len(outcome.plan))
            if outcome.wrong is not None:
                print(f"{play.name}: {outcome}")
                return 1
            if count % 50 == 0:
                gc.collect()
                if time.monotonic() - told > TELL_S:
                    told = time.monotonic()
                    print(f"{play.name}: {count:,} orders so far, nothing wrong", file=sys.stderr, flush=True)
        print(
            f"{play.name}: {count:,} orders, up to {switched} switches, {time.monotonic() - started:.1f} s", flush=True
        )
    return 0


def _outcomes(play: Play, options: argparse.Namespace, plays: int) -> Iterator[Outcome]:
    if options.garbage:
        yield from collect(play)
    if options.switches is not None:
        yield from explore(play, options.switches, options.part, lane=options.lane)
    if options.seeds is not None:
        for seed in range(options.first_seed, options.first_seed + max(1, options.seeds // plays)):
            yield by_seed(play, seed)


def _part(text: str) -> tuple[int, int]:
    """The K-th of N.  ValueError for others."""
    which, _, of = text.partition("/")
    part = int(which), int(of)
    if not 1 <= part[0] <= part[1]:
        raise ValueError(text)
    return part


def _replay(options: argparse.Namespace) -> int:
    if len(options.names) != 1:
        print("--plan goes with one program", file=sys.stderr)
        return 2
    plan = {int(decision): int(thread) for decision, thread in (pair.split(":") for pair in options.plan.split())}
    scheduler = Scheduler(after_release=options.after_release, lane=options.lane)
    outcome = run(BY_NAME[options.names[0]], plan, tuple(options.collect), scheduler)
    print("\n".join(scheduler.trace))
    print(outcome.wrong or "nothing went wrong")
    return int(outcome.wrong is not None)


if __name__ == "__main__":
    sys.exit(main())

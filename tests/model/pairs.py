"""What two host threads do at the same time: pairs of short bodies, each with what comes before and after.

Steps are the words of `Player`; each thread has its own list.  `before` and `after` are played by one thread;
`after` ends with allocations that take whatever the pool thinks is free, so that a wrong belief becomes a race.
Next: threads.py, test_interleavings.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from allocator import OutOfMemoryError
from allocator.devices.sim.capture import Graph
from allocator.sizes import MIB
from allocator.streams import Capture, GraphToken
from tests.model.programs import DURATION_NS, SIZES, Player, Step, Universe, parse
from tests.model.threads import Plan, Scheduler, plans

NB3 = ("nb", "nb", "nb")
MIXED = ("nb", "blocking", "legacy")


@dataclass(frozen=True)
class Pair:
    """Two bodies.  Blocks are numbered in the order of `before`, then of the first body, then of the second."""

    name: str
    before: str
    first: str
    second: str
    after: str
    kinds: tuple[str, ...] = NB3
    config: dict[str, Any] = field(default_factory=dict)
    assumed: bool = False

    def universe(self) -> Universe:
        """What it runs on."""
        return Universe(self.name, self.kinds, events=2, config=self.config, assumed=self.assumed)


class Slots(Player):
    """A player whose blocks are named by the program, as two threads allocate in any order; one capture at a time."""

    def __init__(self, universe: Universe) -> None:
        super().__init__(universe)
        self.capture: Capture | None = None
        self.graph: tuple[Graph, GraphToken] | None = None

    def do_into(self, block: int, slot: int, size: int) -> None:
        """Allocate into the block number given, and write."""
        while len(self.blocks) <= block:
            self.blocks.append(None)
        try:
            found = self.on(slot, lambda s: self.pool.allocate(SIZES[size], stream=s))
        except OutOfMemoryError:
            return
        self.blocks[block] = found
        self.write(block, slot)

    def do_work(self, slot: int) -> None:
        """A kernel that uses none of the pool's memory."""
        self.on(slot, lambda s: self.gpu.launch(s, DURATION_NS))

    def do_close(self, slot: int) -> None:
        """End a stream of ours for good."""
        self.streams[slot].close()

    def do_seal(self) -> None:
        """What the pool does every `seal_frees` frees."""
        self.pool._settling.seal()

    def do_begin(self, slot: int) -> None:
        """A capture begins, reported by a hook."""
        stream = self.streams[slot]
        self.capture = self.pool._registry.captures.begin(stream.line, stream.handle)
        self.gpu.begin_capture(stream, "relaxed")  # another thread may end it

    def do_join(self, slot: int, other: int) -> None:
        """The stream waits for the other, one of the two takes part in the capture: it joins, or is joined back."""
        stream = self.streams[slot]
        assert self.capture is not None
        with self.gpu.program_scope():
            event = self.gpu.event_create()
            self.gpu.event_record(event, self.streams[other].handle)
            self.pool._registry.captures.join(self.capture, stream.line, stream.handle)
            self.gpu.stream_wait_event(stream.handle, event)
            self.gpu.event_destroy(event)

    def do_end(self, slot: int) -> None:
        """The capture ends: an error if it was killed."""
        assert self.capture is not None
        graph = self.gpu.end_capture(self.streams[slot])
        self.graph = graph, self.pool._registry.captures.end(self.capture)

    def do_launch(self, slot: int) -> None:
        """The graph."""
        assert self.graph is not None
        self.graph[0].launch(self.streams[slot])

    def do_drop(self) -> None:
        """The graph is destroyed."""
        self.graph = None

    def close(self) -> str | None:
        """As any player's; a graph ends with it."""
        self.graph = None
        return super().close()

    def do_check(self) -> None:
        """The pool's own check."""
        self.pool.check()


def run_pair(pair: Pair, plan: Plan) -> tuple[str | None, int]:
    """Play a pair under one plan: what went wrong, or None; and the number of points passed."""
    scheduler = Scheduler()
    with scheduler.locks():
        player = Slots(pair.universe())
    points = 0
    try:
        player.play(_steps(pair.before))
        points = scheduler.run(
            player.gpu, [lambda: player.play(_steps(pair.first)), lambda: player.play(_steps(pair.second))], plan
        )
        player.play(_steps(pair.after))
        player.pool.check()
        wrong = player.wrong()
        if wrong is None:
            for block in player.blocks:
                if block is not None:
                    block.close()
            wrong = player.close()
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    return wrong, points


def _steps(line: str) -> list[Step]:
    return parse(line) if line else []


def explore(pair: Pair, most: int) -> Iterator[tuple[Plan, str | None]]:
    """Every plan of up to `most` pre-emptions, and what came of it."""
    wrong, points = run_pair(pair, ())
    yield (), wrong
    longest = points + 12  # a pre-emption may make the run somewhat longer
    for plan in plans(longest, most):
        if plan:
            yield plan, run_pair(pair, plan)[0]


def sample(pair: Pair, rng: random.Random, runs: int, preemptions: int) -> Iterator[tuple[Plan, str | None]]:
    """Random plans of that many pre-emptions."""
    _, points = run_pair(pair, ())
    for _ in range(runs):
        plan = tuple(sorted(rng.sample(range(1, points + 12), min(preemptions, points))))
        yield plan, run_pair(pair, plan)[0]


EAGER: dict[str, Any] = {"seal_frees": 1}
ONE_PAGE: dict[str, Any] = {"limit": 2 * MIB, "wait_on_demand": False}
TWO_PAGES: dict[str, Any] = {"limit": 4 * MIB, "wait_on_demand": False}
TAKE = "stats; into 8 1 1; into 9 2 1"

PAIRS: Final = (
    Pair(
        "r4_a_free_while_its_stream_is_sealed",
        "into 0 0 1; into 1 1 1; free 1; into 1 1 1; free 0; into 0 0 1",
        "seal",
        "free 0; stats",
        "idle; work 0; stats; into 8 1 1; into 9 2 1",
        config=EAGER,
    ),
    Pair(
        "r4_work_and_a_free_while_its_stream_is_sealed",
        "into 0 0 1; into 1 0 1; into 2 1 1; free 2; free 0; stats",
        "seal",
        "use 1 0; free 1; stats",
        "tick; tick; stats; into 8 1 1; into 9 2 1",
        config=EAGER,
    ),
    Pair(
        "r4_a_wait_while_its_stream_is_sealed",
        "into 0 0 1; into 1 2 1; free 0; free 1; stats",
        "seal",
        "wait_stream 0 2",
        "into 8 1 1; into 9 1 1",
        config=TWO_PAGES,
    ),
    Pair(
        "r2_a_free_while_its_stream_is_asked",
        "into 0 0 1; into 1 1 1; free 1; idle",
        "query 0",
        "use 0 0; free 0; stats",
        "into 8 1 1; into 9 2 1",
    ),
    Pair(
        "r2_a_free_while_its_stream_is_asked_by_a_request",
        "into 0 0 1; into 3 0 1; free 3; idle",
        "into 2 2 1",
        "use 0 0; free 0; stats",
        "into 8 1 1; into 9 2 1",
    ),
    Pair(
        "r2_a_free_while_its_stream_is_waited_for",
        "into 0 0 1; into 1 1 1; free 1",
        "sync 0",
        "use 0 0; free 0; stats",
        "into 8 1 1; into 9 2 1",
    ),
    Pair(
        "r2_a_free_while_the_pool_settles",
        "into 0 0 1; into 1 1 1; free 1",
        "settle",
        "use 0 0; free 0; stats",
        "into 8 1 1; into 9 2 1",
    ),
    Pair(
        "r6_work_while_legacy_is_asked",
        "into 0 0 1; into 1 1 1; free 1; idle",
        "query 2",
        "use 1 1; use 0 1; free 0; stats",
        "into 8 0 1; into 9 2 1",
        kinds=MIXED,
    ),
    Pair(
        "r5_one_event_recorded_by_two_threads",
        "into 0 0 1; into 1 1 1; free 0; free 1; stats",
        "record 0 0",
        "record 0 1",
        "wait 0 2; into 8 2 1; into 9 2 1",
    ),
    Pair(
        "r5_an_event_recorded_again_while_it_is_waited_for",
        "into 0 0 1; into 1 1 1; free 0; free 1; stats; record 0 0",
        "wait 0 2",
        "record 0 1",
        "into 8 2 1; into 9 2 1",
    ),
    Pair(
        "r5_an_event_recorded_again_while_it_is_asked",
        "into 0 0 1; into 1 1 1; record 0 1; idle; use 0 0; free 0; free 1; stats",
        "query_event 0",
        "record 0 0",
        "into 8 2 1; into 9 2 1",
    ),
    Pair(
        "r2_a_stream_closed_while_it_is_sealed",
        "into 0 0 1; into 1 1 1; free 0; free 1; stats",
        "seal",
        "close 0",
        TAKE,
        config=EAGER,
    ),
    Pair(
        "r2_a_stream_closed_while_its_memory_is_freed",
        "into 0 0 1; into 1 1 1; free 1; stats",
        "free 0; stats",
        "close 0",
        TAKE,
        config=EAGER,
    ),
    Pair(
        "r9_a_stream_closed_while_another_waits_for_it",
        "into 0 0 1; free 0; stats",
        "into 1 1 1",
        "close 0",
        "into 8 2 1",
        config=ONE_PAGE,
    ),
    Pair(
        "r13_two_threads_want_the_last_memory",
        "into 0 0 1; free 0; stats",
        "into 1 1 1; free 1",
        "into 2 2 1; free 2",
        "into 8 0 1",
        config=ONE_PAGE,
    ),
    Pair(
        "r4_two_threads_seal_at_once",
        "into 0 0 1; into 1 1 1; free 0; free 1; stats",
        "seal; into 2 0 1",
        "seal; into 3 1 1",
        TAKE,
        config=EAGER,
    ),
    Pair(
        "r13_a_trim_while_memory_is_taken",
        "into 0 0 1; into 1 1 1; free 0; free 1; idle; stats",
        "trim",
        "into 2 2 1; free 2; stats",
        TAKE,
    ),
    Pair(
        "s10_two_threads_grow_at_once",
        "",
        "into 0 0 1; free 0; into 1 0 0",
        "into 2 1 1; free 2; into 3 1 0",
        TAKE,
        config=TWO_PAGES,
    ),
    Pair(
        "r3_a_declared_use_while_the_queue_is_drained",
        "into 0 0 1; into 1 1 1; free 1; wait_stream 2 0",
        "use 0 2; free 0",
        "stats; into 2 1 1",
        "into 8 1 1; into 9 2 1",
        config=EAGER,
    ),
    Pair(
        "r3_assumed_users_while_the_context_is_closed",
        "into 0 0 1; into 1 1 1; free 1; wait_stream 2 0",
        "seal",
        "use 0 2; free 0; stats",
        "into 8 1 1; into 9 2 1",
        config=EAGER,
        assumed=True,
    ),
    Pair(
        "r6_a_context_event_while_memory_is_freed",
        "into 0 0 1; into 1 1 1; free 1; wait_stream 2 0",
        "seal",
        "use 0 2; free 0; stats",
        "tick; tick; stats; into 8 1 1; into 9 2 1",
        config={"context_events": True, **EAGER},
        assumed=True,
    ),
    Pair(
        "s18_a_capture_begins_while_its_stream_is_asked",
        "into 0 0 1; into 1 1 1; free 0; free 1",
        "begin 0",
        "stats",
        "end 0; launch 1; drop; " + TAKE,
    ),
    Pair(
        "s18_a_blocking_stream_captures_while_legacy_is_asked",
        "into 0 2 1; into 1 0 1; free 0; free 1",
        "begin 1",
        "stats",
        "end 1; launch 0; drop; stats; into 8 0 1",
        kinds=MIXED,
    ),
    Pair(
        "s18_a_capture_begins_while_the_whole_context_is_marked",
        "into 0 0 1; into 1 1 1; free 0; free 1; stats",
        "begin 0",
        "seal",
        "end 0; launch 1; drop; " + TAKE,
        config={"context_events": True, **EAGER},
        assumed=True,
    ),
    Pair(
        "s18_a_stream_joins_a_capture_while_it_is_asked",
        "into 0 0 1; into 1 1 1; free 0; free 1; begin 0",
        "join 1 0",
        "stats",
        "join 0 1; end 0; launch 1; drop; " + TAKE,
    ),
    Pair(
        "s18_a_block_is_taken_while_a_capture_begins",
        "into 0 0 1; into 1 1 1; free 1",
        "begin 0; use 0 0; free 0; end 0",
        "into 2 1 1; free 2; into 3 1 1",
        "idle; stats; into 8 1 1; into 9 1 1; launch 2; drop; stats; into 10 1 1",
        config={"small_request": 2 * MIB},
    ),
)

"""What two to four host threads do at the same time, aimed at each place where threads meet.

Steps are the words of `Slots` (tests/model/pairs.py) and those of `Actor` here; each thread has its own list.  `before`
and `after` are played by one thread.  `after` ends with allocations that take whatever the pool thinks is free, so that
a wrong belief becomes a race.  Blocks are named by number.  All programs keep the contract of docs/ordering.md in every
order of their steps: a stream of another than the owner uses a block only after it waited for the owner.
Next: explorer.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from allocator import (
    Allocation,
    AllocatorError,
    CachingAllocator,
    PoolClosed,
    StreamCapturing,
    StreamClosed,
)
from allocator.caching import reaper
from allocator.errors import Reentered
from allocator.metrics import AllocatorCollector
from allocator.sizes import MIB
from tests.model.pairs import Slots
from tests.model.programs import SIZES, Program, Universe, parse

NB3 = ("nb", "nb", "nb")
MIXED = ("nb", "blocking", "legacy")
EAGER: dict[str, Any] = {"seal_frees": 1}
ONE_PAGE: dict[str, Any] = {"limit": 2 * MIB, "wait_on_demand": False}
TWO_PAGES: dict[str, Any] = {"limit": 4 * MIB, "wait_on_demand": False}
TAKE = "stats; into 8 1 1; into 9 2 1"


@dataclass(frozen=True)
class Play:
    """Threads that run at the same time.  garbage: what the collector finds where it runs."""

    name: str
    before: str
    threads: tuple[str, ...]
    after: str = TAKE
    kinds: tuple[str, ...] = NB3
    config: dict[str, Any] = field(default_factory=dict)
    assumed: bool = False
    garbage: tuple[str, ...] = ()

    def universe(self) -> Universe:
        """What it runs on."""
        return Universe(self.name, self.kinds, events=2, config=self.config, assumed=self.assumed)


class Garbage:
    """An object of a dead cycle, whose end does something with the pool."""

    def __init__(self, actor: Actor, what: str) -> None:
        self.me = self
        self.actor = actor
        self.what = what
        self.kept = actor.garbage(what)

    def __del__(self) -> None:
        self.actor.finalise(self.what, self.kept)


class Actor(Slots):
    """The words that threads need beyond those of a pair.  What may fail because another thread was first, may."""

    def __init__(self, universe: Universe) -> None:
        super().__init__(universe)
        self._collector = AllocatorCollector(self.pool)
        self.refused = 0
        """Finalisers that came back into a locked section, and were told so (`Reentered`)."""
        self.finalised = 0

    def play(self, program: Program) -> None:
        """Take all steps; an error that says "another thread was first" ends one step."""
        for step in program:
            try:
                super().play([step])
            except (PoolClosed, StreamClosed):
                continue

    def do_scrape(self) -> None:
        """What Prometheus does."""
        list(self._collector.collect())

    def do_snapshot(self) -> None:
        """Everything, in blocks."""
        self.pool.snapshot()

    def do_limit(self, mebibytes: int) -> None:
        """A new limit; 0 for none."""
        self.pool.set_limit(mebibytes * MIB)

    def do_lose(self, block: int) -> None:
        """Drop the last reference: the finaliser frees."""
        self.blocks[block] = None

    def do_abandon(self, slot: int) -> None:
        """Drop a stream without closing it: its finaliser only queues.  Its place is taken by a new one."""
        self.streams[slot] = None
        self.streams[slot] = self._stream(self.universe.kinds[slot])

    def do_brief(self, size: int) -> None:
        """A stream that lives for one block."""
        stream = self._stream("nb")
        block = self.pool.allocate(SIZES[size], stream=stream)
        self.gpu.launch(stream, writes=[block])
        block.close()
        stream.close()

    def do_shut(self) -> None:
        """Close the pool."""
        self.pool.close()

    def do_other(self, size: int) -> None:
        """Another pool of the same device is made, used and closed: its calls reap pools that have gone."""
        with CachingAllocator(self.gpu, self.universe.make_config()) as other:
            block = other.allocate(SIZES[size], stream=self.streams[0])
            self.gpu.launch(self.streams[0], writes=[block])
            block.close()
            other.stats()

    def do_capture(self, slot: int) -> None:
        """A capture of a stream, with memory allocated and freed in it; its graph runs once and goes."""
        self.do_begin(slot)
        try:
            block = self.pool.allocate(SIZES[0], stream=self.streams[slot])
            self.gpu.launch(self.streams[slot], writes=[block])
            block.close()
        finally:
            self.do_end(slot)
        self.do_launch(slot)
        self.do_drop()

    def do_reap(self) -> None:
        """Serve the pools that have gone."""
        reaper.reap()

    # -- garbage ----------------------------------------------------------------------------------

    def garbage(self, what: str) -> Any:
        """What a piece of garbage holds."""
        pool, gpu = self.pool, self.gpu
        if what in ("stream", "allocation on stream"):
            stream = self._stream("nb")
            return [pool.allocate(SIZES[1], stream=stream), stream] if what != "stream" else stream
        if what == "event":
            return self.streams[0].record_event()
        if what in ("synchronise", "stats", "allocate"):
            return None
        block = pool.allocate(SIZES[1], stream=self.streams[0])
        gpu.launch(self.streams[0], writes=[block])
        return block

    def finalise(self, what: str, kept: Any) -> None:
        """The end of a piece of garbage, wherever the collector runs."""
        self.finalised += 1
        actions: dict[str, Callable[[], object]] = {
            "close": lambda: kept.close(),
            "close on stream": lambda: kept.close(self.streams[0]),
            "allocate": self._allocate_and_free,
            "synchronise": lambda: self.streams[0].synchronize(),
            "stats": self.pool.stats,
            "declare": lambda: kept.record_stream(self.streams[1]),
        }
        action = actions.get(what)
        if action is None:
            return
        try:
            action()
        except Reentered:
            self.refused += 1
        except (PoolClosed, StreamClosed, StreamCapturing):
            pass
        except AllocatorError as error:
            if "locked section" not in str(error):
                raise
            self.refused += 1

    def _allocate_and_free(self) -> None:
        block: Allocation = self.pool.allocate(SIZES[1], stream=self.streams[0])
        self.gpu.launch(self.streams[0], writes=[block])
        block.close()


GARBAGE: Final = (
    "allocation",
    "allocation on stream",
    "stream",
    "event",
    "close",
    "close on stream",
    "allocate",
    "synchronise",
    "stats",
    "declare",
)

TWO: Final = (
    Play(
        "hits_on_one_stream", "", ("into 1 0 0; free 1; into 2 0 0; free 2", "into 3 0 0; free 3; into 4 0 0; free 4")
    ),
    Play(
        "allocations_across_streams",
        "into 0 0 1; free 0",
        ("into 1 1 1; free 1; into 2 0 1; free 2", "into 3 2 1; free 3; into 4 0 0; free 4"),
        config=EAGER,
    ),
    Play(
        "frees_that_name_a_stream",
        "into 0 0 1; into 1 1 1; wait_stream 1 0",
        ("free_on 0 1; into 2 0 1; free 2; stats", "free 1; into 3 2 1; free 3; into 4 1 1"),
        config=EAGER,
    ),
    Play(
        "declared_uses",
        "into 0 0 1; into 1 1 1; wait_stream 1 0; wait_stream 0 1",
        ("use 0 1; free 0; into 2 0 1; free 2", "use 1 0; free 1; into 3 1 1; stats"),
        config=EAGER,
    ),
    Play(
        "statistics",
        "into 0 0 1; into 1 1 1; free 1",
        ("into 2 1 1; free 2; free 0; into 3 0 0", "stats; scrape; snapshot; stats"),
    ),
    Play(
        "trims",
        "into 0 0 1; into 1 1 1; free 0; free 1; idle",
        ("trim; into 2 0 1; free 2; trim", "into 3 1 1; free 3; into 4 2 0; free 4"),
    ),
    Play(
        "limits",
        "into 0 0 1; into 1 1 1; free 1; idle",
        ("limit 2; limit 0; into 2 0 1; limit 4", "free 0; into 3 1 1; free 3; into 4 2 1"),
        after="limit 0; " + TAKE,
    ),
    Play(
        "streams_that_come_and_go",
        "into 0 0 1; free 0",
        ("brief 1; abandon 0; stats; into 2 0 1", "brief 1; into 3 1 1; free 3; brief 0"),
        config=EAGER,
    ),
    Play(
        "a_stream_closed_under_its_user",
        "into 0 0 1; into 1 1 1; free 1",
        ("renew 0; into 2 0 1; free 2; stats", "free 0; into 3 1 1; stats; into 4 2 1"),
        config=EAGER,
    ),
    Play(
        "settling",
        "into 0 0 1; into 1 1 1; free 1",
        ("settle; into 2 0 1; free 2; settle", "free 0; into 3 1 1; free 3; into 4 2 1"),
        config=EAGER,
    ),
    Play(
        "a_capture",
        "into 0 0 1; into 1 1 1; free 1",
        ("capture 0; into 2 0 1; free 2; stats", "into 3 1 1; free 3; stats; into 4 2 1"),
        config=EAGER,
    ),
    Play(
        "a_capture_with_context_events",
        "into 0 0 1; into 1 1 1; free 1; free 0",
        ("capture 0; into 2 0 1; free 2; stats", "into 3 1 1; free 3; stats; into 4 2 1"),
        config={"context_events": True, **EAGER},
        assumed=True,
    ),
    Play(
        "a_pool_closed_under_its_users",
        "into 0 0 1; into 1 1 1",
        ("free 0; shut; reap; stats", "into 2 1 1; free 2; free 1; into 3 2 1"),
        after="idle",
    ),
    Play(
        "a_closed_pool_reaped_by_two",
        "into 0 0 1; into 1 1 1; shut; free 0",
        ("free 1; reap; other 1; reap", "tick; reap; other 0; stats"),
        after="idle; other 0",
    ),
    Play(
        "events_of_the_program",
        "into 0 0 1; into 1 1 1; free 0; free 1",
        ("record 0 0; wait 0 2; into 2 2 1; free 2", "record 0 1; wait 0 2; into 3 2 1; query_event 0"),
        config=EAGER,
    ),
    Play(
        "the_last_memory",
        "into 0 0 1; free 0",
        ("into 1 1 1; free 1; into 2 0 1; free 2", "into 3 2 1; free 3; into 4 1 1; free 4"),
        config=ONE_PAGE,
    ),
    Play(
        "waits_for_the_last_memory",
        "into 0 0 1; into 1 1 1",
        ("free 0; into 2 2 1; free 2; stats", "free 1; into 3 0 1; free 3; trim"),
        config={"limit": 4 * MIB, "wait_timeout": 0.001},
    ),
    Play(
        "legacy_and_blocking_streams",
        "into 0 2 1; into 1 1 1; free 0",
        ("into 2 1 1; free 2; settle; into 3 2 1", "free 1; into 4 0 1; free 4; stats"),
        kinds=MIXED,
        config={**TWO_PAGES, **EAGER},
    ),
    Play(
        "assumed_users",
        "into 0 0 1; into 1 1 1; free 0",
        ("into 2 0 1; free 2; stats; into 3 1 1", "free 1; into 4 2 1; free 4; trim"),
        config=EAGER,
        assumed=True,
    ),
    Play(
        "plain_memory",
        "into 0 0 1; into 1 1 1; free 0; idle",
        ("trim; into 2 0 1; free 2; stats", "free 1; into 3 1 1; free 3; trim"),
        config={"backing": "malloc", **EAGER},
    ),
    Play(
        "checked_mode",
        "into 0 0 0; free 0; idle; stats",
        ("into 1 0 0; free 1; stats", "into 2 1 0; free 2; stats"),
        after="stats",
        config={"canary": True},
    ),
)
"""Two threads, most of them with four operations each."""

THREE: Final = (
    Play(
        "three_and_a_trim",
        "into 0 0 1; into 1 1 1; free 0",
        ("into 2 0 1; free 2; into 3 0 1", "free 1; into 4 1 1; free 4", "trim; stats; trim"),
        config=EAGER,
    ),
    Play(
        "three_on_the_last_memory",
        "into 0 0 1; free 0",
        ("into 1 0 1; free 1", "into 2 1 1; free 2", "into 3 2 1; free 3"),
        config=TWO_PAGES,
    ),
    Play(
        "three_and_a_capture",
        "into 0 0 1; into 1 1 1; free 1",
        ("capture 0; into 2 0 1", "into 3 1 1; free 3; stats", "scrape; free 0; settle"),
        config=EAGER,
    ),
)

FOUR: Final = (
    Play(
        "four_that_do_everything",
        "into 0 0 1; into 1 1 1; into 5 2 0; wait_stream 1 0",
        (
            "into 2 0 1; free 2; brief 1; into 6 0 0",
            "free_on 0 1; into 3 1 1; free 3; stats",
            "free 1; trim; scrape; settle",
            "into 4 2 1; lose 4; limit 8; limit 0",
        ),
        config=EAGER,
    ),
    Play(
        "four_on_three_pages",
        "into 0 0 1; into 1 1 1; free 1",
        (
            "into 2 0 1; free 2; into 3 0 0; free 3",
            "into 4 1 1; free 4; into 5 1 0; free 5",
            "into 6 2 1; free 6; stats; trim",
            "free 0; settle; record 0 0; wait 0 1",
        ),
        config={"limit": 6 * MIB, "wait_timeout": 0.001, **EAGER},
    ),
    Play(
        "four_and_a_capture_and_an_end",
        "into 0 0 1; into 1 1 1",
        ("capture 0; into 2 0 1; free 2", "free 1; brief 1; renew 1", "into 3 2 1; free 3; snapshot", "free 0; settle"),
        config=EAGER,
    ),
    Play(
        "four_and_a_pool_that_closes",
        "into 0 0 1; into 1 1 1",
        ("into 2 0 1; free 2", "free 0; shut; reap", "free 1; stats; trim", "other 1; into 3 2 1; lose 3"),
        after="idle; other 0",
        assumed=True,
    ),
)

COLLECTED: Final = (
    Play(
        "inside_allocate", "into 0 0 1; into 1 1 1; free 0", ("into 2 0 1; into 3 2 0",), garbage=GARBAGE, config=EAGER
    ),
    Play("inside_free", "into 0 0 1; into 1 1 1; wait_stream 1 0", ("free_on 0 1; free 1; stats",), garbage=GARBAGE),
    Play("inside_a_scrape", "into 0 0 1; into 1 1 1; free 0", ("scrape; snapshot",), garbage=GARBAGE),
    Play("inside_trim", "into 0 0 1; into 1 1 1; free 0; idle", ("trim; limit 2",), garbage=GARBAGE),
    Play("inside_settle", "into 0 0 1; into 1 1 1; free 0", ("settle",), garbage=GARBAGE, config=EAGER),
    Play(
        "inside_the_last_steps",
        "into 0 0 1; into 1 1 1; free 0",
        ("into 2 2 1; free 2",),
        garbage=("close", "allocate"),
    ),
    Play("inside_a_capture", "into 0 0 1; free 0", ("capture 0; stats",), garbage=("allocation", "close", "stream")),
    Play("inside_close", "into 0 0 1; into 1 1 1; free 0", ("shut; reap",), after="idle", garbage=GARBAGE),
    Play(
        "with_plain_memory", "into 0 0 1; free 0", ("into 1 1 1; trim",), garbage=GARBAGE, config={"backing": "malloc"}
    ),
)
"""One thread, and the garbage collector at every place."""

BY_NAME: Final = {play.name: play for play in (*TWO, *THREE, *FOUR, *COLLECTED)}


def steps(line: str) -> Program:
    """A list of steps in words."""
    return parse(line) if line else []

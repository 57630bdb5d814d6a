"""The universes that are searched: which streams, which steps, which settings.

Each is small enough to be complete to length 6 and aims at some rules; together they cover every kind of stream,
every word and every setting that decides about reuse.
"""

from __future__ import annotations

from typing import Any, Final

from allocator.sizes import MIB
from tests.model.programs import Universe

NB3 = ("nb", "nb", "nb")
LEGACY = ("legacy", "blocking", "nb")
THREAD = ("legacy", "blocking", "thread")
THREADS = ("thread", "thread2", "nb")
FOREIGN = ("foreignnb", "foreign", "legacy")
ONE_PAGE: dict[str, Any] = {"limit": 2 * MIB, "wait_on_demand": False}
EAGER: dict[str, Any] = {"seal_frees": 1}
SMALL: dict[str, Any] = {"small_request": 2 * MIB}
"""All sizes are small ones, which always go through the bins."""
ORDER = ("alloc", "free", "use", "wait_stream")
EVENTS = ("alloc", "free", "record", "wait", "use")
HOST = ("alloc", "free", "use", "sync", "query", "tick")

UNIVERSES: Final = (
    Universe("waits", NB3, ORDER),
    Universe("events", NB3, EVENTS, events=2),
    Universe("events-legacy", LEGACY, EVENTS),
    Universe("waits-legacy", LEGACY, ORDER),
    Universe("waits-thread", THREAD, ORDER),
    Universe("waits-threads", THREADS, ORDER, blocks=3),
    Universe("named", NB3, ("alloc", "free", "free_on", "wait_stream")),
    Universe("named-legacy", LEGACY, ("alloc", "free", "free_on", "wait_stream"), config=EAGER),
    Universe("host", LEGACY, HOST),
    Universe("host-one-page", NB3, HOST, config=ONE_PAGE),
    Universe("host-thread", THREAD, HOST, config=EAGER),
    Universe("one-page", NB3, ORDER, config=ONE_PAGE),
    Universe("one-page-legacy", LEGACY, ORDER, config=ONE_PAGE),
    Universe("one-page-eager", LEGACY, ORDER, config={**ONE_PAGE, **EAGER}),
    Universe("two-pages", LEGACY, ("alloc", "free", "use", "wait_stream", "tick"), config={"limit": 4 * MIB}),
    Universe("halves", ("nb", "nb", "legacy"), ("alloc", "free", "wait_stream"), sizes=(0, 1), blocks=4),
    Universe(
        "halves-one-page",
        ("nb", "blocking", "legacy"),
        ("alloc", "free", "wait_stream"),
        sizes=(0, 1),
        blocks=4,
        config=ONE_PAGE,
    ),
    Universe("ends", ("nb", "blocking", "legacy"), ("alloc", "free", "use", "wait_stream", "renew"), config=ONE_PAGE),
    Universe("ends-foreign", FOREIGN, ("alloc", "free", "use", "wait_stream", "renew", "stats"), config=ONE_PAGE),
    Universe("late", ("nb", "blocking", "nb"), ("alloc", "free", "record", "wait", "stats", "tick"), config=EAGER),
    Universe(
        "pool", LEGACY, ("alloc", "free", "stats", "trim", "settle", "tick", "wait_stream"), config={"limit": 4 * MIB}
    ),
    Universe("malloc", LEGACY, ORDER, config={"backing": "malloc", "limit": 4 * MIB}),
    Universe("no-wait", NB3, ORDER, config={"reuse": frozenset({"event_dependency"}), **EAGER}),
    Universe("no-covered", LEGACY, ORDER, config={"reuse": frozenset({"internal_dependency"}), **ONE_PAGE}),
    Universe("bounded", NB3, ("alloc", "free", "use", "wait_stream", "tick"), config={"max_in_flight": 1 * MIB}),
    Universe("assumed", NB3, ORDER, assumed=True),
    Universe("assumed-events", ("nb", "blocking", "legacy"), EVENTS, assumed=True, config=EAGER),
    Universe("assumed-one-page", LEGACY, ORDER, assumed=True, config=ONE_PAGE),
    Universe("assumed-context", NB3, ORDER, assumed=True, config={"context_events": True, **ONE_PAGE, **EAGER}),
    Universe("assumed-context-legacy", LEGACY, ORDER, assumed=True, config={"context_events": True, **EAGER}),
    Universe("assumed-host", THREAD, HOST, assumed=True),
    Universe(
        "assumed-halves",
        ("nb", "nb", "legacy"),
        ("alloc", "free", "use", "wait_stream"),
        sizes=(0, 1),
        assumed=True,
        config=ONE_PAGE,
    ),
    Universe("assumed-ends", ("nb", "blocking", "nb"), (*ORDER, "renew"), assumed=True, config=ONE_PAGE),
    Universe("assumed-threads", THREADS, ORDER, assumed=True, config=ONE_PAGE),
    Universe("bins", NB3, ORDER, config=SMALL),
    Universe("bins-legacy", LEGACY, ORDER, config={**SMALL, **ONE_PAGE}),
    Universe("bins-named", ("nb", "blocking", "legacy"), ("alloc", "free", "free_on", "wait_stream"), config=SMALL),
    Universe("bins-assumed", NB3, ORDER, assumed=True, config={**SMALL, **EAGER}),
    Universe(
        "bins-halves", ("nb", "nb", "legacy"), ("alloc", "free", "wait_stream"), sizes=(0, 1), blocks=4, config=SMALL
    ),
    Universe("bins-ends", ("nb", "blocking", "legacy"), ("alloc", "free", "use", "wait_stream", "renew"), config=SMALL),
    Universe("turns", NB3, (*ORDER, "tick"), config=SMALL, turns=True),
    Universe("turns-legacy", LEGACY, ORDER, config={**SMALL, **EAGER}, turns=True),
    Universe("turns-assumed", NB3, ORDER, assumed=True, config=SMALL, turns=True),
    Universe(
        "turns-ends",
        ("nb", "blocking", "nb"),
        ("alloc", "free", "wait_stream", "renew", "stats"),
        config=SMALL,
        turns=True,
    ),
    Universe("quiet", LEGACY, ("alloc", "quiet", "free", "use", "sync", "wait_stream")),
    Universe("quiet-thread", THREAD, ("alloc", "quiet", "free", "use", "wait_stream")),
    Universe("quiet-assumed", LEGACY, ("quiet", "alloc", "free", "use", "wait_stream"), assumed=True, config=EAGER),
)

BY_NAME: Final = {universe.name: universe for universe in UNIVERSES}

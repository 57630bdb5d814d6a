"""What a device's registry knows of its pools, and of the streams that are still there."""

from __future__ import annotations

import ast
import gc
import sys
import threading
import weakref
from pathlib import Path

import pytest

from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.streams import Registry, Sealing
from allocator.streams.timeline import MOST_ENTRIES
from tests.model.programs import Foreign

ROOT = Path(__file__).resolve().parents[3]


def test_pools_are_told_in_the_order_in_which_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their addresses are: a run with a seed is the same run again."""
    gpu = SimDevice()
    pools = [CachingAllocator(gpu, config=Config(), name=f"{number}") for number in range(200)]
    told: list[str] = []
    monkeypatch.setattr(CachingAllocator, "drain_frees", lambda pool: told.append(pool.name))
    for number in (3, 150, 77):
        pools[number].close()
    del pools[100:120], pools[50]
    gc.collect()
    pools.append(CachingAllocator(gpu, config=Config(), name="last"))
    for pool in pools:
        pool.frees.append("something")
    Registry.of(gpu).before_mark()
    assert told == [pool.name for pool in pools]
    for pool in pools:
        pool.frees.clear()


def test_a_pool_is_made_while_another_thread_goes_through_all_of_them() -> None:
    gpu = SimDevice()
    registry = Registry.of(gpu)
    failed: list[BaseException] = []
    over = threading.Event()

    def go_through() -> None:
        try:
            while not over.is_set():
                registry.all_pools()
        except BaseException as error:
            failed.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=go_through)
    thread.start()
    try:
        pools = [CachingAllocator(gpu, Config()) for _ in range(300)]
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)
    assert failed == [] and registry.all_pools() == pools


@pytest.mark.parametrize("folder", ["allocator", "metrics", "stress"])
def test_nothing_is_kept_in_a_weak_set_whose_order_is_by_address(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert "WeakSet" not in names, path


# -- clocks ---------------------------------------------------------------------------------------


def test_r5_only_what_is_over_is_pruned_from_a_clock() -> None:
    gpu = SimDevice()
    registry = Registry.of(gpu)
    waits, held, idle = Stream(gpu), Stream(gpu), Stream(gpu)
    gpu.launch(held, duration_ns=1000)
    for other in (held, idle):
        waits.wait_stream(other)
    for _ in range(4 * MOST_ENTRIES):
        brief = Stream(gpu)
        waits.wait_stream(brief)
        brief.close()
        gpu.advance(1)
        registry_has = set(registry.lines)
        assert {held.line.number, idle.line.number} <= set(waits.line.clock.at)
    gone = set(waits.line.clock.at) - registry_has
    assert len(waits.line.clock) <= 3 * MOST_ENTRIES and len(gone) <= MOST_ENTRIES + 4


def test_r5_a_stream_that_has_ended_with_work_queued_stays_in_the_clock() -> None:
    gpu = SimDevice()
    registry = Registry.of(gpu)
    waits, ended = Stream(gpu), Stream(gpu)
    gpu.launch(ended, duration_ns=1000)
    waits.wait_stream(ended)
    number = ended.line.number
    ended.close()
    assert number in registry.lines
    with registry.lock:
        waits.line.prune_at = 0
        registry.prune(waits.line)
    assert number in waits.line.clock.at
    gpu.run_until_idle()
    Sealing(registry).end_finished()
    Sealing(registry).poll(list(registry.lines.values()))
    with registry.lock:
        waits.line.prune_at = 0
        registry.prune(waits.line)
    assert number not in registry.lines and number not in waits.line.clock.at


def test_a_finaliser_inside_the_section_of_the_timelines_may_make_a_pool() -> None:
    gpu = SimDevice()
    registry = Registry.of(gpu)
    with registry.lock:
        pool = CachingAllocator(gpu, Config())
    assert registry.all_pools() == [pool]


@pytest.mark.parametrize("carried", [False, True])
def test_r9_somebody_elses_stream_is_let_go_once_neither_they_nor_memory_have_it(carried: bool) -> None:
    gpu = SimDevice()
    registry, pool, own = Registry.of(gpu), CachingAllocator(gpu, Config()), Stream(gpu)
    seen: list[weakref.ref[Foreign]] = []
    held = []
    for _ in range(5):
        foreign = Foreign(gpu, non_blocking=True)
        seen.append(weakref.ref(foreign))
        memory = pool.allocate(1000, stream=own if carried else foreign)
        if carried:
            memory.record_stream(foreign)
        held.append(memory)
    del foreign
    pool.stats()
    assert all(ref() is not None for ref in seen) and len(registry.owners) == 5 + 1
    held[0].close()
    del memory, held[:1]
    pool.allocate(5000, stream=own)  # what memory has kept is dropped at the next allocation that is more than a hit
    pool.stats()
    assert [ref() is None for ref in seen] == [True] + 4 * [False]
    held.clear()
    pool.allocate(9000, stream=own)
    pool.stats()
    assert all(ref() is None for ref in seen) and len(registry.owners) == 1

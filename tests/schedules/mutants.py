"""Locking, draining and accounting, each broken on purpose: a mutant is the real code with one piece of text replaced.

The rules R1 to R13 have theirs in tests/model/mutants.py and capture_mutants.py.  `catch` says what reveals one here:

    "alone: PROGRAM"        its threads one after the other
    "orders: PROGRAM"       some order with one switch
    "seeds: PROGRAM"        some random order
    "garbage: PROGRAM"      the garbage collector at some place
    "account: NAME"         a comparison of the statistics with what a program did

    python -m tests.schedules.mutants        each of all mutants, and what kills it; exit status 1 if one lives

Next: test_mutants.py.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from allocator import CachingAllocator, Config, OutOfMemoryError, SimDevice, Stream
from allocator.sizes import KIB, MIB
from tests.model.capture_mutants import ALL_MUTANTS, CAPTURING, SETTLING
from tests.model.mutants import CACHING, FREES, FRONT, GROWTH, LADDER, POOL, SHELVES, Change, Mutant
from tests.schedules.explorer import Outcome, by_seed, collect, explore, run
from tests.schedules.programs import BY_NAME, Play
from tests.schedules.tracing import nobody_takes_anything_inside

ACCOUNTS = f"{CACHING}.accounting:Accounts"
REAPER = f"{CACHING}.reaper"
LOCK = "allocator.sync:OwnedLock"

SEEDS: Final = range(60)

MORE: Final = {
    play.name: play
    for play in (
        Play(
            "two_that_grow",
            "",
            ("into 1 0 1; into 2 0 1", "into 3 1 1; into 4 1 1"),
            "stats",
            config={"limit": 4 * MIB},
        ),
    )
}


def _m(name: str, catch: str, *changes: tuple[str, str, str]) -> Mutant:
    return Mutant(name, tuple(Change(*change) for change in changes), catch)


# -- statistics against what a program did -----------------------------------------------------------


def _used(pool: CachingAllocator, gpu: SimDevice, stream: Stream, nbytes: int) -> object:
    block = pool.allocate(nbytes, stream=stream)
    gpu.launch(stream, 1000, writes=[block])
    return block


def figures() -> str | None:
    """Odd sizes, two streams, a stream that ends, memory that goes back: every figure is known in advance."""
    gpu = SimDevice()
    pool = CachingAllocator(gpu, Config(uses="declared", small_page=2 * MIB))
    one, two = Stream(gpu), Stream(gpu)
    first: Any = [_used(pool, gpu, one, 700) for _ in range(3)]
    pool.check()
    stats = pool.stats()
    wrong = [] if (stats.requested_bytes, stats.allocated_bytes) == (2100, 3 * KIB) else ["live"]
    pool.reset_peaks()
    for block in first:
        block.close()
    pool.check()
    stats = pool.stats()
    if (stats.in_flight_bytes, stats.peak_in_flight_bytes) != (3 * KIB, 3 * KIB):
        wrong.append("in flight")
    if stats.frees != {"same_stream": 3, "cross_stream": 0}:
        wrong.append("frees")
    again: Any = _used(pool, gpu, one, 900)  # from a bin
    last: Any = _used(pool, gpu, two, 5 * MIB + 1)
    pool.check()
    gpu.run_until_idle()
    again.close()
    last.close()
    one.close()
    pool.settle()
    stats = pool.stats()
    if sum(stats.allocations.values()) != 5 or sum(stats.request_size_bytes.values()) != 5:
        wrong.append("allocations")
    if sum(stats.allocation_bytes.values()) != 4 * KIB + 5 * MIB + 512:
        wrong.append("allocated bytes")
    if stats.request_size_bytes.sum != 2100 + 900 + 5 * MIB + 1 or stats.requested_bytes:
        wrong.append("requested bytes")
    if stats.peak_allocated_bytes != KIB + 5 * MIB + 512 or stats.peak_reserved_bytes != stats.reserved_bytes:
        wrong.append("peaks")
    if stats.growth_bytes != stats.reserved_bytes or stats.growths < 2:
        wrong.append("growth")
    pool.trim()
    stats = pool.stats()
    if stats.reserved_bytes or sum(stats.release_bytes.values()) != stats.growth_bytes:
        wrong.append("released")
    pool.check()
    held: list[Any] = []
    for _ in range(20):  # so many streams that end that their bins are let go
        brief = Stream(gpu)
        held.append(pool.allocate(KIB, stream=brief))
        for _ in range(3):  # twice from a bin
            pool.allocate(2 * KIB, stream=brief).close()
            pool.check()
        brief.close()
    pool.settle()
    pool.trim()
    stats = pool.stats()
    if sum(stats.allocations.values()) != 5 + 80 or sum(stats.request_size_bytes.values()) != 5 + 80:
        wrong.append("allocations of streams that have ended")
    for block in held:
        block.close()
        pool.check()
    if any(line.ended for bins in pool._shelves.bins for line in bins):
        wrong.append("bins of streams that have ended")
    pool.close()
    return ", ".join(wrong) or None


def limits() -> str | None:
    """What is on its way to or from the driver counts against the limit exactly as long as it is."""
    gpu = SimDevice()
    pool = CachingAllocator(gpu, Config(limit=4 * MIB, wait_timeout=0))
    stream = Stream(gpu)
    for _ in range(3):
        try:
            pool.allocate(2 * MIB, stream=stream).close()
            pool.trim()
            pool.allocate(4 * MIB, stream=stream).close()
            pool.trim()
        except OutOfMemoryError:
            return "refused although nothing is held"
    try:
        pool.allocate(6 * MIB, stream=stream)
    except OutOfMemoryError:
        pool.close()
        return None
    return "more than the limit"


def address_space() -> str | None:
    """A range of addresses that was given back is used again."""
    gpu = SimDevice(memory=8 * MIB)
    with CachingAllocator(gpu) as pool:
        stream = Stream(gpu)
        for _ in range(64):
            pool.allocate(4 * MIB, stream=stream).close()
            pool.trim()
        return None if pool.stats().growths == 64 else "not every round grew"


def a_growth_that_fails() -> str | None:
    """Free neighbours were to be part of the new block: they are free again."""
    gpu = SimDevice()
    with CachingAllocator(gpu) as pool:
        stream = Stream(gpu)
        pool.allocate(32 * MIB, stream=stream).close()
        gpu.fail("cuMemCreate", times=0)
        try:
            pool.allocate(64 * MIB, stream=stream)
        except OutOfMemoryError:
            gpu.clear_faults()
        pool.check()
        return None if pool.stats().idle_bytes == pool.reserved_bytes else "lost"


def a_free_queued_twice() -> str | None:
    """A finaliser and a `close()` may both have queued it: once counts."""
    gpu = SimDevice()
    with CachingAllocator(gpu, Config(uses="declared")) as pool:
        stream = Stream(gpu)
        block = pool.allocate(MIB, stream=stream)
        kept = pool.allocate(MIB, stream=stream)
        entry = (block._block, block._block.generation, None)
        block.close()
        pool.frees.append(entry)
        pool.check()
        stats = pool.stats()
        kept.close()
        return None if stats.frees["same_stream"] == 1 and stats.allocated_bytes == MIB else "freed twice"


def readings_of_a_long_queue() -> str | None:
    """A reading sees to a few frees only; the others are seen to later, and none is lost."""
    gpu = SimDevice()
    with CachingAllocator(gpu, Config(uses="declared")) as pool:
        stream = Stream(gpu)
        blocks = [pool.allocate(4 * KIB, stream=stream) for _ in range(40)]
        for block in blocks:
            block.close()
        for _ in range(20):
            pool.stats(most=4)
        stats = pool.stats()
        pool.check()
        freed = stats.pending_frees == 0 and stats.allocated_bytes == 0 and sum(stats.frees.values()) == 40
        return None if freed else "frees were lost"


def marks_in_time() -> str | None:
    """R13: a mark for every `seal_frees` frees once two streams free memory."""
    gpu = SimDevice()
    with CachingAllocator(gpu, Config(uses="declared", seal_frees=16)) as pool:
        lanes = Stream(gpu), Stream(gpu)
        for i in range(320):
            block: Any = _used(pool, gpu, lanes[i % 2], 4 * KIB)
            block.close()
        records = pool.stats().event_records
        gpu.run_until_idle()
        return None if 10 <= records <= 60 else f"{records} marks"


def bins_of_a_stream_that_ends() -> str | None:
    """All that lies there goes to everybody."""
    gpu = SimDevice()
    with CachingAllocator(gpu, Config(uses="declared")) as pool:
        stream = Stream(gpu)
        blocks = [pool.allocate(4 * KIB, stream=stream) for _ in range(6)]
        for block in blocks:
            block.close()
        stream.close()
        pool.settle()
        pool.trim()
        pool.check()
        return None if pool.reserved_bytes == 0 else "memory is kept for a stream that has ended"


def bins_that_nobody_uses() -> str | None:
    """They go; a block that had one comes back all the same."""
    gpu = SimDevice()
    with CachingAllocator(gpu, Config(uses="declared")) as pool:
        stream = Stream(gpu)
        blocks = [pool.allocate(KIB, stream=stream) for _ in range(3)]
        for n in range(3, 2000):
            for _ in range(2):  # a stream of many sizes gets no bin for one that it asks for once
                pool.allocate(n * 512, stream=stream).close()
        for block in blocks:
            block.close()
        pool.check()
        bins = sum(len(sizes.by_size) for bins in pool._shelves.bins for sizes in bins.values())
        return None if bins < 1000 else f"{bins} bins"


def large_memory_grows_together() -> str | None:
    """Once streams share, large blocks that are freed merge at once: no bin has to be emptied for it."""
    gpu = SimDevice()
    with CachingAllocator(gpu, Config(uses="declared")) as pool:
        stream, other = Stream(gpu), Stream(gpu)
        for one in (stream, other):
            pool.allocate(32 * MIB, stream=one).close()
        halves = [pool.allocate(16 * MIB, stream=stream) for _ in range(2)]
        for half in halves:
            half.close()
        pool.drain_frees()
        pool.check()
        block = pool.front.fetch(32 * MIB, stream.line, False)
        if block is None:
            return "two halves in a bin do not serve the whole"
        pool.put_down((block, block.generation, None))
        return None


def a_miss_is_looked_for_anew() -> str | None:
    """What a request looked for in vain is there once somebody has freed it."""
    gpu = SimDevice()
    with CachingAllocator(gpu, Config(uses="declared")) as pool:
        stream, other = Stream(gpu), Stream(gpu)
        held = pool.allocate(KIB, stream=stream)
        for one in (stream, other):
            pool.allocate(KIB, stream=one).close()
        pool.drain_frees()
        if pool.front.fetch(8 * MIB, stream.line, False) or not pool.front.in_vain(8 * MIB, stream.line, False):
            return "what has just failed counts as not looked for"
        held.close()
        pool.front.acquire(KIB, other.line, False)  # puts the free down, without a section
        return "a free makes no difference" if pool.front.in_vain(8 * MIB, stream.line, False) else None


def nothing_grows_past_what_has_just_become_idle() -> str | None:
    """Between the look that failed and the ladder another thread frees, and finds out that the work is over."""
    gpu = SimDevice()
    with CachingAllocator(gpu, Config(uses="declared")) as pool:
        stream, other = Stream(gpu), Stream(gpu)
        held = pool.allocate(8 * MIB, stream=stream)
        for one in (stream, other):
            pool.allocate(MIB, stream=one).close()
        pool.drain_frees()
        growths, climb = pool.stats().growths, pool._climb

        def later(request: Any) -> Any:
            held.close()
            pool.settle()
            return climb(request)

        pool._climb = later  # type: ignore[method-assign]
        pool.allocate(8 * MIB, stream=other).close()
        return None if pool.stats().growths == growths else "the pool grew past idle memory"


def the_order_of_locks() -> str | None:
    """Whoever is inside the timelines' section does not get a pool's lock."""
    pool = CachingAllocator(SimDevice(memory=1 << 28))
    with pool._registry.lock:
        if pool._lock.acquire(timeout=0.01):
            pool._lock.release()
            return "whoever is inside the timelines' section gets a pool's lock"
    return None


ACCOUNTS_OF: Final[dict[str, Callable[[], str | None]]] = {
    one.__name__: one
    for one in (
        figures,
        limits,
        address_space,
        a_growth_that_fails,
        a_free_queued_twice,
        readings_of_a_long_queue,
        marks_in_time,
        bins_of_a_stream_that_ends,
        bins_that_nobody_uses,
        nobody_takes_anything_inside,
        large_memory_grows_together,
        a_miss_is_looked_for_anew,
        nothing_grows_past_what_has_just_become_idle,
        the_order_of_locks,
    )
}


LOCKED: Final = ("with self._lock:", "if True:")
CHECKED: Final = ("with self._lock.checked():", "if True:")

MUTANTS: Final = (
    # -- locking ------------------------------------------------------------------------------------
    _m(
        "lock_an_allocation_looks_for_memory_without_it",
        "seeds: four_that_do_everything",
        (f"{LADDER}._look", *CHECKED),
    ),
    _m("lock_a_snapshot_is_taken_without_it", "seeds: four_and_a_capture_and_an_end", (f"{POOL}.snapshot", *LOCKED)),
    _m("lock_whom_to_ask_is_found_without_it", "seeds: legacy_and_blocking_streams", (f"{SETTLING}.waiting", *CHECKED)),
    _m("lock_settling_drains_without_it", "seeds: four_that_do_everything", (f"{SETTLING}.wait_for_all", *CHECKED)),
    _m(
        "lock_a_hit_does_not_look_whether_anybody_is_inside",
        "account: nobody_takes_anything_inside",
        (f"{FRONT}.acquire", "block = blocks[LAST[self.inside.busy]]; del", "block = blocks[-1]; del"),
    ),
    _m(
        "lock_streams_take_turns_while_somebody_is_inside",
        "account: nobody_takes_anything_inside",
        (f"{FRONT}.acquire", "block = blocks[LAST[self.inside.busy]]; back", "block = blocks[-1]; back"),
    ),
    _m(
        "lock_what_was_freed_last_goes_back_while_somebody_is_inside",
        "account: nobody_takes_anything_inside",
        (f"{FRONT}.acquire", "or last.generation != kept or busy:", "or last.generation != kept:"),
    ),
    _m(
        "lock_a_free_is_put_down_while_somebody_is_inside",
        "account: nobody_takes_anything_inside",
        (f"{FREES}.put_down_last", "or last.generation != kept or busy:", "or last.generation != kept:"),
    ),
    _m(
        "lock_nobody_hears_that_a_section_has_begun",
        "account: nobody_takes_anything_inside",
        (f"{LOCK}.acquire", "self.inside.busy = 1", "pass"),
    ),
    _m(
        "lock_who_holds_the_one_below_gets_it",
        "account: the_order_of_locks",
        (f"{LOCK}.acquire", "or (below is not None and below.held_here())", ""),
    ),
    _m("lock_a_capture_begins_without_it", "seeds: three_and_a_capture", (f"{CAPTURING}.begins", *LOCKED)),
    _m(
        "lock_a_finaliser_comes_back_into_the_locked_section",
        "garbage: inside_free",
        (f"{LOCK}.acquire", "if inner._is_owned() or (below", "if (below"),
    ),
    _m(
        "lock_what_another_thread_gets_from_the_driver_is_not_counted",
        "orders: two_that_grow",
        (f"{GROWTH}.grow", "self.growing += nbytes", "pass"),
        (f"{GROWTH}.grow", "self.growing -= nbytes", "pass"),
    ),
    _m(
        "lock_a_neighbour_that_is_to_grow_stays_where_others_take_it",
        "alone: hits_on_one_stream",
        (f"{GROWTH}._plan", "block.shelf.remove(block)", "pass"),
    ),
    # -- queues and their draining -------------------------------------------------------------------
    _m(
        "drain_one_free_at_a_call",
        "garbage: inside_allocate",
        (f"{FREES}.drain", "while queue:", "for _ in [1] if queue else []:"),
    ),
    _m("drain_loses_the_block", "alone: two_that_grow", (f"{FREES}.drain", "bin_.blocks.append(block)", "pass")),
    _m(
        "drain_forgets_the_stream_that_the_free_names",
        "alone: frees_that_name_a_stream",
        (f"{FREES}.drain", "if bin_ is None or named is not None or (", "if bin_ is None or ("),
    ),
    _m(
        "drain_puts_memory_of_a_stream_that_has_ended_into_its_bin",
        "account: figures",
        (f"{FREES}.drain", "(owner := bin_.owner).ended:", "(owner := bin_.owner) is None:"),
    ),
    _m(
        "drain_puts_large_memory_that_streams_share_into_a_bin",
        "account: large_memory_grows_together",
        (f"{SHELVES}.hand_out", "(block.kind == SMALL or not self.crossing)", "True"),
    ),
    _m(
        "account_a_section_makes_no_difference_to_a_miss",
        "account: nothing_grows_past_what_has_just_become_idle",
        (f"{FRONT}.unchanged", "vain == self._now(size, line, assumed, 1)", "True"),
    ),
    _m(
        "account_a_free_makes_no_difference_to_a_miss",
        "account: a_miss_is_looked_for_anew",
        (f"{FRONT}._now", " self.accounts.frees,", ""),
    ),
    _m(
        "drain_frees_twice_what_was_queued_twice",
        "account: a_free_queued_twice",
        (f"{FREES}.drain", "if block.generation == generation:", "if True:"),
    ),
    _m(
        "drain_leaves_the_generation",
        "account: a_free_queued_twice",
        (f"{FREES}.drain", "block.generation = generation + 1", "pass"),
    ),
    _m(
        "drain_a_reading_loses_what_it_sees_to",
        "account: readings_of_a_long_queue",
        (f"{FREES}.drain_some", "self._put_down(block, named)", "pass"),
    ),
    _m(
        "drain_never_tells_that_marks_are_due",
        "account: marks_in_time",
        (
            f"{FREES}._due",
            "frees >= self._frees_due or freed_bytes >= self._accounts.bytes_due or self.pressed()",
            "False",
        ),
    ),
    _m(
        "drain_does_not_notice_the_second_stream",
        "account: marks_in_time",
        (f"{FREES}._met", "self.crossing = self._shelves.crossing = True", "pass"),
    ),
    _m(
        "drain_puts_memory_into_a_bin_that_has_gone",
        "account: bins_that_nobody_uses",
        (f"{FREES}.drain", "bin_ = block.bin = self._shelves.note_bin(bin_)", "self._shelves.note_bin(bin_)"),
    ),
    _m(
        "queue_a_pool_that_waits_its_turn_is_dropped",
        "alone: a_closed_pool_reaped_by_two",
        (f"{REAPER}:_serve", "            _leaving.append(look)\n            continue", "            continue"),
    ),
    _m(
        "queue_a_pool_that_could_not_go_is_forgotten",
        "alone: a_pool_closed_under_its_users",
        (
            f"{REAPER}:_serve",
            "look.skipped, look.skip = 0, min(2 * look.skip + 1, MOST_SKIPPED)\n            _leaving.append(look)",
            "pass",
        ),
    ),
    # -- accounting ------------------------------------------------------------------------------------
    _m(
        "account_a_free_takes_nothing_off",
        "account: figures",
        (f"{FREES}.drain", "accounts.allocated = allocated = accounts.allocated", "allocated = accounts.allocated"),
    ),
    _m(
        "account_a_free_gives_back_more_than_was_asked_for",
        "account: figures",
        (f"{FREES}.drain", "accounts.freed_sum += block.requested", "accounts.freed_sum += bin_.size"),
    ),
    _m("account_frees_are_not_counted", "account: figures", (f"{FREES}.drain", "accounts.frees += 1", "pass")),
    _m(
        "account_allocated_is_what_was_asked_for",
        "account: figures",
        (f"{ACCOUNTS}.hand_out", "self.allocated += block.size", "self.allocated += requested"),
    ),
    _m(
        "account_requested_is_what_was_handed_out",
        "account: figures",
        (f"{ACCOUNTS}.hand_out", "self.requested_sum += requested", "self.requested_sum += block.size"),
    ),
    _m(
        "account_bytes_by_reuse_are_what_was_asked_for",
        "account: figures",
        (f"{ACCOUNTS}.hand_out", "self.served_bytes[reuse] += block.size", "self.served_bytes[reuse] += requested"),
    ),
    _m(
        "account_sizes_are_not_counted",
        "account: figures",
        (f"{ACCOUNTS}.hand_out", "self.sizes[(block.size - 1).bit_length()] += 1", "pass"),
    ),
    _m(
        "account_the_most_reserved_is_not_kept",
        "account: figures",
        (f"{ACCOUNTS}.mark", "self.peak_reserved = reserved", "pass"),
    ),
    _m(
        "account_growth_is_not_counted",
        "account: figures",
        (f"{GROWTH}._settle_plan", "accounts.growth_bytes += nbytes", "pass"),
    ),
    _m(
        "account_what_is_released_is_not_counted",
        "account: figures",
        (f"{GROWTH}._give_back", "accounts.release_bytes[reason] += freed", "pass"),
    ),
    _m(
        "account_what_bins_of_an_ended_stream_served_is_forgotten",
        "account: figures",
        (f"{SHELVES}._gone", "self.past_hits[(bin_.size - 1).bit_length()] += served", "pass"),
    ),
    _m(
        "account_memory_stays_on_its_way_from_the_driver",
        "account: limits",
        (f"{GROWTH}.grow", "self.growing -= nbytes", "pass"),
    ),
    _m(
        "account_memory_on_its_way_to_the_driver_counts_no_more",
        "account: limits",
        (f"{GROWTH}._take_some", "self.growing += self._cut_out", "self._cut_out"),
    ),
    _m(
        "account_addresses_are_used_once",
        "account: address_space",
        (f"{GROWTH}._give_back", "self._vacate(gone, neighbours)", "pass"),
    ),
    _m(
        "account_neighbours_of_a_growth_that_fails_are_lost",
        "account: a_growth_that_fails",
        (f"{GROWTH}._settle_plan", "self._shelves.place(block)", "pass"),
    ),
    _m(
        "account_what_is_left_of_a_split_is_lost",
        "alone: hits_on_one_stream",
        (f"{SHELVES}.carve", "self.place(rest)", "pass"),
    ),
)


def orders_of(how: str, name: str) -> Iterator[Outcome]:
    """What `catch` stands for."""
    play = MORE.get(name) or BY_NAME[name]
    if how == "alone":
        yield run(play)
    elif how == "orders":
        yield from explore(play, 1)
    elif how == "seeds":
        yield from (by_seed(play, seed, lane=False) for seed in SEEDS)
    else:
        assert how == "garbage", how
        yield from collect(play)


def killed(mutant: Mutant) -> str | None:
    """What the killer says of the pool with the mistake; None if it lives.  Raises AssertionError if the killer finds
    something wrong with the pool as it is."""
    how, _, name = mutant.catch.partition(": ")
    if how == "account":
        account = ACCOUNTS_OF[name]
        assert account() is None, name
        with mutant.applied():
            try:
                return account()
            except Exception as error:
                return f"{type(error).__name__}: {error}"
    with mutant.applied():
        outcome = next((one for one in orders_of(how, name) if one.wrong is not None), None)
    if outcome is None:
        return None
    sound = run(outcome.play, outcome.plan, outcome.collect)
    assert sound.wrong is None, sound
    return outcome.wrong


def main() -> int:
    """Kill all mutants, those of the rules too; a line each."""
    from tests.model.test_mutants import test_the_mutant_is_caught

    gc.collect()
    gc.freeze()
    gc.disable()
    lived = 0
    for mutant in (*ALL_MUTANTS, *MUTANTS):
        try:
            if mutant in MUTANTS:
                assert killed(mutant) is not None
            else:
                test_the_mutant_is_caught(mutant)
        except AssertionError:
            lived += 1
            print(f"{mutant.name}: LIVES, in spite of {mutant.catch}", flush=True)
        else:
            print(f"{mutant.name}: killed by {mutant.catch}", flush=True)
        gc.collect()
    print(f"{len(ALL_MUTANTS) + len(MUTANTS)} mutants, {lived} alive")
    return int(lived > 0)


if __name__ == "__main__":
    sys.exit(main())

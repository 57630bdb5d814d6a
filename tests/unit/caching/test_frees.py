"""R3: the queue and the stamp.  A free is one append; it is stamped late, in full, and once."""

from __future__ import annotations

import random
import threading

import pytest

from allocator import Allocation, CachingAllocator, SimDevice, Stream
from allocator.events import VectorClock
from allocator.streams import CONTEXT
from tests.unit.caching.conftest import MIB, MakePool


def _stamp_of(pool: CachingAllocator, ptr: int) -> VectorClock:
    return next(b.stamp for b in pool._heap.blocks() if b.ptr <= ptr < b.end)


def test_r3_the_stamp_names_the_owner_every_declared_user_and_the_stream_of_the_free(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    owner, first, second, named, other = (Stream(gpu) for _ in range(5))
    for s in (owner, first, second, named, other):
        gpu.hold(s)
        gpu.launch(s)
    a = pool.allocate(2 * MIB, stream=owner)
    a.record_stream(first)
    a.record_stream(second)
    a.close(named)
    pool.check()
    users = {s.line.number for s in (owner, first, second, named)}
    assert set(_stamp_of(pool, a.ptr).at) == users


def test_r3_assumed_users_are_one_entry_of_the_context(gpu: SimDevice, make: MakePool) -> None:
    pool = make(uses="assumed")
    streams = [Stream(gpu) for _ in range(9)]
    a = pool.allocate(2 * MIB, stream=streams[0])
    a.close()
    pool.check()
    assert set(_stamp_of(pool, a.ptr).at) == {CONTEXT, streams[0].line.number}


@pytest.mark.parametrize(("uses", "assumed", "context"), [
    ("auto", False, False), ("auto", True, True), ("declared", True, False), ("assumed", False, True),
])  # fmt: skip
def test_r3_config_decides_which_uses_count(
    gpu: SimDevice, make: MakePool, uses: str, assumed: bool, context: bool
) -> None:
    pool = make(uses=uses)
    a = pool.allocate(2 * MIB, stream=Stream(gpu), assumed=assumed)
    a.close()
    pool.check()
    assert (CONTEXT in _stamp_of(pool, a.ptr).at) is context


def test_r3_a_late_stamp_names_the_later_seqno(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    a = pool.allocate(2 * MIB, stream=s)
    a.close()
    with pool._registry.lock:
        s.line.close_seqno()  # somebody marks the stream before the free is drained
    pool.check()
    assert _stamp_of(pool, a.ptr).get(s.line.number) == s.line.pending == 2


def test_r3_a_drain_retires_a_live_block_of_the_same_generation_only(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    a = pool.allocate(2 * MIB, stream=s)
    entry = (a._block, a._generation, None)
    a.close()
    pool.frees.extend([entry, entry])  # the same free, seen again
    pool.check()
    b = pool.allocate(2 * MIB, stream=s)
    assert b.ptr == a.ptr
    pool.frees.append(entry)  # and once more, now that somebody else has the block
    pool.check()
    stats = pool.stats()
    assert stats.blocks["live"] == 1 and sum(stats.frees.values()) == 1
    b.close()


def test_r7_a_bin_holds_its_owners_blocks_only(gpu: SimDevice, pool: CachingAllocator) -> None:
    owner, reader = Stream(gpu), Stream(gpu)
    gpu.hold(reader)
    a = pool.allocate(1024, stream=owner)
    gpu.launch(reader, reads=[a])
    a.record_stream(reader)
    a.close()
    pool.check()
    assert not any(sizes.any() for bins in pool._shelves.bins for sizes in bins.values())
    assert pool.allocate(1024, stream=owner).ptr != a.ptr


def test_r7_a_stream_that_has_ended_has_no_bin(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    a = pool.allocate(1024, stream=s)
    s.close()
    a.close()
    pool.check()
    assert not any(sizes.any() for bins in pool._shelves.bins for sizes in bins.values())
    assert pool.stats().in_flight_bytes == 0


def test_frees_are_counted_once_from_many_threads(gpu: SimDevice, pool: CachingAllocator) -> None:
    streams = [Stream(gpu) for _ in range(3)]
    live = [pool.allocate(1024 * (i % 5 + 1), stream=streams[i % 3]) for i in range(900)]

    def close(part: list[Allocation]) -> None:
        random.Random(1).shuffle(part)
        for a in part:
            a.close()

    threads = [threading.Thread(target=close, args=(list(live),)) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    stats = pool.stats()
    assert stats.blocks["live"] == 0 and sum(stats.frees.values()) == 900 and stats.pending_frees == 0


def test_r13_sealing_begins_with_the_second_stream(gpu: SimDevice, make: MakePool) -> None:
    pool = make(seal_frees=4)
    a, b = Stream(gpu), Stream(gpu)
    gpu.hold(a)
    gpu.launch(a)

    def pair(s: Stream) -> None:
        for one in [pool.allocate(1024, stream=s), pool.allocate(2048, stream=s)]:
            one.close()

    for _ in range(20):
        pair(a)
    assert gpu.calls["cuEventRecord"] == 0
    pair(b)
    for _ in range(8):
        pair(a)
    assert gpu.calls["cuEventRecord"] >= 1
    gpu.resume(a)


def test_r13_marks_are_rarer_while_nobody_misses_anything_and_as_usual_once_somebody_does(
    gpu: SimDevice, make: MakePool
) -> None:
    pool = make(uses="declared", seal_frees=4)
    lanes = Stream(gpu), Stream(gpu)
    held = [pool.allocate(4096, stream=s) for s in lanes]
    for a in held:
        a.close()
    del held

    def asked(frees: int) -> int:
        before = gpu.calls["cuStreamQuery"]
        for i in range(frees):
            pool.allocate(4096, stream=lanes[i % 2]).close()
        return gpu.calls["cuStreamQuery"] - before

    asked(200)
    assert 2 <= asked(64) <= 6  # each stream every 8 * 4 frees
    pool.allocate(MIB, stream=lanes[0]).close()
    assert asked(5) >= 2


def test_r13_under_pressure_every_drain_seals(gpu: SimDevice, make: MakePool) -> None:
    pool = make(limit=64 * MIB, seal_frees=1000)
    a, b = Stream(gpu), Stream(gpu)
    kept = pool.allocate(56 * MIB, stream=b)
    for s in (a, b):
        pool.allocate(MIB, stream=s).close()
    gpu.hold(a)
    gpu.launch(a)
    before = gpu.calls["cuEventRecord"]
    for _ in range(3):
        pool.allocate(MIB, stream=a).close()
    pool.allocate(MIB, stream=b).close()
    assert gpu.calls["cuEventRecord"] > before
    gpu.resume(a)
    kept.close()


def test_a_free_that_a_hit_has_in_its_hands_for_a_moment_is_left_to_the_next_call(make: MakePool) -> None:
    """A hit that is refused puts back what it took; in between, where 3.11 may collect, the queue may be empty."""
    pool = make()

    class Flickers:
        def __bool__(self) -> bool:
            return True

        def __len__(self) -> int:
            return 1

        def __getitem__(self, at: int) -> object:
            raise IndexError(at)

    before, pool._frees.queue = pool._frees.queue, Flickers()
    with pool._lock:
        assert not pool._frees.drain()
        pool._frees.drain_some(0)
    pool._frees.queue = before
    pool.check()

"""Hits: what was freed last, and what lies in a bin."""

from __future__ import annotations

import signal
from collections import deque
from contextlib import nullcontext
from typing import Any

import pytest

from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.caching import reaper
from allocator.sizes import MIB
from tests.unit.caching.conftest import MakePool

SIZE = 4096


def test_r7_what_was_freed_last_goes_back_to_its_own_stream_at_once(gpu: SimDevice, pool: CachingAllocator) -> None:
    stream = Stream(gpu)
    a = pool.allocate(SIZE, stream=stream)
    ptr, block = a.ptr, a._block
    del a
    before = dict(gpu.calls)
    again = pool.allocate(SIZE - 100, stream=stream)
    assert (again.ptr, again._block) == (ptr, block) and not pool.frees
    assert dict(gpu.calls) == before
    stats = pool.stats()
    assert (stats.allocated_bytes, stats.requested_bytes) == (SIZE, SIZE - 100)
    assert stats.allocations["same_stream"] == 1 and stats.frees["same_stream"] == 1
    pool.check()


def test_a_free_queued_once_more_gives_no_second_owner(gpu: SimDevice, pool: CachingAllocator) -> None:
    """The second of two closes appends late, when the block has gone out again on its own stream."""
    stream = Stream(gpu)
    a = pool.allocate(SIZE, stream=stream)
    entry = (a._block, a._generation, None)
    a.close()
    again = pool.allocate(SIZE, stream=stream)
    assert again._block is entry[0]
    pool.frees.append(entry)
    other = pool.allocate(SIZE, stream=stream)
    assert other.ptr != again.ptr
    pool.check()


def test_r3_a_free_that_names_another_stream_is_not_taken_back(gpu: SimDevice, pool: CachingAllocator) -> None:
    stream, reader = Stream(gpu), Stream(gpu)
    del [pool.allocate(SIZE, stream=stream)][0]
    a = pool.allocate(SIZE, stream=stream)
    gpu.launch(stream, 1000, writes=[a])
    reader.wait_stream(stream)
    gpu.launch(reader, 1000, reads=[a])
    ptr = a.ptr
    a.close(stream=reader)
    b = pool.allocate(SIZE, stream=stream)
    assert b.ptr != ptr
    gpu.launch(stream, 1000, writes=[b])
    gpu.run_until_idle()
    assert gpu.races == []
    pool.check()


PLACES = ["where the newest free lies", "a bin", "its stream's index", "the index of all"]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", ["legacy", "per-thread", "blocking", "non-blocking"])
@pytest.mark.parametrize("size", [2 * MIB, MIB + 3584], ids=["the same size", "less"])
def test_r8_a_stream_of_another_device_gets_nothing(
    gpu: SimDevice, kind: str, size: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number is some other stream's here: streams are counted for each device."""
    monkeypatch.setattr(reaper, "_leaving", deque())  # no pool of other tests is in the way
    other = SimDevice(ordinal=1)

    def make(device: SimDevice) -> Stream:
        if kind == "legacy":
            return Stream.legacy(device)
        return Stream.per_thread(device) if kind == "per-thread" else Stream(device, non_blocking=kind != "blocking")

    mine, theirs = make(gpu), make(other)
    assert mine.line.number == theirs.line.number
    with CachingAllocator(gpu, Config(uses="declared")) as pool:
        a, b = (pool.allocate(2 * MIB, stream=mine) for _ in range(2))
        if where != "the index of all":
            gpu.hold(mine)
        gpu.launch(mine, writes=[a])
        a.close()
        if where != PLACES[0]:
            pool.drain_frees()
        if where in PLACES[2:]:
            pool.allocate(5 * MIB, stream=mine).close()  # all bins are emptied on the way
        for _ in range(2):
            with pytest.raises(ValueError, match="belongs to device"):
                pool.allocate(size, stream=theirs)
            for find in (pool.front.acquire, pool.front.fetch):
                assert find(size, theirs.line, False) is None
        if where != "the index of all":
            gpu.resume(mine)
        b.close()
        pool.check()
    assert gpu.races == []


@pytest.mark.parametrize("reason", ["careful", "a capture", "ended", "nobody's handle"])
def test_what_has_to_be_looked_at_before_is_left_to_the_rest(gpu: SimDevice, make: MakePool, reason: str) -> None:
    """Also where it has come since the front was last told to be careful."""
    pool = make(uses="declared")
    stream, other = Stream(gpu), Stream(gpu)
    pool.allocate(SIZE, stream=stream).close()
    line = stream.timeline
    assert line is not None
    owner = line.owner
    if reason == "careful":
        pool.front.careful = True
    if reason == "a capture":
        gpu.begin_capture(other, "relaxed")
        pool._registry.captures.active[-1] = line  # type: ignore[assignment]  # told of just now, nobody is careful yet
    if reason == "ended":
        line.ended = True
    if reason == "nobody's handle":
        line.owner = None
    for size in (SIZE, SIZE + 512):
        assert pool.front.fetch(size, line, False) is None
    if reason == "a capture":
        del pool._registry.captures.active[-1]
        gpu.end_capture(other)
    pool.front.careful, line.ended, line.owner = False, False, owner
    block = pool.front.fetch(SIZE, line, False)
    assert block is not None
    pool.put_down((block, block.generation, None))
    pool.check()


def test_what_is_over_since_the_first_look_serves_before_the_pool_grows(gpu: SimDevice, make: MakePool) -> None:
    """A bare handle given with the request proves that its stream is idle: between the first look and the second."""
    pool = make(uses="auto")
    with gpu.scope():
        handle = gpu.stream_create(non_blocking=True, priority=0)
    own = Stream(gpu)
    for stream in (own, handle):
        pool.allocate(2 * MIB, stream=stream).close()  # several streams share: large memory goes through the index
    kept = pool.allocate(2 * MIB, stream=handle)
    large = pool.allocate(100 * MIB, stream=handle)
    gpu.launch(handle, writes=[large])
    small = pool.allocate(3 * MIB, stream=handle)
    del small
    also = pool.allocate(3 * MIB + 512, stream=handle)
    del large
    gpu.run_until_idle()
    reserved = pool.reserved_bytes
    again = pool.allocate(100 * MIB, stream=handle, assumed=True)
    assert pool.reserved_bytes == reserved
    for block in (kept, also, again):
        block.close(handle)
    pool.check()


def test_large_blocks_go_to_the_index_once_streams_share(gpu: SimDevice, make: MakePool) -> None:
    """They grow together there, with no bin emptied."""
    pool = make(uses="declared")
    stream, other = Stream(gpu), Stream(gpu)
    for one in (stream, other, stream):
        pool.allocate(32 * MIB, stream=one).close()
    gpu.hold(stream)
    halves = [pool.allocate(16 * MIB, stream=stream) for _ in range(2)]
    gpu.launch(stream, writes=halves)
    ptr = min(half.ptr for half in halves)
    for half in halves:
        half.close()
    pool.drain_frees()
    block = pool.front.fetch(32 * MIB, stream.line, False)
    assert block is not None and block.ptr == ptr, "the halves have grown together"
    pool.put_down((block, block.generation, None))
    gpu.resume(stream)
    gpu.run_until_idle()
    assert gpu.races == []
    pool.check()


@pytest.mark.parametrize(
    "since", ["nothing", "another section", "a free put down", "an answer", "a wait", "other bytes", "another stream"]
)
def test_a_miss_is_looked_for_once_unless_something_has_changed(
    gpu: SimDevice, make: MakePool, since: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "_leaving", deque())  # no pool of other tests is in the way
    pool = make(uses="declared")
    stream, other = Stream(gpu), Stream(gpu)
    for one in (stream, other):
        pool.allocate(SIZE, stream=one).close()
    held = pool.allocate(SIZE, stream=stream)
    gpu.hold(stream)
    gpu.launch(stream, writes=[held])
    line, size = other.line, 8 * MIB
    pool.drain_frees()
    assert pool.front.in_vain(size, line, False) is None, "nobody has looked"
    assert pool.front.fetch(size, line, False) is None
    if since == "another section":
        pool.drain_frees()
    if since == "a free put down":
        held.close()
        pool.allocate(SIZE, stream=other).close()
    if since == "an answer":
        pool._sealing.query(line)
    if since == "a wait":
        other.wait_stream(stream)
    if since == "other bytes":
        size += 512
    if since == "another stream":
        line = stream.line
    vain = pool.front.in_vain(size, line, False)
    assert (vain is not None) == (since == "nothing")
    assert pool.front.in_vain(size, line, True) is None, "of declared uses"
    with pool._lock:
        assert pool.front.unchanged(vain, size, line, False) == (since == "nothing")
    with pool._lock:
        assert not pool.front.unchanged(vain, size, line, False), "a section more"
    held.close()
    gpu.resume(stream)
    again = pool.allocate(8 * MIB, stream=other)
    gpu.launch(other, writes=[again])
    gpu.run_until_idle()
    assert gpu.races == []
    pool.check()


@pytest.mark.parametrize("uses", ["declared", "assumed"])
def test_what_becomes_free_in_the_middle_of_a_miss_serves_before_the_pool_grows(
    gpu: SimDevice, make: MakePool, uses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look that failed and the ladder another thread frees, and finds out that the work is over."""
    pool = make(uses=uses)
    stream, other = Stream(gpu), Stream(gpu)
    held = pool.allocate(8 * MIB, stream=stream)
    for one in (stream, other):
        pool.allocate(MIB, stream=one).close()
    pool.drain_frees()
    climb = pool._climb

    def later(request: Any) -> Any:
        held.close()
        pool.settle()
        return climb(request)

    monkeypatch.setattr(pool, "_climb", later)
    growths = pool.stats().growths
    again = pool.allocate(8 * MIB, stream=other)
    assert pool.stats().growths == growths
    again.close()
    pool.check()


def test_r9_much_memory_freed_on_a_bare_handle_is_marked_when_the_handle_is_next_given(
    gpu: SimDevice, make: MakePool
) -> None:
    pool = make(limit=140 * MIB, context_events=False, uses="declared")
    with gpu.scope():
        handle = gpu.stream_create(non_blocking=True, priority=0)
    large = pool.allocate(100 * MIB, stream=handle)
    held = [pool.allocate(20 * MIB, stream=handle)]
    gpu.launch(handle, writes=[large])
    small = pool.allocate(3 * MIB, stream=handle)
    del small
    held.append(pool.allocate(MIB, stream=handle))  # marked here
    del large
    gpu.run_until_idle()
    held += [pool.allocate(2 * MIB + 512 * n, stream=handle) for n in range(5)]
    gpu.run_until_idle()
    held.append(pool.allocate(60 * MIB, stream=Stream(gpu)))
    assert pool.stats().out_of_memory == 0
    for block in held:
        block.close()
    pool.check()


def test_checked_mode_buys_no_page_where_what_there_is_would_do(gpu: SimDevice, make: MakePool) -> None:
    """Nothing is at hand there before it has been filled: the look comes first all the same."""
    pool = make(canary=True)
    streams = [Stream(gpu) for _ in range(2)]
    for n in range(100):
        held = [pool.allocate(512 * (1 + (7 * n + k) % 40), stream=streams[n % 2]) for k in range(8)]
        gpu.launch(streams[n % 2], writes=held)
        for block in held:
            block.close()
        del held
        gpu.run_until_idle()
    assert pool.reserved_bytes == 2 * MIB and pool._accounts.steps["apart"] == 0
    pool.check()


@pytest.mark.parametrize("misses", [0, 1, 2, 4, 16, 64, 200])
def test_memory_of_a_closed_pool_that_is_over_by_now_serves_before_anything_fails(misses: int) -> None:
    """However lately that pool was looked at in vain."""
    gpu = SimDevice(memory=128 * MIB)
    gone, pool = (CachingAllocator(gpu, Config(uses="declared", wait_on_demand=False)) for _ in range(2))
    first, second = Stream(gpu), Stream(gpu)
    block = gone.allocate(100 * MIB, stream=first)
    gpu.hold(first)
    gpu.launch(first, writes=[block])
    block.close()
    gone.close()
    for n in range(misses):
        pool.allocate(512 * (1 + n), stream=second).close()
    gpu.resume(first)
    gpu.run_until_idle()
    pool.allocate(100 * MIB, stream=second).close()
    assert pool.stats().out_of_memory == 0
    pool.check()
    pool.close()


def test_a_bare_handle_given_with_a_request_that_grows_is_asked_once(gpu: SimDevice, make: MakePool) -> None:
    pool = make(uses="auto")
    with gpu.scope():
        handle = gpu.stream_create(non_blocking=True, priority=0)
    pool.allocate(512, stream=Stream(gpu)).close()
    kept = []
    gpu.hold(handle)
    for _ in range(3):
        block = pool.allocate(4 * MIB, stream=handle)
        gpu.launch(handle, writes=[block])
        del block
        before = dict(gpu.calls)
        kept.append(pool.allocate(8 * MIB, stream=handle))
        asked, marked = (gpu.calls[call] - before.get(call, 0) for call in ("cuStreamQuery", "cuEventRecord"))
        assert asked <= 2 and marked <= 2, "once for this, and once when the streams that share are marked"
        gpu.launch(handle, writes=[kept[-1]])
    gpu.resume(handle)
    for block in kept:
        block.close(handle)
    pool.check()


@pytest.mark.parametrize("raises", [False, True], ids=["a handler of its own", "KeyboardInterrupt"])
def test_s16_a_signal_in_the_middle_of_a_miss_is_handled_when_the_lock_has_been_given_back(
    gpu: SimDevice, pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    """The handler is the program's, and may wait for a thread that allocates."""
    stream = Stream(gpu)
    pool.allocate(4 * SIZE, stream=stream).close()
    inside: list[bool] = []
    look = pool.front._at_hand

    def interrupted(*request: Any) -> Any:
        block = look(*request)
        if not inside:
            signal.raise_signal(signal.SIGINT)
        return block

    def handler(number: int, frame: object) -> None:
        inside.append(pool._lock.held_here())  # type: ignore[attr-defined]  # the lock that pools have
        pool.allocate(SIZE, stream=stream).close()
        if raises:
            raise KeyboardInterrupt

    monkeypatch.setattr(pool.front, "_at_hand", interrupted)
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt) if raises else nullcontext():
            pool.allocate(SIZE, stream=stream).close()
    finally:
        signal.signal(signal.SIGINT, before)
    assert inside and not any(inside)
    pool.check()
    assert pool.stats().allocated_bytes == 0

"""The free queue: a deque to everybody, with a place in front of it from which the hot path serves."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from allocator import Allocation, CachingAllocator, Config, SimDevice, Stream
from allocator.blocks import Block
from allocator.caching.lane import Lane
from tests.unit.caching.conftest import MIB, MakePool

SIZE = 4096


def entry(n: int, named: object = None) -> tuple[Block, int, object]:
    return (Block(512 * n, 512, 0), n, named)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_deque(seed: int) -> None:
    draw, lane, naive = random.Random(seed), Lane(), deque[Any]()
    for n in range(300):
        match draw.randrange(6):
            case 0 | 1:
                added = entry(n, named=draw.choice([None, None, "a stream"]))
                lane.append(added)
                naive.append(added)
            case 2:
                added = entry(n)
                lane.put(added[0], n)
                naive.append(added)
            case 3 if naive:
                assert lane[0] == naive[0]
            case 4 if naive:
                assert lane.popleft() == naive.popleft()
            case 5 if n % 50 == 0:
                more = [entry(n), entry(n, "a stream")]
                lane.extend(more)
                naive.extend(more)
            case 5 if n % 51 == 0:
                lane.clear()
                naive.clear()
        assert len(lane) == len(naive) and bool(lane) == bool(naive)
    assert [lane.popleft() for _ in range(len(lane))] == list(naive)
    with pytest.raises(IndexError):
        lane.popleft()
    with pytest.raises(IndexError):
        lane[0]


def test_what_is_queued_while_the_place_is_emptied_is_kept() -> None:
    """Making a tuple may start a collection; its finaliser gives memory back, or another thread does."""

    class Meanwhile(deque[Any]):
        then: Callable[[], None] | None = None

        def append(self, item: Any, /) -> None:
            then, self.then = self.then, None
            if then is not None:
                then()
            super().append(item)

    lane = Lane()
    lane.rest = rest = Meanwhile()
    first, second, third = entry(1), entry(2), entry(3)
    lane.append(first)
    rest.then = lambda: lane.put(second[0], 2)
    assert lane[0] == first, "which is moved to the deque for that"
    rest.then = lambda: lane.put(third[0], 3)
    lane.put(*entry(4)[:2])
    assert len(lane) == 4 and {lane.popleft()[1] for _ in range(4)} == {1, 2, 3, 4} and not lane  # type: ignore[index]


@pytest.fixture(params=["declared", "assumed", "auto"])
def pool(make: MakePool, request: pytest.FixtureRequest) -> CachingAllocator:
    pool = make(uses=request.param)
    assert isinstance(pool.frees, Lane)
    return pool


def steps(pool: CachingAllocator) -> int:
    """Allocations that were no hits."""
    return sum(pool._accounts.steps.values())


def test_what_was_freed_last_goes_out_again_without_a_tuple(gpu: SimDevice, pool: CachingAllocator) -> None:
    stream = Stream(gpu)
    a = pool.allocate(SIZE, stream=stream)
    ptr, block = a.ptr, a._block
    a.close()
    assert pool.frees.block is block and len(pool.frees) == 1
    before = steps(pool)
    again = pool.allocate(SIZE - 100, stream=stream)
    assert (again.ptr, again._block) == (ptr, block) and not pool.frees and steps(pool) == before
    stats = pool.stats()
    assert (stats.allocated_bytes, stats.requested_bytes) == (SIZE, SIZE - 100)
    assert stats.allocations["same_stream"] == 1 and stats.frees["same_stream"] == 1


@pytest.mark.parametrize("other", ["stream", "size", "uses", "generation", "more", "several"])
def test_it_goes_to_nobody_else(gpu: SimDevice, pool: CachingAllocator, other: str) -> None:
    stream, second = Stream(gpu), Stream(gpu)
    warm = [pool.allocate(size, stream=s) for s in (stream, second) for size in (SIZE, 2 * SIZE)]
    warm.clear()
    a, b = pool.allocate(SIZE, stream=stream), pool.allocate(SIZE, stream=stream)
    gpu.launch(stream, 1000, writes=[a])
    mine, held = a._block, (a._block, a._generation, None)
    if other == "several":
        a.record_stream(second)
    a.close()
    if other == "generation":
        again = pool.allocate(SIZE, stream=stream)
        assert again._block is mine
        pool.frees.append(held)  # the second of two closes, a moment too late
        assert pool.allocate(SIZE, stream=stream)._block is not mine
        again.close()
    elif other == "more":
        b.close()
        taken = [pool.allocate(SIZE, stream=stream) for _ in range(3)]
        assert len({t.ptr for t in taken}) == 3
        taken.clear()
    else:
        size = 2 * SIZE if other == "size" else SIZE
        before = steps(pool)
        got = pool.allocate(size, stream=second if other == "stream" else stream, assumed=other == "uses")
        if other == "uses" and pool.config.uses == "auto":
            assert steps(pool) == before + 1, "not as a hit: who may use it is another question"
        elif other != "uses":
            assert got._block is not mine
        gpu.launch(second if other == "stream" else stream, 1000, writes=[got])
    gpu.run_until_idle()
    assert gpu.races == []


def test_what_waits_behind_it_is_not_left_there(gpu: SimDevice, pool: CachingAllocator) -> None:
    """One stream that frees and allocates for ever, and what others have freed meanwhile."""
    stream, second = Stream(gpu), Stream(gpu)
    a, b = pool.allocate(SIZE, stream=stream), pool.allocate(SIZE, stream=second)
    a.close()
    b.close()
    assert len(pool.frees) == 2
    pool.allocate(SIZE, stream=stream)
    assert len(pool.frees) == 1, "the new one's own free"


@pytest.mark.parametrize("where", ["where the newest free lies", "a bin", "behind it", "an index"])
def test_a_stream_that_has_ended_gets_nothing_from_it(gpu: SimDevice, pool: CachingAllocator, where: str) -> None:
    """Its memory is everybody's once its work is over; that is not for the hot path."""
    stream = Stream(gpu)
    assumed = pool.config.uses == "assumed"
    held = [pool.allocate(SIZE, stream=stream) for _ in range(3)]
    line = stream.timeline
    assert line is not None
    held.pop().close()
    if where != "where the newest free lies":
        pool.drain_frees()
    if where == "behind it":
        held.pop().close()
        held.pop().close()
    if where == "an index":
        with pool._lock:
            pool._shelves.flush()
    line.ended = True
    for find in (pool.front.acquire, pool.front.fetch):
        assert find(SIZE, line, assumed) is None
    line.ended = False
    block = pool.front.fetch(SIZE, line, assumed)
    assert block is not None
    pool.put_down((block, block.generation, None))
    pool.check()


REASONS = (
    "nothing", "more", "doubtful", "bounded", "several", "empty bin", "ended", "stale", "second", "due", "bytes",
    "busy",
)  # fmt: skip


@pytest.mark.parametrize("reason", ["none", *REASONS])
def test_one_free_is_put_down_at_once_where_that_is_all_there_is_to_do(
    gpu: SimDevice, pool: CachingAllocator, reason: str
) -> None:
    own, second = Stream(gpu), Stream(gpu)
    line = own.timeline
    assert line is not None
    put_down, drain = pool._frees.put_down_last, pool.drain_frees
    a, b, c = (pool.allocate(SIZE, stream=stream) for stream in (own, own, second))
    a.close()
    drain()  # the bin is noted, and the stamp made
    if reason != "second":
        c.close()
        drain()  # and there is more than one stream
    mine = b._block
    if reason == "several":
        b.record_stream(second)
    if reason != "nothing":
        b.close()
    match reason:
        case "more":
            pool.frees.append((mine, -1, None))
        case "doubtful":
            pool._frees.limbo.append(b)
        case "bounded":
            pool.set_limit(1 << 30)
        case "empty bin":
            pool._shelves.flush()
        case "ended":
            line.ended = True
        case "stale":
            pool.frees.generation -= 1
        case "second":
            drain()
            c.close()
        case "due":
            pool._frees._frees_due = 0
        case "bytes":
            pool._accounts.bytes_due = 0
    waiting, free = len(pool.frees), len(mine.bin.blocks) if mine.bin is not None else 0
    assert not pool._lock.held_here()  # type: ignore[attr-defined]
    pool._frees.inside.busy = int(reason == "busy")
    assert put_down() == (reason == "none")
    line.ended = False
    if reason == "none":
        assert not pool.frees and mine.bin is not None and mine.bin.blocks[-1] is mine and mine.stamp.at
    else:
        assert len(pool.frees) == waiting and (mine.bin is None or len(mine.bin.blocks) == free)
    pool._frees.limbo.clear()


@pytest.mark.parametrize("change", ["none", "stream", "context"])
def test_a_stamp_that_is_made_is_the_one_that_a_free_gets(gpu: SimDevice, pool: CachingAllocator, change: str) -> None:
    stream, order = Stream(gpu), pool._registry.order
    line = stream.timeline
    assert line is not None
    held = [pool.allocate(SIZE, stream=stream, assumed=True) for _ in range(3)]
    held.pop().close()
    pool.drain_frees()
    assumed = pool.config.uses != "declared"
    before = order.stamp(line, assumed)
    mine = held[-1]._block
    held.pop().close()
    match change:
        case "stream":
            line.close()
        case "context":
            pool._registry.context.close_seqno()
    made = change == "none" or not assumed
    pool._frees.inside.busy = 0
    assert pool._frees.put_down_last() == made
    if made:
        assert mine.stamp is order.stamp(line, assumed)
        assert (mine.stamp is before) == (change != "stream")


def test_a_free_whose_stamp_is_out_of_date_is_drained(gpu: SimDevice, make: MakePool, pool: CachingAllocator) -> None:
    stream, second = Stream(gpu), Stream(gpu)
    held = [pool.allocate(SIZE, stream=s, assumed=True) for s in (stream, stream, second)]
    held.pop().close()
    held.pop().close()
    pool.drain_frees()
    held.pop().close()
    pool._registry.context.close_seqno()
    pool._frees.inside.busy = 0
    assert pool._frees.put_down_last() == (pool.config.uses == "declared")
    pool.drain_frees()
    assert not pool.frees


def test_a_bin_that_has_gone_serves_nobody(gpu: SimDevice, pool: CachingAllocator) -> None:
    """Its hits would count for nothing."""
    stream = Stream(gpu)
    a = pool.allocate(SIZE, stream=stream)
    a.close()
    for bins in pool._shelves.bins:
        for sizes in bins.values():
            for bin_ in list(sizes.by_size.values()):
                sizes.close(bin_.size)
                pool._shelves._gone(bin_)
    b = pool.allocate(SIZE, stream=stream)
    assert pool.stats().blocks["live"] == 1
    b.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(gpu: SimDevice, pool: CachingAllocator, seed: int) -> None:
    draw = random.Random(seed)
    streams = [Stream(gpu) for _ in range(3)]
    live: list[Allocation] = []
    for n in range(400):
        stream = draw.choice(streams)
        if live and draw.random() < 0.55:
            mine = live.pop(draw.choice([-1, -1, draw.randrange(len(live))]))
            if draw.random() < 0.2:
                user = draw.choice(streams)
                user.wait_stream(mine.stream)
                gpu.launch(user, 500, reads=[mine])
                mine.close(stream=user)
            else:
                mine.close()
        else:
            mine = pool.allocate(draw.choice((512, SIZE, SIZE, 300_000)), stream=stream, assumed=draw.random() < 0.5)
            gpu.launch(stream, 1000, writes=[mine])
            live.append(mine)
        if draw.random() < 0.5:
            pool._frees.inside.busy = 0
            put_down = pool._frees.put_down_last()
            assert not put_down or not pool.frees
        if n % 7 == 0:
            gpu.advance(draw.randrange(2000))
            pool.check()
    live.clear()
    del mine
    gpu.run_until_idle()
    assert gpu.races == []
    assert pool.stats().blocks["live"] == 0


def test_memory_of_a_pool_that_has_gone_comes_back(gpu: SimDevice) -> None:
    pool = CachingAllocator(gpu, config=Config())
    held = pool.allocate(MIB, stream=Stream(gpu))
    pool.close()
    held.close()
    del held, pool
    gc.collect()
    CachingAllocator(gpu).allocate(512).close()
    assert gpu.used_bytes <= 2 * MIB


@pytest.fixture(autouse=True)
def _judged(gpu: SimDevice) -> Iterator[None]:
    yield
    assert gpu.races == []

"""S03, S04, S05: which stream is that, and what becomes of the memory of streams that go."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from allocator import CachingAllocator, SimDevice, Stream
from allocator.devices import PER_THREAD
from tests.scenarios.lab import MIB, Lab, in_thread, overlap, read, span, used, write


class Foreign:
    """Another library's stream: owns its handle, and destroys it when it goes."""

    def __init__(self, gpu: SimDevice, *, non_blocking: bool = True) -> None:
        self._gpu = gpu
        with gpu.scope():
            self.ptr = gpu.stream_create(non_blocking=non_blocking, priority=0)

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.ptr)

    def __eq__(self, other: object) -> bool:  # as CuPy's: by handle, which is recycled
        return isinstance(other, Foreign) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return hash(self.ptr)

    def __del__(self) -> None:
        with self._gpu.scope():
            self._gpu.stream_destroy(self.ptr)


Foreign.__module__, Foreign.__name__ = "cupy.cuda.stream", "Stream"  # known to destroy its stream when it goes


# -- S03: a handle number comes again --------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "del"])
@pytest.mark.parametrize("non_blocking", [True, False])
def test_s03_a_new_stream_under_an_old_handle_is_another_stream(
    gpu: SimDevice, pool: CachingAllocator, how: str, non_blocking: bool
) -> None:
    old = Stream(gpu, non_blocking=non_blocking)
    handle, ident = old.handle, old.id
    gpu.hold(old)
    block = used(pool, old, MIB)
    where = span(block)
    block.close()
    if how == "close":
        old.close()
    del old, block  # an allocation holds its stream, also once it is closed
    new = Stream(gpu, non_blocking=non_blocking)
    if new.handle != handle:  # the stream's end is seen to by the next who makes one
        new = Stream(gpu, non_blocking=non_blocking)
    assert new.handle == handle and new.id != ident
    with pool.allocate(MIB, stream=new) as other:
        assert not overlap(other, where)
        write(gpu, new, other)
    gpu.resume(handle)
    gpu.run_until_idle()
    new.synchronize()
    growths = pool.stats().growths
    held = [pool.allocate(MIB, stream=new) for _ in range(2)]
    assert any(overlap(a, where) for a in held)  # not lost
    write(gpu, new, *held)
    assert pool.stats().growths == growths


def test_s03_a_foreign_stream_that_only_the_pool_still_holds_ends(gpu: SimDevice, pool: CachingAllocator) -> None:
    stream = Foreign(gpu)
    handle = stream.ptr
    block = pool.allocate(MIB, stream=stream)
    gpu.launch(stream, duration_ns=1000, writes=[block])
    where = span(block)
    del stream  # the block still names it: its handle stays alive
    assert gpu.calls["cuStreamDestroy"] == 0
    block.close()
    pool.stats()
    gpu.run_until_idle()
    pool.stats()
    assert gpu.calls["cuStreamDestroy"] == 1
    new = Foreign(gpu)
    assert new.ptr == handle
    got = pool.allocate(MIB, stream=new)
    assert overlap(got, where)
    gpu.launch(new, writes=[got])
    assert pool.stats().reserved_bytes == 2 * MIB


def test_s03_a_foreign_stream_is_not_taken_for_another_that_compares_equal(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    old = Foreign(gpu)
    gpu.hold(old.ptr)
    block = pool.allocate(MIB, stream=old)
    gpu.launch(old, writes=[block])
    where, handle = span(block), old.ptr
    block.close()
    pool.stats()  # the stamp is sealed, or the owner is held until it is
    del old
    pool.stats()
    new = Foreign(gpu)
    with pool.allocate(MIB, stream=new) as other:
        assert not overlap(other, where)
        gpu.launch(new, writes=[other])
    gpu.resume(handle)


def test_s03_a_bare_handle_that_comes_again_is_another_stream(gpu: SimDevice, pool: CachingAllocator) -> None:
    with gpu.scope():
        old = gpu.stream_create(non_blocking=True, priority=0)
    gpu.hold(old)
    block = pool.allocate(MIB, stream=old)
    gpu.launch(old, writes=[block])
    where = span(block)
    block.close(old)  # the handle is alive up to here, and sealed in here
    with gpu.scope():
        gpu.stream_destroy(old)
        new = gpu.stream_create(non_blocking=True, priority=0)
    assert new == old
    other = pool.allocate(MIB, stream=new)
    assert not overlap(other, where)
    gpu.launch(new, writes=[other])
    gpu.resume(old)
    gpu.run_until_idle()
    third = pool.allocate(MIB, stream=new)
    assert overlap(third, where)  # not lost
    gpu.launch(new, writes=[third])
    for a in (other, third):
        a.close(new)


def test_s03_a_bare_handle_is_sealed_when_it_is_given_again(gpu: SimDevice, pool: CachingAllocator) -> None:
    """The free named no stream and the caller kept the handle: nothing is lost (R9)."""
    with gpu.scope():
        handle = gpu.stream_create(non_blocking=True, priority=0)
    for _ in range(3):
        block = pool.allocate(MIB, stream=handle)
        gpu.launch(handle, writes=[block])
        del block
    pool.allocate(MIB, stream=handle).close(handle)
    gpu.run_until_idle()
    assert pool.stats().reserved_bytes == 2 * MIB
    other = Stream(gpu)
    got = pool.allocate(MIB, stream=other)
    write(gpu, other, got)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_s03_no_block_of_a_bare_handle_is_lost_for_good(
    gpu: SimDevice, pool: CachingAllocator, non_blocking: bool
) -> None:
    """Freed without naming a stream, and the handle destroyed after that, as the scenario allows."""
    with gpu.scope():
        handle = gpu.stream_create(non_blocking=non_blocking, priority=0)
    block = pool.allocate(MIB, stream=handle)
    gpu.launch(handle, writes=[block])
    block.close()
    with gpu.scope():
        gpu.stream_destroy(handle)
    gpu.run_until_idle()
    pool.settle()
    assert pool.stats().in_flight_bytes == 0


# -- S04: the special streams ----------------------------------------------------------------------


def test_s04_two_threads_per_thread_streams_share_a_handle_and_nothing_else(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    mine = Stream.per_thread(gpu)
    block = used(pool, mine, MIB)
    where = span(block)
    gpu.hold(PER_THREAD)
    write(gpu, PER_THREAD, block)
    block.close()

    def other_thread() -> None:
        theirs = Stream.per_thread(gpu)
        assert theirs.handle == mine.handle
        with pool.allocate(MIB, stream=PER_THREAD) as got:
            assert not overlap(got, where)
            write(gpu, PER_THREAD, got)

    in_thread(other_thread)
    gpu.resume(PER_THREAD)
    gpu.run_until_idle()
    assert mine.query()


def test_s04_null_and_legacy_are_one_stream(gpu: SimDevice, pool: CachingAllocator) -> None:
    block = pool.allocate(MIB, stream=0)
    gpu.hold(0)
    gpu.launch(0, writes=[block])
    where = span(block)
    block.close()
    for name in (1, Stream.legacy(gpu), None, 0):
        with pool.allocate(MIB, stream=name) as again:
            assert span(again) == where
            gpu.launch(1, writes=[again])
    assert pool.stats().allocations["same_stream"] == 4


def test_s04_a_special_handle_on_two_devices_is_two_streams(lab: Lab) -> None:
    first, second = lab.gpu(ordinal=0), lab.gpu(ordinal=1)
    pools = lab.pool(first), lab.pool(second)
    for handle in (0, 1, PER_THREAD):
        gpus = (first, second)
        first.hold(handle)
        blocks = [pool.allocate(MIB, stream=handle) for pool in pools]
        for gpu, block in zip(gpus, blocks, strict=True):
            gpu.launch(handle, writes=[block])
            block.close()
        second.run_until_idle()
        assert pools[1].stats().in_flight_bytes == 0
        assert pools[0].stats().in_flight_bytes >= MIB  # that of the other device says nothing
        first.resume(handle)
        first.run_until_idle()
        assert pools[0].stats().in_flight_bytes == 0


def test_s04_a_free_in_another_thread_is_not_over_because_that_threads_stream_is(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    block = pool.allocate(MIB, stream=PER_THREAD)
    gpu.hold(PER_THREAD)
    gpu.launch(PER_THREAD, writes=[block])
    where = span(block)

    def other_thread() -> None:
        theirs = Stream.per_thread(gpu)
        pool.allocate(MIB, stream=theirs).close()
        block.close()
        assert theirs.query()
        theirs.synchronize()
        assert pool.stats().in_flight_bytes >= MIB
        assert pool.trim() <= 2 * MIB
        with pool.allocate(MIB, stream=theirs) as got:
            assert not overlap(got, where)
            write(gpu, PER_THREAD, got)

    in_thread(other_thread)
    gpu.resume(PER_THREAD)
    gpu.run_until_idle()
    assert Stream.per_thread(gpu).query()
    assert pool.stats().in_flight_bytes == 0


def test_s04_the_block_of_an_ended_threads_stream_is_not_lost(gpu: SimDevice, pool: CachingAllocator) -> None:
    left: list[object] = []

    def other_thread() -> None:
        block = pool.allocate(MIB, stream=PER_THREAD)
        gpu.launch(PER_THREAD, duration_ns=1000, writes=[block])
        left.append(block)

    for _ in range(20):
        in_thread(other_thread)
        left.clear()
        gpu.run_until_idle()
    assert pool.stats().reserved_bytes <= 4 * MIB
    assert pool.stats().in_flight_bytes == 0
    assert pool.stats().streams <= 2


# -- S05: streams come and go ----------------------------------------------------------------------

STREAMS = 1000


def _ours(gpu: SimDevice) -> Stream:
    return Stream(gpu)


def _ours_blocking(gpu: SimDevice) -> Stream:
    return Stream(gpu, non_blocking=False)


@pytest.mark.parametrize("make", [_ours, _ours_blocking, Foreign])
def test_s05_reserved_levels_off_however_many_streams_come_and_go(
    gpu: SimDevice, pool: CachingAllocator, make: Callable[[SimDevice], Stream | Foreign]
) -> None:
    for i in range(STREAMS):
        stream = make(gpu)
        block = pool.allocate(4 * MIB, stream=stream)
        gpu.launch(stream, duration_ns=10_000, writes=[block])
        del block, stream
        if i % 2:
            gpu.advance(20_000)
    stats = pool.stats()
    assert stats.peak_allocated_bytes == 4 * MIB
    assert stats.peak_reserved_bytes <= 4 * 4 * MIB  # the peak of live bytes, and what has not finished yet
    assert stats.streams <= 20
    assert stats.events["idle"] + stats.events["in_use"] <= 20
    assert gpu.calls["cuStreamDestroy"] >= STREAMS - 20


def test_s05_many_streams_at_once_take_turns_with_the_same_memory(gpu: SimDevice, pool: CachingAllocator) -> None:
    streams = [Stream(gpu) for _ in range(STREAMS)]
    for _ in range(2):
        for stream in streams:
            block = pool.allocate(4 * MIB, stream=stream)
            write(gpu, stream, block, duration_ns=1000)
            block.close()
            gpu.advance(2000)
    assert pool.stats().reserved_bytes <= 16 * MIB


def test_s05_finished_memory_of_one_stream_serves_another_before_the_driver_is_asked(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    a, b = Stream(gpu), Stream(gpu)
    block = used(pool, a, 4 * MIB)
    where = span(block)
    block.close()
    gpu.run_until_idle()
    again = pool.allocate(4 * MIB, stream=b)
    write(gpu, b, again)
    assert span(again) == where
    stats = pool.stats()
    assert (stats.growths, stats.allocations["opportunistic"]) == (1, 1)


def test_s05_threads_that_come_and_go_leave_nothing_behind(gpu: SimDevice, pool: CachingAllocator) -> None:
    stop = threading.Event()

    def body() -> None:
        stream = Stream(gpu)
        for _ in range(5):
            write(gpu, stream, pool.allocate(MIB, stream=stream))
        stop.wait(0)

    for _ in range(100):
        in_thread(body)
        gpu.advance(10_000)
    assert pool.stats().reserved_bytes <= 16 * MIB
    assert pool.stats().streams <= 20


def test_s05_a_stream_that_is_read_from_is_no_use_of_its_own(gpu: SimDevice, pool: CachingAllocator) -> None:
    """Looking at a stream, waiting for it or making it current keeps no memory from anyone."""
    a, b = Stream(gpu), Stream(gpu)
    gpu.hold(b)
    block = used(pool, a, MIB)
    a.wait_event(a.record_event())
    read(gpu, a, block)
    block.close()
    gpu.run_until_idle()
    got = pool.allocate(MIB, stream=Stream(gpu))
    write(gpu, got.stream, got)
    assert pool.stats().growths == 1


# -- a living stream whose objects come and go, as PyTorch's do ------------------------------------


class Wrapper:
    """A new object for the same stream at every question; it destroys nothing."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


@pytest.fixture
def kept_for_ever(gpu: SimDevice) -> int:
    with gpu.scope():
        return gpu.stream_create(non_blocking=True, priority=0)


def test_s03_a_stream_lives_on_although_each_object_for_it_goes(
    gpu: SimDevice, pool: CachingAllocator, kept_for_ever: int
) -> None:
    other = Stream(gpu)
    for _ in range(40):
        x = pool.allocate(MIB, stream=Wrapper(kept_for_ever))
        gpu.launch(kept_for_ever, duration_ns=1000, writes=[x])
        del x
        pool.stats()  # looks for streams whose objects have gone
        y = pool.allocate(MIB, stream=other)
        gpu.launch(other, duration_ns=300, writes=[y])
        y.close()
        gpu.advance(200)
    gpu.run_until_idle()
    assert pool.stats().in_flight_bytes == 0


def test_r9_a_live_allocation_holds_the_object_of_its_stream(
    gpu: SimDevice, pool: CachingAllocator, kept_for_ever: int
) -> None:
    """Were the stream taken for ended while the block lives, its later work would not be in the stamp."""
    x = pool.allocate(MIB, stream=Wrapper(kept_for_ever))
    gpu.launch(kept_for_ever, duration_ns=10, writes=[x])
    gpu.run_until_idle()
    pool.stats()
    gpu.launch(kept_for_ever, duration_ns=1000, writes=[x])
    where = span(x)
    x.close()
    pool.stats()
    other = Stream(gpu)
    y = pool.allocate(MIB, stream=other)
    assert not overlap(y, where)
    gpu.launch(other, writes=[y])


def test_r9_a_live_allocation_holds_the_objects_of_the_streams_that_use_it(
    gpu: SimDevice, pool: CachingAllocator, kept_for_ever: int
) -> None:
    owner, other = Stream(gpu), Stream(gpu)
    x = pool.allocate(MIB, stream=owner)
    gpu.launch(owner, duration_ns=10, writes=[x])
    x.record_stream(Wrapper(kept_for_ever))
    gpu.run_until_idle()
    pool.stats()
    gpu.launch(kept_for_ever, duration_ns=1000, reads=[x])
    where = span(x)
    x.close()
    pool.stats()
    y = pool.allocate(MIB, stream=other)
    assert not overlap(y, where)
    gpu.launch(other, writes=[y])


def test_r9_a_stream_shown_through_a_new_object_is_not_ended_inside_that_very_call(
    gpu: SimDevice, lab: Lab, kept_for_ever: int
) -> None:
    pool = lab.pool(gpu, uses="declared")
    other = Stream(gpu)
    a = pool.allocate(2 * MIB, stream=Wrapper(kept_for_ever))
    a.close()
    del a
    pool.allocate(30 * MIB, stream=other).close()  # grows, and looks for objects that have gone
    again = Wrapper(kept_for_ever)
    b = pool.allocate(64 * MIB, stream=again)  # climbs the ladder: the stream must not end on the way
    gpu.launch(kept_for_ever, duration_ns=1_000_000, writes=[b])
    where = span(b)
    b.close()
    c = pool.allocate(64 * MIB, stream=other)
    assert not overlap(c, where)
    gpu.launch(other, writes=[c])


@pytest.mark.parametrize("how", ["allocated", "declared"])
def test_r9_an_object_that_comes_and_goes_does_not_end_a_stream_known_by_its_handle(
    gpu: SimDevice, lab: Lab, kept_for_ever: int, how: str
) -> None:
    pool = lab.pool(gpu, uses="declared", context_events=True)
    mine, other = Stream(gpu), Stream(gpu)
    a = pool.allocate(2 * MIB, stream=kept_for_ever if how == "allocated" else mine)
    if how == "declared":
        a.record_stream(kept_for_ever)
    b = pool.allocate(2 * MIB, stream=Wrapper(kept_for_ever))
    b.close()
    del b
    pool.stats()
    gpu.launch(kept_for_ever, duration_ns=1_000_000, writes=[a])
    where = span(a)
    a.close()
    pool.stats()
    got = [pool.allocate(2 * MIB, stream=other) for _ in range(2)]
    assert not any(overlap(c, where) for c in got)
    gpu.launch(other, writes=got)


def test_r3_a_stream_whose_object_has_gone_still_is_an_assumed_user(
    gpu: SimDevice, lab: Lab, kept_for_ever: int
) -> None:
    pool = lab.pool(gpu, uses="assumed", context_events=True)
    a, b = Stream(gpu), Stream(gpu)
    first = pool.allocate(4 * MIB, stream=Wrapper(kept_for_ever))
    first.close()
    del first
    pool.stats()
    x = pool.allocate(2 * MIB, stream=a)
    gpu.launch(a, writes=[x])
    a.synchronize()
    gpu.launch(kept_for_ever, duration_ns=1_000_000, reads=[x])
    where = span(x)
    x.close()
    pool.stats()
    got = [pool.allocate(2 * MIB, stream=b) for _ in range(3)]
    assert not any(overlap(c, where) for c in got)
    gpu.launch(b, writes=got)

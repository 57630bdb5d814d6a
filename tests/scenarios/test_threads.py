"""S15, S16, S20 to S23: threads, hooks, lifetimes, forks, two devices."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import allocator
from allocator import (
    Allocation,
    AllocatorError,
    CachingAllocator,
    Config,
    ForkError,
    OutOfMemoryError,
    SimDevice,
    Stream,
)
from allocator.devices.sim.world import WORLD
from tests.scenarios.lab import KIB, MIB, Lab, identity, in_thread, overlap, span, used, write

# -- S15: threads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backing", ["vmm", "malloc"])
@pytest.mark.parametrize("uses", ["declared", "assumed"])
def test_s15_threads_allocate_while_others_trim_and_read(lab: Lab, backing: str, uses: str) -> None:
    gpu = lab.gpu(memory=512 * MIB)
    pool = lab.pool(gpu, backing=backing, uses=uses, limit=256 * MIB, wait_timeout=0.01, seal_frees=8)
    streams = [Stream(gpu) for _ in range(3)]
    held: dict[int, tuple[int, int]] = {}
    guard = threading.Lock()
    errors: list[BaseException] = []
    stop = threading.Event()

    def worker(seed: int) -> None:
        draw = random.Random(seed)
        live: list[Allocation] = []
        for _ in range(250):
            s = draw.choice(streams)
            try:
                a = pool.allocate(draw.choice([700, 60_000, MIB, 3 * MIB]), stream=s)
            except OutOfMemoryError:
                live.clear()
                continue
            with guard:  # nobody else has these bytes
                assert not any(overlap(a, other) for other in held.values()), "handed out twice"
                held[id(a)] = span(a)
            gpu.launch(s, duration_ns=500, writes=[a])
            live.append(a)
            gpu.advance(200)
            if len(live) > 6:
                gone = live.pop(draw.randrange(len(live)))
                if draw.random() < 0.3:
                    gone.record_stream(draw.choice(streams))
                with guard:
                    del held[id(gone)]
                gone.close()
        for one in live:
            with guard:
                held.pop(id(one), None)
            one.close()

    def emptier() -> None:
        while not stop.is_set():
            pool.trim()
            time.sleep(0)

    def reader() -> None:
        while not stop.is_set():
            s = pool.stats()
            assert s.reserved_bytes == s.allocated_bytes + s.in_flight_bytes + s.idle_bytes
            assert 0 <= s.allocated_bytes <= s.peak_allocated_bytes and s.reserved_bytes <= 256 * MIB
            assert s.blocks["live"] >= 0 and s.largest_free_block_bytes <= s.idle_bytes
            pool.snapshot()

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)
            stop.set()

    workers = [threading.Thread(target=guarded, args=(lambda i=i: worker(i),)) for i in range(3)]
    others = [threading.Thread(target=guarded, args=(body,)) for body in (emptier, reader)]
    for t in workers + others:
        t.start()
    for t in workers:
        t.join(120)
    stop.set()
    for t in others:
        t.join(30)
    assert not any(t.is_alive() for t in workers + others)
    if errors:
        raise errors[0]
    pool.check()
    assert pool.stats().allocated_bytes == 0


def test_s15_blocks_that_lived_through_the_emptying_are_freed_as_usual(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    live = [used(pool, s, size) for size in (KIB, MIB, 4 * MIB)]
    for size in (KIB, MIB, 4 * MIB):
        used(pool, s, size).close()
    s.synchronize()
    in_thread(pool.trim)
    write(gpu, s, *live)
    for one in live:
        in_thread(one.close)
    s.synchronize()
    pool.trim()
    assert pool.stats().allocated_bytes == 0 and gpu.used_bytes == 0


def test_s15_two_threads_that_close_one_allocation_free_it_once(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    for _ in range(200):
        a = pool.allocate(KIB, stream=s)
        barrier = threading.Barrier(2)

        def close(a: Allocation = a, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            a.close()

        threads = [threading.Thread(target=close) for _ in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    stats = pool.stats()
    assert stats.frees["same_stream"] == 200 and stats.blocks["live"] == 0


# -- S16: outside code ------------------------------------------------------------------------------


def _everything(gpu: SimDevice, pool: CachingAllocator) -> None:
    """Reaches every step of the ladder, and every public call."""
    a, b = Stream(gpu), Stream(gpu)
    for i in range(12):
        s = (a, b)[i % 2]
        block = used(pool, s, 2 * MIB, duration_ns=500)
        block.record_stream((b, a)[i % 2])
        block.close()
        gpu.advance(300)
    pool.trim()
    used(pool, a, 40 * MIB, duration_ns=100_000).close()
    used(pool, b, 40 * MIB).close()
    pool.settle()
    pool.stats()
    pool.snapshot()
    pool.set_limit(48 * MIB)
    pool.set_limit(0)
    b.close()


@pytest.mark.parametrize("backing", ["vmm", "malloc"])
def test_s16_a_driver_call_may_itself_allocate_and_free(lab: Lab, backing: str) -> None:
    gpu = lab.gpu(memory=128 * MIB)
    pool = lab.pool(gpu, backing=backing, seal_frees=4, wait_timeout=0.01)
    seen: Counter[str] = Counter()
    kept: list[Allocation] = []

    def hook(call: str) -> None:
        seen[call] += 1
        kept.append(pool.allocate(KIB))
        if len(kept) > 4:
            kept.clear()
        pool.stats()

    gpu.before_call = hook
    _everything(gpu, pool)
    gpu.before_call = None
    kept.clear()
    assert {"cuEventRecord", "cuEventQuery", "cuStreamQuery"} <= set(seen)
    assert ({"cuMemCreate", "cuMemUnmap"} if backing == "vmm" else {"cuMemAlloc"}) <= set(seen)
    pool.check()


@pytest.mark.parametrize("backing", ["vmm", "malloc"])
def test_s16_a_driver_call_may_wait_for_another_thread_that_allocates(lab: Lab, backing: str) -> None:
    gpu = lab.gpu(memory=128 * MIB)
    pool = lab.pool(gpu, backing=backing, seal_frees=4, wait_timeout=0.01)
    warm = Stream(gpu)
    used(pool, warm, KIB).close()
    seen: Counter[str] = Counter()

    def other() -> None:
        with pool.allocate(KIB, stream=warm):
            pool.stats()

    me = threading.current_thread()

    def hook(call: str) -> None:
        seen[call] += 1
        if seen[call] <= 3 and threading.current_thread() is me:
            in_thread(other)

    gpu.before_call = hook
    _everything(gpu, pool)
    gpu.before_call = None
    pool.check()
    assert seen["cuEventRecord"] and seen["cuStreamQuery"]


def test_s16_memory_on_its_way_back_to_the_driver_is_waited_for(lab: Lab) -> None:
    """Another thread asks while all of the pool's memory is being given back: it gets some, and no error."""
    gpu = lab.gpu(memory=64 * MIB)
    pool = lab.pool(gpu, wait_timeout=5)
    a, b = Stream(gpu), Stream(gpu)
    blocks = [used(pool, a, 2 * MIB) for _ in range(31)]
    blocks.clear()
    a.synchronize()
    pool.set_limit(62 * MIB)
    me = threading.current_thread()
    got: list[Any] = []
    threads: list[threading.Thread] = []

    def ask() -> None:
        try:
            got.append(used(pool, b, MIB))
        except AllocatorError as error:
            got.append(error)

    def hook(call: str) -> None:
        if call == "cuMemUnmap" and threading.current_thread() is me and not threads:
            threads.append(threading.Thread(target=ask))
            threads[0].start()
            threads[0].join(0.5)

    gpu.before_call = hook
    pool.trim()
    threads[0].join(20)
    gpu.before_call = None
    assert isinstance(got[0], Allocation), got[0]
    got.clear()


def test_s16_a_driver_call_may_run_the_garbage_collector(lab: Lab) -> None:
    gpu = lab.gpu(memory=128 * MIB)
    pool = lab.pool(gpu, seal_frees=4, wait_timeout=0.01)
    s = Stream(gpu)

    def hook(call: str) -> None:
        cycle: list[object] = [pool.allocate(KIB, stream=s)]
        cycle.append(cycle)
        del cycle
        gc.collect(0)

    gpu.before_call = hook
    _everything(gpu, pool)
    gpu.before_call = None
    gc.collect()
    pool.check()
    assert pool.stats().allocated_bytes == 0


def test_s16_a_log_handler_may_allocate_and_wait_for_others(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    texts: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())
            pool.allocate(KIB, stream=s).close()
            in_thread(lambda: pool.allocate(KIB, stream=s).close())

    handler = Handler()
    log = logging.getLogger("allocator")
    log.addHandler(handler)
    try:
        pool.allocate(KIB, stream=s).close(stream="no stream")
    finally:
        log.removeHandler(handler)
    assert len(texts) == 1 and "no stream" in texts[0]


def test_s16_an_out_of_memory_callback_may_allocate_free_and_wait_for_others(lab: Lab) -> None:
    gpu = lab.gpu(memory=64 * MIB)
    pool = lab.pool(gpu, wait_timeout=0.01)
    s = Stream(gpu)
    kept = [used(pool, s, 16 * MIB) for _ in range(4)]

    def callback(nbytes: int) -> bool:
        kept.pop().close()
        in_thread(lambda: pool.allocate(16 * MIB, stream=s).close())
        pool.stats()
        pool.check()
        return bool(nbytes)

    handle = pool.on_out_of_memory(callback)
    got = pool.allocate(16 * MIB, stream=s)
    handle.remove()  # it holds what it has not let go
    write(gpu, s, got)
    assert len(kept) == 3


def test_s16_an_error_in_a_callback_reaches_the_caller_and_breaks_nothing(lab: Lab) -> None:
    gpu = lab.gpu(memory=64 * MIB)
    pool = lab.pool(gpu, wait_timeout=0.01)
    kept = used(pool, Stream(gpu), 64 * MIB)
    handle = pool.on_out_of_memory(lambda _: 1 // 0 > 0)
    with pytest.raises(ZeroDivisionError):
        pool.allocate(MIB)
    handle.remove()
    with pytest.raises(OutOfMemoryError):
        pool.allocate(MIB)
    kept.close()
    pool.allocate(MIB).close()


# -- S20: the last reference to the pool ------------------------------------------------------------


def _next_public_call(gpu: SimDevice) -> None:
    with CachingAllocator(gpu, config=Config()) as other:
        other.stats()


@pytest.mark.parametrize("how", ["drop", "close", "with"])
def test_s20_allocations_outlive_their_pool(lab: Lab, gpu: SimDevice, how: str) -> None:
    pool = CachingAllocator(gpu, config=Config())
    ref = weakref.ref(pool)
    s = Stream(gpu)
    a, b = used(pool, s, MIB), used(pool, s, 8 * MIB)
    if how == "close":
        pool.close()
        pool.close()
    elif how == "with":
        with pool:
            pass
    del pool
    gc.collect()
    _next_public_call(gpu)
    write(gpu, s, a, b)
    assert gpu.used_bytes >= 9 * MIB
    b.close()
    gpu.run_until_idle()
    s.synchronize()
    _next_public_call(gpu)
    if how != "drop":
        assert gpu.used_bytes <= 4 * MIB  # what is idle has gone already
    del a, b
    gpu.run_until_idle()
    gc.collect()
    _next_public_call(gpu)
    _next_public_call(gpu)
    assert gpu.used_bytes == 0
    gc.collect()
    assert ref() is None


def test_s20_work_in_flight_keeps_the_memory_until_it_is_over(lab: Lab, gpu: SimDevice) -> None:
    pool = CachingAllocator(gpu, config=Config())
    s = Stream(gpu)
    gpu.hold(s)
    a = used(pool, s, 8 * MIB)
    del a, pool
    gc.collect()
    _next_public_call(gpu)
    assert gpu.used_bytes == 8 * MIB
    gpu.resume(s)
    gpu.run_until_idle()
    _next_public_call(gpu)
    assert gpu.used_bytes == 0


@pytest.mark.parametrize("order", ["pool first", "allocation first"])
def test_s20_pool_and_allocation_in_one_dead_cycle(lab: Lab, gpu: SimDevice, order: str) -> None:
    pool = CachingAllocator(gpu, config=Config())
    s = Stream(gpu)
    cycle: dict[str, Any] = {}
    if order == "pool first":
        cycle["pool"] = pool
        cycle["a"] = used(pool, s, MIB)
    else:
        cycle["a"] = used(pool, s, MIB)
        cycle["pool"] = pool
    cycle["self"] = cycle
    pool.on_out_of_memory(lambda n, cycle=cycle: bool(n and cycle))  # type: ignore[misc]
    del pool, cycle
    gc.collect()
    gpu.run_until_idle()
    _next_public_call(gpu)
    gc.collect()  # the pool's callback held the rest of the cycle until that call let go of it
    _next_public_call(gpu)
    assert gpu.used_bytes == 0


def test_s20_a_closed_pool_refuses_and_keeps_what_lives(lab: Lab, gpu: SimDevice) -> None:
    pool = lab.pool(gpu, name="mine")
    s = Stream(gpu)
    a = used(pool, s, MIB)
    pool.close()
    assert pool.closed
    with pytest.raises(allocator.PoolClosed, match="mine"):
        pool.allocate(1, stream=s)
    with pytest.raises(allocator.PoolClosed):
        pool.allocate(0)
    a.record_stream(Stream.legacy(gpu))
    write(gpu, s, a)
    assert pool.stats().allocated_bytes == MIB
    a.close()
    gpu.run_until_idle()


# -- S21: fork --------------------------------------------------------------------------------------


def _in_child(body: Callable[[], None], timeout_s: float = 10.0) -> int:
    """Fork; run `body` in the child; its exit status, or -1 if it hangs."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks with threads
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException as error:
            os.write(2, f"in the child: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -1


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@needs_fork
def test_s21_a_child_gets_one_clear_error_and_drops_in_silence(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    arrays = [used(pool, s, MIB) for _ in range(3)]
    calls = Counter(gpu.calls)

    def child() -> None:
        for stream in (s, None, 0, 2):
            try:
                pool.allocate(MIB, stream=stream)
            except ForkError as error:
                assert "\n" not in str(error)
            else:
                raise AssertionError("allocated in the child")
        arrays[0].close()
        arrays[1].close(s)
        arrays.clear()
        gc.collect()
        pool.close()
        assert Counter(gpu.calls) == calls, "a driver call in the child"
        assert not gpu.violations, gpu.violations

    assert _in_child(child) == 0
    write(gpu, s, *arrays)  # the parent goes on
    arrays.clear()
    used(pool, s, MIB).close()
    assert pool.stats().allocated_bytes == 0


@needs_fork
@pytest.mark.parametrize("lock", ["pool", "timelines", "none"])
def test_s21_a_child_never_hangs_although_another_thread_was_inside(
    gpu: SimDevice, pool: CachingAllocator, lock: str
) -> None:
    """The locks are taken at the moment of the fork, as if another thread were in the middle of a call."""
    s = Stream(gpu)
    a, b = used(pool, s, MIB), used(pool, s, MIB)
    event = s.record_event()
    held = {"pool": pool._lock, "timelines": pool._registry.lock}.get(lock)

    def child() -> None:
        def refuses(call: Callable[[], object]) -> None:
            try:
                call()
            except AllocatorError:
                return

        for call in (
            lambda: pool.allocate(MIB, stream=s),
            lambda: pool.allocate(MIB),
            lambda: pool.trim(),
            lambda: pool.settle(),
            lambda: pool.set_limit(1),
            lambda: pool.stats(),
            lambda: pool.snapshot(),
            lambda: pool.reset_peaks(),
            lambda: pool.check(),
            lambda: a.record_stream(Stream.legacy(gpu)),
            lambda: Stream(gpu),
            lambda: s.query(),
            lambda: s.synchronize(),
            lambda: s.record_event(),
            lambda: event.query(),
            lambda: event.synchronize(),
            lambda: event.wait(s),
            lambda: a.close(),
            lambda: b.close(Stream.legacy(gpu)),
            lambda: pool.close(),
            lambda: s.close(),
            lambda: repr(pool),
        ):
            refuses(call)
        gc.collect()

    if held is not None:
        held.acquire()
    try:
        status = _in_child(child)
    finally:
        if held is not None:
            held.release()
    assert status == 0, "the child hangs" if status == -1 else "the child failed"
    pool.check()


@needs_fork
def test_s21_a_fork_in_the_middle_of_another_threads_driver_call(gpu: SimDevice, pool: CachingAllocator) -> None:
    inside, go_on = threading.Event(), threading.Event()
    s = Stream(gpu)

    def hook(call: str) -> None:
        if call == "cuMemCreate":
            inside.set()
            go_on.wait(20)

    gpu.before_call = hook
    got: list[Allocation] = []
    thread = threading.Thread(target=lambda: got.append(pool.allocate(MIB, stream=s)))
    thread.start()
    assert inside.wait(20)

    def child() -> None:
        gpu.before_call = None
        try:
            pool.allocate(MIB, stream=s)
        except ForkError:
            return
        raise AssertionError("allocated in the child")

    status = _in_child(child)
    go_on.set()
    thread.join(20)
    gpu.before_call = None
    assert status == 0
    write(gpu, s, got.pop())


@needs_fork
def test_s21_a_child_can_make_a_pool_of_its_own(gpu: SimDevice, pool: CachingAllocator) -> None:
    used(pool, Stream(gpu), MIB).close()

    def child() -> None:
        mine = SimDevice(memory=64 * MIB)
        own = CachingAllocator(mine, config=Config())
        s = Stream(mine)
        own.allocate(MIB, stream=s).close()
        own.check()

    assert _in_child(child) == 0


# -- S22: a thread that never used the device -------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "del"])
def test_s22_the_last_reference_dies_in_a_thread_that_never_used_the_device(
    gpu: SimDevice, pool: CachingAllocator, how: str
) -> None:
    s = Stream(gpu)
    gpu.hold(s)
    holder = [used(pool, s, 2 * MIB)]
    where = span(holder[0])

    def other_thread() -> None:
        assert not WORLD.thread.stack
        if how == "close":
            holder[0].close()
        holder.clear()
        assert not WORLD.thread.stack

    in_thread(other_thread)
    stats = pool.stats()
    assert stats.allocated_bytes == 0
    assert stats.in_flight_bytes == 2 * MIB  # not reported as done
    with pool.allocate(2 * MIB, stream=Stream(gpu)) as other:
        assert not overlap(other, where)
        write(gpu, other.stream, other)
    gpu.resume(s)
    gpu.run_until_idle()
    assert pool.stats().in_flight_bytes == 0


def test_s22_many_frees_in_such_a_thread_leave_its_context_as_it_was(lab: Lab, gpu: SimDevice) -> None:
    pool = lab.pool(gpu, seal_frees=4)
    other_gpu = lab.gpu(ordinal=1)
    a, b = Stream(gpu), Stream(gpu)
    for current in (None, other_gpu):
        live = [used(pool, s, KIB) for _ in range(100) for s in (a, b)]
        calls = Counter(other_gpu.calls)

        def other_thread(live: list[Allocation] = live, current: SimDevice | None = current) -> None:
            before = []
            if current is not None:
                with current.program_scope():
                    before = list(WORLD.thread.stack)
                    for one in live:
                        one.close()
                    assert WORLD.thread.stack == before
            else:
                for one in live:
                    one.close()
            assert not WORLD.thread.stack

        in_thread(other_thread)
        changed = Counter(other_gpu.calls) - calls
        assert set(changed) <= {"cuCtxPushCurrent", "cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode"}
    assert pool.stats().allocated_bytes == 0


# -- S23: two devices -------------------------------------------------------------------------------


def test_s23_everything_acts_on_the_blocks_own_device(lab: Lab) -> None:
    first, second = lab.gpu(ordinal=0), lab.gpu(ordinal=1)
    pool = lab.pool(second, seal_frees=2, limit=32 * MIB)
    with second.program_scope():
        a, b = Stream(second), Stream(second)
    with first.program_scope():
        stack = list(WORLD.thread.stack)
        before = Counter(first.calls)
        for i in range(8):
            block = used(pool, (a, b)[i % 2], 8 * MIB, duration_ns=1000)
            block.record_stream((b, a)[i % 2])
            block.close()
            assert WORLD.thread.stack == stack
        pool.stats()
        second.hold(a)
        kept = used(pool, a, 8 * MIB)
        kept.close()
        pool.trim()
        assert second.used_bytes >= 8 * MIB  # what the second device's work may still use
        second.resume(a)
        pool.settle()
        pool.trim()
        pool.check()
        assert WORLD.thread.stack == stack
        assert Counter(first.calls) == before
    assert first.used_bytes == 0 and second.used_bytes == 0


def test_s23_a_free_in_a_thread_where_the_other_device_is_current(lab: Lab) -> None:
    first, second = lab.gpu(ordinal=0), lab.gpu(ordinal=1)
    pools = lab.pool(first), lab.pool(second)
    streams = Stream(first), Stream(second)
    blocks = [used(pool, s, 4 * MIB) for pool, s in zip(pools, streams, strict=True)]
    with first.program_scope():
        blocks[1].close()
    with second.program_scope():
        blocks[0].close()
    first.run_until_idle()
    second.run_until_idle()
    for pool, gpu in zip(pools, (first, second), strict=True):
        stats = pool.stats()
        assert stats.reserved_bytes == gpu.used_bytes == 4 * MIB
        assert (stats.in_flight_bytes, stats.allocated_bytes) == (0, 0)
        identity(pool)


def test_s23_the_current_stream_belongs_to_a_device(lab: Lab) -> None:
    first, second = lab.gpu(ordinal=0), lab.gpu(ordinal=1)
    pools = lab.pool(first), lab.pool(second)
    mine = Stream(first)
    with allocator.stream(mine):
        a, b = pools[0].allocate(MIB), pools[1].allocate(MIB)
        assert a.stream is mine
        assert b.stream == Stream.legacy(second) != Stream.legacy(first)
        assert (a.device_id, b.device_id) == (0, 1)


def test_s23_a_stream_of_another_device_is_refused_and_nothing_is_lost(lab: Lab) -> None:
    first, second = lab.gpu(ordinal=0), lab.gpu(ordinal=1)
    pool = lab.pool(first)
    wrong = Stream(second)
    with pytest.raises(ValueError, match="belongs to device sim:1"):
        pool.allocate(MIB, stream=wrong)
    a = pool.allocate(MIB)
    with pytest.raises(ValueError, match="belongs to device sim:1"):
        a.record_stream(wrong)
    a.close(wrong)  # never raises; everybody waits
    assert second.used_bytes == 0


@pytest.mark.source
def test_s16_a_finaliser_that_closes_inside_our_own_locked_section_does_not_hang(
    gpu: SimDevice, pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may run a user's `__del__`, and that `close()`, anywhere."""
    s = Stream(gpu)

    class Buffer:
        def __init__(self) -> None:
            self.memory = pool.allocate(512, stream=s)
            self.me = self

        def __del__(self) -> None:
            self.memory.close()

    gc.disable()
    try:
        for _ in range(200):
            Buffer()
        shelves = pool._shelves
        refresh = shelves.refresh

        def collected() -> bool:
            gc.collect()
            return refresh()

        monkeypatch.setattr(shelves, "refresh", collected)
        pool.allocate(MIB, stream=s)
    finally:
        gc.enable()
    monkeypatch.undo()
    assert pool.stats().allocated_bytes == 0


def test_s16_a_free_whose_stream_raises_is_kept_and_raises_nothing(gpu: SimDevice, pool: CachingAllocator) -> None:
    class Broken:
        def __cuda_stream__(self) -> tuple[int, int]:
            raise RuntimeError("gone")

    s = Stream(gpu)
    x = pool.allocate(MIB, stream=s)
    x.close(Broken())
    assert pool.allocate(MIB, stream=s).size == MIB


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuStreamWaitEvent", "cuEventRecord"])
def test_s15_a_check_by_another_thread_knows_what_is_on_its_way(lab: Lab, gpu: SimDevice, call: str) -> None:
    """A block that a thread has taken off its shelf, and works on outside the lock, is neither live nor lost."""
    pool = lab.pool(gpu, limit=12 * MIB)
    a, b = Stream(gpu), Stream(gpu)
    checked: list[str] = []

    def look(name: str) -> None:
        if name == call and threading.current_thread() is threading.main_thread():
            in_thread(pool.check)
            checked.append(name)

    gpu.hold(a)
    for block in [pool.allocate(nbytes, stream=a) for nbytes in (2 * MIB, 4 * MIB, 2 * MIB)]:
        write(gpu, a, block)
        block.close()
    gpu.before_call = look
    held = [pool.allocate(4 * MIB, stream=b) for _ in range(2)]  # new memory; then b is made to wait for a
    gpu.before_call = None
    assert checked
    for block in held:
        write(gpu, b, block)
    gpu.resume(a)
    gpu.run_until_idle()

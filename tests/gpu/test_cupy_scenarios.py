"""Scenarios of CuPy on a real GPU: captures, swapped allocators, threads, events that are recorded again."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from cupy_bench import MIB, CuPyBench, cupy, on, weir, where
from rig import Rig

from allocator import CachingAllocator, Config


@pytest.fixture
def bench(rig: Rig) -> Iterator[CuPyBench]:
    bench = CuPyBench(rig)
    yield bench
    bench.close()


def warm(source: Any) -> None:
    """Load the kernels of `source + 1`, which a capture could not."""
    cupy.cuda.Device(0).synchronize()
    (source + 1).get()
    cupy.cuda.Device(0).synchronize()


@pytest.mark.parametrize("which", ["legacy", "per-thread", "non-blocking"])
def test_s13_one_stream_for_ever_records_nothing_and_asks_nothing(bench: CuPyBench, which: str) -> None:
    bench.install()
    special = {"legacy": cupy.cuda.Stream.null, "per-thread": cupy.cuda.Stream.ptds}
    with special.get(which) or bench.stream():
        cupy.empty(4096, dtype=cupy.uint8)
        before = dict(bench.gpu.calls)
        for _ in range(20_000):
            cupy.empty(4096, dtype=cupy.uint8)
        assert dict(bench.gpu.calls) == before


def test_s13_events_level_off_in_a_program_that_records_for_ever(bench: CuPyBench) -> None:
    pool = bench.install()
    a, b = bench.stream(), bench.stream()
    event = cupy.cuda.Event()
    counts = []
    for i in range(4000):
        x = on(a, MIB)
        event.record(a)
        b.wait_event(event)
        bench.kernels.fill(b.ptr, where(x), 1024, i)
        a.wait_event(b.record())
        del x
        if i % 400 == 0:
            counts.append(bench.gpu.calls["cuEventCreate"] - bench.gpu.calls["cuEventDestroy"])
    assert counts[-1] <= counts[2] + 8, counts
    assert pool.reserved_bytes <= 64 * MIB


@pytest.mark.parametrize("non_blocking", [True, False])
def test_s17_what_is_freed_during_a_capture_stays_until_the_capture_is_over(
    bench: CuPyBench, non_blocking: bool
) -> None:
    pool = bench.install(seal_frees=1)
    s, t = bench.stream(non_blocking=non_blocking), bench.stream(non_blocking=non_blocking)
    source = cupy.zeros(MIB, dtype=cupy.int32)
    warm(source)
    x = on(s, 4 * MIB)
    bench.kernels.fill(s.ptr, where(x), MIB, 5)
    s.synchronize()
    with s:
        s.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        result = x.view(cupy.int32) + 1
        ptr = where(x)
        del x  # the graph will read it at every launch
        noise = [on(t, 4 * MIB) for _ in range(4)]
        graph = s.end_capture()  # fails if anything above had killed the capture
    assert ptr not in [where(one) for one in noise]
    for one in noise:
        bench.kernels.fill(t.ptr, where(one), MIB, 9)
    t.synchronize()
    graph.launch(s)
    s.synchronize()
    assert int(result.get()[0]) == 6
    del graph, result, noise, one, source
    gc.collect()
    for stream in (s, t, cupy.cuda.Stream.null):
        stream.synchronize()
    assert pool.stats().in_flight_bytes == pool.stats().private_bytes == 0  # parked no more


@pytest.mark.parametrize("mode", ["Global", "ThreadLocal", "Relaxed"])
def test_s19_the_first_use_of_the_pool_may_be_within_a_capture(bench: CuPyBench, mode: str) -> None:
    number = getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}")
    source = cupy.zeros(1024, dtype=cupy.int32)  # CuPy's own pool's
    warm(source)
    s = bench.stream()
    pool = bench.install()
    with s:
        s.begin_capture(number)
        result = source + 1
        graph = s.end_capture()
    graph.launch(s)
    s.synchronize()
    assert int(result.get().sum()) == 1024
    pool.check()
    del graph, result
    assert int((source + 1).sum()) == 1024


def test_s22_arrays_die_in_a_thread_that_never_used_cuda(bench: CuPyBench) -> None:
    pool = bench.install()
    held = [on(bench.stream(), MIB) for _ in range(8)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pool.allocated_bytes == 0
    pool.check()


def test_s24_the_allocator_is_swapped_while_threads_allocate(bench: CuPyBench) -> None:
    first = bench.install()
    second = CachingAllocator(bench.gpu, config=Config())
    theirs = cupy.cuda.MemoryPool()
    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        held: list[Any] = []
        try:
            cupy.cuda.Device(0).use()
            with bench.stream():
                while not stop.is_set():
                    held.append(cupy.full(1000, len(held), dtype=cupy.int32))
                    if len(held) > 20:
                        assert int(held.pop(0)[0]) <= 20
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(100):
        if i % 3 == 2:
            weir.uninstall()
            with cupy.cuda.using_allocator(theirs.malloc):
                cupy.zeros(1000)
        else:
            weir.install((first, second)[i % 3])
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    gc.collect()
    weir.uninstall()
    for pool in (first, second):
        assert pool.allocated_bytes == 0
        pool.check()
    second.close()


def test_s26_nothing_is_an_array_too(bench: CuPyBench) -> None:
    pool = bench.install()
    before = dict(bench.gpu.calls)
    for _ in range(10):
        x = cupy.empty((0, 7))
        assert x.data.ptr == 0 and x.data.mem.size == 0
        del x
    assert dict(bench.gpu.calls) == before and pool.allocated_bytes == 0
    with pytest.raises(ValueError, match="negative"):
        cupy.cuda.alloc(-1)


@pytest.mark.parametrize("again", ["before the wait", "after the wait", "behind our back"])
def test_s35_an_event_recorded_again_teaches_nothing_wrong(bench: CuPyBench, again: str) -> None:
    """A frees what a kernel of its own still works on; B waits for A's event, which another stream has or has not."""
    pool = bench.install(uses="declared")
    a, b, other = (bench.stream() for _ in range(3))
    x = on(a, 4 * MIB)
    latch = bench.rig.hold(a.ptr)
    ptr = where(x)
    del x
    event = cupy.cuda.Event()
    event.record(a)
    if again == "before the wait":
        event.record(other)
    elif again == "behind our back":
        cupy.cuda.runtime.eventRecord(event.ptr, other.ptr)
    b.wait_event(event)
    if again == "after the wait":
        event.record(other)
    y = on(b, 4 * MIB)
    taken = where(y) == ptr
    assert taken == (again != "before the wait")
    if taken:  # then the wait that we put beside the program's holds B back, whatever its event became
        bench.kernels.fill(b.ptr, ptr, MIB, 3)
        assert not b.done
    latch.release()
    b.synchronize()
    del y
    pool.check()

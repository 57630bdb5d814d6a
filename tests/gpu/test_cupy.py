"""CuPy on Weir on a real GPU: its own streams, arrays, kernels and graphs.

What the simulator shows of the hook (tests/unit/integrations/cupy) is shown here of the real thing: that CuPy calls
what we wrap, and that no array is ever written by somebody else's kernel.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from cupy_bench import MIB, CuPyBench, cupy, on, weir, where
from rig import Rig

from allocator.devices import CudaDevice


@pytest.fixture
def bench(rig: Rig) -> Iterator[CuPyBench]:
    bench = CuPyBench(rig)
    yield bench
    bench.close()


def test_arrays_work_and_come_from_the_pool(bench: CuPyBench) -> None:
    pool = bench.install()
    a = cupy.arange(1_000_000, dtype=cupy.float64)
    assert type(a.data.mem).__name__ == "Memory" and a.data.mem.pool is pool
    assert float((a * 2).sum()) == 2 * sum(range(1_000_000))
    assert cupy.get_default_memory_pool().used_bytes() == pool.allocated_bytes >= 8_000_000
    b = cupy.fft.ifft(cupy.fft.fft(a[:4096])).real
    assert cupy.allclose(a[:4096], b)
    x = cupy.random.default_rng(0).standard_normal((64, 64))
    u, s, v = cupy.linalg.svd(x)
    assert cupy.allclose(u @ cupy.diag(s) @ v, x)
    del a, b, x, u, s, v


def test_uninstall_leaves_live_arrays_readable(bench: CuPyBench) -> None:
    pool = bench.install()
    a = cupy.arange(1000)
    weir.uninstall()
    b = a + 1  # from CuPy's own pool
    assert type(b.data.mem).__name__ == "PooledMemory"
    assert int(a.sum()) == 499500 and pool.allocated_bytes > 0
    del a
    assert pool.allocated_bytes == 0


def test_out_of_memory_is_cupys_own_error_and_not_the_end(bench: CuPyBench) -> None:
    bench.install(limit=64 * MIB)
    held = cupy.zeros(32 * MIB, dtype=cupy.uint8)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        cupy.empty(64 * MIB, dtype=cupy.uint8)
    del held
    assert int(cupy.zeros(48 * MIB, dtype=cupy.uint8).sum()) == 0


def test_memory_serves_another_stream_once_its_work_is_over(bench: CuPyBench) -> None:
    pool = bench.install()
    a, b = bench.stream(), bench.stream()
    latch = bench.rig.hold(a.ptr)
    x = on(a, 4 * MIB)
    ptr = where(x)
    del x
    y = on(b, 4 * MIB)
    assert where(y) != ptr
    latch.release()
    a.synchronize()
    b.synchronize()
    cupy.cuda.Stream.null.synchronize()
    z = on(b, 4 * MIB)
    assert where(z) == ptr
    assert pool.stats().allocations["opportunistic"] == 1
    del y, z


@pytest.mark.parametrize("uses", ["auto", "declared"])
@pytest.mark.parametrize("context_events", [None, False])
def test_s33_an_undeclared_read_keeps_a_third_stream_away(
    bench: CuPyBench, uses: str, context_events: bool | None
) -> None:
    """Made on A, read on B, dropped, A waits for B only afterwards; C asks.  Trusting declared uses is the control."""
    bench.install(uses=uses, context_events=context_events)
    a, b, c = (bench.stream() for _ in range(3))
    x = on(a, 4 * MIB)
    bench.kernels.fill(a.ptr, where(x), MIB, 1)
    b.wait_event(a.record())
    a.synchronize()
    latch = bench.rig.hold(b.ptr)
    wrong = cupy.cuda.Memory(512)  # not the pool's
    cupy.cuda.runtime.memset(wrong.ptr, 0, 512)
    bench.kernels.verify(b.ptr, where(x), MIB, 1, wrong.ptr)
    ptr = where(x)
    del x
    y = on(c, 4 * MIB)
    bench.kernels.fill(c.ptr, where(y), MIB, 2)
    a.wait_event(b.record())
    c.synchronize()
    latch.release()
    b.synchronize()
    corrupt = bench.kernels.read_word(c.ptr, wrong.ptr)
    if uses == "declared":
        assert where(y) == ptr and corrupt == MIB
    else:
        assert where(y) != ptr and corrupt == 0
    del y


def test_r3_a_stream_that_is_only_named_in_a_launch_is_seen(bench: CuPyBench) -> None:
    bench.install()
    a, b, c = (bench.stream() for _ in range(3))
    x = on(a, 4 * MIB)
    kernel = cupy.RawKernel(r'extern "C" __global__ void touch(char* p) { p[threadIdx.x] = 1; }', "touch")
    kernel((1,), (32,), (x,))  # loaded before anything is held: loading may wait for the context
    cupy.cuda.Stream.null.synchronize()
    bench.rig.hold(b.ptr)
    with b:  # CuPy's launches take the current stream; from here on it is only known by name
        kernel((1,), (32,), (x,))
    ptr = where(x)
    del x
    assert where(on(c, 4 * MIB)) != ptr
    bench.rig.release()


def test_s02_record_stream_holds_the_owner_back(bench: CuPyBench) -> None:
    bench.install()
    a, b = bench.stream(), bench.stream()
    x = on(a, 4 * MIB)
    latch = bench.rig.hold(b.ptr)
    weir.record_stream(x[5:], b)
    ptr = where(x)
    del x
    y = on(a, 4 * MIB)
    assert where(y) != ptr
    latch.release()
    del y


@pytest.mark.parametrize("learns", [True, False])
def test_r5_a_wait_of_the_program_is_learnt_from(bench: CuPyBench, learns: bool) -> None:
    pool = bench.install(uses="declared")
    weir.observe(learns)
    try:
        a, b = bench.stream(), bench.stream()
        x = on(a, 4 * MIB)
        latch = bench.rig.hold(a.ptr)
        ptr = where(x)
        del x
        event = cupy.cuda.Event()
        event.record(a)
        b.wait_event(event)
        y = on(b, 4 * MIB)
        assert (where(y) == ptr) == learns
        assert pool.stats().allocations["event_dependency"] == learns
        latch.release()
        del y
    finally:
        weir.observe(True)


def test_s04_per_thread_streams_of_two_threads_are_two_streams(bench: CuPyBench) -> None:
    bench.install()
    first: list[int] = []
    latches: list[Any] = []
    freed, asked = threading.Event(), threading.Event()

    def one() -> None:
        cupy.cuda.Device(0).use()
        with cupy.cuda.Stream.ptds:
            latches.append(bench.rig.hold(2))
            x = cupy.empty(4 * MIB, dtype=cupy.uint8)
            first.append(where(x))
            del x
            freed.set()
            assert asked.wait(30)

    thread = threading.Thread(target=one)
    thread.start()
    assert freed.wait(30)
    with cupy.cuda.Stream.ptds:
        y = cupy.empty(4 * MIB, dtype=cupy.uint8)
    assert where(y) not in first
    latches[0].release()
    asked.set()
    thread.join()
    del y


def test_s05_streams_made_and_dropped_in_a_loop_leave_nothing(bench: CuPyBench) -> None:
    pool = bench.install()
    reserved = []
    for _ in range(100):
        with bench.stream() as stream:
            x = cupy.zeros(64 * MIB, dtype=cupy.uint8)
            x += 1
            del x
        stream.synchronize()
        del stream
        reserved.append(pool.reserved_bytes)
    assert max(reserved[5:]) <= 192 * MIB and reserved[-1] == reserved[20]


def test_r9_a_stream_destroyed_with_work_queued_holds_its_memory(bench: CuPyBench) -> None:
    bench.install()
    a, b = bench.stream(), bench.stream()
    latch = bench.rig.hold(a.ptr)
    x = on(a, 4 * MIB)
    ptr = where(x)
    del x, a
    gc.collect()
    for _ in range(3):
        y = on(b, 4 * MIB)
        assert where(y) != ptr
        bench.kernels.fill(b.ptr, where(y), MIB, 2)
        del y
    latch.release()


# -- graphs --------------------------------------------------------------------------------------------


def capture(stream: Any, source: Any) -> tuple[Any, Any]:
    """(graph, result): result = (source + 1) * 2, with a temporary that is freed within the capture."""
    with stream:
        stream.begin_capture()
        temporary = source + 1
        result = temporary * 2
        del temporary
        return stream.end_capture(), result


def test_r10_a_graph_that_allocates_computes_right_whatever_is_allocated_meanwhile(bench: CuPyBench) -> None:
    pool = bench.install()
    s, t = bench.stream(), bench.stream()
    source = cupy.arange(MIB, dtype=cupy.int32)
    warm = (source + 1) * 2  # kernels are compiled and loaded before the capture
    expected = warm.get()
    del warm
    cupy.cuda.Device(0).synchronize()
    graph, result = capture(s, source)
    assert pool.stats().private_bytes > 0
    for i in range(20):
        graph.launch(s)
        noise = [on((s, t)[(i + j) % 2], 4 * MIB) for j in range(6)]
        for j, one in enumerate(noise):
            with (s, t)[(i + j) % 2]:
                one.fill(0xAB)
        graph.launch(t)
        t.synchronize()
        s.synchronize()
        assert (result.get() == expected).all()
        del noise, one
    del graph, result, source
    gc.collect()
    cupy.cuda.Device(0).synchronize()
    for stream in (s, t, cupy.cuda.Stream.null):
        stream.synchronize()
    stats = pool.stats()
    assert stats.private_bytes == 0 and stats.in_flight_bytes == 0


def test_r10_a_graph_destroyed_during_its_replay_keeps_its_memory_until_that_is_over(bench: CuPyBench) -> None:
    bench.install()
    s, t = bench.stream(), bench.stream()
    source = cupy.zeros(MIB, dtype=cupy.int32)
    del_me = (source + 1) * 2
    del del_me
    cupy.cuda.Device(0).synchronize()
    graph, result = capture(s, source)
    latch = bench.rig.hold(t.ptr)
    graph.launch(t)
    del graph
    gc.collect()
    noise = [on(s, 4 * MIB) for _ in range(8)]
    for one in noise:
        bench.kernels.fill(s.ptr, where(one), MIB, 7)
    s.synchronize()
    latch.release()
    t.synchronize()
    assert (result.get() == 2).all()
    for one in noise:
        assert bench.kernels.mismatches(s.ptr, where(one), MIB, 7) == 0
    del noise, one, result, source


@pytest.mark.parametrize("mode", ["relaxed", "thread_local", "global"])
@pytest.mark.parametrize("non_blocking", [True, False])
def test_s18_other_threads_may_allocate_and_free_around_a_capture(
    bench: CuPyBench, mode: str, non_blocking: bool
) -> None:
    pool = bench.install(seal_frees=1)
    runtime = cupy.cuda.runtime
    number = {
        "relaxed": runtime.streamCaptureModeRelaxed,
        "thread_local": runtime.streamCaptureModeThreadLocal,
        "global": runtime.streamCaptureModeGlobal,
    }[mode]
    s = bench.stream(non_blocking=non_blocking)
    source = cupy.zeros(1024, dtype=cupy.int32)
    with s:
        warm = source + 1
        del warm
    cupy.cuda.Device(0).synchronize()
    stop = threading.Event()
    errors: list[BaseException] = []

    def churn(seed: int) -> None:
        try:
            stream = bench.stream(non_blocking=bool(seed % 2))
            with stream:
                i = 0
                while not stop.is_set():
                    i += 1
                    held = cupy.cuda.alloc(512 * (1 + (seed * 37 + i * 101) % 4000))
                    del held
                    if i % 50 == 0:
                        pool.stats()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            with s:
                s.begin_capture(number)
                result = source + 1
                graph = s.end_capture()  # fails if anything has killed it
            graph.launch(s)
            s.synchronize()
            del graph, result
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    del source


# -- two devices -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The device where the array resides")  # CuPy opens the access, and says so
def test_s37_arrays_are_read_by_another_gpu(bench: CuPyBench, second_gpu: CudaDevice) -> None:
    bench.install()
    try:
        a = cupy.arange(MIB, dtype=cupy.int32)
        cupy.cuda.Device(0).synchronize()
        with cupy.cuda.Device(1):
            b = cupy.arange(MIB, dtype=cupy.int32)
            copied = cupy.asarray(a)  # a copy between devices
            assert copied.device.id == 1 and bool((copied == b).all())
            summed = b + a if cupy.cuda.runtime.deviceCanAccessPeer(1, 0) else b + copied  # a kernel reads the other's
            assert bool((summed == 2 * b).all())
        assert sorted(weir.pools()) == [0, 1]
        assert b.data.mem.device_id == 1 and a.data.mem.device_id == 0
        del b, copied, summed  # freed while device 0 is current
        assert cupy.cuda.runtime.getDevice() == 0
        weir.pools()[1].check()
        assert weir.pools()[1].allocated_bytes == 0
        del a
    finally:
        gc.collect()

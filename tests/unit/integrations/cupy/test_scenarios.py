"""The scenarios that concern CuPy and are not told elsewhere here: each is named after its own."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest

from allocator import CachingAllocator, Config, SimDevice
from allocator.errors import ForkError
from allocator.integrations.cupy.installation import Installation
from allocator.integrations.cupy.watch import Classes
from tests.unit.integrations.cupy.conftest import Start
from tests.unit.integrations.cupy.fakes import FakeCupy, array, span

MIB = 1 << 20


def test_s03_a_recycled_handle_is_another_stream(pool: CachingAllocator, library: FakeCupy, gpu: SimDevice) -> None:
    old = library.Stream(non_blocking=True)
    handle = old.ptr
    gpu.hold(handle)
    with old:
        x = array(2 * MIB)
    old.kernel(writes=(x,))
    where = span(x)[0]
    del x, old
    gc.collect()
    pool.stats()  # only the pool held it: it is sealed and let go
    new = library.Stream(non_blocking=True)
    assert new.ptr == handle
    with new:
        y = array(2 * MIB)
    new.kernel(writes=(y,))
    assert span(y)[0] != where
    gpu.resume(handle)
    del y


def test_s04_two_threads_per_thread_streams_are_two_streams(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    freed, asked = threading.Event(), threading.Event()
    first: list[int] = []

    def one() -> None:
        library.ptds.use()
        x = array(2 * MIB)
        library.ptds.kernel(writes=(x,), ns=10**9)
        first.append(span(x)[0])
        del x
        freed.set()
        assert asked.wait(10)

    thread = threading.Thread(target=one)
    thread.start()
    assert freed.wait(10)
    library.ptds.use()
    y = array(2 * MIB)
    library.ptds.kernel(writes=(y,))
    assert span(y)[0] not in first
    asked.set()
    thread.join()
    library.null.use()
    del y


@pytest.mark.parametrize("which", ["legacy", "per-thread", "blocking", "non-blocking"])
def test_s13_one_stream_for_ever_records_nothing_and_asks_nothing(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice, which: str
) -> None:
    special = {"legacy": library.null, "per-thread": library.ptds}
    stream = special.get(which) or library.Stream(non_blocking=which == "non-blocking")
    with stream:
        array(4096)
        before = dict(gpu.calls)
        for _ in range(20_000):
            array(4096)
        assert dict(gpu.calls) == before
    assert gpu.calls["cuEventRecord"] == gpu.calls["cuEventCreate"] == 0


@pytest.mark.parametrize("far_ahead", [False, True], ids=["in step", "host far ahead"])
def test_s13_events_level_off_in_a_program_that_records_for_ever(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice, far_ahead: bool
) -> None:
    a, b = library.Stream(non_blocking=True), library.Stream(non_blocking=True)
    event = library.Event()
    counts = []
    if far_ahead:
        gpu.hold(b.ptr)
    for i in range(2000):
        with a:
            x = array(MIB)
        a.kernel(writes=(x,))
        event.record(a)
        b.wait_event(event)
        b.kernel(reads=(x,))
        a.wait_event(b.record())
        del x
        gpu.advance(3000)
        if i % 200 == 0:
            counts.append(gpu.calls["cuEventCreate"] - gpu.calls["cuEventDestroy"])
    assert counts[-1] <= counts[1] + 4
    assert pool.reserved_bytes <= 16 * MIB


def test_s20_array_and_pool_in_one_dead_cycle(installation: Installation, library: FakeCupy, gpu: SimDevice) -> None:
    class Holder:
        pass

    holder: Any = Holder()
    holder.pool = CachingAllocator(gpu, config=Config())
    installation.install(holder.pool, current_stream=library.current)
    holder.array, holder.me = array(MIB), holder
    installation.uninstall()
    installation._past.clear()
    del holder
    gc.collect()
    with CachingAllocator(gpu, config=Config()) as other:
        other.stats()
    assert gpu.used_bytes == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_s21_a_forked_child_may_drop_arrays_and_gets_one_clear_error(pool: CachingAllocator, library: FakeCupy) -> None:
    held = [array(4096) for _ in range(3)]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover  # in the child
        try:
            held.clear()
            gc.collect()
            try:
                array(4096)
            except ForkError as error:
                os.write(write, str(error).encode()[:200])
        finally:
            os._exit(0)
    os.close(write)
    said = os.read(read, 1000).decode()
    os.close(read)
    os.waitpid(child, 0)
    assert "fork" in said
    assert pool.allocated_bytes == 3 * 4096
    del held


def test_s23_each_device_has_its_own_pool_and_a_free_acts_on_its_own() -> None:
    gpus = [SimDevice(memory=1 << 30, ordinal=i) for i in range(2)]
    libraries = [FakeCupy(gpu) for gpu in gpus]

    class Both:
        """One CuPy with two devices: what is current says which."""

        now = 0

        @classmethod
        def current(cls) -> Any:
            return libraries[cls.now].current()

    installation = Installation(Classes(libraries[0].BaseStream, libraries[0].Event, libraries[0].current))
    pools = [CachingAllocator(gpu, config=Config()) for gpu in gpus]
    for pool in pools:
        installation.install(pool, current_stream=Both.current)
    streams = [library.Stream(non_blocking=True) for library in libraries]
    held = []
    for i, stream in enumerate(streams):
        Both.now = i
        stream.use()
        held.append(array(MIB * (i + 1)))
        stream.kernel(writes=(held[-1],))
    assert [a.data.mem.device_id for a in held] == [0, 1]
    assert [pool.allocated_bytes for pool in pools] == [MIB, 2 * MIB]
    calls = dict(gpus[0].calls)
    Both.now = 0
    held.pop()  # device 1's, while device 0 is current
    assert [pool.allocated_bytes for pool in pools] == [MIB, 0]
    pools[1].stats()
    assert pools[1].trim() == 0  # its work is not over
    gpus[1].run_until_idle()
    assert pools[1].trim() == 2 * MIB and pools[0].reserved_bytes == 2 * MIB
    assert dict(gpus[0].calls) == calls
    held.clear()
    installation.uninstall()
    for pool, gpu in zip(pools, gpus, strict=True):
        pool.check()
        pool.close()
        assert gpu.races == [] and gpu.violations == []


def test_s10_whatever_call_fails_the_hook_stays_consistent(start: Start, library: FakeCupy, gpu: SimDevice) -> None:
    pool = start()
    for name in ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuStreamGetId", "cuEventRecord", "cuStreamQuery"):
        gpu.fail(name, error="CUDA_ERROR_UNKNOWN")
        try:
            with library.Stream(non_blocking=True) as stream:
                x = array(3 * MIB)
                stream.kernel(writes=(x,))
                stream.record()
                del x
                pool.stats()
        except Exception as error:
            assert name in str(error)
        gpu.clear_faults()
        pool.check()
        with library.Stream() as stream:
            stream.kernel(writes=(array(MIB),))
    assert pool.allocated_bytes == 0


def test_s27_a_collection_anywhere_in_the_pool_may_finalise_arrays(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    """The collector runs inside every driver call of ours, and frees arrays in dead cycles there."""

    def collect(name: str) -> None:
        if not waiting:
            return
        cycle: list[Any] = [waiting.pop()]
        cycle.append(cycle)
        del cycle
        gc.collect()

    waiting = [array(4096) for _ in range(25)]
    gpu.before_call = collect
    try:
        for i in range(12):
            with library.Stream(non_blocking=bool(i % 2)) as stream:
                x = array(MIB + 512 * i)
                stream.kernel(writes=(x,))
                del x
            pool.stats()
    finally:
        gpu.before_call = None
    waiting.clear()
    gc.collect()
    assert pool.allocated_bytes == 0
    pool.check()

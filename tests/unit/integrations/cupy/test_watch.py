"""Seeing every stream, learning from the program's own marks, and captures.

CuPy's streams are played on the simulator, and each test ends with no race: the oracle watches every kernel.
Controls show that it would have seen one.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import cupy
import pytest

from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.errors import DriverError
from allocator.integrations.cupy.installation import Installation
from allocator.integrations.cupy.watch import Classes
from allocator.streams import Registry
from tests.unit.integrations.cupy.conftest import Start
from tests.unit.integrations.cupy.fakes import FakeCupy, Graph, array, span

MIB = 1 << 20


def seen(gpu: SimDevice) -> int:
    """How many streams the context knows of."""
    registry = Registry.of(gpu)
    with registry.lock:
        return len([line for line in registry.seen() if not line.ended])


# -- seeing ------------------------------------------------------------------------------------------


def test_r3_every_stream_that_is_made_is_seen_used_or_not(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    before = seen(gpu)
    streams = [library.Stream(non_blocking=bool(i % 2)) for i in range(4)]
    assert seen(gpu) == before + 4
    assert len({s.ptr for s in streams}) == 4


def test_r3_streams_made_before_install_are_seen_by_it(gpu: SimDevice, library: FakeCupy, start: Start) -> None:
    streams = [library.Stream() for _ in range(3)]
    start()
    assert seen(gpu) >= 1 + len(streams)


@pytest.mark.parametrize("how", ["with", "use", "record", "event record", "wait", "allocate"])
def test_r3_the_threads_per_thread_stream_is_seen_where_it_is_used(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice, how: str
) -> None:
    before = seen(gpu)
    event = library.Event()

    def work() -> None:
        if how == "with":
            with library.ptds:
                pass
        elif how == "use":
            library.ptds.use()
        elif how == "record":
            library.ptds.record()
        elif how == "event record":
            event.record(library.ptds)
        elif how == "wait":
            library.ptds.wait_event(event)
        else:
            library.stack().append(library.ptds)
            array(512)
        found.append(seen(gpu))

    found: list[int] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before + 1]


@pytest.mark.parametrize("uses", ["auto", "declared"])
def test_s33_made_on_a_read_on_b_dropped_and_nothing_declared(
    gpu: SimDevice, library: FakeCupy, installation: Installation, uses: str
) -> None:
    """With the pool of a library that never crosses streams this is right.  The control trusts declared uses only."""
    device = SimDevice(memory=1 << 30) if uses == "declared" else gpu
    lib = FakeCupy(device) if uses == "declared" else library
    watching = Installation(Classes(lib.BaseStream, lib.Event, lib.current)) if uses == "declared" else installation
    pool = CachingAllocator(device, config=Config(uses=uses))
    watching.install(pool, current_stream=lib.current)
    a, b, c = (lib.Stream(non_blocking=True) for _ in range(3))
    with a:
        x = array(2 * MIB)
    a.kernel(writes=(x,))
    b.wait_event(a.record())
    device.hold(b.ptr)
    b.kernel(reads=(x,))
    where = span(x)
    del x
    a.synchronize()
    with c:
        y = array(2 * MIB)
    c.kernel(writes=(y,))
    a.wait_event(b.record())
    got = span(y)[0] == where[0]
    device.resume(b.ptr)
    device.run_until_idle()
    if uses == "declared":
        assert got and device.races
    else:
        assert not got and not device.races
        b.synchronize()
        c.synchronize()
        with c:
            z = array(2 * MIB)
        assert span(z)[0] == where[0]  # over: it serves others
        del z
    del y
    pool.check()
    watching.uninstall()
    pool.close()


def test_r3_a_stream_used_by_name_only_gates_what_it_may_read(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    """Kernels take `stream=`: such a stream is never current, allocates nothing, records nothing."""
    a, b, c = (library.Stream(non_blocking=True) for _ in range(3))
    with a:
        x = array(2 * MIB)
    gpu.hold(b.ptr)
    b.kernel(reads=(x,))
    where = span(x)[0]
    del x
    with c:
        y = array(2 * MIB)
    c.kernel(writes=(y,))
    assert span(y)[0] != where


class _Torch:
    """As much of PyTorch as is asked: its current stream, which lives for ever."""

    def __init__(self, stream: Stream) -> None:
        self.cuda = self
        self._stream = _TorchStream(stream)

    def is_initialized(self) -> bool:
        return True

    def current_stream(self, device: int) -> _TorchStream:
        return self._stream


class _TorchStream:
    def __init__(self, stream: Stream) -> None:
        self.cuda_stream = stream.handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.cuda_stream)


@pytest.mark.parametrize("how", ["dlpack, torch's stream", "dlpack, a bare handle", "cuda array interface"])
def test_r3_a_library_that_takes_an_array_over_is_seen_with_its_stream(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    theirs = Stream(gpu)  # a stream that CuPy has never heard of
    if how != "dlpack, a bare handle":
        monkeypatch.setitem(sys.modules, "torch", _Torch(theirs))
    a, c = library.Stream(non_blocking=True), library.Stream(non_blocking=True)
    with a:
        x = array(2 * MIB)
    a.kernel(writes=(x,))
    with contextlib.suppress(Exception):  # without a driver CuPy cannot finish it
        _ = x.__cuda_array_interface__ if how == "cuda array interface" else x.__dlpack__(stream=theirs.handle)
    gpu.hold(theirs)
    a.synchronize()
    gpu.launch(theirs, reads=[span(x)])
    where = span(x)[0]
    del x
    with c:
        y = array(2 * MIB)
    c.kernel(writes=(y,))
    assert span(y)[0] != where
    gpu.resume(theirs)


def test_with_the_watch_off_an_unseen_stream_would_be_overtaken(gpu: SimDevice, library: FakeCupy) -> None:
    """The control: this is what seeing is for."""
    device = SimDevice(memory=1 << 30)
    lib = FakeCupy(device)
    blind = Installation(Classes(lib.BaseStream, lib.Event, lib.current))
    pool = CachingAllocator(device, config=Config())
    blind.install(pool, current_stream=lib.current)
    blind.watch.stop()
    a, b, c = (lib.Stream(non_blocking=True) for _ in range(3))
    with a:
        x = array(2 * MIB)
    device.hold(b.ptr)
    b.kernel(reads=(x,))
    del x
    with c:
        y = array(2 * MIB)
    c.kernel(writes=(y,))
    device.resume(b.ptr)
    assert device.races
    del y
    blind.uninstall()
    pool.close()


def test_s05_streams_made_and_dropped_in_a_loop_give_their_memory_to_the_next(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    reserved = []
    for _ in range(200):
        with library.Stream(non_blocking=True) as stream:
            x = array(64 * MIB)
            stream.kernel(writes=(x,))
            del x
        stream.synchronize()
        del stream
        reserved.append(pool.reserved_bytes)
    assert reserved[-1] == reserved[5] <= 128 * MIB
    assert gpu.calls["cuStreamDestroy"] > 190


def test_r9_a_wrapper_of_anothers_stream_does_not_end_it(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    theirs = Stream(gpu)
    wrapper = library.Stream.from_external(theirs)
    with wrapper:
        x = array(2 * MIB)
    gpu.hold(theirs)
    where = span(x)[0]
    del x, wrapper
    gc.collect()
    pool.stats()
    gpu.launch(theirs, writes=[(where, 512)])  # the stream lives on, and may be given work by its owner
    with library.Stream() as other:
        y = array(2 * MIB)
        other.kernel(writes=(y,))
    assert span(y)[0] != where
    gpu.resume(theirs)


def test_s19_a_stream_first_met_while_it_captures_gates_everything_until_it_can_be_told(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    theirs = Stream(gpu)
    with gpu.program_scope():
        gpu.begin_capture(theirs.handle, "relaxed")
    before = dict(gpu.calls)
    wrapper = library.Stream.from_external(_Foreign(theirs.handle))
    assert gpu.calls["cuStreamGetId"] == before["cuStreamGetId"]  # it would have killed the capture
    with library.Stream() as a:
        x = array(2 * MIB)
        a.kernel(writes=(x,))
        where = span(x)[0]
        del x
    a.synchronize()
    with library.Stream():
        assert span(array(2 * MIB))[0] != where
    with gpu.program_scope():
        gpu.end_capture(theirs.handle)
    wrapper.use()
    library.stack()[-1] = library.null
    a.synchronize()
    with library.Stream():
        assert span(array(2 * MIB))[0] == where


class _Foreign:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


# -- learning ----------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["observing", "not observing"])
def observing(request: pytest.FixtureRequest, installation: Installation) -> Iterator[bool]:
    installation.watch.learning = request.param
    yield request.param


def test_r5_a_wait_for_a_recorded_event_lets_the_waiter_take_the_memory(
    start: Start, library: FakeCupy, gpu: SimDevice, observing: bool
) -> None:
    """Declared uses, so that one wait is enough: with assumed ones every stream seen would have to be waited for."""
    pool = start(uses="declared")
    a, b = library.Stream(non_blocking=True), library.Stream(non_blocking=True)
    with a:
        x = array(2 * MIB)
    gpu.hold(a.ptr)
    a.kernel(writes=(x,))
    where = span(x)[0]
    del x
    b.wait_event(a.record())
    with b:
        y = array(2 * MIB)
    b.kernel(writes=(y,))
    assert (span(y)[0] == where) == observing
    assert pool.stats().allocations["event_dependency"] == observing
    gpu.resume(a.ptr)


def test_r5_an_event_recorded_again_behind_our_back_teaches_nothing_false(
    start: Start, library: FakeCupy, gpu: SimDevice
) -> None:
    """S35: the wait that we add is for our own event, so what we believe stays true."""
    start(uses="declared")
    a, b, c = (library.Stream(non_blocking=True) for _ in range(3))
    with a:
        x = array(2 * MIB)
    gpu.hold(a.ptr)
    a.kernel(writes=(x,))
    del x
    event = a.record()
    with gpu.program_scope():
        gpu.event_record(event.ptr, c.ptr)  # by a caller from C
    b.wait_event(event)
    with b:
        y = array(2 * MIB)
    b.kernel(writes=(y,))  # the oracle knows what the program's event stands for now
    gpu.resume(a.ptr)


def test_r5_an_event_recorded_again_stands_for_its_last_record(start: Start, library: FakeCupy, gpu: SimDevice) -> None:
    start(uses="declared")
    a, b, c = (library.Stream(non_blocking=True) for _ in range(3))
    with a:
        x = array(2 * MIB)
    gpu.hold(a.ptr)
    a.kernel(writes=(x,))
    where = span(x)[0]
    del x
    event = library.Event()
    event.record(a)
    event.record(c)
    b.wait_event(event)
    with b:
        y = array(2 * MIB)
    b.kernel(writes=(y,))
    assert span(y)[0] != where
    gpu.resume(a.ptr)


def test_a_stream_synchronize_of_the_program_makes_memory_idle_without_a_driver_call_of_ours(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice, observing: bool
) -> None:
    streams = [library.Stream(non_blocking=True) for _ in range(3)]
    for stream in streams:
        with stream:
            stream.kernel(writes=(array(2 * MIB),))
    held = pool.reserved_bytes
    for stream in [*streams, library.null]:
        stream.synchronize()
    events = gpu.calls["cuEventRecord"]
    with library.Stream():
        array(2 * MIB)
    assert pool.reserved_bytes == held and gpu.calls["cuEventRecord"] == events


def test_an_event_synchronize_of_the_program_is_learnt_from_by_asking_our_own_event(
    start: Start, library: FakeCupy, gpu: SimDevice, observing: bool
) -> None:
    start(uses="declared")
    a, b = library.Stream(non_blocking=True), library.Stream(non_blocking=True)
    with a:
        x = array(2 * MIB)
    a.kernel(writes=(x,))
    del x
    event = a.record()
    queries = gpu.calls["cuEventQuery"]
    event.synchronize()
    assert (gpu.calls["cuEventQuery"] > queries) == observing
    with b:
        b.kernel(writes=(array(2 * MIB),))


def test_learning_adds_no_wait_that_the_program_did_not_ask_for(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    a, b = library.Stream(non_blocking=True), library.Stream(non_blocking=True)
    event = a.record()
    gpu.hold(a.ptr)
    a.kernel()
    b.wait_event(event)  # recorded before the kernel: over
    b.kernel()
    b.synchronize()
    gpu.resume(a.ptr)


# -- captures ----------------------------------------------------------------------------------------


def graph_of(stream: Any, *, keep: list[Any] | None = None) -> Any:
    """A graph that allocates a temporary and a result; returns it, and keeps the result."""
    with stream:
        stream.begin_capture()
        result = array(MIB)
        temporary = array(MIB)
        stream.kernel(writes=(temporary,))
        stream.kernel(reads=(temporary,), writes=(result,))
        del temporary
        graph = stream.end_capture()
    if keep is not None:
        keep.append(result)
    return graph


def test_r10_memory_of_a_graph_is_nobodys_while_the_graph_lives(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    s, t = library.Stream(non_blocking=True), library.Stream(non_blocking=True)
    graph = graph_of(s)
    private = pool.stats().private_bytes
    assert private >= MIB
    for stream in (s, t):
        with stream:
            for nbytes in (512, 1000, MIB, 3 * MIB):
                stream.kernel(writes=(array(nbytes),))
        graph.launch(stream)
    held = pool.reserved_bytes
    del graph
    gc.collect()
    gpu.run_until_idle()
    pool.stats()
    assert pool.stats().private_bytes == 0
    assert pool.stats().in_flight_bytes == 0
    with t:
        t.kernel(writes=(array(2 * MIB),))
    assert pool.reserved_bytes == held


def test_r10_a_graph_destroyed_while_its_replay_runs_keeps_its_memory_until_that_is_over(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    s, t, u = (library.Stream(non_blocking=True) for _ in range(3))
    graph = graph_of(s)
    gpu.hold(t.ptr)
    graph.launch(t)
    del graph
    gc.collect()
    for _ in range(4):
        with u:
            u.kernel(writes=(array(MIB),))
        pool.stats()
    gpu.resume(t.ptr)


@pytest.mark.parametrize("uses", ["auto", "declared"])
def test_r10_graphs_made_and_dropped_for_ever_leave_nothing(
    start: Start, library: FakeCupy, gpu: SimDevice, uses: str
) -> None:
    pool = start(uses=uses)
    captures, s = Registry.of(gpu).captures, library.Stream(non_blocking=True)
    for _ in range(50):
        graph = graph_of(s)
        graph.launch(s)
        s.synchronize()
        del graph
    assert len(captures.numbers) <= 8 and len(captures.gone) <= 2
    assert len(Registry.of(gpu).lines) <= 12
    assert pool.reserved_bytes <= 8 * MIB


def test_r10_a_temporary_freed_within_a_capture_serves_the_same_capture_again(
    pool: CachingAllocator, library: FakeCupy
) -> None:
    s = library.Stream()
    with s:
        s.begin_capture()
        addresses = set()
        for _ in range(20):
            x = array(MIB)
            s.kernel(writes=(x,))
            addresses.add(span(x)[0])
            del x
        graph = s.end_capture()
    assert len(addresses) == 1
    assert pool.reserved_bytes <= 4 * MIB
    del graph


def test_r10_two_streams_of_one_capture_do_not_share_freed_memory(pool: CachingAllocator, library: FakeCupy) -> None:
    s, t = library.Stream(non_blocking=True), library.Stream(non_blocking=True)
    with s:
        s.begin_capture()
        t.wait_event(s.record())  # t joins
        x = array(MIB)
        s.kernel(writes=(x,))
        where = span(x)[0]
        del x
        with t:
            y = array(MIB)
            t.kernel(writes=(y,))
        assert span(y)[0] != where
        s.wait_event(t.record())
        graph = s.end_capture()
    graph.launch(t)
    with t:
        t.kernel(writes=(array(MIB),))
    del graph, y


def test_r10_what_was_live_during_a_capture_may_be_the_graphs(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    """An input made before the capture, and one made meanwhile on another stream: dropped, and the graph launched."""
    s, t = library.Stream(non_blocking=True), library.Stream(non_blocking=True)
    with t:
        before = array(2 * MIB)
    with s:
        s.begin_capture()
        with t:
            meanwhile = array(2 * MIB)
        s.kernel(reads=(before, meanwhile))
        graph = s.end_capture()
    where = {span(before)[0], span(meanwhile)[0]}
    del before, meanwhile
    for stream in (s, t):
        with stream:
            held = [array(2 * MIB) for _ in range(3)]
            assert where.isdisjoint({span(a)[0] for a in held})
            for a in held:
                stream.kernel(writes=(a,))
        graph.launch(t)
        del held
    del graph
    gc.collect()
    for stream in (s, t, library.null):
        stream.synchronize()
    pool.stats()
    with t:
        again = {span(a)[0] for a in [array(2 * MIB) for _ in range(8)]}
    assert where <= again  # not lost


def test_r10_a_result_that_outlives_its_graph_waits_for_who_reads_it(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    s, t, u = (library.Stream(non_blocking=True) for _ in range(3))
    kept: list[Any] = []
    graph = graph_of(s, keep=kept)
    graph.launch(t)
    del graph
    gc.collect()
    gpu.hold(u.ptr)
    u.wait_event(t.record())
    u.kernel(reads=(kept[0],))
    where = span(kept[0])[0]
    kept.clear()
    t.synchronize()
    pool.stats()
    with t:
        y = array(MIB)
    t.kernel(writes=(y,))
    assert span(y)[0] != where
    gpu.resume(u.ptr)


def test_r10_a_capture_that_fails_gives_its_memory_back(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    s, t = library.Stream(non_blocking=True), library.Stream(non_blocking=True)
    with s:
        s.begin_capture()
        t.wait_event(s.record())
        s.kernel(writes=(array(MIB),))
        with pytest.raises(DriverError):
            s.end_capture()  # t was never joined back
    for stream in (s, t, library.null):
        stream.synchronize()
    assert pool.stats().private_bytes == pool.stats().in_flight_bytes == 0
    with s:
        s.kernel(writes=(array(MIB),))


def test_r10_a_capture_that_cannot_begin_changes_nothing(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    s = library.Stream()
    with pytest.raises(RuntimeError, match="legacy"):
        library.null.begin_capture()
    gpu.fail("cuStreamBeginCapture", error="CUDA_ERROR_UNKNOWN")
    with pytest.raises(DriverError):
        s.begin_capture()
    with s:
        s.kernel(writes=(array(MIB),))
    s.synchronize()
    library.null.synchronize()
    assert pool.stats().private_bytes == pool.stats().in_flight_bytes == 0


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("non_blocking", [True, False])
def test_s17_s18_a_capture_survives_whatever_the_pool_does_meanwhile(
    start: Start, library: FakeCupy, gpu: SimDevice, mode: str, non_blocking: bool
) -> None:
    pool = start(seal_frees=1, context_events=None)
    s, t = library.Stream(non_blocking=non_blocking), library.Stream(non_blocking=non_blocking)
    with s:
        x, y = array(2 * MIB), array(2 * MIB)
        s.kernel(writes=(x, y))
        s.begin_capture(mode)
        s.kernel(reads=(x,))
        del x  # freed on a capturing stream: parked
        with t:
            for nbytes in (512, MIB, 2 * MIB, 4 * MIB):
                t.kernel(writes=(array(nbytes),))
        pool.stats()
        pool.trim()
        del y
        temporary = array(4 * MIB)
        s.kernel(writes=(temporary,))
        graph = s.end_capture()  # raises if anything above had killed it
    graph.launch(t)
    with t:
        t.kernel(writes=(array(2 * MIB),))
    pool.check()
    del graph, temporary


def test_s18_a_capture_waits_until_other_threads_have_left_their_calls_on_its_stream(
    start: Start, library: FakeCupy, gpu: SimDevice
) -> None:
    """Thread 1 is inside our query of a stream when thread 2 begins to capture it: asking then would kill it."""
    pool = start(seal_frees=1)
    s, t = library.Stream(non_blocking=True), library.Stream(non_blocking=True)
    inside, begun = threading.Event(), threading.Event()

    def before(name: str) -> None:
        if name == "cuStreamQuery" and threading.current_thread() is asker:
            inside.set()
            begun.wait(0.2)  # the capture is not begun before we return, so this runs out

    def ask() -> None:
        with t:
            pool.stats()

    with s:
        s.kernel(writes=(array(MIB),))
    asker = threading.Thread(target=ask)
    gpu.before_call = before
    asker.start()
    assert inside.wait(10)
    with s:
        s.begin_capture("global")
        begun.set()
        s.kernel()
        asker.join()
        gpu.before_call = None
        graph = s.end_capture()
    del graph


def test_s19_the_first_use_of_the_pool_may_be_within_a_capture(pool: CachingAllocator, library: FakeCupy) -> None:
    s = library.Stream()
    with s:
        s.begin_capture("global")
        x = array(MIB)
        s.kernel(writes=(x,))
        graph = s.end_capture()
    graph.launch(s)
    pool.check()
    del graph, x


def test_r6_the_whole_context_is_marked_only_while_nothing_captures(
    pool: CachingAllocator,
    library: FakeCupy,
    gpu: SimDevice,
    monkeypatch: pytest.MonkeyPatch,
    installation: Installation,
) -> None:
    known = [True]
    monkeypatch.setattr(installation.watch, "_captures_known", lambda: known[0])
    s, t = library.Stream(non_blocking=True), library.Stream(non_blocking=True)

    def churn() -> int:
        before = gpu.calls["cuCtxRecordEvent"]
        for i in range(200):
            with (s, t)[i % 2] as stream:
                stream.kernel(writes=(array(512 * (1 + i % 50)),))
        return gpu.calls["cuCtxRecordEvent"] - before

    assert churn() > 0
    with library.Stream() as c:
        c.begin_capture("global")
        assert churn() == 0
        graph = c.end_capture()
    assert churn() > 0
    known[0] = False  # another library that can capture has been imported
    assert churn() == 0
    known[0] = True
    with gpu.program_scope():
        gpu.begin_capture(t.ptr, "relaxed")  # by a caller that no hook reports
    with s:
        for i in range(200):
            s.kernel(writes=(array(512 * (1 + i % 50)),))
    with gpu.program_scope():
        gpu.end_capture(t.ptr)  # would raise if it had been killed
    del graph


def test_a_graph_whose_end_cannot_be_learnt_keeps_its_memory_for_ever(
    pool: CachingAllocator, library: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a CuPy that keeps no list of host functions with the graph."""

    class Silent(Graph):
        def __init__(self, graph: Any, host_funcargs: list[Any]) -> None:
            super().__init__(graph, [])

    monkeypatch.setattr("tests.unit.integrations.cupy.fakes.Graph", Silent)
    s = library.Stream(non_blocking=True)
    graph = graph_of(s)
    del graph
    gc.collect()
    for stream in (s, library.null):
        stream.synchronize()
    assert pool.stats().private_bytes >= MIB
    with s:
        s.kernel(writes=(array(MIB),))


def test_arrays_are_cupys(pool: CachingAllocator) -> None:
    assert isinstance(array(512), cupy.ndarray)


def test_a_stream_that_has_been_seen_is_not_looked_up_again_when_it_becomes_current(
    pool: CachingAllocator, library: FakeCupy, installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, handles = library.Stream(non_blocking=True), library.ExternalStream
    looked_up: list[Any] = []
    see = installation.watch.see

    def look_up(stream: Any) -> Any:
        looked_up.append(stream)
        return see(stream)

    monkeypatch.setattr(installation.watch, "see", look_up)
    with old:
        pass
    old.use()
    assert looked_up == []
    new = library.Stream(non_blocking=True)
    borrowed = handles(new.ptr, -1)  # owns nothing: it is asked each time (R9)
    for stream in (borrowed, library.ptds, borrowed):
        with stream:
            pass
    assert looked_up == [new, borrowed, borrowed, library.ptds, borrowed]
    library.stack()[:] = [library.null]


def test_what_is_noted_on_a_stream_is_believed_of_that_stream_only(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    """`copy.copy` copies it as well."""
    first, second = library.Stream(non_blocking=True), library.Stream(non_blocking=True)
    with first:
        one = cupy.empty(1000, dtype="u1")
    second._weir = first._weir
    with second:
        two = cupy.empty(1000, dtype="u1")
    owners = Registry.of(gpu).owners
    lines = [array_.data.mem.lease._block.owner for array_ in (one, two)]
    assert lines == [owners[id(first)], owners[id(second)]] and lines[0] is not lines[1]
    assert second._weir is lines[1]


def test_a_method_kept_from_before_the_others_were_put_back_still_works(
    start: Start, library: FakeCupy, installation: Installation
) -> None:
    stream = library.Stream(non_blocking=True)
    start()
    enter = stream.__enter__
    later = library.Stream(non_blocking=True)
    installation.uninstall()
    assert not installation.watch.on and not hasattr(library.BaseStream, "_weir")
    del later
    unseen = library.Stream(non_blocking=True)
    assert enter() is stream and enter.__func__(unseen) is unseen
    library.stack()[:] = [library.null]


def test_a_stream_that_nothing_can_be_noted_on_is_looked_up_each_time(
    start: Start, library: FakeCupy, gpu: SimDevice
) -> None:
    class Slotted(library.Stream):  # type: ignore[name-defined, misc]  # a class made at run time
        def __setattr__(self, name: str, value: object) -> None:
            if name == "_weir":
                raise AttributeError(name)
            super().__setattr__(name, value)

    start()
    stream = Slotted(non_blocking=True)
    for _ in range(2):
        with stream:
            made = cupy.empty(1000, dtype="u1")
        assert made.data.mem.lease._block.owner is Registry.of(gpu).owners[id(stream)]

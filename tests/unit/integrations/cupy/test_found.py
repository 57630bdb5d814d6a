"""Mistakes that were found by attacking the hook: each as a test of its whole kind."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import weakref
from typing import Any

import cupy
import pytest

from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.errors import Reentered
from allocator.integrations.cupy import library as real
from allocator.integrations.cupy.installation import Installation
from allocator.integrations.cupy.lease import HOOKS
from allocator.integrations.cupy.watch import Classes
from allocator.streams import Registry
from tests.unit.integrations.cupy.conftest import Start
from tests.unit.integrations.cupy.fakes import FakeCupy, array, span

MIB = 1 << 20


# -- handles that nobody here owns -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["_BaseStream", "ExternalStream", "subclass"])
def test_r9_an_object_that_only_wraps_a_handle_keeps_no_stream_alive(
    start: Start, library: FakeCupy, gpu: SimDevice, kind: str
) -> None:
    """CuPy itself makes such an object for whoever takes an array over; the stream behind it may be gone soon after."""
    pool = start(seal_frees=1)
    a = library.Stream(non_blocking=True)
    with gpu.program_scope():
        handle = gpu.stream_create(non_blocking=True, priority=0)
    made = {"_BaseStream": library.BaseStream, "ExternalStream": library.ExternalStream}
    consumer = made.get(kind, type("Mine", (library.ExternalStream,), {}))(handle, -1)
    with a:
        x = array(4 * MIB)
        consumer.wait_event(a.record())
    del x, consumer
    with gpu.program_scope():
        gpu.stream_destroy(handle)
    pool.stats()
    for i in range(20):
        with (a, library.null)[i % 2] as stream:
            stream.kernel(writes=(array(512 * (i + 1)),))
    assert gpu.violations == []


def test_r9_a_borrowed_stream_is_sealed_while_its_handle_is_given(
    start: Start, library: FakeCupy, gpu: SimDevice
) -> None:
    """Without context events: what it may have used is free again after the program has used it once more."""
    pool = start(context_events=False)
    theirs = Stream(gpu)
    borrowed = library.ExternalStream(theirs.handle)
    a = library.Stream(non_blocking=True)
    with a:
        x = array(2 * MIB)
    borrowed.wait_event(a.record())
    gpu.launch(theirs, reads=[span(x)])
    where = span(x)[0]
    del x
    pool.stats()
    a.synchronize()
    gpu.run_until_idle()
    borrowed.wait_event(a.record())
    with library.Stream(non_blocking=True):
        assert span(array(2 * MIB))[0] == where


# -- finalisers and signal handlers inside our own sections ------------------------------------------------


@pytest.mark.parametrize("what", ["synchronize", "event synchronize", "record", "wait", "with", "stream", "free"])
def test_s16_a_finaliser_that_runs_in_our_own_locked_section_finishes(
    start: Start, library: FakeCupy, gpu: SimDevice, what: str
) -> None:
    """The collector may run anywhere, also there; a plain lock would wait for itself."""
    pool = start(seal_frees=2)
    done: list[str] = []

    class Worker:
        def __init__(self) -> None:
            self.stream = library.Stream(non_blocking=True)
            self.event = self.stream.record()
            self.array = array(512)
            self.me = self

        def __del__(self) -> None:
            if what == "synchronize":
                self.stream.synchronize()
            elif what == "event synchronize":
                self.event.synchronize()
            elif what == "record":
                self.stream.record()
            elif what == "wait":
                self.stream.wait_event(self.event)
            elif what == "with":
                with self.stream:
                    pass
            elif what == "stream":
                library.Stream()
            else:
                self.array.data.mem.free()
            done.append(what)

    streams = [library.Stream(non_blocking=True) for _ in range(2)]
    before = gc.get_threshold()
    gc.set_threshold(7, 2, 2)
    try:
        for i in range(450):
            if i % 3 == 0:
                Worker()
            with streams[i % 2] as stream:
                stream.kernel(writes=(array(512 * (1 + i % 50)),))
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert len(done) == 150
    assert pool.allocated_bytes == 0


@pytest.mark.parametrize("which", ["pool", "timelines"])
def test_s16_memory_asked_for_inside_our_own_section_comes_without_a_pool(
    pool: CachingAllocator, library: FakeCupy, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    monkeypatch.setattr(real, "memory_without_a_pool", lambda nbytes: cupy.cuda.UnownedMemory(1 << 40, nbytes, None, 0))
    stream = library.Stream()
    lock = pool._lock if which == "pool" else pool._registry.lock
    with stream:
        array(4 * MIB)
        with lock:
            inner = array(3 * MIB)  # inside the timelines' as well: another thread may hold the pool's, and want them
            assert inner.data.ptr == 1 << 40
            del inner
            late = library.Stream()
        assert array(5 * MIB).data.mem.pool is pool  # no hit: this memory may come from another stream
    line = pool._registry.owners[id(late)]  # made where it could not be seen; seen since
    assert line.owner is late
    pool.check()


def test_s16_a_call_that_cannot_be_served_there_says_so(pool: CachingAllocator, gpu: SimDevice) -> None:
    stream = Stream(gpu)
    with pool._lock:
        for call in (pool.stats, pool.trim, pool.check, pool.settle, lambda: pool.allocate(512, stream=stream)):
            with pytest.raises(Reentered, match="finaliser or a signal handler"):
                call()
    pool.check()


# -- uninstalling, freezing ----------------------------------------------------------------------------------


def test_r10_a_graph_that_outlives_the_installation_is_watched_on(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice, installation: Installation
) -> None:
    s = library.Stream(non_blocking=True)
    with s:
        s.begin_capture()
        x = array(4 * MIB)
        s.kernel(writes=(x,))
        del x
        graph = s.end_capture()
    installation.uninstall()
    assert installation.watch.on
    t = library.Stream(non_blocking=True)
    gpu.hold(t.ptr)
    graph.launch(t)
    del graph
    gc.collect()
    s.synchronize()
    pool.stats()
    assert pool.trim() == 0
    gpu.resume(t.ptr)
    gpu.run_until_idle()


def test_r3_a_freeze_before_there_were_streams_hides_none(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """Python 3.12 and later freeze what they have when they start, so there always is something frozen."""
    gc.freeze()
    try:
        start: Start = request.getfixturevalue("start")
        library: FakeCupy = request.getfixturevalue("library")
        with caplog.at_level(logging.WARNING, "allocator"):
            pool = start(uses="assumed", context_events=False)
    finally:
        gc.unfreeze()
    assert "gc.freeze()" not in caplog.text
    with library.Stream(non_blocking=True) as a:
        where = span(array(2 * MIB))[0]
    a.synchronize()
    with library.Stream(non_blocking=True):
        assert span(array(2 * MIB))[0] == where  # nobody unknown keeps it
    assert pool.stats().allocations["new_memory"] == 1


def test_a_freeze_asks_who_names_the_streams_and_not_cupy_which_may_have_no_driver(
    library: FakeCupy, gpu: SimDevice, caplog: pytest.LogCaptureFixture
) -> None:
    def no_driver() -> object:
        raise RuntimeError("cudaErrorInsufficientDriver")

    installation = Installation(Classes(library.BaseStream, library.Event, no_driver))
    lines = Registry.of(gpu).lines
    with CachingAllocator(gpu, config=Config()) as pool:
        gc.freeze()
        try:
            with caplog.at_level(logging.WARNING, "allocator"):
                installation.install(pool, current_stream=library.current)
        finally:
            gc.unfreeze()
            installation.uninstall()
    assert "gc.freeze()" in caplog.text
    assert "unknown" in [line.name for line in lines.values()]


def test_r3_streams_that_a_freeze_hides_gate_everything(
    library: FakeCupy, gpu: SimDevice, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    hidden = library.Stream(non_blocking=True)
    gc.freeze()
    try:
        with caplog.at_level(logging.WARNING, "allocator"):
            start(context_events=False)
    finally:
        gc.unfreeze()
    assert "gc.freeze()" in caplog.text
    a, c = library.Stream(non_blocking=True), library.Stream(non_blocking=True)
    with a:
        x = array(2 * MIB)
    a.kernel(writes=(x,))
    gpu.hold(hidden.ptr)
    hidden.kernel(reads=(x,))
    where = span(x)[0]
    del x
    a.synchronize()
    with c:
        y = array(2 * MIB)
    c.kernel(writes=(y,))
    assert span(y)[0] != where
    gpu.resume(hidden.ptr)


# -- R3: an owner that is idle orders nothing ----------------------------------------------------------------


@pytest.mark.parametrize("how", ["the owner waited for it", "the owner would be made to wait"])
def test_r3_memory_made_on_an_idle_stream_may_be_used_elsewhere_without_a_wait(
    start: Start, library: FakeCupy, gpu: SimDevice, how: str
) -> None:
    """With a pool that never crosses streams it is new, or the owner's own: nothing is behind it.  So here."""
    pool = start(**({"limit": 8 * MIB, "wait_timeout": 0.0} if "made" in how else {"seal_frees": 1}))
    n, b, c = (library.Stream(non_blocking=True) for _ in range(3))
    with c:
        x = array(8 * MIB)
    gpu.hold(c.ptr)
    c.kernel(writes=(x,))
    del x
    y = None
    if "made" not in how:
        for stream in (b, c, library.null):
            n.wait_event(stream.record())
    with n:
        try:
            y = array(8 * MIB)
        except cupy.cuda.memory.OutOfMemoryError:
            assert "made" in how
    if y is not None:
        b.kernel(writes=(y,))
        assert pool.stats().allocations["event_dependency"] == 0
    gpu.resume(c.ptr)
    gpu.run_until_idle()
    assert gpu.races == []
    for stream in (b, c, n, library.null):
        stream.synchronize()
    del y
    with n:
        n.kernel(writes=(array(8 * MIB),))


def test_r3_what_another_library_left_on_the_stream_is_not_the_owners_own(
    start: Start, library: FakeCupy, gpu: SimDevice
) -> None:
    pool = start()
    n, b = library.Stream(non_blocking=True), library.Stream(non_blocking=True)
    native = pool.allocate(2 * MIB, stream=n)
    gpu.hold(n.ptr)
    n.kernel(writes=((native.ptr, native.size),))
    where = native.ptr
    native.close()
    with n:
        y = array(2 * MIB)
    b.kernel(writes=(y,))  # nothing of CuPy's was ever on n
    assert span(y)[0] != where
    gpu.resume(n.ptr)


# -- leaks ----------------------------------------------------------------------------------------------------


def test_weights_that_live_through_many_captures_remember_few_of_them(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    weights = [array(4096) for _ in range(10)]
    s = library.Stream(non_blocking=True)
    for _ in range(100):
        with s:
            s.begin_capture()
            s.kernel(reads=tuple(weights))
            graph = s.end_capture()
        graph.launch(s)
        s.synchronize()
        del graph
    users = [len(w.data.mem.lease._block.users) for w in weights]
    assert max(users) <= 16
    weights.clear()
    for stream in (s, library.null):
        stream.synchronize()
    assert pool.stats().in_flight_bytes == 0


def test_a_stream_that_holds_an_array_made_on_itself_goes_with_the_program(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    gone = []
    for _ in range(20):
        s = library.Stream(non_blocking=True)
        with s:
            s.buffer = array(4 * MIB)
        gone.append(weakref.ref(s))
        del s
        pool.stats()
    gc.collect()
    pool.stats()
    assert sum(ref() is not None for ref in gone) <= 2
    pool.stats()
    assert pool.reserved_bytes <= 32 * MIB


# -- captures by handle, and what the library itself calls current -----------------------------------------------


def test_r10_a_capture_by_handle_is_respected_and_its_memory_kept(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    s, t = library.Stream(non_blocking=True), library.Stream(non_blocking=True)
    with s:
        library.runtime.streamBeginCapture(s.ptr, "global")
        x = array(MIB)
        s.kernel(writes=(x,))
        with t:
            t.kernel(writes=(array(2 * MIB),))
        pool.stats()
        where = span(x)[0]
        del x
        graph = library.runtime.streamEndCapture(s.ptr)
    for stream in (s, t):
        with stream:
            held = [array(MIB) for _ in range(3)]
            assert where not in [span(a)[0] for a in held]
            stream.kernel(writes=tuple(held))
        graph.launch(stream.ptr)
        del held
    with pytest.raises(Exception, match=r"CAPTURE|ILLEGAL"):
        library.runtime.streamEndCapture(s.ptr)
    library.runtime.streamBeginCapture(s.ptr, "global")
    with pytest.raises(Exception, match="already capturing"):
        library.runtime.streamBeginCapture(s.ptr, "global")
    library.runtime.streamEndCapture(s.ptr)
    graph.close()


def test_r10_two_threads_capture_their_per_thread_streams_by_the_same_handle(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    captures = Registry.of(gpu).captures
    both, first_ended = threading.Barrier(2, timeout=10), threading.Event()
    seen: list[int] = []

    def work(first: bool) -> None:
        library.ptds.use()
        library.runtime.streamBeginCapture(2, "thread_local")
        both.wait()
        if not first:
            assert first_ended.wait(10)
            seen.append(len(captures.active))
        graph = library.runtime.streamEndCapture(2)
        if first:
            first_ended.set()
        graph.close()

    threads = [threading.Thread(target=work, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1] and captures.active == {}


def test_r5_an_injected_stream_is_for_memory_only(
    installation: Installation, library: FakeCupy, gpu: SimDevice
) -> None:
    """`Event.record()` goes where CuPy's own current stream is, whatever memory is asked for on."""
    other = library.Stream(non_blocking=True)
    pool = CachingAllocator(gpu)
    installation.install(pool, current_stream=lambda: other)
    t = library.Stream(non_blocking=True)
    gpu.hold(other.ptr)
    other.kernel()
    event = library.Event()
    with t:
        event.record()
    library.null.wait_event(event)
    library.null.kernel()
    library.null.synchronize()  # would wait for the held stream, if ours had been put there
    gpu.resume(other.ptr)
    installation.uninstall()
    pool.close()


def test_a_memory_hook_that_is_entered_is_noticed(
    pool: CachingAllocator, monkeypatch: pytest.MonkeyPatch, library: FakeCupy
) -> None:
    monkeypatch.setattr(HOOKS, "seen", False)
    heard: list[Any] = []

    class Listener(cupy.cuda.MemoryHook):  # type: ignore[misc]  # CuPy's classes have no types
        name = "listener"

        def malloc_postprocess(self, **named: int) -> None:
            heard.append(named["size"])

    with Listener():
        array(700)
    assert heard == [700]


def test_a_memory_hook_may_be_entered_while_another_thread_installs(
    pool: CachingAllocator, installation: Installation
) -> None:
    """By a finaliser inside the pool's section, or in a child after a fork: so it waits for nobody."""

    class Quiet(cupy.cuda.MemoryHook):  # type: ignore[misc]  # CuPy's classes have no types
        name = "quiet"

    def enter() -> None:
        with Quiet():
            pass

    with installation._lock:
        thread = threading.Thread(target=enter, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    assert HOOKS.seen and installation.hook.alone is None and installation.hook.only is not None


def test_whoever_stores_last_a_hook_that_was_noticed_stays_noticed(
    pool: CachingAllocator, installation: Installation
) -> None:
    hook = installation.hook
    route = hook.only
    assert route is not None and hook.alone is route
    HOOKS.seen = True
    hook.serve(route)
    assert hook.alone is None and hook.only is route
    hook.serve(None)
    assert hook.alone is None and hook.only is None


def test_after_memory_hooks_memory_still_comes_from_the_only_pool(
    pool: CachingAllocator, library: FakeCupy, monkeypatch: pytest.MonkeyPatch, installation: Installation
) -> None:
    """Whatever device a stream object names; and the stream is asked for once."""
    asked: list[object] = []

    def current() -> object:
        asked.append(None)
        return stream

    stream = library.Stream()
    stream.device_id = 3
    monkeypatch.setattr(installation.hook, "current_stream", current)

    class Quiet(cupy.cuda.MemoryHook):  # type: ignore[misc]  # CuPy's classes have no types
        name = "quiet"

    with Quiet():
        assert array(512).data.mem.pool is pool and len(asked) == 1
    assert array(512).data.mem.pool is pool and len(asked) == 2


@pytest.mark.source
def test_s19_a_capture_that_begins_while_care_is_given_up_is_seen(
    pool: CachingAllocator, library: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread has seen that there is nothing to look out for; before it says so, another begins a capture."""
    stream, other = library.Stream(), library.Stream()
    with stream:
        array(4096)
    other.begin_capture()
    other.end_capture()  # leaves care behind until somebody allocates
    assert pool.front.careful
    look = pool._wants_care
    read, begun, given_up, taken = (threading.Event() for _ in range(4))
    looks, owners = [0], []

    def slowly() -> bool:
        if threading.current_thread() is not resetter:
            return look()
        looks[0] += 1
        if looks[0] == 1:
            found = look()
            read.set()
            begun.wait(0.5)
            return found
        given_up.set()
        taken.wait(0.5)
        return look()

    def capture() -> None:
        read.wait(30)
        with stream:
            stream.begin_capture()
            begun.set()
            given_up.wait(30)
            owners.append((pool.front.careful, array(4096).data.mem.lease._block.owner))
            taken.set()
            resetter.join()
            stream.end_capture()

    monkeypatch.setattr(pool, "_wants_care", slowly)
    resetter = threading.Thread(target=lambda: array(512))
    capturer = threading.Thread(target=capture)
    resetter.start()
    capturer.start()
    resetter.join()
    capturer.join()
    ((careful, owner),) = owners
    assert looks == [2] and careful and owner is not stream_line(pool, stream)


def stream_line(pool: CachingAllocator, stream: Any) -> Any:
    return pool._registry.owners[id(stream)]


@pytest.mark.source
@pytest.mark.parametrize("fresh", [False, True], ids=["hit", "new memory"])
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "plain"])
def test_ctrl_c_at_any_line_of_an_allocation_loses_nothing(
    pool: CachingAllocator, library: FakeCupy, fresh: bool, watched: bool
) -> None:
    """An exception is raised at every line of the hook in turn, as a signal handler would."""
    import sys

    from allocator.integrations.cupy import hook, lease
    from allocator.integrations.cupy import memory as held

    stream, at = library.Stream(), 0
    if not watched:
        pool.announce = None

    class Stop(BaseException):
        pass

    with stream:
        array(4096)
        while True:
            at += 1
            lines = 0

            def trace(frame: Any, event: str, arg: Any, at: int = at) -> Any:
                nonlocal lines
                if frame.f_code.co_filename not in (hook.__file__, lease.__file__, held.__file__):
                    return None
                if event == "line":
                    lines += 1
                    if lines == at:
                        raise Stop
                return trace

            before = sys.gettrace()  # that of whoever measures what the tests cover
            sys.settrace(trace)
            try:
                a = array(4096 * (1 + at) if fresh else 4096)
            except Stop:
                a = None
            finally:
                sys.settrace(before)
            done = lines < at
            del a
            gc.collect()
            assert pool.allocated_bytes == 0, f"line {at}"
            pool.check()
            if done:
                break
    assert at > 10


def test_ctrl_c_at_any_place_of_giving_memory_back_loses_nothing(pool: CachingAllocator, library: FakeCupy) -> None:
    """`Memory.free()`: whatever has not been queued by then is queued when the memory goes."""
    interrupted = 0
    for nth in range(1, 40):
        with library.Stream():
            held = array(4096)
        memory, passed = held.data.mem, 0

        def strike(frame: object, event: str, arg: object, nth: int = nth) -> None:
            nonlocal passed
            passed += event in ("call", "c_return")
            if passed == nth:
                raise KeyboardInterrupt

        before = sys.getprofile()
        sys.setprofile(strike)
        try:
            memory.free()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.setprofile(before)
        del held, memory
        gc.collect()
        assert pool.stats().allocated_bytes == 0, f"place {nth}"
        if passed < nth:
            break
    assert interrupted > 2

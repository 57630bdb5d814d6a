"""Streams and events, ours and everybody else's, on every device."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import allocator
from allocator import CachingAllocator, Event, Stream, StreamClosed, current_stream
from allocator.devices import LEGACY, PER_THREAD
from tests.conformance.conftest import MIB, Bench


def _make(bench: Bench, non_blocking: bool = True) -> int:
    with bench.device.scope():
        return bench.device.stream_create(non_blocking=non_blocking, priority=0)


def _destroy(bench: Bench, handle: int) -> None:
    with bench.device.scope():
        bench.device.stream_destroy(handle)


class Speaks:
    """cuda.core's way."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


class SpeaksAsProperty:
    def __init__(self, handle: int) -> None:
        self.__cuda_stream__ = (0, handle)


class Ptr:
    """CuPy's way."""

    def __init__(self, handle: int) -> None:
        self.ptr = handle


class CudaStream:
    """PyTorch's way."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class Value:
    """RMM's and Numba's way."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def value(self) -> int:
        return self._handle


SHAPES = [Speaks, SpeaksAsProperty, Ptr, CudaStream, Value, int]


@pytest.mark.parametrize("shape", SHAPES)
def test_streams_of_every_shape_are_the_same_stream(bench: Bench, pool: CachingAllocator, shape: Any) -> None:
    ours = Stream(bench.device)
    theirs = shape(ours.handle)
    a = pool.allocate(MIB, stream=ours)
    ptr = a.ptr
    a.close()
    with pool.allocate(MIB, stream=theirs) as b:
        assert b.ptr == ptr
        assert b.stream.handle == ours.handle and b.stream.id == ours.id
        assert b.stream == ours
    assert pool.stats().allocations["same_stream"] == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_a_foreign_stream_object_may_be_declared_and_named(bench: Bench, pool: CachingAllocator, shape: Any) -> None:
    handle = _make(bench)
    owner, foreign = Stream(bench.device), shape(handle)
    a = pool.allocate(MIB, stream=owner)
    a.record_stream(foreign)
    a.close()
    b = pool.allocate(MIB, stream=owner)
    b.close(foreign)
    assert pool.stats().frees["cross_stream"] == 2
    bench.run_dry()
    pool.allocate(MIB, stream=foreign).close(foreign)
    pool.settle()
    assert pool.stats().in_flight_bytes == 0  # the handle lives on: such an object stands for it


def test_a_bare_handle_and_closes_that_name_it(bench: Bench, pool: CachingAllocator) -> None:
    handle = _make(bench)
    live = [pool.allocate(MIB, stream=handle) for _ in range(3)]
    assert all(a.stream.handle == handle for a in live)
    for a in live:
        a.close(handle)
    _destroy(bench, handle)
    bench.run_dry()
    assert pool.stats().in_flight_bytes == 0


@pytest.mark.parametrize("null", [0, 1])
def test_zero_and_one_are_the_legacy_stream(bench: Bench, pool: CachingAllocator, null: int) -> None:
    a = pool.allocate(MIB, stream=null)
    assert a.stream == Stream.legacy(bench.device) and a.stream.handle == LEGACY
    ptr = a.ptr
    a.close()
    assert pool.allocate(MIB).ptr == ptr


def test_two_is_the_threads_own(bench: Bench, pool: CachingAllocator) -> None:
    a = pool.allocate(MIB, stream=2)
    assert a.stream.handle == PER_THREAD
    mine = a.stream.id
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(Stream.per_thread(bench.device).id))
    thread.start()
    thread.join()
    assert others[0] != mine == Stream.per_thread(bench.device).id
    a.close()
    assert Stream.per_thread(bench.device).query() in (True, False)


def test_our_streams_speak_the_protocol(bench: Bench) -> None:
    s = Stream(bench.device)
    assert s.__cuda_stream__() == (0, s.handle)
    assert Stream.legacy(bench.device).__cuda_stream__() == (0, 1)
    assert Stream.per_thread(bench.device).__cuda_stream__() == (0, 2)


def test_a_stream_says_what_it_is(bench: Bench) -> None:
    s = Stream(bench.device, non_blocking=False, name="x" * 50)
    assert s.handle > 2 and s.id > 0 and not s.closed and s.device is bench.device
    assert s.name == "x" * 40
    assert Stream(bench.device).id != s.id
    assert s == s and s != Stream(bench.device) and len({s, s}) == 1
    assert bench.device.label in repr(s)
    s.close()
    s.close()
    assert s.closed and "closed" in repr(s)
    for call in (lambda: s.handle, s.record_event, s.synchronize, s.query, lambda: s.wait_stream(Stream(bench.device))):
        with pytest.raises(StreamClosed):
            call()


def test_legacy_and_per_thread_never_end(bench: Bench) -> None:
    for s in (Stream.legacy(bench.device), Stream.per_thread(bench.device)):
        s.close()
        assert not s.closed or s.timeline is None
        assert isinstance(s.query(), bool)


def test_priorities_lie_in_the_devices_range(bench: Bench) -> None:
    with bench.device.scope():
        least, greatest = bench.device.stream_priority_range()
    Stream(bench.device, priority=greatest).close()
    Stream(bench.device, priority=least).close()
    for wrong in (greatest - 1, least + 1):
        with pytest.raises(ValueError, match="priority"):
            Stream(bench.device, priority=wrong)
    for bad in (True, 1.0, "0"):
        with pytest.raises(TypeError, match="priority"):
            Stream(bench.device, priority=bad)  # type: ignore[arg-type]


def test_a_stream_is_busy_until_its_work_is_over(bench: Bench) -> None:
    s = Stream(bench.device)
    assert s.query()
    bench.work(s, 20)
    assert not s.query()
    s.synchronize()
    assert s.query()


def test_the_current_stream_belongs_to_a_thread(bench: Bench, pool: CachingAllocator) -> None:
    device = bench.device
    outer, inner = Stream(device), Stream(device)
    assert current_stream(device) == Stream.legacy(device)
    seen: list[Stream] = []
    with allocator.stream(outer) as got:
        assert got is outer and current_stream(device) is outer
        assert pool.allocate(MIB).stream is outer
        with allocator.stream(inner):
            assert current_stream(device) is inner
        assert current_stream(device) is outer
        thread = threading.Thread(target=lambda: seen.append(current_stream(device)))
        thread.start()
        thread.join()
    assert seen == [Stream.legacy(device)]
    assert current_stream(device) == Stream.legacy(device)
    with pytest.raises(ZeroDivisionError), allocator.stream(outer):
        raise ZeroDivisionError
    assert current_stream(device) == Stream.legacy(device)
    with pytest.raises(TypeError), allocator.stream(5):
        pass


def test_making_a_stream_current_orders_nothing(bench: Bench, pool: CachingAllocator) -> None:
    a, b = Stream(bench.device), Stream(bench.device)
    x = pool.allocate(4 * MIB, stream=a)
    bench.work(a, 50)
    x.close()
    pool.check()
    with allocator.stream(a), allocator.stream(b):
        y = pool.allocate(4 * MIB)
    assert y.ptr != x.ptr
    y.close()


def test_a_wait_for_an_event_orders(bench: Bench) -> None:
    a, b = Stream(bench.device), Stream(bench.device)
    bench.work(a, 20)
    event = a.record_event()
    b.wait_event(event)
    bench.work(b, 0.01)
    assert not b.query() and not event.query()
    event.synchronize()
    assert event.query()
    b.synchronize()


@pytest.mark.parametrize("shape", [None, Speaks, Ptr, int])
def test_a_wait_for_a_stream_orders(bench: Bench, shape: Any) -> None:
    a, b = Stream(bench.device), Stream(bench.device)
    bench.work(a, 20)
    b.wait_stream(a if shape is None else shape(a.handle))
    bench.work(b, 0.01)
    assert not b.query()
    a.synchronize()
    b.synchronize()
    assert b.query()


def test_an_event_never_recorded_is_over(bench: Bench) -> None:
    event = Event(bench.device)
    assert event.query() and event.handle > 0
    event.synchronize()
    Stream(bench.device).wait_event(event)


def test_times_between_events(bench: Bench) -> None:
    s = Stream(bench.device)
    start, end = Event(bench.device, timing=True), Event(bench.device, timing=True)
    start.record(s)
    bench.work(s, 10)
    end.record(s)
    end.synchronize()
    assert 9 <= start.elapsed_time(end) <= 500
    with pytest.raises(ValueError, match="timing=True"):
        start.elapsed_time(Event(bench.device))


def test_an_event_is_recorded_on_the_current_stream_by_default(bench: Bench) -> None:
    s = Stream(bench.device)
    bench.work(s, 20)
    event = Event(bench.device)
    with allocator.stream(s):
        event.record()
    assert not event.query()
    other = Stream(bench.device)
    with allocator.stream(other):
        event.wait()
    bench.work(other, 0.01)
    assert not other.query()
    event.synchronize()


def test_events_and_streams_come_and_go_without_leaving_anything(bench: Bench) -> None:
    for _ in range(50):
        s = Stream(bench.device)
        event = s.record_event()
        Stream(bench.device).wait_event(event)
    del s, event
    with bench.pool() as pool:
        pool.stats()
        assert pool.stats().streams < 60


def test_a_closed_foreign_stream_object_is_refused(bench: Bench, pool: CachingAllocator) -> None:
    class Closed:
        handle = None

    with pytest.raises((TypeError, ValueError)):
        pool.allocate(MIB, stream=Closed())

    class Broken:
        def __cuda_stream__(self) -> int:
            return 5

    with pytest.raises(TypeError, match="__cuda_stream__"):
        pool.allocate(MIB, stream=Broken())

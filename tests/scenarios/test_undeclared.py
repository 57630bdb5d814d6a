"""S33, S35: programs that declare nothing, and events that are not what they were."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from allocator import CachingAllocator, Config, Event, SimDevice, Stream
from tests.scenarios.lab import MIB, Lab, overlap, read, span, used, write

KINDS = [True, False]  # non_blocking
SIZE = 2 * MIB  # a whole piece from the driver: nothing idle is left beside it


def _program(gpu: SimDevice, pool: CachingAllocator, *, assumed: bool, kind: bool) -> tuple[bool, Stream]:
    """Made on A, read on B, dropped; then A waits for B; then C asks.  Did C get the bytes?"""
    a, b, c = (Stream(gpu, non_blocking=kind) for _ in range(3))
    x = pool.allocate(SIZE, stream=a, assumed=assumed)
    write(gpu, a, x)
    b.wait_stream(a)
    gpu.hold(b)
    read(gpu, b, x)
    where = span(x)
    del x
    event = b.record_event()
    a.wait_event(event)
    c.wait_event(_of_a_before(gpu, a))
    y = pool.allocate(SIZE, stream=c, assumed=assumed)
    write(gpu, c, y)
    return overlap(y, where), b


def _of_a_before(gpu: SimDevice, a: Stream) -> Event:
    """An event of another stream that is long over: C's wait for it teaches nothing about B."""
    return Event(gpu)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("uses", ["auto", "assumed"])
@pytest.mark.parametrize("context_events", [False, True])
def test_s33_an_undeclared_read_elsewhere_keeps_a_third_stream_away(
    lab: Lab, gpu: SimDevice, kind: bool, uses: str, context_events: bool
) -> None:
    pool = lab.pool(gpu, uses=uses, context_events=context_events)
    got, b = _program(gpu, pool, assumed=True, kind=kind)
    assert not got
    gpu.resume(b)
    gpu.run_until_idle()
    growths = pool.stats().growths
    with pool.allocate(SIZE, stream=Stream(gpu), assumed=True) as late:
        write(gpu, late.stream, late)
    assert pool.stats().growths == growths  # over: it serves others


def test_s33_control_with_declared_uses_only_the_very_program_is_corrupt() -> None:
    """A is finished as far as its own timeline tells, so C may have the memory that B still reads."""
    gpu = SimDevice(memory=1 << 30)
    pool = CachingAllocator(gpu, config=Config(uses="declared"))
    a, b, c = (Stream(gpu) for _ in range(3))
    x = pool.allocate(SIZE, stream=a, assumed=True)
    write(gpu, a, x)
    b.wait_stream(a)
    gpu.hold(b)
    read(gpu, b, x)
    gpu.run_until_idle()
    where = span(x)
    del x
    y = pool.allocate(SIZE, stream=c, assumed=True)  # before A waits for B
    a.wait_event(b.record_event())
    write(gpu, c, y)
    assert overlap(y, where)
    assert gpu.races


def test_s33_the_same_program_step_by_step_with_assumed_uses(lab: Lab, gpu: SimDevice) -> None:
    pool = lab.pool(gpu, uses="assumed")
    a, b, c = (Stream(gpu) for _ in range(3))
    x = pool.allocate(SIZE, stream=a)
    write(gpu, a, x)
    b.wait_stream(a)
    gpu.hold(b)
    read(gpu, b, x)
    gpu.run_until_idle()
    where = span(x)
    del x
    y = pool.allocate(SIZE, stream=c)
    a.wait_event(b.record_event())
    write(gpu, c, y)
    assert not overlap(y, where)


def test_s33_the_owner_takes_its_block_back_at_once(lab: Lab, gpu: SimDevice) -> None:
    """Such a program was written for a pool in which just that happens: it waits before it goes on."""
    pool = lab.pool(gpu, uses="assumed")
    a, b = Stream(gpu), Stream(gpu)
    x = pool.allocate(SIZE, stream=a)
    write(gpu, a, x)
    b.wait_stream(a)
    gpu.hold(b)
    read(gpu, b, x)
    where = span(x)
    before = gpu.calls.total()
    del x
    a.wait_event(b.record_event())
    calls = gpu.calls.total()
    y = pool.allocate(SIZE, stream=a)
    assert gpu.calls.total() == calls and calls > before
    assert span(y) == where
    write(gpu, a, y)


@pytest.mark.parametrize("reader", ["legacy", "unseen", "foreign"])
def test_s33_streams_that_the_pool_was_never_told_of(lab: Lab, gpu: SimDevice, reader: str) -> None:
    """Legacy counts as seen from the start; another stream once it has been seen at all (R3)."""
    pool = lab.pool(gpu, uses="assumed")
    a, c = Stream(gpu), Stream(gpu)
    b: Stream = Stream.legacy(gpu) if reader == "legacy" else Stream(gpu)
    if reader == "foreign":
        pool.allocate(SIZE, stream=b.handle).close()
    x = pool.allocate(SIZE, stream=a)
    write(gpu, a, x)
    b.wait_stream(a)
    gpu.hold(b)
    read(gpu, b, x)
    gpu.run_until_idle()
    where = span(x)
    del x
    with pool.allocate(SIZE, stream=c) as y:
        write(gpu, c, y)
        assert not overlap(y, where)


def test_s33_a_merge_with_another_owners_block_ends_the_owners_exemption(lab: Lab, gpu: SimDevice) -> None:
    pool = lab.pool(gpu, uses="assumed", limit=4 * MIB)
    a, d, b = (Stream(gpu) for _ in range(3))
    first, second = pool.allocate(2 * MIB, stream=a), pool.allocate(2 * MIB, stream=d)
    assert first.ptr + first.size == second.ptr
    write(gpu, a, first)
    write(gpu, d, second)
    b.wait_stream(d)
    read(gpu, b, second, duration_ns=5_000_000)
    first.close()
    second.close()
    whole = pool.allocate(4 * MIB, stream=a)  # has to wait for B, which read D's half
    write(gpu, a, whole)
    assert overlap(whole, second)


def test_s33_every_spare_stream_in_use_gates_a_taker_and_no_longer_once_it_has_ended(lab: Lab, gpu: SimDevice) -> None:
    pool = lab.pool(gpu, uses="assumed")
    a, b, c = (Stream(gpu) for _ in range(3))
    x = used(pool, a, SIZE)
    where = span(x)
    gpu.run_until_idle()
    gpu.hold(b)
    write(gpu, b, (where[0], 0))
    del x
    with pool.allocate(SIZE, stream=c) as other:
        assert not overlap(other, where)
        write(gpu, c, other)
    handle = b.handle
    b.close()
    with pool.allocate(SIZE, stream=c) as other:
        assert not overlap(other, where)  # ended, not finished
        write(gpu, c, other)
    gpu.resume(handle)
    gpu.run_until_idle()
    held = [pool.allocate(SIZE, stream=c) for _ in range(2)]
    assert any(overlap(y, where) for y in held)
    write(gpu, c, *held)


# -- S35: the program's own events -----------------------------------------------------------------


def _freed_behind(gpu: SimDevice, pool: CachingAllocator) -> tuple[Stream, Event, tuple[int, int]]:
    """A held stream, an event of the program's behind its freed block, and where that is."""
    a = Stream(gpu)
    gpu.hold(a)
    x = used(pool, a, SIZE)
    where = span(x)
    x.close()
    pool.check()
    return a, a.record_event(), where


def _asks(gpu: SimDevice, pool: CachingAllocator, stream: Stream, where: tuple[int, int]) -> bool:
    with pool.allocate(SIZE, stream=stream) as y:
        write(gpu, stream, y)
        return overlap(y, where)


def test_s35_a_waited_event_serves_the_waiter(gpu: SimDevice, pool: CachingAllocator) -> None:
    """The positive case, without which the others would prove nothing."""
    _, event, where = _freed_behind(gpu, pool)
    b = Stream(gpu)
    b.wait_event(event)
    assert _asks(gpu, pool, b, where)


def test_s35_an_event_recorded_again_elsewhere_before_the_wait_teaches_nothing(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    _, event, where = _freed_behind(gpu, pool)
    b, other = Stream(gpu), Stream(gpu)
    event.record(other)
    b.wait_event(event)
    assert not _asks(gpu, pool, b, where)


def test_s35_an_event_recorded_again_after_the_wait_changes_nothing(gpu: SimDevice, pool: CachingAllocator) -> None:
    _, event, where = _freed_behind(gpu, pool)
    b = Stream(gpu)
    b.wait_event(event)
    event.record(Stream(gpu))
    assert _asks(gpu, pool, b, where)


def test_s35_an_event_recorded_again_behind_our_back_teaches_nothing(gpu: SimDevice, pool: CachingAllocator) -> None:
    """Another library records our event's handle itself; the record we know of is then not the last (R5)."""
    _, event, where = _freed_behind(gpu, pool)
    b, other = Stream(gpu), Stream(gpu)
    ready = Event(gpu)
    ready.record(other)
    b.wait_event(ready)
    assert not _asks(gpu, pool, b, where)
    assert not event.query()


def test_s35_a_record_during_a_wait_teaches_nothing(gpu: SimDevice, pool: CachingAllocator) -> None:
    """Which of the two records the wait was for is not known: a version is read on both sides."""
    _, event, where = _freed_behind(gpu, pool)
    b, other = Stream(gpu), Stream(gpu)
    done: list[str] = []

    def record_before_the_wait(call: str) -> None:
        if call == "cuStreamWaitEvent" and not done:
            done.append(call)
            event.record(other)

    gpu.before_call = record_before_the_wait
    b.wait_event(event)
    gpu.before_call = None
    assert done
    assert not _asks(gpu, pool, b, where)


def test_s35_a_record_during_a_query_proves_nothing(gpu: SimDevice, pool: CachingAllocator) -> None:
    _, event, where = _freed_behind(gpu, pool)
    other = Stream(gpu)
    done: list[str] = []

    def record_before(call: str) -> None:
        if call == "cuEventQuery" and not done:
            done.append(call)
            event.record(other)

    gpu.before_call = record_before
    assert event.query()  # of the new record
    gpu.before_call = None
    assert not _asks(gpu, pool, Stream(gpu), where)
    assert pool.stats().in_flight_bytes >= SIZE


def test_s35_a_destroyed_event_takes_nothing_with_it(gpu: SimDevice, pool: CachingAllocator) -> None:
    a, event, where = _freed_behind(gpu, pool)
    b, c = Stream(gpu), Stream(gpu)
    b.wait_event(event)
    del event
    pool.stats()
    fresh = [Event(gpu) for _ in range(3)]  # under the old handle, or not
    for one in fresh:
        one.record(c)
        assert one.query()
    assert not _asks(gpu, pool, c, where)
    assert _asks(gpu, pool, b, where)
    gpu.resume(a)


def test_s35_records_and_waits_inside_a_capture_order_nothing(gpu: SimDevice, pool: CachingAllocator) -> None:
    a = Stream(gpu)
    gpu.hold(a)
    x = used(pool, a, SIZE)
    where = span(x)
    x.close()
    pool.check()
    event = a.record_event()
    b = Stream(gpu)
    gpu.begin_capture(b, "relaxed")
    inside = Event(gpu)
    inside.record(b)  # goes into the graph
    gpu.end_capture(b)
    assert not _asks(gpu, pool, b, where)
    again = Stream(gpu)
    inside.record(again)  # a normal event again, behind nothing of A
    b.wait_event(inside)
    assert not _asks(gpu, pool, b, where)
    b.wait_event(event)
    held = [pool.allocate(SIZE, stream=b) for _ in range(2)]  # its own block, and the one that it has waited for
    assert any(overlap(y, where) for y in held)
    write(gpu, b, *held)


def test_s35_an_event_that_was_recorded_in_a_capture_forgets_what_it_stood_for(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    _, event, where = _freed_behind(gpu, pool)
    captured, b = Stream(gpu), Stream(gpu)
    gpu.begin_capture(captured, "relaxed")
    event.record(captured)
    gpu.end_capture(captured)
    event.record(Stream(gpu))
    b.wait_event(event)
    assert not _asks(gpu, pool, b, where)


def test_s35_a_capture_that_begins_between_the_question_and_the_record_is_noticed(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    """The record went into the graph although the stream did not capture a moment before (R10)."""
    a = Stream(gpu)
    gpu.hold(a)
    x = used(pool, a, SIZE)
    where = span(x)
    gpu.resume(a)
    gpu.run_until_idle()
    x.close()
    event = Event(gpu)
    done: list[str] = []

    def capture_before(call: str) -> None:
        if call == "cuEventRecord" and not done:
            done.append(call)
            gpu.begin_capture(a, "relaxed")

    gpu.before_call = capture_before
    event.record(a)
    gpu.before_call = None
    gpu.end_capture(a)
    gpu.hold(a)
    write(gpu, a, (where[0], where[1]))
    b = Stream(gpu)
    assert a.query() is False
    event.record(b)
    assert event.query()
    pool.check()


def test_s35_what_an_event_teaches_is_its_snapshot_and_not_the_streams_later_clock(
    gpu: SimDevice, pool: CachingAllocator
) -> None:
    a, event, where = _freed_behind(gpu, pool)
    c, d = Stream(gpu), Stream(gpu)
    early = c.record_event()
    c.wait_event(event)  # C learns of A only after `early`
    d.wait_event(early)
    assert not _asks(gpu, pool, d, where)
    assert _asks(gpu, pool, c, where)
    gpu.resume(a)


def test_s33_a_bare_handle_seen_once_does_not_gate_for_ever_where_a_context_event_may_be_used(
    lab: Lab, gpu: SimDevice
) -> None:
    """Nobody tells us that its stream has ended; one mark of the whole context covers it."""
    pool = lab.pool(gpu, uses="assumed", context_events=True)
    with gpu.scope():
        handle = gpu.stream_create(non_blocking=True, priority=0)
    pool.allocate(SIZE, stream=handle).close(handle)
    with gpu.scope():
        gpu.stream_destroy(handle)
    a = Stream(gpu)
    used(pool, a, SIZE).close()
    gpu.run_until_idle()
    a.synchronize()
    pool.settle()
    assert pool.stats().in_flight_bytes == 0


# -- what a program's own waits are good for ------------------------------------------------------------


def _rounds(gpu: SimDevice, pool: CachingAllocator, wait: Callable[[Stream], object]) -> float:
    """Products of all sizes on four streams in turn, each waited for; what was reserved, over what was live at most."""
    draw = random.Random(1)
    streams = [Stream(gpu) for _ in range(4)]
    for i in range(400):
        stream, size = streams[i % 4], draw.randrange(1, 84) * MIB
        factor = used(pool, stream, size)  # a kernel writes it
        product = pool.allocate(size, stream=stream)  # while the stream still works on the factor
        gpu.launch(stream, 1_000_000, reads=[factor], writes=[product])
        factor.close()
        product.close()
        wait(stream)
    stats = pool.stats()
    return stats.peak_reserved_bytes / stats.peak_allocated_bytes


@pytest.mark.parametrize("context_events", [None, True, False])
@pytest.mark.parametrize("uses", ["declared", "assumed"])
@pytest.mark.parametrize("by", ["stream", "event"])
def test_r3_streams_that_the_program_waits_for_share_their_memory(
    lab: Lab, by: str, uses: str, context_events: bool | None
) -> None:
    """Nobody waits when the request comes for which memory is missing: its own stream is busy by then."""
    gpu = lab.gpu(memory=4 << 30)
    pool = lab.pool(gpu, uses=uses, context_events=context_events)

    def wait(stream: Stream) -> None:
        if by == "stream":
            stream.synchronize()
        else:
            stream.record_event().synchronize()

    assert _rounds(gpu, pool, wait) <= 1.25


def test_r13_a_wait_after_little_has_been_freed_marks_nothing(lab: Lab, gpu: SimDevice) -> None:
    pool = lab.pool(gpu, uses="assumed")
    a, b = Stream(gpu), Stream(gpu)
    for stream in (a, b):
        used(pool, stream, MIB).close()
    before = dict(gpu.calls)
    a.synchronize()
    made = {call: n - before.get(call, 0) for call, n in gpu.calls.items() if n != before.get(call, 0)}
    assert set(made) <= {
        "cuStreamIsCapturing",
        "cuStreamSynchronize",
        "cuCtxPushCurrent",
        "cuCtxPopCurrent",
        "cuThreadExchangeStreamCaptureMode",
    }, made

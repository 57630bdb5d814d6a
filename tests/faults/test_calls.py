"""S10, beyond single workloads: every driver call of every public call fails, at every position, in every setting.

What an operation raises is an `AllocatorError` of one line.  Once the driver works again, so does the pool, and nothing
is lost.  After a sticky error nothing works, and every call says so.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from allocator import AllocatorError, CachingAllocator, Config, DriverError, SimDevice, Stream
from allocator.sizes import KIB, MIB
from tests.faults.desk import OPERATIONS, SETTINGS, Desk, Operation, Prepare, a_capture

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
MAKES = {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemAlloc", "cuMemAddressReserve", "cuEventCreate"}
NOT_OURS = {
    "cuLaunchKernel",  # the program's own
    "cuStreamBeginCapture",
    "cuStreamEndCapture",
    "cuGraphLaunch",
    "cuCtxPushCurrent",  # these fail for a lost context only
    "cuCtxPopCurrent",
    "cuThreadExchangeStreamCaptureMode",
}


EVERY = os.environ.get("FAULTS_EVERY") == "1"
"""All positions of all calls in all settings: minutes."""


def events_and_waits(d: Desk) -> Operation:
    """The program's own order between streams, and reuse by it."""

    def operation() -> None:
        for i in range(4):
            one, other = (d.a, d.b) if i % 2 else (d.b, d.a)
            d.get("x", one, 2 * MIB)
            d.event.record(one)
            d.event.wait(other)
            d.kept["x"].record_stream(other)
            d.gpu.launch(other, writes=[d.kept["x"]])
            d.drop("x")
            other.wait_stream(one)
            d.get("y", other, 2 * MIB)
            d.drop("y")
        d.event.query()

    return operation


def near_the_limit(d: Desk) -> Operation:
    """Every step of the ladder."""

    def operation() -> None:
        d.pool.set_limit(6 * MIB)
        for i in range(6):
            with suppress(AllocatorError):
                d.get(f"x{i}", (d.a, d.b)[i % 2], (2 * MIB, 4 * MIB, KIB)[i % 3])
            if i >= 2:
                d.drop(f"x{i - 2}")
        d.pool.set_limit(2 * MIB)

    return operation


def streams_with_work_that_end(d: Desk) -> Operation:
    """Destroyed with their kernels queued; the next one gets the handle."""

    def operation() -> None:
        for i in range(4):
            s = Stream(d.gpu, non_blocking=bool(i % 2))
            d.get("x", s, 2 * MIB)
            d.drop("x")
            if i < 2:
                s.close()
            del s
        d.pool.stats()

    return operation


WORKLOADS: tuple[Prepare, ...] = (*OPERATIONS, a_capture, events_and_waits, near_the_limit, streams_with_work_that_end)
NAMES = [name for name in SETTINGS if name != "usual"]
CASES = [
    (prepare, name)
    for number, prepare in enumerate(WORKLOADS)
    for name in (SETTINGS if EVERY else ("usual", NAMES[number % len(NAMES)]))
]
"""In CI each in the usual setting and in one of the others, which take turns."""


def attempt(operation: Operation) -> AllocatorError | None:
    """Do it; an error must be ours, and of one line."""
    try:
        operation()
    except AllocatorError as error:
        assert "\n" not in str(error), error
        return error
    return None


def calls_of(prepare: Prepare, config: dict[str, Any]) -> Counter[str]:
    """How often the operation makes which call."""
    desk = Desk(**config)
    operation = prepare(desk)
    before = Counter(desk.gpu.calls)
    attempt(operation)
    return Counter({call: n for call, n in (Counter(desk.gpu.calls) - before).items() if call not in NOT_OURS})


@pytest.mark.parametrize(("prepare", "settings"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_s10_any_call_of_any_operation_may_fail_at_any_position(prepare: Prepare, settings: str) -> None:
    config, failed = SETTINGS[settings], []
    for call, times in sorted(calls_of(prepare, config).items()):
        codes = ("CUDA_ERROR_UNKNOWN", "CUDA_ERROR_INVALID_VALUE", *((OUT_OF_MEMORY,) if call in MAKES else ()))
        for at in range(1, min(times, 1000 if EVERY else 3) + 1):
            for code in codes if at == 1 else (codes[at % len(codes)],):
                desk = Desk(**config)
                operation = prepare(desk)
                desk.gpu.fail(call, at=at, error=code)
                attempt(operation)
                desk.gpu.clear_faults()
                failed += [f"{call} #{at} {code}: {wrong}" for wrong in desk.wrong()]
    assert not failed, f"{len(failed)} failures:\n" + "\n".join(failed[:30])


@pytest.mark.parametrize(("prepare", "settings"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_r11_a_device_that_is_lost_in_the_middle_of_any_operation_ends_everything_clearly(
    prepare: Prepare, settings: str
) -> None:
    config = SETTINGS[settings]
    for call, times in sorted(calls_of(prepare, config).items()):
        for at in sorted({1, times}):
            desk = Desk(**config)
            operation = prepare(desk)
            desk.gpu.fail(call, at=at, error="CUDA_ERROR_ILLEGAL_ADDRESS", sticky=True)
            attempt(operation)
            assert not desk._left(), (call, at)
            for use in (
                lambda d=desk: d.pool.allocate(KIB, stream=d.b),
                lambda d=desk: d.pool.trim(),
                lambda d=desk: d.pool.settle(),
                lambda d=desk: Stream(d.gpu),
                lambda d=desk: d.pool.allocate(32 * MIB, stream=d.b),
            ):
                error = attempt(use)
                made = Counter(desk.gpu.calls)
                clear = error is None or (isinstance(error, DriverError) and error.sticky)
                assert clear or desk.pool.closed, (call, at, error)
            assert error is not None, (call, at)  # there is memory, but nothing to get it with
            attempt(use)
            assert Counter(desk.gpu.calls) == made, "a driver call on a device that is known to be lost"
            desk.kept.clear()
            for close in (desk.pool.stats, desk.pool.reset_peaks, desk.pool.close, desk.a.close, desk.b.close):
                assert attempt(close) is None, (call, at)
            desk.pool.check()
            assert desk.gpu.races == []


# -- callbacks, clocks ----------------------------------------------------------------------------


@pytest.fixture
def gpu() -> SimDevice:
    return SimDevice(memory=64 * MIB)


def test_s16_a_callback_that_waits_for_another_thread_which_waits_for_memory_is_no_deadlock(gpu: SimDevice) -> None:
    """The other thread asks for the very memory that is short, and its own callback is served meanwhile."""
    with CachingAllocator(gpu, config=Config(limit=4 * MIB, wait_timeout=0.001)) as pool:
        s = Stream(gpu)
        held = [pool.allocate(4 * MIB, stream=s)]
        outcome: list[object] = []

        def other() -> None:
            try:
                outcome.append(pool.allocate(4 * MIB, stream=s))
            except AllocatorError as error:
                outcome.append(error)

        def callback(nbytes: int) -> bool:
            if threading.current_thread() is not threading.main_thread():
                return False
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(20)
            assert not thread.is_alive(), "it hangs"
            while held:
                held.pop().close()
            return True

        pool.on_out_of_memory(callback)
        pool.allocate(2 * MIB, stream=s).close()
        assert isinstance(outcome[0], AllocatorError)
        pool.check()


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_s16_whatever_a_callback_raises_reaches_the_caller_and_nothing_is_lost(
    gpu: SimDevice, error: BaseException
) -> None:
    with CachingAllocator(gpu, config=Config(limit=4 * MIB, wait_timeout=0.001)) as pool:
        s = Stream(gpu)
        kept = pool.allocate(2 * MIB, stream=s)

        def callback(nbytes: int) -> bool:
            pool.allocate(KIB, stream=s).close()
            raise error

        pool.on_out_of_memory(callback)
        with pytest.raises(type(error)):
            pool.allocate(4 * MIB, stream=s)
        kept.close()
        pool.check()
        gpu.run_until_idle()
        assert pool.stats().allocated_bytes == 0
    with CachingAllocator(gpu, config=Config()) as other:
        other.stats()
    assert gpu.used_bytes == 0


@pytest.mark.parametrize("jump", [1e9, -1e9], ids=["forward", "backward"])
def test_a_host_clock_that_jumps_costs_a_bounded_wait_at_most(
    gpu: SimDevice, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """`time.monotonic` does not jump by its contract; a suspended machine or a broken clock makes it seem so."""
    now = [1000.0]

    def monotonic() -> float:
        now[0] += jump
        return now[0]

    def sleep(seconds: float) -> None:
        now[0] += 10.0 + abs(jump) * 1.1

    for module in ("allocator.caching.growth", "allocator.streams.captures"):
        monkeypatch.setattr(f"{module}.time.monotonic", monotonic)
        monkeypatch.setattr(f"{module}.time.sleep", sleep)
    with CachingAllocator(gpu, config=Config(limit=4 * MIB, wait_timeout=0.001)) as pool:
        s = Stream(gpu)
        x = pool.allocate(4 * MIB, stream=s)
        pool._growth.growing += MIB  # another thread's memory is on its way, and does not come
        with pytest.raises(AllocatorError):
            pool.allocate(MIB, stream=s)
        pool._growth.growing -= MIB
        line = s.line
        line.pins += 1  # another thread is in a call on the stream, and stays there
        captures = pool._registry.captures
        captures.end(captures.begin(line, s.handle))
        line.pins -= 1
        x.close()
        pool.check()


def test_workloads_make_the_calls_that_matter() -> None:
    """Else their failures would show nothing."""
    made: Counter[str] = Counter()
    for settings in SETTINGS.values():
        for prepare in WORKLOADS:
            made += calls_of(prepare, settings)
    expected: set[str] = {"cuMemCreate", "cuMemUnmap", "cuMemRelease", "cuMemFree", "cuEventRecord", "cuEventQuery"}
    expected |= {"cuStreamWaitEvent", "cuStreamQuery", "cuStreamSynchronize", "cuEventSynchronize", "cuStreamDestroy"}
    expected |= {"cuStreamIsCapturing", "cuStreamGetId", "cuMemAddressReserve", "cuMemsetD8Async"}
    assert expected <= set(made), expected - set(made)

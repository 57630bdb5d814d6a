"""Ctrl-C, at every place of every public call: no lock is left taken, and no memory is lost.

In CI every place of the short calls and every few of the long ones; `FAULTS_EVERY=1` is for all of them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from allocator import CachingAllocator, Config, OutOfMemoryError, SimDevice, Stream
from allocator.allocation import Allocation
from allocator.sizes import KIB, MIB
from allocator.sync import OwnedLock, Shield, shield, shielded
from tests.faults.desk import LONG, OPERATIONS, SETTINGS, SHORT, Desk, Prepare
from tests.faults.interrupts import interrupted

EVERY = int(os.environ.get("FAULTS_EVERY", "149"))


@pytest.fixture(autouse=True)
def _usual_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler was not put back"
    signal.signal(signal.SIGINT, before)


def strike(prepare: Prepare, config: dict[str, Any], *, first: int, step: int, driver: bool) -> int:
    """Interrupt the operation at these places; how many there were.  Fails with all that goes wrong."""
    failed: list[str] = []
    at, places = first, 0
    while True:
        desk = Desk(**config)
        interrupt = interrupted(prepare(desk), at, driver=driver)
        if interrupt is None:
            break
        places += 1
        wrong = desk.wrong()
        if wrong:
            failed.append(f"no. {at}, {interrupt.where}: {'; '.join(wrong)}")
        at += step
    assert not failed, f"{len(failed)} places:\n" + "\n".join(failed[:20])
    return places


@pytest.mark.parametrize("prepare", SHORT, ids=lambda p: p.__name__)
def test_an_interrupt_at_any_place_of_a_short_call_loses_nothing(prepare: Prepare) -> None:
    assert strike(prepare, {}, first=1, step=1, driver=True) > 3


@pytest.mark.parametrize("settings", [name for name in SETTINGS if name != "canary" or EVERY == 1])
@pytest.mark.parametrize("prepare", OPERATIONS, ids=lambda p: p.__name__)
def test_an_interrupt_in_the_middle_of_any_call_loses_nothing(prepare: Prepare, settings: str) -> None:
    first = 1 + (list(OPERATIONS).index(prepare) * 7 + len(settings)) % EVERY
    for driver in (False, True):
        strike(prepare, SETTINGS[settings], first=first, step=EVERY, driver=driver)


def test_long_calls_have_many_places() -> None:
    for prepare in LONG:
        assert interrupted(prepare(Desk()), 60) is not None, prepare.__name__


# -- what makes it so -----------------------------------------------------------------------------


def interrupt_here() -> None:
    """As if Ctrl-C had been pressed just now."""
    signal.raise_signal(signal.SIGINT)


def test_inside_the_shield_an_interrupt_comes_at_the_end() -> None:
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        with shield:
            interrupt_here()
            steps.append("the rest")
        steps.append("never")
    assert steps == ["the rest"]


def test_shields_nest_and_the_outermost_tells() -> None:
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt), shield:
        with shield:
            interrupt_here()
        steps.append("after the inner")
    assert steps == ["after the inner"]


def test_the_programs_own_handler_is_called_and_put_back() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    mine = signal.getsignal(signal.SIGINT)
    with shield:
        interrupt_here()
        assert heard == []
    assert heard == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is mine
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_where_interrupts_are_ignored_they_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with shield:
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        interrupt_here()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_touch_no_handler() -> None:
    seen: list[object] = []

    @shielded
    def call() -> None:
        with shield.lifted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_in_a_forked_child_the_thread_that_forked_is_the_main_one() -> None:
    mine = Shield()
    mine.forked()
    assert mine._main == threading.get_ident()

    def elsewhere() -> None:
        mine.depth = 2  # the main thread was inside, and is not there in the child
        mine.forked()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not mine.depth and mine._main == thread.ident


def test_an_error_inside_the_shield_is_the_callers() -> None:
    with pytest.raises(ValueError, match="mine"), shield:
        raise ValueError("mine")
    assert not shield.depth


def test_foreign_code_is_interrupted_at_once_and_what_was_put_off_comes_first() -> None:
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt), shield, shield.lifted():
        interrupt_here()
        steps.append("never")
    with pytest.raises(KeyboardInterrupt), shield:
        interrupt_here()
        with shield.lifted():
            steps.append("never")
    assert steps == [] and not shield.depth


def test_an_out_of_memory_callback_can_be_interrupted_and_the_pool_goes_on() -> None:
    gpu = SimDevice(memory=64 * MIB)
    with CachingAllocator(gpu, config=Config(limit=4 * MIB, wait_timeout=0)) as pool:
        s = Stream(gpu)
        kept = pool.allocate(4 * MIB, stream=s)

        def callback(nbytes: int) -> bool:
            interrupt_here()
            return True

        handle = pool.on_out_of_memory(callback)
        with pytest.raises(KeyboardInterrupt):
            pool.allocate(MIB, stream=s)
        assert not shield.depth
        pool.check()
        handle.remove()
        with pytest.raises(OutOfMemoryError):
            pool.allocate(MIB, stream=s)
        kept.close()
        pool.allocate(MIB, stream=s).close()


def test_a_lock_that_is_interrupted_just_after_it_was_taken_is_given_back() -> None:
    class Inner:
        """What the interpreter does when a signal comes in with the lock: it raises at the end of the call."""

        def __init__(self) -> None:
            self.held = False

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            self.held = True
            raise KeyboardInterrupt

        def release(self) -> None:
            self.held = False

        def _is_owned(self) -> bool:
            return self.held

        def __enter__(self) -> bool:
            return self.acquire()

        def __exit__(self, *error: object) -> None:
            self.release()

    inner = Inner()
    lock = OwnedLock(inner)
    with pytest.raises(KeyboardInterrupt), lock:
        pass
    assert not inner.held
    with pytest.raises(KeyboardInterrupt):
        lock.acquire(timeout=1)
    assert not inner.held


def test_leaving_a_locked_section_is_no_python_function() -> None:
    """There the interpreter would look for signals, before the lock is released."""
    lock = OwnedLock()
    assert not hasattr(lock.__exit__, "__code__") and not hasattr(lock.release, "__code__")
    with lock:
        assert lock.held_here()
    assert not lock.held_here()


def test_an_allocation_that_was_never_finished_has_nothing_to_give_back() -> None:
    Allocation.__new__(Allocation).__del__()


def test_a_stream_is_current_no_longer_than_its_section() -> None:
    import allocator

    gpu = SimDevice()
    s = Stream(gpu)
    at = 0
    while True:
        at += 1

        def body() -> None:
            with allocator.stream(s):
                pass

        if interrupted(body, at) is None:
            break
        assert allocator.current_stream(gpu) == Stream.legacy(gpu)
    assert at > 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_real_signals_at_any_time_lose_nothing() -> None:
    """Not simulated: a thread sends them, as fast as it can, for a number of rounds."""
    gpu = SimDevice(memory=64 * MIB)
    pool = CachingAllocator(gpu, config=Config(seal_frees=4))
    streams = [Stream(gpu) for _ in range(3)]
    stop, ready = threading.Event(), threading.Event()

    def press() -> None:
        while not stop.is_set():
            ready.wait(0.01)
            if ready.is_set():
                ready.clear()
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0)  # the main thread has the processor

    pool.announce, launch = shielded(gpu.hand_out), shielded(gpu.launch)  # the simulator stands for a driver
    thread = threading.Thread(target=press)
    struck, number = 0, 0
    x: Allocation | None = None
    thread.start()
    try:
        for number in range(150):
            try:
                ready.set()
                for i in range(40):
                    s = streams[(number + i) % 3]
                    x = pool.allocate((KIB, 2 * MIB, 3 * MIB)[i % 3], stream=s)
                    launch(s, writes=[x])
                    x.record_stream(streams[i % 3])
                    x.close()
                    if i % 16 == 0:
                        pool.stats()
            except KeyboardInterrupt:
                struck += 1
                with (
                    suppress(KeyboardInterrupt),
                    shield,
                ):  # what is raised in a finaliser is swallowed by the interpreter
                    if x is not None:
                        x.close()
    finally:
        ending = True
        while ending:  # one may be on its way
            try:
                stop.set()
                thread.join()
                ending = False
            except KeyboardInterrupt:
                continue
    assert struck > 10
    assert not shield.depth
    pool.check()
    gpu.run_until_idle()
    pool.settle()
    stats = pool.stats()
    assert (stats.allocated_bytes, stats.in_flight_bytes) == (0, 0)
    pool.close()
    assert gpu.races == [] and gpu.violations == [] and gpu.used_bytes == 0


def test_a_loop_that_handles_signals_outside_python_keeps_its_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """gevent's watcher of SIGINT is none of Python's handlers: setting one, and putting it back, would end it."""
    touched: list[object] = []
    monkeypatch.setattr("allocator.sync._set_handler", lambda number, handler: touched.append(handler))
    with Shield():
        assert len(touched) == 1  # the control
    monkeypatch.setitem(sys.modules, "gevent", sys)
    touched.clear()
    idle = Shield()
    with idle, idle:
        assert idle.depth == 0
    assert touched == []

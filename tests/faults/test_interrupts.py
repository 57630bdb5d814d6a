"""Ctrl-C, at every place of every public call: no lock is left taken, and no memory is lost.

In CI every place of the short calls and every few of the long ones; `FAULTS_EVERY=1` is for all of them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from allocator import CachingAllocator, Config, OutOfMemoryError, SimDevice, Stream
from allocator.allocation import Allocation
from allocator.sizes import KIB, MIB
from allocator.sync import shield, shielded
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


@pytest.mark.source  # compiled code is one place
def test_long_calls_have_many_places() -> None:
    for prepare in LONG:
        assert interrupted(prepare(Desk()), 60) is not None, prepare.__name__


# -- what makes it so -----------------------------------------------------------------------------


def interrupt_here() -> None:
    """As if Ctrl-C had been pressed just now."""
    signal.raise_signal(signal.SIGINT)


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

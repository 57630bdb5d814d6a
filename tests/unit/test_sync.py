"""Ctrl-C that is put off to the end of a section, and locks that know who holds them."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import cast

import pytest

from allocator import CachingAllocator, SimDevice, Stream
from allocator.errors import Reentered
from allocator.gil import GilLock
from allocator.sync import (
    LockLike,
    OwnedLock,
    Shield,
    in_order,
    inner_of,
    make_lock,
    shield,
    shielded,
    use_lock_factory,
)


@pytest.fixture(autouse=True)
def _usual_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler was not put back"
    signal.signal(signal.SIGINT, before)


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


def test_whoever_holds_a_lock_is_told_so_and_gets_it_no_second_time() -> None:
    lock = OwnedLock()
    with lock:
        assert lock.acquire(blocking=False) is False
        assert lock.acquire(timeout=0.01) is False
        with pytest.raises(Reentered, match="locked section"):
            lock.acquire()
    assert not lock.held_here()


def test_the_hot_path_enters_the_inner_lock_and_can_ask_whether_it_is_inside() -> None:
    lock = OwnedLock()
    section, inside, told = inner_of(lock)
    assert not inside() and told is lock.inside and not told.busy
    with section:
        assert inside() and lock.held_here() and not told.busy, "it says so itself"
    with lock:
        assert told.busy
    assert told.busy, "until the hot path says otherwise"
    told.busy = 0
    assert lock.acquire() and told.busy
    lock.release()
    told.busy = 0
    with lock.checked():
        assert told.busy and lock.held_here()
    assert not lock.held_here()
    section, inside, told = inner_of(
        cast(LockLike, plain := threading.Lock())
    )  # one of a test's own, which tells nothing
    with section:
        assert plain.locked() and not inside() and told is None


def test_a_program_may_bring_locks_of_its_own() -> None:
    made: list[str] = []

    def factory(name: str) -> OwnedLock:
        made.append(name)
        return OwnedLock()

    use_lock_factory(factory)
    try:
        make_lock("mine")
    finally:
        use_lock_factory(None)
    make_lock("another")
    assert made == ["mine"]


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


# -- the order of locks ----------------------------------------------------------------------------


def held_by_another(lock: OwnedLock) -> tuple[threading.Thread, threading.Event]:
    """A thread that is inside the lock's section until the event is set."""
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(10)
    return thread, leave


def test_who_holds_the_lock_below_is_refused_and_does_not_wait() -> None:
    """A finaliser in the timelines' section asks the pool, which another thread holds that wants the timelines."""
    lock, below = OwnedLock(), OwnedLock()
    in_order(lock, below)
    thread, leave = held_by_another(lock)
    with below:
        assert not lock.acquire(timeout=5)
        assert not lock.acquire(blocking=False)
        with pytest.raises(Reentered), lock:
            pass
    leave.set()
    thread.join()
    with below, pytest.raises(Reentered), lock:  # nor where nobody has it: the section would ask for `below` again
        pass
    with lock, below:
        assert lock.held_here() and below.held_here()
    assert not lock.held_here() and not below.held_here()


@pytest.mark.parametrize("call", ["allocate", "hit", "drain_frees", "record_stream", "stats", "trim", "close"])
def test_a_finaliser_inside_the_timelines_section_waits_for_nobody(call: str) -> None:
    gpu = SimDevice(memory=1 << 28)
    pool = CachingAllocator(gpu)
    stream, second = Stream(gpu), Stream(gpu)
    held = pool.allocate(4096, stream=stream)
    pool.allocate(512, stream=stream).close()
    assert isinstance(pool._lock, OwnedLock | GilLock)
    thread, leave = held_by_another(pool._lock)  # type: ignore[arg-type]
    try:
        with pool._registry.lock, suppress(Reentered):  # as the collector would come in there
            match call:
                case "allocate":
                    pool.allocate(100_000, stream=stream)
                case "hit":
                    pool.allocate(512, stream=stream)
                case "record_stream":
                    held.record_stream(second)
                case "close":
                    held.close(stream=second)
                case _:
                    getattr(pool, call)()
    finally:
        leave.set()
        thread.join()
    held.close()
    gpu.run_until_idle()
    pool.check()
    assert pool.stats().allocated_bytes == 0

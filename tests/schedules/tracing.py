"""Another thread comes in at one line of ours: finer than the scheduler's places, and for real threads.

A tracer is called between lines and may run anything there, so `AtLine` shows what a step that is torn apart would do.
Next: ../unit/caching/test_steps.py (what must hold at every line), mutants.py.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.caching.front import Front


class AtLine:
    """Runs `intrude`, in another thread, at the n-th line of the allocator's that is passed in this one.

    where: which lines count, by the file and whether this thread is inside the pool's lock.  nth: 0 for each of them.
    """

    def __init__(
        self,
        pool: CachingAllocator,
        nth: int,
        intrude: Callable[[], None],
        where: Callable[[str, bool], bool] = lambda file, inside: not inside,
    ) -> None:
        self._pool, self._nth, self._intrude, self._where = pool, nth, intrude, where
        self.passed = 0
        self.failed: list[BaseException] = []

    def _run(self) -> None:
        try:
            self._intrude()
        except BaseException as error:
            self.failed.append(error)

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        """What `sys.settrace` takes."""
        file = frame.f_code.co_filename
        if "/allocator/" not in file or "/devices/" in file:
            return None
        if event == "line" and self._where(file, self._pool._lock.inner._is_owned()):  # type: ignore[attr-defined]
            self.passed += 1
            if self._nth in (0, self.passed):
                thread = threading.Thread(target=self._run)
                thread.start()
                thread.join(10)
                assert not thread.is_alive(), f"waits: {file}, line {frame.f_lineno}"
        return self.trace

    def __enter__(self) -> AtLine:
        self._before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


SECTIONS = ("drain_frees", "check", "stats", "snapshot", "trim", "grow")
"""Calls that take the pool's lock."""
SIZE = 4096


def take_turns(pool: CachingAllocator, own: Stream, second: Stream) -> None:
    """From here on each of them gets its own memory in one step when the other's has just come back."""
    for stream in (own, second, own, second):
        pool._frees.inside.busy = 0  # nobody is
        pool.allocate(SIZE, stream=stream)
    pool.drain_frees()


def nobody_takes_anything_inside(uses: str = "declared") -> str | None:
    """At every line inside the pool's lock, another thread asks for what a hit would get: it must get nothing.

    What is wrong, or None.
    """
    told: list[str] = []
    assumed = uses == "assumed"
    locked = Front._locked
    for name in SECTIONS:
        gpu = SimDevice(memory=1 << 28)
        pool = CachingAllocator(gpu, config=Config(uses=uses))
        own, second = Stream(gpu), Stream(gpu)
        kept = [pool.allocate(SIZE, stream=stream) for stream in (own, own, second, second, own, second)]
        for one in kept[:4]:
            one.close()
        pool.drain_frees()
        take_turns(pool, own, second)
        kept[4].close()
        lines, frees = (own.timeline, second.timeline), pool._frees

        def intrude(pool: CachingAllocator = pool, lines: tuple[Any, Any] = lines, name: str = name) -> None:
            lane = pool.lane
            assert lane is not None
            there, generation = lane.block, lane.generation
            takes: list[Callable[[], object]] = [partial(pool.front.acquire, SIZE, line, assumed) for line in lines]
            for take in (pool._frees.put_down_last, *takes):
                if take():
                    told.append(f"{name}: a block is taken, or put down, by another thread")
                if there is not None and lane.block is None:  # refused, and put behind the others
                    assert lane.rest.pop() == (there, generation, None)
                    lane.put(there, generation)

        def inside(file: str, held: bool) -> bool:
            return held and not file.endswith(("sync.py", "front.py", "gil.py"))  # there it begins, and ends

        Front._locked = lambda *_: None  # type: ignore[method-assign]  # it would wait for us
        try:
            frees.inside.busy = 0
            with AtLine(pool, 0, intrude, inside) as at:
                held = pool.allocate(4 << 20, stream=own) if name == "grow" else getattr(pool, name)()
        finally:
            Front._locked = locked  # type: ignore[method-assign]
        if at.failed:
            return f"{name}: {type(at.failed[0]).__name__}: {at.failed[0]}"
        if not at.passed:
            return f"{name}: no line was passed inside the lock"
        del held
        if told:
            return told[0]
    return None

"""A trace that is played in real time, again and again: a program to look at where there is no GPU.

Rule: rows mean what they mean in a replay (replay.py); only time differs.  One virtual second takes one real second
(divided by `speed`), host waits included, and the thread takes half of the interpreter at most: a trace that asks for
more of it takes longer, so that whoever watches is served.

What is freed at the end of a lap stays in the pool, the streams stay too, and time goes on: the next lap is the same
program, run again.  Nothing grows with laps: the file is read anew for each, and launches touch no memory here, as the
race oracle's verdict is `weir replay`'s business.

Threads: the replay has a daemon thread of its own.  `stop` may be called by any other, also at any time again.
Next: replay.py (what a row does), targets.py (time).
"""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Any, Final

from allocator.allocation import Allocation
from allocator.caching import CachingAllocator
from allocator.devices import SimDevice
from allocator.streams import Stream
from allocator.traces.pools import gauges
from allocator.traces.reader import Summary, summarize
from allocator.traces.replay import Player
from allocator.traces.row import Trace
from allocator.traces.targets import SimTarget

_log = logging.getLogger("allocator.traces")

TICK_S: Final = 0.01
"""How far virtual time may run ahead of real time, and the pause between two laps."""

SLICE_S: Final = 0.005
"""Work for so long without a pause, then rest."""

SHARE: Final = 0.5
"""The part of the thread's time that may be work."""

BEHIND_S: Final = 0.05
"""Who is later than this goes on from there, and does not hurry."""


class LiveReplay:
    """Plays `trace` on `pool`, of a `SimDevice`, from `start()` to `stop()`; also `with`.

    speed: virtual seconds in one real second.  loop: again from the start at the end of it; otherwise one lap.
    summary: of the trace, where it is known already; else one pass over the file is made here.
    Raises TraceError for a trace that is wrong, TypeError for a pool of another device, ValueError for the speed.
    """

    def __init__(
        self,
        trace: Trace,
        pool: CachingAllocator,
        *,
        speed: float = 1.0,
        loop: bool = True,
        summary: Summary | None = None,
    ) -> None:
        if not speed > 0:
            raise ValueError(f"speed must be above 0, got {speed}")
        if not isinstance(pool.device, SimDevice):
            raise TypeError(f"a live replay plays on a simulated device, not on {pool.device.name}")
        self._trace = trace
        self._gpu = pool.device
        self._pool = pool
        self._speed = speed
        self._loop = loop
        self._summary = summarize(trace) if summary is None else summary
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weir-replay", daemon=True)
        self._started = False
        self._laps = 0
        self._error: Exception | None = None

    @property
    def laps(self) -> int:
        """How often the whole trace has been played."""
        return self._laps

    @property
    def error(self) -> Exception | None:
        """What ended the replay before its time, or None."""
        return self._error

    @property
    def running(self) -> bool:
        """True from `start` until it was stopped, has failed, or has played its only lap."""
        return self._thread.is_alive()

    def start(self) -> LiveReplay:
        """Begin; returns itself.  RuntimeError the second time: make another."""
        if self._started:
            raise RuntimeError("this replay has been started before; make another one")
        self._started = True
        self._thread.start()
        return self

    def stop(self) -> None:
        """End it, free its blocks, and wait until that has been done.  Harmless before, after, and twice."""
        self._stop.set()
        self.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, at most `timeout` seconds; True if it has."""
        if self._started and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def __enter__(self) -> LiveReplay:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        player = Player(self._summary, self._gpu, _OnePool(self._pool))
        pace = _Pace(self._speed, self._stop)
        try:
            while True:
                target = player.target = _PacedTarget(self._gpu, pace)
                player.play(self._trace)
                player.end()
                target.finish()
                self._laps += 1
                if not self._loop:
                    return
                pace.rest(TICK_S)  # also a trace without time in it lets others run
        except _Stopped:
            return
        except Exception as error:
            # Without its frames, which hold what was allocated.
            self._error = error.with_traceback(None)
            _log.warning("the replay of %s has ended: %s", self._trace.path, str(error))
        finally:
            player.end()
            player.close()


class _OnePool:
    """The one pool that all streams share."""

    def __init__(self, pool: CachingAllocator) -> None:
        self._pool = pool

    @property
    def reserved(self) -> int:
        return gauges(self._pool)[0]

    @property
    def in_flight(self) -> int:
        return gauges(self._pool)[1]

    def allocate(self, nbytes: int, number: int, stream: Stream) -> Allocation:
        return self._pool.allocate(nbytes, stream=stream)

    def look(self, number: int) -> None:
        """Nothing is added up here."""


class _Stopped(Exception):
    """`stop()` was called: unwinds the replay between two rows."""


class _Pace:
    """Keeps virtual time to real time, and the thread to its share."""

    def __init__(self, speed: float, stop: threading.Event) -> None:
        self.step_ns = max(round(TICK_S * 1e9 * speed), 1)
        self._scale = 1e9 * speed
        self._stop = stop
        self._virtual_ns = 0
        self._real = self._woke = time.monotonic()
        self._worked = time.thread_time()

    def begin(self, virtual_ns: int) -> None:
        """A lap begins, at this virtual time, now."""
        self._virtual_ns = virtual_ns
        self._real = time.monotonic()

    def keep(self, virtual_ns: int) -> None:
        """Sleep where virtual time is ahead, or where the share is used up.  Raises _Stopped."""
        if self._stop.is_set():
            raise _Stopped
        now = time.monotonic()
        ahead = self._real + (virtual_ns - self._virtual_ns) / self._scale - now
        if ahead < -BEHIND_S:
            self._real -= ahead
        rest = max(ahead, 0.0) if ahead >= TICK_S else 0.0
        if now - self._woke >= SLICE_S:
            worked = time.thread_time() - self._worked
            rest = max(rest, worked * (1 - SHARE) / SHARE)
        elif not rest:
            return
        self.rest(rest)

    def rest(self, seconds: float) -> None:
        """Sleep.  Raises _Stopped."""
        if self._stop.wait(seconds):
            raise _Stopped
        self._woke = time.monotonic()
        self._worked = time.thread_time()


class _PacedTarget(SimTarget):
    """One lap on the simulator, no faster than real time.  Launches take time and touch no memory."""

    def __init__(self, gpu: SimDevice, pace: _Pace) -> None:
        super().__init__(gpu)
        self.attach = _no_attach
        self.detach = _no_detach
        self._pace = pace
        self._reached = 0
        pace.begin(gpu.now_ns)

    def reach(self, time_ns: int) -> None:
        """In small steps, so that whoever looks meanwhile sees work end one after the other."""
        pace, gpu = self._pace, self._gpu
        while time_ns - self._reached > pace.step_ns:
            self._reached += pace.step_ns
            super().reach(self._reached)
            pace.keep(gpu.now_ns)
        self._reached = max(self._reached, time_ns)
        super().reach(self._reached)
        pace.keep(gpu.now_ns)

    def finish(self) -> None:
        """Let all that is queued run out: otherwise a slow GPU would be further behind with each lap."""
        while (left := self._gpu.last_finish_ns - self._gpu.now_ns) > 0:
            self.reach(self._reached + left)


def _no_attach(stream: object, allocation: Any) -> None:
    """Instead of `attach`."""


def _no_detach(allocation: Any) -> None:
    """Instead of `detach`."""

"""Graph captures that a library's hooks tell us of, and the graphs that come out of them (R10).

Captured work does not run now: it runs whenever the graph is launched, and a graph may be destroyed while its last
replay still runs.  So memory that a capture may use is the graph's until the graph dies, and after that it waits for
the whole context, since launches are not seen.  Both are told with timelines that no stream stands behind:

    the graph's line      a user of every block that was live at any moment of the capture
    a line a stream       owns what was allocated on that captured stream: within one capture, memory freed on a
                          stream serves that stream again, for that is the order in which the graph will run

Neither completes while the graph lives.  A captured stream itself is not asked, recorded on or waited for (R10).

`begin` first says so to everybody and waits until no thread is inside a driver call on the stream; only then the
program begins its capture.  `end` comes after the driver has ended it (S18).
Next: registry.py (`borrow`), ../caching/capturing.py (the blocks).  Arguments: docs/ordering.md.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from allocator.devices import PER_THREAD
from allocator.streams.timeline import Kind, Timeline

if TYPE_CHECKING:
    from allocator.streams.registry import Registry

PATIENCE_S: Final = 10.0
"""Real seconds that a capture's begin waits for other threads to leave their calls on its stream.

Such a call takes microseconds, on a driver that other processes keep busy seconds.  One that never comes back, as it
waits for something that this very thread is to do, must not stop the program for ever: then the capture may be lost.
"""
_log = logging.getLogger("allocator")


class Capture:
    """One capture under way, and later its graph.

    line: the graph's own timeline.  inside: by number, each captured stream and its timeline within the graph.
    """

    __slots__ = ("__weakref__", "handles", "inside", "line", "over")

    def __init__(self, line: Timeline) -> None:
        self.line = line
        self.inside: dict[int, tuple[Timeline, Timeline]] = {}
        self.handles: list[int] = []
        self.over = False

    def lines(self) -> list[Timeline]:
        """Every timeline of the graph."""
        return [self.line, *(line for _, line in self.inside.values())]


class GraphToken:
    """Held by whatever holds the graph; its end is how we learn that the graph has gone.  A finaliser only queues."""

    __slots__ = ("_capture", "_gone")

    def __init__(self, capture: Capture, gone: deque[Capture]) -> None:
        self._capture = capture
        self._gone = gone

    def __del__(self) -> None:
        self._gone.append(self._capture)


class Captures:
    """The captures and graphs of one context, as far as hooks report them."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.active: dict[int, Capture] = {}
        """By the number of each stream that takes part in a capture now."""
        self.by_handle: dict[int, Timeline] = {}
        """Captured streams by their handle: while they capture nobody may ask the driver which they are (R8)."""
        self.gone: deque[Capture] = deque()
        """Graphs that have been destroyed; filled by finalisers, lock-free."""
        self.numbers: set[int] = set()
        """The numbers of all timelines that stand for captures and graphs, until the last replay is over."""
        self.dying: deque[tuple[Timeline, int]] = deque()
        """Timelines of such graphs, with the context's seqno that proves their last replay over."""
        self.all_known: Callable[[], bool] = bool
        """Is every library of this process that can capture hooked (R6)?  Set by the integrations."""
        self._in_context_calls = 0

    # -- begin, join, end ------------------------------------------------------------------------

    def begin(self, line: Timeline, handle: int) -> Capture:
        """The program is about to begin a capture of the stream: from now on it is not touched (S18).

        Returns once no thread is inside a call with it, nor, for a blocking stream, with legacy.  No driver call.
        """
        registry = self._registry
        with registry.lock:
            capture = Capture(self._new_line())
            self._enter(capture, line, handle)
        for pool in registry.all_pools():
            pool.capture_begins(capture)
        self._wait_until_left(line)
        return capture

    def join(self, capture: Capture, line: Timeline, handle: int) -> bool:
        """The stream is about to wait for an event of the capture, and so to join it.  False if it is over."""
        with self._registry.lock:
            if capture.over:
                return False
            if line.number in self.active:
                return True
            self._enter(capture, line, handle)
        self._wait_until_left(line)
        return True

    def leave(self, capture: Capture, line: Timeline) -> None:
        """The stream did not join after all: the driver refused the wait."""
        with self._registry.lock:
            if self.active.get(line.number) is capture:
                del self.active[line.number]
                self._forget_handle(line)

    def end(self, capture: Capture) -> GraphToken:
        """The driver has ended the capture; the graph lives as long as the token that is returned."""
        registry = self._registry
        for pool in registry.all_pools():
            pool.capture_ends(capture)
        with registry.lock:
            capture.over = True
            for stream, line in capture.inside.values():
                if self.active.get(stream.number) is capture:
                    del self.active[stream.number]
                    self._forget_handle(stream)
                line.end()
            capture.line.end()
        return GraphToken(capture, self.gone)

    def _enter(self, capture: Capture, line: Timeline, handle: int) -> None:
        self.active[line.number] = capture
        if handle != PER_THREAD:  # which means another stream in every thread
            self.by_handle[handle] = line
        if line.number not in capture.inside:
            capture.inside[line.number] = (line, self._new_line())

    def _new_line(self) -> Timeline:
        line = self._registry.new_graph_line()
        self.numbers.add(line.number)
        return line

    def _forget_handle(self, line: Timeline) -> None:
        for handle in [h for h, other in self.by_handle.items() if other is line]:
            del self.by_handle[handle]

    def _wait_until_left(self, line: Timeline) -> None:
        """Calls on a stream are short, those that wait on the host apart, which are not counted: so this is, too."""
        registry = self._registry
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            with registry.lock:
                pins = line.pins + self._in_context_calls + (registry.legacy.pins if line.kind.blocking else 0)
            if not pins:
                return
            time.sleep(20e-6)
        _log.warning("a capture begins although a thread has been in a call on its stream for %g s", PATIENCE_S)

    # -- who may do what meanwhile ---------------------------------------------------------------

    def forbids(self, line: Timeline) -> bool:
        """May no call be made on the stream because of a capture that we know of?  Under the lock."""
        active = self.active
        if not active:
            return False
        if line.kind is Kind.LEGACY:
            return any(stream.kind.blocking for c in active.values() for stream, _ in c.inside.values())
        return line.number in active

    def inside(self, line: Timeline) -> Timeline:
        """What stands for the stream in allocations: itself, or its timeline within the capture it takes part in."""
        with self._registry.lock:
            capture = self.active.get(line.number)
            return line if capture is None else capture.inside[line.number][1]

    @contextmanager
    def whole_context(self) -> Iterator[bool]:
        """Around a call that would kill every capture of the context; False: there is one, leave it (R6, S18)."""
        with self._registry.lock:
            free = not self.active
            self._in_context_calls += free
        try:
            yield free
        finally:
            with self._registry.lock:
                self._in_context_calls -= free

    # -- graphs that have gone -------------------------------------------------------------------

    def bury(self) -> bool:
        """Note the graphs that have been destroyed: their memory now waits for the whole context.  True if any."""
        any_gone = False
        registry = self._registry
        while self.gone:
            try:
                capture = self.gone.popleft()
            except IndexError:  # another thread took the last
                break
            any_gone = True
            with registry.lock:
                # A replay that still runs was launched before now, so before this seqno is closed.
                self.dying.extend((line, registry.context.pending) for line in capture.lines())
        return any_gone

    def advance(self) -> None:
        """Complete the timelines of dead graphs whose last replay is over.  Under the lock."""
        dying, registry = self.dying, self._registry
        reached = registry.context.completed
        while dying and dying[0][1] <= reached:  # in the order of their seqnos
            line, _ = dying.popleft()
            self.numbers.discard(line.number)
            registry.complete(line, line.closed)
            registry.forget_if_over(line)

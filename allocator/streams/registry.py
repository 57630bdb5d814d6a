"""All timelines of one context: which there are, which have ended, and what each may rely on.

Timelines belong to the device and not to a pool: two pools may share a stream (R1).  Their state is guarded
by one lock, `lock`; no driver call is ever made under it.  Numbers are never used again; a timeline that has
ended and finished is forgotten, so a number that is not found means "over".

Longer than other modules: finding, relying on, ending and failing all change the same state under that lock.
Next: sealing.py (records, queries, waits), stream.py (what users hold).  Arguments: docs/ordering.md.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Protocol

from allocator.devices import LEGACY, PER_THREAD, Capture, Device
from allocator.errors import DriverError, ForkError, Reentered, StreamCapturing, StreamClosed
from allocator.events import EventPool, VectorClock
from allocator.streams.borrowing import Borrowed, BorrowedEach, unpinned
from allocator.streams.captures import Capture as GraphCapture
from allocator.streams.captures import Captures
from allocator.streams.context import CONTEXT, ContextTimeline
from allocator.streams.identity import OwnedHandle, dies_with, handle_of, owns_handle
from allocator.streams.order import Order
from allocator.streams.timeline import MOST_ENTRIES, Kind, Sealed, Timeline
from allocator.sync import make_lock


class Drains(Protocol):
    """What a registry knows of a pool."""

    frees: deque[Any]

    def drain_frees(self) -> None:
        """Stamp what is queued."""

    def look_out(self) -> None:
        """Something has to be looked at before the next allocation."""

    def host_waited(self) -> None:
        """The program has waited for a stream."""

    def capture_begins(self, capture: GraphCapture) -> None:
        """Whatever is live may be used by the capture."""

    def capture_ends(self, capture: GraphCapture) -> None:
        """Likewise; and what was allocated within it may be used by its streams from now on."""


class Registry:
    """The timelines of one context.  Get it with `Registry.of(device)`."""

    _all: ClassVar[weakref.WeakKeyDictionary[Device, Registry]] = weakref.WeakKeyDictionary()
    _making: ClassVar[threading.RLock] = threading.RLock()  # a finaliser may come back

    @classmethod
    def of(cls, device: Device) -> Registry:
        """The registry of the device's context, made at first use.  No driver call."""
        registry = cls._all.get(device)
        if registry is None:
            with cls._making:
                registry = cls._all.get(device) or cls._all.setdefault(device, cls(device))
        return registry

    def __init__(self, device: Device) -> None:
        self._device = weakref.ref(device)
        self.lock = make_lock("timelines")
        self.events = EventPool(device)
        self.context = ContextTimeline()
        self.legacy = Timeline(1, Kind.LEGACY, name="legacy")
        self.lines: dict[int, Timeline] = {1: self.legacy}
        self.order = Order(self.lines, self.context, self.lock)
        """What may rely on what."""
        self.streams: dict[int, Timeline] = {}
        """Streams by the driver's id, which never repeats (R8)."""
        self.version = 0
        """Grows whenever any seqno gets completed: tells a pool to look again."""
        self.pools: weakref.WeakKeyDictionary[Drains, None] = weakref.WeakKeyDictionary()
        """The pools that stamp blocks with these timelines, oldest first: in a set their order would be by address."""
        self.lost: str | None = None
        """The sticky error that ended the context (R11)."""
        self.forked = False
        self.finished: deque[Timeline] = deque()
        """Timelines whose user-facing stream or thread is gone; filled by finalisers, lock-free."""
        self.unended: deque[Timeline] = deque()
        """Timelines that have ended, whose streams could not be sealed yet."""
        self.captures = Captures(self)
        """Captures and graphs that hooks have told us of (R10)."""
        self.orphan_events: deque[int] = deque()
        """Driver events whose user-facing `Event` is gone; likewise."""
        self.owners: dict[int, Timeline] = {}
        """Timelines by the `id` of the object that owns their stream; whoever looks here checks with `is` (R8)."""
        self._next = 2
        self._sweep_at = 8
        self.local = threading.local()
        """Of each thread: `per_thread`, its own per-thread stream; `stack`, its current streams."""

    @property
    def device(self) -> Device:
        """The device; AllocatorError if it is gone."""
        device = self._device()
        assert device is not None, "the device outlives whoever uses its streams"
        return device

    def rebind(self, device: Device) -> None:
        """A pool has outlived an unreachable cycle that held the device: weak references to it are gone (S20)."""
        if self._device() is None:
            self._device = weakref.ref(device)
            self.events.rebind(device)
            self._all[device] = self

    # -- which stream is that? -----------------------------------------------------------------

    def resolve(self, stream: object) -> Timeline:
        """The timeline of anything stream-like that is not our `Stream` (R8).

        Driver calls: none for an object seen before; for a bare handle at every call, and for an object at
        first sight, `cuStreamIsCapturing`, `cuStreamGetId`, and at first sight `cuStreamGetFlags`.
        Raises StreamCapturing while the stream captures (R10), TypeError, ValueError, StreamClosed.
        """
        line = self.owners.get(id(stream))
        if line is not None and line.owner is stream and not line.ended:
            return line
        self.check_usable()
        handle = handle_of(stream)
        if handle == LEGACY:
            return self.legacy
        if handle == PER_THREAD:
            return self.per_thread()
        return self._look_up(handle, stream if owns_handle(stream) else None)

    def per_thread(self) -> Timeline:
        """The calling thread's per-thread default stream: never found by thread ident, which repeats (R8)."""
        token: _ThreadToken | None = getattr(self.local, "per_thread", None)
        if token is None:
            line = self._look_up(PER_THREAD, None)
            self.local.per_thread = token = _ThreadToken(line, self.finished)
        return token.line

    def per_thread_if_known(self) -> Timeline | None:
        """The same if this thread has asked before; no driver call."""
        token: _ThreadToken | None = getattr(self.local, "per_thread", None)
        return None if token is None else token.line

    def adopt(self, handle: int, owner: object, *, non_blocking: bool, name: str | None) -> Timeline:
        """A timeline for a stream that we have just made.  Driver call: `cuStreamGetId`."""
        device = self.device
        with device.scope():
            identity = device.stream_id(handle)
        kind = Kind.NON_BLOCKING if non_blocking else Kind.BLOCKING
        with self.lock.checked():
            line = self._new_line(identity, kind, owner)
            line.name = name
        self.sweep()
        return line

    def _look_up(self, handle: int, owner: object) -> Timeline:
        device = self.device
        with self.lock.checked():
            captured = self.captures.by_handle.get(handle)
        if captured is not None and handle != PER_THREAD:  # alive, as it captures; nobody may ask which it is (R8)
            return captured
        with device.scope():
            if self.capturing(handle):
                raise StreamCapturing(
                    "the stream is being captured into a graph: allocate before the capture begins, or after it ends"
                )
            identity = device.stream_id(handle)
            line = self.streams.get(identity)
            blocking = True
            if line is None:
                blocking = device.stream_is_blocking(handle)
        with self.lock.checked():
            line = self.streams.get(identity)
            if line is None:
                kind = Kind.BLOCKING if blocking else Kind.NON_BLOCKING
                line = self._new_line(identity, Kind.PER_THREAD if handle == PER_THREAD else kind, owner)
            elif line.ended:
                raise StreamClosed("the stream has been closed; make a new one")
            elif owner is not None and line.owner is None:
                self._own(line, owner)
        self.sweep()
        return line

    def _new_line(self, identity: int, kind: Kind, owner: object) -> Timeline:
        line = Timeline(self._next, kind, identity)
        self._next += 1
        # `lines` first: they are read without the lock, and a number that is not found there means "over".
        self.lines[line.number] = line
        self.streams[identity] = line
        if owner is not None:
            self._own(line, owner)
        return line

    def _own(self, line: Timeline, owner: object) -> None:
        # An array kept on its own stream object would keep that object, and so itself, for ever.
        line.keeper = None if dies_with(owner) else owner
        line.owner = owner
        self.owners[id(owner)] = line

    def new_graph_line(self) -> Timeline:
        """A timeline that no stream stands behind, for a capture (R10).  Under the lock."""
        line = Timeline(self._next, Kind.GRAPH)
        self._next += 1
        self.lines[line.number] = line
        return line

    def new_unknown_line(self) -> Timeline:
        """A timeline for a stream that exists but cannot be asked who it is: it gates whatever may be used on it.

        It is never found over by itself: a context event speaks for it, or `Sealing.identify`.
        """
        with self.lock.checked():
            line = Timeline(self._next, Kind.NON_BLOCKING, name="unknown")
            self._next += 1
            self.lines[line.number] = line
            return line

    def all_pools(self) -> list[Drains]:
        """The pools that stamp blocks with these timelines, oldest first.  Not under the lock.

        Copied in one step: pools are made without a lock, in finalisers too.
        """
        found = [ref() for ref in self.pools.keyrefs()]
        return [pool for pool in found if pool is not None]

    def reachable(self, line: Timeline) -> bool:
        """Is there a handle of the stream that the calling thread may use?  No driver call."""
        if line.kind is Kind.PER_THREAD:
            token: _ThreadToken | None = getattr(self.local, "per_thread", None)
            return token is not None and token.line is line
        return line.kind is Kind.LEGACY or line.owner is not None

    def orphaned(self, line: Timeline) -> bool:
        """Work on it that no event covers, and nobody who could still record one (R9)?  Under the lock."""
        if line.kind is Kind.LEGACY or line.sealed >= line.here.at[line.number]:
            return False
        return line.ended or (line.owner is None and line.kind is not Kind.PER_THREAD)

    def before_mark(self) -> None:
        """The program is about to mark a point on a stream: frees made before it should count as before it.

        Stamping them later is safe, but then the mark does not cover them (R3).  Not under any lock.
        """
        for pool in self.all_pools():
            if pool.frees:
                pool.drain_frees()

    def borrow(
        self, line: Timeline, given: int | None = None, *, by_program: bool = False, waits: bool = False
    ) -> Borrowed:
        """A handle of the stream for the length of a `with`; None if there is none to be used (R9).

        given: a handle that the caller knows to be alive.  Otherwise it is read anew from the owner, which is
        held meanwhile.  A per-thread stream has a handle in its own thread only.  A stream that hooks report as
        capturing has none, except for what the program itself does to it (by_program).  A capture that begins waits
        until the handle is given back (S18), unless the call is one that `waits` on the host.
        """
        return Borrowed(self, line, given, by_program, waits)

    def borrow_each(self, lines: Iterable[Timeline]) -> BorrowedEach:
        """(stream, handle) of each of them that has one, for the length of a `with`: as `borrow`, under one lock."""
        return BorrowedEach(self, lines)

    def destroy_handle(self, handle: int) -> None:
        """`cuStreamDestroy`."""
        if not self.forked and not self.lost:
            device = self.device
            with suppress(DriverError), device.scope():
                device.stream_destroy(handle)

    def destroy(self, owner: OwnedHandle) -> None:
        """Destroy a stream of ours, as soon as no thread is inside a call with it.  `cuStreamDestroy`."""
        with self.lock.checked():
            owner.closing = True
            owner.pins += 1
            dead = unpinned(owner)
        if dead is not None:
            self.destroy_handle(dead)

    def capturing(self, handle: int) -> bool:
        """Is the stream capturing, or not to be asked?  Inside `device.scope()`.  `cuStreamIsCapturing` (R10)."""
        try:
            return self.device.stream_is_capturing(handle) is not Capture.NONE
        except DriverError as error:
            if error.sticky or handle != LEGACY:
                self.failed(error)
                raise
            return True  # how the driver says that a blocking stream captures

    # -- ends ----------------------------------------------------------------------------------

    def complete(self, line: Timeline, seqno: int) -> None:
        """The stream's work up to `seqno` is over.  Under the lock."""
        if seqno <= line.completed:
            return
        for sealed in line.complete(seqno):
            if not sealed.users:
                self.events.give_back(sealed.event)
            for other, reached in sealed.proves:
                self.complete(other, reached)
        line.poisoned = None  # an error was never completion (R11); this is
        self.version += 1
        self.forget_if_over(line)

    def close_for(self, line: Timeline) -> list[tuple[Timeline, int]]:
        """Close what an answer about `line` will prove: its own seqno; for legacy, every blocking stream's too (R6)."""
        return self.close_each([line])[0]

    def close_each(self, lines: Iterable[Timeline]) -> list[list[tuple[Timeline, int]]]:
        """`close_for` of each of them."""
        with self.lock.checked():
            points = []
            for line in lines:
                proves = [line]
                if line.kind is Kind.LEGACY:
                    proves += [other for other in self.seen() if other.kind.blocking]
                points.append([(other, other.close()) for other in proves])
            return points

    def mark(self, points: Iterable[tuple[Timeline, int]]) -> None:
        """The work up to these points is over: the driver said so after they had been closed."""
        with self.lock.checked():
            for line, seqno in points:
                self.complete(line, seqno)
            self.advance_context()

    def host_waited(self) -> None:
        """The program has waited for a stream: the time to find out about the others.  Not under the lock."""
        for pool in self.all_pools():
            pool.host_waited()

    def advance_context(self) -> None:
        """See which context seqnos are complete now.  Under the lock."""
        before = self.context.completed
        for sealed in self.context.advance(self.lines):
            sealed.done = True
            if not sealed.users:
                self.events.give_back(sealed.event)
        self.version += self.context.completed != before
        self.captures.advance()

    def thin(self, marked: Timeline | ContextTimeline) -> None:
        """Keep the marks that are in flight few.  After each new one, under the lock."""
        for sealed in marked.thin():
            self.events.give_back(sealed.event)

    def forget_if_over(self, line: Timeline) -> None:
        """Drop a timeline that has ended and finished.  Under the lock."""
        if line.ended and line.completed >= line.closed and line is not self.legacy:
            self.lines.pop(line.number, None)
            if self.streams.get(line.identity) is line:
                del self.streams[line.identity]

    def release_owner(self, line: Timeline) -> object:
        """Take the owner out, for the caller to drop outside the lock (R9).  Under the lock."""
        owner, line.owner, line.keeper = line.owner, None, None
        if owner is not None:
            self.owners.pop(id(owner), None)
        return owner

    def sweep(self) -> None:
        """Look for foreign stream objects that only we still hold, to be let go (R9).

        Costs O(streams), so it runs when their number has doubled since last time, at `stats()` and before a
        pool grows.  No driver call: `Sealing.end_finished` makes them.
        """
        if len(self.owners) >= self._sweep_at:
            self.sweep_now()

    def sweep_now(self) -> None:
        """`sweep`, at once."""
        with self.lock.checked():
            alone = [line for line in self.owners.values() if not line.ended and self.only_ours(line)]
            self.finished.extend(alone)
            self._sweep_at = max(8, 2 * (len(self.owners) - len(alone)))

    def only_ours(self, line: Timeline) -> bool:
        """Does only the timeline hold the foreign object that owns the stream?  Under the lock.

        Live allocations hold it too, those that declared a use of the stream among them (R9), but for an object that
        ends its stream: nobody can give that work once the program has let it go.
        """
        owner = line.owner
        if owner is None or isinstance(owner, OwnedHandle):  # ours tell us themselves
            return False
        del owner
        return _references(line) <= _ALONE

    def prune(self, line: Timeline) -> None:
        """Forget what the stream has waited for of streams that have ended and are over (R5).  Under the lock.

        One that lives for ever waits for any number of others, and all that wait for it get to know what it knows.
        O(entries), when there are twice those that were left the last time.
        """
        entries = line.clock.at
        if len(entries) > line.prune_at:
            lines = self.lines
            left = {number: seqno for number, seqno in entries.items() if number == CONTEXT or number in lines}
            line.clock = VectorClock(left)
            line.prune_at = MOST_ENTRIES + 2 * len(left)

    def seen(self) -> list[Timeline]:
        """Every stream's timeline that may still have unfinished work; none of a graph's.  Under the lock."""
        return [line for line in self.lines.values() if line.kind is not Kind.GRAPH]

    # -- errors --------------------------------------------------------------------------------

    def check_forked(self) -> None:
        """Raise ForkError in a child process: before any lock, which another thread may have held at the fork (S21)."""
        if self.forked:
            raise ForkError(
                f"made in the parent of process {os.getpid()}: CUDA does not survive a fork; "
                "make a new pool in the child, or start it with multiprocessing's 'spawn'"
            )

    def check_usable(self) -> None:
        """Raise if no driver call may be made: after a fork, or once the context is lost."""
        self.check_forked()
        if self.lost is not None:
            raise DriverError("the device", self.lost, "the context is lost; restart the process", sticky=True)

    def failed(self, error: DriverError) -> None:
        """Note a driver's error: a sticky one ends the context (R11)."""
        if error.sticky and self.lost is None:
            self.lost = error.code
            with suppress(Reentered):
                for pool in self.all_pools():
                    pool.look_out()

    @contextmanager
    def calls(self) -> Iterator[None]:
        """`device.scope()` for calls that the program makes through us; what ends the context is noted (R11)."""
        try:
            with self.device.scope():
                yield
        except DriverError as error:
            self.failed(error)
            raise

    def recycle(self, sealed: Sealed) -> None:
        """One thread less uses the event outside the lock; back to the pool if it was the last.  Under the lock."""
        sealed.users -= 1
        if sealed.done and not sealed.users:
            self.events.give_back(sealed.event)

    def check(self) -> None:
        """Raise AssertionError unless all counters are in order.  O(timelines + events)."""
        with self.lock.checked():
            self.context.check()
            for number, line in self.lines.items():
                assert number == line.number, (number, line)
                line.check()


def _references(line: Timeline) -> int:
    """How many references there are to the owner, as seen from here; the timeline's count as one."""
    owner = line.owner
    return sys.getrefcount(owner) - (line.keeper is not None)


def _references_if_alone() -> int:
    line = Timeline(1, Kind.BLOCKING)
    line.owner = _Probe()
    return _references(line)


class _Probe:
    """Stands for a foreign stream object."""


_ALONE = _references_if_alone()
"""What `_references` answers if the timeline alone holds the owner: interpreters differ in what they count."""


class _ThreadToken:
    """Lives in a thread's local storage; its death is how we learn that the thread has ended."""

    __slots__ = ("_ends", "_finished", "line")

    def __init__(self, line: Timeline, finished: deque[Timeline]) -> None:
        self.line = line
        self._finished = finished
        self._ends = not isinstance(threading.current_thread(), threading._DummyThread)

    def __del__(self) -> None:
        # A thread that Python did not start gets new local storage at every call into Python: it has not ended.
        if self._ends:
            self._finished.append(self.line)


def _after_fork_in_child() -> None:
    Registry._making = threading.RLock()
    for registry in list(Registry._all.values()):
        registry.forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

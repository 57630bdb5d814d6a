"""The driver calls around the timelines, each in the order that makes it safe (R4).

    seal    close the seqno, snapshot the clock, record, publish
    wait    ask the driver, then join the snapshot *of that event*
    query   close and snapshot first, mark after it said yes

Every driver call here is made outside all locks, inside `device.scope()` (R10), and may fail; a call that
fails publishes nothing.  A stream is asked whether it captures before *and after* it is recorded on or made
to wait: if a capture began in between, the mark went into the graph and proves nothing (R10).
An event is used outside the lock only while its `users` count holds it (R4).  All of that order stands in this one
module, which makes it longer than most.
Next: ../caching/ladder.py, the one caller that decides when.  Arguments: docs/ordering.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress

from allocator.devices import LEGACY
from allocator.errors import DriverError, StreamCapturing, StreamClosed
from allocator.events import EMPTY, VectorClock
from allocator.streams.context import ContextSeal
from allocator.streams.identity import OwnedHandle, dies_with
from allocator.streams.registry import Registry
from allocator.streams.timeline import Kind, Sealed, Timeline

_CAPTURED = "the stream is being captured: it cannot be waited for until the capture ends"
_ASKED = 64
"""Streams asked at most whether they capture, before a mark on the whole context."""
_VOIDS_EVENT = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_STREAM_CAPTURE", "CUDA_ERROR_CAPTURED_EVENT")


class Sealing:
    """The marks on the streams of one context, counted for one user of them: a pool, or the program itself."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.counts: Counter[str] = Counter()
        """event_records, event_queries, stream_waits, host_synchronizations."""

    # -- marks -------------------------------------------------------------------------------------

    def seal(self, line: Timeline, given: int | None = None) -> Sealed | None:
        """Record an event of ours behind all work that the stream has been given; None if that cannot be.

        given: a handle that is alive for the length of this call (R9); by default the owner's.  None is answered
        for a stream that captures, an orphan, a failed record: the seqno is then closed and not sealed, which only
        delays reuse.  Never call it for legacy on a free: that record is a barrier (R6).
        Driver calls: two `cuStreamIsCapturing`, one `cuEventRecord`; `cuEventCreate` if the event pool is empty.
        """
        registry = self.registry
        device = registry.device
        if registry.lost or registry.forked:
            return None
        with registry.borrow(line, given) as handle:
            if handle is None:
                return None
            try:
                with device.scope():
                    if registry.capturing(handle):
                        return None
                    event = registry.events.take()
                    with registry.lock.checked():
                        seqno, clock = line.close_seqno()  # before the record (R4)
                    try:
                        device.event_record(event, handle)
                        captured = registry.capturing(handle)
                    except DriverError:
                        registry.events.discard(event)  # it would now query as done (R4)
                        raise
                    self.counts["event_records"] += 1
                    if captured:
                        registry.events.discard(event)
                        return None
            except DriverError as error:
                registry.failed(error)
                return None
        sealed = Sealed(seqno, event, clock)
        with registry.lock.checked():
            line.publish(sealed)
            if sealed.done:  # somebody proved it complete in the meantime
                registry.events.give_back(event)
            registry.thin(line)
        return sealed

    def query(self, line: Timeline, given: int | None = None) -> bool:
        """Ask whether the stream is idle; True proves all that was closed before (R2).

        Driver calls: `cuStreamIsCapturing` and `cuStreamQuery`.  Legacy's yes proves every blocking and per-thread
        stream idle as well, and is no barrier (R6).
        """
        registry = self.registry
        device = registry.device
        if registry.lost or registry.forked:
            return False
        with registry.borrow(line, given) as handle:
            if handle is None:
                return False
            try:
                with device.scope():
                    if registry.capturing(handle):
                        return False
                    points = registry.close_for(line)  # before the question (R4)
                    self.counts["event_queries"] += 1
                    if not device.stream_query(handle):
                        return False
            except DriverError as error:
                self.failed_query(line, error)
                return False
        registry.mark(points)
        return True

    def ask(self, lines: Iterable[Timeline]) -> list[Timeline]:
        """Those of the streams that are idle: `query` of each, where what they share is done once.

        All of them are closed before the first is asked: earlier than each needs, and never later (R4).
        """
        registry = self.registry
        device = registry.device
        if registry.lost or registry.forked:
            return []
        idle: list[Timeline] = []
        proved: list[tuple[Timeline, int]] = []
        captures, is_idle, asked = registry.capturing, device.stream_query, 0
        try:
            with device.scope(), registry.borrow_each(lines) as borrowed:
                points = registry.close_each([line for line, _ in borrowed])  # before the questions (R4)
                for (line, handle), closed in zip(borrowed, points, strict=True):
                    try:
                        if captures(handle):
                            continue
                        asked += 1
                        if not is_idle(handle):
                            continue
                    except DriverError as error:
                        self.failed_query(line, error)
                        continue  # an answer of each of the others counts all the same
                    idle.append(line)
                    proved += closed
        except DriverError as error:  # the scope itself: the context is gone
            registry.failed(error)
        self.counts["event_queries"] += asked
        registry.mark(proved)
        return idle

    def failed_query(self, line: Timeline, error: DriverError, sealed: Sealed | None = None) -> None:
        """An error is never completion (R11): it voids the event, ends the context, or poisons the timeline."""
        registry = self.registry
        registry.failed(error)
        if error.sticky:
            return
        # A stream that has ended cannot be sealed again: its event is all there is, and may yet answer.
        if error.code.startswith(_VOIDS_EVENT) and (sealed is None or registry.reachable(line)):
            if sealed is not None:
                with registry.lock.checked():
                    line.void(sealed)
                    sealed.done = True  # nobody waits for it any more; it is recorded anew before it says anything
            return
        line.poisoned = error.code

    def poll(self, lines: Iterable[Timeline]) -> bool:
        """Ask the events that are behind these streams; True if any work turned out to be over.

        The newest first (if it is done, so are all), then the oldest, then by halves: O(log n) `cuEventQuery` a
        stream, two where nothing has changed.
        """
        registry = self.registry
        device = registry.device
        if registry.lost or registry.forked:
            return False
        before = registry.version
        with registry.lock.checked():
            lines = [line for line in lines if line.in_flight]
            if not lines and not any(seal.event is not None for seal in registry.context.in_flight):
                registry.advance_context()
                return registry.version != before  # there is nobody to ask
        try:
            with device.scope():
                for line in lines:
                    with registry.lock.checked():
                        flight = list(line.in_flight)
                        for sealed in flight:
                            sealed.users += 1
                    done = None
                    try:
                        done = self._newest_done(line, flight)
                    finally:
                        with registry.lock.checked():
                            if done is not None:
                                registry.complete(line, done.seqno)
                            for sealed in flight:
                                registry.recycle(sealed)
                self._poll_context()
        except DriverError as error:  # the scope itself: the context is gone
            registry.failed(error)
        with registry.lock.checked():
            registry.advance_context()
        return registry.version != before

    def _newest_done(self, line: Timeline, flight: Sequence[Sealed]) -> Sealed | None:
        registry = self.registry
        device = registry.device
        done: Sealed | None = None
        low, high = 0, len(flight)
        at = high - 1
        while low < high:
            self.counts["event_queries"] += 1
            try:
                yes = device.event_query(flight[at].event)
            except DriverError as error:
                self.failed_query(line, error, flight[at])
                return done
            if yes:
                done, low = flight[at], at + 1
            elif at == 0:
                break
            else:
                first = high == len(flight) and at == high - 1 and low == 0
                high = at
                at = 0 if first else (low + high) // 2
                continue
            at = (low + high) // 2
        return done

    def _poll_context(self) -> None:
        registry = self.registry
        device = registry.device
        with registry.lock.checked():
            seals = [s for s in registry.context.in_flight if s.event is not None]
            for seal_ in seals:
                if seal_.event is not None:
                    seal_.event.users += 1
        for seal_ in reversed(seals):
            event = seal_.event
            if event is None:
                continue
            try:
                self.counts["event_queries"] += 1
                yes = device.event_query(event.event)
            except DriverError as error:
                registry.failed(error)
                yes = False
            if yes:  # it was behind all work of the context, so each stream got as far as the need says
                with registry.lock.checked():
                    for number, seqno in seal_.need.items():
                        line = registry.lines.get(number)
                        if line is not None:
                            registry.complete(line, seqno)
                break
        with registry.lock.checked():
            registry.advance_context()
            for seal_ in seals:
                if seal_.event is not None:
                    registry.recycle(seal_.event)

    def seal_legacy(self) -> Sealed | None:
        """Record on legacy: covers every blocking and per-thread stream, orphans included (R9).

        A barrier that stalls all of them: only where growing is impossible, last (R6).  None if a blocking stream
        captures.  Driver calls: those of `seal`.
        """
        registry = self.registry
        points = registry.close_for(registry.legacy)  # before the record (R4)
        sealed = self.seal(registry.legacy)
        if sealed is None:
            return None
        with registry.lock.checked():
            sealed.proves += points  # it may speak already for a mark that was forgotten
            sealed.clock = sealed.clock.joined(VectorClock({line.number: seqno for line, seqno in points}))
            if registry.legacy.completed >= sealed.seqno:  # `done` alone may say that it failed, or was forgotten
                for line, seqno in points:
                    registry.complete(line, seqno)
        return sealed

    # -- the users that are only assumed -----------------------------------------------------------

    def close_context(self, *, context_event: bool = False) -> None:
        """Close the context's seqno and say what each stream must reach for it (R3).  Records on no stream.

        Streams that answer "done" are no longer needed; the others are sealed by `seal`, now or later, or answer
        a later query.  context_event: put one `cuCtxRecordEvent` behind it all, which kills every capture of the
        context (R6), so the caller has made sure that there is none.
        Driver calls: one query of legacy, one of each stream not proved idle by that.
        """
        registry = self.registry
        if registry.lost or registry.forked:
            return
        with registry.lock.checked():
            seqno = registry.context.close_seqno()  # before the streams' own (R4)
        try:
            with registry.device.scope():  # once, for all of them
                idle = self.query(registry.legacy)
                with registry.lock.checked():
                    lines = [
                        line
                        for line in registry.seen()
                        if not (idle and (line.kind.blocking or line is registry.legacy))
                    ]
                over: list[Timeline] = []
                if not context_event:
                    over = self.ask([line for line in lines if line is not registry.legacy and not line.ended])
                numbers = {line.number for line in over}
                with registry.lock.checked():
                    need = {line.number: line.close_seqno()[0] for line in lines if line.number not in numbers}
        except DriverError as error:  # the scope itself: the context is gone
            registry.failed(error)
            return
        event = self._record_context(seqno, lines) if context_event else None
        with registry.lock.checked():
            if not registry.context.publish(ContextSeal(seqno, VectorClock(need), event)) and event is not None:
                registry.events.give_back(event.event)  # another thread's later seal is complete already
            registry.advance_context()
            registry.thin(registry.context)

    def _record_context(self, seqno: int, lines: Sequence[Timeline]) -> Sealed | None:
        """`cuCtxRecordEvent`, unless a capture is known of, or found by asking legacy and a few streams (R6)."""
        registry = self.registry
        device = registry.device
        try:
            with registry.captures.whole_context() as free, device.scope():
                if not free or registry.capturing(LEGACY):
                    return None
                few = [line for line in lines[:_ASKED] if line.kind is not Kind.LEGACY]
                with registry.borrow_each(few) as borrowed:
                    if any(registry.capturing(handle) for _, handle in borrowed):
                        return None
                event = registry.events.take()
                try:
                    device.ctx_record_event(event)
                except DriverError:
                    registry.events.discard(event)
                    raise
            self.counts["event_records"] += 1
        except DriverError as error:
            registry.failed(error)
            return None
        return Sealed(seqno, event, EMPTY)

    # -- waits -------------------------------------------------------------------------------------

    def make_wait(self, line: Timeline, sealed: Sequence[Sealed], given: int | None = None) -> bool:
        """Make the stream wait on the device for these events; False if it captures or the driver refuses.

        The caller holds each event's `users`.  What is learnt is the snapshot of each event, never a later clock
        (R4).  Driver calls: two `cuStreamIsCapturing`, one `cuStreamWaitEvent` each.
        """
        registry = self.registry
        device = registry.device
        if registry.lost or registry.forked:
            return False
        with registry.borrow(line, given) as handle:
            if handle is None:
                return False
            try:
                with device.scope():
                    if registry.capturing(handle):
                        return False
                    for one in sealed:
                        device.stream_wait_event(handle, one.event)
                        self.counts["stream_waits"] += 1
                    if registry.capturing(handle):
                        return False
            except DriverError as error:
                registry.failed(error)
                return False
        with registry.lock.checked():
            for one in sealed:
                line.learn(one.clock)
            registry.prune(line)
        return True

    def synchronize(self, line: Timeline, given: int | None = None) -> None:
        """Wait on the host for all work of the stream.  Raises DriverError, StreamCapturing, StreamClosed.

        Driver calls: `cuStreamIsCapturing`, `cuStreamSynchronize`.
        """
        registry = self.registry
        registry.check_usable()
        device = registry.device
        with registry.borrow(line, given, waits=True) as handle:
            if handle is None:
                with registry.lock.checked():
                    if registry.captures.forbids(line):
                        raise StreamCapturing(_CAPTURED)
                raise StreamClosed("the stream has been closed, or belongs to another thread")
            with device.scope():
                if registry.capturing(handle):
                    raise StreamCapturing(_CAPTURED)
                points = registry.close_for(line)  # before the wait (R4)
                self.counts["host_synchronizations"] += 1
                try:
                    device.stream_synchronize(handle)
                except DriverError as error:
                    self.failed_query(line, error)
                    raise
        registry.mark(points)

    def wait_on_host(self, line: Timeline) -> None:
        """Wait on the host until the newest event of the stream is complete; no error if that cannot be.

        A stream without one that only legacy can speak for (orphans, other threads' streams) is waited for with
        legacy, which waits for every blocking stream.  Driver calls: `cuEventSynchronize` or `cuStreamSynchronize`.
        """
        registry = self.registry
        device = registry.device
        with registry.lock.checked():
            sealed = line.in_flight[-1] if line.in_flight else None
            if sealed is not None:
                sealed.users += 1
        if sealed is not None:
            try:
                self.counts["host_synchronizations"] += 1
                with device.scope():
                    device.event_synchronize(sealed.event)
                registry.mark([(line, sealed.seqno)])
            except DriverError as error:
                self.failed_query(line, error, sealed)
            finally:
                with registry.lock.checked():
                    registry.recycle(sealed)
        if (sealed is None or line.completed < line.closed) and (line.kind.blocking or line.kind is Kind.LEGACY):
            with suppress(DriverError, StreamCapturing):
                self.synchronize(registry.legacy)

    # -- ends --------------------------------------------------------------------------------------

    def end(self, line: Timeline, given: int | None = None) -> None:
        """No work will be added to the stream: seal it once more and let its owner go (R2, R9).

        given: a handle that is alive for the length of this call.  Driver calls: a query; a record where it says
        "busy"; `cuStreamDestroy` for a stream of ours.  Where neither works, as in a capture, the owner is kept and
        the next `end_finished` tries again.
        """
        registry = self.registry
        if registry.forked:
            return
        with registry.lock.checked():
            if line.kind is Kind.LEGACY or (line.ended and line.owner is None):
                return
            line.end()
        self._seal_and_release(line, given)

    def identify(self, unknown: Timeline, line: Timeline) -> bool:
        """The stream that an unknown timeline stood for turns out to be `line`'s: what that has done, both have.

        False where `line` can be neither asked nor sealed now, as in a capture.  Driver calls: a query, or a record.
        """
        registry = self.registry
        with registry.lock.checked():
            unknown.end()
            point = (unknown, unknown.closed)
        if self.query(line):
            registry.mark([point])
            return True
        sealed = self.seal(line)
        if sealed is None:
            return False
        with registry.lock.checked():
            if line.completed >= sealed.seqno:
                registry.complete(*point)
            elif sealed.done:  # it failed, or was forgotten: it will never say anything
                return False
            else:
                sealed.proves.append(point)
        return True

    def let_go(self, line: Timeline) -> None:
        """Nobody but us holds the foreign object that owns the stream: seal the stream while we can, and drop it.

        The stream ends only if the object is known to destroy it.  Else it may live on, and be given work by whoever
        has its handle: like one known by a bare handle (R9).
        """
        registry = self.registry
        if registry.forked:
            return
        registry.before_mark()  # this may be the last mark ever: queued frees should count as before it
        with registry.lock.checked():
            if not registry.only_ours(line):
                return  # somebody holds the object again
            if dies_with(line.owner):
                line.end()
        self._seal_and_release(line, None)

    def _seal_and_release(self, line: Timeline, given: int | None) -> None:
        registry = self.registry
        reachable = (given is not None or line.owner is not None) and registry.lost is None
        if reachable and not self.query(line, given) and self.seal(line, given) is None:
            registry.unended.append(line)
            return
        with registry.lock.checked():
            owner = registry.release_owner(line)
            registry.forget_if_over(line)
        if isinstance(owner, OwnedHandle):
            with suppress(DriverError):
                registry.destroy(owner)
        del owner  # a foreign object: its destructor runs here, outside every lock

    def end_finished(self) -> bool:
        """End the streams whose user-facing object or thread has gone.  True if there were any."""
        registry = self.registry
        any_ended = bool(registry.captures.gone) and registry.captures.bury()
        for lines in (registry.unended, registry.finished):
            for _ in range(len(lines)):
                try:
                    line = lines.popleft()
                except IndexError:
                    break
                if line.ended or line.kind is Kind.PER_THREAD or isinstance(line.owner, OwnedHandle):
                    self.end(line)
                else:
                    self.let_go(line)
                any_ended = True
        return any_ended

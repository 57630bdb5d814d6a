"""How far one stream has got.

A stream finishes its work in the order it was given, so one integer tells how much is done.  We count
in *seqnos*; a seqno is closed by a mark on the stream.

    completed <= sealed < pending                                        (R2)

pending    stamped on blocks freed now; nothing covers it yet
sealed     newest seqno with an event of ours behind it
completed  newest seqno the host knows to be finished; may lag, never leads

A seqno between `sealed` and `pending` is *closed*: marked on the stream, but by nothing we could wait for.
The context as a whole is a timeline too: the one of the users we only assume (R3).

Pure arithmetic: no driver call is made here.  Not thread-safe: callers hold the registry's lock, except
that `here`, `clock` and `completed` are single references, read by anyone at any time.
Next: sealing.py (the driver calls around it), registry.py (all timelines of a context).
Arguments: docs/ordering.md.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Final

from allocator.events import EMPTY, VectorClock

MOST_MARKS: Final = 128
"""In flight on one timeline: beyond that every second one is forgotten (`thin`)."""
MOST_ENTRIES: Final = 16
"""Of a stream's clock, and twice those that were left the last time, before it is pruned."""


class Kind(enum.Enum):
    """What the driver orders a stream behind."""

    LEGACY = "legacy"  # before and behind every blocking stream (R6)
    PER_THREAD = "per-thread"  # blocking, and one for each thread under one handle (R8)
    BLOCKING = "blocking"
    NON_BLOCKING = "non-blocking"
    CONTEXT = "context"  # no stream: the users we assume, all together (R3)
    GRAPH = "graph"  # no stream: what a captured graph may use until it dies (R10)

    @property
    def blocking(self) -> bool:
        """True if the legacy stream's work is ordered against this stream's."""
        return self is Kind.PER_THREAD or self is Kind.BLOCKING


class Sealed:
    """One event of ours behind one seqno.

    clock: what a stream that waits for the event gets to know: the stream's clock when the seqno was closed,
    and the seqno itself (R4).  users: threads that use the event outside the lock.
    done: complete, or forgotten, so that nobody waits for it any more; its event may be recorded anew.
    proves: other streams' seqnos that it covers as well, where it lies on legacy (R9).
    """

    __slots__ = ("clock", "done", "event", "proves", "seqno", "users")

    def __init__(self, seqno: int, event: int, clock: VectorClock) -> None:
        self.seqno = seqno
        self.event = event
        self.clock = clock
        self.users = 0
        self.done = False
        self.proves: list[tuple[Timeline, int]] = []


class AssumedStamp(VectorClock):
    """The stamp of a free whose users are the stream and whoever is only assumed (R3): it says its two seqnos itself.

    own: of the stream.  context: of the context.
    """

    __slots__ = ("context", "own")

    def __init__(self, here: VectorClock, own: int, number: int, context: int) -> None:
        super().__init__({**here.at, number: context})
        self.own = own
        self.context = context


class Timeline:
    """The counters of one stream, and the events of ours that are behind its work.

    >>> line = Timeline(7, Kind.NON_BLOCKING)
    >>> seqno, clock = line.close_seqno()
    >>> line.publish(Sealed(seqno, event=1, clock=clock)); [s.event for s in line.complete(seqno)]
    [1]
    >>> line.completed, line.sealed, line.pending
    (1, 1, 2)
    """

    __slots__ = (
        "clock",
        "completed",
        "ended",
        "here",
        "here_assumed",
        "identity",
        "in_flight",
        "keeper",
        "kind",
        "name",
        "number",
        "owner",
        "pending",
        "pins",
        "poisoned",
        "prune_at",
        "sealed",
    )

    def __init__(self, number: int, kind: Kind, identity: int = -1, name: str | None = None) -> None:
        self.number = number
        self.kind = kind
        self.identity = identity
        """The driver's id of the stream, which never repeats (R8); -1 where there is none."""
        self.name = name
        self.owner: object = None
        """The object that keeps the handle alive; None for bare handles and special streams (R9)."""
        self.keeper: object = None
        """What live memory keeps, so that the stream stays known (R9): the owner; None where the stream ends when the
        program lets that go."""
        self.pending = 1
        self.sealed = 0
        self.completed = 0
        self.clock = EMPTY
        """What the stream has waited for.  Its own seqnos are not in it."""
        self.prune_at = MOST_ENTRIES
        """Entries of it beyond which those of streams that have gone are looked for."""
        self.here = VectorClock({number: 1})
        """The stamp of a free now, if this stream alone used the block (R3)."""
        self.here_assumed: AssumedStamp | None = None
        """`here` joined with the context's pending seqno; None when that must be made anew."""
        self.in_flight: deque[Sealed] = deque()
        """Events not known to be complete, in order of seqno."""
        self.ended = False
        """No work will ever be added; every later free gets the last seqno (R2)."""
        self.pins = 0
        """Threads inside a driver call with the stream's handle, host waits apart."""
        self.poisoned: str | None = None
        """The driver's error that made the stream's progress unknowable (R11)."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of a stream object, which may carry its timeline, carries none."""
        return type(None), ()

    @property
    def closed(self) -> int:
        """The newest closed seqno."""
        return self.here.at[self.number] if self.ended else self.pending - 1

    def close_seqno(self) -> tuple[int, VectorClock]:
        """Close the pending seqno; return it with the clock that a mark made *from now on* carries.

        Called before the driver is asked to make the mark: a free in between gets the next seqno and does not
        count as covered.  The clock is read now: later it would credit the mark with orderings that the
        stream only gained afterwards (R4).
        """
        seqno = self.close()
        return seqno, self.clock.advanced(self.number, seqno)

    def close(self) -> int:
        """Close the pending seqno for a question or a host wait, which no stream can wait for: no clock is needed."""
        if self.ended:
            return self.closed
        seqno = self.pending
        self.pending = seqno + 1
        self.here = VectorClock({self.number: seqno + 1})
        self.here_assumed = None
        return seqno

    def end(self) -> None:
        """No work will be added any more: every later free gets the newest closed seqno (R2)."""
        if not self.ended:
            seqno = self.close()
            self.ended = True
            self.here = VectorClock({self.number: seqno})
            self.here_assumed = None

    def publish(self, sealed: Sealed) -> None:
        """An event now lies behind `sealed.seqno` and all closed before it.  Called after the record went well."""
        flight = self.in_flight
        if sealed.seqno <= self.completed:
            sealed.done = True
            return
        at = len(flight)
        while at and flight[at - 1].seqno > sealed.seqno:  # another thread closed later and recorded sooner
            at -= 1
        flight.insert(at, sealed)
        self.sealed = max(self.sealed, sealed.seqno)

    def complete(self, seqno: int) -> list[Sealed]:
        """The work up to `seqno` is known to be over; returns the events behind it, which are now complete.

        Only for a seqno that was closed before the proof was asked for (R2, R4).
        """
        if seqno <= self.completed:
            return []
        assert seqno <= self.closed, f"seqno {seqno} is not closed: {self!r}"
        self.completed = seqno
        self.sealed = max(self.sealed, seqno)
        over: list[Sealed] = []
        flight = self.in_flight
        while flight and flight[0].seqno <= seqno:
            sealed = flight.popleft()
            sealed.done = True
            over.append(sealed)
        return over

    def void(self, sealed: Sealed) -> None:
        """The event proves nothing (R11): forget it, so that its seqnos are sealed again.

        The one case in which `sealed` goes back.
        """
        if sealed in self.in_flight:
            self.in_flight.remove(sealed)
            self.sealed = max([self.completed, *(s.seqno for s in self.in_flight)])

    def thin(self) -> list[Sealed]:
        """Forget every second event, if there are more than MOST_MARKS; returns those, which count as done.

        What a forgotten one covers, and says of other streams, the next one does too: it is found over later (R13).
        The oldest and the newest stay, and those in use by a thread (R4).  Without it a stream that is busy for ever
        would hold one event more for each mark, and each question would take longer.
        """
        if len(self.in_flight) <= MOST_MARKS:
            return []
        kept: deque[Sealed] = deque()
        gone: list[Sealed] = []
        after: Sealed | None = None
        for at, sealed in enumerate(reversed(self.in_flight)):
            if after is None or at % 2 == 0 or sealed.users or sealed is self.in_flight[0]:
                kept.appendleft(sealed)
                after = sealed
                continue
            sealed.done = True
            gone.append(sealed)
            if sealed.proves:
                reached: dict[Timeline, int] = {}
                for line, seqno in (*sealed.proves, *after.proves):
                    reached[line] = max(seqno, reached.get(line, 0))
                after.proves = list(reached.items())
        self.in_flight = kept
        return gone

    def event_for(self, seqno: int) -> Sealed | None:
        """The oldest event that covers `seqno`, None if there is none.  O(events in flight)."""
        return next((s for s in self.in_flight if s.seqno >= seqno), None)

    def learn(self, clock: VectorClock) -> None:
        """The stream now waits for all of `clock`.  Called after the driver took the wait (R4)."""
        self.clock = self.clock.joined(clock)

    def check(self) -> None:
        """Raise AssertionError unless R2 holds and events are in seqno order.  O(in flight)."""
        assert self.completed <= self.sealed < self.pending, self
        assert self.sealed <= self.closed, self
        seqnos = [s.seqno for s in self.in_flight]
        assert seqnos == sorted(seqnos) and all(self.completed < q <= self.sealed for q in seqnos), self
        assert not any(s.done for s in self.in_flight), self
        assert self.here.at == {self.number: self.closed if self.ended else self.pending}, self

    def __repr__(self) -> str:
        what = self.name or f"{self.kind.value} {self.identity}"
        state = " ended" if self.ended else ""
        return f"<Timeline {self.number} ({what}){state}: {self.completed} <= {self.sealed} < {self.pending}>"

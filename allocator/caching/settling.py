"""Finding out what is over: asking, sealing and waiting, for one pool.

    ask      queries, where an answer could free memory; nothing is recorded
    seal     an event behind every stream that free memory waits for, now and then (R13)
    wait     on the host, bounded for an allocation, unbounded for `settle()`

What free memory waits for is read under the pool's lock; the driver is asked outside it (S14, S16).
Next: ladder.py, which decides when; ../streams/sealing.py, what the calls are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from allocator.caching.accounting import Accounts
from allocator.caching.frees import Frees
from allocator.caching.shelves import Shelves
from allocator.config import Config
from allocator.devices import Device
from allocator.errors import DriverError
from allocator.streams import Kind, Registry, Sealing, Timeline
from allocator.sync import LockLike


@dataclass
class Waiting:
    """What free memory waits for: all streams, those with frees that no event is behind, assumed users among them."""

    lines: list[Timeline]
    unsealed: list[Timeline]
    assumed: bool


class Settling:
    """Asks, seals and waits for one pool."""

    def __init__(
        self,
        device: Device,
        config: Config,
        registry: Registry,
        sealing: Sealing,
        shelves: Shelves,
        frees: Frees,
        accounts: Accounts,
        lock: LockLike,
    ) -> None:
        self._device = device
        self._registry = registry
        self._sealing = sealing
        self._shelves = shelves
        self._frees = frees
        self._accounts = accounts
        self._lock = lock
        self._context_events = config.context_events

    def waiting(self, most: int | None = None) -> Waiting:
        """What free memory waits for now, the frees queued so far included; of those `most` at most, if it is given."""
        with self._lock.checked():
            self._accounts.mark()
            if most is None:
                self._frees.drain()
            else:
                self._frees.drain_some(most)
            return self._waiting()

    def _waiting(self) -> Waiting:
        """Under the lock."""
        lines = self._shelves.waiting()
        return Waiting(lines, self._shelves.unsealed(lines), self._shelves.context_waits)

    def poll(self, lines: Iterable[Timeline]) -> bool:
        """Ask the events behind these streams; True if anything turned out to be over."""
        return self._sealing.poll(in_flight(lines))

    def ask(self, waiting: Waiting) -> bool:
        """Ask each stream with unsealed frees whether it is idle; True if something is over that was not.

        One `cuStreamQuery` each; for those that cannot be asked themselves (orphans, other threads' per-thread
        streams) one of legacy, which proves every blocking stream idle and is no barrier (R6, R9).  Assumed users
        need one of every stream seen.
        """
        registry, sealing = self._registry, self._sealing
        before = registry.version
        if self._by_context(waiting):
            sealing.close_context(context_event=True)
            self.poll(waiting.lines)
        elif waiting.assumed:
            sealing.close_context()
        else:
            reachable = [line for line in waiting.unsealed if registry.reachable(line)]
            idle = sealing.ask(reachable)
            if idle:
                with self._lock.checked():
                    self._shelves.stamped.difference_update(line.number for line in idle)
            if len(reachable) < len(waiting.unsealed) and any(
                line.kind.blocking and not registry.reachable(line) for line in waiting.unsealed
            ):
                sealing.query(registry.legacy)
        return registry.version != before

    def _may_mark_context(self) -> bool:
        """May a context event be used at all?  By default where every library that can capture is hooked (R6)."""
        if self._context_events is False or not self._device.supports_context_events:
            return False
        captures = self._registry.captures
        return not captures.active and (self._context_events is True or captures.all_known())

    def _by_context(self, waiting: Waiting) -> bool:
        """May and should one context event speak for streams that nobody can ask or record on (R6, R9)?

        Such a stream, seen once by a bare handle, would otherwise gate all memory with assumed uses for ever.
        """
        if not self._may_mark_context():
            return False
        lines = waiting.lines if waiting.assumed else waiting.unsealed
        return any(not self._registry.reachable(line) for line in lines)

    def seal(self, given: tuple[Timeline, int | None] | None = None) -> None:
        """Put an event behind every stream that free memory waits for, where it has none; then poll (R13).

        given: a stream and the handle that the running call was given for it, alive meanwhile (R9).
        Runs every `seal_frees` frees, and before the pool grows.  No record where a query says "idle"; none on
        legacy, on other threads' per-thread streams, on capturing streams and orphans.
        """
        sealing, registry, shelves = self._sealing, self._registry, self._shelves
        sealing.end_finished()
        with self._lock.checked():
            self._frees.sealed()
            waiting = self._waiting()
            shelves.stamped.clear()
        if (waiting.assumed and self._may_mark_context()) or self._by_context(waiting):
            sealing.close_context(context_event=True)
            self.poll(waiting.lines)
            return
        if waiting.assumed:
            sealing.close_context()
        try:
            with self._device.scope():  # once, for all of them
                through_legacy = self._seal_each(waiting, given)
        except DriverError as error:  # the scope itself: the context is gone
            registry.failed(error)
            return
        if through_legacy and not waiting.assumed:
            sealing.query(registry.legacy)
        self.poll(waiting.lines)

    def _seal_each(self, waiting: Waiting, given: tuple[Timeline, int | None] | None) -> bool:
        """Ask and seal; True if there are streams that only legacy can speak for."""
        sealing, registry, shelves = self._sealing, self._registry, self._shelves
        through_legacy = False
        for line in waiting.lines if waiting.assumed else waiting.unsealed:
            if waiting.assumed and line.completed >= line.closed:
                continue  # it has just answered close_context with "idle"
            handle = given[1] if given is not None and given[0] is line else None
            if line.kind is Kind.LEGACY or (handle is None and not registry.reachable(line)):
                through_legacy |= line.kind is not Kind.NON_BLOCKING
            elif (waiting.assumed or not sealing.query(line, handle)) and sealing.seal(line, handle) is None:
                with self._lock.checked():
                    shelves.stamped.add(line.number)
        return through_legacy

    def wait_for_any(self, seconds: float) -> bool | None:
        """Wait on the host, bounded, until any event that free memory waits for is complete (R13).

        True: something is over.  False: the time is up.  None: there is no event to wait for.
        """
        registry, device = self._registry, self._device
        lines = in_flight(dict.fromkeys((*self.waiting().lines, registry.legacy)))  # in one order, so that runs repeat
        with registry.lock.checked():
            events = [line.in_flight[0] for line in lines if line.in_flight]
            events += [seal.event for seal in registry.context.in_flight if seal.event is not None][:1]
            for sealed in events:
                sealed.users += 1
        if not events:
            return None
        try:
            self._sealing.counts["host_synchronizations"] += 1
            with device.scope():
                over = seconds > 0 and device.wait_any([sealed.event for sealed in events], seconds)
        except DriverError as error:  # no answer (R11); which event it was, the poll finds out
            registry.failed(error)
            over = False
        finally:
            with registry.lock.checked():
                for sealed in events:
                    registry.recycle(sealed)
        self.poll(lines)
        return over

    def wait_for_all(self) -> None:
        """Wait on the host, without bound, for everything in flight that can be waited for."""
        sealing, shelves, accounts = self._sealing, self._shelves, self._accounts
        for _ in range(8):  # a wait may let other threads free more; what cannot be marked stays
            self.seal()
            with self._lock.checked():
                accounts.mark()
                self._frees.drain()
                shelves.flush()
                shelves.refresh()
                accounts.mark()
                if accounts.in_flight() <= 0:
                    return
                lines = shelves.waiting()
            for line in lines:
                sealing.wait_on_host(line)

    def all_over(self) -> bool:
        """Is every stream of the context idle?  Asked before what waits for the whole device (R13)."""
        registry, sealing = self._registry, self._sealing
        sealing.end_finished()
        with registry.lock.checked():
            lines = registry.seen()
        self.poll(lines)
        blocking_idle = sealing.query(registry.legacy)
        for line in lines:
            if line.kind is Kind.LEGACY or line.kind.blocking:
                if not blocking_idle:
                    return False
            elif line.ended or not registry.reachable(line):
                if line.completed < line.closed:  # nothing more can be asked; at worst the device is waited for
                    return False
            elif not sealing.query(line):
                return False
        return True


def in_flight(lines: Iterable[Timeline]) -> list[Timeline]:
    """The streams that have events to ask."""
    return [line for line in lines if line.in_flight]

"""The ladder: every way to serve a request, in the order in which they are tried.

     1  own                  best fit among what the stream itself may take at once
     2  idle                 best fit among what is finished; competes with 1 on fit
     3  covered              what the stream has already waited for; no driver call
                             1 to 3 as everything lies (`at_hand`), then with all bins emptied
     -  apart                a page of new memory, where small memory has changed streams too often (apart.py)
     4  settle               ask how far the other streams have got; then 1 to 3 again
     5  new memory           within the limit; above `max_in_flight` wait a little first
     -  the gone             give back the memory of pools that have gone, and grow
     6  internal_dependency  growing is impossible: make the stream wait, on the device, for another's work
     7  (moving idle pages together belongs here)
     8  release              give idle memory of the other size class back, and grow
     9  host wait            wait, on the host and bounded, for any memory in flight
    10  callbacks, then garbage collection
    11  OutOfMemoryError

After every step that could have freed something the shelves are looked at again before the driver is asked.
The pool's lock is held only while looking: never over a driver call, a callback, or a wait (S14, S16).  Waits are
never for one particular block, always for anything that would serve (R13).  The ladder stays whole in this module.
Next: settling.py, which finds out what is over.  Arguments: docs/ordering.md.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from allocator.blocks import SMALL, Block
from allocator.caching.accounting import Accounts
from allocator.caching.apart import Apart
from allocator.caching.frees import Frees
from allocator.caching.growth import Growth
from allocator.caching.reaper import any_left, reap
from allocator.caching.settling import Settling
from allocator.caching.shelves import SCAN, Shelves
from allocator.config import Config
from allocator.devices import Device
from allocator.events import VectorClock
from allocator.streams import CONTEXT, Kind, Registry, Sealed, Sealing, Timeline
from allocator.sync import LockLike, shield


class Request:
    """One allocation on its way down the ladder.

    given: the stream's handle, alive for the length of the call.  vain: what `Front` noted when `at_hand` failed.
    """

    __slots__ = ("apart", "assumed", "given", "kind", "line", "requested", "size", "vain")

    def __init__(
        self,
        line: Timeline,
        given: int | None,
        requested: int,
        size: int,
        kind: int,
        assumed: bool,
        vain: object = None,
    ) -> None:
        self.line = line
        self.given = given
        self.requested = requested
        self.size = size
        self.kind = kind
        self.assumed = assumed
        self.vain = vain
        self.apart = False
        """To be served by new memory, although another stream's may be free (apart.py)."""


class Ladder:
    """The policy of one pool."""

    def __init__(
        self,
        device: Device,
        config: Config,
        registry: Registry,
        sealing: Sealing,
        shelves: Shelves,
        frees: Frees,
        growth: Growth,
        settling: Settling,
        accounts: Accounts,
        lock: LockLike,
    ) -> None:
        self._device = device
        self._config = config
        self._registry = registry
        self._sealing = sealing
        self._shelves = shelves
        self._frees = frees
        self._growth = growth
        self._settling = settling
        self._accounts = accounts
        self._lock = lock
        self.apart = Apart(config.apart_bytes, config.small_page)
        self.callbacks: list[Callable[[int], bool]] = []
        self.unchanged: Callable[[object, int, Timeline, bool], bool] = lambda vain, size, line, assumed: False
        """Would `at_hand` fail as it did before this section?  Set by the pool."""

    def climb(self, request: Request) -> Block | None:
        """A block for the request, LIVE and accounted for; None if every step failed (step 11 is the caller's).

        Raises DriverError if the driver fails for another reason than lack of memory.
        """
        return (
            self._look(request, first=True)
            or self._grow_apart(request)
            or self._settle(request)
            or self._grow(request)
            or self._gone(request)
            or self._depend(request)
            or self._release(request)
            or self._host_wait(request)
            or self._call_back(request)
            or self._collect(request)
            or self._wait_for_others(request)
        )

    # -- 1, 2, 3 --------------------------------------------------------------------------------

    def at_hand(self, line: Timeline, requested: int, size: int, kind: int, assumed: bool) -> Block | None:
        """Steps 1 to 3 as everything lies, before anything else is tried: under the pool's lock, frees put down.

        Emptying the bins would cost whoever would have found his own there.
        """
        shelves, accounts = self._shelves, self._accounts
        accounts.mark()
        self._frees.missed()
        shelves.refresh()
        found, step = shelves.take(line, size, kind, assumed), "own or idle"
        if found is None:
            found, step = shelves.take_covered(line, size, kind, assumed), "covered"
            if found is None:
                return None
        block, reuse = found
        if kind == SMALL and block.sole != line.number:
            self.apart.hired()
        shelves.hand_out(block, line, size, assumed)
        accounts.hand_out(block, requested, reuse)
        accounts.steps[step] += 1
        accounts.low = accounts.allocated  # as `mark`: what left the shelves made nothing more in flight
        return block

    def _look(self, request: Request, *, first: bool = False, step: str | None = None) -> Block | None:
        """Steps 1 to 3 under the lock, all bins emptied first, so that what is in them can merge and serve.

        first: `at_hand` again before that, as much may have changed since, unless it has just failed; and the bins stay
        as they are where memory that stays apart is the cheaper choice.
        """
        shelves, accounts = self._shelves, self._accounts
        with self._lock.checked():
            self._frees.missed()
            self._frees.drain()
            accounts.mark()
            found: tuple[Block, str, str] | None = None
            if first and not self.unchanged(request.vain, request.size, request.line, request.assumed):
                shelves.refresh()
                found = self._find(request)
            if found is None and first and request.kind == SMALL and self._apart_pays():
                self.apart.buy()
                request.apart = True
            elif found is None and (shelves.flush() or not first):
                shelves.refresh()
                found = self._find(request)
            block: Block | None = None
            if found is not None:
                block, reuse, name = found
                if request.kind == SMALL and block.sole != request.line.number:
                    self.apart.hired()
                self._hand_out(block, request, reuse)
                accounts.steps[step or name] += 1
            accounts.mark()
            return block

    def _find(self, request: Request) -> tuple[Block, str, str] | None:
        """A block off its shelf, how that counts, and the step.  Under the lock."""
        line, size, kind, assumed = request.line, request.size, request.kind, request.assumed
        found, step = self._shelves.take(line, size, kind, assumed), "own or idle"
        if found is None:
            found, step = self._shelves.take_covered(line, size, kind, assumed), "covered"
        return None if found is None else (*found, step)

    def _hand_out(self, block: Block, request: Request, reuse: str) -> None:
        """Under the lock, and after `mark`: what leaves the shelves makes nothing more in flight."""
        accounts = self._accounts
        self._shelves.hand_out(block, request.line, request.size, request.assumed)
        accounts.hand_out(block, request.requested, reuse)
        accounts.low = accounts.allocated

    def _apart_pays(self) -> bool:
        """Is a page of new memory the cheaper choice, and allowed?  Under the lock."""
        bound = self._config.max_in_flight  # above it, growing comes after waiting (R13)
        if bound and self._accounts.in_flight() > bound:
            return False
        return self.apart.pays(self._growth.limit, self._accounts.reserved)

    def _grow_apart(self, request: Request) -> Block | None:
        """A page of new memory, while another stream's may be free.  Where it cannot be had: steps 1 to 3, as ever."""
        if not request.apart:
            return None
        request.apart = False
        block: Block | None = None
        try:
            block = self._growth.grow(request.line, request.size, SMALL, request.assumed)
        finally:  # the driver may also fail for another reason than lack of memory
            if block is None:
                with self._lock.checked():
                    self.apart.refused()
        if block is None:
            return self._look(request)
        self._take_grown(block, request, "apart")
        return block

    # -- 4 --------------------------------------------------------------------------------------

    def _settle(self, request: Request) -> Block | None:
        """Ask the events there are, then the streams themselves; both only where something waits for an answer."""
        if "opportunistic" not in self._config.reuse:
            return None
        settling = self._settling
        waiting = settling.waiting()
        if not waiting.lines and not self._registry.finished:
            return None
        if self._sealing.end_finished() | settling.poll(waiting.lines):
            block = self._look(request, step="settle")
            if block is not None:
                return block
        if settling.ask(waiting):
            return self._look(request, step="settle")
        return None

    # -- 5 --------------------------------------------------------------------------------------

    def _grow(self, request: Request, step: str | None = None) -> Block | None:
        config = self._config
        if step is None:
            if config.max_in_flight and self._waitable() > config.max_in_flight:
                block = self._wait_below_bound(request)
                if block is not None:
                    return block
            with self._lock.checked():
                self._accounts.mark()
                block = self._shelves.gather(request.line, request.size, request.kind, request.assumed)
                if block is not None:
                    reuse = self._shelves.reuse_kind(block, request.line)
                    self._hand_out(self._shelves.carve(block, request.size), request, reuse)
                    self._accounts.steps["gather"] += 1
                self._accounts.mark()
            if block is not None:
                return block
            if self._frees.crossing and self._frees.unsealed:
                # What is marked now can serve the next request that would grow.
                self._settling.seal((request.line, request.given))
        self._registry.sweep_now()
        block = self._growth.grow(request.line, request.size, request.kind, request.assumed)
        if block is not None:
            self._take_grown(block, request, step or "grow")
        return block

    def _take_grown(self, block: Block, request: Request, step: str) -> None:
        """Hand out what `Growth.grow` has brought."""
        with self._lock.checked():
            self._accounts.mark()
            self._shelves.transit.discard(block)
            reuse = self._shelves.reuse_kind(block, request.line)
            self._hand_out(self._shelves.carve(block, request.size), request, reuse)
            self._accounts.steps[step] += 1
            self._accounts.mark()

    def _waitable(self) -> int:
        """Bytes in flight that a wait could free; what is parked is not counted (R13)."""
        with self._lock.checked():
            return self._accounts.in_flight() - self._shelves.parked_bytes()

    def _wait_below_bound(self, request: Request) -> Block | None:
        """Above `max_in_flight`: poll and wait for anything that would serve, bounded, then let it grow (R13)."""
        self._settling.seal((request.line, request.given))
        return self._wait_for_any(request, "settle", self._config.max_in_flight)

    def _gone(self, request: Request) -> Block | None:
        """Growing is impossible: pools that have gone are looked at however lately they were, as it may be over now."""
        if not any_left():
            return None
        reap()
        return self._grow(request, step="grow")

    # -- 6 --------------------------------------------------------------------------------------

    def _depend(self, request: Request) -> Block | None:
        """Growing is impossible: let the stream wait on the device for work of others, and take their memory."""
        if "internal_dependency" not in self._config.reuse or request.line.kind is Kind.GRAPH:
            return None  # a capture can wait for nothing that was recorded outside it (R10)
        for may_seal, legacy in ((False, False), (True, False), (True, True)):
            block = self._depend_on(request, may_seal=may_seal, legacy=legacy)
            if block is not None:
                self._accounts.retries["internal_dependency"] += 1
                return block
        return None

    def _depend_on(self, request: Request, *, may_seal: bool, legacy: bool) -> Block | None:
        if not legacy and request.line.kind is Kind.LEGACY:
            return None  # a wait put on legacy stalls every blocking stream: last (R6)
        tried: set[Block] = set()
        for _ in range(SCAN):
            with self._lock.checked():
                block = self._candidate(request, tried)
                if block is None:
                    return None
                tried.add(block)
                self._shelves.transit.add(block)
                self._accounts.mark()
                if block.shelf is not None:
                    block.shelf.remove(block)
                block.generation += 1
                self._accounts.mark()
            ready = self._make_wait(request, block.stamp, block.owner is request.line, may_seal=may_seal, legacy=legacy)
            with self._lock.checked():
                self._shelves.transit.discard(block)
                self._accounts.mark()
                exempt = block.owner is request.line
                if ready and self._registry.order.known(block.stamp, request.line, exempt=exempt):
                    self._hand_out(self._shelves.carve(block, request.size), request, "internal_dependency")
                    self._accounts.steps["internal_dependency"] += 1
                    self._accounts.mark()
                    return block
                self._shelves.place(block)
                self._accounts.mark()
        return None

    def _candidate(self, request: Request, tried: set[Block]) -> Block | None:
        """The best fit in flight on other streams that has not been tried.  Under the lock."""
        best: Block | None = None
        own = self._shelves.own[request.kind]
        for shelf in (*own.values(), self._shelves.shared[request.kind]):
            for looked, block in enumerate(shelf.from_size(request.size)):
                if looked >= SCAN or (best is not None and best.size <= block.size):
                    break
                if block not in tried and (not request.assumed or self._shelves.returns(block, request.line)):
                    best = block
                    break
        return best

    def _make_wait(self, request: Request, stamp: VectorClock, exempt: bool, *, may_seal: bool, legacy: bool) -> bool:
        """Make the stream wait for everything in the stamp that it does not know; False if that cannot be."""
        registry, sealing = self._registry, self._sealing
        if may_seal and CONTEXT in stamp.at and not exempt and registry.context.seal_for(stamp.at[CONTEXT]) is None:
            sealing.close_context()
        with registry.lock.checked():
            needed = self._needed(stamp, request.line, exempt)
        if needed is None:
            return False
        events: list[Sealed] = []
        try:
            for line, seqno in needed:
                sealed = self._event(line, seqno, may_seal=may_seal, legacy=legacy)
                if sealed is None:
                    if line.completed >= seqno:
                        continue
                    return False
                events.append(sealed)
            return sealing.make_wait(request.line, events, request.given) if events else True
        finally:
            with registry.lock.checked():
                for sealed in events:
                    registry.recycle(sealed)

    def _needed(self, stamp: VectorClock, line: Timeline, exempt: bool) -> list[tuple[Timeline, int]] | None:
        """(stream, seqno) pairs to wait for; None if the context's part has no seal yet.  Under the registry's lock."""
        registry = self._registry
        wanted: dict[int, int] = {}
        for number, seqno in registry.order.unfinished(stamp).items():
            if number != CONTEXT:
                wanted[number] = max(seqno, wanted.get(number, 0))
            elif not exempt:
                seal = registry.context.seal_for(seqno)
                if seal is None:
                    return None
                for other, reached in registry.order.unfinished(seal.need).items():
                    wanted[other] = max(reached, wanted.get(other, 0))
        known = line.clock.at
        return [
            (registry.lines[n], q)
            for n, q in wanted.items()
            if n != line.number and known.get(n, 0) < q and n in registry.lines
        ]

    def _event(self, line: Timeline, seqno: int, *, may_seal: bool, legacy: bool) -> Sealed | None:
        """An event behind `seqno`, in use by us until `recycle`; one that exists before a new one (R13)."""
        registry = self._registry
        for attempt in range(2):
            with registry.lock.checked():
                sealed = line.event_for(seqno)
                if sealed is not None:
                    sealed.users += 1
                    return sealed
            if attempt or not may_seal or (line.kind is Kind.LEGACY and not legacy):
                return None
            if registry.reachable(line):
                if self._sealing.query(line):
                    return None
                if line.kind is Kind.LEGACY:
                    self._sealing.seal_legacy()
                else:
                    self._sealing.seal(line)
            elif line.kind.blocking and legacy:
                sealed = self._sealing.seal_legacy()
                if sealed is not None:
                    with registry.lock.checked():
                        if not sealed.done:
                            sealed.users += 1
                            return sealed
                return None
        return None

    # -- 8, 9, 10 -------------------------------------------------------------------------------

    def _release(self, request: Request) -> Block | None:
        """Idle memory that cannot serve, given back, may make room for a piece that can."""
        if not self._config.release_on_demand or (self._growth.backing.stalls and not self._settling.all_over()):
            return None
        if self._growth.release("out_of_memory", 1 << 62):
            block = self._grow(request, step="release")
            if block is not None:
                self._accounts.retries["release"] += 1
            return block
        return None

    def _host_wait(self, request: Request) -> Block | None:
        if not self._config.wait_on_demand:
            return None
        self._settling.seal((request.line, request.given))
        if any(line.kind.blocking and not self._registry.reachable(line) for line in self._settling.waiting().lines):
            self._sealing.seal_legacy()  # the one mark that reaches them; nothing else is left to try (R9)
        block = self._wait_for_any(request, "host_wait", 0)
        if block is not None:
            self._accounts.retries["host_wait"] += 1
        return block

    def _wait_for_any(self, request: Request, step: str, bound: int) -> Block | None:
        """Wait on the host, `wait_timeout` in all, until something in flight that is over serves.

        bound: stop as soon as no more than that many bytes are in flight (0: never for that reason).
        """
        device = self._device
        until = device.clock_ns() + int(self._config.wait_timeout * 1e9)
        while True:
            over = self._settling.wait_for_any((until - device.clock_ns()) / 1e9)
            block = self._look(request, step=step)
            if block is None and over and step == "host_wait":
                block = self._again(request, step)
            if block is not None or not over:
                return block
            if bound and self._waitable() <= bound:
                return None

    def _again(self, request: Request, step: str) -> Block | None:
        """Something was freed: what became idle may be released for a piece of the right size."""
        if self._config.release_on_demand and not self._growth.backing.stalls:
            self._growth.release("out_of_memory", 1 << 62)
        return self._grow(request, step=step)

    def _call_back(self, request: Request) -> Block | None:
        """The user's callbacks, outside every lock; True means "try again"."""
        if not self._config.collect_on_demand:
            return None
        for callback in list(self.callbacks):
            with shield.lifted():  # it may take its time, and Ctrl-C is the program's
                again = callback(request.size)
            if again:
                block = self._retry(request, "callback")
                if block is not None:
                    return block
        return None

    def _collect(self, request: Request) -> Block | None:
        """Dead reference cycles may hold allocations."""
        if not self._config.collect_on_demand:
            return None
        gc.collect()
        return self._retry(request, "collect")

    def _retry(self, request: Request, step: str) -> Block | None:
        """Everything again, after somebody may have freed something."""
        waiting = self._settling.waiting()
        self._settling.poll(waiting.lines)
        self._settling.ask(waiting)
        block = (
            self._look(request, step=step)
            or self._grow(request, step=step)
            or self._depend(request)
            or self._last_release(request, step)
            or self._host_wait(request)
        )
        if block is not None:
            self._accounts.retries[step] += 1
        return block

    def _wait_for_others(self, request: Request) -> Block | None:
        """Memory that another thread is giving back at this moment is no reason to fail (S16)."""
        if self._config.wait_on_demand and self._growth.wait_for_others(self._config.wait_timeout):
            return self._retry(request, "host_wait")
        return None

    def _last_release(self, request: Request, step: str) -> Block | None:
        """The very last step may wait for the device, which plain memory's free does (R13)."""
        if self._config.release_on_demand and self._growth.release("out_of_memory", 1 << 62):
            return self._grow(request, step=step)
        return None

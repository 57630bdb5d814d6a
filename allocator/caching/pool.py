"""`CachingAllocator`, the face of a pool: one memory pool of one device, shared by all streams and libraries.

An exact size that the same stream freed before comes from a bin, with no driver call, no event and no logging
(front.py).  Everything else goes down the ladder (ladder.py).  A free only queues (frees.py).

Longer than other modules because it is the public face: each method is short and says what it promises.
Threads: one lock, held for microseconds, never over a driver call, a callback or a wait (S16).
Next: ladder.py (the policy), shelves.py (who may take what), ../streams/ (what is over).
"""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from allocator.allocation import Allocation
from allocator.blocks import Block, Heap
from allocator.caching import html
from allocator.caching.accounting import Accounts
from allocator.caching.canary import Canary
from allocator.caching.capturing import Capturing
from allocator.caching.checked import CheckedGrowth, CheckedLadder
from allocator.caching.checked_shelves import CheckedShelves
from allocator.caching.frees import ANYONE, Anyone, Frees
from allocator.caching.front import Front
from allocator.caching.growth import Growth
from allocator.caching.ladder import Ladder, Request
from allocator.caching.reaper import any_left, forget_all, leave, reap
from allocator.caching.settling import Settling
from allocator.caching.shelves import Shelves
from allocator.caching.snapshot import snapshot
from allocator.config import Config
from allocator.devices import CudaDevice, Device
from allocator.errors import AllocatorError, CorruptionError, DriverError, OutOfMemoryError, PoolClosed, StreamCapturing
from allocator.resource import Holder
from allocator.sizes import MIB, check_request, format_size, round_up
from allocator.stats import Stats
from allocator.streams import (
    Capture,
    Kind,
    Registry,
    Sealing,
    Stream,
    Timeline,
    current_stream,
    destroy_orphans,
    target,
)
from allocator.sync import in_order, inner_of, make_lock, shield, shielded

_log = logging.getLogger("allocator")
_numbers = itertools.count()
_pools: weakref.WeakKeyDictionary[CachingAllocator, None] = weakref.WeakKeyDictionary()
AT_SCRAPE = 2048
"""Blocks that one reading of statistics moves out of the bins at most."""
BARE_FREES = 8
BARE_BYTES = MIB
"""Frees, or bytes freed, after which a stream known by a bare handle is marked again, when the handle is given."""
MOST_BARE = 1024
"""Such streams that are remembered."""


class CachingAllocator:
    """A caching allocator over one device.

    device: a `Device`, or an int, which means `CudaDevice(int)`.  config: None means `Config.from_env()`.
    name: for metrics and dumps, up to 40 characters.  No driver call is made before the first allocation.

    >>> from allocator.devices import SimDevice
    >>> gpu = SimDevice()
    >>> with CachingAllocator(gpu) as pool:
    ...     a = pool.allocate(1000)
    ...     a.size, a.requested
    (1024, 1000)
    """

    def __init__(self, device: Device | int, config: Config | None = None, name: str | None = None) -> None:
        if isinstance(device, bool):
            raise TypeError("device must be a device or its number, not bool")
        self.device: Device = CudaDevice(device) if isinstance(device, int) else device
        self.config = config if config is not None else Config.from_env(device_memory=self.device.total_memory)
        if self.config.backing == "vmm" and not self.device.supports_virtual_memory:
            raise AllocatorError(
                f"{self.device.name} has no virtual memory management; "
                "use Config(backing='malloc') or WEIR_BACKING=malloc"
            )
        self.name = f"pool{next(_numbers)}" if name is None else str(name)[:40]
        self._registry = Registry.of(self.device)
        self._lock = make_lock("pool")
        self._sealing = Sealing(self._registry)
        self._heap = Heap(joined=self.config.backing == "vmm")
        checked = self.config.canary
        self._shelves = (CheckedShelves if checked else Shelves)(self._heap, self._registry, self.config)
        self._accounts = Accounts(self._heap, self._shelves)
        self._frees = Frees(self._registry, self._shelves, self._accounts, self.config, inner_of(self._lock)[2])
        self._listed = False
        """On the reaper's list."""
        self._growth = (CheckedGrowth if checked else Growth)(
            self.device, self.config, self._registry, self._heap, self._shelves, self._accounts, self._lock
        )
        self._frees.pressed = self._pressed
        self._frees.bound(bool(self.config.limit or self.config.max_in_flight))
        self._settling = Settling(
            self.device,
            self.config,
            self._registry,
            self._sealing,
            self._shelves,
            self._frees,
            self._accounts,
            self._lock,
        )
        self._ladder = (CheckedLadder if checked else Ladder)(
            self.device,
            self.config,
            self._registry,
            self._sealing,
            self._shelves,
            self._frees,
            self._growth,
            self._settling,
            self._accounts,
            self._lock,
        )
        self._canary = self._make_canary()
        self.frees: Any = self._frees.queue
        """What has been freed and not been seen to."""
        self.lane = self._frees.lane
        """Where allocations queue their frees, in one step, if it is empty and they name no stream; None for none."""
        self.put_down: Any = self._frees.put_down
        """Where they queue all others, in one step."""
        self._backlog: Any = self._frees.backlog
        self._uses = None if self.config.uses == "auto" else self.config.uses == "assumed"
        self.front = Front(
            self._lock,
            self._registry,
            self._shelves,
            self._frees,
            self._accounts,
            self._growth.kind,
            self._ladder.at_hand,
        )
        """The hot path, for integrations that know the stream's timeline already."""
        self._ladder.unchanged = self.front.unchanged
        if self.device.watches:
            self.front.announce = self.device.hand_out
        self._bare_due: dict[int, tuple[int, int]] = {}
        """By stream named by bare handles: what `Accounts.frees` and `freed_sum` are when a mark is due again."""
        self._capturing = Capturing(self._registry, self._heap, self._shelves, self._frees, self._accounts, self._lock)
        self._closed = False
        self._always_careful = self.front.careful = self.config.detect_captures or checked
        in_order(self._lock, self._registry.lock)
        _pools[self] = None
        self._registry.pools[self] = None
        if self._registry.captures.active:
            self.front.careful = True  # made within a capture (S19)
        reap()

    def _make_canary(self) -> Canary | None:
        """What checked mode adds; None without it."""
        shelves, ladder, growth = self._shelves, self._ladder, self._growth
        if not isinstance(shelves, CheckedShelves):
            return None
        assert isinstance(ladder, CheckedLadder) and isinstance(growth, CheckedGrowth)
        ladder.canary = growth.canary = canary = Canary(
            self.name,
            self.device,
            self._registry,
            self._sealing,
            self._heap,
            shelves,
            self._frees,
            self._accounts,
            self._lock,
        )
        return canary

    @property
    def announce(self) -> Callable[[int, int, object], None] | None:
        """What a device that watches is told of each hand-out: (ptr, size, who holds it); None for none."""
        told: Callable[[int, int, object], None] | None = self.front.announce
        return told

    @announce.setter
    def announce(self, told: Callable[[int, int, object], None] | None) -> None:
        self.front.announce = told

    # -- allocate -------------------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: object = None, *, assumed: bool = False) -> Allocation:
        """Memory of at least `nbytes` bytes for use on `stream` (None: the current one), at once.

        assumed: the caller stands for a library that declares no uses (R3); `Config.uses` may overrule it.
        0 bytes are a valid empty allocation with ptr 0.  Driver calls: none for an exact size that this stream
        freed before; else those of the ladder's steps.  Raises OutOfMemoryError, PoolClosed, StreamClosed,
        StreamCapturing, ForkError, DriverError; ValueError and TypeError for wrong arguments.
        """
        line = stream.fast if type(stream) is Stream else None
        if line is None or type(nbytes) is not int or nbytes <= 0:
            return self._allocate_slowly(nbytes, stream, assumed)
        uses = self._uses
        allocation: Allocation | None = self.front.allocate(
            Allocation, self, nbytes, line, stream, assumed if uses is None else uses
        )
        return self._allocate_slowly(nbytes, stream, assumed) if allocation is None else allocation

    def assumes(self, assumed: bool) -> bool:
        """What `Config.uses` makes of what a caller says: for those who ask `front` themselves."""
        return assumed if self._uses is None else self._uses

    def obtain(self, nbytes: int, line: Timeline, given: int | None, assumed: bool) -> Block:
        """Everything but a hit: look at what has to be looked at, and climb the ladder.  LIVE, and accounted for.

        given: a handle of the stream that is alive for the length of the call.  Raises what `allocate` raises.
        """
        block: Block | None = None
        try:
            with shield:
                block = self._obtain(nbytes, line, given, assumed)
        except BaseException:  # Ctrl-C, which was put off until there was a block that nobody holds yet
            if block is not None:
                self.put_down((block, block.generation, None))
            raise
        return block

    def _obtain(self, nbytes: int, line: Timeline, given: int | None, assumed: bool) -> Block:
        if self.front.careful:
            inside = self._look_out(line, given)
            if inside is not line:
                line, given = inside, None
        registry = self._registry
        size = round_up(nbytes)
        if self._uses is not None:
            assumed = self._uses
        bare = given is not None and line.owner is None and not registry.reachable(line)
        first = bool(bare or any_left() or registry.orphan_events)
        due = False
        block: Block | None = None
        vain = None if first else self.front.in_vain(size, line, assumed)
        if vain is None:
            with self._lock:
                due = self._frees.drain()
                block = None if due else self._from_bin(nbytes, size, line, assumed)
                first = block is None and (due or first)
                if block is None and not first:
                    block = self._ladder.at_hand(line, nbytes, size, self._growth.kind(size), assumed)
        marked = False
        if first:  # before a block is taken: whatever fails here loses none
            reap(patiently=True)
            destroy_orphans(registry)
            if due:
                self._settling.seal((line, given))
            if bare:
                marked = self._mark_bare(line, given)
            with self._lock:
                block = self._from_bin(nbytes, size, line, assumed)
                if block is None:
                    block = self._ladder.at_hand(line, nbytes, size, self._growth.kind(size), assumed)
        if block is None:
            if bare and not marked:
                self._bare_due.pop(line.number, None)
                self._mark_bare(line, given)
            block = self._climb(Request(line, given, nbytes, size, self._growth.kind(size), assumed, vain))
        if self._canary is not None:
            self._canary.serve(block)
        if registry.captures.active:
            self._capturing.hand_out(block)
        self._frees.dropped.clear()  # outside every lock: foreign destructors may run here
        if self._closed:
            self._stay_listed()  # closed by another thread in the meantime
        return block

    def _from_bin(self, nbytes: int, size: int, line: Timeline, assumed: bool) -> Block | None:
        """What a hit would have got, had marks not been due, or something to be looked at.  Under the lock."""
        sizes = self._shelves.bins[assumed].get(line)
        bin_ = sizes.by_size.get(size) if sizes is not None else None
        if bin_ is None or not bin_.blocks:
            return None
        block = bin_.blocks.pop()
        self._accounts.hand_out(block, nbytes, "same_stream")
        return block

    def _mark_bare(self, line: Timeline, given: int | None) -> bool:
        """A bare handle is given to us again: now, and only now, its earlier frees can be sealed (R9).  False: not due.

        Once in BARE_FREES frees or BARE_BYTES, as each costs driver calls; always where memory is scarce, and before
        the ladder is climbed.
        """
        frees, freed = self._accounts.frees, self._accounts.freed_sum
        due, bytes_due = self._bare_due.get(line.number, (0, 0))
        with self._lock:
            if frees < due and freed < bytes_due and not self._pressed():
                return False
            unsealed = self._shelves.unsealed([line])
        if len(self._bare_due) > MOST_BARE:
            self._bare_due.clear()
        self._bare_due[line.number] = frees + BARE_FREES, freed + BARE_BYTES
        if unsealed and not self._sealing.query(line, given):
            self._sealing.seal(line, given)
        return True

    def _allocate_slowly(self, nbytes: int, stream: object, assumed: bool) -> Allocation:
        """Everything but a hit for one of our own streams: check the arguments, find the stream, climb the ladder."""
        given: int | None = None
        if type(stream) is Stream and stream.fast is not None and stream.registry is self._registry:
            face, line = stream, stream.fast
            if self._closed:
                self._check_open()
        else:
            face, line, given = self._resolve(stream)
        nbytes = check_request(nbytes)
        if nbytes == 0:
            return Allocation(_NOWHERE, _EMPTY, 0, face)
        block = self.obtain(nbytes, line, given, assumed)
        try:
            allocation = Allocation(self, block, nbytes, face)
            if face.fast is None:
                allocation.kept = line.keeper  # a foreign object: while this lives, the stream has not ended (R9)
            if self.front.announce is not None:
                self.front.announce(block.ptr, block.size, allocation)
        except BaseException:  # Ctrl-C: nobody holds it; should it have been queued already, once counts
            self.put_down((block, block.generation, None))
            raise
        return allocation

    def _resolve(self, stream: object) -> tuple[Stream, Timeline, int | None]:
        self._check_open()
        if stream is None:
            stream = current_stream(self.device)
        line, given = target(self.device, stream)
        return Stream.of(self.device, stream, line), line, given

    def _climb(self, request: Request) -> Block:
        """Off the hot path: the ladder, and what it says when nothing helps."""
        registry = self._registry
        registry.check_usable()
        reap(patiently=True)
        destroy_orphans(registry)
        if request.size > self.device.total_memory:
            self._accounts.out_of_memory += 1
            raise self._out_of_memory(request, "more than the device has")
        try:
            block = self._ladder.climb(request)
        finally:
            if registry.lost is not None:
                self.front.careful = True
        if block is None:
            self._accounts.out_of_memory += 1
            raise self._out_of_memory(request, "nothing more can be freed, waited for or taken from the driver")
        return block

    def _pressed(self) -> bool:
        """Above 3/4 of the limit or of the bound on memory in flight (R13).  Under the lock."""
        limit, bound = self._growth.limit, self.config.max_in_flight
        return bool(limit and self._growth.held * 4 > limit * 3) or bool(
            bound and self._accounts.in_flight() * 4 > bound * 3
        )

    def _out_of_memory(self, request: Request, why: str) -> OutOfMemoryError:
        with self._lock:
            accounts, limit = self._accounts, self._growth.limit
            numbers = {
                "reserved": self._heap.reserved,
                "allocated": accounts.allocated,
                "in_flight": accounts.in_flight(),
                "idle": self._shelves.idle_bytes(),
                "device_free": accounts.device_free,
                "device_size": self.device.total_memory,
            }
            busy = [line for line in self._shelves.waiting() if line.completed < line.closed]
        holders = ", ".join(repr(line.name or f"{line.kind.value} stream {line.number}") for line in busy[:4])
        pinned = f"; in flight behind {holders}" if holders else ""
        return OutOfMemoryError(
            f"out of memory: {format_size(request.size)} asked of pool {self.name!r} on {self.device.label}: {why} "
            f"(reserved {format_size(numbers['reserved'])}, allocated {format_size(numbers['allocated'])}, "
            f"in flight {format_size(numbers['in_flight'])}, idle {format_size(numbers['idle'])}, "
            f"limit {format_size(limit) if limit else 'none'}{pinned})",
            requested=request.requested,
            limit=limit,
            stats=numbers,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed(f"pool {self.name!r} has been closed; make a new CachingAllocator")
        self._registry.check_usable()

    def _wants_care(self) -> bool:
        """Is there anything to look at before an allocation, of what can pass?"""
        return bool(
            self._closed
            or self._registry.lost is not None
            or self._registry.forked
            or self._registry.captures.active
            or (self._growth.limit and self._growth.held > self._growth.limit)
        )

    def _look_out(self, line: Timeline, given: int | None) -> Timeline:
        """What is looked at before an allocation only where there is reason to; returns whose memory it will be."""
        self._check_open()
        captures = self._registry.captures
        inside = captures.inside(line) if captures.active else line
        if self.config.detect_captures and inside is line:
            with self._registry.borrow(line, given) as handle, self.device.scope():
                if handle is not None and line.kind is not Kind.LEGACY and self._registry.capturing(handle):
                    raise StreamCapturing(
                        "the stream is being captured into a graph: allocate before the capture, or after it"
                    )
        if self._growth.limit and self._growth.held > self._growth.limit:
            self._shrink()
        elif not self._always_careful:
            with self._lock:  # a capture that begins comes before both steps or after (S19)
                if not self._wants_care():
                    self.front.careful = False
                    if self._wants_care():
                        self.front.careful = True  # another thread has just seen that the context is lost, say
        return inside

    # -- the other calls of an allocation --------------------------------------------------------

    @shielded
    def declare_use(self, allocation: Holder, stream: object) -> None:
        """`Allocation.record_stream`: one more user for the stamp (R3)."""
        self._registry.check_forked()
        if allocation.closed:
            raise ValueError("record_stream on a closed allocation: declare the use before the free")
        line, _ = target(self.device, stream)
        block: Block = allocation._block
        with self._lock:
            if allocation.closed or block.generation != allocation._generation:
                raise ValueError("record_stream on a closed allocation: declare the use before the free")
            if line is block.owner:
                return
            if block.users is None:
                block.users = {}
            block.users[line.number] = line
            if line.keeper is not None:
                block.kept = [*(block.kept or ()), line.keeper]
            block.bin = None  # several users: no bin may hold it (R7)

    def free(self, allocation: Allocation, stream: object) -> None:
        """`Allocation.close`: queue the free, with the stream that it names (R3).  Never raises."""
        generation = allocation._generation
        if generation < 0:
            return
        named: Timeline | Anyone | None = None
        handle: int | None = None
        if stream is not None and not self._registry.forked:
            try:
                if _inside(self._registry):
                    raise AllocatorError("called by a finaliser inside the allocator's own locked section")
                named, handle = target(self.device, stream)
            except Exception as error:  # foreign code among others: close never raises
                named = ANYONE  # used somewhere: everybody waits, the owner as well
                # Texts only: a log record that outlives the call must not keep its frames, and so memory, alive.
                _log.warning("close(stream=...): %s; the memory waits for every stream", str(error))
        line = named if isinstance(named, Timeline) else None
        if stream is None and allocation.stream.bare is not None:
            # By contract the caller has kept the bare handle alive up to this call; nobody will after it (S03, R9).
            line, handle = allocation.stream.timeline, allocation.stream.bare
        block, lane = allocation._block, self.lane
        if lane is None or named is not None:
            entry = (block, generation, named)
            allocation._generation = -1
            self.put_down(entry)
        else:  # as `Lane.put`, without a call
            before = lane.block; then = lane.generation; lane.block = block; lane.generation = generation; allocation._generation = -1  # noqa: E501, E702  # fmt: skip
            if before is not None:
                self.put_down((before, then, None))
        allocation.kept = None
        if handle is not None or self.front.careful or len(self._backlog) >= 64:
            self._after_free(line, handle)

    @shielded
    def _after_free(self, line: Timeline | None, handle: int | None) -> None:
        """The free was given a handle that nobody keeps alive: stamp now and seal inside this call (R9).

        Not where a finaliser runs it inside our own locked section: the next public call then sees to the rest.
        """
        if self._registry.forked:
            return
        if self._closed:
            self._stay_listed()  # lock-free: whatever is left undone here, the reaper sees to
        if _inside(self._registry) or not self._lock.acquire(timeout=0.1 if handle is not None else 0.0):
            return
        try:
            due = self._frees.drain()
        finally:
            self._lock.release()
        self._frees.dropped.clear()
        if handle is not None and line is not None and line.kind in (Kind.BLOCKING, Kind.NON_BLOCKING):
            if line.owner is None and not self._sealing.query(line, handle):
                self._sealing.seal(line, handle)
        elif due:
            self._settling.seal()
        if self._canary is not None:
            self._canary.tend()
        if self._closed:
            reap()
        elif self._growth.limit and self._growth.held > self._growth.limit:
            self._shrink()

    @shielded
    def drain_frees(self) -> None:
        """Stamp the frees queued so far.  No driver call."""
        self._registry.check_forked()
        with self._lock:
            self._frees.drain()

    def look_out(self) -> None:
        """Something has to be looked at before the next allocation: the context is lost, say.  Lock-free."""
        self.front.careful = True

    @shielded
    def host_waited(self) -> None:
        """The program has waited for a stream: a good moment to find out about the others.

        Memory with users that are only assumed waits for all streams (R3), and the one that asks for it will soon be
        busy again.  Driver calls: those of sealing, once much has been freed since the last time (R13).
        """
        if self._closed or not self._frees.heavy:
            return
        with self._lock:
            waits = self._shelves.context_waits
        if waits:
            self._settling.seal()

    @shielded
    def capture_begins(self, capture: Capture) -> None:
        """A hook reports a capture: it may use whatever is live (R10)."""
        self._capturing.begins(capture, self.front)

    @shielded
    def capture_ends(self, capture: Capture) -> None:
        """A hook reports that the capture has ended (R10)."""
        self._capturing.ends(capture)

    # -- reading --------------------------------------------------------------------------------

    @shielded
    def stats(self, *, per_stream: bool = False, most: int | None = None) -> Stats:
        """The pool's statistics, consistent in themselves.

        per_stream: also the figures by stream.  most: see to that many queued frees, and put
        down that many finished blocks, at most; the rest stays `pending_frees` and in flight, and is left to the next
        call.  None: all of it, however long that takes.  Driver calls: one query for each stream with unsealed frees,
        and of the events in flight; none that can block.
        """
        self._registry.check_forked()
        self._ask(most)
        with self._lock:
            self._accounts.mark()
            self._shelves.flush_finished(AT_SCRAPE if most is None else most)
            self._shelves.refresh(most)
            return self._accounts.stats(
                self.device,
                self._registry,
                self._sealing,
                limit=self._growth.limit,
                unreleased=self._growth.unreleased,
                pending_frees=len(self.frees) + len(self._frees.limbo),
                per_stream=per_stream,
            )

    def _ask(self, most: int | None = None) -> None:
        """Find out what is over, without waiting.  most: how many queued frees to see to."""
        reap()
        self._registry.sweep_now()
        self._sealing.end_finished()
        waiting = self._settling.waiting(most)
        with self._registry.lock:
            poisoned = [line for line in self._registry.seen() if line.poisoned is not None]
        self._settling.poll(waiting.lines)
        self._settling.ask(waiting)
        for line in poisoned:  # an error was no answer; the next one may be (R11)
            self._sealing.query(line)
        if self._canary is not None:
            self._canary.tend()
        if self._growth.unreleased:
            self._growth.release("trim", 0)
        if self._registry.lost is not None:
            self.front.careful = True

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the driver, as known at this moment.  No driver call, no lock."""
        return self._heap.reserved

    @property
    def allocated_bytes(self) -> int:
        """Bytes held by callers, after rounding.  Stamps the frees queued so far; no driver call."""
        self.drain_frees()
        return self._accounts.allocated

    @property
    def new_memory_allocations(self) -> int:
        """Allocations so far that memory nobody had used before served.  No driver call, no lock."""
        return self._accounts.served["new_memory"]

    @property
    @shielded
    def free_blocks(self) -> int:
        """Blocks that nobody holds, in flight or idle.  O(blocks in flight); no driver call."""
        self._registry.check_forked()
        with self._lock:
            self._frees.drain()
            return self._accounts.free_blocks()

    @property
    def limit(self) -> int:
        """Bytes that reserved memory never grows past; 0 = none."""
        return self._growth.limit

    @property
    def in_flight_bytes(self) -> int:
        """Bytes freed and not known to be finished at this moment; `stats()` finds out more.  No driver call."""
        return self._accounts.in_flight()

    @shielded
    def snapshot(self) -> dict[str, Any]:
        """Every segment and block, in the shape that PyTorch's memory viewer reads.  O(blocks)."""
        self._registry.check_forked()
        with self._lock:
            self._frees.drain()
            self._accounts.mark()
            self._shelves.flush()
            self._shelves.refresh()
            self._accounts.mark()
            return snapshot(self._heap, self.device.ordinal)

    @shielded
    def reset_peaks(self) -> None:
        """Let the peaks start again from the present values."""
        self._registry.check_forked()
        with self._lock:
            self._frees.drain()
            self._accounts.reset_peaks()

    @property
    def corruptions(self) -> int:
        """Pieces of free memory found written to, in checked mode (`Config.canary`); 0 without it."""
        return 0 if self._canary is None else self._canary.corruptions

    @property
    def damaged_bytes(self) -> int:
        """Bytes of them that are put away until the pool goes; part of the bytes in flight."""
        return 0 if self._canary is None else self._canary.damaged_bytes

    @shielded
    def check(self) -> None:
        """Walk everything and raise AssertionError, with a dump, if anything is out of place.  O(blocks).

        In checked mode also verify all idle memory: CorruptionError, the first of those logged.
        """
        self._registry.check_forked()
        with self._lock:
            self._frees.drain()
            binned = {
                id(b)
                for bins in self._shelves.bins
                for s in bins.values()
                for bin_ in s.by_size.values()
                for b in bin_.blocks
            }
            try:
                self._heap.check()
                self._shelves.check()
                self._growth.check()
                live = (b for b in self._heap.blocks() if b.shelf is None and id(b) not in binned)
                self._accounts.check(live)
            except AssertionError as error:
                dump = "\n".join(map(repr, itertools.islice(self._heap.blocks(), 200)))
                raise AssertionError(f"{error}\n{dump}") from error
        self._registry.check()
        self._verify()

    def _verify(self) -> None:
        """In checked mode: verify all idle memory, and raise for the first of what is found."""
        if self._canary is not None and (found := self._canary.verify()):
            raise found[0]

    # -- giving memory back ----------------------------------------------------------------------

    @shielded
    def trim(self, keep: int = 0) -> int:
        """Give idle memory back to the driver until no more than `keep` bytes are reserved; returns the bytes given.

        Never stalls the device: with virtual memory nothing waits, plain memory is given back only when nothing is
        in flight (R13).  Driver calls: queries, then `cuMemUnmap` and `cuMemRelease`, or `cuMemFree`, a segment.
        """
        keep = check_request(keep)
        self._registry.check_usable()
        self._verify()
        return self._give_back("trim", keep)

    def _give_back(self, reason: str, keep: int) -> int:
        self._ask()
        with self._lock:
            self._accounts.mark()
            self._shelves.flush()
            self._shelves.refresh()
            self._accounts.mark()
            most = self._growth.held - keep
        if most <= 0 or (self._growth.backing.stalls and not self._settling.all_over()):
            return 0
        return self._growth.release(reason, most)

    @shielded
    def set_limit(self, nbytes: int) -> None:
        """Bytes that reserved memory never grows past; 0 = none.

        Below what is reserved now, idle memory goes at once and the rest as it is freed.
        """
        nbytes = check_request(nbytes)
        self._registry.check_usable()
        with self._lock:
            self._growth.limit = nbytes
            self._frees.bound(bool(nbytes or self.config.max_in_flight))
        if nbytes and self._growth.held > nbytes:
            self.front.careful = True
            self._shrink()

    def _shrink(self) -> None:
        if self._give_back("limit", self._growth.limit) == 0 and self._growth.held > self._growth.limit:
            self.front.careful = True

    @shielded
    def settle(self) -> None:
        """Wait on the host until nothing known is in flight; then everything that was freed is idle.

        What cannot be waited for stays: streams that capture, orphans (see `stats().orphaned_bytes`).
        """
        self._registry.check_usable()
        self._settling.wait_for_all()
        if self._canary is not None:
            self._canary.tend()

    @shielded
    def abandon(self, stream: object) -> None:
        """Declare the work of a poisoned stream over (R11); ValueError if it is not poisoned.

        Only for a stream whose progress can no longer be known and whose memory nobody uses any more.
        """
        line = stream.line if isinstance(stream, Stream) else target(self.device, stream)[0]
        if line.poisoned is None:
            raise ValueError(f"{line!r} is not poisoned; wait for it with settle()")
        with self._registry.lock:
            self._registry.complete(line, line.close_seqno()[0])
            self._registry.advance_context()

    def on_out_of_memory(self, callback: Callable[[int], bool]) -> CallbackHandle:
        """Call `callback(nbytes)` before giving up on a request; True means "try again".  Outside every lock."""
        if not callable(callback):
            raise TypeError(f"callback must be callable, not {type(callback).__name__}")
        self._ladder.callbacks.append(callback)
        return CallbackHandle(self._ladder.callbacks, callback)

    # -- ends ------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True once the pool has been closed."""
        return self._closed

    @shielded
    def close(self) -> None:
        """No new allocations.  Live ones stay valid; the memory goes back to the driver with the last of them.

        What is still in flight goes back at a later public call of any pool.  Twice is harmless.
        In checked mode idle memory is verified once more: CorruptionError; the pool is closed all the same.
        """
        if self._closed:
            return
        self._closed = self.front.careful = True
        _pools.pop(self, None)
        self._stay_listed()
        found: list[CorruptionError] = []
        if self._canary is not None:
            with suppress(DriverError):
                found = self._canary.verify()
        reap()
        if found:
            raise found[0]

    def _stay_listed(self) -> None:
        if not self._listed:
            self._listed = True
            leave(self)

    def give_up_memory(self) -> bool:
        """Of a closed pool: give back what is idle by now; True if nothing is left.  For the reaper."""
        if self._registry.forked or self._registry.lost:
            return True
        self._registry.rebind(self.device)
        self._growth.limit = 0
        self._ladder.callbacks.clear()  # nobody asks any more, and they may hold what the last user held
        self._sealing.end_finished()
        with self._lock:
            self._accounts.mark()
            self._frees.drain()
            self._shelves.flush()
            self._accounts.mark()
        waiting = self._settling.waiting()
        self._settling.poll(waiting.lines)
        self._settling.ask(waiting)
        with self._lock:
            self._accounts.mark()
            self._shelves.refresh()
            self._accounts.mark()
        if self._canary is not None:
            self._canary.leave(all_over=not self.damaged_bytes or self._settling.all_over())
        if not self._growth.backing.stalls or self._settling.all_over():
            self._growth.release("close", 1 << 62)
        self._frees.dropped.clear()
        if self._growth.empty and not self.frees:
            self._listed = False
            self._growth.close()
            if self._canary is not None:
                self._canary.close()
            return True
        return False

    def __enter__(self) -> CachingAllocator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CorruptionError:
            if error is None:  # an error of the body says more, and this one has been logged
                raise

    def __del__(self) -> None:
        # Nobody can allocate from it any more, and every allocation from it has gone (each holds its pool).
        # A finaliser only queues (DESIGN 5): the next public call of any pool gives the memory back.
        if getattr(self, "_closed", True) is False:
            self._closed = self.front.careful = self._listed = True
            leave(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{format_size(self._heap.reserved)} reserved"
        return f"<CachingAllocator {self.name!r} on {self.device.label}: {state}>"

    def _repr_html_(self) -> str:
        """A summary for a notebook cell.  Never raises.  Driver calls: those of `stats`, none that can block."""
        title = f"{self.name} on {self.device.label}"
        if self._registry.forked:
            why = "made in the parent of this process: CUDA does not survive a fork; make a new pool here"
            return html.page(title, [html.notice(why)])
        try:
            stats = self.stats(per_stream=True, most=AT_SCRAPE)
            notices = []
            if self._closed:
                notices.append("closed: no new allocations; what is left here goes back as soon as it is free")
            if stats.device_lost:
                notices.append(
                    f"the device is lost ({self._registry.lost}): every allocation fails; restart the process"
                )
            if stats.poisoned_streams:
                notices.append(
                    f"{stats.poisoned_streams} streams answer with errors, and what they used stays in flight"
                )
            if stats.out_of_memory:
                notices.append(f"{stats.out_of_memory:,} allocations have failed: out of memory")
            return html.summary(title, stats, notices)
        except Exception as error:  # a cell that shows a pool must not fail because of it
            return html.page(title, [html.notice(f"cannot be read: {error}")])


def _inside(registry: Registry) -> bool:
    """Is the calling thread inside a locked section of the timelines, so that a lock would be taken twice?"""
    held_here = getattr(registry.lock, "held_here", None)
    return held_here is not None and bool(held_here())


class CallbackHandle:
    """Takes an out-of-memory callback back with `remove()`."""

    def __init__(self, callbacks: list[Callable[[int], bool]], callback: Callable[[int], bool]) -> None:
        self._callbacks = callbacks
        self._callback = callback
        self._removed = False

    def remove(self) -> None:
        """The callback is not called any more.  Twice is harmless."""
        if not self._removed and self._callback in self._callbacks:
            self._removed = True
            self._callbacks.remove(self._callback)


class _Nowhere:
    """The home of empty allocations: there is nothing to give back."""

    def __init__(self) -> None:
        self.put_down: Any = deque(maxlen=0).append
        self.lane = None

    def declare_use(self, allocation: Holder, stream: object) -> None:
        """Nothing is in use."""
        if allocation.closed:
            raise ValueError("record_stream on a closed allocation: declare the use before the free")

    def free(self, allocation: Allocation, stream: object) -> None:
        """Nothing to free."""
        allocation._generation = -1


_NOWHERE = _Nowhere()
_EMPTY = Block(0, 0, 0)


def _after_fork_in_child() -> None:
    forget_all()
    for pool in list(_pools):
        pool.front.careful = True  # the next allocation raises ForkError before it touches a lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

"""Checked mode: who wrote to memory after it had been freed?  `Config(canary=True)`, docs/checked-mode.md.

    free      all known work of the block is over: it is filled with a pattern
    serve     before it is handed out again, or goes back to the driver, the pattern is read back and compared
    damage    the bytes are put away, never to be handed out, and the call that found them raises CorruptionError

Rules: a block is filled and reused by `completed` only, never by clocks, for its own stream as well (as R12 has it
for memory of the host): a fill that is merely ordered behind a stream would race with the very writer it is to find.
Both calls run on a private non-blocking stream, so nobody waits for them, and no capture or held stream is touched
(R10); the host waits for the read, hence for the fill, before anyone gets the bytes.  Driver calls are made outside
every lock; meanwhile the block lies on a shelf that serves nobody (S16).

Next: checked_shelves.py (where free memory lies), checked.py (the ladder and the growth that leave reuse to this).
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from allocator.blocks import RETIRED, Block, Heap
from allocator.caching.accounting import Accounts
from allocator.caching.checked_shelves import CheckedShelves, describe
from allocator.caching.frees import Frees
from allocator.devices import Device
from allocator.errors import CorruptionError, DriverError
from allocator.events import EMPTY
from allocator.sizes import MIB, QUANTUM, format_size, round_up
from allocator.streams import Registry, Sealing, Timeline
from allocator.sync import LockLike

_log = logging.getLogger("allocator")

PATTERN: Final = 0xFB
"""Free memory is full of it.  As float32 -2.6e36, as int32 -67372037: a program that reads it notices."""
_BYTE: Final = bytes((PATTERN,))
_CHUNK: Final = 4 * MIB
"""Bytes read back at a time."""
_WHOLE: Final = _BYTE * _CHUNK
_SHOWN: Final = 16
_MOST_NAMES: Final = 256


@dataclass
class Damage:
    """ptr, end: from the first wrong byte to behind the last.  since: the look before the fill."""

    ptr: int
    end: int
    count: int
    found: bytes
    since: int


class Canary:
    """Fills and verifies the free memory of one pool."""

    def __init__(
        self,
        name: str,
        device: Device,
        registry: Registry,
        sealing: Sealing,
        heap: Heap,
        shelves: CheckedShelves,
        frees: Frees,
        accounts: Accounts,
        lock: LockLike,
    ) -> None:
        self._name = name
        self._device = device
        self._registry = registry
        self._sealing = sealing
        self._heap = heap
        self._shelves = shelves
        self._frees = frees
        self._accounts = accounts
        self._lock = lock
        self._stream = 0
        self._looks = itertools.count(1)
        self._look_number = 0
        self._busy: dict[int, tuple[int, str]] = {}
        """Stream number -> the last look that saw it with unfinished work, and its name."""
        self.corruptions = 0
        """Damaged pieces found so far."""

    @property
    def _usable(self) -> bool:
        return self._registry.lost is None and not self._registry.forked and not self._shelves.leaving

    # -- filling ----------------------------------------------------------------------------------

    def tend(self) -> None:
        """Find out what is over, and fill what is free and finished.  Raises no DriverError.

        Driver calls: a query of each stream known, `cuMemsetD8Async` for each piece.
        """
        if not self._usable:
            return
        self._put_in_order()
        if self._shelves.fills or self._shelves.unfilled or self._accounts.in_flight():
            self._look()
            self._fill_all()

    def fill_finished(self) -> None:
        """Fill what has turned out to be finished since `tend`."""
        if self._usable and self._put_in_order():
            self._look()  # so that nobody is a candidate who was done before the fill
            self._fill_all()

    def _put_in_order(self) -> bool:
        with self._lock:
            self._accounts.mark()
            self._frees.drain()
            self._shelves.refresh()
            self._accounts.mark()
            return self._shelves.unfilled

    def _look(self) -> None:
        """Which streams have unfinished work now?  A yes to a query also proves what was freed to be over."""
        registry, sealing = self._registry, self._sealing
        with registry.lock:
            lines = registry.seen()
        sealing.poll([line for line in lines if line.in_flight])
        legacy_idle = sealing.query(registry.legacy)
        busy = [line for line in lines if line is not registry.legacy and self._is_busy(line, legacy_idle)]
        if not legacy_idle and not any(line.kind.blocking for line in busy):
            busy.append(registry.legacy)  # its own work: else "not ready" may well mean a blocking stream
        self._look_number = look = next(self._looks)
        for line in busy:
            self._busy[line.number] = (look, describe(line))
        if len(self._busy) > _MOST_NAMES:
            self._busy = {n: seen for n, seen in self._busy.items() if n in registry.lines}

    def _is_busy(self, line: Timeline, legacy_idle: bool) -> bool:
        """Not known to be idle: a stream that cannot be asked counts."""
        if line.kind.blocking and legacy_idle:
            return False
        if line.ended:
            return line.completed < line.closed
        return not self._sealing.query(line)

    def _fill_all(self) -> None:
        with self._lock:
            self._accounts.mark()
            self._shelves.refresh()
            todo = self._shelves.set_aside()
            gaps = {block: self._shelves.fills.gaps(block.ptr, block.end) for block in todo}
            self._accounts.mark()
        if not todo:
            return
        done: list[tuple[int, int]] = []
        try:
            with self._device.scope():
                stream = self._own_stream()
                for start, end in itertools.chain.from_iterable(gaps.values()):
                    self._device.mem_set_async(start, PATTERN, end - start, stream)
                    done.append((start, end))
        except DriverError as error:  # what is not filled stays where it is, and is tried again
            self._registry.failed(error)
        finally:
            with self._lock:
                self._accounts.mark()
                for start, end in done:
                    self._shelves.fills.set(start, end, self._look_number)
                for block in todo:
                    self._shelves.put_back(block)
                self._accounts.mark()

    def _own_stream(self) -> int:
        """The private stream, made at first use.  Inside `device.scope()`."""
        if not self._stream:
            made = self._device.stream_create(non_blocking=True, priority=0)
            with self._lock:
                if not self._stream:
                    self._stream, made = made, 0
            if made:  # another thread was first
                self._device.stream_destroy(made)
        return self._stream

    # -- verifying --------------------------------------------------------------------------------

    def serve(self, block: Block) -> None:
        """Before a caller gets this block, LIVE and accounted for: verify it.

        Raises CorruptionError or DriverError; the block is then not handed out, and what is whole of it can serve.
        """
        shelves = self._shelves
        damage: Damage | None = None
        whole = False
        try:
            damage = self.inspect(block.ptr, block.end)
            whole = damage is None
        finally:
            with self._lock:
                if whole:
                    shelves.moved_in(block)
                else:
                    self._take_back(block, damage)
        if damage is not None:
            raise self.report(damage)

    def _take_back(self, block: Block, damage: Damage | None) -> None:
        """As a free, of an allocation that nobody got.  Under the lock."""
        accounts = self._accounts
        accounts.mark()
        accounts.allocated -= block.size
        accounts.freed_sum += block.requested
        accounts.frees += 1
        block.generation += 1
        self._shelves.leaves(block)
        block.state, block.stamp, block.users = RETIRED, EMPTY, None
        self.put_down(block, damage)
        accounts.mark()

    def verify(self) -> list[CorruptionError]:
        """Verify all idle memory, one block at a time; what was found, reported.  DriverError if it cannot be read."""
        if not self._usable:
            return []
        self.tend()
        errors: list[CorruptionError] = []
        with self._lock:
            todo = [(block, block.generation) for idle in self._shelves.idle for block in idle]
        for block, generation in todo:
            with self._lock:
                idle = self._shelves.idle[block.kind]
                if block.generation != generation or block.shelf is not idle:
                    continue  # another thread has it
                self._accounts.mark()
                self._shelves.put_aside(block, idle)
                self._accounts.mark()
            damage: Damage | None = None
            try:
                damage = self.inspect(block.ptr, block.end)
            finally:
                with self._lock:
                    self._accounts.mark()
                    self._shelves.aside[block.kind].remove(block)
                    self.put_down(block, damage)
                    self._accounts.mark()
            if damage is not None:
                errors.append(self.report(damage))
        return errors

    def inspect(self, start: int, end: int) -> Damage | None:
        """Read what was filled of [start, end); None if it is whole.  Nobody else may have the bytes meanwhile.

        The host has then waited for every fill among them.  Driver calls: `cuMemcpyDtoHAsync` and
        `cuStreamSynchronize`, each 4 MiB.  Raises DriverError.
        """
        with self._lock:
            runs = self._runs(start, end)
        damage: Damage | None = None
        if not runs:
            return None
        buffer = ctypes.create_string_buffer(min(_CHUNK, max(last - first for first, last, _ in runs)))
        host = ctypes.addressof(buffer)
        try:
            with self._device.scope():
                stream = self._own_stream()
                for first, last, since in runs:
                    for at in range(first, last, _CHUNK):
                        n = min(_CHUNK, last - at)
                        self._device.mem_copy_to_host_async(host, at, n, stream)
                        self._device.stream_synchronize(stream)
                        damage = _compare(buffer.raw[:n] if n < len(buffer) else buffer.raw, at, since, damage)
        except DriverError as error:
            self._registry.failed(error)
            raise
        return damage

    def _runs(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Filled ranges in [start, end), those that touch joined: (start, end, the oldest look).  Under the lock."""
        runs: list[tuple[int, int, int]] = []
        for first, last, since in self._shelves.fills.inside(start, end):
            if runs and runs[-1][1] == first:
                runs[-1] = (runs[-1][0], last, min(since, runs[-1][2]))
            else:
                runs.append((first, last, since))
        return runs

    def put_down(self, block: Block, damage: Damage | None) -> None:
        """A block on no shelf that was looked at: what of it is damaged is put away.  Under the lock, marked."""
        shelves = self._shelves
        if damage is None:
            shelves.place(block)
            return
        start, end = damage.ptr // QUANTUM * QUANTUM, round_up(damage.end)
        if block.ptr < start:
            left, block = block, self._heap.split(block, start - block.ptr)
            shelves.place(left)
        if end < block.end:
            shelves.place(self._heap.split(block, end - block.ptr))
        shelves.put_away(block)

    # -- telling ----------------------------------------------------------------------------------

    def report(self, damage: Damage) -> CorruptionError:
        """The error for damage that was found and put away; logged here, once.  Not under any lock."""
        self._look()
        seen = [name for look, name in self._busy.values() if look >= damage.since]
        with self._lock:
            self.corruptions += 1
            tenant = next((t for _, _, t in self._shelves.tenants.inside(damage.ptr, damage.end)), None)
            known = list(self._shelves.known(self._registry))
        candidates = tuple(seen or known)
        where = f"{damage.end - damage.ptr} bytes at {damage.ptr:#x}"
        if damage.count < damage.end - damage.ptr:
            where += f" ({damage.count} of them wrong)"
        if tenant is None:
            who = "nobody has had them since they were mapped"
        else:
            who = f"last allocated on {tenant.owner} ({format_size(tenant.requested)}, no. {tenant.generation})"
            if tenant.users:
                who += f", also used on {', '.join(tenant.users)}"
        if not candidates:
            by = "no stream is known that could have written"
        elif len(candidates) == 1:
            by = f"written by {candidates[0]}, the only stream " + ("with unfinished work" if seen else "known")
        else:
            kind = "with unfinished work" if seen else "known, none of which was seen with unfinished work"
            by = f"written by one of the streams {kind}: {', '.join(candidates)}"
        error = CorruptionError(
            f"memory of pool {self._name!r} on {self._device.label} was written after it had been freed: {where} "
            f"begin with {damage.found.hex(' ')}; {who}; {by} since they were filled. The bytes are put away; "
            "declare the use with record_stream before the free, or keep the memory until the work is queued",
            pool=self._name,
            ptr=damage.ptr,
            nbytes=damage.end - damage.ptr,
            damaged=damage.count,
            found=damage.found,
            owner=tenant.owner if tenant is not None else "",
            users=tenant.users if tenant is not None else (),
            requested=tenant.requested if tenant is not None else 0,
            generation=tenant.generation if tenant is not None else 0,
            candidates=candidates,
        )
        _log.error("%s", str(error))  # text only: a kept record must not keep frames, and so memory, alive
        return error

    def gone(self, start: int, end: int) -> None:
        """The driver has these bytes back.  Under the lock."""
        self._shelves.gone(start, end)

    @property
    def at_work(self) -> bool:
        """Is some thread filling or verifying at this moment?"""
        return any(self._shelves.aside)

    @property
    def damaged_bytes(self) -> int:
        """Bytes put away for good."""
        return self._shelves.damaged_bytes

    # -- the end ----------------------------------------------------------------------------------

    def leave(self, *, all_over: bool) -> None:
        """The pool goes: nothing more is filled, and what waits to be can go back.

        all_over: every stream of the context is idle, so that nobody writes to what is damaged any more.
        """
        with self._lock:
            self._accounts.mark()
            self._shelves.leave(damaged=all_over)
            self._accounts.mark()

    def close(self) -> None:
        """Destroy the private stream.  `cuStreamDestroy`."""
        stream, self._stream = self._stream, 0
        if stream and self._registry.lost is None and not self._registry.forked:
            with suppress(DriverError), self._device.scope():
                self._device.stream_destroy(stream)


def _compare(data: bytes, at: int, since: int, damage: Damage | None) -> Damage | None:
    """Join what is wrong with these bytes, read at `at`, to what was found before."""
    if data == (_WHOLE if len(data) == _CHUNK else _WHOLE[: len(data)]):  # counting is much slower
        return damage
    right = data.count(_BYTE)
    first = len(data) - len(data.lstrip(_BYTE))
    end = len(data.rstrip(_BYTE))
    if damage is None:
        return Damage(at + first, at + end, len(data) - right, data[first : first + _SHOWN], since)
    return Damage(damage.ptr, at + end, damage.count + len(data) - right, damage.found, min(since, damage.since))

"""A state machine: the real pool against a pool that never uses memory again, step by step, in random programs.

Both play the same steps, each on a simulated device of its own.  The naive one says which steps the contract of
docs/ordering.md allows; the real one must never race, lose a byte or break a rule of the device, whatever fails.
Driver calls are made to fail, limits moved, captures begun; after each step `check()` walks the whole pool.

`HYPOTHESIS_PROFILE=long` runs it for much longer.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from allocator import (
    AllocatorError,
    CachingAllocator,
    Config,
    DriverError,
    Event,
    OutOfMemoryError,
    SimDevice,
    Stream,
    StreamCapturing,
)
from allocator.sizes import KIB, MIB
from tests.model.programs import Worker

KINDS = ("legacy", "blocking", "nb", "nb", "thread", "thread2")
SLOTS = st.integers(0, len(KINDS) - 1)
EVENTS = st.integers(0, 1)
SIZES = st.one_of(
    st.integers(1, 4 * KIB), st.sampled_from([512, 64 * KIB, 256 * KIB, 1 * MIB, 2 * MIB]), st.integers(1, 5 * MIB)
)
CONFIGS = st.fixed_dictionaries(
    {
        "limit": st.sampled_from([0, 4 * MIB, 8 * MIB]),
        "max_in_flight": st.sampled_from([0, 0, 2 * MIB]),
        "seal_frees": st.sampled_from([1, 3, 64]),
        "backing": st.sampled_from(["vmm", "vmm", "malloc"]),
        "context_events": st.booleans(),
        "wait_on_demand": st.booleans(),
        "reuse": st.sampled_from(
            [
                frozenset({"event_dependency", "opportunistic", "internal_dependency"}),
                frozenset({"event_dependency"}),
                frozenset({"opportunistic"}),
                frozenset({"internal_dependency"}),
            ]
        ),
    }
)
FAULTS = st.sampled_from(
    [
        "cuEventRecord",
        "cuEventQuery",
        "cuEventCreate",
        "cuStreamQuery",
        "cuStreamWaitEvent",
        "cuStreamIsCapturing",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemRelease",
        "cuMemAlloc",
        "cuMemFree",
        "cuMemGetInfo",
    ]
)
REFUSED = (DriverError, StreamCapturing)
"""What a call may raise once a driver call has failed: no answer to "does it capture?" is a "yes" for legacy (R10)."""
CODES = st.sampled_from(["CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_OUT_OF_MEMORY"])


class Block:
    """One allocation: the real one, its owner's slot, and the naive memory that stands for it."""

    def __init__(self, real: Any, slot: int, place: tuple[int, int]) -> None:
        self.real = real
        self.slot = slot
        self.place = place


class PoolMachine(RuleBasedStateMachine):
    """Steps on both devices."""

    @initialize(config=CONFIGS, detect=st.booleans())
    def begin(self, config: dict[str, Any], detect: bool) -> None:
        """Two devices, the same streams on both, one pool."""
        self.gpu, self.naive = SimDevice(memory=64 * MIB), SimDevice(memory=64 * MIB)
        self.captures = detect and not config["context_events"]  # a context event kills what it does not know of (R6)
        self.worker = Worker()
        self.streams = [self._stream(self.gpu, kind) for kind in KINDS]
        self.theirs = [self._stream(self.naive, kind) for kind in KINDS]
        self.events = [Event(self.gpu) for _ in range(2)]
        self.their_events = [Event(self.naive) for _ in range(2)]
        self.pool = CachingAllocator(
            self.gpu,
            Config(uses="declared", collect_on_demand=False, detect_captures=detect, wait_timeout=0.01, **config),
        )
        with self.naive.scope():
            self.base = self.naive.mem_alloc(2 * MIB)
        self.count = 0
        self.live: list[Block] = []
        self.capturing: set[int] = set()

    def _stream(self, gpu: SimDevice, kind: str) -> Stream:
        if kind == "legacy":
            return Stream.legacy(gpu)
        if kind.startswith("thread"):
            return Stream.per_thread(gpu)
        return Stream(gpu, non_blocking=kind == "nb")

    def _on(self, slot: int, work: Any) -> Any:
        """In the thread that the stream belongs to."""
        return self.worker.call(work) if KINDS[slot] == "thread2" else work()

    def _free_of_captures(self, *slots: int) -> bool:
        """A capture of a blocking stream forbids legacy; of any, the stream itself."""
        blocking = any(KINDS[s] != "nb" for s in self.capturing)
        return not any(s in self.capturing or (KINDS[s] == "legacy" and blocking) for s in slots)

    # -- memory -------------------------------------------------------------------------------

    @rule(slot=SLOTS, nbytes=SIZES, quiet=st.booleans())
    def allocate(self, slot: int, nbytes: int, quiet: bool) -> None:
        """A block, used at once or not."""
        if self.count >= 2000 or not self._free_of_captures(slot):
            return
        stream = self.streams[slot]
        try:
            real = self._on(slot, lambda: self.pool.allocate(nbytes, stream=stream))
        except (OutOfMemoryError, *REFUSED):
            return
        assert real.size >= nbytes and real.ptr % 512 == 0
        place = (self.base + 512 * self.count, 512)
        self.count += 1
        # The weakest lawful pool: earlier work on the owner's stream may still use the bytes.
        self.naive.hand_out(*place, object())
        self._on(slot, lambda: self.naive.launch(self.theirs[slot], 0, writes=[place]))
        self.naive.hand_out(*place, object())
        block = Block(real, slot, place)
        self.live.append(block)
        if not quiet:
            self._use(block, slot)

    def _use(self, block: Block, slot: int) -> bool:
        """A kernel on both devices, if the contract allows it; the naive device judges."""
        before = len(self.naive.races)
        self._on(slot, lambda: self.naive.launch(self.theirs[slot], 1000, writes=[block.place]))
        if len(self.naive.races) > before:
            self.naive.races.clear()
            self.naive.hand_out(*block.place, object())  # what it did wrong is forgotten with the block
            self._drop(block)
            return False
        self._on(slot, lambda: self.gpu.launch(self.streams[slot], 1000, writes=[block.real]))
        return True

    def _drop(self, block: Block) -> None:
        self.live.remove(block)
        block.real.close()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), slot=SLOTS, wait=st.booleans())
    def use(self, data: st.DataObject, slot: int, wait: bool) -> None:
        """A declared use, mostly behind a wait for the owner."""
        block = data.draw(st.sampled_from(self.live))
        if not self._free_of_captures(slot, block.slot):
            return
        if wait and slot != block.slot:
            self.wait_stream(slot, block.slot)
        try:
            self._on(slot, lambda: block.real.record_stream(self.streams[slot]))
        except REFUSED:
            return
        self._use(block, slot)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Queued."""
        self._drop(data.draw(st.sampled_from(self.live)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), slot=SLOTS)
    def free_naming_a_stream(self, data: st.DataObject, slot: int) -> None:
        """A use that only the free tells of."""
        block = data.draw(st.sampled_from(self.live))
        if not self._free_of_captures(slot, block.slot):
            return
        if slot != block.slot:
            self.wait_stream(slot, block.slot)
        if self._use(block, slot):
            self.live.remove(block)
            self._on(slot, lambda: block.real.close(self.streams[slot]))

    @precondition(lambda self: self.live)
    @rule()
    def free_everything_in_another_thread(self) -> None:
        """Frees come from anywhere."""
        live, self.live = self.live, []
        self.worker.call(lambda: [block.real.close() for block in live])

    # -- order --------------------------------------------------------------------------------

    @rule(event=EVENTS, slot=SLOTS)
    def record(self, event: int, slot: int) -> None:
        """The program's event, perhaps again."""
        if self._free_of_captures(slot):
            try:
                self._on(slot, lambda: self.events[event].record(self.streams[slot]))
            except REFUSED:
                self.their_events[event] = Event(self.naive)  # now it stands for nothing
                return
            self._on(slot, lambda: self.their_events[event].record(self.theirs[slot]))

    @rule(event=EVENTS, slot=SLOTS)
    def wait(self, event: int, slot: int) -> None:
        """A stream waits for it."""
        if self._free_of_captures(slot):
            try:
                self._on(slot, lambda: self.events[event].wait(self.streams[slot]))
            except REFUSED:
                return
            self._on(slot, lambda: self.their_events[event].wait(self.theirs[slot]))

    @rule(slot=SLOTS, other=SLOTS)
    def wait_stream(self, slot: int, other: int) -> None:
        """Record and wait."""
        if slot == other or not self._free_of_captures(slot, other):
            return
        try:
            event = self._on(other, lambda: self.streams[other].record_event())
            self._on(slot, lambda: event.wait(self.streams[slot]))
        except REFUSED:
            return
        event = self._on(other, lambda: self.theirs[other].record_event())
        self._on(slot, lambda: event.wait(self.theirs[slot]))

    @rule(slot=SLOTS)
    def synchronize(self, slot: int) -> None:
        """The host waits."""
        if self._free_of_captures(slot):
            try:
                self._on(slot, self.streams[slot].synchronize)
            except REFUSED:
                return
            self._on(slot, self.theirs[slot].synchronize)

    @rule(slot=SLOTS)
    def query(self, slot: int) -> None:
        """The host asks; the naive side is told what the real one answered."""
        if self._free_of_captures(slot):
            try:
                idle = self._on(slot, self.streams[slot].query)
            except REFUSED:
                return
            if idle:
                self._on(slot, self.theirs[slot].synchronize)

    @rule(slot=st.sampled_from([s for s, kind in enumerate(KINDS) if kind in ("nb", "blocking")]))
    def renew(self, slot: int) -> None:
        """A stream ends; another one gets its handle.  Its blocks go with it, as nobody could wait for it any more."""
        if slot in self.capturing:
            return
        for block in [block for block in self.live if block.slot == slot]:
            self._drop(block)
        self.streams[slot].close()
        self.theirs[slot].close()
        self.streams[slot] = self._stream(self.gpu, KINDS[slot])
        self.theirs[slot] = self._stream(self.naive, KINDS[slot])

    @rule(ns=st.sampled_from([500, 1000, 5000]))
    def advance(self, ns: int) -> None:
        """Time passes."""
        self.gpu.advance(ns)
        self.naive.advance(ns)

    @rule()
    def run_until_idle(self) -> None:
        """All work finishes, and nobody is told."""
        self.gpu.run_until_idle()
        self.naive.run_until_idle()

    # -- the pool's other calls -----------------------------------------------------------------

    @rule(keep=st.sampled_from([0, 2 * MIB]))
    def trim(self, keep: int) -> None:
        """Idle memory goes back."""
        self.pool.trim(keep)

    @rule()
    def stats(self) -> None:
        """A scrape."""
        stats = self.pool.stats()
        assert stats.allocated_bytes == sum(block.real.size for block in self.live)
        assert stats.reserved_bytes == stats.allocated_bytes + stats.in_flight_bytes + stats.idle_bytes

    @precondition(lambda self: not self.capturing)
    @rule()
    def settle(self) -> None:
        """Everything is waited for."""
        self.pool.settle()

    @rule(limit=st.sampled_from([0, 2 * MIB, 6 * MIB]))
    def set_limit(self, limit: int) -> None:
        """The limit moves."""
        self.pool.set_limit(limit)

    # -- trouble --------------------------------------------------------------------------------

    @rule(call=FAULTS, code=CODES, at=st.integers(1, 3))
    def fail(self, call: str, code: str, at: int) -> None:
        """A call to come fails; in the long profile several may."""
        if PROFILE != "long":
            self.gpu.clear_faults()
        self.gpu.fail(call, at=at, error=code)

    @precondition(lambda self: self.captures)
    @rule(slot=st.sampled_from([s for s, kind in enumerate(KINDS) if kind in ("nb", "blocking")]))
    def capture(self, slot: int) -> None:
        """A capture begins: allocations on the stream are refused, and nothing of ours may kill it."""
        if self.capturing:
            return
        self.gpu.clear_faults()
        self.gpu.begin_capture(self.streams[slot], "relaxed")
        self.capturing.add(slot)
        try:
            self.pool.allocate(512, stream=self.streams[slot])
        except StreamCapturing:
            return
        raise AssertionError("an allocation on a capturing stream was not refused")

    @precondition(lambda self: self.capturing)
    @rule()
    def end_capture(self) -> None:
        """It must still be whole."""
        for slot in self.capturing:
            self.gpu.end_capture(self.streams[slot])
        self.capturing.clear()

    # -- judgement --------------------------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        """No race, no broken rule of the device, nothing out of place."""
        if hasattr(self, "pool"):
            assert not self.gpu.races, self.gpu.races[0]
            assert not self.gpu.violations, self.gpu.violations
            self.pool.check()

    def teardown(self) -> None:
        """Everything goes back."""
        if not hasattr(self, "pool"):
            return
        self.gpu.clear_faults()
        if self.capturing:
            self.end_capture()
        for block in list(self.live):
            self._drop(block)
        self.gpu.run_until_idle()
        self.worker.call(self.pool.stats)
        for line in list(self.pool._registry.lines.values()):
            if line.poisoned is not None:
                self.pool.abandon(Stream.of(self.gpu, None, line))
        with suppress(AllocatorError):
            self.pool.settle()
        self.pool.close()
        for _ in range(3):
            self.pool.stats()
        self.worker.close()
        assert not self.gpu.races and not self.gpu.violations, (self.gpu.races, self.gpu.violations)
        assert self.gpu.used_bytes == 0, f"{self.gpu.used_bytes} bytes held at the end"


settings.register_profile("default-model", max_examples=200, stateful_step_count=40, deadline=None)
settings.register_profile("long", max_examples=5000, stateful_step_count=80, deadline=None)
PROFILE = "long" if os.environ.get("HYPOTHESIS_PROFILE") == "long" else "default-model"

TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    settings.get_profile(PROFILE), suppress_health_check=list(HealthCheck), derandomize=PROFILE != "long", database=None
)

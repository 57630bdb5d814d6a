"""S10: every driver call fails once, at every position, in every kind of work; nothing is lost.

A workload is run to learn how many calls of each kind it makes.  Then it is run again for each of them, with that
one failing.  Whatever an operation raises is an `AllocatorError`; the rest of the workload goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from allocator import Allocation, AllocatorError, CachingAllocator, Config, DriverError, Event, SimDevice, Stream
from tests.scenarios.lab import KIB, MIB, Lab, identity, used

Step = Callable[[], object]
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
CODES = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_UNKNOWN")
MAKES_MEMORY = {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemAlloc", "cuMemAddressReserve"}
IGNORED = {
    "cuLaunchKernel",  # the program's own
    "cuCtxPushCurrent",  # these three fail for a lost context only
    "cuCtxPopCurrent",
    "cuThreadExchangeStreamCaptureMode",
}


@pytest.fixture(autouse=True)
def nothing_to_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection of the whole test process, thousands of times, would take most of the time."""
    monkeypatch.setattr("allocator.caching.ladder.gc", SimpleNamespace(collect=lambda: 0))


def _codes(call: str) -> tuple[str, ...]:
    return (*CODES, OUT_OF_MEMORY) if call in MAKES_MEMORY else CODES


class Work:
    """One run: a device, a pool, streams, and a list of steps that may each fail."""

    def __init__(self, backing: str, memory: int = 64 * MIB, **config: object) -> None:
        self.gpu = SimDevice(memory=memory)
        options: dict[str, object] = {"backing": backing, "wait_timeout": 0.01, "seal_frees": 4, **config}
        self.pool = CachingAllocator(self.gpu, config=Config(**options))  # type: ignore[arg-type]
        self.streams: list[Stream] = []
        self.live: dict[str, Allocation] = {}
        self.errors: list[AllocatorError] = []

    def stream(self) -> Stream:
        self.streams.append(Stream(self.gpu))
        return self.streams[-1]

    def get(self, name: str, stream: Stream, nbytes: int, duration_ns: int = 1000) -> None:
        self.live[name] = used(self.pool, stream, nbytes, duration_ns)

    def drop(self, *names: str) -> None:
        for name in names:
            if name in self.live:
                self.live.pop(name).close()

    def attempt(self, *steps: Step) -> None:
        for step in steps:
            try:
                step()
            except AllocatorError as error:
                assert "\n" not in str(error)
                self.errors.append(error)
            self.pool.check()


def growth(w: Work) -> None:
    a = w.streams[0]
    w.attempt(
        lambda: w.get("small", a, KIB),
        lambda: w.get("large", a, 3 * MIB),
        lambda: w.get("huge", a, 17 * MIB),
        lambda: w.drop("large"),
        lambda: w.get("larger", a, 7 * MIB),  # grows what is there already
        lambda: w.drop("small", "huge", "larger"),
    )


def trim(w: Work) -> None:
    a = w.streams[0]
    w.attempt(
        *(lambda i=i: w.get(f"b{i}", a, 2 * MIB) for i in range(4)),
        lambda: w.drop("b1", "b3"),
        w.gpu.run_until_idle,
        w.pool.trim,
        lambda: w.get("again", a, 4 * MIB),
        lambda: w.drop("b0", "b2", "again"),
        w.gpu.run_until_idle,
        lambda: w.pool.set_limit(1),
        w.pool.trim,
        lambda: w.pool.set_limit(0),
    )


def cross_stream(w: Work) -> None:
    a, b = w.streams[:2]

    def round_(i: int) -> None:
        one, other = (a, b) if i % 2 else (b, a)
        w.get(f"x{i}", one, 2 * MIB)
        w.live[f"x{i}"].record_stream(other)
        w.drop(f"x{i}")
        w.gpu.advance(400)

    w.attempt(
        *(lambda i=i: round_(i) for i in range(12)),
        lambda: a.wait_stream(b),
        w.pool.stats,
        w.pool.settle,
    )


def out_of_memory(w: Work) -> None:
    a, b = w.streams[:2]
    w.attempt(
        lambda: w.get("all", a, 60 * MIB, 1_000_000),
        lambda: w.drop("all"),
        lambda: w.get("next", b, 60 * MIB),
        lambda: w.get("too much", b, 60 * MIB),
        lambda: w.drop("next", "too much"),
        w.gpu.run_until_idle,
        lambda: w.get("small", a, KIB),
        lambda: w.get("rest", a, 62 * MIB),
        lambda: w.drop("small", "rest"),
    )


def internal_dependency(w: Work) -> None:
    a, b = w.streams[:2]
    w.pool.set_limit(32 * MIB)
    w.attempt(
        lambda: w.get("a", a, 32 * MIB, 1_000_000),
        lambda: w.drop("a"),
        lambda: w.get("b", b, 32 * MIB, 1_000_000),
        lambda: w.drop("b"),
        lambda: w.get("c", a, 16 * MIB),
        lambda: w.drop("c"),
        lambda: w.pool.set_limit(0),
    )


def stream_end(w: Work) -> None:
    def one() -> None:
        s = Stream(w.gpu)
        w.get("x", s, 2 * MIB)
        w.drop("x")
        s.close()

    w.attempt(*(one for _ in range(4)), w.pool.stats, w.gpu.run_until_idle, w.pool.stats)


def assumed_uses(w: Work) -> None:
    a, b = w.streams[:2]

    def round_(i: int) -> None:
        s = (a, b)[i % 2]
        w.live["x"] = w.pool.allocate(2 * MIB, stream=s, assumed=True)
        w.gpu.launch(s, duration_ns=1000, writes=[w.live["x"]])
        w.drop("x")
        w.gpu.advance(300)

    w.attempt(*(lambda i=i: round_(i) for i in range(12)), w.pool.stats, w.pool.settle)


def ends(w: Work) -> None:
    a = w.streams[0]
    w.attempt(lambda: w.get("x", a, 2 * MIB), lambda: w.drop("x"), w.pool.close, w.gpu.run_until_idle)


WORKLOADS: list[Callable[[Work], None]] = [
    growth,
    trim,
    cross_stream,
    out_of_memory,
    internal_dependency,
    stream_end,
    assumed_uses,
    ends,
]


def _prepared(backing: str) -> Work:
    work = Work(backing)
    work.stream()
    work.stream()
    return work


def _calls(workload: Callable[[Work], None], backing: str) -> Counter[str]:
    work = _prepared(backing)
    before = Counter(work.gpu.calls)
    workload(work)
    return Counter(work.gpu.calls) - before


def _end(work: Work) -> None:
    """The driver has recovered: the pool knows what it holds, works, and gives everything back."""
    gpu, pool = work.gpu, work.pool
    gpu.clear_faults()
    work.drop(*list(work.live))
    gpu.run_until_idle()
    for stream in work.streams:
        stream.synchronize()
    pool.settle()
    pool.check()
    identity(pool)
    stats = pool.stats()
    assert gpu.used_bytes == stats.reserved_bytes, "the counters do not say what the device holds"
    assert stats.in_flight_bytes == 0, "something is in flight for ever"
    assert stats.allocated_bytes == 0 and stats.poisoned_streams == 0
    work.get("again", work.streams[0], 48 * MIB)
    work.drop("again")
    work.streams[0].synchronize()
    pool.trim()
    stats = pool.stats()
    assert stats.reserved_bytes == 0 == gpu.used_bytes, "memory was lost"


@pytest.mark.parametrize("backing", ["vmm", "malloc"])
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.__name__)
def test_s10_any_single_call_may_fail_at_any_position(lab: Lab, workload: Callable[[Work], None], backing: str) -> None:
    plan = _calls(workload, backing)
    assert plan.total() > 3
    failed: list[str] = []
    for call, times in sorted(plan.items()):
        if call in IGNORED:
            continue
        for at in range(1, times + 1):
            codes = _codes(call)
            for code in codes if at <= 3 else (codes[at % len(codes)],):  # later positions take turns
                work = _prepared(backing)
                work.gpu.fail(call, at=at, error=code)
                try:
                    workload(work)
                    if work.pool.closed:
                        work.gpu.clear_faults()
                        with CachingAllocator(work.gpu, config=Config()) as other:
                            other.stats()
                        assert work.gpu.used_bytes == 0, "a closed pool kept memory"
                    else:
                        _end(work)
                    assert work.gpu.races == [], "race"
                    assert work.gpu.violations == [], work.gpu.violations
                except Exception as error:
                    failed.append(f"{call} #{at} {code}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
    assert not failed, f"{len(failed)} failures:\n" + "\n".join(failed[:40])


@pytest.mark.parametrize("backing", ["vmm", "malloc"])
@pytest.mark.parametrize("workload", [w for w in WORKLOADS if w is not ends], ids=lambda w: w.__name__)
def test_s10_a_driver_that_fails_for_a_while_recovers(lab: Lab, workload: Callable[[Work], None], backing: str) -> None:
    """Not one call but every call of a kind fails, from the start to the end of the workload."""
    failed: list[str] = []
    for call in sorted(_calls(workload, backing)):
        if call in IGNORED:
            continue
        for code in _codes(call):
            work = _prepared(backing)
            work.gpu.fail(call, times=0, error=code)
            try:
                workload(work)
                _end(work)
                assert work.gpu.violations == [], work.gpu.violations
                assert work.gpu.races == [], "race"
            except Exception as error:
                failed.append(f"{call} {code}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
    assert not failed, "\n".join(failed)


def test_s10_an_error_that_is_no_lack_of_memory_names_the_call(lab: Lab, gpu: SimDevice) -> None:
    pool = lab.pool(gpu)
    gpu.fail("cuMemMap", error="CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(AllocatorError, match="cuMemMap failed: CUDA_ERROR_INVALID_VALUE"):
        pool.allocate(MIB)
    assert gpu.used_bytes == 0
    pool.allocate(MIB)


@pytest.mark.parametrize("call", ["cuMemCreate", "cuEventQuery", "cuStreamQuery", "cuEventRecord"])
def test_s10_a_sticky_error_ends_the_pool_with_one_clear_error(call: str) -> None:
    gpu = SimDevice(memory=64 * MIB)
    pool = CachingAllocator(gpu, config=Config(seal_frees=1))
    a, b = Stream(gpu), Stream(gpu)
    kept = used(pool, a, MIB)
    gpu.fail(call, error="CUDA_ERROR_ILLEGAL_ADDRESS", sticky=True)
    with pytest.raises(AllocatorError):
        for i in range(100):
            used(pool, (a, b)[i % 2], 2 * MIB).close()
    with pytest.raises(AllocatorError, match="ILLEGAL_ADDRESS"):
        pool.allocate(MIB, stream=a)
    kept.close()  # never raises
    pool.check()
    assert pool.stats().allocated_bytes == 0
    pool.close()


def test_r11_an_error_of_a_query_is_never_completion_and_abandon_is_the_way_out(lab: Lab, gpu: SimDevice) -> None:
    pool = lab.pool(gpu)
    a, b = Stream(gpu), Stream(gpu)
    gpu.hold(a)
    used(pool, a, 2 * MIB).close()
    gpu.fail("cuStreamQuery", times=0, error="CUDA_ERROR_UNKNOWN")
    stats = pool.stats()
    assert (stats.in_flight_bytes, stats.poisoned_streams) == (2 * MIB, 1)
    with pytest.raises(ValueError, match="not poisoned"):
        pool.abandon(b)
    gpu.resume(a)
    gpu.run_until_idle()
    assert pool.stats().in_flight_bytes == 2 * MIB
    gpu.clear_faults()
    pool.abandon(a)
    stats = pool.stats()
    assert (stats.in_flight_bytes, stats.poisoned_streams) == (0, 0)


@pytest.mark.parametrize(
    "call", ["cuEventRecord", "cuStreamWaitEvent", "cuEventQuery", "cuEventCreate", "cuStreamCreateWithPriority"]
)
def test_r11_a_context_that_the_programs_own_call_finds_lost_serves_no_hit(call: str) -> None:
    """What the driver told a stream or an event of the program's, the pool knows: also where a bin has the block."""
    gpu = SimDevice(memory=1 << 30)
    pool = CachingAllocator(gpu, config=Config())
    stream, event = Stream(gpu), Event(gpu)
    pool.allocate(4096, stream=stream).close()
    gpu.fail(call, error="CUDA_ERROR_ILLEGAL_ADDRESS", sticky=True)
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        event.record(stream)
        event.wait(stream)
        event.query()
        Event(gpu)
        Stream(gpu)
    with pytest.raises(DriverError, match="the context is lost"):
        pool.allocate(4096, stream=stream)
    assert pool.stats().device_lost == 1

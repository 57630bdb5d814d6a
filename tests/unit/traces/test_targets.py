"""Where a replay runs: time, launches and the oracle, simulated and on a (played) GPU."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest

from allocator.devices import SimDevice
from allocator.traces.targets import BEHIND_NS, CudaTarget, SimTarget, target_for


@pytest.fixture
def gpu() -> SimDevice:
    return SimDevice()


def stream_of(gpu: SimDevice) -> int:
    with gpu.scope():
        return gpu.stream_create(non_blocking=True, priority=0)


def test_the_simulators_clock_is_the_recorded_time_plus_every_host_wait(gpu: SimDevice) -> None:
    gpu.advance(77)
    stream = stream_of(gpu)
    target = SimTarget(gpu)
    target.reach(1000)
    assert (gpu.now_ns, target.elapsed_ns()) == (1077, 1000)
    target.launch(stream, 5000)
    with gpu.scope():
        gpu.stream_synchronize(stream)  # the host waits from 1000 to 6000
    target.reach(1500)
    assert target.elapsed_ns() == 6500
    target.reach(1500)
    assert target.elapsed_ns() == 6500
    assert target.stalled_ns() == 5000
    assert target.races() == 0
    target.launch(stream, 100)
    assert target.drain() == 6600
    assert target.calls() == Counter({"cuLaunchKernel": 2, "cuStreamSynchronize": 1}) + _scope_calls(target.calls())


def _scope_calls(calls: Counter[str]) -> Counter[str]:
    return Counter({name: n for name, n in calls.items() if name.startswith(("cuCtx", "cuThread"))})


def test_without_launches_the_last_moment_is_the_hosts(gpu: SimDevice) -> None:
    target = SimTarget(gpu)
    target.reach(123)
    assert target.drain() == 123


def test_memory_of_before_is_no_leak(gpu: SimDevice) -> None:
    with gpu.scope():
        gpu.mem_alloc(4096)
        target = target_for(gpu)
        assert target.leaked_bytes() == 0
        gpu.mem_alloc(2 << 20)
    assert target.leaked_bytes() >= 2 << 20


class PlayedGpu:
    """As much of a CudaDevice as a target needs."""

    granularity = 2 << 20

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.spun: list[tuple[int, int]] = []

    def scope(self) -> nullcontext[None]:
        return nullcontext()

    def spin(self, stream: int, duration_ns: int) -> None:
        self.calls["cuLaunchKernel"] += 1
        self.spun.append((stream, duration_ns))

    def ctx_synchronize(self) -> None:
        self.calls["cuCtxSynchronize"] += 1


class HandleOnly:
    handle = 0x55


def test_on_a_gpu_launches_spin_and_calls_are_counted_from_the_beginning() -> None:
    gpu: Any = PlayedGpu()
    target = target_for(gpu)
    assert isinstance(target, CudaTarget)
    assert gpu.spun == [(2, 0)]  # the kernel is loaded
    with target.session():
        target.launch(HandleOnly(), 700)
    assert gpu.spun[1:] == [(0x55, 700)]
    assert target.calls() == Counter({"cuLaunchKernel": 1})
    assert target.drain() <= target.elapsed_ns()
    assert (target.races(), target.stalled_ns()) == (None, None)
    target.attach(HandleOnly(), object())
    target.detach(object())


def test_on_a_gpu_leaks_are_pieces_never_given_back() -> None:
    gpu: Any = PlayedGpu()
    target = CudaTarget(gpu)
    gpu.calls += Counter({"cuMemCreate": 3, "cuMemRelease": 2, "cuMemAlloc": 1, "cuMemFree": 1})
    assert target.leaked_bytes() == 2 << 20
    gpu.failures["cuMemCreate"] += 1  # it was refused
    assert target.leaked_bytes() == 0


class Wall:
    """`time` as the target sees it."""

    def __init__(self) -> None:
        self.now = 10**9
        self.slept: list[float] = []

    def monotonic_ns(self) -> int:
        self.now += 50  # looking takes time, too
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += round(seconds * 1e9)


def test_on_a_gpu_rows_wait_for_their_time_and_a_long_hold_up_moves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = Wall()
    monkeypatch.setattr("allocator.traces.targets.time", wall)
    gpu: Any = PlayedGpu()
    target = CudaTarget(gpu)
    target.reach(50_000_000)
    assert target.elapsed_ns() == pytest.approx(50_000_000, abs=1000)
    assert len(wall.slept) == 1
    assert wall.slept[0] < 0.05  # the last bit is watched, not slept
    wall.now += 5_000_000
    target.reach(51_000_000)  # a little late: catch up
    assert target.elapsed_ns() == pytest.approx(55_000_000, abs=1000)
    target.reach(56_000_000)
    assert target.elapsed_ns() == pytest.approx(56_000_000, abs=1000)
    wall.now += 4 * BEHIND_NS  # held up
    target.reach(56_000_000)
    target.reach(57_000_000)
    assert target.elapsed_ns() == pytest.approx(57_000_000 + 4 * BEHIND_NS, abs=1000)

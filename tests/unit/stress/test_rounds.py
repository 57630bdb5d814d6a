"""Rounds, players and targets: what they do, and that each kind of violation is seen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

import allocator
from allocator import CachingAllocator, SimDevice
from allocator.errors import DriverError
from allocator.stress.hammer import make_pool
from allocator.stress.operations import Op, Setting, Step
from allocator.stress.player import check_amid
from allocator.stress.rounds import Round, violation_of
from allocator.stress.targets import CanaryTarget, Corrupt, SimTarget, open_target
from allocator.stress.workloads import WORKLOADS, Shape
from tests.unit.stress.conftest import MIB, a_round, a_setting, steps_of


def kind(one: Round) -> str | None:
    return None if one.violation is None else one.violation.kind


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_round_of_any_workload_by_one_thread_leaves_nothing(name: str) -> None:
    one = a_round()
    programs = [WORKLOADS[name].operations("1/0", Shape(4, worker, 2, 32 * MIB)) for worker in range(2)]
    steps = [Step(worker, next(programs[worker])) for _ in range(300) for worker in range(2)]
    one.play(steps)
    assert one.violation is None
    assert one.done == len(steps)
    assert one.order == tuple(worker for worker, _ in steps)


def test_real_threads_play_all_their_operations() -> None:
    one = a_round(a_setting(workers=3))
    one.run([islice(WORKLOADS["handover"].operations("1", Shape(4, w, 3, 32 * MIB)), 200) for w in range(3)])
    assert one.violation is None and one.done == 600
    assert sorted(one.order) == [0] * 200 + [1] * 200 + [2] * 200


def test_a_round_that_is_told_to_stop_ends_early_and_clean() -> None:
    one = a_round()
    endless = [WORKLOADS["steady"].operations("1", Shape(4, w, 2, 32 * MIB)) for w in range(2)]
    one.run(endless, lambda: one.done > 500)
    assert one.violation is None and one.done > 500


EVERYTHING = """
0 open s1000
0 alloc b1 s1000 n1000
0 use b1 own t100
0 end s1000
0 use b1 own t100
0 share b1 s0
0 free b1
0 alloc b2 s0 n0
0 use b2 own t100
0 free b2
0 alloc b3 s3 n5000
0 share b3 legacy
0 read b3 legacy t100
0 give b3 w1
1 take b9
1 use b9 own t5
1 drop b9
0 alloc b4 s0 n600
0 record e1 s0
0 wait e1 s1
0 declare b4 s1
0 read b4 s1 t10
0 cycle b4
0 alloc b5 s0 n600
0 after s2 s0
0 use b5 s2 t10
0 drop b5
0 alloc b6 s0 n600
0 after s2 s0
0 use b6 s2 t10
0 give b6 w1
0 free b6
0 collect
0 sync s0
0 query s1
0 pass t1000
0 stats
0 scrape
0 check
0 trim n0
0 settle
"""


def test_every_operation_does_what_it_says() -> None:
    one = a_round()
    one.play(steps_of(EVERYTHING))
    assert one.violation is None
    counts = one.players[0].counts
    assert (
        counts["skipped"] == 4
    )  # a kernel and a wait on an ended stream, one on an empty block, a give that may not be


def test_what_is_not_there_is_skipped() -> None:
    text = """
    0 alloc b1 s1000 n512
    0 use b1 own t1
    0 read b1 s1 t1
    0 share b1 s1
    0 declare b1 s1
    0 free b1
    0 free_on b1 s1
    0 drop b1
    0 cycle b1
    0 give b1 w1
    0 take b1
    0 record e1 s1000
    0 wait e1 s1
    0 after s1 s1000
    0 open s1
    0 end s1000
    0 sync s1000
    0 query s1000
    """
    one = a_round()
    one.play(steps_of(text))
    assert one.violation is None and one.players[0].counts["skipped"] == 16


def test_memory_refused_is_counted_and_the_program_goes_on() -> None:
    setting = Setting(workers=1, streams=1, limit=4 * MIB)
    one = a_round(setting)
    one.play(steps_of(f"0 alloc b1 s0 n{4 * MIB}\n0 alloc b2 s0 n512\n0 use b2 own t1\n0 free b2\n0 free b1"))
    assert one.violation is None
    assert one.players[0].counts["refused"] == 1 and one.players[0].counts["skipped"] == 2


RACE = """
0 alloc b1 s0 n2097152
0 share b1 s1
0 read b1 s1 t1000
0 free b1
0 alloc b2 s2 n2097152
0 use b2 own t1000
"""


@pytest.mark.usefixtures("careless")
def test_a_race_ends_the_round() -> None:
    one = a_round()
    one.play(steps_of(RACE))
    assert kind(one) == "race" and one.worker == 0 and one.done == 6


def test_the_same_program_on_the_real_pool_has_no_race() -> None:
    one = a_round()
    one.play(steps_of(RACE))
    assert one.violation is None


def hands_out_twice(pool: CachingAllocator) -> None:
    real, first = pool.allocate, []

    def allocate(nbytes: int, stream: object = None) -> Any:
        first.append(real(nbytes, stream))
        return SimpleNamespace(
            **{name: getattr(first[0], name) for name in ("ptr", "size", "stream", "closed", "close")}
        )

    pool.allocate = allocate  # type: ignore[assignment,method-assign]


def forgets_a_block(pool: CachingAllocator) -> None:
    def free(allocation: Any, stream: object) -> None:
        allocation._generation = -1

    pool.free = free  # type: ignore[method-assign]


def fails_its_check(pool: CachingAllocator) -> None:
    def check() -> None:
        raise AssertionError("blocks lost\nand a long dump")

    pool.check = check  # type: ignore[method-assign]


def miscounts(pool: CachingAllocator) -> None:
    pool._accounts.allocated += 512


def raises(pool: CachingAllocator) -> None:
    def allocate(nbytes: int, stream: object = None) -> Any:
        raise DriverError("cuMemMap", "CUDA_ERROR_UNKNOWN")

    pool.allocate = allocate  # type: ignore[assignment,method-assign]


def keeps_memory(pool: CachingAllocator) -> None:
    pool.trim = lambda keep=0: 0  # type: ignore[method-assign]


ONE_BLOCK = "0 alloc b1 s0 n4096"


@pytest.mark.parametrize(
    ("change", "text", "expected", "says"),
    [
        (hands_out_twice, "0 alloc b1 s0 n4096\n0 alloc b2 s0 n4096", "twice", "block 1 of worker 0 holds it"),
        (forgets_a_block, f"{ONE_BLOCK}\n0 free b1", "leak", "0 bytes are held, and the pool counts 4096"),
        (forgets_a_block, ONE_BLOCK, "leak", "everything was freed"),
        (fails_its_check, f"{ONE_BLOCK}\n0 check", "check", "blocks lost"),
        (fails_its_check, ONE_BLOCK, "check", "blocks lost"),
        (miscounts, f"{ONE_BLOCK}\n0 stats", "check", ""),
        (raises, ONE_BLOCK, "exception", "DriverError: cuMemMap failed: CUDA_ERROR_UNKNOWN (at test_rounds.py:"),
        (keeps_memory, f"{ONE_BLOCK}\n0 free b1", "leak", "are reserved after everything was given back"),
    ],
)
def test_each_kind_of_violation_is_seen(
    change: Callable[[CachingAllocator], None], text: str, expected: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allocator.stress.player.TRY_AGAIN_S", 0)
    one = a_round(change=change)
    one.play(steps_of(text))
    assert kind(one) == expected
    assert one.violation is not None and says in one.violation.text and "\n" not in one.violation.text


def test_blocks_that_overlap_are_seen_while_all_of_them_are_held() -> None:
    one = a_round()
    with ExitStack() as stack:
        for player, number in zip(one.players, (1, 2), strict=True):
            player.play([Op("alloc", number, 0, 1024)])
        first = next(iter(one.players[0]._blocks.values())).allocation
        second = next(iter(one.players[1]._blocks.values())).allocation
        pointer = second.ptr
        stack.callback(setattr, second, "ptr", pointer)
        second.ptr = first.ptr + 512
        one.end()
        assert kind(one) == "twice" and one.violation is not None and "overlaps the live one" in one.violation.text


def test_a_check_amid_others_only_fails_for_what_stays_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allocator.stress.player.TRY_AGAIN_S", 0)
    answers: list[Exception | None] = [AssertionError("passing"), AssertionError(), None]

    def check() -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    pool: Any = SimpleNamespace(check=check)
    check_amid(pool)
    assert answers == []


def test_threads_that_hang_are_a_violation_with_their_places() -> None:
    """The pool's lock is taken and never given back, as a deadlock would have it."""
    gate = threading.Event()

    def blocks(pool: CachingAllocator) -> None:
        real = pool.allocate
        pool.allocate = lambda *args, **more: (gate.wait(), real(*args, **more))[1]  # type: ignore[method-assign]

    one = a_round(change=blocks)
    one.run([[Op("alloc", 1, 0, 512)], []], patience_s=0.2)
    assert kind(one) == "hang"
    assert one.violation is not None and "stress-0: " in one.violation.text and "wait" in one.violation.text
    gate.set()


def test_an_error_in_one_thread_ends_the_others() -> None:
    one = a_round(change=raises)
    endless: Iterator[Op] = iter(lambda: Op("pass", 1), None)
    one.run([endless, [Op("alloc", 1, 0, 512)]])
    assert kind(one) == "exception" and one.worker == 1


def test_corruption_is_named_so_whoever_found_it() -> None:
    assert violation_of(Corrupt("bytes")).kind == "corruption"
    assert violation_of(allocator.CorruptionError("bytes")).kind == "corruption"
    assert violation_of(ValueError("odd")).text == "ValueError: odd"


# -- the canary ---------------------------------------------------------------------------------


def canary_round(every: int = 1) -> tuple[Round, SimDevice]:
    gpu = SimDevice()
    setting = a_setting(workers=1)
    target = CanaryTarget(gpu, every=every)
    return Round(target, make_pool(target, setting), setting), gpu


def test_a_program_under_the_canary_runs_through() -> None:
    one, _ = canary_round()
    one.play([Step(0, op) for op in islice(WORKLOADS["steady"].operations("1", Shape(4, 0, 1, 8 * MIB)), 300)])
    assert one.violation is None


@pytest.mark.parametrize("where", [0, 50_000, 99_999])
def test_a_byte_that_somebody_else_wrote_is_found(where: int) -> None:
    one, gpu = canary_round()
    one.play(steps_of("0 alloc b1 s0 n100000\n0 use b1 own t10"))
    assert one.violation is None
    one, gpu = canary_round()
    player = one.players[0]
    player.play([Op("alloc", 1, 0, 100_000)])
    held = player._blocks[1]
    with gpu.scope():
        gpu.mem_set_async(held.allocation.ptr + where, held.value ^ 1, 1, held.allocation.stream.handle)
    one.end()
    assert kind(one) == "corruption"
    assert one.violation is not None and f"byte {where} is " in one.violation.text


def test_the_canary_compares_one_block_in_so_many() -> None:
    one, gpu = canary_round(every=4)
    before = gpu.calls["cuMemcpyDtoHAsync"]
    one.play(steps_of("\n".join(f"0 alloc b{n} s0 n512\n0 free b{n}" for n in range(8))))
    assert one.violation is None and gpu.calls["cuMemcpyDtoHAsync"] - before == 2
    with pytest.raises(ValueError, match="every must be at least 1"):
        CanaryTarget(gpu, every=0)


EARLY = """
0 alloc b1 s0 n2097152
0 use b1 own t900000
0 share b1 s1
0 free b1
0 alloc b2 s2 n2097152
0 pass t2000000
0 free b2
"""


@pytest.mark.usefixtures("careless")
def test_the_canary_sees_a_pool_that_reuses_too_early() -> None:
    """The new owner fills the block at once, and the old one's kernel, queued before, writes behind it."""
    one, _ = canary_round(every=2)  # reading the first block back would wait for its kernel
    one.play(steps_of(EARLY))
    assert kind(one) == "corruption" and one.done == 7


def test_the_canary_finds_nothing_in_the_same_program_on_the_real_pool() -> None:
    one, _ = canary_round(every=2)  # reading the first block back would wait for its kernel
    one.play(steps_of(EARLY))
    assert one.violation is None


def test_a_device_that_still_holds_memory_is_a_leak() -> None:
    gpu = SimDevice()
    for target in (SimTarget(gpu), CanaryTarget(gpu)):
        assert target.leaked_bytes() == 0
        with gpu.scope():
            handle = gpu.mem_create(2 * MIB)
        assert target.leaked_bytes() == 2 * MIB
        with gpu.scope():
            gpu.mem_release(handle)
        assert target.leaked_bytes() == 0
        gpu.fail("cuMemCreate")
        with gpu.scope(), pytest.raises(DriverError):
            gpu.mem_create(2 * MIB)
        with gpu.scope(), pytest.raises(DriverError):
            gpu.mem_create(1 << 60)
        assert target.leaked_bytes() == 0, "what was refused is not held"


def test_a_target_forgets_what_it_found_when_told() -> None:
    target = open_target(None, MIB)
    assert isinstance(target, SimTarget)
    target.device.violations.append("something")  # type: ignore[attr-defined]
    assert target.wrong
    target.reset()
    assert not target.wrong
    CanaryTarget(SimDevice()).reset()


def test_on_a_gpu_kernels_spin() -> None:
    spun: list[tuple[int, int]] = []

    gpu: Any = SimpleNamespace(
        spin=lambda handle, ns: spun.append((handle, ns)), calls={}, failures={}, granularity=1, scope=SimDevice().scope
    )
    target = CanaryTarget(gpu)
    target.launch(SimpleNamespace(handle=7), 500, SimpleNamespace(), 1, write=False)  # type: ignore[arg-type]  # stand-ins
    target.advance(5)
    assert spun == [(7, 500)]

"""Workloads: the same seed gives the same operations, and all keep the contract."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from allocator.stress.contract import breach
from allocator.stress.operations import VERBS, Step
from allocator.stress.workloads import WORKLOADS, Shape, Workload, recorded_sizes
from tests.unit.stress.conftest import MIB, steps_of

ALL = list(WORKLOADS.values())


def program(workload: Workload, *, seed: str = "1/0", streams: int = 4, workers: int = 3, n: int = 1500) -> list[Step]:
    """All workers, one operation each in turn."""
    generators = [workload.operations(seed, Shape(streams, worker, workers, 32 * MIB)) for worker in range(workers)]
    return [Step(worker, next(generators[worker])) for _ in range(n // workers) for worker in range(workers)]


@pytest.mark.parametrize("workload", ALL, ids=lambda one: one.name)
def test_the_same_seed_gives_the_same_operations_and_another_one_others(workload: Workload) -> None:
    assert program(workload) == program(workload)
    assert program(workload) != program(workload, seed="2/0")


@pytest.mark.parametrize("streams", [1, 2, 7])
@pytest.mark.parametrize("workload", ALL, ids=lambda one: one.name)
def test_every_workload_keeps_the_contract(workload: Workload, streams: int) -> None:
    assert breach(program(workload, streams=streams, n=3000)) is None


@pytest.mark.parametrize("workload", ALL, ids=lambda one: one.name)
def test_a_workload_allocates_and_frees_and_stays_within_its_share(workload: Workload) -> None:
    live: dict[int, int] = {}
    most = 0
    verbs: Counter[str] = Counter()
    for op in islice(workload.operations("1/0", Shape(4, 0, 1, 32 * MIB)), 4000):
        verbs[op.verb] += 1
        if op.verb == "alloc":
            live[op.a] = op.c
        elif op.verb in ("free", "free_on", "drop", "cycle", "give"):
            live.pop(op.a, None)
        most = max(most, sum(live.values()))
    assert verbs["alloc"] > 200
    assert most < (48 if workload.name == "near-limit" else 32) * MIB
    assert (most > 32 * MIB) == (workload.name == "near-limit")


def test_together_they_use_every_operation() -> None:
    seen = {
        step.op.verb for workload in ALL for step in program(workload, n=60_000 if workload.name == "steady" else 3000)
    }
    assert seen == set(VERBS)


def test_recorded_sizes_are_those_of_the_sample() -> None:
    sizes = recorded_sizes()
    assert len(sizes) == 27_849 and min(sizes) > 0 and len(set(sizes)) > 100


@pytest.mark.parametrize("shape", [(0, 0, 1, MIB), (1, 1, 1, MIB), (1, 0, 1, MIB - 1)])
def test_a_shape_that_makes_no_sense_is_refused(shape: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="a shape needs"):
        Shape(*shape)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0 alloc b1 s0 n1\n0 use b1 s1 t1", "step 2, 0 use b1 s1 t1: the stream has not waited"),
        ("0 after s1 s0\n0 alloc b1 s0 n1\n0 read b1 s1 t1", "has not waited"),
        ("0 record e1 s0\n0 alloc b1 s0 n1\n0 wait e1 s1\n0 use b1 s1 t1", "has not waited"),
        ("0 alloc b1 s0 n1\n0 after s1 s0\n0 use b1 s1 t1\n0 free b1", "does not name"),
        ("0 alloc b1 s0 n1\n0 after s1 s0\n0 use b1 s1 t1\n0 free_on b1 s2", "does not name"),
        ("0 alloc b1 s0 n1\n0 after s1 s0\n0 use b1 s1 t1\n0 give b1 w1", "the receiver cannot know"),
        (
            "0 alloc b1 s0 n1\n0 after s1 s0\n0 after s2 s0\n0 use b1 s1 t1\n0 use b1 s2 t1",
            "one undeclared stream only",
        ),
        ("0 alloc b1 s0 n1\n0 alloc b1 s0 n1", "there already"),
        ("0 alloc b1 s0 n1\n0 give b1 w1\n1 alloc b2 s0 n1\n1 take b2", "there already"),
        ("0 open s1000\n0 open s1000", "only a private stream that is not open"),
        ("0 open s1", "only a private stream that is not open"),
        ("0 end s1", "only a private stream can be ended"),
        ("0 open s1000\n0 alloc b1 s1000 n1\n0 give b1 w1", "unknown to the other worker"),
    ],
)
def test_each_breach_of_the_contract_is_seen(text: str, why: str) -> None:
    found = breach(steps_of(text))
    assert found is not None and why in found


@pytest.mark.parametrize(
    "text",
    [
        "0 alloc b1 s0 n1\n0 share b1 s1\n0 use b1 s1 t1\n0 free b1",
        "0 alloc b1 s0 n1\n0 after s1 s0\n0 after s2 s1\n0 declare b1 s2\n0 use b1 s2 t1\n0 drop b1",
        "0 alloc b1 s0 n1\n0 record e1 s0\n0 wait e1 s1\n0 read b1 s1 t1\n0 free_on b1 s1",
        "0 alloc b1 s0 n1\n0 give b1 w1\n1 take b7\n1 use b7 own t1\n1 share b7 s2\n1 read b7 s2 t1\n1 free b7",
        "0 use b1 own t1\n0 free b1\n0 share b1 s1\n0 wait e1 s1\n0 take b1\n0 alloc b2 s1000 n1\n0 use b2 s1000 t1",
        "0 open s1000\n0 alloc b1 s1000 n1\n0 end s1000\n0 use b1 own t1\n0 share b1 s0\n0 free b1",
    ],
)
def test_what_keeps_the_contract_passes(text: str) -> None:
    assert breach(steps_of(text)) is None

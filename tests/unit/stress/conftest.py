"""Small programs, and pools that are broken on purpose."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import fields

import pytest

from allocator import CachingAllocator, Config, streams
from allocator.stress import Plan, Setting, Step
from allocator.stress.hammer import make_pool
from allocator.stress.operations import parse
from allocator.stress.rounds import Round
from allocator.stress.targets import Target, open_target

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _only_the_tests_own_garbage() -> Iterator[None]:
    """A pool collects garbage before it gives up, and so do these tests: what was imported need not be looked at."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings from outside."""
    for field in fields(Config):
        monkeypatch.delenv(f"WEIR_{field.name.upper()}", raising=False)


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A pool that takes everything for finished."""
    monkeypatch.setattr(getattr(streams, "Order", streams.Registry), "known", lambda *args, **more: True)
    yield


def steps_of(text: str) -> tuple[Step, ...]:
    """`0 alloc b1 s0 n512` a line."""
    found = []
    for line in text.strip().splitlines():
        worker, _, op = line.strip().partition(" ")
        found.append(Step(int(worker), parse(op)))
    return tuple(found)


def a_setting(workers: int = 2, streams: int = 4, seed: int = 1) -> Setting:
    return Setting(workers=workers, streams=streams, limit=32 * MIB * workers, seed=seed)


def a_plan(*workloads: str, workers: int = 2, operations: int = 200, seed: int = 1) -> Plan:
    setting = a_setting(workers, seed=seed)
    return Plan(setting, workloads, operations) if workloads else Plan(setting, operations=operations)


def a_round(
    setting: Setting | None = None,
    target: Target | None = None,
    change: Callable[[CachingAllocator], object] = lambda pool: None,
) -> Round:
    """A round on a new simulated device; `change` may break its pool."""
    setting = a_setting() if setting is None else setting
    target = open_target(None, setting.limit) if target is None else target
    pool = make_pool(target, setting)
    change(pool)
    return Round(target, pool, setting)

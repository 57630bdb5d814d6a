"""What a device's registry knows of its pools."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

import pytest

from allocator import CachingAllocator, Config, SimDevice
from allocator.streams import Registry

ROOT = Path(__file__).resolve().parents[3]


def test_pools_are_told_in_the_order_in_which_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their addresses are: a run with a seed is the same run again."""
    gpu = SimDevice()
    pools = [CachingAllocator(gpu, config=Config(), name=f"{number}") for number in range(200)]
    told: list[str] = []
    monkeypatch.setattr(CachingAllocator, "drain_frees", lambda pool: told.append(pool.name))
    for number in (3, 150, 77):
        pools[number].close()
    del pools[100:120], pools[50]
    gc.collect()
    pools.append(CachingAllocator(gpu, config=Config(), name="last"))
    for pool in pools:
        pool.frees.append("something")
    Registry.of(gpu).before_mark()
    assert told == [pool.name for pool in pools]
    for pool in pools:
        pool.frees.clear()


@pytest.mark.parametrize("folder", ["allocator", "metrics", "stress"])
def test_nothing_is_kept_in_a_weak_set_whose_order_is_by_address(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert "WeakSet" not in names, path

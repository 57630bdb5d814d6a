"""A whole run on a GPU, played: the order of things, who is switched on when, and what is told of who is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

if importlib.util.find_spec("cupy") is None:
    pytest.skip("needs CuPy's arrays, which need no GPU", allow_module_level=True)

import cupy

import allocator.cupy
from allocator.stress.benchmarks import guests, hooks
from allocator.stress.benchmarks.cases import Missing, Settings
from allocator.stress.benchmarks.runner import Measured
from allocator.stress.benchmarks.session import Session
from tests.unit.stress.benchmarks.fake_gpu import Machine, Rmm, Torch, cuda_core

ON_GPU = (
    "steady", "live", "arrays", "streams", "round-robin", "handover", "threads", "growth", "trim", "rmm-streams",
)  # fmt: skip
"""Those that do something else on a GPU than on the simulator, or are needed for the table."""


def settings(**more: Any) -> Settings:
    return Settings(**{"repeats": 1, "seconds": 1e-6, "quick": True} | more)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Whatever a test does, CuPy has its own allocator again."""
    before = cupy.cuda.get_allocator()
    yield Machine(monkeypatch)
    assert cupy.cuda.get_allocator() == before and allocator.cupy.pools() == {}


def by_name(measured: list[Measured], benchmark: str, door: str, *, beside: bool = False) -> list[Measured]:
    return [one for one in measured if (one.benchmark, one.door, one.guests) == (benchmark, door, beside)]


def test_a_run_on_a_gpu_measures_everything_and_then_again_beside_guests(machine: Machine) -> None:
    rmm, torch = Rmm(machine.cupy), Torch()
    machine.add(**{name.replace(".", "__"): module for name, module in rmm.modules.items()})
    machine.add(torch=torch.module, cuda__core=cuda_core("cuda.core"))
    session = Session(ON_GPU, settings(), 0)
    results = session.run()
    assert not session.failed, (results.failed, [one.failed for one in results.measured if one.failed])
    assert results.left_out == {} and results.skipped == {}

    alone = by_name(results.measured, "steady", "cupy")
    assert all(set(one.figures) == {"cupy", "cupy-async", "floor", "empty-hook", "weir"} for one in alone)
    beside = by_name(results.measured, "steady", "cupy", beside=True)
    everybody = {"cupy", "weir", "rmm", "rmm-async", "torch", "torch-raw", "cuda-core"}
    assert len(beside) == len(alone) and all(set(one.figures) == everybody for one in beside)
    for one in by_name(results.measured, "arrays", "cupy", beside=True):
        assert set(one.figures) == {"cupy", "weir", "rmm", "rmm-async"}, "an array of CuPy's comes from hooks only"
    for one in by_name(results.measured, "rmm-streams", "cupy", beside=True):
        assert set(one.figures) == {"cupy", "weir", "rmm", "rmm-async"}
    for one in by_name(results.measured, "live", "cupy", beside=True):
        assert set(one.figures) == everybody - {"torch-raw"}
    assert [one.guests for one in results.measured] == sorted(one.guests for one in results.measured)

    for name in ("growth", "trim"):
        for one in by_name(results.measured, name, "core"):
            assert {"driver", "weir", "weir-malloc", "cupy", "cupy-async"} <= set(one.figures)
    assert machine.cupy.memsets and machine.cupy.events
    assert rmm.used == {"pool", "async"} and rmm.current == "default" and set(rmm.pools) == {8 << 30}
    assert not torch.live and torch.emptied
    assert machine.gpu.violations == []

    small = ("best-fit miss", "an operation, 1000 streams", "8 threads")  # what such a small run does not reach
    for row in session.rows():
        assert (row.value is None) is row.what.startswith(small), row
    assert session.table().count("not measured") == 3


def test_who_is_not_there_is_told_with_the_reason(machine: Machine) -> None:
    torch = Torch()
    torch.module.cuda.is_available = lambda: False
    machine.add(torch=torch.module, cuda__core=None)
    session = Session(["steady"], settings(peers=("cupy", "weir", "torch", "rmm", "cuda-core")), 0)
    results = session.run()
    assert set(results.left_out) == {"torch", "rmm", "cuda-core"}
    assert "no GPU" in results.left_out["torch"] and "rmm.mr cannot be imported" in results.left_out["rmm"]
    assert "cuda.core cannot be imported" in results.left_out["cuda-core"]
    assert not session.failed and all(set(one.figures) <= {"cupy", "weir"} for one in results.measured)


def test_a_guest_that_breaks_when_it_begins_is_left_out(machine: Machine) -> None:
    rmm = Rmm(machine.cupy)

    def none_left(*args: object, **more: object) -> None:
        raise MemoryError("no 8 GiB")

    mr: Any = rmm.modules["rmm.mr"]
    mr.PoolMemoryResource = none_left
    machine.add(**{name.replace(".", "__"): module for name, module in rmm.modules.items()})
    results = Session(["steady"], settings(peers=("cupy", "rmm", "rmm-async")), 0).run()
    assert results.left_out == {"rmm": "no 8 GiB"} and not results.failed
    for one in by_name(results.measured, "steady", "cupy", beside=True):
        assert set(one.figures) == {"cupy", "rmm-async"}


def test_an_async_pool_that_the_driver_lacks_is_left_out(machine: Machine) -> None:
    def refuses() -> None:
        raise RuntimeError("not supported\nhere")

    machine.cupy.cuda.MemoryAsyncPool = refuses
    results = Session(["steady", "growth"], settings(peers=("cupy", "cupy-async", "weir")), 0).run()
    assert results.left_out == {"cupy-async": "not supported here"} and not results.failed
    assert all("cupy-async" not in one.figures for one in results.measured)


def test_without_any_guest_wanted_none_is_looked_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "load", lambda name: pytest.fail(f"looked for {name}"))
    results = Session(["steady"], settings(peers=("cupy", "weir")), 0).run()
    assert results.measured and not any(one.guests for one in results.measured)


def test_a_cupy_without_a_gpu_leaves_the_core(machine: Machine) -> None:
    machine.cupy.cuda.is_available = lambda: False
    results = Session(["steady", "arrays"], settings(), 0).run()
    assert {one.door for one in results.measured} == {"core"}
    assert results.skipped == {"arrays": "needs CuPy"} and "finds no GPU" in results.left_out["cupy"]


def test_older_cuda_core_is_found_under_its_older_name(machine: Machine) -> None:
    empty = cuda_core("cuda.core")
    del empty.DeviceMemoryResource
    machine.add(cuda__core=empty, cuda__core__experimental=cuda_core("cuda.core.experimental"))
    assert guests._cuda_core(("cuda.core", "cuda.core.experimental")).__name__ == "cuda.core.experimental"
    with pytest.raises(Missing, match=r"cuda\.core has no DeviceMemoryResource"):
        guests._cuda_core(("cuda.core",))


def test_weir_is_installed_for_its_own_turns_only_where_streams_are_entered(machine: Machine) -> None:
    door = hooks.CupyDoor(machine.gpu, settings(), machine.cupy, {})
    for entering in (True, False):
        with door.allocators(several=True, entering=entering) as found:
            weir = next(one for one in found if one.name == "weir")
            others = [one for one in found if one is not weir]
            for one in others:
                with one.around():
                    assert bool(allocator.cupy.pools()) is not entering
                    cupy.cuda.alloc(512)
            with weir.around():
                assert set(allocator.cupy.pools()) == {0}
                (pool,) = allocator.cupy.pools().values()
                held = cupy.cuda.alloc(512)
                assert pool.allocated_bytes == 512
                del held
            assert sum(pool.stats().allocations.values()) == 1, "others' turns took nothing from it"
        assert allocator.cupy.pools() == {}


def test_the_raw_allocator_of_torch_is_used_in_pairs(machine: Machine) -> None:
    torch = Torch()
    machine.add(torch=torch.module)
    make = guests.find_torch_raw(machine.cupy, machine.gpu)
    with ExitStack() as open_:
        raw = make(open_)
        with pytest.raises(Missing, match="pair"):
            raw.call(512)
    assert torch.emptied == 1

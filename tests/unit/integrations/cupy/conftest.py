"""CuPy's arrays over a simulated device: the whole hook, without a GPU.  What a test leaves behind is judged."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator

import pytest

from allocator import CachingAllocator, Config, SimDevice

if importlib.util.find_spec("cupy") is None:  # no wheel for this system
    collect_ignore_glob = ["test_*.py"]
else:
    import cupy

    from allocator.integrations.cupy.installation import Installation
    from allocator.integrations.cupy.lease import HOOKS
    from allocator.integrations.cupy.watch import Classes
    from tests.unit.integrations.cupy.fakes import FakeCupy


@pytest.fixture
def gpu() -> Iterator[SimDevice]:
    """A device that must see no race and no violation."""
    device = SimDevice(memory=1 << 30)
    yield device
    assert device.races == []
    assert device.violations == []


@pytest.fixture
def library(gpu: SimDevice) -> FakeCupy:
    """CuPy's streams and events on it."""
    return FakeCupy(gpu)


Start = Callable[..., CachingAllocator]


@pytest.fixture
def installation(library: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installation]:
    """An installation of its own, not switched on yet, in a process where nobody has used CuPy's memory hooks."""
    gc.collect()  # an earlier test's would be found
    monkeypatch.setattr(HOOKS, "seen", False)
    before = (cupy.cuda.get_allocator(), cupy.get_default_memory_pool())
    found = Installation(
        Classes(
            library.BaseStream,
            library.Event,
            library.current,
            memory_hook=cupy.cuda.MemoryHook,
            runtime=library.runtime,
            array=cupy.ndarray,
        )
    )
    yield found
    found.uninstall()
    found.watch._immortal.clear()  # as if the process had ended: nobody launches these graphs any more
    gc.collect()
    for _ in range(2):
        found.uninstall()  # nothing of ours is alive now, so the methods are put back as well
    assert (cupy.cuda.get_allocator(), cupy.get_default_memory_pool()) == before
    assert not found.watch.on


@pytest.fixture
def start(gpu: SimDevice, library: FakeCupy, installation: Installation) -> Iterator[Start]:
    """Make a pool with these settings and let CuPy allocate from it."""
    made: list[CachingAllocator] = []

    def begin(**config: object) -> CachingAllocator:
        pool = CachingAllocator(gpu, config=Config(**config))  # type: ignore[arg-type]  # settings of any type
        made.append(pool)
        installation.install(pool, current_stream=library.current)
        return pool

    yield begin
    for handle in list(gpu._held):
        while gpu._held.get(handle):
            gpu.resume(handle)
    gc.collect()
    gpu.run_until_idle()
    for pool in made:
        pool.check()
        pool.close()


@pytest.fixture
def pool(start: Start) -> CachingAllocator:
    """The pool that CuPy allocates from, as it comes."""
    return start()

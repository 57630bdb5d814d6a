"""What every way of asking for memory has to keep: the pool's own, and each library's hook.

An integration is added here by one class, and then has to pass all of it on every device and backing.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from allocator import CachingAllocator, Stream
from tests.conformance.conftest import Bench

KIB, MIB = 1 << 10, 1 << 20


class Way(Protocol):
    """One way of asking for memory."""

    assumed: bool
    """Does the library declare no uses (R3)?"""

    def allocate(self, nbytes: int, stream: Stream) -> Any:
        """Memory, given back when the last reference goes."""

    def where(self, held: Any) -> tuple[int, int]:
        """(ptr, size)."""

    def record_stream(self, held: Any, stream: Stream) -> None:
        """In use there as well."""

    def close(self) -> None:
        """Switch it off."""


class Native:
    """`CachingAllocator.allocate`."""

    assumed = False

    def __init__(self, pool: CachingAllocator) -> None:
        self._pool = pool

    def allocate(self, nbytes: int, stream: Stream) -> Any:
        return self._pool.allocate(nbytes, stream=stream)

    def where(self, held: Any) -> tuple[int, int]:
        return held.ptr, held.size

    def record_stream(self, held: Any, stream: Stream) -> None:
        held.record_stream(stream)

    def close(self) -> None:
        return


class CuPy:
    """`cupy.cuda.alloc` after `allocator.cupy.install`."""

    assumed = True

    def __init__(self, pool: CachingAllocator) -> None:
        import cupy

        import allocator.cupy

        self._cupy, self._weir = cupy, allocator.cupy
        self._stream: Stream | None = None
        allocator.cupy.install(pool, current_stream=lambda: self._stream)

    def allocate(self, nbytes: int, stream: Stream) -> Any:
        self._stream = stream
        if nbytes < 0:
            return self._cupy.cuda.alloc(nbytes)
        return self._cupy.ndarray((nbytes,), dtype="b")

    def where(self, held: Any) -> tuple[int, int]:
        return held.data.mem.ptr, held.data.mem.size

    def record_stream(self, held: Any, stream: Stream) -> None:
        self._weir.record_stream(held, stream)

    def close(self) -> None:
        self._weir.uninstall()


WAYS: dict[str, Callable[[CachingAllocator], Way]] = {"native": Native, "cupy": CuPy}


@pytest.fixture
def pool(bench: Bench) -> CachingAllocator:
    return bench.pool()


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest, pool: CachingAllocator) -> Iterator[Way]:
    if request.param == "cupy" and importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy has no wheel for this system")
    found = WAYS[request.param](pool)
    yield found
    gc.collect()
    found.close()


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 256 * KIB, 256 * KIB + 1, 3 * MIB + 5])
def test_memory_is_aligned_and_rounded_to_512(bench: Bench, pool: CachingAllocator, way: Way, nbytes: int) -> None:
    held = way.allocate(nbytes, Stream(bench.device))
    ptr, size = way.where(held)
    assert ptr % 512 == 0 and size == (nbytes + 511) // 512 * 512 == pool.allocated_bytes
    del held
    assert pool.allocated_bytes == 0


def test_s26_nothing_is_a_valid_allocation_at_pointer_0(bench: Bench, pool: CachingAllocator, way: Way) -> None:
    held = way.allocate(0, Stream(bench.device))
    assert way.where(held) == (0, 0)
    del held
    assert pool.reserved_bytes == 0


def test_s26_a_negative_size_raises(bench: Bench, way: Way) -> None:
    with pytest.raises(ValueError, match="negative"):
        way.allocate(-1, Stream(bench.device))


def test_a_stream_takes_back_its_own_memory_at_once(bench: Bench, way: Way) -> None:
    stream = Stream(bench.device)
    held = way.allocate(MIB, stream)
    bench.work(stream)
    ptr = way.where(held)[0]
    del held
    held = way.allocate(MIB, stream)
    assert way.where(held)[0] == ptr


def test_another_stream_gets_it_only_when_the_work_is_over(bench: Bench, pool: CachingAllocator, way: Way) -> None:
    a, b = Stream(bench.device), Stream(bench.device)
    held = way.allocate(2 * MIB, a)
    bench.work(a, 100.0)
    ptr = way.where(held)[0]
    del held
    other = way.allocate(2 * MIB, b)
    assert way.where(other)[0] != ptr
    del other
    bench.run_dry()
    reserved = pool.reserved_bytes
    both = [way.allocate(2 * MIB, b) for _ in range(2)]
    assert ptr in [way.where(held)[0] for held in both] and pool.reserved_bytes == reserved


def test_s02_a_recorded_stream_holds_back_the_owner_too(bench: Bench, way: Way) -> None:
    a, b = Stream(bench.device), Stream(bench.device)
    held = way.allocate(2 * MIB, a)
    way.record_stream(held, b)
    bench.work(b, 100.0)
    ptr = way.where(held)[0]
    del held
    held = way.allocate(2 * MIB, a)
    assert way.where(held)[0] != ptr


def test_s33_where_nothing_is_declared_every_stream_holds_back_a_third(bench: Bench, way: Way) -> None:
    a, b, c = (Stream(bench.device) for _ in range(3))
    held = way.allocate(2 * MIB, a)
    bench.work(b, 100.0)
    ptr = way.where(held)[0]
    del held
    other = way.allocate(2 * MIB, c)
    assert (way.where(other)[0] == ptr) == (not way.assumed)
    back = way.allocate(2 * MIB, a)
    assert (way.where(back)[0] == ptr) == way.assumed  # the owner need not wait for users that are only assumed


def test_running_out_is_a_memory_error_and_not_the_end(bench: Bench, pool: CachingAllocator, way: Way) -> None:
    pool.set_limit(4 * MIB)
    stream = Stream(bench.device)
    held = way.allocate(4 * MIB, stream)
    with pytest.raises(MemoryError, match=r"[Oo]ut of memory"):
        way.allocate(4 * MIB, stream)
    del held
    assert way.where(way.allocate(4 * MIB, stream))[1] == 4 * MIB


def test_s20_memory_outlives_the_pool_that_made_it(bench: Bench, pool: CachingAllocator, way: Way) -> None:
    stream = Stream(bench.device)
    held = way.allocate(MIB, stream)
    pool.close()
    bench.work(stream)
    assert way.where(held)[1] == MIB and pool.reserved_bytes > 0
    del held
    bench.run_dry()
    with bench.pool() as other:
        other.stats()
    assert pool.reserved_bytes == 0


def test_a_dead_cycle_gives_its_memory_back(bench: Bench, pool: CachingAllocator, way: Way) -> None:
    gc.collect()
    cycle: list[Any] = [way.allocate(MIB, Stream(bench.device))]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.allocated_bytes == 0

"""The pool that CuPy users know, and CuPy's words on it."""

from __future__ import annotations

import cupy
import pytest

from allocator import CachingAllocator, SimDevice
from tests.unit.integrations.cupy.conftest import Start
from tests.unit.integrations.cupy.fakes import FakeCupy, array

MIB = 1 << 20


def test_the_default_pool_answers_in_cupys_words(pool: CachingAllocator, library: FakeCupy) -> None:
    face = cupy.get_default_memory_pool()
    assert isinstance(face, cupy.cuda.MemoryPool)
    assert (face.used_bytes(), face.total_bytes(), face.free_bytes(), face.n_free_blocks()) == (0, 0, 0, 0)
    a, b = array(MIB), array(1000)
    assert face.used_bytes() == MIB + 1024
    assert face.total_bytes() == pool.reserved_bytes == 4 * MIB
    assert face.free_bytes() == 3 * MIB - 1024
    assert face.n_free_blocks() == 2
    del a, b
    assert face.used_bytes() == 0 and face.free_bytes() == face.total_bytes() == 4 * MIB
    library.null.synchronize()
    face.free_all_blocks()
    assert face.total_bytes() == 0
    assert "cupy" not in repr(face) and repr(pool) in repr(face)


def test_free_all_blocks_takes_a_stream_and_never_touches_live_memory(
    pool: CachingAllocator, library: FakeCupy
) -> None:
    face = cupy.get_default_memory_pool()
    stream = library.Stream()
    a = array(MIB)
    with stream:
        del a
    face.free_all_blocks(stream=stream)
    b = array(4 * MIB)
    face.free_all_blocks()
    assert b.data.mem.size == 4 * MIB == face.used_bytes()
    with pytest.warns(DeprecationWarning, match="free_all_blocks"):
        face.free_all_free()


def test_free_all_blocks_leaves_what_is_in_flight_and_does_not_wait(
    pool: CachingAllocator, library: FakeCupy, gpu: SimDevice
) -> None:
    face = cupy.get_default_memory_pool()
    with library.Stream(non_blocking=True) as stream:
        gpu.hold(stream.ptr)
        stream.kernel(writes=(array(4 * MIB),))
        face.free_all_blocks()
        assert face.total_bytes() == 4 * MIB and gpu.now_ns == 0
        gpu.resume(stream.ptr)
        stream.synchronize()
        face.free_all_blocks()
        assert face.total_bytes() == 0


def test_limits_are_set_and_read_as_with_cupys_pool(pool: CachingAllocator, gpu: SimDevice) -> None:
    face = cupy.get_default_memory_pool()
    assert face.get_limit() == 0
    face.set_limit(size=4 * MIB)
    assert face.get_limit() == pool.limit == 4 * MIB
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        array(8 * MIB)
    face.set_limit(fraction=0.5)
    assert face.get_limit() == gpu.total_memory // 2
    face.set_limit()
    assert face.get_limit() == 0
    for wrong in ({"size": -1}, {"fraction": -0.1}, {"fraction": 1.5}, {"size": 1, "fraction": 0.5}):
        with pytest.raises(ValueError, match=r"memory limit|at one time"):
            face.set_limit(**wrong)
    assert face.get_limit() == 0


def test_a_limit_lower_than_what_is_reserved_takes_hold_as_memory_is_freed(
    pool: CachingAllocator, library: FakeCupy
) -> None:
    face = cupy.get_default_memory_pool()
    a, b = array(4 * MIB), array(4 * MIB)
    face.set_limit(size=4 * MIB)
    assert face.total_bytes() == 8 * MIB
    del a
    library.null.synchronize()
    del b
    library.null.synchronize()
    array(2 * MIB)
    assert face.total_bytes() <= 4 * MIB


def test_malloc_of_the_face_is_the_allocator(pool: CachingAllocator) -> None:
    face = cupy.get_default_memory_pool()
    pointer = face.malloc(1000)
    assert pointer.mem.pool is pool and pool.allocated_bytes == 1024
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(face.malloc)
    a = array(512)
    assert a.data.mem.pool is pool
    cupy.cuda.set_allocator(before)


def test_the_numbers_count_frees_that_are_queued(start: Start) -> None:
    start()
    face = cupy.get_default_memory_pool()
    held = [array(512) for _ in range(40)]
    held.clear()
    assert face.used_bytes() == 0

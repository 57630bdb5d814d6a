"""Where memory comes from, and that a failing call leaves nothing behind (S10)."""

from __future__ import annotations

import pytest

from allocator import DriverError, SimDevice
from allocator.blocks import PlainMemory, VirtualMemory

MIB = 1 << 20


@pytest.fixture
def gpu() -> SimDevice:
    return SimDevice(memory=64 * MIB)


def test_virtual_memory_is_mapped_where_it_is_asked_for(gpu: SimDevice) -> None:
    backing = VirtualMemory(gpu)
    with gpu.scope():
        base, size = backing.reserve()
        assert size >= 4 * gpu.total_memory and base % gpu.granularity == 0
        segment = backing.attach(base + 4 * MIB, 2 * MIB, 1, [])
        assert (segment.ptr, segment.size, segment.end, segment.kind) == (base + 4 * MIB, 2 * MIB, base + 6 * MIB, 1)
        assert gpu.used_bytes == 2 * MIB and not backing.stalls
        backing.detach(segment)
        assert gpu.used_bytes == 0
        backing.unreserve(base, size)
    assert gpu.violations == []


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_s10_whatever_fails_nothing_is_left_behind(gpu: SimDevice, call: str) -> None:
    backing = VirtualMemory(gpu)
    with gpu.scope():
        base, size = backing.reserve()
        gpu.fail(call)
        with pytest.raises(DriverError, match=call):
            backing.attach(base, 2 * MIB, 0, [])
        assert gpu.used_bytes == 0
        backing.detach(backing.attach(base, 2 * MIB, 0, []))
        backing.unreserve(base, size)
    assert gpu.violations == []


def test_s10_a_refused_unmap_leaves_the_segment_as_it_was(gpu: SimDevice) -> None:
    backing = VirtualMemory(gpu)
    with gpu.scope():
        base, _ = backing.reserve()
        segment = backing.attach(base, 2 * MIB, 0, [])
        gpu.fail("cuMemUnmap", error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError):
            backing.detach(segment)
        assert segment.ptr == base
        backing.detach(segment)
    assert gpu.used_bytes == 0


def test_s10_a_refused_release_is_tried_again_without_a_second_unmap(gpu: SimDevice) -> None:
    backing = VirtualMemory(gpu)
    with gpu.scope():
        base, _ = backing.reserve()
        segment = backing.attach(base, 2 * MIB, 0, [])
        gpu.fail("cuMemRelease", error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError):
            backing.detach(segment)
        assert segment.ptr == 0 and gpu.used_bytes == 2 * MIB
        backing.detach(segment)
    assert gpu.used_bytes == 0 and gpu.calls["cuMemUnmap"] == 1


def test_plain_memory_comes_from_where_the_driver_likes(gpu: SimDevice) -> None:
    backing = PlainMemory(gpu)
    assert backing.stalls and backing.reserve() == (0, 0)
    with gpu.scope():
        segment = backing.attach(0, 3 * MIB, 1, [])
        assert (segment.size, segment.handle) == (3 * MIB, 0) and segment.ptr > 0
        backing.detach(segment)
    backing.unreserve(0, 0)
    assert gpu.used_bytes == 0

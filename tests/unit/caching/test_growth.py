"""Memory from the driver and back: sizes, limits, faults.  R13, S10."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import FrameType
from typing import Any

import pytest

from allocator import CachingAllocator, Config, DriverError, OutOfMemoryError, SimDevice, Stream
from allocator.caching.growth import TOGETHER, TOGETHER_BYTES
from tests.unit.caching.conftest import MIB, MakePool


@pytest.mark.parametrize(
    ("nbytes", "reserved"),
    [
        (512, 2 * MIB),
        (256 << 10, 2 * MIB),
        (MIB, 2 * MIB),
        (2 * MIB, 2 * MIB),
        (3 * MIB, 4 * MIB),
        (40 * MIB + 1, 42 * MIB),
    ],
)
def test_a_request_is_served_from_whole_pieces(make: MakePool, nbytes: int, reserved: int) -> None:
    pool = make(large_page=2 * MIB)
    kept = pool.allocate(nbytes)
    assert pool.stats().reserved_bytes == reserved
    assert pool.stats().growths == 1
    kept.close()


def test_a_large_request_is_one_handle(gpu: SimDevice, pool: CachingAllocator) -> None:
    pool.allocate(100 * MIB).close()
    assert gpu.calls["cuMemCreate"] == gpu.calls["cuMemMap"] == gpu.calls["cuMemSetAccess"] == 1


def test_pages_may_be_larger(make: MakePool) -> None:
    pool = make(small_page=4 * MIB, large_page=32 * MIB)
    small, large = pool.allocate(512), pool.allocate(3 * MIB)
    assert pool.stats().reserved_bytes == 36 * MIB
    more = [pool.allocate(3 * MIB) for _ in range(9)]
    assert pool.stats().reserved_bytes == 36 * MIB
    more.clear()
    small.close()
    large.close()


def test_growing_takes_in_a_free_neighbour(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    pool.allocate(4 * MIB, stream=s).close()
    kept = pool.allocate(10 * MIB, stream=s)
    stats = pool.stats()
    assert (stats.reserved_bytes, stats.growths) == (10 * MIB, 2)
    kept.close()


def test_near_the_limit_pieces_get_smaller(make: MakePool) -> None:
    pool = make(large_page=32 * MIB, limit=8 * MIB)
    kept = pool.allocate(3 * MIB)
    assert pool.stats().reserved_bytes == 8 * MIB
    kept.close()


def test_a_limit_that_is_no_multiple_of_a_page_is_kept(make: MakePool) -> None:
    pool = make(limit=5 * MIB, wait_timeout=0.0)
    live = [pool.allocate(2 * MIB), pool.allocate(2 * MIB)]
    with pytest.raises(OutOfMemoryError):
        pool.allocate(MIB)
    assert pool.stats().reserved_bytes == 4 * MIB
    live.clear()


def test_s10_a_growth_that_fails_puts_its_neighbour_back(gpu: SimDevice, pool: CachingAllocator) -> None:
    s = Stream(gpu)
    pool.allocate(4 * MIB, stream=s).close()
    for call in ("cuMemCreate", "cuMemMap", "cuMemSetAccess"):
        gpu.fail(call, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError, match=call):
            pool.allocate(10 * MIB, stream=s)
        pool.check()
        stats = pool.stats()
        assert stats.reserved_bytes == gpu.used_bytes == 4 * MIB
        assert stats.allocated_bytes == 0
    kept = pool.allocate(10 * MIB, stream=s)
    assert gpu.used_bytes == 10 * MIB
    kept.close()


def test_s10_a_device_without_memory_is_no_driver_error(gpu: SimDevice, make: MakePool) -> None:
    pool = make(wait_timeout=0.0)
    gpu.others = 254 * MIB
    with pytest.raises(OutOfMemoryError) as caught:
        pool.allocate(4 * MIB)
    assert caught.value.stats["device_size"] == 256 * MIB
    gpu.others = 0
    pool.allocate(4 * MIB).close()


def test_r13_only_idle_memory_goes_back(gpu: SimDevice, pool: CachingAllocator) -> None:
    a, b, c = Stream(gpu), Stream(gpu), Stream(gpu)
    gpu.hold(a)
    x, y = pool.allocate(4 * MIB, stream=a), pool.allocate(4 * MIB, stream=b)
    gpu.launch(a, writes=[x])
    x.close()
    y.close()
    c.wait_stream(a)  # C may take X; that does not make it idle
    assert pool.trim() == 4 * MIB == gpu.used_bytes
    gpu.resume(a)


@pytest.mark.parametrize("backing", ["vmm", "malloc"])
def test_a_closed_pool_frees_its_addresses(gpu: SimDevice, backing: str) -> None:
    pool = CachingAllocator(gpu, config=Config(backing=backing))
    pool.allocate(MIB).close()
    pool.close()
    assert gpu.used_bytes == 0
    assert gpu.calls["cuMemAddressFree"] == gpu.calls["cuMemAddressReserve"] == (backing == "vmm")


def test_a_device_without_virtual_memory_says_what_to_do() -> None:
    from allocator import AllocatorError

    gpu = SimDevice(memory=64 * MIB, virtual_memory=False)
    with pytest.raises(AllocatorError, match="WEIR_BACKING=malloc") as caught:
        CachingAllocator(gpu, config=Config())
    assert "\n" not in str(caught.value)
    CachingAllocator(gpu, config=Config(backing="malloc")).allocate(MIB).close()


def test_giving_back_takes_a_step_a_segment_however_many_there_are() -> None:
    """One scope for all of them, and none looks at the others: 256 GiB are 8,192 segments in one block."""

    def steps(segments: int) -> int:
        gpu = SimDevice(memory=1 << 40)
        pool = CachingAllocator(gpu, Config(large_page=32 * MIB))
        held = [pool.allocate(32 * MIB) for _ in range(segments)]
        held.clear()
        pool.drain_frees()
        seen = 0

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal seen
            seen += event in ("call", "c_call")

        before = dict(gpu.calls)
        sys.setprofile(count)
        try:
            assert pool.trim() == segments * 32 * MIB
        finally:
            sys.setprofile(None)
        calls = {name: made - before.get(name, 0) for name, made in gpu.calls.items()}
        assert calls["cuMemUnmap"] * TOGETHER == calls["cuMemRelease"] == segments and calls["cuCtxPushCurrent"] <= 4
        pool.check()
        pool.close()
        return seen

    few, many = steps(32), steps(256)
    assert many < 9 * few, (few, many)


@pytest.mark.parametrize(
    ("call", "at", "times", "given"),
    [
        ("cuMemUnmap", 1, 1, 2 * TOGETHER),  # all together; then one by one
        ("cuMemUnmap", 1, 2, 0),
        ("cuMemUnmap", 2, 2, TOGETHER),
        *(("cuMemRelease", at, 1, TOGETHER - 1) for at in range(1, TOGETHER + 1)),
        *(("cuMemRelease", TOGETHER + at, 1, 2 * TOGETHER - 1) for at in range(1, TOGETHER + 1)),
    ],
)
def test_s10_what_the_driver_refuses_to_take_stays_and_nothing_else(
    gpu: SimDevice, call: str, at: int, times: int, given: int
) -> None:
    """Neighbours are unmapped in one call and released one by one; what is unmapped is released all the same."""
    size, count = 2 * MIB, 2 * TOGETHER
    pool = CachingAllocator(gpu, Config())
    held = [pool.allocate(size) for _ in range(count)]
    held.clear()
    gpu.fail(call, at=at, error="CUDA_ERROR_UNKNOWN", times=times)
    assert pool.trim() == given * size
    pool.check()
    assert gpu.used_bytes == (count - given) * size == pool._growth.held
    pool.trim()
    assert gpu.used_bytes == 0
    pool.check()
    assert pool.stats().reserved_bytes == 0
    whole = pool.allocate(count * size)  # all of the addresses can be used again
    assert gpu.used_bytes == count * size
    whole.close()
    pool.close()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("count", [1, 2 * TOGETHER])
@pytest.mark.parametrize("config", [{}, {"backing": "malloc"}, {"canary": True}], ids=["vmm", "malloc", "checked"])
def test_memory_that_may_have_been_unmapped_is_never_handed_out(
    monkeypatch: pytest.MonkeyPatch, when: str, at: int, count: int, config: dict[str, Any]
) -> None:
    """Where nothing can put Ctrl-C off, it comes out of the call itself, and nobody knows whether the call was made."""
    gpu = SimDevice(memory=256 * MIB)
    plain = "backing" in config
    name = "mem_free" if plain else "mem_unmap"
    size, calls, call = 2 * MIB, [0], getattr(gpu, name)
    comes = at <= (count if config else -(-count // TOGETHER))  # only so are they unmapped together

    def interrupted(*arguments: int) -> None:
        calls[0] += 1
        if calls[0] != at or when == "after":
            call(*arguments)
        if calls[0] == at:
            raise KeyboardInterrupt

    pool, stream = CachingAllocator(gpu, Config(**config)), Stream(gpu)
    held = [pool.allocate(size, stream) for _ in range(count)]
    held.clear()
    with monkeypatch.context() as patched:
        patched.setattr(gpu, name, interrupted)
        with pytest.raises(KeyboardInterrupt) if comes else nullcontext():
            pool.trim()
    pool.check()
    assert pool._growth.growing == 0
    again = [pool.allocate(size, stream) for _ in range(count + 3)]
    gpu.launch(stream, 1000, writes=again)
    again.clear()
    gpu.run_until_idle()
    pool.trim()
    pool.check()
    lost = size if plain and comes and when == "before" else 0  # freed twice, it could be another's
    assert gpu.used_bytes == lost and pool.stats().reserved_bytes == 0
    pool.close()
    assert all("is not made of whole mapped handles" in one for one in gpu.violations), "but for the second try"
    assert bool(gpu.violations) == (when == "after" and comes and not plain) and gpu.races == []


def test_large_segments_do_not_leave_many_at_a_time(gpu: SimDevice) -> None:
    """Nobody else can have what is on its way."""
    gpu = SimDevice(memory=1 << 34)
    pool = CachingAllocator(gpu, Config(large_page=128 * MIB))
    held = [pool.allocate(128 * MIB) for _ in range(8)]
    held.clear()
    assert pool.trim() == 1 << 30
    assert gpu.calls["cuMemUnmap"] == 8 * 128 * MIB // TOGETHER_BYTES
    pool.close()


def test_no_more_goes_back_than_was_asked_for(gpu: SimDevice, pool: CachingAllocator) -> None:
    """A few segments are taken out at once, but no more than it takes."""
    held = [pool.allocate(2 * MIB) for _ in range(3 * TOGETHER)]
    held.clear()
    assert pool.trim(keep=(2 * TOGETHER - 3) * 2 * MIB) == (TOGETHER + 3) * 2 * MIB
    assert pool.trim(keep=(2 * TOGETHER - 4) * 2 * MIB + 512) == 2 * MIB
    pool.check()

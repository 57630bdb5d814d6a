"""When streams get small memory of their own, and when they do not."""

from __future__ import annotations

import random

import pytest

from allocator import CachingAllocator, Config, DriverError, SimDevice, Stream
from allocator.caching.apart import HIRES, Apart
from tests.unit.caching.conftest import MIB, MakePool

KIB = 1 << 10


def go_round(
    pool: CachingAllocator, streams: list[Stream], times: int, size: int = 256 * KIB, *, assumed: bool = True
) -> None:
    """Stream after stream takes a block and drops it."""
    for n in range(times):
        pool.allocate(size, streams[n % len(streams)], assumed=assumed).close()
        pool.check()


def asked(gpu: SimDevice) -> int:
    return sum(gpu.calls[name] for name in ("cuStreamQuery", "cuEventQuery", "cuEventRecord", "cuCtxRecordEvent"))


def test_a_page_is_bought_when_the_hire_comes_to_its_price() -> None:
    account = Apart(4 * MIB, 2 * MIB)
    for n in range(HIRES):
        assert not account.pays(0, 2 * MIB), n
        account.hired()
    assert account.pays(0, 2 * MIB)
    account.buy()
    assert account.bought == 2 * MIB and not account.pays(0, 4 * MIB)


def test_no_more_is_bought_than_may_be() -> None:
    account = Apart(4 * MIB, 2 * MIB)

    def pays(limit: int = 0, reserved: int = 64 * MIB) -> bool:
        for _ in range(HIRES):
            account.hired()
        return account.pays(limit, reserved)

    assert pays() and not pays(limit=15 * MIB) and pays(limit=16 * MIB)
    account.buy()
    assert pays()
    account.buy()
    assert not pays()
    assert pays(reserved=2 * MIB), "what went back to the driver may be bought again"
    account.buy()
    account.refused()
    assert account.bought == 2 * MIB


@pytest.mark.parametrize("count", [2, 16])
def test_streams_that_take_turns_stop_taking_each_other_s(gpu: SimDevice, make: MakePool, count: int) -> None:
    pool = make()
    streams = [Stream(gpu) for _ in range(count)]
    if count == 2:  # as many as there is room for: a page is full, but for one block
        held = [pool.allocate(256 * KIB, streams[0]) for _ in range(7)]
    go_round(pool, streams, HIRES + 4 * count)
    before, hits = asked(gpu), pool.stats().allocations["same_stream"]
    go_round(pool, streams, 16 * count)
    assert pool.stats().allocations["same_stream"] >= hits + 14 * count, "a reading empties bins"
    assert asked(gpu) - before <= 16 * count, "marks and readings, and no more"
    assert pool.stats().reserved_bytes == 4 * MIB
    if count == 2:
        held.clear()


def test_all_sizes_together_come_to_rest(gpu: SimDevice, make: MakePool) -> None:
    pool = make()
    streams, draw = [Stream(gpu) for _ in range(4)], random.Random(1)
    sizes = [draw.choice([4, 8, 20, 64, 100, 256]) * KIB for _ in range(97)]
    for n in range(2000):
        pool.allocate(sizes[n % 97], streams[n % 4], assumed=True).close()
    hits = pool.stats().allocations["same_stream"]
    for n in range(1000):
        pool.allocate(sizes[n % 97], streams[n % 4], assumed=True).close()
    assert pool.stats().allocations["same_stream"] >= hits + 950
    assert pool.stats().reserved_bytes <= 8 * MIB


def test_it_can_be_switched_off(gpu: SimDevice, make: MakePool) -> None:
    pool = make(apart_bytes=0)
    go_round(pool, [Stream(gpu) for _ in range(16)], 4 * HIRES)
    assert pool.stats().reserved_bytes == 2 * MIB


def test_under_a_limit_everything_is_passed_on(gpu: SimDevice, make: MakePool) -> None:
    pool = make(limit=8 * MIB)
    go_round(pool, [Stream(gpu) for _ in range(16)], 4 * HIRES)
    assert pool.stats().reserved_bytes == 2 * MIB
    assert Config(apart_bytes=0).apart_bytes == 0


def test_r13_above_the_bound_on_memory_in_flight_nothing_is_bought(gpu: SimDevice, make: MakePool) -> None:
    """There it waits first."""
    pool = make(max_in_flight=3 * MIB)
    streams = [Stream(gpu) for _ in range(16)]
    go_round(pool, streams, HIRES - 16, assumed=False)
    busy = pool.allocate(4 * MIB, streams[0])
    gpu.launch(streams[0], 10**12, writes=[busy])
    busy.close()
    pool.drain_frees()
    grown = pool.stats().reserved_bytes
    go_round(pool, streams[1:], 2 * HIRES, assumed=False)
    assert pool.stats().reserved_bytes == grown
    gpu.run_until_idle()
    go_round(pool, streams[1:], 4 * HIRES, assumed=False)
    assert pool.stats().reserved_bytes == grown + 2 * MIB


def test_one_stream_buys_nothing(gpu: SimDevice, make: MakePool) -> None:
    pool = make()
    stream, draw = Stream(gpu), random.Random(2)
    for _ in range(4 * HIRES):
        pool.allocate(draw.randrange(1, 256 * KIB), stream).close()
    assert pool.stats().reserved_bytes == 2 * MIB


def test_large_memory_is_passed_on(gpu: SimDevice, make: MakePool) -> None:
    pool = make()
    go_round(pool, [Stream(gpu) for _ in range(4)], 4 * HIRES, size=4 * MIB)
    assert pool.stats().reserved_bytes == 4 * MIB


def test_a_driver_that_refuses_changes_nothing(gpu: SimDevice, make: MakePool) -> None:
    pool = make()
    streams = [Stream(gpu) for _ in range(16)]
    go_round(pool, streams, 8)
    gpu.fail("cuMemCreate", times=0)
    go_round(pool, streams, 4 * HIRES)
    assert pool.stats().reserved_bytes == 2 * MIB and pool.stats().out_of_memory == 0
    gpu.clear_faults()
    go_round(pool, streams, 4 * HIRES)
    assert pool.stats().reserved_bytes == 4 * MIB


def test_a_driver_that_fails_has_sold_nothing(gpu: SimDevice, make: MakePool) -> None:
    pool = make()
    streams = [Stream(gpu) for _ in range(16)]
    go_round(pool, streams, 8)
    gpu.fail("cuMemCreate", error="CUDA_ERROR_UNKNOWN")
    with pytest.raises(DriverError):
        go_round(pool, streams, 4 * HIRES)
    assert pool._ladder.apart.bought == 0
    pool.check()


def test_what_was_bought_can_be_trimmed(gpu: SimDevice, make: MakePool) -> None:
    pool = make()
    streams = [Stream(gpu) for _ in range(16)]
    for _ in range(3):
        go_round(pool, streams, 2 * HIRES + 64)
        assert pool.stats().reserved_bytes == 4 * MIB
        pool.trim()
        assert pool.stats().reserved_bytes == 0

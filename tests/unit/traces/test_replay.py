"""What a replay does to a pool, row by row; on a pool and a device that only write it down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from allocator.config import Config
from allocator.traces import Replay, read_trace, replay_trace, summarize
from tests.unit.traces.fakes import FakeDevice, FakePool, FakeStream, FakeTarget

Write = Callable[..., str]
Play = Callable[..., Replay]
HEADER = "time_ns,op,stream,pointer,bytes,gpu_start_ns,gpu_duration_ns\n"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    monkeypatch.setattr("allocator.traces.pools.CachingAllocator", FakePool)
    monkeypatch.setattr("allocator.traces.pools.gauges", lambda pool: (pool.reserved_bytes, pool.in_flight_bytes))
    monkeypatch.setattr("allocator.traces.replay.Stream", FakeStream)
    return FakeDevice()


@pytest.fixture
def play(write: Write, device: FakeDevice) -> Play:
    """play(rows, **options): the replay of our layout's rows on the fake device."""

    def play(rows: str, *, header: str = HEADER, **options: Any) -> Replay:
        trace = read_trace(write(header + rows))
        fake: Any = device
        return replay_trace(trace, summarize(trace), fake, target=FakeTarget(device), **options)

    return play


def test_rows_become_calls_in_order(play: Play, device: FakeDevice) -> None:
    found = play(
        "0,launch,0,,,3,1000\n5,segment_alloc,0,0x200,4096,,\n7,alloc,2,0x200,300,,\n9,launch,2,,,11,50\n20,free,2,0x200,300,,\n"
    )
    assert device.log == [
        ("launch", "0", 1000, 0),
        ("allocate", 1, 300, "2", "replay"),
        ("attach", 1, "2"),
        ("launch", "2", 50, 9),
        ("detach", 1),
        ("close", 1, None),
        ("drain",),
        ("drain",),
        ("close pool", "replay"),
    ]
    result = found.result
    assert (result.rows, result.allocations, result.skipped, result.oom) == (5, 1, 0, 0)
    assert (result.peak_live_bytes, result.peak_reserved_bytes) == (512, 512)
    assert (result.stream_waits, result.event_records, result.event_queries) == (1, 2, 3)
    assert result.reuse == {
        "same_stream": 0,
        "new_memory": 1,
        "event_dependency": 0,
        "opportunistic": 0,
        "internal_dependency": 0,
    }
    assert (result.device, result.races, result.stalled_seconds) == ("Fake (fake)", None, 5e-9)
    assert result.virtual_seconds == 20e-9
    assert found.broken is None
    assert found.series is None


def test_speed_divides_durations_only(play: Play, device: FakeDevice) -> None:
    play("0,launch,0,,,3,1000\n500,launch,0,,,3,1000\n", speed=2.0)
    assert device.log[:2] == [("launch", "0", 500, 0), ("launch", "0", 500, 500)]


@pytest.mark.parametrize("speed", [0, -1, float("nan")])
def test_a_speed_that_is_not_above_zero_is_refused(play: Play, speed: float) -> None:
    with pytest.raises(ValueError, match="speed must be above 0"):
        play("", speed=speed)


def test_a_free_that_was_held_up_is_recorded_on_every_stream_that_has_launched(play: Play, device: FakeDevice) -> None:
    play(
        "0,alloc,1,0x200,1,,\n0,launch,1,,,1,1\n0,launch,3,,,1,1\n0,launch,2,,,1,1\n1,free,1,0x200,1,,\n"
        "2,launch,4,,,1,1\n90000,free_completed,1,0x200,1,,\n"
    )
    calls = [entry for entry in device.log if entry[0] in ("record_stream", "close")]
    assert calls == [("record_stream", 1, "3"), ("record_stream", 1, "2"), ("close", 1, None)]


def test_a_free_that_names_another_stream_passes_it_on(play: Play, device: FakeDevice) -> None:
    play(
        "1,00:00:00,allocate,0x200,8,0x5\n1,00:00:00,free,0x200,8,0x6\n",
        header="Thread,Time,Action,Pointer,Size,Stream\n",
    )
    assert ("close", 1, "6") in device.log


def test_frees_of_unknown_pointers_are_counted_and_blocks_left_over_closed(play: Play, device: FakeDevice) -> None:
    result = play("0,free,0,0x999,8,,\n1,alloc,0,0x200,8,,\n1,free,0,0x999,8,,\n").result
    assert (result.skipped, result.allocations) == (2, 1)
    assert device.log[-4:] == [("detach", 1), ("close", 1, None), ("drain",), ("close pool", "replay")]


def test_an_allocation_that_fails_is_counted_and_the_replay_goes_on(play: Play, device: FakeDevice) -> None:
    device.room = 1024
    result = play(
        "0,alloc,0,0x1000,1024,,\n1,alloc,0,0x2000,512,,\n2,free,0,0x2000,512,,\n3,free,0,0x1000,1024,,\n"
    ).result
    assert (result.oom, result.allocations, result.skipped) == (1, 1, 1)
    assert result.peak_live_bytes == 1536


def test_empty_blocks_are_allocated_too(play: Play, device: FakeDevice) -> None:
    result = play("0,alloc,0,(nil),0,,\n0,alloc,0,0x200,0,,\n1,free,0,0x200,0,,\n1,free,0,(nil),0,,\n").result
    assert (result.allocations, result.skipped, result.peak_live_bytes) == (2, 0, 0)
    assert not any(entry[0] in ("attach", "detach") for entry in device.log)


def test_per_stream_is_a_pool_for_each_stream_and_sums_them(play: Play, device: FakeDevice) -> None:
    result = play("0,alloc,0,0x200,512,,\n1,alloc,4,0x400,512,,\n2,alloc,0,0x600,512,,\n", policy="per-stream").result
    assert [pool.name for pool in device.pools] == ["replay, stream 0", "replay, stream 4"]
    assert [pool.made for pool in device.pools] == [2, 1]
    assert (result.policy, result.peak_reserved_bytes, result.reuse["new_memory"]) == ("per-stream", 1536, 3)
    assert result.event_queries == 6


def test_per_stream_pools_share_one_limit(play: Play, device: FakeDevice) -> None:
    play(
        "0,alloc,0,0x1000,512,,\n1,alloc,4,0x2000,1024,,\n2,alloc,0,0x3000,512,,\n3,alloc,0,0x4000,512,,\n",
        policy="per-stream",
        config=Config(limit=4096),
    )
    assert [pool.config.limit for pool in device.pools] == [0, 0]
    limits = [entry[1:] for entry in device.log if entry[0] == "limit"]
    assert limits == [("replay, stream 0", 4096), ("replay, stream 4", 4096 - 512), ("replay, stream 0", 4096 - 1024)]


def test_per_stream_caches_are_emptied_before_a_request_is_refused(play: Play, device: FakeDevice) -> None:
    device.room = 1024
    result = play("0,alloc,0,0x1000,512,,\n1,alloc,4,0x2000,1024,,\n", policy="per-stream").result
    assert result.oom == 1
    assert [entry for entry in device.log if entry[0] in ("trim", "refuse")] == [
        ("refuse", 1024),
        ("trim", "replay, stream 0"),
        ("trim", "replay, stream 4"),
        ("refuse", 1024),
    ]


def test_a_pool_that_contradicts_itself_is_told(play: Play, device: FakeDevice) -> None:
    device.lies = True
    assert play("0,alloc,0,0x200,8,,\n").broken == "two blocks\nare one"


def test_an_unknown_policy_is_refused(play: Play) -> None:
    with pytest.raises(ValueError, match="unknown policy 'best'"):
        play("", policy="best")


def test_a_series_keeps_reserved_live_and_in_flight(play: Play) -> None:
    series = play("0,alloc,0,0x1000,512,,\n5,alloc,0,0x2000,1,,\n9,free,0,0x1000,512,,\n", series=True).series
    assert series is not None
    values = [values for _, values in series.points()]
    assert values[0] == (512, 512, 0)
    assert values[5] == (1024, 1024, 0)
    assert values[-1] == (1024, 512, 0)

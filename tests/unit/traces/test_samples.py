"""The traces that are shipped: what they hold, and that they replay without race or leak."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from allocator.devices import SimDevice
from allocator.traces import POLICIES, read_trace, replay_trace, summarize

ROOT = Path(__file__).resolve().parents[3]
SERVE = ROOT / "allocator/traces/samples/serve-8-streams.csv.gz"
GPT2 = ROOT / "tests/data/gpt2-train-varlen.csv.gz"
RESNET = ROOT / "tests/data/resnet50-train-prefetch.csv.gz"
MIB = 1 << 20


@pytest.mark.parametrize(
    ("path", "rows", "allocations", "launches", "streams", "live_mib", "late"),
    [
        (SERVE, 85_788, 27_849, 29_976, 9, 361, 0),
        (GPT2, 75_855, 25_648, 22_556, 2, 6248, 1924),
        (RESNET, 30_357, 9_207, 11_867, 2, 2882, 7),
    ],
)
def test_the_shipped_traces_hold_what_their_description_says(
    path: Path, rows: int, allocations: int, launches: int, streams: int, live_mib: int, late: int
) -> None:
    summary = summarize(read_trace(path))
    assert (summary.rows, summary.allocations, summary.launches) == (rows, allocations, launches)
    assert len(summary.streams) == streams
    assert round(summary.peak_live_bytes / MIB) == live_mib
    assert len(summary.late) == late


@pytest.mark.parametrize("policy", POLICIES)
def test_a_real_trace_replays_without_race_or_leak(policy: str) -> None:
    trace = read_trace(RESNET)
    found = replay_trace(trace, summarize(trace), SimDevice(memory=1 << 40), policy=policy, series=True)
    result = found.result
    assert (result.races, result.leaked_bytes, result.oom, found.broken) == (0, 0, 0, None)
    assert sum(result.reuse.values()) == result.allocations == 9_207
    assert result.peak_reserved_bytes <= 1.25 * result.peak_live_bytes
    assert result.driver_calls["cuLaunchKernel"] == 11_867
    assert result.skipped == 161
    assert found.series is not None
    most = [max(values[i] for _, values in found.series.points()) for i in range(3)]
    assert most[0] == result.peak_reserved_bytes
    assert most[1] == result.peak_live_bytes
    assert most[2] <= result.peak_in_flight_bytes


def test_the_same_replay_twice_gives_the_same_numbers(write: Callable[..., str]) -> None:
    """In virtual time everything but the wall clock is determined."""
    start = gzip.decompress(RESNET.read_bytes()).splitlines(keepends=True)[:8000]
    trace = read_trace(write(b"".join(start)))
    summary = summarize(trace)
    first, second = (replay_trace(trace, summary, SimDevice(memory=1 << 40)).result for _ in range(2))
    first.seconds = second.seconds
    assert first == second


def test_a_table_is_read_in_constant_memory(write: Callable[..., str]) -> None:
    header = "time_ns,op,stream,pointer,bytes,gpu_start_ns,gpu_duration_ns\n"
    path = write(header + "".join(f"{n},launch,0,,,{n},1\n" for n in range(60_000)), packed=True)
    tracemalloc.start()
    try:
        assert summarize(read_trace(path)).rows == 60_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * MIB

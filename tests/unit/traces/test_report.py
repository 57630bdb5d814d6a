"""The table for people, and the lines for programs."""

from __future__ import annotations

import json

from allocator.traces import Replay, Result, json_line, table, verdict

KEYS = [
    "trace", "policy", "device", "rows", "skipped", "allocations", "peak_live_bytes", "peak_reserved_bytes",
    "peak_in_flight_bytes", "reuse", "stream_waits", "event_records", "event_queries", "driver_calls", "races",
    "leaked_bytes", "oom", "virtual_seconds", "stalled_seconds", "seconds",
]  # fmt: skip


def result(policy: str = "weir", reserved: int = 2 << 20) -> Result:
    return Result(
        trace="t.csv",
        policy=policy,
        device="sim",
        rows=10,
        allocations=4,
        peak_live_bytes=1 << 20,
        peak_reserved_bytes=reserved,
        reuse={"same_stream": 3, "new_memory": 1},
        driver_calls={"cuLaunchKernel": 5, "cuMemCreate": 2},
        races=0,
    )


def test_a_json_line_has_every_key_in_one_line() -> None:
    line = json_line(result())
    assert "\n" not in line
    read = json.loads(line)
    assert list(read) == KEYS
    assert read["stalled_seconds"] is None
    assert (read["races"], read["reuse"]["same_stream"]) == (0, 3)


def test_a_table_has_a_column_for_each_policy() -> None:
    lines = table([Replay(result(), launches=5), Replay(result("per-stream", 8 << 20), launches=5)]).splitlines()
    assert lines[0] == "t.csv: 10 rows, 4 allocations, at most 1.00 MiB live"
    assert lines[3].split() == ["weir", "per-stream"]
    cells = {line[:26].strip(): line[26:].split() for line in lines[4:]}
    assert cells["peak reserved"] == ["2.00", "MiB", "8.00", "MiB"]
    assert cells["over peak live"] == ["2.00", "x", "8.00", "x"]
    assert cells["other driver calls"] == ["2", "2"]
    assert "frees of unknown blocks" not in cells
    assert len({len(line) for line in lines[3:]}) == 1


def test_a_table_says_so_where_no_launch_is_known() -> None:
    assert "No launches are recorded, so every event is complete at once" in table([Replay(result(), launches=0)])


def test_the_verdict_compares_first_and_last_and_is_silent_where_that_means_nothing() -> None:
    assert verdict([result(), result("per-stream", 5 << 20)]) == "per-stream needs 2.50 x the memory of weir."
    assert verdict([result()]) is None
    assert verdict([result(reserved=0), result("per-stream")]) is None
    refused = result("per-stream")
    refused.oom = 1
    assert verdict([result(), refused]) is None

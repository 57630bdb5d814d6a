"""What the recorded programs need is decided by placement and by when streams are marked: it must not creep up.

Virtual time, so each number is the same on every machine.  A few large requests decide a peak: two speeds of the GPU
are judged, by their mean and the worst.  All 15: `weir bench replay-ratios`.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from allocator import Config, SimDevice
from allocator.traces import read_trace, replay_trace, summarize
from tests.unit.traces.test_samples import GPT2, RESNET, SERVE

SPEEDS = (1.0, 1.05)
AIMS = {SERVE: (1.35, 1.65), GPT2: (1.22, 1.30), RESNET: (1.05, 1.08)}
"""Reserved over live: the median at most, and the worst."""


@pytest.mark.parametrize("path", AIMS, ids=lambda path: path.name.split(".")[0])
def test_a_recorded_program_needs_no_more_than_it_did(path: Path) -> None:
    trace = read_trace(path)
    summary = summarize(trace)
    found = []
    for speed in SPEEDS:
        device = SimDevice(memory=1 << 40)
        result = replay_trace(trace, summary, device, config=Config(uses="declared"), speed=speed).result
        assert (result.races, result.leaked_bytes, result.oom) == (0, 0, 0)
        found.append(result.peak_reserved_bytes / result.peak_live_bytes)
    median, worst = AIMS[path]
    assert statistics.median(found) <= median and max(found) <= worst, found

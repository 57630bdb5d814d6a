"""A replay on a GPU tells what the simulator tells.

Time on a GPU is not exact, so peaks are compared with what the simulator gives for GPUs that are up to 20 %
slower or faster, and slower still where the host did not keep the pace, and 2 % more: no GPU is slower by the same
factor from beginning to end.  Kinds of reuse with 10 points of tolerance.
Nothing else may use the GPU meanwhile: it would be slower for a moment, and then not, which no such GPU is.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from allocator.config import REUSE_KINDS
from allocator.devices import CudaDevice, SimDevice
from allocator.traces import Result, Summary, Trace, read_trace, replay_trace, summarize

ROOT = Path(__file__).resolve().parents[2]
SERVE = ROOT / "allocator/traces/samples/serve-8-streams.csv.gz"
RESNET = ROOT / "tests/data/resnet50-train-prefetch.csv.gz"
SPEEDS = (0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2)


def simulate(trace: Trace, summary: Summary, speed: float) -> Result:
    """What the simulator says of a GPU so many times as fast."""
    return replay_trace(trace, summary, SimDevice(memory=1 << 40), speed=speed).result


@pytest.mark.parametrize("path", [SERVE, RESNET], ids=lambda path: path.name.split(".")[0])
def test_a_replay_on_a_gpu_equals_the_simulators(gpu: CudaDevice, path: Path) -> None:
    trace: Trace = read_trace(path)
    summary = summarize(trace)
    real = replay_trace(trace, summary, gpu)
    assert real.broken is None
    simulated = [simulate(trace, summary, speed) for speed in SPEEDS]
    same = simulated[SPEEDS.index(1.0)]
    speed, pace = SPEEDS[0], same.virtual_seconds / real.result.virtual_seconds
    while speed > pace:
        speed -= 0.05
        simulated.append(simulate(trace, summary, speed))
    assert real.result.races is None
    for name in ("rows", "skipped", "allocations", "peak_live_bytes", "leaked_bytes", "oom"):
        assert getattr(real.result, name) == getattr(same, name), name
    for kind in REUSE_KINDS:
        share = 100 * real.result.reuse[kind] / real.result.allocations
        assert share == pytest.approx(100 * same.reuse[kind] / same.allocations, abs=10), kind
    peaks = [result.peak_reserved_bytes for result in simulated]
    assert 0.98 * min(peaks) <= real.result.peak_reserved_bytes <= 1.02 * max(peaks)

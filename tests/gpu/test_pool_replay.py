"""A recorded program replayed on the GPU and on the simulator, through the command line: they agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "allocator" / "traces" / "samples" / "serve-8-streams.csv.gz"
SPEEDS = ("0.8", "0.9", "1.0", "1.1", "1.2")
POINTS = 0.10


def _replay(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-c", "import sys; from allocator.cli import main; sys.exit(main(sys.argv[1:]))"]
    command += ["replay", str(SAMPLE), "--policy", "weir", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _shares(result: dict[str, Any]) -> dict[str, float]:
    return {kind: n / result["allocations"] for kind, n in result["reuse"].items()}


@pytest.mark.slow
def test_a_replay_on_the_gpu_agrees_with_the_simulator() -> None:
    real = _replay("--device", "0")
    simulated = {speed: _replay("--speed", speed) for speed in SPEEDS}
    sim = simulated["1.0"]
    for key in ("allocations", "peak_live_bytes", "leaked_bytes", "oom", "skipped"):
        assert real[key] == sim[key], key
    assert real["leaked_bytes"] == 0 and real["races"] is None
    assert sum(real["reuse"].values()) == real["allocations"]
    theirs, ours = _shares(real), _shares(sim)
    assert all(abs(theirs[kind] - ours[kind]) <= POINTS for kind in ours), (theirs, ours)
    peaks = [one["peak_reserved_bytes"] for one in simulated.values()]
    assert min(peaks) <= real["peak_reserved_bytes"] <= max(peaks), (real["peak_reserved_bytes"], sorted(peaks))

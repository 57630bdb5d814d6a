"""What tries to break a pool, and measures it.

Rule: everything here uses the public API only; the allocator never imports it.
Imported as `allocator.stress` (docs/decisions/0001-import-names.md).

Next: operations.py and workloads.py (what is done), hammer.py (real threads), locustfile.py (the same from locust).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allocator.stress.curves import write as write_curves
from allocator.stress.hammer import SHARE, Hammer, Outcome, Plan
from allocator.stress.operations import Op, Recording, RecordingError, Setting, Step, read_recording
from allocator.stress.player import Violation
from allocator.stress.report import Progress, aligned, figures, json_line, table, verdict
from allocator.stress.shrinking import play, play_threaded, shrink
from allocator.stress.soak import MEASURED, Growth, Sample, SampleFile, Sampler, growth_of, least_rounds
from allocator.stress.targets import Target, open_target
from allocator.stress.workloads import WORKLOADS, Shape, Workload

if TYPE_CHECKING:
    from allocator.stress.benchmarks.cases import Settings as BenchSettings
    from allocator.stress.benchmarks.session import Session as BenchSession

__all__ = [
    "MEASURED",
    "SHARE",
    "WORKLOADS",
    "BenchSession",
    "BenchSettings",
    "Growth",
    "Hammer",
    "Op",
    "Outcome",
    "Plan",
    "Progress",
    "Recording",
    "RecordingError",
    "Sample",
    "SampleFile",
    "Sampler",
    "Setting",
    "Shape",
    "Step",
    "Target",
    "Violation",
    "Workload",
    "aligned",
    "figures",
    "growth_of",
    "json_line",
    "least_rounds",
    "open_target",
    "play",
    "play_threaded",
    "read_recording",
    "shrink",
    "table",
    "verdict",
    "write_curves",
]


def __getattr__(name: str) -> object:
    if name == "BenchSession":  # at first use: what is measured brings libraries that breaking a pool does without
        from allocator.stress.benchmarks.session import Session

        return Session
    if name == "BenchSettings":
        from allocator.stress.benchmarks.cases import Settings

        return Settings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

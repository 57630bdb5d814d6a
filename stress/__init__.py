"""What tries to break a pool, and measures it.

Rule: everything here uses the public API only; the allocator never imports it.
Imported as `allocator.stress` (docs/decisions/0001-import-names.md).

Next: operations.py and workloads.py (what is done), hammer.py (real threads), locustfile.py (the same from locust).
"""

from __future__ import annotations

from allocator.stress.hammer import SHARE, Hammer, Outcome, Plan
from allocator.stress.operations import Op, Recording, RecordingError, Setting, Step, read_recording
from allocator.stress.player import Violation
from allocator.stress.report import Progress, json_line, table, verdict
from allocator.stress.shrinking import play, play_threaded, shrink
from allocator.stress.targets import Target, open_target
from allocator.stress.workloads import WORKLOADS, Shape, Workload

__all__ = [
    "SHARE",
    "WORKLOADS",
    "Hammer",
    "Op",
    "Outcome",
    "Plan",
    "Progress",
    "Recording",
    "RecordingError",
    "Setting",
    "Shape",
    "Step",
    "Target",
    "Violation",
    "Workload",
    "json_line",
    "open_target",
    "play",
    "play_threaded",
    "read_recording",
    "shrink",
    "table",
    "verdict",
]

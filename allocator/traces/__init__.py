"""Recorded runs of programs: reading them, and replaying them on a pool.

Rule: a trace is strange input.  What is read is checked, and a lie is a `TraceError` in one line.

Next: reader.py (layouts), replay.py (what a replay is), report.py and plot.py (what it found), live.py (in real time).
"""

from __future__ import annotations

from allocator.traces.live import LiveReplay
from allocator.traces.plot import PlotFile
from allocator.traces.pools import POLICIES
from allocator.traces.progress import Meter
from allocator.traces.reader import Summary, read_trace, summarize
from allocator.traces.replay import Replay, Result, replay_trace
from allocator.traces.report import json_line, table, verdict
from allocator.traces.row import Row, Trace, TraceError

__all__ = [
    "POLICIES",
    "LiveReplay",
    "Meter",
    "PlotFile",
    "Replay",
    "Result",
    "Row",
    "Summary",
    "Trace",
    "TraceError",
    "json_line",
    "read_trace",
    "replay_trace",
    "summarize",
    "table",
    "verdict",
]

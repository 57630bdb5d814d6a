"""Real traces on the simulator: how much memory the pool reserves for what is live, and how fast a replay is.

A few large requests decide a peak, so one run says little: each trace is replayed at 15 speeds of the GPU between
0.95 and 1.05, and judged by the median and the worst.  `per-stream` is the same pool with nothing crossing.
"""

from __future__ import annotations

import csv
import gzip
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from allocator import Config, SimDevice
from allocator.traces import read_trace, replay_trace, summarize

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "allocator" / "traces" / "samples" / "serve-8-streams.csv.gz"
DATA = ROOT / "tests" / "data"
TRACES = (SAMPLE, DATA / "gpt2-train-varlen.csv.gz", DATA / "resnet50-train-prefetch.csv.gz")
SPEEDS = tuple(0.95 + 0.1 * i / 14 for i in range(15))
ROWS = (10_000, 50_000, 100_000, 400_000)


def _replay(task: tuple[str, str, str, float]) -> dict[str, Any]:
    path, policy, uses, speed = task
    trace = read_trace(path)
    done = replay_trace(
        trace, summarize(trace), SimDevice(memory=1 << 40), policy=policy, config=Config(uses=uses), speed=speed
    )
    return {**vars(done.result), "broken": done.broken}


def ratios() -> tuple[str, dict[str, Any]]:
    """peak_reserved / peak_live over the speeds, declared and assumed, with time against per-stream."""
    text = ["peak_reserved / peak_live over 15 speeds in 0.95 .. 1.05, on the simulator"]
    text.append(f"  {'trace':26} {'uses':9} {'median':>7} {'worst':>7} {'best':>7} {'time':>6} races leaks")
    figures: dict[str, Any] = {}
    with ProcessPoolExecutor() as pool:
        for path in TRACES:
            name = path.name.split(".")[0]
            alone = list(pool.map(_replay, [(str(path), "per-stream", "declared", s) for s in SPEEDS[::7]]))
            seconds = {s: r["virtual_seconds"] for s, r in zip(SPEEDS[::7], alone, strict=True)}
            text.append(f"  {name:26} per-stream {statistics.median(_ratio(r) for r in alone):6.3f}")
            for uses in ("declared", "assumed"):
                runs = list(pool.map(_replay, [(str(path), "weir", uses, speed) for speed in SPEEDS]))
                found = [_ratio(r) for r in runs]
                slower = max(
                    r["virtual_seconds"] / seconds[s] for s, r in zip(SPEEDS, runs, strict=True) if s in seconds
                )
                row = {
                    "median": statistics.median(found),
                    "worst": max(found),
                    "best": min(found),
                    "time_against_per_stream": slower,
                    "races": sum(r["races"] for r in runs),
                    "leaked_bytes": sum(r["leaked_bytes"] for r in runs),
                    "broken": [r["broken"] for r in runs if r["broken"]],
                    "event_records": statistics.median(r["event_records"] for r in runs),
                    "ratios": found,
                }
                figures[f"{name} {uses}"] = row
                text.append(
                    f"  {name:26} {uses:9} {row['median']:7.3f} {row['worst']:7.3f} {row['best']:7.3f} "
                    f"{slower:6.4f} {row['races']:5} {row['leaked_bytes']:5}"
                )
    return "\n".join(text), figures


def _ratio(result: dict[str, Any]) -> float:
    return float(result["peak_reserved_bytes"] / result["peak_live_bytes"])


def rows() -> tuple[str, dict[str, Any]]:
    """Seconds for the sample with the oracle on, and microseconds a row for longer and longer traces."""
    whole = min(_replay((str(SAMPLE), "weir", "declared", 1.0))["seconds"] for _ in range(3))
    text = [f"replay of {SAMPLE.name} with the oracle on: {whole:.2f} s"]
    figures: dict[str, Any] = {"serve_seconds": whole}
    with tempfile.TemporaryDirectory() as folder:
        for count in ROWS:
            path = Path(folder) / f"{count}.csv"
            _repeat(SAMPLE, path, count)
            seconds = _replay((str(path), "weir", "declared", 1.0))["seconds"]
            figures[str(count)] = 1e6 * seconds / count
            text.append(f"  {count:8,} rows: {1e6 * seconds / count:6.1f} us a row")
    return "\n".join(text), figures


def _repeat(source: Path, target: Path, count: int) -> None:
    """Write `count` rows: the source again and again, each time later and at other addresses."""
    with gzip.open(source, "rt", newline="") as file:
        header, *body = list(csv.reader(file))
    span = max(int(row[0]) for row in body) + 10_000_000
    with target.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(header)
        for i in range(count):
            again, at = divmod(i, len(body))
            row = list(body[at])
            row[0] = str(int(row[0]) + again * span)
            if row[3]:
                row[3] = hex(int(row[3], 16) + again * (1 << 47))
            if row[5]:
                row[5] = str(int(row[5]) + again * span)
            out.writerow(row)


if __name__ == "__main__":
    sys.exit("run it as: python -m allocator.stress.benchmarks replay-ratios")

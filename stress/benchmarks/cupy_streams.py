"""CuPy on several streams: what each pool reserves for the same program, and how fast the program runs.  Needs a GPU.

    rounds    one 192 MiB step at a time goes round 16 streams; the host waits for all after each round
    fresh     a new stream a step, 1 GiB on each
    churn     matmul and SVD of 1 to 84 MiB operands on 4 streams, for a while

Every run is a process of its own, and the pools take turns; a figure is a median over the turns, a speed is a ratio to
CuPy's own pool in the same turns.  With --together all of them run at once, for as long as each alone would: what they
reserve stays what it is, as every pool is asked for its own; their speed says nothing then, and is left out.
`python -m allocator.stress.benchmarks.cupy_streams --help`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

MIB: Final = 1 << 20
POOLS: Final = {
    "cupy": "CuPy's own pool",
    "async": "CuPy's async pool (cudaMallocAsync)",
    "weir": "Weir, as it comes",
    "weir-384": "Weir with max_in_flight 384 MiB",
    "weir-256": "Weir with a limit of 256 MiB",
}
SETTINGS: Final = {
    "weir-384": {"WEIR_MAX_IN_FLIGHT": "384MiB"},
    "weir-256": {"WEIR_LIMIT": "256MiB"},
}


class Meter:
    """What a pool has reserved, as it says itself, from time to time."""

    def __init__(self, reserved: Callable[[], int]) -> None:
        self._reserved = reserved
        self._start = time.perf_counter()
        self.samples: list[tuple[float, int]] = []
        self.peak = 0
        self.now = 0

    def look(self) -> None:
        """One look."""
        self.now = self._reserved()
        self.peak = max(self.peak, self.now)
        seconds = time.perf_counter() - self._start
        if not self.samples or seconds - self.samples[-1][0] >= 1.0:
            self.samples.append((round(seconds, 2), self.now))


def use(pool: str) -> tuple[Any, Callable[[], int], Callable[[], dict[str, int]]]:
    """(cupy, functions that say what the pool has reserved, and what it counted) with this pool switched on."""
    import cupy

    cupy.zeros(1).sum()  # the context, and the modules every kernel needs, before anything is measured
    if pool == "async":
        theirs = cupy.cuda.MemoryAsyncPool()
        cupy.cuda.set_allocator(theirs.malloc)
        return cupy, theirs.total_bytes, dict
    if pool.startswith("weir"):
        import allocator.cupy

        weir = allocator.cupy.install()

        def counted() -> dict[str, int]:
            stats = weir.stats()
            waits = sum(stats.out_of_memory_retries.values())
            return {
                "out_of_memory": stats.out_of_memory,
                "waits": stats.stream_waits + stats.host_synchronizations,
                "retries": waits,
                **{f"reuse_{kind}": n for kind, n in stats.allocations.items()},
            }

        return cupy, lambda: weir.reserved_bytes, counted
    return cupy, cupy.get_default_memory_pool().total_bytes, dict


def rounds(cupy: Any, meter: Meter, options: argparse.Namespace) -> float:
    """Steps a second."""
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(16)]
    device = cupy.cuda.Device()

    def go(n: int) -> None:
        for _ in range(n):
            for stream in streams:
                with stream:
                    x = cupy.empty((192 * MIB // 4,), dtype=cupy.float32)
                    x.fill(1)
                    for _ in range(8):
                        x += 1
                    del x
            meter.look()
            device.synchronize()

    go(3)
    start = time.perf_counter()
    go(options.rounds)
    return float(options.rounds * len(streams)) / (time.perf_counter() - start)


def fresh(cupy: Any, meter: Meter, options: argparse.Namespace) -> float:
    """Steps a second; each on a stream of its own, which is dropped."""
    start = time.perf_counter()
    for _ in range(options.steps):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x = cupy.empty((1 << 28,), dtype=cupy.float32)
            x.fill(1)
            del x
            stream.synchronize()
        del stream
        meter.look()
    return float(options.steps) / (time.perf_counter() - start)


def churn(cupy: Any, meter: Meter, options: argparse.Namespace) -> float:
    """Products a second."""
    import random

    draw = random.Random(1)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    start, done, half = time.perf_counter(), 0, 0
    while time.perf_counter() - start < options.seconds:
        side = int((draw.uniform(1, 84) * MIB / 4) ** 0.5)
        with streams[done % len(streams)] as stream:
            a = cupy.empty((side, side), dtype=cupy.float32)
            a.fill(0.5)
            b = a @ a
            if done % 8 == 0:
                small = min(side, 256)
                cupy.linalg.svd(b[:small, :small] + cupy.eye(small, dtype=cupy.float32))
            del a, b
            stream.synchronize()
        done += 1
        meter.look()
        if not half and time.perf_counter() - start > options.seconds / 2:
            half = meter.peak
    options.half = half
    return done / (time.perf_counter() - start)


PROGRAMS: Final = {"rounds": rounds, "fresh": fresh, "churn": churn}


def one(options: argparse.Namespace) -> dict[str, Any]:
    """One run, in this process."""
    cupy, reserved, counted = use(options.pool)
    meter = Meter(reserved)
    speed, failure = 0.0, None
    try:
        speed = PROGRAMS[options.program](cupy, meter, options)
    except MemoryError as error:
        failure = str(error)
    result: dict[str, Any] = {"pool": options.pool, "program": options.program, "per_second": speed}
    result |= {"peak_bytes": meter.peak, "last_bytes": meter.now, "failure": failure, **counted()}
    if options.samples:
        result["samples"] = meter.samples
    if hasattr(options, "half"):
        result["peak_bytes_at_half"] = options.half
    return result


def command(pool: str, options: argparse.Namespace) -> list[str]:
    """The command of one run."""
    module = "allocator.stress.benchmarks.cupy_streams"
    numbers = ["--rounds", str(options.rounds), "--steps", str(options.steps), "--seconds", str(options.seconds)]
    samples = ["--samples"] if options.samples else []
    return [sys.executable, "-m", module, options.program, "--pool", pool, *numbers, *samples]


def turns(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every pool in turn, or all of them at once; each in a process of its own."""
    results = []
    for turn in range(options.turns):
        for group in [options.pools] if options.together else [[pool] for pool in options.pools]:
            running = []
            for pool in group:
                environ = {k: v for k, v in os.environ.items() if not k.startswith("WEIR_")} | SETTINGS.get(pool, {})
                pipe = subprocess.PIPE
                running.append(
                    subprocess.Popen(command(pool, options), stdout=pipe, stderr=pipe, text=True, env=environ)
                )
            for pool, process in zip(group, running, strict=True):
                out, errors = process.communicate()
                if process.returncode:
                    raise SystemExit(f"{pool}: {errors.strip().splitlines()[-1:]}")
                results.append(json.loads(out))
                print(f"turn {turn + 1} of {options.turns}: {pool}", file=sys.stderr)
    return results


def table(results: Sequence[dict[str, Any]], *, together: bool = False) -> str:
    """Medians a pool, and the speed as a ratio to CuPy's own pool."""
    lines = [f"{'pool':38} {'peak MiB':>9} {'last MiB':>9} {'speed':>6}  {'out of memory':>13} {'waits':>6}"]
    by_pool: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_pool.setdefault(result["pool"], []).append(result)
    base = statistics.median(r["per_second"] for r in by_pool.get("cupy", results))
    for pool, runs in by_pool.items():
        peak, last, speed = (statistics.median(r[k] for r in runs) for k in ("peak_bytes", "last_bytes", "per_second"))
        failed = "failed" if any(r["failure"] for r in runs) else f"{sum(r.get('out_of_memory', 0) for r in runs)}"
        waits = f"{statistics.median(r['waits'] for r in runs):.0f}" if "waits" in runs[0] else "-"
        ratio = "-" if together else f"{speed / base:.3f}"
        lines.append(f"{POOLS[pool]:38} {peak / MIB:9.0f} {last / MIB:9.0f} {ratio:>6}  {failed:>13} {waits:>6}")
        if "peak_bytes_at_half" in runs[0]:
            half = statistics.median(r["peak_bytes_at_half"] for r in runs)
            lines.append(f"{'':38} {half / MIB:9.0f} after half of the time")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the turns, or with --pool one run."""
    parser = argparse.ArgumentParser(
        prog="python -m allocator.stress.benchmarks.cupy_streams",
        description=__doc__.splitlines()[0] if __doc__ else "",
    )
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--pools", nargs="+", choices=POOLS, default=list(POOLS))
    parser.add_argument("--turns", type=int, default=5, help="how often each pool runs")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of 16 steps, after a warm-up of 3")
    parser.add_argument("--steps", type=int, default=200, help="fresh streams")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the churn")
    parser.add_argument("--pool", choices=POOLS, help="one run of this pool, in this process")
    parser.add_argument("--together", action="store_true", help="all pools at once; no speeds")
    parser.add_argument("--samples", action="store_true", help="keep what was reserved, once a second, in the JSON")
    parser.add_argument("--json", metavar="FILE", help="one JSON object a run, a line each")
    options = parser.parse_args(argv)
    if options.pool:
        print(json.dumps(one(options)))
        return 0
    results = turns(options)
    print(table(results, together=options.together))
    if options.json:
        Path(options.json).write_text("".join(json.dumps(r) + "\n" for r in results))
    return 0


if __name__ == "__main__":
    sys.exit(main())

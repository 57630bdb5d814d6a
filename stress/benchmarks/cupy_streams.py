"""CuPy on several streams: what each pool reserves for the same program, and how fast the program runs.  Needs a GPU.

    rounds    one 192 MiB step at a time goes round 16 streams; the host waits for all after each round
    fresh     a new stream a step, 1 GiB on each
    churn     matmul and SVD of 1 to 84 MiB operands on 4 streams, for a while

Every run is a process of its own, and the pools take turns; a figure is a median over the turns, a speed is a ratio to
CuPy's own pool in the same turns.  `python -m allocator.stress.benchmarks.cupy_streams --help`.
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
    """What the driver has given away, as it says itself; the peak of what was asked."""

    def __init__(self, cupy: Any) -> None:
        self._info = cupy.cuda.runtime.memGetInfo
        self._before = self._info()[0]
        self.peak = 0
        self.now = 0

    def look(self) -> None:
        """One look.  `cudaMemGetInfo`."""
        self.now = self._before - self._info()[0]
        self.peak = max(self.peak, self.now)


def use(pool: str) -> tuple[Any, Callable[[], dict[str, int]]]:
    """(cupy, a function that says what the pool counted) with this pool switched on."""
    import cupy

    cupy.zeros(1).sum()  # the context, and the modules every kernel needs, before anything is measured
    if pool == "async":
        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    elif pool.startswith("weir"):
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

        return cupy, counted
    return cupy, dict


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
    cupy, counted = use(options.pool)
    meter = Meter(cupy)
    speed, failure = 0.0, None
    try:
        speed = PROGRAMS[options.program](cupy, meter, options)
    except MemoryError as error:
        failure = str(error)
    result: dict[str, Any] = {"pool": options.pool, "program": options.program, "per_second": speed}
    result |= {"peak_bytes": meter.peak, "last_bytes": meter.now, "failure": failure, **counted()}
    if hasattr(options, "half"):
        result["peak_bytes_at_half"] = options.half
    return result


def turns(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every pool in turn, each in a process of its own."""
    results = []
    for turn in range(options.turns):
        for pool in options.pools:
            command = [
                sys.executable,
                "-m",
                "allocator.stress.benchmarks.cupy_streams",
                options.program,
                "--pool",
                pool,
            ]
            command += [
                "--rounds",
                str(options.rounds),
                "--steps",
                str(options.steps),
                "--seconds",
                str(options.seconds),
            ]
            environ = {k: v for k, v in os.environ.items() if not k.startswith("WEIR_")} | SETTINGS.get(pool, {})
            done = subprocess.run(command, capture_output=True, text=True, env=environ)
            if done.returncode:
                raise SystemExit(f"{pool}: {done.stderr.strip().splitlines()[-1:]}")
            results.append(json.loads(done.stdout))
            print(f"turn {turn + 1} of {options.turns}: {pool}", file=sys.stderr)
    return results


def table(results: Sequence[dict[str, Any]]) -> str:
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
        lines.append(
            f"{POOLS[pool]:38} {peak / MIB:9.0f} {last / MIB:9.0f} {speed / base:6.3f}  {failed:>13} {waits:>6}"
        )
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
    parser.add_argument("--json", action="store_true", help="one JSON object a run")
    options = parser.parse_args(argv)
    if options.pool:
        print(json.dumps(one(options)))
        return 0
    results = turns(options)
    print("\n".join(json.dumps(r) for r in results) if options.json else table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())

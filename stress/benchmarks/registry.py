"""All benchmarks by name.

Rule: a name, once published in docs/results, keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from allocator.stress.benchmarks import best_fit, busy, cold_start, hot_path, many_streams, reports, rmm_cases, steady
from allocator.stress.benchmarks.cases import Benchmark
from allocator.stress.benchmarks.thread_work import on_threads

BENCHMARKS: Final[dict[str, Benchmark]] = {
    one.name: one
    for one in (
        Benchmark("steady", "alloc + free of one size, 512 B to 1 GiB", steady.steady, guests=True),
        Benchmark("live", "64 live blocks of 16 sizes, the oldest replaced", steady.live, guests=True),
        Benchmark("random", "random sizes: best fit, split and merge", steady.random_sizes, guests=True),
        Benchmark("arrays", "cupy.empty and its end", steady.arrays, needs=("cupy",), guests=True),
        Benchmark("hot-path", "alloc + free of an exact size against a floor", hot_path.hot_path),
        Benchmark("best-fit", "a miss with split and merge at 10^2 to 10^6 free blocks", best_fit.best_fit),
        Benchmark("streams", "1 to 1000 streams in turn, each with memory of its own", many_streams.streams),
        Benchmark("round-robin", "16 streams in turn with memory for one", many_streams.round_robin),
        Benchmark("handover", "made on one stream, used on another, dropped", many_streams.handover),
        Benchmark("threads", "1 to 16 threads, each with its own stream", on_threads),
        Benchmark("cold-start", "a fresh process: import and the first block", cold_start.cold_start),
        Benchmark("growth", "new memory while another stream is busy", busy.growth),
        Benchmark("trim", "10 GiB given back while another stream is busy", busy.trim),
        Benchmark("rmm-random", "RMM's random allocations: 1k, 10k, 100k", rmm_cases.random_allocations, guests=True),
        Benchmark("rmm-streams", "RMM's many streams, each with work", many_streams.rmm_streams, guests=True),
        Benchmark("rmm-holes", "RMM's alloc + free beside free holes", rmm_cases.holes, guests=True),
        Benchmark("scrapes", "an allocating thread while clients scrape over HTTP", reports.scrape_under_load),
        Benchmark("scrape-cost", "one scrape of 100,000 blocks and 200 streams", reports.one_scrape, usual=False),
        Benchmark("replay-ratios", "reserved over live for the traces", reports.reserved_over_live, usual=False),
        Benchmark("replay-rows", "replay speed as traces grow", reports.replayed_rows, usual=False),
        Benchmark("scale", "growth curves: blocks, streams, devices, bytes", reports.growth_curves, usual=False),
        Benchmark("live-page", "the live page in a headless Chromium", reports.page, usual=False),
        Benchmark(
            "cupy-programs", "whole programs on CuPy, each pool in its own process", reports.cupy_programs,
            needs=("gpu", "cupy"), usual=False,
        ),
    )
}  # fmt: skip


def chosen(names: Iterable[str]) -> Sequence[Benchmark]:
    """Those named, once each; the usual ones where none is.  ValueError for a name that is none."""
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if name not in BENCHMARKS:
            raise ValueError(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}")
    return [BENCHMARKS[name] for name in wanted] or [one for one in BENCHMARKS.values() if one.usual]

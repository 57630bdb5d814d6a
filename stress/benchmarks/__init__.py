"""Benchmarks: every figure is a ratio against something that runs beside it, interleaved, by medians.

Run one with `python -m allocator.stress.benchmarks NAME`; `--json` prints one object for docs/results.
Rule: a benchmark is never a test.  Times on shared machines drift; ratios of interleaved runs drift less.

Next: timing.py (how), hot_path.py, best_fit.py, replays.py (what).
"""

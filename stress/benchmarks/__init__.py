"""Benchmarks: every figure is a ratio against something that runs beside it, interleaved, by medians.

Run them with `weir bench`, or one with `python -m allocator.stress.benchmarks NAME`; docs/benchmarks.md says what each
measures and how to read it.  Rule: a benchmark is never a test.  Times on shared machines drift; ratios of interleaved
runs drift less.

Next: cases.py (what a benchmark is), runner.py (who runs when), session.py (a whole run), registry.py (all of them).
"""

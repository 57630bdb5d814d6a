"""What turns a pool's statistics into something an operator can watch.

Rule: everything here only reads `pool.stats()`; the allocator never imports it.
Imported as `allocator.metrics` (docs/decisions/0001-import-names.md).
"""

"""What tries to break a pool, and measures it.

Rule: everything here uses the public API only; the allocator never imports it.
Imported as `allocator.stress` (docs/decisions/0001-import-names.md).
"""

"""Exit statuses, the same for all commands."""

from __future__ import annotations

from typing import Final

OK: Final = 0
MISMATCH: Final = 1
"""A race, a leak, or a pool that contradicts itself."""
USAGE: Final = 2
"""A wrong argument, or input that cannot be read."""
REFUSED: Final = 3
"""An allocation failed."""

"""The command `weir`."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """Not there yet."""
    del argv
    return 2

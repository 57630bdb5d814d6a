"""What several commands read from their arguments; each a `type` for argparse, with one line for a mistake."""

from __future__ import annotations

import argparse

from allocator.sizes import parse_size


def size(text: str) -> int:
    """Bytes above 0, as digits with KiB, MiB, GiB or TiB."""
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not nbytes:
        raise argparse.ArgumentTypeError("must be above 0")
    return nbytes


def speed(text: str) -> float:
    """A factor that makes sense."""
    try:
        factor = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 1e-6 <= factor <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no sensible speed; 1.0 is the recorded one")
    return factor

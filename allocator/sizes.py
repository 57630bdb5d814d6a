"""Sizes: rounding, and text such as "512MiB".

Addresses and block sizes are multiples of `QUANTUM` everywhere.
"""

from __future__ import annotations

import re
from typing import Final

QUANTUM: Final = 512
"""Bytes.  Every block's size and address is a multiple; libraries rely on it."""

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

_UNITS: Final = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB}
_SIZE: Final = re.compile(r"\s*(\d+)\s*(%|[A-Za-z]*)\s*")


def round_up(nbytes: int, quantum: int = QUANTUM) -> int:
    """`nbytes` rounded up to a multiple of `quantum`, which is a power of two.

    >>> round_up(1), round_up(512), round_up(513)
    (512, 512, 1024)
    """
    return (nbytes + quantum - 1) & -quantum


def check_request(nbytes: object) -> int:
    """The request in bytes; TypeError unless an integer (numpy's count), ValueError if negative.

    >>> check_request(7)
    7
    """
    if type(nbytes) is not int:
        if isinstance(nbytes, bool) or not hasattr(nbytes, "__index__"):
            raise TypeError(f"nbytes must be an integer number of bytes, not {type(nbytes).__name__}")
        nbytes = int(nbytes.__index__())
    if nbytes < 0:
        raise ValueError(f"nbytes must not be negative, got {nbytes}")
    return nbytes


def parse_size(text: str, *, whole: int | None = None) -> int:
    """Bytes meant by "1048576", "512MiB" or, where `whole` is given, "50%" of it.

    >>> parse_size("512MiB"), parse_size("50%", whole=1024)
    (536870912, 512)
    """
    match = _SIZE.fullmatch(text)
    unit = match.group(2).upper() if match else "?"
    if match is not None and unit == "%":
        if whole is None:
            raise ValueError(f"{text!r}: a share of the device is not possible here, give bytes")
        percent = int(match.group(1))
        if percent > 100:
            raise ValueError(f"{text!r}: more than 100 % of the device")
        return whole * percent // 100
    if match is None or unit not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write digits, with KiB, MiB, GiB or TiB if you like")
    return int(match.group(1)) * _UNITS[unit]


def format_size(nbytes: int) -> str:
    """For people: three digits or so, binary units.

    >>> format_size(0), format_size(1536), format_size(5 << 30)
    ('0 B', '1.50 KiB', '5.00 GiB')
    """
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{nbytes} B" if unit == "B" else f"{value:.4g} {unit}" if value >= 100 else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"

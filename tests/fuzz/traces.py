"""`python -m tests.fuzz.traces --seconds 60`: see engine.py."""

from __future__ import annotations

import sys

from tests.fuzz.engine import main

if __name__ == "__main__":
    sys.exit(main("traces"))

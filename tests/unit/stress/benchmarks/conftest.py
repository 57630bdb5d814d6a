"""What is the same for all of these tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _only_the_tests_own_garbage() -> None:
    """Nothing is frozen here: CuPy's hook would take what it cannot see for streams, and ask CuPy, which has no GPU."""

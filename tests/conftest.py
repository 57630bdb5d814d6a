"""What all tests share: how Hypothesis runs, and that Ctrl-C is heard.

No deadlines: they measure the machine, not the code.  In CI the examples are the same every time.
A shell that runs the tests in the background starts them with SIGINT ignored, and every command that they start would
inherit that: it could not be interrupted.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from allocator.caching import reaper
from allocator.gil import COMPILED

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def pools_that_have_gone() -> Iterator[None]:
    """A pool whose work never ends is served by every public call of any other: not by those of the next tests."""
    yield
    reaper.forget_all()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the compiled build, leave out what changes the source or follows its lines: nothing would come of it."""
    if COMPILED:
        for item in items:
            if item.get_closest_marker("source") is not None or "careless" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason="changes the source, or follows its lines: not this build's"))

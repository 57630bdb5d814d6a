"""A simulated device inside its scope, and the short words of these tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from allocator.devices import SimDevice
from tests.unit.devices.sim.words import Words


@pytest.fixture
def gpu() -> Iterator[SimDevice]:
    """A device whose scope the test is in."""
    device = SimDevice(memory=1 << 30)
    with device.scope():
        yield device


@pytest.fixture
def words(gpu: SimDevice) -> Words:
    return Words(gpu)


@pytest.fixture
def elsewhere() -> Callable[[Callable[[], object]], object]:
    """Run something in another thread, and bring its result or error back."""

    def run(work: Callable[[], object]) -> object:
        results: list[object] = []
        errors: list[BaseException] = []

        def body() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        if errors:
            raise errors[0]
        return results[0]

    return run

"""The suite once more, in checked mode: what users may rely on holds there, but for what that mode changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from allocator import CachingAllocator
from allocator.devices import Device
from tests.conformance import test_pool, test_streams
from tests.conformance.conftest import Bench

DIFFERENT = {
    # Memory comes back only once its work is over, filled and verified: for its own stream as well.
    "test_the_same_stream_gets_its_memory_back_without_a_driver_call",
    "test_reuse_kinds_are_told_apart_and_add_up",
    "test_peaks_are_kept_and_start_again",
    # They say what the configuration is.
    "test_a_pool_says_what_it_is",
}


class CheckedBench(Bench):
    """Every pool is a checked one."""

    def pool(self, name: str | None = None, **options: Any) -> CachingAllocator:
        return super().pool(name, canary=True, **options)

    def finish(self) -> None:
        """As ever; and nobody was accused."""
        assert [pool.corruptions for pool in self._pools] == [0] * len(self._pools)
        super().finish()


@pytest.fixture(params=["vmm", "malloc"])
def bench(request: pytest.FixtureRequest, device: Device) -> Iterator[Bench]:
    bench = CheckedBench(device, request.param)
    yield bench
    bench.finish()


for _module in (test_pool, test_streams):
    globals().update(
        {name: test for name, test in vars(_module).items() if name.startswith("test_") and name not in DIFFERENT}
    )


def test_what_is_left_out_is_there() -> None:
    assert all(hasattr(test_pool, name) or hasattr(test_streams, name) for name in DIFFERENT)

"""Random lawful programs on a checked pool: no false alarm, no race with the pool's own accesses, nothing lost.

The machine is that of test_machine.py, which judges races and totals after each step; `check()` verifies all idle
memory each time, so that any write of the program's to memory that is not its own any more would be reported.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, rule

from allocator import CachingAllocator, DriverError
from tests.model.test_machine import CODES, CONFIGS, PROFILE, PoolMachine

OWN_CALLS = st.sampled_from(["cuMemsetD8Async", "cuMemcpyDtoHAsync", "cuStreamSynchronize"])


class CanaryMachine(PoolMachine):
    """The same steps; the pool is a checked one."""

    @initialize(config=CONFIGS, detect=st.booleans())
    def begin(self, config: dict[str, Any], detect: bool) -> None:
        """As ever."""
        super().begin(config={**config, "canary": True}, detect=detect)
        assert self.pool.config.canary

    @rule(call=OWN_CALLS, code=CODES, at=st.integers(1, 3))
    def fail_its_own(self, call: str, code: str, at: int) -> None:
        """A call to come that only a checked pool makes fails, and then no more."""
        self.gpu.clear_faults()
        self.gpu.fail(call, at=at, error=code)
        try:
            self.pool.trim()
        except DriverError as error:
            assert error.call == call
        self.gpu.clear_faults()

    def teardown(self) -> None:
        """Nobody was accused."""
        pool: CachingAllocator | None = getattr(self, "pool", None)
        super().teardown()
        assert pool is None or (pool.corruptions, pool.damaged_bytes) == (0, 0)


TestCanaryMachine = CanaryMachine.TestCase
TestCanaryMachine.settings = settings(
    max_examples=2000 if PROFILE == "long" else 60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=PROFILE != "long",
    database=None,
)

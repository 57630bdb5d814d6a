"""The fault plan: which call fails, with what.

Rule: *a failing call changes nothing*, with the one exception that hardware makes too (an event whose record
failed queries as done).

Next: calls.py, where every call passes through `Faults.strike`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Fault:
    """The `at`-th call from now fails, and the `times - 1` after it; times 0 means all of them."""

    at: int
    error: str
    sticky: bool
    times: int


class Faults:
    """Planned failures by the driver's call names."""

    def __init__(self) -> None:
        self._plans: dict[str, list[Fault]] = {}

    def plan(self, name: str, *, at: int, error: str, sticky: bool, times: int) -> None:
        """Add one; ValueError if `at` or `times` makes no sense."""
        if at < 1 or times < 0:
            raise ValueError(f"at counts from 1 and times from 0, got at={at}, times={times}")
        self._plans.setdefault(name, []).append(Fault(at, error, sticky, times))

    def strike(self, name: str) -> Fault | None:
        """Count one call; the fault that hits it, if any."""
        plans = self._plans.get(name)
        if not plans:
            return None
        hit: Fault | None = None
        for fault in list(plans):
            fault.at -= 1
            if fault.at > 0:
                continue
            hit = hit or fault
            if fault.times == 1:
                plans.remove(fault)
            elif fault.times > 1:
                fault.times -= 1
        return hit

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()

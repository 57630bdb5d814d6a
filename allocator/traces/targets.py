"""Where a replay runs: the simulator in virtual time, or a GPU in real time.

Rule: all that a replay has to know about time, launches and the race oracle is in the protocol
`Target`; the replay itself is the same on both.

Next: replay.py.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol

from allocator.devices import PER_THREAD, CudaDevice, Device, SimDevice, pieces_held

BEHIND_NS: Final = 10_000_000
"""A real program that was held up goes on from there; below this we were only slow, and catch up."""
_SPIN_NS: Final = 200_000
"""Sleeping is not precise; the last of a wait is spent looking at the clock."""


class Target(Protocol):
    """One device during one replay."""

    device: Device

    def session(self) -> AbstractContextManager[object]:
        """Everything else happens within this."""

    def reach(self, time_ns: int) -> None:
        """Let the host clock get to the recorded time plus every host wait so far."""

    def elapsed_ns(self) -> int:
        """Host clock since the replay began."""

    def launch(self, stream: Any, duration_ns: int) -> None:
        """Queue a kernel that runs for so long and writes every live block of its stream."""

    def attach(self, stream: Any, allocation: Any) -> None:
        """From now on launches on `stream` write this block."""

    def detach(self, allocation: Any) -> None:
        """The block is about to be freed."""

    def drain(self) -> int:
        """Wait until everything queued has run; returns when the last of it had, in ns since the beginning."""

    def calls(self) -> Counter[str]:
        """Driver calls since the replay began."""

    def races(self) -> int | None:
        """Races that the oracle has seen; None without one."""

    def stalled_ns(self) -> int | None:
        """Time that the host waited, and that streams waited for one another because they were told to."""

    def leaked_bytes(self) -> int:
        """Memory taken during the replay and not given back."""


class SimTarget:
    """A replay on a `SimDevice`."""

    def __init__(self, gpu: SimDevice) -> None:
        self.device: Device = gpu
        self._gpu = gpu
        self._began = gpu.now_ns
        self._due = gpu.now_ns  # where the host clock was put; what it is beyond that was waited by a call
        self._waited = 0
        self._calls, self._held = Counter(gpu.calls), pieces_held(gpu)
        self._races = len(gpu.races)
        self._stalled = gpu.stalled_ns + gpu.stream_stalled_ns
        self._used = gpu.used_bytes
        self.attach = gpu.attach
        self.detach = gpu.detach

    def session(self) -> AbstractContextManager[object]:
        return nullcontext()

    def reach(self, time_ns: int) -> None:
        gpu = self._gpu
        now = gpu.now_ns
        self._waited += now - self._due
        due = self._began + time_ns + self._waited
        if due > now:
            gpu.advance(due - now)
        self._due = max(due, now)

    def elapsed_ns(self) -> int:
        return self._gpu.now_ns - self._began

    def launch(self, stream: Any, duration_ns: int) -> None:
        self._gpu.launch(stream, duration_ns=duration_ns)

    def drain(self) -> int:
        gpu = self._gpu
        gpu.run_until_idle()
        last = gpu.last_finish_ns - self._began
        return last if last > 0 else self.elapsed_ns()  # without launches nothing but the host's time is known

    def calls(self) -> Counter[str]:
        return Counter(self._gpu.calls) - self._calls

    def races(self) -> int | None:
        return len(self._gpu.races) - self._races

    def stalled_ns(self) -> int | None:
        return self._gpu.stalled_ns + self._gpu.stream_stalled_ns - self._stalled

    def leaked_bytes(self) -> int:
        return self._gpu.used_bytes - self._used


class CudaTarget:
    """A replay on a GPU: rows at their recorded times, launches as kernels that only pass time."""

    def __init__(self, gpu: CudaDevice) -> None:
        self.device: Device = gpu
        self._gpu = gpu
        with gpu.scope():
            gpu.spin(PER_THREAD, 0)  # loads the kernel, which is not to be measured
            gpu.ctx_synchronize()
        self._calls, self._held = Counter(gpu.calls), pieces_held(gpu)
        self._began = time.monotonic_ns()
        self._shift = 0

    def session(self) -> AbstractContextManager[object]:
        """The context stays current all the time, as in a program; it costs us several calls a row otherwise."""
        return self._gpu.scope()

    def reach(self, time_ns: int) -> None:
        due = self._began + time_ns + self._shift
        left = due - time.monotonic_ns()
        if left < -BEHIND_NS:
            self._shift -= left
            return
        if left > _SPIN_NS:
            time.sleep((left - _SPIN_NS) / 1e9)
        while time.monotonic_ns() < due:
            pass

    def elapsed_ns(self) -> int:
        return time.monotonic_ns() - self._began

    def launch(self, stream: Any, duration_ns: int) -> None:
        self._gpu.spin(stream.handle, duration_ns)

    def attach(self, stream: Any, allocation: Any) -> None:
        """Spinning kernels touch no memory."""

    def detach(self, allocation: Any) -> None:
        """Spinning kernels touch no memory."""

    def drain(self) -> int:
        self._gpu.ctx_synchronize()
        return self.elapsed_ns()

    def calls(self) -> Counter[str]:
        return Counter(self._gpu.calls) - self._calls

    def races(self) -> int | None:
        return None

    def stalled_ns(self) -> int | None:
        return None

    def leaked_bytes(self) -> int:
        return (pieces_held(self._gpu) - self._held) * self._gpu.granularity


def target_for(device: Device) -> Target:
    """The right kind for a device."""
    if isinstance(device, SimDevice):
        return SimTarget(device)
    return CudaTarget(device)  # type: ignore[arg-type]  # the only other kind; tests pass their own targets

"""The short words of these tests."""

from __future__ import annotations

from collections.abc import Callable

from allocator.devices import SimDevice

Elsewhere = Callable[[Callable[[], object]], object]
"""Runs something in another thread and hands back its result or error."""


class Words:
    """Streams and events of one device, in one word each."""

    def __init__(self, gpu: SimDevice) -> None:
        self.gpu = gpu

    def blocking(self) -> int:
        return self.gpu.stream_create(non_blocking=False, priority=0)

    def stream(self) -> int:
        return self.gpu.stream_create(non_blocking=True, priority=0)

    def recorded(self, stream: int) -> int:
        event = self.gpu.event_create()
        self.gpu.event_record(event, stream)
        return event

    def memory(self, nbytes: int = 4096) -> int:
        ptr = self.gpu.mem_alloc(nbytes)
        self.gpu.hand_out(ptr, nbytes, f"first owner of {ptr:#x}")
        return ptr

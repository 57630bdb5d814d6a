"""Making a context current, as the allocator does it and as a program does.

Rule: what is set at the start is put back at the end, whatever happened between; putting back cannot fail.

Next: calls.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allocator.devices.sim.world import WORLD, CaptureMode

if TYPE_CHECKING:
    from allocator.devices.sim.context import Context

_PUSH, _POP = "cuCtxPushCurrent", "cuCtxPopCurrent"
_EXCHANGE = "cuThreadExchangeStreamCaptureMode"


class Scope:
    """`Device.scope()`: context pushed, capture mode RELAXED; for one `with`."""

    __slots__ = ("_device", "_mode", "_nested")

    def __init__(self, device: Context) -> None:
        self._device = device
        self._mode = CaptureMode.GLOBAL
        self._nested = False

    def __enter__(self) -> None:
        device, thread = self._device, WORLD.thread
        self._nested = bool(thread.stack) and thread.stack[-1] is device and thread.mode is CaptureMode.RELAXED
        if self._nested:
            return
        device.before(_PUSH, scoped=False)
        with WORLD.lock:
            device.enter(_PUSH)
        thread.stack.append(device)
        try:
            device.before(_EXCHANGE)
            with WORLD.lock:
                device.enter(_EXCHANGE)
        except BaseException:
            thread.stack.pop()
            raise
        self._mode, thread.mode = thread.mode, CaptureMode.RELAXED

    def __exit__(self, *exc: object) -> None:
        if self._nested:
            return
        device, thread = self._device, WORLD.thread
        thread.mode = self._mode
        thread.stack.pop()
        with WORLD.lock:
            for call in (_EXCHANGE, _POP):
                device.calls[call] += 1
                if device.costs:
                    device.clock.now += device.costs.get(call, 0)


class ProgramScope:
    """The context is current and the thread's capture mode is as given: the way a program calls the driver."""

    __slots__ = ("_device", "_mode")

    def __init__(self, device: Context, mode: CaptureMode) -> None:
        self._device = device
        self._mode = mode

    def __enter__(self) -> None:
        thread = WORLD.thread
        thread.stack.append(self._device)
        self._mode, thread.mode = thread.mode, self._mode

    def __exit__(self, *exc: object) -> None:
        thread = WORLD.thread
        self._mode, thread.mode = thread.mode, self._mode
        thread.stack.pop()

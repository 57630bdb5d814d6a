"""The calling thread's context and capture mode, changed and restored.

Rule: inside a scope of a device its context is current and the thread's capture mode is RELAXED (R10);
after it both are what they were, also after an error (S23).

Scopes nest.  A thread keeps the stack of the scopes that changed something, over all devices.  An inner
scope changes nothing if the *innermost* of them is of the same device *and* the driver confirms that its
context still is the current one: one `cuCtxGetCurrent`, the only price of nesting.  That question is asked
because foreign code may have run in between in this thread (a callback, a finaliser) and left another
context current.  A scope of another device in between is seen on the stack.  In both cases the inner
scope changes and restores like an outer one.

Not seen: foreign code inside a scope that leaves another *capture mode* behind.  Reading the mode costs as
much as setting it, and libraries restore it.  The end of a scope pops the context on top, so foreign code
that pushes one must pop it.

Next: cuda.py (`push` and `pop`).
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

from allocator.errors import DriverError

if TYPE_CHECKING:
    from allocator.devices.cuda import CudaDevice


class _Thread(threading.local):
    """What one thread has open, outermost first."""

    def __init__(self) -> None:
        self.open: list[CudaDevice] = []


_thread = _Thread()


class Scope:
    """One `with device.scope():`.  Used once."""

    __slots__ = ("_device", "_mode")

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._mode: Any = None  # the capture mode to restore; None: nothing was changed

    def __enter__(self) -> None:
        device, opened = self._device, _thread.open
        if opened and opened[-1] is device and device.context_is_current():
            return
        self._mode = device.push()
        opened.append(device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mode is None:
            return
        _thread.open.pop()
        try:
            self._device.pop(self._mode)
        except DriverError:
            if error is None:  # an error of the body says more
                raise

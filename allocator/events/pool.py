"""Driver events, made once and used again.

Rule (R4): an event comes back here only when its last record is complete and no thread uses it outside
the timeline lock; the caller sees to both.  So the number of events levels off at the most that were
ever in flight together (S13).

Thread-safe without a lock: a deque's `append` and `pop` are atomic.  Next: ../streams/sealing.py.
"""

from __future__ import annotations

import weakref
from collections import deque

from allocator.devices import Device


class EventPool:
    """Spare events of one context."""

    def __init__(self, device: Device) -> None:
        self._device = weakref.ref(device)  # the device owns what is made on it, not the other way round
        self._spare: deque[int] = deque()
        self.created = 0
        """Events made and not destroyed."""

    def rebind(self, device: Device) -> None:
        """The garbage collector cleared the weak reference of a device that lives on."""
        self._device = weakref.ref(device)

    @property
    def idle(self) -> int:
        """Events that wait here to be used."""
        return len(self._spare)

    @property
    def in_use(self) -> int:
        """Events that are behind work, or about to be."""
        return max(0, self.created - len(self._spare))

    def take(self) -> int:
        """An event to record.  Must run inside `device.scope()`.

        Driver calls: `cuEventCreate` if no spare one is left, else none.
        """
        try:
            return self._spare.pop()
        except IndexError:
            device = self._device()
            assert device is not None, "inside device.scope()"
            event = device.event_create()
            self.created += 1
            return event

    def give_back(self, event: int) -> None:
        """Keep `event` for the next `take`.  No driver call."""
        self._spare.append(event)

    def discard(self, event: int) -> None:
        """Destroy an event whose state is unknown (a failed record, a capture).  Inside `device.scope()`.

        Driver call: `cuEventDestroy`.
        """
        self.created -= 1
        device = self._device()
        assert device is not None, "inside device.scope()"
        device.event_destroy(event)

    def clear(self) -> None:
        """Destroy all spare events.  Inside `device.scope()`."""
        while self._spare:
            self.discard(self._spare.pop())

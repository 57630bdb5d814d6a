"""What all simulated devices of a process share: one lock, the threads, and who is waiting.

Rule: *one lock for every simulated device*, because streams wait across devices and one thread's call can
kill a capture on another device.  No user code runs, and no thread waits, while it is held.  It is
re-entrant: the garbage collector may run a finaliser inside our own locked section.

Virtual time belongs to a `Clock`.  Each device starts with its own; the first wait across two devices ties
their clocks together (both then show the later of the two times), since the host has one clock only.

Next: streams.py (work and its finish times).
"""

from __future__ import annotations

import enum
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final

from allocator.errors import SimDeadlock

if TYPE_CHECKING:
    from allocator.devices.sim.capture import Recording
    from allocator.devices.sim.context import Context
    from allocator.devices.sim.streams import Node, SimStream


class CaptureMode(enum.Enum):
    """A capture's mode, and a thread's: how much it forbids (cuStreamBeginCapture)."""

    GLOBAL = "global"
    THREAD_LOCAL = "thread_local"
    RELAXED = "relaxed"


class ThreadState(threading.local):
    """What CUDA keeps per thread: the context stack, the capture mode, the per-thread streams."""

    def __init__(self) -> None:
        self.me = object()  # a thread's identity; idents repeat
        self.stack: list[Context] = []
        self.mode = CaptureMode.GLOBAL
        self.streams: weakref.WeakKeyDictionary[Context, SimStream] = weakref.WeakKeyDictionary()
        self.in_hook = False


class Clock:
    """Virtual host time in ns, and the devices that show it."""

    def __init__(self) -> None:
        self.now = 0
        self.members: weakref.WeakKeyDictionary[Context, None] = weakref.WeakKeyDictionary()

    def join(self, other: Clock) -> None:
        """From now on one clock, showing the later time."""
        if other is self:
            return
        self.now = max(self.now, other.now)
        for device in list(other.members):
            device.clock = self
            self.members[device] = None


class World:
    """The shared state.  `lock` guards it, and every simulated device."""

    patience_s: float = 30.0
    """Real seconds after which a host wait is called a deadlock although other threads live."""

    daemon_patience_s: float = 1.0
    """The same, where only daemon threads are left that could help."""

    def __init__(self) -> None:
        self.thread = ThreadState()
        self.devices: weakref.WeakValueDictionary[int, Context] = weakref.WeakValueDictionary()
        self.recordings: weakref.WeakKeyDictionary[Recording, None] = weakref.WeakKeyDictionary()
        self.reset_locks()

    def reset_locks(self) -> None:
        """Also in a forked child, where a thread that no longer exists may have held them."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.waiting: dict[int, float] = {}
        """Thread -> when it began its host wait, in real seconds."""
        self.hopeless: set[int] = set()

    def add_device(self, device: Context) -> int:
        """Register a device; its slot (the smallest free number) places its addresses."""
        with self.lock:
            slot = 0
            while slot in self.devices:
                slot += 1
            self.devices[slot] = device
            return slot

    def wait_resolved(self, nodes: list[Node], *, any_of: bool, call: str) -> None:
        """Block this thread until the finish times of all (or any) of `nodes` are known.

        The lock is held by the caller exactly once and is given up while waiting.  Raises SimDeadlock if no
        thread is left that could let the work go on.
        """
        me = threading.get_ident()
        started = time.monotonic()
        self.waiting[me] = started
        try:
            while True:
                known = [node.finish is not None for node in nodes]
                if not nodes or (any(known) if any_of else all(known)):
                    return
                self._check_hope(call, time.monotonic() - started)
                # A thread may end without telling us, hence the short real timeout.
                self.changed.wait(0.02)
        finally:
            self.waiting.pop(me, None)
            self.hopeless.discard(me)
            self.changed.notify_all()

    def _check_hope(self, call: str, waited_s: float) -> None:
        if threading.get_ident() in self.hopeless:
            raise SimDeadlock(f"{call} waits for a held stream, as every other thread did")
        helpers = [t for t in threading.enumerate() if t.ident not in self.waiting and t.is_alive()]
        # Daemons are given some time from when the last of the others began to wait.
        all_wait_s = time.monotonic() - max(self.waiting.values())
        if not helpers or (all_wait_s > self.daemon_patience_s and all(t.daemon for t in helpers)):
            # It is one deadlock for all of them, whatever this thread does once it has caught the error.
            self.hopeless |= self.waiting.keys()
            raise SimDeadlock(f"{call} waits for a held stream, and no other thread is left to resume it")
        if waited_s > self.patience_s:
            raise SimDeadlock(f"{call} has waited {waited_s:.0f} s of real time for a held stream that nobody resumes")


WORLD: Final = World()
os.register_at_fork(after_in_child=WORLD.reset_locks)

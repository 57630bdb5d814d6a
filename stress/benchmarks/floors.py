"""The least that an allocator in Python can do: what any real one is measured against.

    Floor     core: a dict of stacks by stream and size, one lock around each change, an object with `__del__`
    HookFloor CuPy: the same without a lock, making the two objects that CuPy wants
    EmptyHook CuPy: asks for the current stream and makes the two objects; there is one address for everybody

Rule: nothing here is safe to compute with.  Addresses are made up, and blocks return at once, whoever uses them.
Next: core.py, hooks.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class FloorMemory:
    """What the floor hands out."""

    __slots__ = ("key", "pool", "ptr", "size")

    def __init__(self, pool: Floor, key: tuple[int, int], ptr: int, size: int) -> None:
        self.pool = pool
        self.key = key
        self.ptr = ptr
        self.size = size

    def __del__(self) -> None:
        pool = self.pool
        with pool.lock:
            pool.stacks[self.key].append(self.ptr)


class UnlockedFloorMemory(FloorMemory):
    """The same, freeing without the lock: a list's `append` is atomic."""

    __slots__ = ()

    def __del__(self) -> None:
        self.pool.stacks[self.key].append(self.ptr)


class Floor:
    """A dict of stacks, one lock."""

    def __init__(self, memory: type[FloorMemory] = FloorMemory) -> None:
        self.stacks: dict[tuple[int, int], list[int]] = {}
        self.lock = threading.Lock()
        self._memory = memory
        self._next = 0

    def allocate(self, nbytes: int, stream: object) -> FloorMemory:
        """Memory for `stream`."""
        size = (nbytes + 511) & -512
        key = (id(stream), size)  # a stream's own hash may be written in Python
        with self.lock:
            stack = self.stacks.get(key)
            if stack is None:
                stack = self.stacks[key] = []
            if stack:
                ptr = stack.pop()
            else:
                self._next += size
                ptr = self._next
        return self._memory(self, key, ptr, size)


def hook_floor(cupy: Any, current_stream: Callable[[], Any]) -> Callable[[int], Any]:
    """CuPy's allocator as a dict of bins of ready blocks, by stream and size."""
    pointer = cupy.cuda.MemoryPointer
    base: Any = cupy.cuda.BaseMemory

    class Memory(base):  # type: ignore[misc]  # CuPy's classes have no types
        __slots__ = ("stack",)

        def __init__(self, stack: list[int], ptr: int, size: int) -> None:
            self.stack = stack
            self.ptr = ptr  # type: ignore[misc]  # a field of CuPy's
            self.size = size  # type: ignore[misc]  # a field of CuPy's
            self.device_id = 0  # type: ignore[misc]  # a field of CuPy's

        def __del__(self) -> None:
            self.stack.append(self.ptr)

    bins: dict[tuple[int, int], list[int]] = {}
    made = 0

    def malloc(nbytes: int) -> Any:
        nonlocal made
        size = (nbytes + 511) & -512
        key = (id(current_stream()), size)
        stack = bins.get(key)
        if stack is None:
            stack = bins[key] = []
        if stack:
            ptr = stack.pop()
        else:
            made += size
            ptr = made
        return pointer(Memory(stack, ptr, size), 0)

    return malloc


def empty_hook(cupy: Any, current_stream: Callable[[], Any]) -> Callable[[int], Any]:
    """CuPy's allocator with nothing behind it."""
    pointer = cupy.cuda.MemoryPointer
    base: Any = cupy.cuda.BaseMemory

    class Memory(base):  # type: ignore[misc]  # CuPy's classes have no types
        __slots__ = ()

        def __init__(self, size: int) -> None:
            self.ptr = 4096  # type: ignore[misc]  # a field of CuPy's
            self.size = size  # type: ignore[misc]  # a field of CuPy's
            self.device_id = 0  # type: ignore[misc]  # a field of CuPy's

        def __del__(self) -> None:
            pass

    def malloc(nbytes: int) -> Any:
        current_stream()
        return pointer(Memory((nbytes + 511) & -512), 0)

    return malloc

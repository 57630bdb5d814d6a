"""A GPU and the libraries on it, played: everything that a run on a GPU calls, with made-up memory.

The device is the simulated one, which says that it is not.  CuPy's allocator functions and arrays are CuPy's own;
what needs a driver is played.  The guests have the functions that guests.py calls, with the arguments of their own.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import cupy
import pytest

from allocator import SimDevice
from allocator.integrations.cupy import library
from allocator.stress.benchmarks import busy, cold_start, hooks, session

addresses = itertools.count(1 << 44, 1 << 21)


class FakeGpu(SimDevice):
    """A simulated device that says it is a GPU."""

    simulated = False  # type: ignore[misc]  # the protocol has it read-only

    def __init__(self) -> None:
        super().__init__(memory=1 << 36, name="H400")
        self.driver_version = (13, 0)

    def spin(self, stream: int, duration_ns: int) -> None:
        """As `CudaDevice.spin`."""
        self.launch(stream, duration_ns)


class FakePool:
    """As CuPy's pools: blocks by size; `free_all_blocks` is counted."""

    def __init__(self) -> None:
        self.free: dict[int, list[int]] = {}
        self.emptied = 0
        pool = self

        class Memory(cupy.cuda.BaseMemory):  # type: ignore[misc]  # CuPy's classes have no types
            def __init__(self, ptr: int, size: int) -> None:
                self.ptr, self.size, self.device_id = ptr, size, 0

            def __del__(self) -> None:
                pool.free.setdefault(self.size, []).append(self.ptr)

        self._memory = Memory

    def malloc(self, nbytes: int) -> Any:
        size = max(512, (nbytes + 511) & -512)
        found = self.free.get(size)
        return cupy.cuda.MemoryPointer(self._memory(found.pop() if found else next(addresses), size), 0)

    def free_all_blocks(self) -> None:
        self.free.clear()
        self.emptied += 1


class FakeCupy:
    """The module."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self._local = threading.local()
        self.float32 = cupy.float32
        self.empty = cupy.empty
        self.memsets: list[int] = []
        self.events: list[tuple[str, int]] = []
        fake = self

        class Stream(hooks.MadeUpStream):
            def __init__(self, non_blocking: bool = False) -> None:
                assert non_blocking
                super().__init__(fake, gpu)  # type: ignore[arg-type]  # it plays the part

            def synchronize(self) -> None:
                with gpu.program_scope():
                    gpu.stream_synchronize(self.ptr)

            def wait_event(self, event: Any) -> None:
                fake.events.append(("wait", self.ptr))

        class Event:
            def __init__(self, disable_timing: bool = False) -> None:
                assert disable_timing

            def record(self, stream: Any) -> None:
                fake.events.append(("record", stream.ptr))

        class Null(hooks.MadeUpStream):
            def __init__(self) -> None:
                self._door = fake  # type: ignore[assignment]  # it plays the part
                self.device_id = -1

            ptr = 0

            def __del__(self) -> None:
                pass

        self.null = Null()
        Stream.null = self.null  # type: ignore[attr-defined]  # as CuPy's class has it
        self.cuda = SimpleNamespace(
            alloc=cupy.cuda.alloc,
            get_allocator=cupy.cuda.get_allocator,
            set_allocator=cupy.cuda.set_allocator,
            BaseMemory=cupy.cuda.BaseMemory,
            MemoryPointer=cupy.cuda.MemoryPointer,
            MemoryPool=FakePool,
            MemoryAsyncPool=FakePool,
            Stream=Stream,
            Event=Event,
            Device=lambda ordinal: SimpleNamespace(use=lambda: None),
            is_available=lambda: True,
            get_current_stream=self.current,
            runtime=SimpleNamespace(memsetAsync=lambda ptr, value, size, stream: self.memsets.append(ptr)),
        )

    def zeros(self, n: int) -> Any:
        return SimpleNamespace(sum=lambda: 0)

    def stack(self) -> list[Any]:
        """The calling thread's current streams, as MadeUpStream wants it."""
        if not hasattr(self._local, "stack"):
            self._local.stack = [self.null]
        stack: list[Any] = self._local.stack
        return stack

    def current(self) -> Any:
        return self.stack()[-1]


class Rmm:
    """`rmm.mr` and the adapter: which resource is current, and which were used."""

    def __init__(self, fake: FakeCupy) -> None:
        self.current: Any = "default"
        self.used: set[str] = set()
        self.pools: list[int] = []
        mr = _module("rmm.mr")
        mr.CudaMemoryResource = lambda: "cuda"
        mr.CudaAsyncMemoryResource = lambda: "async"
        mr.PoolMemoryResource = self._pool
        mr.get_current_device_resource = lambda: self.current
        mr.set_current_device_resource = self._set
        adapter = _module("rmm.allocators.cupy")
        pool = FakePool()

        def rmm_cupy_allocator(nbytes: int) -> Any:
            self.used.add(self.current)
            fake.current()
            return pool.malloc(nbytes)

        adapter.rmm_cupy_allocator = rmm_cupy_allocator
        self.modules = {
            "rmm": ModuleType("rmm"),
            "rmm.mr": mr,
            "rmm.allocators": ModuleType("rmm.allocators"),
            "rmm.allocators.cupy": adapter,
        }

    def _pool(self, upstream: object, *, initial_pool_size: int) -> str:
        assert upstream == "cuda"
        self.pools.append(initial_pool_size)
        return "pool"

    def _set(self, resource: Any) -> None:
        self.current = resource


class Torch:
    """`torch`, as far as it is called."""

    def __init__(self) -> None:
        self.module = module = _module("torch")
        self.live: set[int] = set()
        self.emptied = 0
        module.uint8 = "uint8"
        module.device = lambda kind, ordinal: (kind, ordinal)
        module.empty = self._empty
        module.cuda = SimpleNamespace(
            is_available=lambda: True,
            init=lambda: None,
            current_stream=lambda ordinal: ("stream", ordinal),
            caching_allocator_alloc=self._take,
            caching_allocator_delete=self.live.remove,
            empty_cache=self._count,
        )

    def _empty(self, nbytes: int, *, dtype: str, device: object) -> object:
        assert (dtype, device) == ("uint8", ("cuda", 0))
        return object()

    def _take(self, nbytes: int, device: int, stream: object) -> int:
        assert (device, stream) == (0, ("stream", 0))
        ptr = next(addresses)
        self.live.add(ptr)
        return ptr

    def _count(self) -> None:
        self.emptied += 1


def _module(name: str) -> Any:
    return ModuleType(name)


def cuda_core(name: str) -> Any:
    """`cuda.core`, under one of its names."""
    module = _module(name)

    class Resource:
        def __init__(self, ordinal: int) -> None:
            assert ordinal == 0

        def allocate(self, nbytes: int, *, stream: object) -> object:
            assert stream == "a stream"
            return object()

    module.DeviceMemoryResource = Resource
    module.Device = lambda ordinal: SimpleNamespace(set_current=lambda: None, create_stream=lambda: "a stream")
    return module


class Machine:
    """One GPU, CuPy, and whichever guests are put there."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gpu = FakeGpu()
        self.cupy = FakeCupy(self.gpu)
        self._patch = patch
        found: Callable[[], Any] = lambda: self.cupy  # noqa: E731  # typed, which a def inside a call is not
        for module in (hooks, session, busy):
            patch.setattr(module, "import_cupy", found)
        patch.setattr(session, "open_device", lambda ordinal: self.gpu)
        patch.setattr(library, "device_count", lambda: 1)
        patch.setattr(hooks.CupyDoor, "_given", lambda door: self.cupy.current)
        patch.setattr(cold_start, "ON_GPU", {"python": "pass"})
        for name in ("rmm", "rmm.mr", "rmm.allocators", "rmm.allocators.cupy", "torch", "cuda.core"):
            patch.setitem(sys.modules, name, None)  # not installed, whatever is

    def add(self, **modules: Any) -> None:
        """Install: dots in names are written as two underscores."""
        for name, module in modules.items():
            self._patch.setitem(sys.modules, name.replace("__", "."), module)

"""CuPy's door: `cupy.cuda.alloc(nbytes)` on the current stream, with one allocator after the other switched on.

Two of them.  `cupy` needs a GPU, and has CuPy's own pools as peers.  `made-up` needs none: CuPy hands out whatever its
allocator returns without looking, so the pool lies on the simulator, the addresses are made up, and what says which
stream is the current one is ours.  CuPy's own pools cannot run that way; there, ratios are to the floor.

Rule: an allocator is CuPy's for its own turns only.  Weir wraps methods of CuPy's streams: where loops enter streams
(`entering`), it is installed for its own turns and taken off again, so that nobody else pays for that.
Next: guests.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from allocator import CachingAllocator
from allocator.devices import Device
from allocator.stress.benchmarks.cases import Allocator, Missing, Settings
from allocator.stress.benchmarks.core import open_pool, queue_work, told
from allocator.stress.benchmarks.floors import empty_hook, hook_floor


def import_cupy() -> Any:
    """CuPy, or Missing."""
    try:
        import cupy
    except ImportError as error:
        raise Missing(f"CuPy cannot be imported ({' '.join(str(error).split())})") from None
    return cupy


@contextmanager
def switched_on(cupy: Any, malloc: Callable[[int], Any]) -> Iterator[None]:
    """CuPy's allocator, for a while."""
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(malloc)
    try:
        yield
    finally:
        cupy.cuda.set_allocator(before)


class Weir:
    """A pool behind CuPy.  lightly: installed from open to close, and only CuPy's allocator swapped between turns."""

    def __init__(self, cupy: Any, pool: CachingAllocator, current_stream: Callable[[], Any] | None) -> None:
        import allocator.cupy as face

        self._cupy = cupy
        self._face = face
        self._current_stream = current_stream
        self.pool = pool

    @contextmanager
    def installed(self) -> Iterator[None]:
        """`allocator.cupy.install`, and off again."""
        self._face.install(self.pool, current_stream=self._current_stream)
        try:
            yield
        finally:
            self._face.uninstall()

    def switched_on(self) -> AbstractContextManager[None]:
        """While it is installed: CuPy's allocator."""
        return switched_on(self._cupy, self._face.malloc)


class _HookDoor:
    """What both have in common."""

    takes_stream = False
    name = ""
    reference = ""
    wrapped = True
    """Are this door's streams of the classes that Weir wraps?"""

    def __init__(self, device: Device, settings: Settings, cupy: Any) -> None:
        self._device = device
        self._settings = settings
        self._cupy = cupy

    def _current_stream(self) -> Callable[[], Any]:
        raise NotImplementedError

    def _given(self) -> Callable[[], Any] | None:
        """What `install` is told."""
        return self._current_stream()

    def _own(self, open_: ExitStack, several: bool) -> Iterator[Allocator]:
        """The peers of this door."""
        return iter(())

    @contextmanager
    def allocators(self, *, several: bool = False, entering: bool = False) -> Iterator[list[Allocator]]:
        """CuPy's own first, then the floors, then Weir."""
        cupy, wants, alloc = self._cupy, self._settings.wants, self._cupy.cuda.alloc
        with ExitStack() as open_:
            before = cupy.cuda.get_allocator()
            made = list(self._own(open_, several))
            for name, hook in (("floor", hook_floor), ("empty-hook", empty_hook)):
                if wants(name):
                    malloc = hook(cupy, self._current_stream())
                    made.append(Allocator(name, alloc, partial(switched_on, cupy, malloc), real=False))
            if wants("weir"):
                pool = open_pool(self._device)
                open_.callback(pool.close)
                weir = Weir(cupy, pool, self._given())
                around: Callable[[], AbstractContextManager[object]] = weir.installed
                if not (entering and self.wrapped):
                    open_.enter_context(weir.installed())
                    cupy.cuda.set_allocator(before)
                    around = weir.switched_on
                    open_.callback(cupy.cuda.set_allocator, before)
                made.append(Allocator("weir", alloc, around, notes=partial(told, pool)))
            yield made


class MadeUpStream:
    """A stream as CuPy's are: it lives as long as its object, and entering it makes it current."""

    def __init__(self, door: MadeUpDoor, sim: Any) -> None:
        self._door = door
        self._sim = sim
        with sim.program_scope():
            self.ptr: int = sim.stream_create(non_blocking=True, priority=0)
        self.device_id = 0

    def __del__(self) -> None:
        if hasattr(self, "ptr"):
            with self._sim.program_scope():
                self._sim.stream_destroy(self.ptr)

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.ptr)

    def __enter__(self) -> MadeUpStream:
        self._door.stack().append(self)
        return self

    def __exit__(self, *args: object) -> None:
        self._door.stack().pop()


# What a stream is taken for decides what is known of its end (R9): for CuPy's own, then, which these stand for.
MadeUpStream.__module__, MadeUpStream.__name__ = "cupy.cuda.stream", "Stream"


class MadeUpDoor(_HookDoor):
    """CuPy on the simulator."""

    name = "made-up"
    reference = "floor"
    wrapped = False

    def __init__(self, device: Device, settings: Settings, cupy: Any) -> None:
        super().__init__(device, settings, cupy)
        self._sim: Any = device
        self._local = threading.local()

    def stack(self) -> list[MadeUpStream]:
        """The calling thread's current streams."""
        try:
            found: list[MadeUpStream] = self._local.stack
        except AttributeError:
            found = self._local.stack = []
        return found

    def _current_stream(self) -> Callable[[], Any]:
        local = self._local

        def current() -> Any:
            return local.stack[-1]

        return current

    @contextmanager
    def streams(self, count: int) -> Iterator[Sequence[Any]]:
        """Non-blocking ones."""
        yield [MadeUpStream(self, self._sim) for _ in range(count)]

    @contextmanager
    def main(self) -> Iterator[Any]:
        """One that is current."""
        with self.streams(1) as (stream,), stream:
            yield stream

    def touch(self) -> Callable[[Any, Any], object]:
        """A kernel of a microsecond, which is over when the call returns."""
        sim = self._sim

        def launch(stream: Any, memory: Any) -> None:
            sim.launch(stream.ptr, 1000)
            sim.advance(1000)

        return launch


class CupyDoor(_HookDoor):
    """CuPy on a GPU."""

    name = "cupy"
    reference = "cupy"

    def __init__(self, device: Device, settings: Settings, cupy: Any, left_out: dict[str, str]) -> None:
        super().__init__(device, settings, cupy)
        self._left_out = left_out

    def _current_stream(self) -> Callable[[], Any]:
        asks: Callable[[], Any] = self._cupy.cuda.get_current_stream
        return asks

    def _given(self) -> None:
        """CuPy is asked, as in any program."""

    def _own(self, open_: ExitStack, several: bool) -> Iterator[Allocator]:
        cuda = self._cupy.cuda
        if self._settings.wants("cupy"):
            pool = cuda.MemoryPool()
            open_.callback(pool.free_all_blocks)
            yield Allocator("cupy", cuda.alloc, partial(switched_on, self._cupy, pool.malloc))
        if self._settings.wants("cupy-async") and "cupy-async" not in self._left_out:
            try:
                malloc = cuda.MemoryAsyncPool().malloc
            except Exception as error:  # whatever CuPy raises where the driver cannot do it
                self._left_out["cupy-async"] = " ".join(str(error).split())
            else:
                yield Allocator("cupy-async", cuda.alloc, partial(switched_on, self._cupy, malloc))

    @contextmanager
    def streams(self, count: int) -> Iterator[Sequence[Any]]:
        """Non-blocking ones."""
        made = [self._cupy.cuda.Stream(non_blocking=True) for _ in range(count)]
        yield made
        for stream in made:
            stream.synchronize()

    @contextmanager
    def main(self) -> Iterator[Any]:
        """The legacy stream, which a program has that knows of no other."""
        yield self._cupy.cuda.Stream.null

    def touch(self) -> Callable[[Any, Any], object]:
        """512 bytes of the memory are set to zero."""
        memset = self._cupy.cuda.runtime.memsetAsync

        def zero(stream: Any, memory: Any) -> None:
            memset(memory.ptr, 0, 512, stream.ptr)

        return zero


def open_hook_door(device: Device, settings: Settings, left_out: dict[str, str]) -> MadeUpDoor | CupyDoor:
    """CuPy on this device, or on made-up addresses.  Raises Missing."""
    cupy = import_cupy()
    if device.simulated:
        return MadeUpDoor(device, settings, cupy)
    if not cupy.cuda.is_available():
        raise Missing("CuPy finds no GPU; see `weir doctor`")
    cupy.cuda.Device(device.ordinal).use()
    with device.scope():
        queue_work(device, 1, 1000)  # the driver loads a kernel at its first launch, which may wait
    cupy.zeros(1).sum()  # likewise CuPy's
    return CupyDoor(device, settings, cupy, left_out)

"""CuPy's streams, events and graphs, played on the simulated device.

CuPy's own need a driver, its arrays do not: so the arrays in these tests are CuPy's, on made-up pointers, and the
streams are these.  They behave as the compiled ones do: a handle that the object owns and destroys, equality and hash
by handle, a current stream a thread, `Stream.record` that does not pass through `Event.record`, captures whose graph
keeps the list of host functions.
"""

from __future__ import annotations

import threading
from typing import Any

import cupy

from allocator import SimDevice
from allocator.devices import LEGACY


class FakeCupy:
    """One "import" of CuPy's stream module over one device."""

    def __init__(self, gpu: SimDevice) -> None:
        self.gpu = gpu
        self._local = threading.local()
        self.ExternalStream: Any = None
        self.runtime = Runtime(gpu)
        self.BaseStream, self.Stream, self.Event = _classes(self)
        self.null = self.Stream(null=True)
        self.ptds = self.Stream(ptds=True)

    def stack(self) -> list[Any]:
        """The calling thread's current streams."""
        if not hasattr(self._local, "stack"):
            self._local.stack = [self.null]
        stack: list[Any] = self._local.stack
        return stack

    def current(self) -> Any:
        """As `cupy.cuda.get_current_stream()`."""
        return self.stack()[-1]


def handle(stream: Any) -> int:
    """As the driver takes it from us: 0 told as legacy."""
    return int(stream.ptr) or LEGACY


class Runtime:
    """`cupy.cuda.runtime`, as Python callers use it: handles, no objects."""

    def __init__(self, gpu: SimDevice) -> None:
        self._gpu = gpu

    def streamBeginCapture(self, stream: int, mode: str) -> None:
        with self._gpu.program_scope():
            self._gpu.begin_capture(stream, mode)

    def streamEndCapture(self, stream: int) -> Any:
        with self._gpu.program_scope():
            return self._gpu.end_capture(stream)


class Graph:
    """A captured graph: destroyed with the object, and with it the list of host functions."""

    def __init__(self, graph: Any, host_funcargs: list[Any]) -> None:
        self._graph = graph
        self.host_funcargs = host_funcargs

    def launch(self, stream: Any) -> None:
        self._graph.launch(handle(stream))

    def __del__(self) -> None:
        self._graph.close()


def _classes(library: FakeCupy) -> tuple[Any, Any, Any]:
    gpu = library.gpu

    class BaseStream:
        device_id = 0

        def __init__(self, ptr: int, device_id: int) -> None:
            self.ptr = ptr
            self.device_id = device_id
            self._graph_host_funcargs: list[Any] | None = None

        def __eq__(self, other: object) -> bool:
            return isinstance(other, BaseStream) and self.ptr == other.ptr

        def __hash__(self) -> int:
            return self.ptr

        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, self.ptr)

        def __enter__(self) -> Any:
            library.stack().append(self)
            return self

        def __exit__(self, *args: object) -> None:
            library.stack().pop()

        def use(self) -> Any:
            library.stack()[-1] = self
            return self

        def record(self, event: Any = None) -> Any:
            if event is None:
                event = Event()
            with gpu.program_scope():
                gpu.event_record(event.ptr, handle(self))
            return event

        def wait_event(self, event: Any) -> None:
            with gpu.program_scope():
                gpu.stream_wait_event(handle(self), event.ptr)

        def synchronize(self) -> None:
            with gpu.program_scope():
                gpu.stream_synchronize(handle(self))

        def begin_capture(self, mode: str | None = None) -> None:
            if self.ptr in (0, 1):
                raise RuntimeError("cannot capture on the default (legacy) stream")
            with gpu.program_scope():
                gpu.begin_capture(handle(self), mode or "relaxed")
            self._graph_host_funcargs = []

        def end_capture(self) -> Any:
            funcargs, self._graph_host_funcargs = self._graph_host_funcargs, None
            assert funcargs is not None, "not capturing"
            with gpu.program_scope():
                return Graph(gpu.end_capture(handle(self)), funcargs)

        # not CuPy's: a kernel of the program
        def kernel(self, reads: tuple[Any, ...] = (), writes: tuple[Any, ...] = (), ns: int = 1000) -> None:
            gpu.launch(handle(self), ns, reads=[span(a) for a in reads], writes=[span(a) for a in writes])

    class Stream(BaseStream):
        def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
            if null or ptds:
                ptr, device_id = 0 if null else 2, -1
            else:
                device_id = gpu.ordinal
                with gpu.program_scope():
                    ptr = gpu.stream_create(non_blocking=non_blocking, priority=0)
            super().__init__(ptr, device_id)
            self._foreign_stream_ref: Any = None

        def __del__(self) -> None:
            if self._foreign_stream_ref is None and self.ptr not in (0, 1, 2):
                with gpu.program_scope():
                    gpu.stream_destroy(self.ptr)

        @classmethod
        def from_external(cls, stream: Any) -> Any:
            wrapper = cls.__new__(cls)
            BaseStream.__init__(wrapper, stream.__cuda_stream__()[1], -1)
            wrapper._foreign_stream_ref = stream
            return wrapper

    class ExternalStream(BaseStream):
        def __init__(self, ptr: int, device_id: int = -1) -> None:
            super().__init__(ptr, device_id)

    library.ExternalStream = ExternalStream
    for cls, name in ((BaseStream, "_BaseStream"), (Stream, "Stream"), (ExternalStream, "ExternalStream")):
        cls.__module__, cls.__name__ = "cupy.cuda.stream", name

    class Event:
        def __init__(self) -> None:
            with gpu.program_scope():
                self.ptr = gpu.event_create()

        def record(self, stream: Any = None) -> None:
            with gpu.program_scope():
                gpu.event_record(self.ptr, handle(library.current() if stream is None else stream))

        def synchronize(self) -> None:
            with gpu.program_scope():
                gpu.event_synchronize(self.ptr)

        def __del__(self) -> None:
            with gpu.program_scope():
                gpu.event_destroy(self.ptr)

    return BaseStream, Stream, Event


def span(array: Any) -> tuple[int, int]:
    """The whole of the memory behind an array: (ptr, bytes)."""
    if isinstance(array, tuple):
        return array
    return (array.data.mem.ptr, array.data.mem.size)


def array(nbytes: int) -> Any:
    """A CuPy array of so many bytes, from whatever allocator is the current one."""
    return cupy.ndarray((nbytes,), dtype=cupy.uint8)

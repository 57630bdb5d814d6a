"""What a GPU test works with: streams, events and latches that are cleaned up whatever happens.

A claim "X waits for Y" is tested as: hold Y, issue X, `settle()`, X is not done; release Y, X is done.
A claim "X does not wait for Y": hold Y, issue X, X is done while Y still is held.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from kernels import Kernels, Latch, done_within

from allocator.devices import PER_THREAD, Capture, CudaDevice
from allocator.errors import DriverError

T = TypeVar("T")
GLOBAL, THREAD_LOCAL, RELAXED = "GLOBAL", "THREAD_LOCAL", "RELAXED"
JOIN_S = 30.0  # a thread that waits for a latch ends when the latch gives up, after 20 s


class Worker:
    """A function that runs in a thread of its own, with the device's context current."""

    def __init__(self, rig: Rig, function: Callable[[], Any]) -> None:
        self._outcome: Any = None
        self._error: BaseException | None = None
        self.about_to_call = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(rig, function), daemon=True)
        self._thread.start()

    def _run(self, rig: Rig, function: Callable[[], Any]) -> None:
        try:
            rig.cu("cuCtxPushCurrent", rig.gpu.primary_context())
            self.about_to_call.set()
            try:
                self._outcome = function()
            finally:
                rig.cu("cuCtxPopCurrent")
        except BaseException as error:
            self._error = error
            self.about_to_call.set()

    @property
    def finished(self) -> bool:
        return not self._thread.is_alive()

    def ends_within(self, seconds: float) -> bool:
        """Wait for the thread, without a driver call."""
        self._thread.join(seconds)
        return self.finished

    def result(self) -> Any:
        """Wait for the thread; its result, or its exception."""
        self._thread.join(JOIN_S)
        assert self.finished, f"a thread did not end within {JOIN_S} s"
        if self._error is not None:
            raise self._error
        return self._outcome


class Rig:
    """Streams, events and latches on one device.  The context is current, the capture mode the default."""

    def __init__(self, gpu: CudaDevice, kernels: Kernels) -> None:
        self.gpu = gpu
        self.kernels = kernels
        self.cu = kernels.cu
        self._streams: list[int] = []
        self._events: list[int] = []
        self._workers: list[Worker] = []
        self._gave_up: list[Latch] = []
        self._control = gpu.stream_create(non_blocking=True, priority=0)

    # -- made here, ended by close() ----------------------------------------------------------

    def blocking(self) -> int:
        return self._stream(non_blocking=False)

    def non_blocking(self) -> int:
        return self._stream(non_blocking=True)

    def _stream(self, *, non_blocking: bool) -> int:
        stream = self.gpu.stream_create(non_blocking=non_blocking, priority=0)
        self._streams.append(stream)
        return stream

    def destroy(self, stream: int) -> None:
        self._streams.remove(stream)
        self.gpu.stream_destroy(stream)

    def event(self) -> int:
        event = self.gpu.event_create()
        self._events.append(event)
        return event

    def recorded(self, stream: int) -> int:
        """A new event, recorded on `stream` now."""
        event = self.event()
        self.gpu.event_record(event, stream)
        return event

    def hold(self, stream: int) -> Latch:
        return self.kernels.hold(stream)

    def release(self) -> None:
        """Release every latch."""
        self._gave_up += self.kernels.release_all()

    def start(self, function: Callable[[], Any]) -> Worker:
        """Run `function` in a thread; return once it is about to be called."""
        worker = Worker(self, function)
        self._workers.append(worker)
        assert worker.about_to_call.wait(JOIN_S)
        return worker

    def in_thread(self, function: Callable[[], T]) -> T:
        """Run `function` in a thread, to its end."""
        result: T = self.start(function).result()
        return result

    def close(self) -> None:
        """Release every latch, wait for everything, end what was made.  Fails if a latch had given up."""
        self.release()
        for worker in self._workers:
            with contextlib.suppress(Exception):
                worker.result()
        self.gpu.ctx_synchronize()
        for event in self._events:
            self.gpu.event_destroy(event)
        for stream in [*self._streams, self._control]:
            self.gpu.stream_destroy(stream)
        assert not self._gave_up, "a latch gave up after 20 s: something waited for a held stream"

    # -- questions ----------------------------------------------------------------------------

    def settle(self, milliseconds: float = 5.0) -> None:
        """Give the device time for everything that can run: spin on an independent stream, and wait for that."""
        self.gpu.spin(self._control, int(milliseconds * 1e6))
        assert done_within(lambda: self.gpu.stream_query(self._control))

    def finishes(self, event: int) -> bool:
        """True if the event completes within a few seconds."""
        return done_within(lambda: self.gpu.event_query(event))

    def is_stuck(self, event: int) -> bool:
        """True if the event is not complete although the device had time."""
        self.settle()
        return not self.gpu.event_query(event)

    # -- captures -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def capturing(self, stream: int, mode: str) -> Iterator[None]:
        """Capture `stream`; at the end drop the graph, if the capture still is valid."""
        self.begin_capture(stream, mode)
        try:
            yield
        finally:
            with contextlib.suppress(DriverError):
                graph = self.cu("cuStreamEndCapture", stream)
                if int(graph):
                    self.cu("cuGraphDestroy", graph)

    def begin_capture(self, stream: int, mode: str = RELAXED) -> None:
        modes = self.kernels.driver.CUstreamCaptureMode
        self.cu("cuStreamBeginCapture", stream, getattr(modes, f"CU_STREAM_CAPTURE_MODE_{mode}"))

    def capture_graph(self, work: Callable[[int], object]) -> Any:
        """An executable graph of what `work(stream)` queues."""
        stream = self.non_blocking()
        self.begin_capture(stream)
        work(stream)
        graph = self.cu("cuStreamEndCapture", stream)
        executable = self.cu("cuGraphInstantiate", graph, 0)
        self.cu("cuGraphDestroy", graph)
        return executable

    def survives(self, stream: int) -> bool:
        """True if the capture of `stream` still is valid."""
        return self.gpu.stream_is_capturing(stream) is Capture.ACTIVE


def error_of(function: Callable[[], object]) -> str | None:
    """The driver's name of the error that `function` meets, or None."""
    try:
        function()
    except DriverError as error:
        return error.code
    return None


def per_thread_or(rig: Rig, kind: str) -> int:
    """A stream by the name of its kind: "blocking", "non_blocking" or "per_thread"."""
    return PER_THREAD if kind == "per_thread" else int(getattr(rig, kind)())

"""Scenes with captures that hooks report: what may happen between the report and the driver's own beginning.

`Captures.begin` comes before the driver begins (S18): in between, a stream still answers "not capturing", and only the
report keeps calls away from it.  These scenes put the driver's beginning into the middle of a call that the pool makes
on another stream's behalf.  And streams that nobody may ask who they are, because they capture (S19).
Next: scenes.py, capture_mutants.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from allocator import CachingAllocator, Config, DriverError, Stream, StreamCapturing
from allocator.sizes import MIB
from allocator.streams import Sealing
from tests.model.programs import Foreign
from tests.model.scenes import Scene


class Reported(Scene):
    """A capture of stream 0 that has been reported, and begins when the pool makes its next call of some name."""

    def __init__(self, kinds: tuple[str, ...], assumed: bool = False, **config: Any) -> None:
        super().__init__(kinds, assumed, **config)
        self.captures = self.pool._registry.captures

    def begin_at(self, call: str, *, report: bool = False) -> None:
        """At the call the driver begins; report: and the hook reports it only then."""
        target = self.player.streams[0]

        def begin(name: str) -> None:
            if name == call:
                self.gpu.before_call = None
                if report:
                    self.player.capture = self.captures.begin(target.line, target.handle)
                self.gpu.begin_capture(target, "relaxed")

        if not report:
            self.player.capture = self.captures.begin(target.line, target.handle)
        self.gpu.before_call = begin

    def end_capture(self, line: str = "") -> str | None:
        """The capture, begun by now, must still be whole."""
        if self.gpu.before_call is not None:
            self.gpu.before_call = None
            self.gpu.begin_capture(self.player.streams[0], "relaxed")
        try:
            self.play("end 0")
        except DriverError as error:
            return f"the capture was killed: {error}"
        return self.end(line)


def a_stream_that_is_about_to_capture() -> str | None:
    """Reported, and not begun: a question to the stream is allowed, and would be one too late."""
    scene = Reported(("nb", "nb"))
    scene.play("into 0 0 1; free 0")
    scene.begin_at("cuStreamQuery")
    scene.play("stats; into 1 1 1")
    return scene.end_capture()


def a_stream_that_is_about_to_join() -> str | None:
    """The same for one that will wait for an event of the capture, which makes it part of it."""
    scene = Reported(("nb", "nb", "nb"))
    scene.play("into 0 1 1; free 0; begin 0")
    gpu, joining = scene.gpu, scene.player.streams[1]
    assert scene.player.capture is not None
    scene.captures.join(scene.player.capture, joining.line, joining.handle)

    def join(name: str) -> None:
        if name == "cuStreamQuery":
            gpu.before_call = None
            scene.play("join 1 0")

    gpu.before_call = join
    scene.play("stats; into 1 2 1")
    if gpu.before_call is not None:
        gpu.before_call = None
        scene.play("join 1 0")
    try:
        scene.play("join 0 1; end 0")
    except DriverError as error:
        return f"the capture was killed: {error}"
    return scene.end()


def legacy_beside_a_blocking_stream_that_is_about_to_capture() -> str | None:
    """A question to legacy would kill the capture as well."""
    scene = Reported(("blocking", "nb", "legacy"))
    scene.play("into 0 2 1; free 0")
    scene.begin_at("cuStreamQuery")
    scene.play("stats; into 1 1 1")
    return scene.end_capture()


def a_capture_that_begins_before_the_whole_context_is_marked() -> str | None:
    """Nothing captured when the pool decided for one event behind the whole context; something does now."""
    scene = Reported(("nb", "nb"), assumed=True, context_events=True)
    scene.play("into 0 1 1; free 0; stats")
    scene.begin_at("cuStreamQuery", report=True)
    scene.play("seal")
    assert scene.gpu.before_call is None, "the pool asked nobody"
    return scene.end_capture()


def an_allocation_by_the_handle_of_a_captured_stream() -> str | None:
    """A bare handle is looked up at every call, but not while its stream captures: that would kill the capture."""
    scene = Reported(("nb", "nb"))
    gpu, pool = scene.gpu, scene.pool
    with gpu.scope():
        handle = gpu.stream_create(non_blocking=True, priority=0)
    line = Stream.of(gpu, handle).line
    capture = pool._registry.captures.begin(line, handle)
    gpu.begin_capture(handle, "relaxed")
    try:
        block = pool.allocate(2 * MIB, stream=handle)
    except StreamCapturing as error:
        return f"refused: {error}"
    gpu.launch(handle, writes=[block])
    graph = gpu.end_capture(handle)
    token = pool._registry.captures.end(capture)
    block.close()
    scene.play("into 0 0 1; into 1 1 1")
    graph.launch(handle)
    del token
    scene.play("stats; into 2 0 1; into 3 1 1; idle")
    pool.allocate(512, stream=handle).close()  # given once more, so that it can be asked (R9)
    return scene.end()


def a_stream_handle_that_captures_no_more() -> str | None:
    """After the capture, and the end of its stream, the handle is somebody else's: what that answers proves nothing."""
    scene = Reported(("nb", "nb"))
    gpu, pool = scene.gpu, scene.pool
    with gpu.scope():
        handle = gpu.stream_create(non_blocking=True, priority=0)
    capture = pool._registry.captures.begin(Stream.of(gpu, handle).line, handle)
    gpu.begin_capture(handle, "relaxed")
    gpu.end_capture(handle)
    pool._registry.captures.end(capture)
    old = pool.allocate(2 * MIB, stream=handle)
    gpu.launch(handle, writes=[old])
    old.close()
    with gpu.scope():
        gpu.stream_destroy(handle)
        assert gpu.stream_create(non_blocking=True, priority=0) == handle
    pool.allocate(512, stream=handle).close()
    scene.play("into 0 0 1; into 1 1 1; idle")
    pool.allocate(512, stream=handle).close()
    return scene.end()


def a_pool_made_within_a_capture() -> str | None:
    """CuPy makes a device's pool at first use, which may be in a capture: its temporaries are the graph's as well."""
    scene = Reported(("nb", "nb"))
    scene.play("begin 0")
    stream, addresses = scene.player.streams[0], set()
    pool = CachingAllocator(scene.gpu, Config(uses="declared"))
    for _ in range(3):
        temporary = pool.allocate(2 * MIB, stream=stream)
        scene.gpu.launch(stream, writes=[temporary])
        addresses.add(temporary.ptr)
        temporary.close()
    scene.play("end 0; drop; idle")
    pool.close()
    pool.stats()
    return scene.end() or (f"temporaries at {len(addresses)} addresses" if len(addresses) > 1 else None)


def a_block_that_lives_through_many_captures() -> str | None:
    """Weights: each capture uses them.  They are freed, and the graphs die one after the other, the first one last."""
    scene = Scene(("nb", "nb"))
    scene.play("into 0 0 1")
    where, graphs = scene.player.blocks[0].ptr, []
    for _ in range(12):
        scene.play("begin 0; use 0 0; end 0")
        graphs.append(scene.player.graph)
    scene.play("drop; free 0; idle")
    while graphs:
        scene.play("stats; into 1 0 1; into 2 1 1; free 1; free 2; idle; stats; into 3 0 1; into 4 1 1; idle")
        if any(block is not None and block.ptr == where for block in scene.player.blocks[1:]):
            return f"given to others while {len(graphs)} graphs that use it live"
        scene.play("free 3; free 4")
        graphs.pop()
    return scene.end()


class Unknown(Scene):
    """A foreign stream met while it captures, so that nobody can be asked which it is: a hook makes it a timeline."""

    def __init__(self) -> None:
        super().__init__(("nb", "nb"), assumed=True)
        gpu = self.gpu
        self.foreign = Foreign(gpu, non_blocking=True)
        gpu.begin_capture(self.foreign.handle, "relaxed")
        self.unknown = self.pool._registry.new_unknown_line()
        gpu.end_capture(self.foreign.handle)

    def read_there(self) -> None:
        """A block of stream 0 is used on the foreign stream, undeclared, and freed."""
        self.play("into 0 0 1")
        gpu, block = self.gpu, self.player.blocks[0]
        with gpu.program_scope():
            event = gpu.event_create()
            gpu.event_record(event, self.player.streams[0].handle)
            gpu.stream_wait_event(self.foreign.handle, event)
            gpu.event_destroy(event)
        gpu.launch(self.foreign, 9000, writes=[block])
        self.play("free 0; tick; tick")


def a_stream_that_nobody_could_ask() -> str | None:
    """It may still use what was freed."""
    scene = Unknown()
    scene.read_there()
    scene.play("stats; stats; into 1 1 1; idle")
    registry = scene.pool._registry
    Sealing(registry).identify(scene.unknown, registry.resolve(scene.foreign))
    return scene.end()


def a_stream_that_can_be_asked_at_last() -> str | None:
    """Now it is known which it is: it is over when that is, and then nothing is lost."""
    scene = Unknown()
    scene.read_there()
    scene.play("stats")
    registry = scene.pool._registry
    if not Sealing(registry).identify(scene.unknown, registry.resolve(scene.foreign)):
        return "not identified"
    scene.play("stats; stats; into 1 1 1; free 1; idle; stats; stats")
    if in_flight := scene.pool.stats().in_flight_bytes:
        return f"lost: {in_flight} bytes in flight, all idle"
    return scene.end()


CAPTURE_SCENES: Final[dict[str, Callable[[], str | None]]] = {
    scene.__name__: scene
    for scene in (
        a_stream_that_is_about_to_capture,
        a_stream_that_is_about_to_join,
        legacy_beside_a_blocking_stream_that_is_about_to_capture,
        a_capture_that_begins_before_the_whole_context_is_marked,
        an_allocation_by_the_handle_of_a_captured_stream,
        a_stream_handle_that_captures_no_more,
        a_pool_made_within_a_capture,
        a_block_that_lives_through_many_captures,
        a_stream_that_nobody_could_ask,
        a_stream_that_can_be_asked_at_last,
    )
}

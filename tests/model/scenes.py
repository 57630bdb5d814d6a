"""Programs in which a driver call fails, or a capture begins: what words alone cannot say.

Each scene plays against the real pool and returns what went wrong, or None: something, with the mutant that
names it.
Next: mutants.py, test_mutants.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from allocator import CachingAllocator, Config, DriverError, SimDevice, Stream, StreamCapturing
from allocator.devices import LEGACY
from allocator.sizes import MIB
from allocator.streams import Sealed, Sealing, Timeline
from allocator.streams.timeline import MOST_MARKS
from tests.model.pairs import Slots
from tests.model.programs import SIZES, Universe, parse

NB3 = ("nb", "nb", "nb")
ONE_PAGE: dict[str, Any] = {"limit": 2 * MIB, "wait_on_demand": False}
INVALID = "CUDA_ERROR_INVALID_VALUE"


class Scene:
    """A player, and short words for steps that may fail."""

    def __init__(self, kinds: tuple[str, ...] = NB3, assumed: bool = False, **config: Any) -> None:
        self.player = Slots(Universe("scene", kinds, events=2, config=config, assumed=assumed))
        self.gpu = self.player.gpu
        self.pool = self.player.pool

    def play(self, line: str) -> None:
        """Take the steps."""
        self.player.play(parse(line))

    def refused(self, line: str) -> None:
        """Take the steps, one of which may fail."""
        with suppress(DriverError, StreamCapturing):
            self.play(line)

    def end(self, line: str = "") -> str | None:
        """Take the last steps; what went wrong in all of it."""
        try:
            if line:
                self.play(line)
            self.pool.check()
            wrong = self.player.wrong()
            if wrong is None:
                for block in self.player.blocks:
                    if block is not None:
                        block.close()
                wrong = self.player.close()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return wrong


def a_wait_that_fails() -> str | None:
    """The driver refuses the wait that step 6 asks for: the stream is not behind that work."""
    scene = Scene(**ONE_PAGE)
    scene.play("into 0 0 1; free 0; stats")
    scene.gpu.fail("cuStreamWaitEvent", error=INVALID, times=1)
    scene.play("into 1 1 1")
    return scene.end("into 2 1 1; into 3 1 1")


def an_event_whose_wait_fails() -> str | None:
    """The same with the program's own event."""
    scene = Scene()
    scene.play("into 0 0 1; free 0; stats; record 0 0")
    scene.gpu.fail("cuStreamWaitEvent", error=INVALID)
    scene.refused("wait 0 1")
    return scene.end("into 1 1 1")


def a_stream_that_waits_after_it_was_sealed() -> str | None:
    """Whoever waits for the seal is not behind what the sealed stream has waited for since."""
    scene = Scene(limit=4 * MIB, wait_on_demand=False)
    scene.play("into 0 1 1; into 1 2 1; free 0; stats; seal; free 1; wait_stream 1 2")
    return scene.end("into 2 0 1; into 3 0 1")


def two_events_that_are_one() -> str | None:
    """An event that went back to the event pool too early, or twice, lies behind two streams at once."""
    scene = Scene()
    scene.play("into 0 0 1; free 0; stats; seal; idle; stats")
    scene.play("into 1 0 1; use 1 0; into 2 1 1; free 1; free 2; stats; seal; tick; stats")
    return scene.end("into 3 2 1; into 4 2 1")


def a_record_that_fails() -> str | None:
    """The seal's record fails: its event then says "done", and nothing is known."""
    scene = Scene(seal_frees=1)
    scene.play("into 0 0 1; into 1 1 1; free 1; free 0; stats")
    scene.gpu.fail("cuEventRecord", error=INVALID, times=2)
    scene.play("seal; stats")
    scene.gpu.clear_faults()
    return scene.end("into 2 2 1; into 3 2 1")


def an_event_whose_record_fails() -> str | None:
    """The same with the program's own event: it says "done", and waiting for it orders nothing."""
    scene = Scene()
    scene.play("into 0 0 1; free 0")
    scene.gpu.fail("cuEventRecord", error=INVALID)
    scene.refused("record 0 0")
    scene.play("query_event 0; wait 0 1; stats")
    return scene.end("into 1 1 1")


def an_event_recorded_in_a_capture() -> str | None:
    """Records and waits inside a capture order nothing outside it."""
    scene = Scene()
    scene.play("into 0 0 1; free 0; stats")
    first = scene.player.streams[0]
    scene.gpu.begin_capture(first, "relaxed")
    scene.refused("record 0 0; wait 0 1; record 1 1; wait 1 0")
    scene.gpu.end_capture(first)
    return scene.end("into 1 1 1")


def a_current_stream() -> str | None:
    """A stream made current inside another: nothing is ordered by that."""
    scene = Scene()
    scene.play("into 0 0 1; free 0")
    one, two = scene.player.streams[:2]
    stream = import_module("allocator.streams.stream").stream  # as it is now, mutated or not
    with stream(one), stream(two):
        scene.pool.allocate(2 * MIB).close()
    return scene.end("stats; into 1 1 1; into 2 1 1")


def a_capture_that_begins_during_a_record() -> str | None:
    """Between "does it capture?" and the record a capture begins: the mark goes into the graph."""
    scene = Scene(seal_frees=1)
    scene.play("into 0 0 1; free 0; stats")
    target = scene.player.streams[0]

    def begin(call: str) -> None:
        if call == "cuEventRecord":
            scene.gpu.before_call = None
            scene.gpu.begin_capture(target, "relaxed")

    scene.gpu.before_call = begin
    scene.play("seal")
    assert scene.gpu.before_call is None, "no record was made"
    scene.gpu.end_capture(target)
    scene.play("stats")
    return scene.end("into 2 2 1; into 3 2 1")


def a_stream_that_captures() -> str | None:
    """A question to a stream that captures would kill the capture."""
    scene = Scene()
    scene.play("into 0 0 1; free 0")
    target = scene.player.streams[0]
    scene.gpu.begin_capture(target, "relaxed")
    scene.play("stats; into 1 1 1; free 1; stats")
    try:
        scene.gpu.end_capture(target)
    except DriverError as error:
        return f"the capture was killed: {error}"
    return scene.end()


def a_query_that_fails() -> str | None:
    """An error is not an answer."""
    scene = Scene()
    scene.play("into 0 0 1; free 0")
    scene.gpu.fail("cuStreamQuery", error="CUDA_ERROR_UNKNOWN")
    scene.play("stats")
    return scene.end("into 1 1 1")


def an_event_query_that_fails() -> str | None:
    """Nor is one from an event."""
    scene = Scene(seal_frees=1)
    scene.play("into 0 0 1; into 1 1 1; free 1; free 0; stats; seal")
    scene.gpu.fail("cuEventQuery", error="CUDA_ERROR_UNKNOWN", times=2)
    scene.play("stats")
    scene.gpu.clear_faults()
    return scene.end("into 2 2 1; into 3 2 1")


def a_free_queued_twice() -> str | None:
    """Two threads close one allocation at the same time, and both append."""
    scene = Scene()
    scene.play("into 0 0 1")
    block = scene.player.blocks[0]
    scene.pool.frees.append((block._block, block._generation, None))
    scene.play("free 0; stats")
    return scene.end("into 1 1 1; free 1; into 2 2 1")


class Mixed(Scene):
    """Two libraries in one pool: one declares its uses, as the words do; the other does not."""

    def __init__(self, **config: Any) -> None:
        super().__init__(uses="auto", **config)

    def theirs(self, slot: int, size: int) -> None:
        """A block of the library that declares nothing, written at once."""
        stream, blocks = self.player.streams[slot], self.player.blocks
        blocks.append(self.pool.allocate(SIZES[size], stream=stream, assumed=True))
        self.player.write(len(blocks) - 1, slot)


def memory_used_undeclared_is_asked_for_by_one_that_declares() -> str | None:
    """Stream 2 has waited for the owner; that the owner itself need not wait for stream 1 is no help to it."""
    scene = Mixed()
    scene.theirs(0, 1)
    scene.play("wait_stream 1 0")
    scene.player.write(0, 1)
    return scene.end("free 0; wait_stream 2 0; into 1 2 1")


def what_is_left_of_two_blocks_that_were_joined() -> str | None:
    """The left one's owner did not own the right one, so it has to wait for those who used that."""
    scene = Mixed(**ONE_PAGE)
    scene.theirs(1, 0)
    scene.theirs(0, 0)
    scene.play("free 0; stats; wait_stream 0 1; wait_stream 2 0")
    scene.player.write(1, 2)
    scene.play("free 1; quiet 0 2; wait_stream 1 0")
    return scene.end("alloc 1 3")


class Twin:
    """A stream object that compares equal to every other one that has its handle, as CuPy's do."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Twin) and self.handle == other.handle

    def __hash__(self) -> int:
        return hash(self.handle)


def two_streams_that_compare_equal() -> str | None:
    """A blocking stream is destroyed, idle; a non-blocking one gets its handle, and an equal object."""
    scene = Scene(("legacy", "nb"))
    gpu, pool = scene.gpu, scene.pool
    with gpu.scope():
        handle = gpu.stream_create(non_blocking=False, priority=0)
    old = Twin(handle)
    pool.allocate(2 * MIB, stream=old).close()
    pool.stats()
    pool.trim()
    with gpu.scope():
        gpu.stream_destroy(handle)
        assert gpu.stream_create(non_blocking=True, priority=0) == handle
    new = Twin(handle)
    taken = pool.allocate(2 * MIB, stream=new)
    gpu.launch(new, writes=[taken])
    taken.close()
    return scene.end("query 0; into 0 1 1")  # legacy's yes proves blocking streams idle, and not this one


class Passing:
    """An object for a stream that it does not own."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


def a_living_stream_whose_object_goes() -> str | None:
    """A block lives on a stream known by its handle, while an object for the same stream comes and goes."""
    scene = Scene(("nb", "nb"))
    gpu, pool = scene.gpu, scene.pool
    with gpu.scope():
        handle = gpu.stream_create(non_blocking=True, priority=0)
    kept = pool.allocate(2 * MIB, stream=handle)
    pool.allocate(2 * MIB, stream=Passing(handle)).close()
    pool.stats()
    gpu.launch(handle, writes=[kept])
    kept.close()
    pool.stats()
    return scene.end("into 0 0 1; into 1 0 1")


def an_allocation_on_the_null_stream() -> str | None:
    """Its misses put no barrier before and behind all blocking streams: no event is recorded on legacy for them."""
    gpu = SimDevice()
    with CachingAllocator(gpu) as pool:
        with gpu.scope():
            gpu.stream_create(non_blocking=False, priority=0)
        gpu.hold(LEGACY)
        held = [pool.allocate(512 * n, stream=LEGACY) for n in range(1, 30)]
        for n in range(30, 60):
            held.pop(0).close()
            held.append(pool.allocate(512 * n, stream=LEGACY))
        recorded = gpu.calls["cuEventRecord"]
        gpu.resume(LEGACY)
        return f"{recorded} records on legacy" if recorded else None


def a_stream_of_another_device() -> str | None:
    """It has the number of a stream of this one, whose memory is in flight."""
    gpu, other = SimDevice(), SimDevice(ordinal=1)
    mine, theirs = Stream(gpu), Stream(other)
    with CachingAllocator(gpu, Config(uses="declared")) as pool:
        first, second = (pool.allocate(2 * MIB, stream=mine) for _ in range(2))
        gpu.launch(mine, writes=[first])
        first.close()
        pool.allocate(5 * MIB, stream=mine).close()
        try:
            found = pool.front.fetch(MIB + 512, theirs.line, False)
            if found is not None:
                pool.put_down((found, found.generation, None))
                return f"a stream of {other.label} was given {found!r}"
        finally:
            second.close()
    return None


def an_event_forgotten_while_it_is_waited_for() -> str | None:
    """So many marks are made on a busy stream that some are forgotten, while a thread makes a stream wait for one."""
    gpu = SimDevice()
    first, second, third = (Stream(gpu) for _ in range(3))
    with CachingAllocator(gpu, Config(uses="declared", limit=2 * MIB, wait_on_demand=False)) as pool:
        sealing, registry = pool._sealing, pool._registry
        block = pool.allocate(2 * MIB, stream=first)
        gpu.launch(first, 1000, writes=[block])
        block.close()
        pool.stats()
        for _ in range(2):
            sealing.seal(first.line)
        waited = first.line.in_flight[1]
        waited.users += 1

        def others(call: str) -> None:
            if call == "cuStreamWaitEvent":
                gpu.before_call = None
                for _ in range(MOST_MARKS - 1):  # with the last one they are thinned out
                    sealing.seal(first.line)
                sealing.seal(third.line)  # it is idle: an event on it is complete at once

        gpu.before_call = others
        waits = sealing.make_wait(second.line, [waited])
        with registry.lock:
            registry.recycle(waited)
        block = pool.allocate(2 * MIB, stream=second)
        gpu.launch(second, 1000, writes=[block])
        block.close()
        gpu.run_until_idle()
        return str(gpu.races[0]) if gpu.races else None if waits else "no wait was made"


def a_mark_given_up_before_it_is_told_what_it_proves() -> str | None:
    """Another thread has found that its event fails, or has forgotten it: it will never say that anything is over."""
    gpu = SimDevice()
    stream, blocking = Stream(gpu), Stream(gpu, non_blocking=False)
    with CachingAllocator(gpu, Config(uses="declared")) as pool:
        registry = pool._registry
        for one in (stream, blocking):
            block = pool.allocate(MIB, stream=one)
            gpu.launch(one, 1000, writes=[block])
            block.close()
        pool.stats()

        class Meanwhile(Sealing):
            def seal(self, line: Timeline, given: int | None = None) -> Sealed | None:
                sealed = super().seal(line, given)
                assert sealed is not None
                with registry.lock:
                    line.void(sealed)
                    sealed.done = True
                return sealed

        unknown = registry.new_graph_line()
        with registry.lock:
            unknown.close_seqno()
        sealing = Meanwhile(registry)
        told = sealing.identify(unknown, stream.line)
        sealing.seal_legacy()
        for line in (unknown, blocking.line):
            if line.completed >= line.closed:
                return f"{line!r} counts as over"
        return "nobody will ever say that it is over" if told else None


SCENES: Final[dict[str, Callable[[], str | None]]] = {
    scene.__name__: scene
    for scene in (
        a_wait_that_fails,
        two_events_that_are_one,
        a_stream_that_waits_after_it_was_sealed,
        an_event_whose_wait_fails,
        a_record_that_fails,
        an_event_whose_record_fails,
        an_event_recorded_in_a_capture,
        a_current_stream,
        an_allocation_on_the_null_stream,
        a_stream_of_another_device,
        a_capture_that_begins_during_a_record,
        a_stream_that_captures,
        a_query_that_fails,
        a_free_queued_twice,
        an_event_query_that_fails,
        two_streams_that_compare_equal,
        a_living_stream_whose_object_goes,
        memory_used_undeclared_is_asked_for_by_one_that_declares,
        what_is_left_of_two_blocks_that_were_joined,
        an_event_forgotten_while_it_is_waited_for,
        a_mark_given_up_before_it_is_told_what_it_proves,
    )
}

"""What CuPy's own streams and events tell us, by wrapping their methods.

    seeing     every stream that CuPy makes, makes current, records on or waits on gets a timeline: any of them may use
               memory that was never declared (R3); also the stream of a library that takes an array over, through
               DLPack or the CUDA array interface.  Never off while memory of ours lives
    learning   marks and waits of the program let memory serve other streams sooner (R5): an event of ours is recorded
               beside the program's, just before it, and waited for beside it.  May be off
    captures   begin and end, so that nothing touches a captured stream (R10), and its memory stays the graph's

A record that we never saw cannot mislead us: what is believed is our own event alone.  `Device.synchronize`, and
whoever calls the runtime from C, cannot be seen.
Longer than other modules: every wrapper is a few lines around the same question, which stream is that, and the order of
those lines is the rule.
Next: installation.py.  Arguments: docs/ordering.md, R3, R5 and R10.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from allocator.devices import PER_THREAD, Device
from allocator.errors import AllocatorError, DriverError, Reentered, StreamCapturing
from allocator.integrations.cupy.lease import Latest
from allocator.integrations.cupy.memory import Memory
from allocator.streams import Capture, GraphToken, Kind, Registry, Sealed, Sealing, Timeline, target

_log = logging.getLogger("allocator")
MOST_BESIDE = 64
"""Events of ours on one stream at most, for the program's records: beyond them nothing is learnt for a while."""
_MARK = "_weir"
"""Attribute of a CuPy event: what its last record that we saw stands for.  Of a stream: its timeline, if it has one of
its own."""


class Beside:
    """An event of ours, recorded just before the program's."""

    __slots__ = ("line", "registry", "sealed")

    def __init__(self, registry: Registry, line: Timeline, sealed: Sealed | None) -> None:
        self.registry = registry
        self.line = line
        self.sealed = sealed


class Classes:
    """The classes that are watched: CuPy's, or stand-ins with the same methods."""

    def __init__(
        self,
        stream: Any,
        event: Any,
        current_stream: Callable[[], Any],
        *,
        memory_hook: Any = None,
        runtime: Any = None,
        array: Any = None,
    ) -> None:
        self.stream = stream
        self.current_stream = current_stream
        """What the library itself takes where no stream is named."""
        self.event = event
        self.array = array
        self.memory_hook = memory_hook
        self.runtime = runtime


class Watch:
    """Wraps the methods, once for a process.

    device_of: the device that a stream belongs to; None if there is no telling.
    device_now: that of the stream on which memory is asked for now, which need not be CuPy's own current one.
    captures_known: is CuPy the only library here that can capture (R6)?
    latest: told of each stream that is made current, which is mostly the one on which memory is asked for next.
    """

    def __init__(
        self,
        classes: Classes,
        device_of: Callable[[Any], Device | None],
        device_now: Callable[[], Device | None],
        captures_known: Callable[[], bool],
        on_hook_use: Callable[[], None] = lambda: None,
        latest: Latest | None = None,
    ) -> None:
        self._latest = Latest() if latest is None else latest
        self._classes = classes
        self._device_of = device_of
        self._device_now = device_now
        self._captures_known = captures_known
        self._current_stream = classes.current_stream
        self._on_hook_use = on_hook_use
        self.learning = True
        self._originals: list[tuple[Any, str, Any]] = []
        self._unknown: list[tuple[weakref.ref[Any], Registry, Timeline]] = []
        self._late: deque[weakref.ref[Any]] = deque()
        """Streams that a finaliser inside our own locked section made or used: seen at the next call."""
        self._immortal: list[GraphToken] = []
        """Of graphs whose end cannot be learnt: what they use is theirs for ever."""

    # -- on and off --------------------------------------------------------------------------------

    @property
    def on(self) -> bool:
        """Are the methods wrapped?"""
        return bool(self._originals)

    def start(self) -> None:
        """Wrap the methods, and see every stream there is already.  Twice is harmless."""
        if self.on:
            return
        stream, event = self._classes.stream, self._classes.event
        setattr(stream, _MARK, None)  # of those that have not been seen
        self._originals.append((stream, _MARK, None))
        self._wrap(stream, "__init__", self._after_init)
        self._wrap_use(stream, "__enter__")
        self._wrap_use(stream, "use")
        self._wrap(stream, "record", self._stream_record)
        self._wrap(stream, "wait_event", self._wait_event)
        self._wrap(stream, "synchronize", self._stream_synchronize)
        self._wrap(stream, "begin_capture", self._begin_capture)
        self._wrap(stream, "end_capture", self._end_capture)
        self._wrap(event, "record", self._event_record)
        self._wrap(event, "synchronize", self._event_synchronize)
        if self._classes.memory_hook is not None:
            self._wrap(self._classes.memory_hook, "__enter__", self._hook_enter)
        if self._classes.runtime is not None:
            self._wrap(self._classes.runtime, "streamBeginCapture", self._raw_begin_capture)
            self._wrap(self._classes.runtime, "streamEndCapture", self._raw_end_capture)
        if self._classes.array is not None:
            self._wrap(self._classes.array, "__dlpack__", self._dlpack)
            self._wrap_interface(self._classes.array)
        hooks = self._classes.memory_hook
        hidden = gc.get_freeze_count() > 0  # Python 3.12 and later freeze a few objects of their own when they start
        for found in gc.get_objects():  # made before us, perhaps used by name only
            if found is stream:
                hidden = False  # a freeze hides whatever there is: it was before the class, so before its streams
            kind = type(found)
            if issubclass(kind, stream):
                self.see(found)
            elif hooks is not None and issubclass(kind, hooks):
                self._on_hook_use()
        if hidden:
            self._gate_what_is_frozen()
            if hooks is not None:
                self._on_hook_use()

    def stop(self) -> None:
        """Put the methods back.  Only when no memory of ours is left that an unseen stream could use."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        own = vars(owner).get(name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapper)
        self._originals.append((owner, name, own))

    def _wrap_use(self, owner: Any, name: str) -> None:
        """As `_wrap`, for what programs do all the time: a stream that has been seen costs a look, and no more."""
        original = getattr(owner, name)
        own = vars(owner).get(name)
        latest, late, unknown = self._latest, self._late, self._unknown

        @functools.wraps(original)
        def wrapper(stream: Any) -> Any:
            result = original(stream)
            line: Timeline | None
            try:
                line = stream._weir
            except AttributeError:  # the methods have been put back, and somebody has kept this one
                line = None
            if line is not None and line.owner is stream and not line.ended and not late and not unknown:
                latest.line = line
                return result
            self._used(stream)
            return result

        setattr(owner, name, wrapper)
        self._originals.append((owner, name, own))

    def _wrap_interface(self, array: Any) -> None:
        """`__cuda_array_interface__` is an attribute, not a method: a property in front of it."""
        name = "__cuda_array_interface__"
        original = getattr(array, name)

        def read(instance: Any) -> Any:
            self._exported(instance, None)
            return original.__get__(instance, type(instance))

        self._originals.append((array, name, vars(array).get(name)))
        setattr(array, name, property(read))

    # -- seeing ------------------------------------------------------------------------------------

    def see(self, stream: Any) -> tuple[Registry, Timeline] | None:
        """The stream's timeline; None if it cannot be told, which gates everything that it might use.

        Driver calls: none for an object seen before, and those of `Registry.resolve` at first sight.  Never raises.
        """
        if self._late:
            self.catch_up()
        registry: Registry | None = None
        try:
            device = self._device_of(stream)
            if device is None:
                return None
            registry = Registry.of(device)
            line = registry.owners.get(id(stream))
            if line is None or line.owner is not stream or line.ended:
                if registry.captures.all_known is not self._captures_known:
                    registry.captures.all_known = self._captures_known
                line = registry.resolve(stream)
        except Reentered:
            self._late.append(weakref.ref(stream))
            return None
        except AllocatorError as error:
            self._could_not_see(stream, registry, error)
            return None
        except (TypeError, ValueError):  # a stream that has been closed: it has no handle, so no work can be added
            return None
        if line.owner is stream and getattr(stream, _MARK, None) is not line:
            with contextlib.suppress(AttributeError):
                setattr(stream, _MARK, line)
        if self._unknown:
            self._identify(stream, registry, line)
        return registry, line

    def catch_up(self) -> None:
        """See what could not be seen when it was made, from inside our own locked section.  Before memory may move."""
        for _ in range(len(self._late)):
            try:
                stream = self._late.popleft()()
            except IndexError:  # another thread took the last
                return
            if stream is not None:
                self.see(stream)

    def _gate_what_is_frozen(self) -> None:
        """`gc.freeze()` hides objects from us, streams perhaps among them: then somebody unknown may use anything."""
        device = self._device_now()
        if device is not None:
            _log.warning("gc.freeze() hides the streams made before it: call allocator.cupy.install() first")
            Registry.of(device).new_unknown_line()

    def _could_not_see(self, stream: Any, registry: Registry | None, error: AllocatorError) -> None:
        if registry is None or registry.forked or registry.lost is not None:
            return  # nothing of ours is handed out any more
        if not isinstance(error, StreamCapturing):
            _log.warning("a stream cannot be identified (%s): memory stays with its owners until it can", str(error))
        if any(ref() is stream for ref, _, _ in self._unknown):
            return
        self._unknown.append((weakref.ref(stream), registry, registry.new_unknown_line()))

    def _identify(self, stream: Any, registry: Registry, line: Timeline) -> None:
        for entry in list(self._unknown):
            if entry[0]() is stream and entry[1] is registry and Sealing(registry).identify(entry[2], line):
                self._unknown.remove(entry)

    def _after_init(self, original: Callable[..., Any], stream: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(stream, *args, **kwargs)
        seen = self.see(stream)
        if seen is not None and (seen[0].finished or seen[0].unended):
            with contextlib.suppress(Reentered):
                Sealing(seen[0]).end_finished()  # a program that makes streams for ever lets go of as many
        return result

    def _used(self, stream: Any) -> None:
        seen = self.see(stream)
        if seen is not None:
            self._ask_borrowed(*seen, stream)

    @staticmethod
    def _ask_borrowed(registry: Registry, line: Timeline, stream: Any) -> None:
        """A stream that nobody here owns can be asked and sealed only while its handle is given to us: now (R9)."""
        if line.owner is not None or line.kind not in (Kind.BLOCKING, Kind.NON_BLOCKING):
            return
        if line.completed >= line.closed:
            return
        with contextlib.suppress(Reentered):
            sealing, given = Sealing(registry), _handle(registry, stream)
            if not sealing.query(line, given):
                sealing.seal(line, given)

    def _dlpack(self, original: Callable[..., Any], array: Any, *args: Any, **kwargs: Any) -> Any:
        self._exported(array, kwargs.get("stream", args[0] if args else None))
        return original(array, *args, **kwargs)

    def _exported(self, array: Any, handle: Any) -> None:
        """Another library is given the array, to be used on the stream `handle`, or on its own current one."""
        memory = array.data.mem
        if not isinstance(memory, Memory) or not memory.ptr:
            return
        registry = Registry.of(memory.pool.device)
        stream = _torchs(memory.device_id, handle)
        if stream is None and isinstance(handle, int) and handle > 2:
            stream = handle
        if stream is not None:
            try:
                registry.resolve(stream)
            except (AllocatorError, TypeError, ValueError) as error:
                if not registry.forked and registry.lost is None:
                    _log.warning("the stream that takes over an array cannot be identified: %s", str(error))
                    registry.new_unknown_line()  # whatever it may use stays with its owners

    def _hook_enter(self, original: Callable[..., Any], hook: Any) -> Any:
        self._on_hook_use()
        return original(hook)

    # -- learning ----------------------------------------------------------------------------------

    def _note_record(self, event: Any, stream: Any) -> None:
        """The program is about to record `event` on `stream`: record ours first, so that its wait covers ours (R5)."""
        note: Beside | Capture | None = None
        seen = self.see(stream)
        if seen is not None:
            registry, line = seen
            capture = registry.captures.active.get(line.number) if registry.captures.active else None
            if capture is not None:
                note = capture  # whoever waits for it joins (R10)
            elif registry.lost is None and not registry.forked:
                with contextlib.suppress(Reentered):
                    if self.learning:
                        note = Beside(registry, line, self._seal(registry, line, stream))
                    else:
                        self._ask_borrowed(registry, line, stream)
        # Before the record: whatever becomes of it, the old note is not what the event stands for.
        if event is not None:
            setattr(event, _MARK, note)

    @staticmethod
    def _seal(registry: Registry, line: Timeline, stream: Any) -> Sealed | None:
        """An event of ours on the stream; None where the host is so far ahead that they would pile up (S13)."""
        sealing = Sealing(registry)
        if len(line.in_flight) >= MOST_BESIDE // 4:
            sealing.poll([line])
            if len(line.in_flight) >= MOST_BESIDE:
                return None
        registry.before_mark()
        return sealing.seal(line, _handle(registry, stream))

    def _stream_record(self, original: Callable[..., Any], stream: Any, event: Any = None) -> Any:
        if event is None:
            event = self._classes.event()  # as the original would: so that there is something to note it on
        self._note_record(event, stream)
        return original(stream, event)

    def _event_record(self, original: Callable[..., Any], event: Any, stream: Any = None) -> Any:
        self._note_record(event, self._current_stream() if stream is None else stream)
        return original(event, stream)

    def _wait_event(self, original: Callable[..., Any], stream: Any, event: Any) -> Any:
        seen = self.see(stream)
        note = getattr(event, _MARK, None)
        if seen is None:
            return original(stream, event)
        registry, line = seen
        if isinstance(note, Capture):
            return self._join(original, stream, event, registry, line, note)
        result = original(stream, event)
        self._ask_borrowed(registry, line, stream)
        if (
            note is not None
            and self.learning
            and note.registry is registry
            and note.line is not line
            and note.sealed is not None
        ):
            with contextlib.suppress(Reentered):
                self._wait_beside(registry, line, note.sealed, _handle(registry, stream))
        return result

    def _wait_beside(self, registry: Registry, line: Timeline, sealed: Sealed, given: int | None) -> None:
        with registry.lock:
            if sealed.done or line.clock.joined(sealed.clock) == line.clock:
                return  # known to all, or to this stream, already
            sealed.users += 1
        try:
            Sealing(registry).make_wait(line, [sealed], given)
        finally:
            with registry.lock:
                registry.recycle(sealed)

    def _stream_synchronize(self, original: Callable[..., Any], stream: Any) -> Any:
        seen = self.see(stream) if self.learning else None
        if seen is None or seen[0].captures.active:
            return original(stream)
        registry, line = seen
        try:
            registry.before_mark()
            points = registry.close_for(line)  # before the wait (R4)
        except Reentered:
            return original(stream)
        result = original(stream)
        registry.mark(points)
        with contextlib.suppress(Reentered):
            registry.host_waited()
        return result

    def _event_synchronize(self, original: Callable[..., Any], event: Any) -> Any:
        result = original(event)
        note = getattr(event, _MARK, None)
        if self.learning and isinstance(note, Beside) and note.sealed is not None and not note.sealed.done:
            with contextlib.suppress(Reentered):
                Sealing(note.registry).poll([note.line])  # the program's event proves nothing: ours is asked (R5)
                note.registry.host_waited()
        return result

    # -- captures ----------------------------------------------------------------------------------

    def _join(
        self,
        original: Callable[..., Any],
        stream: Any,
        event: Any,
        registry: Registry,
        line: Timeline,
        capture: Capture,
    ) -> Any:
        captures = registry.captures
        before = line.number in captures.active
        joined = captures.join(capture, line, int(stream.ptr))
        try:
            return original(stream, event)
        except BaseException:
            if joined and not before:
                captures.leave(capture, line)
            raise

    def _begin_capture(self, original: Callable[..., Any], stream: Any, mode: Any = None) -> Any:
        seen = self.see(stream)
        if seen is None or seen[1] is seen[0].legacy or seen[1].number in seen[0].captures.active:
            return original(stream, mode)  # the driver says what is wrong with it
        registry, line = seen
        self._tidy(registry)
        capture = registry.captures.begin(line, int(stream.ptr))
        try:
            return original(stream, mode)
        except BaseException:
            registry.captures.end(capture)  # no graph will come of it
            raise

    @staticmethod
    def _tidy(registry: Registry) -> None:
        """A program that captures for ever, and lets its graphs go, leaves as little as one that captures once."""
        captures = registry.captures
        if captures.gone or captures.dying:
            sealing = Sealing(registry)
            sealing.end_finished()
            sealing.close_context()

    def _end_capture(self, original: Callable[..., Any], stream: Any) -> Any:
        seen = self.see(stream)
        capture = seen[0].captures.active.get(seen[1].number) if seen is not None else None
        if seen is None or capture is None:
            return original(stream)
        kept_by_graph = getattr(stream, "_graph_host_funcargs", None)
        return self._finish(seen[0], capture, stream, functools.partial(original, stream), kept_by_graph)

    def _finish(
        self, registry: Registry, capture: Capture, stream: Any, end: Callable[[], Any], kept_by_graph: list[Any] | None
    ) -> Any:
        """End a capture.  kept_by_graph: a list that lives exactly as long as the graph; None: there is none."""
        try:
            graph = end()
        except BaseException:
            if not _captures(registry, stream):  # after some mistakes of the program it still does
                registry.captures.end(capture)
            raise
        token = registry.captures.end(capture)
        held = getattr(graph, "host_funcargs", None)
        if isinstance(held, list) and held is kept_by_graph:
            held.append(token)
        else:
            self._immortal.append(token)
        return graph

    def _raw_begin_capture(self, original: Callable[..., Any], handle: int, mode: int) -> Any:
        registry = self._registry_now()
        if registry is None or registry.forked:
            return original(handle, mode)
        try:
            line, _ = target(registry.device, int(handle))
        except (AllocatorError, TypeError, ValueError):
            return original(handle, mode)
        if line is registry.legacy or line.number in registry.captures.active:
            return original(handle, mode)
        self._tidy(registry)
        capture = registry.captures.begin(line, int(handle))
        try:
            return original(handle, mode)
        except BaseException:
            registry.captures.end(capture)
            raise

    def _raw_end_capture(self, original: Callable[..., Any], handle: int) -> Any:
        registry = self._registry_now()
        line = None
        if registry is not None:
            special = int(handle) == PER_THREAD  # which means another stream in every thread
            line = registry.per_thread_if_known() if special else registry.captures.by_handle.get(int(handle))
        capture = registry.captures.active.get(line.number) if registry is not None and line is not None else None
        if registry is None or capture is None:
            return original(handle)
        return self._finish(registry, capture, int(handle), functools.partial(original, handle), None)

    def _registry_now(self) -> Registry | None:
        device = self._device_of(self._current_stream())
        return None if device is None else Registry.of(device)


def _handle(registry: Registry, stream: Any) -> int | None:
    """The handle that the running call was given: alive for its length (R9)."""
    return target(registry.device, stream)[1]


def _torchs(device: int, handle: Any) -> Any:
    """PyTorch's current stream of the device, if it is the one meant: its streams live for ever, handles need not."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    stream = torch.cuda.current_stream(device)
    return stream if stream.cuda_stream and handle in (None, -1, stream.cuda_stream) else None


def _captures(registry: Registry, stream: Any) -> bool:
    """Is the stream still capturing?  False where that cannot be asked."""
    try:
        handle = int(getattr(stream, "ptr", stream))
        with registry.device.scope():
            return registry.capturing(handle)
    except (DriverError, TypeError, ValueError):
        return False

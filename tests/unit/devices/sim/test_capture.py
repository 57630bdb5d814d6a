"""What one call does to a capture: the measured tables, row by row (R10)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from allocator.devices import LEGACY, PER_THREAD, Capture, SimDevice
from allocator.errors import DriverError
from tests.unit.devices.sim.words import Elsewhere, Words

MODES = ("global", "thread_local", "relaxed")
CASES = list(itertools.product(MODES, ("same", "other")))


@dataclass
class Scene:
    """Everything the table's calls need, made before the capture begins."""

    gpu: SimDevice
    capturing: int
    other: int
    outside: int
    spare: int
    inside: int
    ptr: int
    range: int
    handle: int


@pytest.fixture
def scene(gpu: SimDevice, words: Words) -> Scene:
    range_ = gpu.mem_address_reserve(gpu.granularity * 4)
    handle = gpu.mem_create(gpu.granularity)
    other = words.stream()
    return Scene(
        gpu,
        capturing=words.stream(),
        other=other,
        outside=words.recorded(other),
        spare=gpu.event_create(),
        inside=gpu.event_create(),
        ptr=gpu.mem_alloc(512),
        range=range_,
        handle=handle,
    )


def create_and_map(x: Scene) -> None:
    x.gpu.mem_map(x.range, x.gpu.granularity, x.handle)
    x.gpu.mem_set_access(x.range, x.gpu.granularity)
    x.gpu.mem_unmap(x.range, x.gpu.granularity)
    x.gpu.mem_release(x.handle)
    x.gpu.mem_create(x.gpu.granularity)


def enter_a_scope(x: Scene) -> None:
    with x.gpu.scope():
        x.gpu.event_query(x.outside)


def make_and_end_a_stream(x: Scene) -> None:
    x.gpu.stream_destroy(x.gpu.stream_create(non_blocking=True, priority=0))


UNSAFE: dict[str, Callable[[Scene], object]] = {
    "cuEventQuery of an outside event": lambda x: x.gpu.event_query(x.outside),
    "cuEventSynchronize of an outside event": lambda x: x.gpu.event_synchronize(x.outside),
    "wait_any": lambda x: x.gpu.wait_any([x.outside], 0.0),
    "cuStreamQuery of another stream": lambda x: x.gpu.stream_query(x.other),
    "cuStreamQuery of an idle legacy": lambda x: x.gpu.stream_query(LEGACY),
    "cuStreamSynchronize of another stream": lambda x: x.gpu.stream_synchronize(x.other),
    "cuMemAlloc": lambda x: x.gpu.mem_alloc(512),
    "cuMemFree": lambda x: x.gpu.mem_free(x.ptr),
}
NEVER: dict[str, Callable[[Scene], object]] = {
    "cuEventQuery of an inside event": lambda x: x.gpu.event_query(x.inside),
    "cuEventSynchronize of an inside event": lambda x: x.gpu.event_synchronize(x.inside),
    "cuStreamGetId": lambda x: x.gpu.stream_id(x.capturing),
    "cuStreamGetFlags": lambda x: x.gpu.stream_is_blocking(x.capturing),
    "cuStreamQuery": lambda x: x.gpu.stream_query(x.capturing),
    "cuStreamSynchronize": lambda x: x.gpu.stream_synchronize(x.capturing),
    "a wait put on it for an outside event": lambda x: x.gpu.stream_wait_event(x.capturing, x.outside),
    "cuCtxSynchronize": lambda x: x.gpu.ctx_synchronize(),
    "cuCtxRecordEvent": lambda x: x.gpu.ctx_record_event(x.spare),
}
ALWAYS: dict[str, Callable[[Scene], object]] = {
    "cuEventRecord on another stream": lambda x: x.gpu.event_record(x.spare, x.other),
    "cuEventRecord on legacy": lambda x: x.gpu.event_record(x.spare, LEGACY),
    "cuStreamWaitEvent of another stream": lambda x: x.gpu.stream_wait_event(x.other, x.outside),
    "virtual memory": create_and_map,
    "cuStreamIsCapturing": lambda x: x.gpu.stream_is_capturing(x.capturing),
    "cuStreamIsCapturing of legacy": lambda x: x.gpu.stream_is_capturing(LEGACY),
    "event create and destroy": lambda x: x.gpu.event_destroy(x.gpu.event_create()),
    "stream create, destroy": make_and_end_a_stream,
    "cuStreamGetId of another stream": lambda x: x.gpu.stream_id(x.other),
    "cuStreamGetId of the per-thread stream": lambda x: x.gpu.stream_id(PER_THREAD),
    "cuMemGetInfo": lambda x: x.gpu.mem_get_info(),
    "cuMemAddressReserve": lambda x: x.gpu.mem_address_reserve(x.gpu.granularity),
    "a scope": enter_a_scope,
}


def outcome(scene: Scene, mode: str, call: Callable[[Scene], object], caller: str, run: Elsewhere, own: str) -> str:
    """Capture in `mode`, make the call from `caller` in a thread whose mode is `own`; what became of the capture."""
    gpu = scene.gpu

    def make() -> object:
        with gpu.program_scope(own):
            return call(scene)

    gpu.begin_capture(scene.capturing, mode)
    gpu.event_record(scene.inside, scene.capturing)
    failed = False
    try:
        if caller == "same":
            make()
        else:
            run(make)
    except DriverError as error:
        assert not error.sticky
        failed = True
    state = gpu.stream_is_capturing(scene.capturing)
    assert state is (Capture.INVALIDATED if failed else Capture.ACTIVE)  # what fails kills, and only that
    if failed:
        with pytest.raises(DriverError, match="INVALIDATED"):
            gpu.end_capture(scene.capturing)
    else:
        gpu.end_capture(scene.capturing)
    assert gpu.stream_is_capturing(scene.capturing) is Capture.NONE
    return "KILLS" if failed else "ok"


@pytest.mark.parametrize("call", UNSAFE)
@pytest.mark.parametrize(("mode", "caller"), CASES)
def test_r10_an_unsafe_call_kills_by_mode_and_thread(
    scene: Scene, elsewhere: Elsewhere, mode: str, caller: str, call: str
) -> None:
    kills = mode == "global" or (mode == "thread_local" and caller == "same")
    assert outcome(scene, mode, UNSAFE[call], caller, elsewhere, "global") == ("KILLS" if kills else "ok")


@pytest.mark.parametrize("call", UNSAFE)
@pytest.mark.parametrize(("mode", "caller"), CASES)
def test_r10_a_relaxed_thread_kills_nothing_with_it(
    scene: Scene, elsewhere: Elsewhere, mode: str, caller: str, call: str
) -> None:
    assert outcome(scene, mode, UNSAFE[call], caller, elsewhere, "relaxed") == "ok"


@pytest.mark.parametrize("call", NEVER)
@pytest.mark.parametrize("own", ["global", "relaxed"])
@pytest.mark.parametrize(("mode", "caller"), CASES)
def test_r10_some_calls_kill_always(
    scene: Scene, elsewhere: Elsewhere, mode: str, caller: str, own: str, call: str
) -> None:
    assert outcome(scene, mode, NEVER[call], caller, elsewhere, own) == "KILLS"


@pytest.mark.parametrize("call", ALWAYS)
@pytest.mark.parametrize(("mode", "caller"), CASES)
def test_r10_some_calls_never_kill(scene: Scene, elsewhere: Elsewhere, mode: str, caller: str, call: str) -> None:
    assert outcome(scene, mode, ALWAYS[call], caller, elsewhere, "global") == "ok"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.gpu.event_record(x.spare, LEGACY),
        lambda x: x.gpu.stream_wait_event(LEGACY, x.outside),
        lambda x: x.gpu.stream_query(LEGACY),
        lambda x: x.gpu.stream_synchronize(LEGACY),
        lambda x: x.gpu.stream_id(LEGACY),
        lambda x: x.gpu.launch(LEGACY),
    ],
)
def test_r6_calls_on_legacy_kill_the_capture_of_a_blocking_stream(
    scene: Scene, words: Words, elsewhere: Elsewhere, mode: str, call: Callable[[Scene], object]
) -> None:
    scene.capturing = words.blocking()
    assert outcome(scene, mode, call, "same", elsewhere, "relaxed") == "KILLS"


def test_r6_asking_whether_legacy_captures_errors_and_harms_nothing(gpu: SimDevice, words: Words) -> None:
    s = words.blocking()
    gpu.begin_capture(s)
    with pytest.raises(DriverError, match="IMPLICIT"):
        gpu.stream_is_capturing(LEGACY)
    assert gpu.stream_is_capturing(s) is Capture.ACTIVE
    gpu.end_capture(s)
    assert gpu.stream_is_capturing(LEGACY) is Capture.NONE


def test_an_event_query_for_another_device_kills_a_global_capture(gpu: SimDevice, words: Words) -> None:
    other = SimDevice(ordinal=1)
    with other.scope():
        event = other.event_create()
    s = words.stream()
    gpu.begin_capture(s)
    with pytest.raises(DriverError), other.program_scope():
        other.event_query(event)
    assert gpu.stream_is_capturing(s) is Capture.INVALIDATED


def test_a_context_wide_call_of_another_device_harms_nothing(gpu: SimDevice, words: Words) -> None:
    other = SimDevice(ordinal=1)
    s = words.stream()
    gpu.begin_capture(s)
    with other.scope():
        other.ctx_synchronize()
    gpu.end_capture(s)


def test_an_event_of_a_capture_is_invalid_afterwards_until_it_is_recorded_again(gpu: SimDevice, words: Words) -> None:
    s, t, event = words.stream(), words.stream(), gpu.event_create()
    gpu.begin_capture(s)
    gpu.event_record(event, s)
    gpu.end_capture(s)
    for call in (gpu.event_query, gpu.event_synchronize, lambda e: gpu.stream_wait_event(t, e)):
        with pytest.raises(DriverError, match="INVALID_VALUE"):
            call(event)
    gpu.event_record(event, s)
    assert gpu.event_query(event)


def test_a_stream_that_waits_for_a_captured_event_joins_and_must_be_joined_back(gpu: SimDevice, words: Words) -> None:
    s, t = words.stream(), words.stream()
    fork, back = gpu.event_create(), gpu.event_create()
    gpu.begin_capture(s)
    gpu.launch(s, 100)
    gpu.event_record(fork, s)
    gpu.stream_wait_event(t, fork)
    assert gpu.stream_is_capturing(t) is Capture.ACTIVE
    gpu.launch(t, 1000)
    gpu.launch(s, 10)
    gpu.event_record(back, t)
    gpu.stream_wait_event(s, back)
    graph = gpu.end_capture(s)
    assert gpu.stream_is_capturing(t) is Capture.NONE
    assert gpu.stream_query(s) and gpu.stream_query(t)  # nothing ran
    graph.launch(s)
    gpu.stream_synchronize(s)
    assert gpu.now_ns == 1100


def test_a_branch_left_open_is_an_error_at_the_end(gpu: SimDevice, words: Words) -> None:
    s, t, fork = words.stream(), words.stream(), gpu.event_create()
    gpu.begin_capture(s)
    gpu.event_record(fork, s)
    gpu.stream_wait_event(t, fork)
    with pytest.raises(DriverError, match="UNJOINED"):
        gpu.end_capture(s)
    assert gpu.stream_is_capturing(s) is Capture.NONE is gpu.stream_is_capturing(t)


def test_records_and_waits_inside_a_capture_order_nothing_outside(gpu: SimDevice, words: Words) -> None:
    s, t = words.stream(), words.stream()
    ptr = words.memory()
    gpu.launch(t, 1000, writes=[(ptr, 512)])
    gpu.begin_capture(s)
    gpu.event_record(gpu.event_create(), s)
    gpu.end_capture(s)
    gpu.hand_out(ptr, 512, "second")
    gpu.launch(s, writes=[(ptr, 512)])
    assert len(gpu.races) == 1


def test_a_replay_accesses_what_was_captured_for_those_who_owned_it_then(gpu: SimDevice, words: Words) -> None:
    s, t = words.stream(), words.stream()
    ptr = words.memory()
    gpu.begin_capture(s)
    gpu.launch(s, writes=[(ptr, 512)])
    graph = gpu.end_capture(s)
    gpu.launch(t, reads=[(ptr, 512)])
    assert not gpu.races
    gpu.hand_out(ptr, 512, "somebody else")  # although the graph still lives
    gpu.launch(t, writes=[(ptr, 512)])
    graph.launch(s)
    assert [(r.first.stream, r.second.stream) for r in gpu.races] == [(t, s)]


def test_a_graph_may_be_destroyed_while_its_replay_runs(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    ptr = words.memory()
    gpu.begin_capture(s)
    gpu.launch(s, 1000, writes=[(ptr, 512)])
    graph = gpu.end_capture(s)
    graph.launch(s)
    graph.close()
    graph.close()
    with pytest.raises(ValueError):
        graph.launch(s)
    assert not gpu.stream_query(s)
    with pytest.raises(DriverError, match="in use"):
        gpu.mem_free(ptr)


def test_a_graph_can_be_launched_into_another_capture(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    gpu.begin_capture(s)
    gpu.launch(s, 700)
    inner = gpu.end_capture(s)
    gpu.begin_capture(s)
    inner.launch(s)
    inner.launch(s)
    outer = gpu.end_capture(s)
    outer.launch(s)
    gpu.stream_synchronize(s)
    assert gpu.now_ns == 1400


def test_a_capture_ends_in_the_thread_that_began_it_unless_relaxed(
    gpu: SimDevice, words: Words, elsewhere: Elsewhere
) -> None:
    s = words.stream()
    gpu.begin_capture(s, "thread_local")
    with pytest.raises(DriverError, match="WRONG_THREAD"):
        elsewhere(lambda: gpu.end_capture(s))
    gpu.end_capture(s)
    gpu.begin_capture(s, "relaxed")
    elsewhere(lambda: gpu.end_capture(s))


def test_legacy_cannot_be_captured_and_a_capture_does_not_begin_twice(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    with pytest.raises(DriverError, match="UNSUPPORTED"):
        gpu.begin_capture(LEGACY)
    with pytest.raises(DriverError, match="ILLEGAL_STATE"):
        gpu.end_capture(s)
    gpu.begin_capture(s)
    with pytest.raises(DriverError, match="ILLEGAL_STATE"):
        gpu.begin_capture(s)
    with pytest.raises(ValueError):
        gpu.begin_capture(s, "loose")
    gpu.end_capture(s)


def test_an_invalid_capture_refuses_more_work_until_it_is_ended(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    gpu.begin_capture(s)
    with pytest.raises(DriverError):
        gpu.ctx_synchronize()
    with pytest.raises(DriverError, match="INVALIDATED"):
        gpu.launch(s)
    with pytest.raises(DriverError, match="INVALIDATED"):
        gpu.event_record(gpu.event_create(), s)
    with pytest.raises(DriverError):
        gpu.end_capture(s)
    gpu.launch(s)


def test_destroying_the_capturing_stream_invalidates_the_capture(gpu: SimDevice, words: Words) -> None:
    s, t, fork = words.stream(), words.stream(), gpu.event_create()
    gpu.begin_capture(s)
    gpu.event_record(fork, s)
    gpu.stream_wait_event(t, fork)
    gpu.stream_destroy(t)
    assert gpu.stream_is_capturing(s) is Capture.INVALIDATED


def test_two_captures_cannot_be_merged(gpu: SimDevice, words: Words) -> None:
    s, t, event = words.stream(), words.stream(), gpu.event_create()
    gpu.begin_capture(s)
    gpu.begin_capture(t)
    gpu.event_record(event, s)
    with pytest.raises(DriverError):
        gpu.stream_wait_event(t, event)
    assert gpu.stream_is_capturing(s) is Capture.INVALIDATED is gpu.stream_is_capturing(t)


def test_a_scope_makes_its_thread_relaxed_and_puts_the_mode_back(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    event = words.recorded(s)
    gpu.begin_capture(words.stream())
    with gpu.program_scope():
        with gpu.scope():
            gpu.event_query(event)
        with pytest.raises(DriverError):
            gpu.event_query(event)

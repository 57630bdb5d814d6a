"""What the driver does with handles, events and memory: the facts behind R4, R8, R9, R13 and the backing.

Ordering between streams: test_driver_ordering.py.  Captures: test_driver_capture.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kernels import done_within
from rig import Rig, error_of

from allocator.devices import LEGACY, PER_THREAD

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


# -- identity (R8, R9) ----------------------------------------------------------------------------


def test_r8_a_stream_handle_is_used_again_and_its_id_is_not(rig: Rig) -> None:
    handles, ids = [], []
    for _ in range(100):
        stream = rig.blocking()
        handles.append(stream)
        ids.append(rig.gpu.stream_id(stream))
        rig.destroy(stream)
    assert len(set(handles)) < 100
    assert len(set(ids)) == 100


def test_r8_a_stream_destroyed_with_work_queued_gives_its_handle_to_the_next(rig: Rig) -> None:
    """Or to a later one, as the host's allocator pleases; and an event recorded before the destroy stays valid and
    completes with the work."""
    destroyed: dict[int, int] = {}
    later: list[int] = []
    recycled = 0
    while not recycled and len(later) < 200:
        old = rig.non_blocking()
        old_id = rig.gpu.stream_id(old)
        latch = rig.hold(old)
        event = rig.recorded(old)
        rig.destroy(old)
        destroyed[old] = old_id
        new = rig.non_blocking()  # kept, so that the next one has to look for another place
        later.append(new)
        recycled += new in destroyed
        assert rig.gpu.stream_id(new) not in destroyed.values()
        assert rig.is_stuck(event)
        latch.release()
        assert rig.finishes(event)
    for stream in later:
        rig.destroy(stream)
    assert recycled > 0


def test_r8_handles_0_and_1_have_one_id(rig: Rig) -> None:
    if os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "0") != "0":
        pytest.skip("the environment makes handle 0 the per-thread stream")
    assert int(rig.cu("cuStreamGetId", 0)) == rig.gpu.stream_id(LEGACY)


def test_r8_handle_2_is_another_stream_in_each_thread(rig: Rig) -> None:
    mine = rig.gpu.stream_id(PER_THREAD)
    others = [rig.in_thread(lambda: rig.gpu.stream_id(PER_THREAD)) for _ in range(4)]
    assert len({mine, rig.gpu.stream_id(LEGACY), *others}) == 6, "thread idents repeat, stream ids do not"
    assert rig.gpu.stream_id(PER_THREAD) == mine


def test_r8_legacy_and_per_thread_streams_are_blocking(rig: Rig) -> None:
    flags = [rig.gpu.stream_is_blocking(s) for s in (LEGACY, PER_THREAD, rig.blocking(), rig.non_blocking())]
    assert flags == [True, True, True, False]


def test_r9_a_record_with_handle_2_lands_on_the_callers_own_stream(rig: Rig) -> None:
    latch = rig.hold(PER_THREAD)
    theirs, mine = rig.event(), rig.event()
    rig.in_thread(lambda: rig.gpu.event_record(theirs, PER_THREAD))
    rig.gpu.event_record(mine, PER_THREAD)
    assert rig.finishes(theirs)
    assert rig.is_stuck(mine)
    latch.release()
    assert rig.finishes(mine)


_DEAD = """
import sys
from allocator.devices import CudaDevice
from allocator.errors import DriverError
gpu = CudaDevice(0)
with gpu.scope():
    dead, alive = (gpu.stream_create(non_blocking=True, priority=0) for _ in range(2))
    event = gpu.event_create()
    gpu.event_record(event, alive)
    gpu.stream_destroy(dead)
    try:
        {call}
        print("no error")
    except DriverError as error:
        print(error.code)
    sys.stdout.flush()
"""


@pytest.mark.parametrize(
    "call",
    [
        "gpu.stream_id(dead)",
        "gpu.stream_is_blocking(dead)",
        "gpu.stream_is_capturing(dead)",
        "gpu.stream_query(dead)",
        "gpu.stream_synchronize(dead)",
        "gpu.event_record(event, dead)",
        "gpu.stream_wait_event(dead, event)",
    ],
)
def test_r9_a_call_on_a_destroyed_handle_kills_the_process_or_fails(rig: Rig, call: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _DEAD.format(call=call)], env=environment, capture_output=True, text=True, timeout=60
    )
    if done.returncode != -signal.SIGSEGV:
        assert done.returncode == 0, done.stderr
        code = done.stdout.strip()
        assert code in ("CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_CONTEXT_IS_DESTROYED", "CUDA_ERROR_INVALID_HANDLE")


# -- events (R4, R5) ------------------------------------------------------------------------------


def test_r4_an_event_never_recorded_counts_as_done_and_a_wait_for_it_orders_nothing(rig: Rig) -> None:
    event, stream = rig.event(), rig.non_blocking()
    assert rig.gpu.event_query(event)
    rig.gpu.event_synchronize(event)
    rig.gpu.stream_wait_event(stream, event)
    assert rig.finishes(rig.recorded(stream))


def test_r4_an_event_whose_record_failed_counts_as_done(rig: Rig) -> None:
    event, stream = rig.event(), rig.blocking()
    with rig.capturing(stream, "RELAXED"):
        assert error_of(lambda: rig.gpu.event_record(event, LEGACY)) is not None
    assert rig.gpu.event_query(event)


def test_r5_a_wait_is_for_the_record_made_before_it_not_for_a_later_one(rig: Rig) -> None:
    held, early, late = rig.non_blocking(), rig.non_blocking(), rig.non_blocking()
    event = rig.recorded(rig.non_blocking())
    rig.gpu.stream_wait_event(early, event)
    latch = rig.hold(held)
    rig.gpu.event_record(event, held)
    rig.gpu.stream_wait_event(late, event)
    assert rig.finishes(rig.recorded(early))
    stuck = rig.recorded(late)
    assert rig.is_stuck(stuck)
    latch.release()
    assert rig.finishes(stuck)


def test_r2_an_event_covers_what_was_queued_before_it_and_nothing_after(rig: Rig) -> None:
    stream = rig.non_blocking()
    before = rig.recorded(stream)
    latch = rig.hold(stream)
    after = rig.recorded(stream)
    assert rig.finishes(before)
    assert rig.is_stuck(after)
    assert not rig.gpu.stream_query(stream)
    latch.release()
    assert rig.finishes(after)
    rig.gpu.stream_synchronize(stream)
    assert rig.gpu.stream_query(stream)


def test_r13_a_destroyed_event_harms_no_wait_for_it(rig: Rig) -> None:
    held, waiting = rig.non_blocking(), rig.non_blocking()
    latch = rig.hold(held)
    event = rig.gpu.event_create()
    rig.gpu.event_record(event, held)
    rig.gpu.stream_wait_event(waiting, event)
    rig.gpu.event_destroy(event)
    stuck = rig.recorded(waiting)
    assert rig.is_stuck(stuck)
    latch.release()
    assert rig.finishes(stuck)


def test_r13_records_and_waits_on_a_stream_with_a_full_queue_do_not_block_the_host(rig: Rig) -> None:
    """So sealing under a lock is fine."""
    held, other = rig.blocking(), rig.non_blocking()
    latch = rig.hold(held)
    for _ in range(900):
        rig.gpu.spin(held, 0)
    outside = rig.recorded(other)
    start = time.monotonic()
    for stream in (held, other, LEGACY):
        event = rig.recorded(stream)
        rig.gpu.stream_wait_event(stream, outside)
        rig.gpu.stream_wait_event(other, event)
    assert time.monotonic() - start < 5.0  # a call that blocked would last until the latch gives up, 20 s
    assert not rig.gpu.stream_query(held)
    latch.release()


# -- memory ---------------------------------------------------------------------------------------


@pytest.fixture
def held(rig: Rig) -> int:
    """A stream that stands still for the whole test."""
    stream = rig.blocking()
    rig.hold(stream)
    return stream


def _map(rig: Rig, ptr: int, nbytes: int) -> int:
    handle = rig.gpu.mem_create(nbytes)
    rig.gpu.mem_map(ptr, nbytes, handle)
    rig.gpu.mem_set_access(ptr, nbytes)
    return handle


def test_granularity_and_the_size_of_a_reservation(rig: Rig) -> None:
    assert rig.gpu.granularity == 2 * MIB
    ptr = rig.gpu.mem_address_reserve(1 << 40)
    assert ptr % rig.gpu.granularity == 0
    rig.gpu.mem_address_free(ptr, 1 << 40)


def test_virtual_memory_calls_do_not_wait_for_a_busy_stream(rig: Rig, held: int) -> None:
    """R13: not even cuMemUnmap, so proving that nobody uses the bytes is ours."""
    ptr = rig.gpu.mem_address_reserve(4 * MIB)
    handle = _map(rig, ptr, 2 * MIB)
    rig.gpu.mem_unmap(ptr, 2 * MIB)
    rig.gpu.mem_map(ptr + 2 * MIB, 2 * MIB, handle)
    rig.gpu.mem_unmap(ptr + 2 * MIB, 2 * MIB)
    rig.gpu.mem_release(handle)
    rig.gpu.mem_address_free(ptr, 4 * MIB)
    assert not rig.gpu.stream_query(held)


def test_creating_and_destroying_does_not_wait_for_a_busy_stream(rig: Rig, held: int) -> None:
    stream = rig.blocking()
    rig.destroy(stream)
    rig.gpu.event_destroy(rig.gpu.event_create())
    ptr = rig.gpu.mem_alloc(MIB)
    pinned = int(rig.cu("cuMemHostAlloc", 4096, 0))
    assert not rig.gpu.stream_query(held)
    rig.release()
    rig.gpu.mem_free(ptr)
    rig.cu("cuMemFreeHost", pinned)


@pytest.mark.parametrize("kind", ["device", "pinned"])
def test_r13_freeing_plain_memory_waits_for_the_whole_device(rig: Rig, kind: str) -> None:
    stream = rig.non_blocking()
    ptr = rig.gpu.mem_alloc(MIB) if kind == "device" else int(rig.cu("cuMemHostAlloc", MIB, 0))
    latch = rig.hold(stream)
    worker = rig.start(lambda: rig.gpu.mem_free(ptr) if kind == "device" else rig.cu("cuMemFreeHost", ptr))
    # No driver call meanwhile: while one thread is inside such a free, calls of others can block behind it.
    assert not worker.ends_within(0.2)
    latch.release()
    worker.result()


def test_a_page_moved_to_another_address_keeps_its_data(rig: Rig) -> None:
    stream = rig.non_blocking()
    ptr = rig.gpu.mem_address_reserve(4 * MIB)
    handle = _map(rig, ptr, 2 * MIB)
    rig.kernels.fill(stream, ptr, MIB // 2, 0xC0FFEE)
    rig.gpu.stream_synchronize(stream)
    rig.gpu.mem_unmap(ptr, 2 * MIB)
    rig.gpu.mem_map(ptr + 2 * MIB, 2 * MIB, handle)
    rig.gpu.mem_set_access(ptr + 2 * MIB, 2 * MIB)
    assert rig.kernels.mismatches(stream, ptr + 2 * MIB, MIB // 2, 0xC0FFEE) == 0
    rig.gpu.mem_unmap(ptr + 2 * MIB, 2 * MIB)
    rig.gpu.mem_release(handle)
    rig.gpu.mem_address_free(ptr, 4 * MIB)


def test_a_handle_is_mapped_and_unmapped_whole(rig: Rig) -> None:
    ptr = rig.gpu.mem_address_reserve(4 * MIB)
    handle = rig.gpu.mem_create(4 * MIB)
    assert error_of(lambda: rig.cu("cuMemMap", ptr, 2 * MIB, 2 * MIB, handle, 0)) is not None
    rig.gpu.mem_map(ptr, 4 * MIB, handle)
    assert error_of(lambda: rig.gpu.mem_unmap(ptr, 2 * MIB)) is not None
    rig.gpu.mem_unmap(ptr, 4 * MIB)
    rig.gpu.mem_release(handle)
    rig.gpu.mem_address_free(ptr, 4 * MIB)


def test_several_segments_side_by_side_are_one_range_for_a_kernel(rig: Rig) -> None:
    """So neighbours can merge across segments; the driver still names the single segment."""
    stream = rig.non_blocking()
    ptr = rig.gpu.mem_address_reserve(6 * MIB)
    handles = []
    for i in range(3):
        handle = rig.gpu.mem_create(2 * MIB)
        rig.gpu.mem_map(ptr + 2 * i * MIB, 2 * MIB, handle)
        handles.append(handle)
    rig.gpu.mem_set_access(ptr, 6 * MIB)
    rig.kernels.fill(stream, ptr + MIB, MIB, 5)  # 4 MiB, over two borders
    assert rig.kernels.mismatches(stream, ptr + MIB, MIB, 5) == 0
    base, size = rig.cu("cuMemGetAddressRange", ptr + 3 * MIB)
    assert (int(base), int(size)) == (ptr + 2 * MIB, 2 * MIB)
    for i, handle in enumerate(handles):
        rig.gpu.mem_unmap(ptr + 2 * i * MIB, 2 * MIB)
        rig.gpu.mem_release(handle)
    rig.gpu.mem_address_free(ptr, 6 * MIB)


def test_legacy_ipc_refuses_virtual_memory_and_takes_plain_memory(rig: Rig) -> None:
    ptr = rig.gpu.mem_address_reserve(2 * MIB)
    handle = _map(rig, ptr, 2 * MIB)
    assert error_of(lambda: rig.cu("cuIpcGetMemHandle", ptr)) == "CUDA_ERROR_INVALID_VALUE"
    rig.gpu.mem_unmap(ptr, 2 * MIB)
    rig.gpu.mem_release(handle)
    rig.gpu.mem_address_free(ptr, 2 * MIB)
    plain = rig.gpu.mem_alloc(2 * MIB)
    code = error_of(lambda: rig.cu("cuIpcGetMemHandle", plain))
    rig.gpu.mem_free(plain)
    assert code in (None, "CUDA_ERROR_NOT_SUPPORTED"), "some containers forbid legacy IPC altogether"


def test_wait_any_answers_at_the_first_event_and_gives_up_in_time(rig: Rig) -> None:
    held, free = rig.non_blocking(), rig.non_blocking()
    latch = rig.hold(held)
    stuck, done = rig.recorded(held), rig.recorded(free)
    assert rig.gpu.wait_any([stuck, done], 5.0)
    assert not rig.gpu.wait_any([stuck], 0.01)
    latch.release()
    assert rig.gpu.wait_any([stuck], 5.0)
    assert done_within(lambda: rig.gpu.stream_query(held))

"""Two devices: whose event, whose id, whose memory.  The facts behind R8, R10 and S23.  Skipped with one GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from kernels import done_within
from rig import GLOBAL, Rig, error_of

from allocator.devices import LEGACY, PER_THREAD, CudaDevice

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture
def mapped(rig: Rig) -> Iterator[int]:
    """2 MiB of virtual memory on the first device, with access for nobody yet."""
    ptr = rig.gpu.mem_address_reserve(2 * MIB)
    handle = rig.gpu.mem_create(2 * MIB)
    rig.gpu.mem_map(ptr, 2 * MIB, handle)
    yield ptr
    rig.gpu.ctx_synchronize()
    rig.gpu.mem_unmap(ptr, 2 * MIB)
    rig.gpu.mem_release(handle)
    rig.gpu.mem_address_free(ptr, 2 * MIB)


def _peers(rig: Rig, second_gpu: CudaDevice) -> bool:
    return bool(rig.cu("cuDeviceCanAccessPeer", second_gpu.ordinal, rig.gpu.ordinal))


def test_r8_handles_1_and_2_mean_the_current_devices_streams(rig: Rig, second_rig: Rig) -> None:
    first = rig.gpu.stream_id(LEGACY), rig.gpu.stream_id(PER_THREAD)
    with second_rig.gpu.scope():
        second = rig.gpu.stream_id(LEGACY), rig.gpu.stream_id(PER_THREAD)
    assert len({*first, *second}) == 4


def test_r8_an_event_is_recorded_on_streams_of_its_own_context_only(rig: Rig, second_rig: Rig) -> None:
    event = rig.event()
    with second_rig.gpu.scope():
        stream = second_rig.non_blocking()
        codes = [error_of(partial(rig.gpu.event_record, event, s)) for s in (stream, LEGACY, PER_THREAD)]
    assert codes == ["CUDA_ERROR_INVALID_HANDLE"] * 3


def test_r4_waiting_works_across_devices(rig: Rig, second_rig: Rig) -> None:
    held = rig.non_blocking()
    latch = rig.hold(held)
    event = rig.recorded(held)
    with second_rig.gpu.scope():
        stream = second_rig.non_blocking()
        second_rig.gpu.stream_wait_event(stream, event)
        behind = second_rig.recorded(stream)
        assert second_rig.is_stuck(behind)
        latch.release()
        assert second_rig.finishes(behind)


def test_r6_a_context_wait_or_event_proves_nothing_of_the_other_device(rig: Rig, second_rig: Rig) -> None:
    held = rig.non_blocking()
    latch = rig.hold(held)
    with second_rig.gpu.scope():
        second_rig.gpu.ctx_synchronize()
        if second_rig.gpu.supports_context_events:
            event = second_rig.event()
            second_rig.gpu.ctx_record_event(event)
            assert second_rig.finishes(event)
        assert second_rig.finishes(second_rig.recorded(LEGACY))
    assert not rig.gpu.stream_query(held)
    latch.release()


def test_r10_an_event_query_of_another_device_kills_a_global_capture_unless_relaxed(rig: Rig, second_rig: Rig) -> None:
    with second_rig.gpu.scope():
        event = second_rig.recorded(second_rig.non_blocking())
        assert second_rig.finishes(event)
    stream = rig.non_blocking()
    with rig.capturing(stream, GLOBAL):
        assert error_of(lambda: second_rig.gpu.event_query(event)) is not None
        assert not rig.survives(stream)
    stream = rig.non_blocking()
    with rig.capturing(stream, GLOBAL):
        with second_rig.gpu.scope():
            assert second_rig.gpu.event_query(event)
        assert rig.survives(stream)


def test_s23_a_scope_of_another_device_restores_the_first(rig: Rig, second_gpu: CudaDevice) -> None:
    before = int(rig.cu("cuCtxGetCurrent"))
    with second_gpu.scope():
        assert int(rig.cu("cuCtxGetCurrent")) == second_gpu.primary_context() != before
        with rig.gpu.scope():
            assert int(rig.cu("cuCtxGetCurrent")) == before
            with second_gpu.scope():
                assert int(rig.cu("cuCtxGetCurrent")) == second_gpu.primary_context()
        assert int(rig.cu("cuCtxGetCurrent")) == second_gpu.primary_context()
    assert int(rig.cu("cuCtxGetCurrent")) == before


def test_a_peer_reads_virtual_memory_once_access_was_set(rig: Rig, second_rig: Rig, mapped: int) -> None:
    """`mem_set_access` gives it to every visible device that can reach the memory."""
    if not _peers(rig, second_rig.gpu):
        pytest.skip("the second GPU cannot reach the first")
    rig.gpu.mem_set_access(mapped, 2 * MIB)
    stream = rig.non_blocking()
    rig.kernels.fill(stream, mapped, MIB // 2, 9)
    rig.gpu.stream_synchronize(stream)
    with second_rig.gpu.scope():
        reader = second_rig.non_blocking()
        assert second_rig.kernels.mismatches(reader, mapped, MIB // 2, 9) == 0
        assert done_within(lambda: second_rig.gpu.stream_query(reader))


_PEER_READ = """
from allocator.devices import CudaDevice
from allocator.errors import DriverError
import kernels
MIB = 1 << 20
first, second = CudaDevice(0), CudaDevice(1)
tools = kernels.Kernels(second)
tools.warm_up()
first._access[1:] = []          # the owner only
with first.scope():
    ptr = first.mem_address_reserve(2 * MIB)
    first.mem_map(ptr, 2 * MIB, first.mem_create(2 * MIB))
    first.mem_set_access(ptr, 2 * MIB)
with second.scope():
    stream = second.stream_create(non_blocking=True, priority=0)
    own = second.mem_alloc(4096)
    try:
        if {copy}:
            tools.cu("cuMemcpyDtoDAsync", own, ptr, 4096, stream)
        else:
            tools.verify(stream, ptr, 1024, 0, own)
        second.stream_synchronize(stream)
        print("no error")
    except DriverError as error:
        print(error.code, error.sticky)
"""


@pytest.mark.parametrize(
    ("copy", "expected"), [(True, "CUDA_ERROR_INVALID_VALUE False"), (False, "CUDA_ERROR_ILLEGAL_ADDRESS True")]
)
def test_without_access_a_peers_copy_fails_and_its_kernel_ends_the_context(
    rig: Rig, second_gpu: CudaDevice, copy: bool, expected: str
) -> None:
    if not _peers(rig, second_gpu):
        pytest.skip("the second GPU cannot reach the first")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    code = _PEER_READ.format(copy=copy)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=90)
    assert done.stdout.strip() == expected, done.stderr

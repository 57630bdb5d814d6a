"""The fault plan, costs, counting and the hook."""

from __future__ import annotations

import pytest

from allocator.devices import SimDevice
from allocator.errors import DriverError
from tests.unit.devices.sim.words import Words


def test_the_nth_call_fails_and_changes_nothing(gpu: SimDevice) -> None:
    gpu.fail("cuMemCreate", at=2, error="CUDA_ERROR_UNKNOWN")
    gpu.mem_create(gpu.granularity)
    with pytest.raises(DriverError) as caught:
        gpu.mem_create(gpu.granularity)
    assert (caught.value.call, caught.value.code, caught.value.sticky) == ("cuMemCreate", "CUDA_ERROR_UNKNOWN", False)
    assert gpu.used_bytes == gpu.granularity
    gpu.mem_create(gpu.granularity)
    assert gpu.calls["cuMemCreate"] == 3


def test_a_failure_can_last(gpu: SimDevice) -> None:
    gpu.fail("cuEventCreate", at=2, times=2)
    gpu.event_create()
    for _ in range(2):
        with pytest.raises(DriverError):
            gpu.event_create()
    gpu.event_create()
    gpu.fail("cuEventCreate", times=0)
    for _ in range(5):
        with pytest.raises(DriverError):
            gpu.event_create()
    gpu.clear_faults()
    gpu.event_create()
    with pytest.raises(ValueError):
        gpu.fail("cuEventCreate", at=0)


def test_r11_a_sticky_failure_loses_the_context(gpu: SimDevice) -> None:
    gpu.fail("cuMemGetInfo", error="CUDA_ERROR_LAUNCH_FAILED", sticky=True)
    for call in (gpu.mem_get_info, gpu.event_create):
        with pytest.raises(DriverError) as caught:
            call()
        assert caught.value.sticky and caught.value.code == "CUDA_ERROR_LAUNCH_FAILED"


def test_r4_an_event_whose_record_failed_queries_as_done_and_proves_nothing(gpu: SimDevice, words: Words) -> None:
    s, t = words.stream(), words.stream()
    ptr = words.memory()
    event = gpu.event_create()
    gpu.launch(s, 1000, writes=[(ptr, 512)])
    gpu.event_record(event, s)
    assert not gpu.event_query(event)
    gpu.fail("cuEventRecord")
    with pytest.raises(DriverError):
        gpu.event_record(event, s)
    assert gpu.event_query(event)
    gpu.stream_wait_event(t, event)
    gpu.hand_out(ptr, 512, "second")
    gpu.launch(t, writes=[(ptr, 512)])
    assert len(gpu.races) == 1


def test_a_failing_exchange_leaves_the_thread_as_it_was() -> None:
    gpu = SimDevice()
    for name in ("cuThreadExchangeStreamCaptureMode", "cuCtxPushCurrent"):
        gpu.fail(name)
        with pytest.raises(DriverError), gpu.scope():
            pass
        with pytest.raises(DriverError, match="INVALID_CONTEXT"):
            gpu.mem_get_info()
        with gpu.scope():
            gpu.mem_get_info()


def test_calls_cost_no_time_unless_told(gpu: SimDevice) -> None:
    gpu.mem_get_info()
    assert gpu.now_ns == 0 == gpu.clock_ns()
    gpu.costs["cuMemGetInfo"] = 700
    gpu.mem_get_info()
    assert gpu.now_ns == 700 == gpu.clock_ns()


def test_the_hook_runs_before_each_call_outside_of_the_lock(gpu: SimDevice, words: Words) -> None:
    names: list[str] = []

    def hook(name: str) -> None:
        names.append(name)
        gpu.mem_get_info()  # may call the device; the hook is not called for that

    gpu.before_call = hook
    s = words.stream()
    gpu.launch(s)
    gpu.stream_query(s)
    assert names == ["cuStreamCreateWithPriority", "cuLaunchKernel", "cuStreamQuery"]


def test_calls_are_counted_under_the_drivers_names(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    gpu.launch(s)
    gpu.wait_any([words.recorded(s)], 1.0)
    gpu.begin_capture(s)
    gpu.end_capture(s).launch(s)
    assert gpu.calls == {
        "cuCtxPushCurrent": 1,
        "cuThreadExchangeStreamCaptureMode": 1,
        "cuStreamCreateWithPriority": 1,
        "cuLaunchKernel": 1,
        "cuEventCreate": 1,
        "cuEventRecord": 1,
        "cuEventQuery": 1,
        "cuStreamBeginCapture": 1,
        "cuStreamEndCapture": 1,
        "cuGraphLaunch": 1,
    }

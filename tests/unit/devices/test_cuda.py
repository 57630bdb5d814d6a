"""`CudaDevice` without a GPU: a fake `driver` module records calls and fails on demand.

Longer than most, because the fake is used by nothing else and is best read beside the tests.
"""

from __future__ import annotations

import enum
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allocator import devices
from allocator.devices import LEGACY, Capture, CudaDevice, _bindings, cuda
from allocator.errors import AllocatorError, DriverError, ForkError

ROOT = Path(__file__).parents[3]


class Result(enum.IntEnum):
    """As the bindings have it: an int, with the driver's name."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_STUB_LIBRARY = 34
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


GLOBAL, RELAXED = "GLOBAL", "RELAXED"


class FakeDriver:
    """Two devices, each with a primary context; one thread's context stack and capture mode."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=RELAXED)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102)

    def __init__(self) -> None:
        self.version = 13000
        self.made: list[tuple[object, ...]] = []
        self.fails: dict[str, Result | Exception] = {}
        self.missing: set[str] = set()
        self.peers = True
        self.contexts = [7000]  # what the program had made current
        self.mode = GLOBAL
        self.not_ready = 0  # queries that answer "not ready" before one says yes

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def names(self) -> list[object]:
        return [call[0] for call in self.made]

    def __getattr__(self, name: str) -> Callable[..., tuple[object, ...]]:
        if not name.startswith("cu") or name in self.missing:
            raise AttributeError(name)

        def call(*args: object) -> tuple[object, ...]:
            self.made.append((name, *args))
            failure = self.fails.get(name)
            if isinstance(failure, Exception):
                raise failure
            if failure is not None:
                return (failure, None)[: 1 + (name not in WITHOUT_RESULT)]
            answer = self.answer(name, args)
            if isinstance(answer, Result):
                return (answer,)
            return (Result.CUDA_SUCCESS, *answer)

        return call

    def answer(self, name: str, args: tuple[Any, ...]) -> Result | tuple[object, ...]:
        match name:
            case "cuCtxPushCurrent":
                self.contexts.append(args[0])
            case "cuCtxPopCurrent":
                return (self.contexts.pop(),)
            case "cuCtxGetCurrent":
                return (self.contexts[-1],)
            case "cuThreadExchangeStreamCaptureMode":
                before, self.mode = self.mode, args[0]
                return (before,)
            case "cuStreamQuery" | "cuEventQuery" if self.not_ready:
                self.not_ready -= 1
                return Result.CUDA_ERROR_NOT_READY
            case "cuDevicePrimaryCtxRetain":
                return (8000 + args[0],)
            case "cuDeviceGet":
                return (args[0],)
            case "cuDriverGetVersion":
                return (self.version,)
            case "cuDeviceCanAccessPeer":
                return (int(self.peers),)
            case "cuDeviceGetName":
                return (b"A GPU\0\0\0",)
            case "cuCtxGetStreamPriorityRange" | "cuMemGetInfo":
                return (0, -5)
        if name in WITHOUT_RESULT:
            return Result.CUDA_SUCCESS
        return (
            {"cuDeviceGetCount": 2, "cuStreamIsCapturing": 1, "cuMemGetAllocationGranularity": 2 << 20}.get(name, 1),
        )


WITHOUT_RESULT = {
    *("cuInit", "cuCtxPushCurrent", "cuCtxSynchronize", "cuCtxRecordEvent", "cuStreamDestroy", "cuStreamQuery"),
    *("cuStreamSynchronize", "cuStreamWaitEvent", "cuEventDestroy", "cuEventRecord", "cuEventQuery"),
    *("cuEventSynchronize", "cuMemAddressFree", "cuMemRelease", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"),
    *("cuMemFree", "cuLaunchKernel", "cuMemsetD8Async", "cuMemcpyDtoHAsync"),
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(_bindings, "load", lambda: driver)
    monkeypatch.setattr(_bindings, "_started_in", None)
    monkeypatch.setattr(cuda, "_devices", {})
    return driver


@pytest.fixture
def gpu(driver: FakeDriver) -> CudaDevice:
    return CudaDevice(0)


# -- one call each, translated once ---------------------------------------------------------------

METHODS: dict[str, tuple[Callable[[CudaDevice], object], tuple[object, ...], object]] = {
    "cuCtxSynchronize": (lambda d: d.ctx_synchronize(), (), None),
    "cuCtxRecordEvent": (lambda d: d.ctx_record_event(9), (8000, 9), None),
    "cuStreamCreateWithPriority": (lambda d: d.stream_create(non_blocking=True, priority=-2), (1, -2), 1),
    "cuCtxGetStreamPriorityRange": (lambda d: d.stream_priority_range(), (), (0, -5)),
    "cuStreamDestroy": (lambda d: d.stream_destroy(5), (5,), None),
    "cuStreamGetId": (lambda d: d.stream_id(5), (5,), 1),
    "cuStreamGetFlags": (lambda d: d.stream_is_blocking(5), (5,), False),
    "cuStreamIsCapturing": (lambda d: d.stream_is_capturing(5), (5,), Capture.ACTIVE),
    "cuStreamQuery": (lambda d: d.stream_query(5), (5,), True),
    "cuStreamSynchronize": (lambda d: d.stream_synchronize(5), (5,), None),
    "cuStreamWaitEvent": (lambda d: d.stream_wait_event(5, 9), (5, 9, 0), None),
    "cuEventCreate": (lambda d: d.event_create(), (2,), 1),
    "cuEventDestroy": (lambda d: d.event_destroy(9), (9,), None),
    "cuEventRecord": (lambda d: d.event_record(9, LEGACY), (9, 1), None),
    "cuEventQuery": (lambda d: d.event_query(9), (9,), True),
    "cuEventSynchronize": (lambda d: d.event_synchronize(9), (9,), None),
    "cuEventElapsedTime": (lambda d: d.event_elapsed_ms(9, 10), (9, 10), 1.0),
    "cuMemGetInfo": (lambda d: d.mem_get_info(), (), (0, -5)),
    "cuMemAddressReserve": (lambda d: d.mem_address_reserve(64), (64, 0, 0, 0), 1),
    "cuMemAddressFree": (lambda d: d.mem_address_free(3, 64), (3, 64), None),
    "cuMemRelease": (lambda d: d.mem_release(4), (4,), None),
    "cuMemMap": (lambda d: d.mem_map(3, 64, 4), (3, 64, 0, 4, 0), None),
    "cuMemUnmap": (lambda d: d.mem_unmap(3, 64), (3, 64), None),
    "cuMemAlloc": (lambda d: d.mem_alloc(64), (64,), 1),
    "cuMemFree": (lambda d: d.mem_free(3), (3,), None),
    "cuMemsetD8Async": (lambda d: d.mem_set_async(3, 7, 64, 5), (3, 7, 64, 5), None),
    "cuMemcpyDtoHAsync": (lambda d: d.mem_copy_to_host_async(99, 3, 64, 5), (99, 3, 64, 5), None),
    "cuDeviceTotalMem": (lambda d: d.total_memory, (0,), 1),
    "cuDeviceGetName": (lambda d: d.name, (256, 0), "A GPU"),
    "cuMemCreate": (lambda d: d.mem_create(64), (), 1),
    "cuMemSetAccess": (lambda d: d.mem_set_access(3, 64), (), None),
}


@pytest.fixture
def prepared(gpu: CudaDevice, driver: FakeDriver) -> CudaDevice:
    """The lazily made parts are made, so that each method below is exactly one call."""
    gpu.primary_context()
    gpu.mem_set_access(3, 64)
    driver.made.clear()
    return gpu


@pytest.mark.parametrize("call", METHODS)
def test_a_method_is_one_driver_call_and_is_counted(prepared: CudaDevice, driver: FakeDriver, call: str) -> None:
    method, arguments, answer = METHODS[call]
    before = prepared.calls.get(call, 0)
    result = method(prepared)
    assert (result, type(result)) == (answer, type(answer))
    assert driver.names() == [call]
    assert not arguments or driver.made[0][1:] == arguments
    assert prepared.calls[call] == before + 1


@pytest.mark.parametrize("call", METHODS)
def test_a_failed_call_is_a_driver_error_with_its_name(prepared: CudaDevice, driver: FakeDriver, call: str) -> None:
    driver.fails[call] = Result.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError, match=f"{call} failed: CUDA_ERROR_INVALID_VALUE") as caught:
        METHODS[call][0](prepared)
    assert (caught.value.call, caught.value.code, caught.value.sticky) == (call, "CUDA_ERROR_INVALID_VALUE", False)
    assert driver.names() == [call], "nothing else was called"
    driver.fails.clear()
    assert METHODS[call][0](prepared) == METHODS[call][2], "nothing was changed"


def test_r11_errors_that_end_the_context_are_sticky(gpu: CudaDevice, driver: FakeDriver) -> None:
    driver.fails["cuEventQuery"] = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DriverError) as caught:
        gpu.event_query(9)
    assert caught.value.sticky


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (RuntimeError("function cuStreamGetId is not found"), "CUDA_ERROR_NOT_FOUND"),
        (ValueError("4711 is not a valid CUresult"), "CUDA_ERROR_UNKNOWN"),
    ],
)
def test_what_the_bindings_raise_is_translated(
    gpu: CudaDevice, driver: FakeDriver, failure: Exception, code: str
) -> None:
    driver.fails["cuStreamGetId"] = failure
    with pytest.raises(DriverError) as caught:
        gpu.stream_id(5)
    assert (caught.value.call, caught.value.code) == ("cuStreamGetId", code)


def test_a_mistake_of_ours_is_not_dressed_up_as_a_driver_error(gpu: CudaDevice, driver: FakeDriver) -> None:
    driver.fails["cuStreamGetId"] = ValueError("something else")
    with pytest.raises(ValueError, match="something else"):
        gpu.stream_id(5)


def test_not_ready_is_an_answer(gpu: CudaDevice, driver: FakeDriver) -> None:
    driver.not_ready = 2
    assert (gpu.event_query(9), gpu.stream_query(5), gpu.event_query(9)) == (False, False, True)


# -- the object -----------------------------------------------------------------------------------


def test_two_devices_of_one_number_are_one_object(gpu: CudaDevice, driver: FakeDriver) -> None:
    assert CudaDevice(0) is gpu is devices.CudaDevice()
    assert CudaDevice(1) is not gpu
    assert CudaDevice(1).key != gpu.key
    assert (gpu.ordinal, gpu.label, gpu.watches, gpu.simulated, repr(gpu)) == (0, "0", False, False, "CudaDevice(0)")
    assert gpu.clock_ns() <= gpu.clock_ns()
    gpu.hand_out(1, 2, self := object())
    assert self is not None


def test_making_a_device_makes_no_context(gpu: CudaDevice, driver: FakeDriver) -> None:
    assert driver.names() == ["cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet"]


@pytest.mark.parametrize(("number", "error"), [(2, ValueError), (-1, ValueError), ("0", TypeError), (True, TypeError)])
def test_a_device_that_is_none_is_refused(driver: FakeDriver, number: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        CudaDevice(number)


@pytest.mark.parametrize(("peers", "reach"), [(True, [0, 1]), (False, [0])])
def test_access_is_set_for_the_owner_and_for_each_peer_that_reaches_it(
    gpu: CudaDevice, driver: FakeDriver, peers: bool, reach: list[int]
) -> None:
    driver.peers = peers
    gpu.mem_set_access(3, 64)
    _, ptr, nbytes, access, count = driver.made[-1]
    assert (ptr, nbytes, count) == (3, 64, len(reach))
    assert [(entry.location.id, entry.flags) for entry in access] == [(n, 3) for n in reach]  # type: ignore[attr-defined]
    assert ("cuDeviceCanAccessPeer", 1, 0) in driver.made


def test_context_events_need_driver_and_bindings(driver: FakeDriver) -> None:
    assert CudaDevice(0).supports_context_events
    driver.version = 12040
    assert not CudaDevice(1).supports_context_events


def test_older_bindings_lack_context_events(gpu: CudaDevice, driver: FakeDriver) -> None:
    driver.missing.add("cuCtxRecordEvent")
    assert not gpu.supports_context_events
    with pytest.raises(DriverError, match="cuCtxRecordEvent failed: CUDA_ERROR_NOT_FOUND"):
        gpu.ctx_record_event(9)


def test_a_device_without_virtual_memory_is_not_asked_for_its_granularity(
    gpu: CudaDevice, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "answer", lambda name, args: (0,))
    assert not gpu.supports_virtual_memory
    assert gpu.granularity == 2 << 20
    assert "cuMemGetAllocationGranularity" not in driver.names()


def test_spin_is_one_launch_in_a_scope_of_its_own(gpu: CudaDevice, driver: FakeDriver) -> None:
    gpu.spin(5, 1000)
    gpu.spin(5, -3)
    launches = [call for call in driver.made if call[0] == "cuLaunchKernel"]
    assert [(call[9], call[10][0]) for call in launches] == [(5, (1000,)), (5, (0,))]  # type: ignore[index]
    assert driver.names().count("cuModuleLoadData") == 1
    assert driver.contexts == [7000]


# -- waiting --------------------------------------------------------------------------------------


def test_r13_wait_any_polls_with_pauses_that_double(
    gpu: CudaDevice, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    driver.not_ready = 20
    assert gpu.wait_any([8, 9], 60.0)
    assert pauses[:3] == [10e-6, 20e-6, 40e-6]
    assert max(pauses) == 1e-3
    assert len(pauses) == 10


def test_r13_wait_any_gives_up_in_time(gpu: CudaDevice, driver: FakeDriver) -> None:
    driver.not_ready = 10**9
    assert not gpu.wait_any([9], 0.005)
    assert not gpu.wait_any([9], 0.0)
    assert not gpu.wait_any([], 60.0)


# -- scopes ---------------------------------------------------------------------------------------


@pytest.fixture
def restored(driver: FakeDriver) -> Iterator[None]:
    """After the test the thread's context and capture mode are what they were."""
    yield
    assert (driver.contexts, driver.mode) == ([7000], GLOBAL)


def test_r10_a_scope_changes_context_and_mode_and_restores_both(
    gpu: CudaDevice, driver: FakeDriver, restored: None
) -> None:
    for _ in range(2):
        driver.made.clear()
        with gpu.scope():
            assert (driver.contexts[-1], driver.mode) == (8000, RELAXED)
    assert driver.made == [
        ("cuCtxPushCurrent", 8000),
        ("cuThreadExchangeStreamCaptureMode", RELAXED),
        ("cuThreadExchangeStreamCaptureMode", GLOBAL),
        ("cuCtxPopCurrent",),
    ]


def test_s23_a_scope_restores_after_an_error(gpu: CudaDevice, driver: FakeDriver, restored: None) -> None:
    with pytest.raises(LookupError), gpu.scope(), gpu.scope():
        raise LookupError


def test_an_inner_scope_changes_nothing(gpu: CudaDevice, driver: FakeDriver, restored: None) -> None:
    with gpu.scope():
        driver.made.clear()
        with gpu.scope(), gpu.scope():
            pass
        assert driver.made == [("cuCtxGetCurrent",)] * 2


def test_s23_an_inner_scope_sees_a_scope_of_another_device_in_between(
    gpu: CudaDevice, driver: FakeDriver, restored: None
) -> None:
    other = CudaDevice(1)
    with gpu.scope():
        with other.scope():
            with gpu.scope():
                assert driver.contexts[-1] == 8000
            assert driver.contexts[-1] == 8001
        assert driver.contexts[-1] == 8000


def test_s23_an_inner_scope_sees_that_foreign_code_changed_the_context(
    gpu: CudaDevice, driver: FakeDriver, restored: None
) -> None:
    with gpu.scope():
        driver.contexts[-1] = 9999
        with gpu.scope():
            assert driver.contexts[-1] == 8000
        assert driver.contexts[-1] == 9999


@pytest.mark.parametrize("call", ["cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode"])
def test_a_scope_that_cannot_be_entered_leaves_everything(
    gpu: CudaDevice, driver: FakeDriver, restored: None, call: str
) -> None:
    driver.fails[call] = Result.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError, match=call), gpu.scope():
        raise AssertionError("not reached")
    driver.fails.clear()
    with gpu.scope():
        assert driver.contexts == [7000, 8000]


@pytest.mark.parametrize("body_fails", [True, False])
def test_an_error_at_the_end_of_a_scope_does_not_hide_the_bodys(
    gpu: CudaDevice, driver: FakeDriver, body_fails: bool
) -> None:
    with pytest.raises(LookupError if body_fails else DriverError), gpu.scope():
        driver.fails["cuThreadExchangeStreamCaptureMode"] = Result.CUDA_ERROR_INVALID_VALUE
        if body_fails:
            raise LookupError
    assert driver.contexts == [7000], "the context is restored all the same"


# -- fork and exit --------------------------------------------------------------------------------


def test_s21_in_a_forked_child_nothing_reaches_the_driver(
    gpu: CudaDevice, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = gpu.scope()
    scope.__enter__()
    parent = os.getpid()
    monkeypatch.setattr(_bindings, "forks", _bindings.forks + 1)
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    driver.made.clear()
    for method, _, _ in METHODS.values():
        with pytest.raises(ForkError):
            method(gpu)
    with pytest.raises(ForkError), gpu.scope():
        raise AssertionError("not reached")
    with pytest.raises(ForkError):
        CudaDevice(1)
    scope.__exit__(None, None, None)  # silent
    assert driver.made == []


def test_s21_a_fork_that_python_does_not_see_is_found_by_the_process_number(
    gpu: CudaDevice, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    gpu.primary_context()
    driver.made.clear()
    with pytest.raises(ForkError), gpu.scope():
        raise AssertionError("not reached")
    assert driver.made == []


def test_s21_forks_are_counted_in_the_child() -> None:
    code = (
        "import os\n"
        "from allocator.devices import _bindings\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(10 + _bindings.forks)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), _bindings.forks)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["11", "0"], done.stderr


def test_at_exit_nothing_reaches_the_driver(
    gpu: CudaDevice, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = gpu.scope()
    scope.__enter__()
    driver.made.clear()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "is_finalizing", lambda: True)
        for method, _, _ in METHODS.values():
            with pytest.raises(DriverError, match="CUDA_ERROR_DEINITIALIZED") as caught:
                method(gpu)
            assert caught.value.sticky
        scope.__exit__(None, None, None)  # silent
    assert driver.made == []


# -- what may be missing on a machine -------------------------------------------------------------


def _refusal(driver: FakeDriver) -> str:
    with pytest.raises(AllocatorError) as caught:
        CudaDevice(0)
    assert caught.value.__cause__ is None
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_a_driver_one_sentence_says_what_to_do(driver: FakeDriver) -> None:
    class DynamicLibNotFoundError(RuntimeError):
        pass

    driver.fails["cuInit"] = DynamicLibNotFoundError('"cuda" is a library. Failed\nto find it.')
    assert _refusal(driver).startswith("no NVIDIA driver was found")
    assert 'pip install "weir-allocator[cuda]"' in _refusal(driver)
    driver.fails["cuInit"] = Result.CUDA_ERROR_STUB_LIBRARY
    assert _refusal(driver).startswith("no NVIDIA driver was found")


def test_a_driver_that_is_too_old_is_named(driver: FakeDriver) -> None:
    driver.version = 11080
    assert "too old (it is for CUDA 11.8)" in _refusal(driver)
    driver.fails["cuInit"] = RuntimeError("Failed to get cuGetProcAddress_v2")
    assert "too old" in _refusal(driver)


def test_without_a_gpu_and_with_a_broken_driver(driver: FakeDriver) -> None:
    driver.fails["cuInit"] = Result.CUDA_ERROR_NO_DEVICE
    assert "sees no GPU" in _refusal(driver)
    driver.fails["cuInit"] = Result.CUDA_ERROR_NOT_INITIALIZED
    assert _refusal(driver) == "cuInit failed: CUDA_ERROR_NOT_INITIALIZED"
    driver.fails = {"cuDriverGetVersion": Result.CUDA_ERROR_INVALID_VALUE}
    assert _refusal(driver).startswith("cuDriverGetVersion failed")
    driver.fails.clear()
    assert CudaDevice(0).name == "A GPU", "a refusal leaves nothing behind"


def test_without_bindings_the_package_imports_and_a_device_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['cuda'] = None\n"
        "import allocator, allocator.devices\n"
        "from allocator.errors import AllocatorError\n"
        "try: allocator.devices.CudaDevice(0)\n"
        "except AllocatorError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert 'pip install "weir-allocator[cuda]"' in done.stdout, done.stderr
    assert done.stderr == ""


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="CudaDevise"):
        devices.CudaDevise  # noqa: B018

"""`CudaDevice` itself on a real GPU: scopes, errors, fork and exit.  Its logic without a GPU: tests/unit/devices."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import GLOBAL, Rig, error_of

from allocator.devices import LEGACY, CudaDevice
from allocator.errors import DriverError

ROOT = Path(__file__).parents[2]


def run_script(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=90)


def current(rig: Rig) -> int:
    return int(rig.cu("cuCtxGetCurrent"))


def mode_of_thread(rig: Rig) -> str:
    modes = rig.kernels.driver.CUstreamCaptureMode
    mode = rig.cu("cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_RELAXED)
    rig.cu("cuThreadExchangeStreamCaptureMode", mode)
    return str(mode.name)


@pytest.fixture
def foreign_context(rig: Rig) -> Iterator[int]:
    """A context that is not the device's primary one, as some programs make; not current."""
    handle = int(rig.cu("cuDeviceGet", 0))
    major = int(importlib.import_module("cuda.bindings").__version__.split(".")[0])
    arguments: tuple[Any, ...] = (None, 0, handle) if major >= 13 else (0, handle)
    context = int(rig.cu("cuCtxCreate", *arguments))
    rig.cu("cuCtxPopCurrent")
    yield context
    rig.cu("cuCtxDestroy", context)


def test_it_knows_what_it_is(rig: Rig) -> None:
    gpu = rig.gpu
    assert gpu is CudaDevice(0)
    assert gpu.name
    assert gpu.label == "0"
    free, total = gpu.mem_get_info()
    assert 0 < free <= total
    assert gpu.total_memory >= free
    assert gpu.supports_virtual_memory
    least, greatest = gpu.stream_priority_range()
    assert greatest <= least


def test_s23_a_scope_changes_context_and_capture_mode_and_restores_both(rig: Rig, foreign_context: int) -> None:
    rig.cu("cuCtxPushCurrent", foreign_context)
    try:
        before = mode_of_thread(rig)
        for fails in (False, True):
            try:
                with rig.gpu.scope():
                    assert current(rig) == rig.gpu.primary_context()
                    assert mode_of_thread(rig).endswith("RELAXED")
                    if fails:
                        raise LookupError
            except LookupError:
                pass
            assert current(rig) == foreign_context
            assert mode_of_thread(rig) == before
    finally:
        rig.cu("cuCtxPopCurrent")


def test_s23_an_inner_scope_is_right_although_another_context_was_made_current_in_between(
    rig: Rig, foreign_context: int
) -> None:
    own = rig.gpu.primary_context()
    with rig.gpu.scope():
        rig.cu("cuCtxSetCurrent", foreign_context)
        with rig.gpu.scope():
            assert current(rig) == own
        assert current(rig) == foreign_context
    assert current(rig) == own, "the test's own context, from before the scopes"


def test_s22_a_thread_that_never_used_cuda_is_left_as_it_was(rig: Rig) -> None:
    seen: list[int] = []

    def work() -> None:
        seen.append(current(rig))
        with rig.gpu.scope():
            rig.gpu.event_destroy(rig.gpu.event_create())
        seen.append(current(rig))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert seen == [0, 0]


def test_r10_queries_in_a_scope_leave_a_strangers_capture_alone(rig: Rig) -> None:
    stream, other = rig.non_blocking(), rig.non_blocking()
    event = rig.recorded(other)
    with rig.capturing(stream, GLOBAL):
        with rig.gpu.scope():
            assert rig.gpu.wait_any([event], 5.0)
            rig.gpu.stream_synchronize(other)
            rig.gpu.mem_free(rig.gpu.mem_alloc(512))
        assert rig.survives(stream)


def test_an_error_carries_the_calls_name_and_the_drivers_code(rig: Rig) -> None:
    with pytest.raises(DriverError) as caught:
        rig.gpu.mem_alloc(rig.gpu.total_memory * 2)
    assert (caught.value.call, caught.value.code) == ("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
    assert not caught.value.sticky


def test_an_errors_effect_ends_with_it(rig: Rig) -> None:
    event = rig.event()
    assert error_of(lambda: rig.gpu.event_elapsed_ms(event, event)) is not None
    assert rig.gpu.event_query(event)


def test_r11_a_kernels_bad_address_is_a_sticky_error() -> None:
    done = run_script(
        "from allocator.devices import CudaDevice\n"
        "from allocator.errors import DriverError\n"
        "from kernels import Kernels\n"
        "gpu = CudaDevice(0)\n"
        "kernels = Kernels(gpu)\n"
        "kernels.warm_up()\n"
        "with gpu.scope():\n"
        "    stream = gpu.stream_create(non_blocking=True, priority=0)\n"
        "    hole = gpu.mem_address_reserve(gpu.granularity)\n"
        "    for _ in range(2):\n"
        "        try:\n"
        "            kernels.fill(stream, hole, 1, 0)\n"
        "            gpu.stream_synchronize(stream)\n"
        "            print('no error')\n"
        "        except DriverError as error:\n"
        "            print(error.code, error.sticky)\n"
    )
    assert done.stdout.split("\n")[:2] == ["CUDA_ERROR_ILLEGAL_ADDRESS True"] * 2, done.stderr


def test_spin_keeps_a_stream_busy_for_the_time_asked(rig: Rig) -> None:
    stream = rig.non_blocking()
    start, end = (rig.gpu.event_create(timing=True) for _ in range(2))
    rig.gpu.event_record(start, stream)
    rig.gpu.spin(stream, 20_000_000)
    rig.gpu.event_record(end, stream)
    rig.gpu.event_synchronize(end)
    elapsed = rig.gpu.event_elapsed_ms(start, end)
    rig.gpu.event_destroy(start)
    rig.gpu.event_destroy(end)
    assert 19.0 <= elapsed <= 40.0


def test_s21_a_forked_child_never_reaches_the_driver() -> None:
    done = run_script(
        "import os, sys\n"
        "from allocator.devices import CudaDevice\n"
        "from allocator.errors import ForkError\n"
        "gpu = CudaDevice(0)\n"
        "with gpu.scope():\n"
        "    before = sum(gpu.calls.values())\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        for use in (lambda: gpu.event_create(), lambda: gpu.scope().__enter__()):\n"
        "            try:\n"
        "                use()\n"
        "                os._exit(1)\n"
        "            except ForkError:\n"
        "                pass\n"
        "        os._exit(0 if sum(gpu.calls.values()) == before else 2)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "    gpu.event_destroy(gpu.event_create())\n"
        "print('fine')\n"
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_nothing_is_printed_and_nothing_called_at_exit() -> None:
    done = run_script(
        "import sys\n"
        "from allocator.devices import CudaDevice\n"
        "from allocator.errors import DriverError\n"
        "class Late:\n"
        "    def __init__(self, gpu): self.gpu, self.error, self.sys = gpu, DriverError, sys\n"
        "    def __del__(self):\n"
        "        if self.sys.is_finalizing():\n"
        "            try: self.gpu.event_create()\n"
        "            except self.error as e: print(e.code, e.sticky, file=self.sys.__stdout__, flush=True)\n"
        "gpu = CudaDevice(0)\n"
        "with gpu.scope(): gpu.event_create()\n"
        "sys.late = Late(gpu)\n"
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.strip() in ("", "CUDA_ERROR_DEINITIALIZED True")


def test_legacy_is_idle_after_a_context_wait(rig: Rig) -> None:
    rig.gpu.spin(LEGACY, 1_000_000)
    rig.gpu.ctx_synchronize()
    assert rig.gpu.stream_query(LEGACY)

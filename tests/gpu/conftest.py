"""Skips every GPU test, with the reason, where no GPU can be used; REQUIRE_GPU=1 makes that a failure."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

# More hardware queues than the default 8: streams that share one wait for each other without cause, and a
# held stream would hold others.  Read by the driver when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from kernels import Kernels  # noqa: E402
from rig import Rig  # noqa: E402

from allocator.devices import CudaDevice  # noqa: E402
from allocator.errors import AllocatorError  # noqa: E402
from allocator.streams import Registry  # noqa: E402

# A test that takes longer ends the whole run, with every thread's stack.  Long canaries say how long they may take.
LIMIT_S = float(os.environ.get("GPU_TEST_SECONDS", "120"))


def _why_no_gpu() -> str | None:
    try:
        CudaDevice(0)
    except AllocatorError as error:
        return str(error)
    return None


WHY_NO_GPU = _why_no_gpu()


def _gpu_count() -> int:
    return 0 if WHY_NO_GPU else int(CudaDevice(0)._do("cuDeviceGetCount"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if WHY_NO_GPU is not None and os.environ.get("REQUIRE_GPU") != "1":
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {WHY_NO_GPU}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if WHY_NO_GPU is not None:
        terminalreporter.write_line(f"tests/gpu was not run: {WHY_NO_GPU}")
    elif _gpu_count() < 2:
        terminalreporter.write_line("tests/gpu: rows about two devices were not run: one GPU is visible")


@pytest.fixture(scope="session")
def gpu() -> CudaDevice:
    return CudaDevice(0)


@pytest.fixture(scope="session")
def kernels(gpu: CudaDevice) -> Kernels:
    """The test kernels, loaded and warm."""
    kernels = Kernels(gpu)
    kernels.warm_up()
    return kernels


def _real_stderr(config: pytest.Config) -> int:
    """pytest's copy of stderr: the descriptor itself leads into the captured output, lost when the run ends."""
    try:
        from _pytest.faulthandler import fault_handler_stderr_fd_key

        return config.stash[fault_handler_stderr_fd_key]
    except (ImportError, KeyError):
        return 2


@pytest.fixture
def rig(gpu: CudaDevice, kernels: Kernels, pytestconfig: pytest.Config) -> Iterator[Rig]:
    """Streams, events and latches, with the context current and the thread's capture mode the default."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=_real_stderr(pytestconfig))
    kernels.cu("cuCtxPushCurrent", gpu.primary_context())
    rig = Rig(gpu, kernels)
    try:
        yield rig
    finally:
        try:
            rig.close()
        finally:
            # All of the test's streams are gone and the device has been waited for: the next test starts afresh,
            # not with streams of bare handles that nobody can ask any more.
            Registry._all.pop(gpu, None)
            kernels.cu("cuCtxPopCurrent")
            faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def second_gpu() -> CudaDevice:
    if _gpu_count() < 2:
        pytest.skip("needs two GPUs, and one is visible")
    return CudaDevice(1)


@pytest.fixture
def second_rig(second_gpu: CudaDevice, rig: Rig) -> Iterator[Rig]:
    """The same on a second device.  The first device's context stays current: push the second's where needed."""
    with second_gpu.scope():
        kernels = Kernels(second_gpu)
        kernels.warm_up()
        other = Rig(second_gpu, kernels)
    try:
        yield other
    finally:
        with second_gpu.scope():
            other.close()

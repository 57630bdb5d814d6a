"""What users import, and what that costs."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys

import pytest

import allocator
from allocator import errors

NAMES = {
    "Allocation", "AllocatorError", "CachingAllocator", "Config", "CorruptionError", "CudaDevice", "DriverError",
    "Event", "ForkError",
    "MemoryResource", "OutOfMemoryError", "PoolClosed", "SimDeadlock", "SimDevice", "Stats", "Stream",
    "StreamCapturing", "StreamClosed", "current_stream", "stream", "__version__",
}  # fmt: skip


def test_every_name_of_the_api_is_there() -> None:
    assert set(allocator.__all__) >= NAMES
    for name in NAMES - {"CudaDevice"}:
        assert getattr(allocator, name) is not None
    assert inspect.isclass(allocator.CudaDevice)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = allocator.no_such_thing


def test_every_class_and_function_has_a_text() -> None:
    for name in NAMES - {"__version__"}:
        assert inspect.getdoc(getattr(allocator, name)), name
    for cls in (allocator.CachingAllocator, allocator.Stream, allocator.Event, allocator.Allocation):
        for name, member in vars(cls).items():
            if not name.startswith("_") and callable(member):
                assert inspect.getdoc(member), f"{cls.__name__}.{name}"


def test_every_error_is_an_allocator_error_and_out_of_memory_a_memory_error() -> None:
    for name in (
        "OutOfMemoryError",
        "CorruptionError",
        "PoolClosed",
        "StreamClosed",
        "StreamCapturing",
        "ForkError",
        "DriverError",
        "SimDeadlock",
    ):
        assert issubclass(getattr(allocator, name), allocator.AllocatorError)
    assert issubclass(allocator.OutOfMemoryError, MemoryError)


def test_a_driver_error_says_which_call_and_which_error() -> None:
    error = errors.DriverError("cuMemMap", "CUDA_ERROR_UNKNOWN", "why", sticky=True)
    assert (error.call, error.code, error.sticky) == ("cuMemMap", "CUDA_ERROR_UNKNOWN", True)
    assert str(error) == "cuMemMap failed: CUDA_ERROR_UNKNOWN (why)"


def test_an_out_of_memory_error_holds_numbers_only() -> None:
    error = errors.OutOfMemoryError("no", requested=5, limit=7, stats={"reserved": 1})
    assert (error.requested, error.limit, error.stats) == (5, 7, {"reserved": 1})


def test_the_import_needs_no_gpu_package_and_looks_for_none() -> None:
    code = (
        "import sys, allocator; "
        "names = ('cuda', 'cupy', 'torch', 'rmm', 'numba', 'prometheus_client'); "
        "bad = {m for m in sys.modules if m.split('.')[0] in names}; "
        "sys.exit(', '.join(sorted(bad)) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_process_ends_without_a_word_whatever_is_still_alive() -> None:
    code = (
        "import allocator\n"
        "gpu = allocator.SimDevice()\n"
        "pool = allocator.CachingAllocator(gpu, config=allocator.Config())\n"
        "s = allocator.Stream(gpu); e = s.record_event()\n"
        "a = pool.allocate(1000, stream=s); gpu.hold(s); gpu.launch(s, writes=[a])\n"
        "cycle = [pool.allocate(5), pool, s]; cycle.append(cycle)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_statistics_can_be_sent_to_another_process() -> None:
    with allocator.CachingAllocator(allocator.SimDevice(), config=allocator.Config()) as pool:
        pool.allocate(1).close()
        stats = pool.stats()
    assert pickle.loads(pickle.dumps(stats)) == stats

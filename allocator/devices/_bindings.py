"""cuda-python's driver bindings: imported here, started once a process.

Rule: the only place that imports `cuda.bindings`, and only when a device is made, so that `import
allocator` needs neither bindings nor driver.  Whatever is missing is one `AllocatorError` that says what
to do; the bindings' own exceptions stop here.

The bindings carry no complete types, so the module is `Any`; `cuda.py` gives every result its type.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Final

from allocator.errors import AllocatorError, DriverError, ForkError

MINIMUM_DRIVER: Final = 12000  # CUDA 12.0: cuStreamGetId (R8)

_NO_BINDINGS: Final = 'CudaDevice needs cuda-python\'s driver bindings: pip install "weir-allocator[cuda]"'
_NO_DRIVER: Final = (
    "no NVIDIA driver was found (libcuda): install one for CUDA 12.0 or newer, "
    'and the bindings with pip install "weir-allocator[cuda]"'
)
_OLD_DRIVER: Final = "the NVIDIA driver is too old{}: install one for CUDA 12.0 or newer"
_NO_DEVICE: Final = "the NVIDIA driver sees no GPU: check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
_FORKED: Final = "CUDA was started in a parent process and cannot be used after a fork: use the spawn start method"

_started_in: int | None = None  # the process that called cuInit
forks = 0  # how many forks lie between the process that imported this and the present one


def _forked() -> None:
    global forks
    forks += 1


# Asked before every driver call, so a counter: reading the process number is a system call.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def load() -> Any:
    """The bindings' `driver` module.  Makes no driver call.  Replaced by unit tests."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:  # also a broken installation
        raise AllocatorError(f"{_NO_BINDINGS} ({error})") from None


def start(driver: Any) -> int:
    """Initialise the driver and return its version, such as 13000 for CUDA 13.0.

    Driver calls: `cuInit`, `cuDriverGetVersion`.  Harmless when repeated.  Raises ForkError in a child of
    the process that started it, without a driver call.
    """
    global _started_in
    if _started_in is not None and _started_in != os.getpid():
        raise ForkError(_FORKED)
    try:
        (status, *_) = driver.cuInit(0)
        code = "CUDA_SUCCESS" if not int(status) else str(status.name)
        if code == "CUDA_ERROR_NO_DEVICE":
            raise AllocatorError(_NO_DEVICE)
        if code == "CUDA_ERROR_STUB_LIBRARY":
            raise AllocatorError(_NO_DRIVER)
        if code != "CUDA_SUCCESS":
            raise DriverError("cuInit", code)
        status, version = driver.cuDriverGetVersion()
        if int(status):
            raise DriverError("cuDriverGetVersion", str(status.name))
    except (RuntimeError, OSError) as error:
        # The library is loaded at the first call.  "not found" is its own class, in another package; a
        # driver before 12.0 lacks the entry point through which the bindings find all others.
        if "cuGetProcAddress" in str(error):
            raise AllocatorError(_OLD_DRIVER.format("")) from None
        detail = "" if "NotFound" in type(error).__name__ else f" ({error})"
        raise AllocatorError(_NO_DRIVER + detail) from None
    if version < MINIMUM_DRIVER:
        raise AllocatorError(_OLD_DRIVER.format(f" (it is for CUDA {version // 1000}.{version % 1000 // 10})"))
    _started_in = os.getpid()
    return int(version)

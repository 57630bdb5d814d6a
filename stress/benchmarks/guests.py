"""Peers from other libraries, each found at run time and left out, with the reason, where it is not there.

    rmm, rmm-async    hooks of CuPy: `rmm.allocators.cupy.rmm_cupy_allocator` over the current device resource
    torch, torch-raw  `torch.empty`; `torch.cuda.caching_allocator_alloc` and `caching_allocator_delete`
    cuda-core         `DeviceMemoryResource.allocate`; the buffer's end frees

Rule: every function that needs a GPU is a few lines; what they return is what hooks.py returns.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

from allocator.devices import Device
from allocator.stress.benchmarks.cases import Allocator, Missing, Settings
from allocator.stress.benchmarks.hooks import CupyDoor, switched_on

_RMM_POOL: Final = 8 << 30
"""Bytes that RMM's pool begins with; by default it would take half of the GPU."""


class GuestDoor(CupyDoor):
    """CuPy's door with the guests in the house: CuPy's own pool, Weir, and they.  The floors are known already."""

    def __init__(self, device: Device, settings: Settings, cupy: Any, left_out: dict[str, str]) -> None:
        left_out = left_out | {"cupy-async": ""}
        super().__init__(device, _Only(settings), cupy, left_out)
        self._asked = settings
        self.found: dict[str, Callable[[ExitStack], Allocator]] = {}
        self.left_out: dict[str, str] = {}
        for name, find in FINDERS.items():
            if settings.wants(name):
                try:
                    self.found[name] = find(cupy, device)
                except Exception as error:  # whatever a foreign library raises when it is imported
                    self.left_out[name] = " ".join(str(error).split()) or type(error).__name__

    def _own(self, open_: ExitStack, several: bool) -> Iterator[Allocator]:
        yield from super()._own(open_, several)
        for name, make in self.found.items():
            try:
                allocator = make(open_)
            except Exception as error:  # no memory for a pool of RMM's, say
                self.left_out[name] = " ".join(str(error).split()) or type(error).__name__
                continue
            if not (several and allocator.apart):  # their streams are not CuPy's
                yield allocator


class _Only(Settings):
    """The same settings without the floors."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.repeats, settings.seconds, settings.quick, settings.peers)

    def wants(self, peer: str) -> bool:
        return peer not in ("floor", "empty-hook") and super().wants(peer)


def load(name: str) -> Any:
    """A library, or Missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(f"{name} cannot be imported ({' '.join(str(error).split())})") from None


# -- RMM --------------------------------------------------------------------------------------------------------


def find_rmm(cupy: Any, device: Device) -> Callable[[ExitStack], Allocator]:
    """RMM's pool."""
    mr, hook = load("rmm.mr"), load("rmm.allocators.cupy").rmm_cupy_allocator
    return lambda open_: _rmm(
        "rmm", cupy, mr, hook, mr.PoolMemoryResource(mr.CudaMemoryResource(), initial_pool_size=_RMM_POOL)
    )


def find_rmm_async(cupy: Any, device: Device) -> Callable[[ExitStack], Allocator]:
    """RMM over cudaMallocAsync."""
    mr, hook = load("rmm.mr"), load("rmm.allocators.cupy").rmm_cupy_allocator
    return lambda open_: _rmm("rmm-async", cupy, mr, hook, mr.CudaAsyncMemoryResource())


def _rmm(name: str, cupy: Any, mr: Any, hook: Callable[[int], Any], resource: Any) -> Allocator:
    return Allocator(name, cupy.cuda.alloc, partial(_rmm_on, cupy, mr, hook, resource))


@contextmanager
def _rmm_on(cupy: Any, mr: Any, hook: Callable[[int], Any], resource: Any) -> Iterator[None]:
    before = mr.get_current_device_resource()
    mr.set_current_device_resource(resource)
    try:
        with switched_on(cupy, hook):
            yield
    finally:
        mr.set_current_device_resource(before)


# -- PyTorch ----------------------------------------------------------------------------------------------------


def find_torch(cupy: Any, device: Device) -> Callable[[ExitStack], Allocator]:
    """`torch.empty`."""
    torch = _torch()
    empty, kind, where = torch.empty, torch.uint8, torch.device("cuda", device.ordinal)

    def call(nbytes: int) -> Any:
        return empty(nbytes, dtype=kind, device=where)

    return partial(_emptied, torch, Allocator("torch", call, apart=True))


def find_torch_raw(cupy: Any, device: Device) -> Callable[[ExitStack], Allocator]:
    """PyTorch's allocator without a tensor."""
    torch = _torch()
    torch.cuda.init()
    stream = torch.cuda.current_stream(device.ordinal)
    take, give = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete
    pair = (lambda nbytes: take(nbytes, device.ordinal, stream), give)

    def call(nbytes: int) -> Any:
        raise Missing("memory of torch-raw is a bare number; use its pair")

    return partial(_emptied, torch, Allocator("torch-raw", call, pair=pair, apart=True))


def _torch() -> Any:
    torch = load("torch")
    if not torch.cuda.is_available():
        raise Missing("this PyTorch finds no GPU")
    return torch


def _emptied(torch: Any, allocator: Allocator, open_: ExitStack) -> Allocator:
    open_.callback(torch.cuda.empty_cache)
    return allocator


# -- cuda.core --------------------------------------------------------------------------------------------------


def find_cuda_core(cupy: Any, device: Device) -> Callable[[ExitStack], Allocator]:
    """`DeviceMemoryResource`, wherever this version keeps it."""
    core = _cuda_core(("cuda.core", "cuda.core.experimental"))
    gpu = core.Device(device.ordinal)
    gpu.set_current()
    resource, stream = core.DeviceMemoryResource(device.ordinal), gpu.create_stream()
    allocate = resource.allocate

    def call(nbytes: int) -> Any:
        return allocate(nbytes, stream=stream)

    return lambda open_: Allocator("cuda-core", call, apart=True)


def _cuda_core(names: Sequence[str]) -> Any:
    reasons = []
    for name in names:
        try:
            module = load(name)
        except Missing as error:
            reasons.append(str(error))
            continue
        if hasattr(module, "DeviceMemoryResource"):
            return module
        reasons.append(f"{name} has no DeviceMemoryResource")
    raise Missing("; ".join(reasons))


FINDERS: Final[dict[str, Callable[[Any, Device], Callable[[ExitStack], Allocator]]]] = {
    "rmm": find_rmm,
    "rmm-async": find_rmm_async,
    "torch": find_torch,
    "torch-raw": find_torch_raw,
    "cuda-core": find_cuda_core,
}

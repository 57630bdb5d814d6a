"""From nothing to the first block: a fresh process that imports, allocates 4 KiB and ends, by wall time.

Processes alternate strictly.  `python` imports nothing; what it takes is part of every other figure.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

from allocator.stress.benchmarks.cases import Case, Contender, Stage

SIMULATED: Final = {
    "python": "pass",
    "weir": "import allocator; allocator.CachingAllocator(allocator.SimDevice()).allocate(4096)",
    "cupy, import only": "import cupy",
}
ON_GPU: Final = {
    "python": "pass",
    "weir": "import allocator; allocator.CachingAllocator({n}).allocate(4096)",
    "cupy": "import cupy; cupy.cuda.Device({n}).use(); cupy.cuda.alloc(4096)",
    "weir behind cupy": "import cupy, allocator.cupy; cupy.cuda.Device({n}).use(); allocator.cupy.install(); "
    "cupy.cuda.alloc(4096)",
    "rmm": "import rmm; rmm.mr.set_current_device_resource(rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), "
    "initial_pool_size=1 << 30)); rmm.DeviceBuffer(size=4096)",
    "torch": "import torch; torch.empty(4096, dtype=torch.uint8, device='cuda:{n}')",
}
_LIBRARIES: Final = {"cupy": "cupy", "weir behind cupy": "cupy", "cupy, import only": "cupy"} | {
    name: name for name in ("rmm", "torch")
}


def cold_start(stage: Stage) -> Iterator[Case]:
    """Each in processes of its own."""
    programs = SIMULATED if stage.simulated else ON_GPU
    contenders = []
    for name, code in programs.items():
        library = _LIBRARIES.get(name)
        if library is None or importlib.util.find_spec(library) is not None:
            contenders.append(Contender(name, _process(code.replace("{n}", str(stage.device.ordinal)))))
    reference = "cupy" if any(one.name == "cupy" for one in contenders) else "python"
    yield Case(
        "import and first block", contenders, reference, "process",
        operations=1, fixed=True, unit="ms", wall=True, batches=1,
    )  # fmt: skip


def _process(code: str) -> Any:
    def run(n: int) -> float:
        from time import perf_counter_ns

        began = perf_counter_ns()
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        return (perf_counter_ns() - began) / 1e6

    return run

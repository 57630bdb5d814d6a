"""What `pip install` makes where there is a compiler: it runs compiled, and right.

`tests/compiled.py` builds such a wheel for its own tests, and names it in COMPILED_WHEEL: no other is built then.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from tests.compiled import WHEEL, what_is_missing
from tests.unit.test_packaging import build, copy_source, environment, run

PROGRAM = """
import gc
from allocator import CachingAllocator, SimDevice, Stream
from allocator.gil import COMPILED
assert COMPILED
gpu = SimDevice()
with CachingAllocator(gpu) as pool:
    streams = [Stream(gpu) for _ in range(3)]
    held = []
    for i in range(3000):
        held.append(pool.allocate(512 * (1 + i % 7), stream=streams[i % 3]))
        gpu.launch(streams[i % 3], 1000, writes=[held[-1]])
        if len(held) > 20:
            del held[i % 20]
        if i % 100 == 0:
            pool.check()
    cycle = [pool.allocate(512, stream=streams[0])]
    cycle.append(cycle)
    del cycle
    gc.collect()
    held.clear()
    gpu.run_until_idle()
    assert pool.allocated_bytes == 0
    pool.check()
    kinds = pool.stats().allocations
    assert kinds["same_stream"] > 1000 and sum(kinds.values()) == 3001, kinds
assert gpu.races == []
"""


@pytest.mark.skipif(what_is_missing() is not None, reason=f"the compiled build needs {what_is_missing()}")
def test_an_install_with_a_compiler_runs_compiled(tmp_path: Path) -> None:
    python, site = environment(tmp_path / "env")
    built = os.environ.get(WHEEL)
    wheel = Path(built) if built else build(copy_source(tmp_path / "source"), tmp_path, "--wheel", compiled=True)
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"allocator", "-".join(wheel.name.split("-")[:2]) + ".dist-info"}
    assert any(name.startswith("allocator/caching/front.") and name.endswith(".so") for name in names)
    zipfile.ZipFile(wheel).extractall(site)
    (tmp_path / "program.py").write_text(PROGRAM)
    run(python, "program.py", cwd=tmp_path)

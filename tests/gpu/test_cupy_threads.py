"""Threads that use their per-thread default stream and end, while others make streams: in a process of their own.

The driver takes that stream down when the thread has ended, in the thread, which nobody can wait for.  Once, with four
other programs on the same GPU, CuPy's own test of that did not come to an end (docs/results).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="needs CuPy: pip install 'weir-allocator[cupy]'")

ROUNDS = int(os.environ.get("CUPY_THREADS", "60"))
PROGRAM = """
import faulthandler, sys, threading
faulthandler.dump_traceback_later(50, exit=True)
import cupy
if {installed}:
    import allocator.cupy
    allocator.cupy.install()

def job(malloc):
    cupy.cuda.Device(0).use()
    with cupy.cuda.using_allocator(malloc), cupy.cuda.Stream.ptds:
        x = cupy.arange(16)
        assert int(x[3]) == 3

for _ in range({rounds}):
    pool = cupy.cuda.MemoryPool()
    malloc = cupy.cuda.get_allocator() if {weirs} else pool.malloc
    job(malloc)
    threads = [threading.Thread(target=job, args=(malloc,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    streams = [cupy.cuda.Stream() for _ in range(3)]  # while they end
    for thread in threads:
        thread.join()
    streams += [cupy.cuda.Stream() for _ in range(3)]  # and while the driver takes their streams down
    for stream in streams:
        with stream:
            cupy.arange(16).sum()
print("done")
"""


@pytest.mark.parametrize(
    ("installed", "weirs"),
    [(False, False), (True, True), (True, False)],
    ids=["without Weir", "with Weir", "with Weir, memory from CuPy's pool"],
)
def test_threads_end_and_streams_can_be_made_meanwhile(installed: bool, weirs: bool) -> None:
    source = Path(__file__).resolve().parents[2] / "src"
    path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = PROGRAM.format(installed=installed, weirs=weirs, rounds=ROUNDS)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=90
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-3000:]

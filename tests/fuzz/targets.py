"""What is given arbitrary bytes: each target is right, or refuses in one line; anything else is a defect.

Next: engine.py (coverage-guided, by hand), test_fuzz.py (Hypothesis, and the corpus).
"""

from __future__ import annotations

import io
import json
import pickle
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Final

from allocator import AllocatorError, CachingAllocator, Config, SimDevice, Stream
from allocator.cli import main
from allocator.sizes import KIB, MIB
from allocator.traces import TraceError, read_trace, summarize

MOST_ROWS = 300
"""Longer traces are read, but not replayed."""
STATUSES: Final = (0, 2, 3)
"""What `weir replay` may answer; 1 would be a race or a leak, which no trace may bring about."""


def traces(data: bytes) -> None:
    """A file in any layout, read, summed up, and replayed by the command."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(data)
        try:
            rows = summarize(read_trace(path)).rows
        except TraceError as error:
            assert "\n" not in str(error), error
            assert replay(path) == 2
            return
        if rows <= MOST_ROWS:
            assert replay(path) in STATUSES


def replay(path: Path) -> int:
    """`weir replay PATH --json`: its status, after a look at what it says."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(["replay", str(path), "--json"])
    lines = out.getvalue().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)
    if status == 2:
        said = err.getvalue().splitlines()
        assert not lines and said and str(path) in said[-1], said
    return status


def configuration(data: bytes) -> None:
    """Lines of NAME=VALUE, as they might stand in the environment, and a pool with what comes of them."""
    pairs = (line.partition("=") for line in data.decode("utf-8", "replace").splitlines())
    environ = {f"WEIR_{name.strip().upper()}": value for name, separator, value in pairs if separator}
    try:
        config = Config.from_env(environ, device_memory=64 * MIB)
    except ValueError as error:
        assert "\n" not in str(error) and "WEIR_" in str(error), error
        return
    use(config)


def use(config: Config) -> None:
    """A little of everything, with these settings: it works, or says in one line why not."""
    gpu = SimDevice(memory=64 * MIB)
    try:
        with CachingAllocator(gpu, config=config) as pool:
            streams = [Stream(gpu) for _ in range(2)]
            for i in range(8):
                try:
                    x = pool.allocate((KIB, 3 * MIB, 20 * MIB)[i % 3], stream=streams[i % 2])
                except AllocatorError as error:
                    assert "\n" not in str(error), error
                    continue
                gpu.launch(streams[i % 2], writes=[x])
                x.close()
            del streams
            pool.trim()
            pool.check()
            snapshot(pickle.dumps(pool.snapshot()))
    except AllocatorError as error:
        assert "\n" not in str(error), error
    gpu.run_until_idle()
    with CachingAllocator(gpu, config=Config()) as other:
        other.stats()
        other.stats()
    assert gpu.races == [] and gpu.violations == [] and gpu.used_bytes == 0


def snapshot(data: bytes) -> None:
    """A snapshot of ours can be read, whatever the pool looks like."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        path.write_bytes(data)
        summarize(read_trace(path))


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {"traces": traces, "configuration": configuration}

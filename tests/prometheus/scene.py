"""What the Prometheus of these tests looks at: healthy pools under load, and one pool for each thing that goes wrong.

All on simulated devices, in one process, behind two ports: `main` has all pools but one, `gone` has that one, and
closes its port half-way.  Once every alert that can be brought about has fired, the load stops; from then on nothing
changes, so what Prometheus answers can be compared with `pool.stats()`.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from importlib import resources
from typing import Any, Final

from prometheus_client import CollectorRegistry, start_http_server

from allocator import Allocation, CachingAllocator, Config, OutOfMemoryError, SimDevice, Stats, Stream
from allocator.errors import DriverError
from allocator.metrics import register
from allocator.traces import LiveReplay, read_trace

MIB: Final = 1 << 20

EXPECTED: Final = {
    "WeirInFlightNotDraining": "stuck",
    "WeirFragmentationGrowing": "cut",
    "WeirOutOfMemory": "tight",
    "WeirOutOfMemoryRetries": "tight",
    "WeirLimitNearlyReached": "tight",
    "WeirTimelinePoisoned": "poisoned",
    "WeirFreesNotDrained": "queued",
    "WeirDeviceLost": "lost",
    "WeirPoolUnreadable": "broken",
}
"""Alert -> the pool that it is about.  WeirTargetDown is about the whole target `gone`."""


class Scene:
    """Pools, load, and two ports."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.pools: dict[str, CachingAllocator] = {}
        self.devices: dict[str, SimDevice] = {}
        self._kept: list[Any] = []
        registry, gone = CollectorRegistry(), CollectorRegistry()
        for name, config in {
            "live": Config(),
            "tight": Config(limit=64 * MIB),
            "stuck": Config(),
            "cut": Config(small_page=2 * MIB),
            "poisoned": Config(),
            "queued": Config(),
            "lost": Config(),
            "broken": Config(),
            "gone": Config(),
        }.items():
            # What is cut into pieces goes on growing until the last alert has fired, however long that takes.
            gpu = self.devices[name] = SimDevice(memory=1 << 42 if name == "cut" else 8 << 30)
            gpu.advance(1_000_000)
            pool = self.pools[name] = CachingAllocator(gpu, config, name=name)
            self._stack.enter_context(pool)
            register(pool, gone if name == "gone" else registry, per_stream=True, own_port=True)
        self.targets: dict[str, str] = {}
        self._servers = {}
        for job, source in (("main", registry), ("gone", gone)):
            server, thread = start_http_server(0, addr="127.0.0.1", registry=source)
            self._servers[job] = (server, thread)
            self.targets[job] = f"127.0.0.1:{server.server_port}"
        self._stop = threading.Event()
        self._load = threading.Thread(target=self._go_on, daemon=True)
        sample = resources.files("allocator.traces") / "samples" / "serve-8-streams.csv.gz"
        path = self._stack.enter_context(resources.as_file(sample))
        self._replay = LiveReplay(read_trace(str(path)), self.pools["live"], speed=1.0)

    # -- load ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin the load, and let everything go wrong that shall."""
        self._replay.start()
        self._load.start()
        self._stuck()
        self._poisoned()
        self._queued()
        self._lost()
        self._broken()
        self._close_port("gone")

    def _go_on(self) -> None:
        """Every tenth of a second: more idle pieces between live ones, and memory that has to be waited for."""
        stream = Stream(self.devices["cut"])
        gpu, tight = self.devices["tight"], self.pools["tight"]
        one, other = Stream(gpu, name="one"), Stream(gpu, name="other")
        self._kept.append(tight.allocate(58 * MIB, stream=one))
        with suppress(OutOfMemoryError):
            tight.allocate(60 * MIB, stream=other)
        size = 64 << 10
        while not self._stop.wait(0.1):
            size += 512  # so what the last turn left is too small for this one
            pieces = [self.pools["cut"].allocate(size, stream=stream) for _ in range(64)]
            self._kept += pieces[::2]
            for turn in range(10):
                block = tight.allocate(4 * MIB, stream=(one, other)[turn % 2])
                gpu.launch(block.stream, duration_ns=1_000_000, writes=[block])
                block.close()

    def _stuck(self) -> None:
        """A stream that stands still, and 400 seconds that pass."""
        gpu, pool = self.devices["stuck"], self.pools["stuck"]
        still, other = Stream(gpu, name="still"), Stream(gpu, name="other")
        gpu.hold(still.handle)
        block = pool.allocate(MIB, stream=still)
        gpu.launch(still, writes=[block])
        block.record_stream(other)
        block.close()
        pool.stats()
        gpu.advance(400_000_000_000)
        self._kept += [still, other]

    def _poisoned(self) -> None:
        """A stream whose queries answer with an error."""
        gpu, pool = self.devices["poisoned"], self.pools["poisoned"]
        stream = Stream(gpu)
        gpu.fail("cuStreamQuery", error="CUDA_ERROR_UNKNOWN", times=0)
        pool.allocate(MIB, stream=stream).close()
        self._kept.append(stream)

    def _queued(self) -> None:
        """More frees than the scrapes of this test can see to, and nobody else who calls the pool."""
        pool = self.pools["queued"]
        stream = Stream(self.devices["queued"])
        held: list[Allocation] = [pool.allocate(512, stream=stream) for _ in range(80_000)]
        held.clear()
        self._kept.append(stream)

    def _lost(self) -> None:
        gpu, pool = self.devices["lost"], self.pools["lost"]
        gpu.fail("cuMemCreate", error="CUDA_ERROR_ILLEGAL_ADDRESS", sticky=True)
        with suppress(DriverError):
            pool.allocate(MIB)

    def _broken(self) -> None:
        """A pool that cannot be read."""

        def stats(**_: object) -> Stats:
            raise RuntimeError("for the test")

        self.pools["broken"].stats = stats  # type: ignore[method-assign]

    def _close_port(self, job: str) -> None:
        server, thread = self._servers.pop(job)
        server.shutdown()
        server.server_close()
        thread.join(20)

    # -- the end of it --------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Stop the load and leave the live pool in a state with something of everything, in which it then stays."""
        self._stop.set()
        self._load.join(20)
        self._replay.stop()
        assert self._replay.error is None
        gpu, pool = self.devices["live"], self.pools["live"]
        gpu.run_until_idle()
        pool.stats()
        pool.trim(keep=pool.reserved_bytes // 2)
        alpha, beta = Stream(gpu, name="alpha"), Stream(gpu, name="beta")
        gpu.hold(beta.handle)
        self._kept.append(pool.allocate(5 * MIB - 1000, stream=alpha))
        block = pool.allocate(3 * MIB, stream=beta)
        gpu.launch(beta, writes=[block])
        block.record_stream(alpha)
        block.close()
        self._kept += [alpha, beta]
        pool.stats()

    def close(self) -> None:
        """Everything ends."""
        self._stop.set()
        self._replay.stop()
        for job in list(self._servers):
            self._close_port(job)
        self._kept.clear()
        self._stack.close()

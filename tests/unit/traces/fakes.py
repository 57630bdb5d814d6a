"""A pool that reuses nothing and a target without a device: what a replay does to them is written down."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from allocator.errors import OutOfMemoryError

Log = list[tuple[Any, ...]]


class FakeStream:
    """A stream that only has a name."""

    def __init__(self, device: object, non_blocking: bool = False, name: str = "") -> None:
        assert non_blocking
        self.name = name.removeprefix("stream ")

    def close(self) -> None:
        """Nothing to end."""


class FakeAllocation:
    """Memory of a `FakePool`."""

    def __init__(self, pool: FakePool, number: int, nbytes: int) -> None:
        self.pool, self.number, self.size, self.closed = pool, number, (nbytes + 511) & -512, False

    def record_stream(self, stream: FakeStream) -> None:
        self.pool.log.append(("record_stream", self.number, stream.name))

    def close(self, stream: FakeStream | None = None) -> None:
        assert not self.closed
        self.closed = True
        self.pool.log.append(("close", self.number, stream.name if stream else None))


class FakePool:
    """Reserves what it is asked for and keeps it.  `room` bytes for all pools of one log together."""

    def __init__(self, device: Any, config: Any, name: str) -> None:
        self.log: Log = device.log
        self.device, self.config, self.name = device, config, name
        self.reserved_bytes = self.in_flight_bytes = 0
        self.made = 0
        device.pools.append(self)

    def allocate(self, nbytes: int, stream: FakeStream) -> FakeAllocation:
        size = (nbytes + 511) & -512
        if size > self.device.room:
            self.log.append(("refuse", nbytes))
            raise OutOfMemoryError("full")
        self.device.room -= size
        self.reserved_bytes += size
        number = self.device.next = self.device.next + 1
        self.log.append(("allocate", number, nbytes, stream.name, self.name))
        self.made += bool(size)
        return FakeAllocation(self, number, nbytes)

    def stats(self) -> Any:
        return SimpleNamespace(
            allocations={"new_memory": self.made}, stream_waits=1, event_records=2, event_queries=3,
            peak_reserved_bytes=self.reserved_bytes, peak_in_flight_bytes=0,
            reserved_bytes=self.reserved_bytes, in_flight_bytes=0,
        )  # fmt: skip

    def set_limit(self, nbytes: int) -> None:
        self.log.append(("limit", self.name, nbytes))

    def trim(self, keep: int = 0) -> int:
        self.log.append(("trim", self.name))
        return 0

    def check(self) -> None:
        if self.device.lies:
            raise AssertionError("two blocks\nare one")

    def close(self) -> None:
        self.log.append(("close pool", self.name))


class FakeDevice:
    """What pools and replays share."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.name, self.label, self.room = "Fake", "fake", room
        self.log: Log = []
        self.pools: list[FakePool] = []
        self.next = 0
        self.lies = False


class FakeTarget:
    """Time that is put where it is told, and nothing else."""

    def __init__(self, device: FakeDevice) -> None:
        self.device: Any = device
        self.log = device.log
        self.now = 0

    def session(self) -> AbstractContextManager[object]:
        return nullcontext()

    def reach(self, time_ns: int) -> None:
        self.now = time_ns

    def elapsed_ns(self) -> int:
        return self.now

    def launch(self, stream: FakeStream, duration_ns: int) -> None:
        self.log.append(("launch", stream.name, duration_ns, self.now))

    def attach(self, stream: FakeStream, allocation: FakeAllocation) -> None:
        self.log.append(("attach", allocation.number, stream.name))

    def detach(self, allocation: FakeAllocation) -> None:
        assert not allocation.closed
        self.log.append(("detach", allocation.number))

    def drain(self) -> int:
        self.log.append(("drain",))
        return self.now

    def calls(self) -> Counter[str]:
        return Counter({"cuMemCreate": 1})

    def races(self) -> int | None:
        return None

    def stalled_ns(self) -> int | None:
        return 5

    def leaked_bytes(self) -> int:
        return 0

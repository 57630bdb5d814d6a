"""What the pool's GPU tests share: a bench with pools that are judged at the end, and tagged memory.

Memory is told apart by a tag: `fill` writes it, `mismatches` says how many words are another's by now.
"""

from __future__ import annotations

import gc
from typing import Any

from rig import Rig

from allocator import Allocation, CachingAllocator, Config, Stream

KIB = 1 << 10
MIB = 1 << 20
SIZE = 4 * MIB
"""A segment of its own, so that nothing idle lies beside it."""


class Bench:
    """Pools and streams on one device.  `close` releases every latch first."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.gpu = rig.gpu
        self.kernels = rig.kernels
        self._pools: list[CachingAllocator] = []

    def pool(self, **options: Any) -> CachingAllocator:
        pool = CachingAllocator(self.gpu, config=Config(**options))
        self._pools.append(pool)
        return pool

    def stream(self, *, non_blocking: bool = True) -> Stream:
        return Stream(self.gpu, non_blocking=non_blocking)

    def fill(self, stream: Stream, memory: Allocation | tuple[int, int], tag: int) -> None:
        """Queue: the whole block becomes `tag`."""
        ptr, nbytes = memory if isinstance(memory, tuple) else (memory.ptr, memory.size)
        self.kernels.fill(stream.handle, ptr, nbytes // 4, tag)

    def mismatches(self, stream: Stream, memory: Allocation | tuple[int, int], tag: int) -> int:
        """Wait for the stream; how many words are not `tag`?"""
        ptr, nbytes = memory if isinstance(memory, tuple) else (memory.ptr, memory.size)
        return self.kernels.mismatches(stream.handle, ptr, nbytes // 4, tag)

    def close(self, *, check: bool = True) -> None:
        self.rig.release()
        self.gpu.ctx_synchronize()
        gc.collect()
        for pool in self._pools:
            if check:
                pool.check()
                stats = pool.stats()
                assert stats.reserved_bytes == stats.allocated_bytes + stats.in_flight_bytes + stats.idle_bytes
            pool.close()
        with CachingAllocator(self.gpu, config=Config()) as other:
            other.stats()  # one more public call
        assert all(pool._growth.empty for pool in self._pools), "a closed pool kept memory"


class Counter:
    """A word on the device that counts what kernels find wrong; read once, at the end."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.ptr = bench.gpu.mem_alloc(512)
        bench.kernels.cu("cuMemsetD32", self.ptr, 0, 1)

    def verify(self, stream: Stream, memory: Allocation, tag: int) -> None:
        """Queue: count the words of the block that are not `tag`."""
        self._bench.kernels.verify(stream.handle, memory.ptr, memory.size // 4, tag, self.ptr)

    def read(self) -> int:
        """Wait for everything, and read."""
        gpu = self._bench.gpu
        gpu.ctx_synchronize()
        stream = gpu.stream_create(non_blocking=True, priority=0)
        try:
            return self._bench.kernels.read_word(stream, self.ptr)
        finally:
            gpu.stream_destroy(stream)

    def close(self) -> None:
        self._bench.gpu.ctx_synchronize()
        self._bench.gpu.mem_free(self.ptr)


def overlap(a: tuple[int, int] | Allocation, b: tuple[int, int] | Allocation) -> bool:
    """Do the two share a byte?"""
    (p, n), (q, m) = span(a), span(b)
    return p < q + m and q < p + n


def span(a: tuple[int, int] | Allocation) -> tuple[int, int]:
    """(ptr, size), which stays true once the allocation is closed."""
    return a if isinstance(a, tuple) else (a.ptr, a.size)

"""What the simulated memory holds: memsets, writes that land late, and who is told of them."""

from __future__ import annotations

import ctypes

import pytest

from allocator import DriverError, SimDevice, Stream
from allocator.devices import LEGACY
from allocator.devices.sim.contents import JUNK

MIB = 1 << 20
US = 1000


class Bench:
    """Plain memory on a device, a stream of the allocator's own, and two of a program."""

    def __init__(self) -> None:
        self.gpu = SimDevice()
        with self.gpu.scope():
            self.own = self.gpu.stream_create(non_blocking=True, priority=0)
            self.ptr = self.gpu.mem_alloc(4096)
        self.a, self.b = Stream(self.gpu), Stream(self.gpu)

    def fill(self, value: int, at: int = 0, nbytes: int = 4096) -> None:
        with self.gpu.scope():
            self.gpu.mem_set_async(self.ptr + at, value, nbytes, self.own)

    def read(self, at: int = 0, nbytes: int = 4096) -> bytes:
        buffer = ctypes.create_string_buffer(nbytes)
        with self.gpu.scope():
            self.gpu.mem_copy_to_host_async(ctypes.addressof(buffer), self.ptr + at, nbytes, self.own)
            self.gpu.stream_synchronize(self.own)
        return buffer.raw

    def write(self, stream: Stream, at: int, nbytes: int, us: int = 1) -> None:
        self.gpu.launch(stream, us * US, writes=[(self.ptr + at, nbytes)])


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_was_set_is_read_and_what_never_was_is_zero(bench: Bench) -> None:
    assert bench.read() == bytes(4096)
    bench.fill(7, 1024, 512)
    assert bench.read(512, 1536) == bytes(512) + b"\7" * 512 + bytes(512)
    bench.fill(9, 1280, 512)
    assert bench.read(1024, 768) == b"\7" * 256 + b"\x09" * 512


def test_a_write_lands_when_its_launch_finishes(bench: Bench) -> None:
    bench.fill(7)
    bench.write(bench.a, 100, 50, us=10)
    assert bench.read() == b"\7" * 4096
    bench.gpu.advance(9 * US)
    assert bench.read() == b"\7" * 4096
    bench.gpu.advance(1 * US)
    assert bench.read() == b"\7" * 100 + bytes([JUNK]) * 50 + b"\7" * 3946


def test_a_write_queued_before_the_memset_may_land_after_it(bench: Bench) -> None:
    bench.write(bench.a, 0, 512, us=10)
    bench.write(bench.b, 512, 512, us=1)
    bench.gpu.advance(5 * US)
    bench.fill(7)
    assert bench.read() == b"\7" * 4096
    bench.gpu.advance(5 * US)
    assert bench.read(0, 1024) == bytes([JUNK]) * 512 + b"\7" * 512  # the second was over: it is gone


def test_a_held_write_lands_when_it_is_let_go(bench: Bench) -> None:
    bench.gpu.hold(bench.a)
    bench.write(bench.a, 0, 512)
    bench.fill(7)
    bench.gpu.run_until_idle()
    assert bench.read(0, 512) == b"\7" * 512
    bench.gpu.resume(bench.a)
    bench.gpu.run_until_idle()
    assert bench.read(0, 512) == bytes([JUNK]) * 512


def test_a_read_changes_nothing_and_a_later_memset_covers_a_write(bench: Bench) -> None:
    bench.fill(7)
    bench.gpu.launch(bench.a, US, reads=[(bench.ptr, 4096)])
    bench.write(bench.a, 0, 512)
    bench.gpu.run_until_idle()
    bench.fill(8)
    assert bench.read() == b"\x08" * 4096


def test_junk_is_never_what_was_set(bench: Bench) -> None:
    bench.fill(JUNK)
    bench.write(bench.a, 0, 1)
    bench.gpu.run_until_idle()
    assert bench.read(0, 2) == bytes([JUNK ^ 0xFF, JUNK])


def test_a_graphs_replay_writes_too(bench: Bench) -> None:
    bench.gpu.begin_capture(bench.a)
    bench.write(bench.a, 0, 512)
    graph = bench.gpu.end_capture(bench.a)
    bench.fill(7)
    assert bench.read(0, 512) == b"\7" * 512
    graph.launch(bench.b)
    bench.gpu.run_until_idle()
    assert bench.read(0, 512) == bytes([JUNK]) * 512


def test_what_is_handed_out_is_followed_no_more(bench: Bench) -> None:
    bench.fill(7)
    bench.write(bench.a, 0, 4096, us=5)
    bench.gpu.hand_out(bench.ptr + 1024, 1024, object())
    assert bench.read() == b"\7" * 1024 + bytes(1024) + b"\7" * 2048
    bench.gpu.run_until_idle()
    assert bench.read() == bytes([JUNK]) * 1024 + bytes(1024) + bytes([JUNK]) * 2048
    bench.gpu.hand_out(bench.ptr, 4096, object())
    assert not bench.gpu.contents


def test_what_goes_back_to_the_driver_is_forgotten(bench: Bench) -> None:
    bench.fill(7)
    with bench.gpu.scope():
        bench.gpu.stream_synchronize(bench.own)
        bench.gpu.mem_free(bench.ptr)
    assert not bench.gpu.contents


def test_the_oracle_sees_the_pools_own_accesses(bench: Bench) -> None:
    bench.write(bench.a, 0, 512)
    bench.fill(7, 512, 512)
    assert bench.gpu.races == []
    bench.fill(7, 0, 512)  # nobody has waited for the kernel
    (race,) = bench.gpu.races
    assert race.second.allocation == "the pool itself" and race.second.write


def test_a_read_of_the_pools_own_races_with_a_write_and_not_once_it_was_waited_for(bench: Bench) -> None:
    bench.fill(7)
    bench.read()
    bench.write(bench.a, 0, 512)
    assert bench.gpu.races == []  # the host had waited
    bench.read()
    assert len(bench.gpu.races) == 1


def test_memory_that_is_not_there_is_refused(bench: Bench) -> None:
    for at, nbytes in ((1 << 40, 512), (0, 0)):
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
            bench.fill(7, at, nbytes)
    assert len(bench.gpu.violations) == 2


def test_r10_a_copy_needs_a_relaxed_thread_and_neither_call_a_captured_stream(bench: Bench) -> None:
    buffer = ctypes.create_string_buffer(16)
    host = ctypes.addressof(buffer)
    gpu = bench.gpu
    gpu.begin_capture(bench.a, "global")
    with gpu.scope():
        gpu.mem_set_async(bench.ptr, 7, 16, bench.own)
        gpu.mem_copy_to_host_async(host, bench.ptr, 16, bench.own)
    gpu.end_capture(bench.a)
    gpu.begin_capture(bench.a, "global")
    with gpu.program_scope(), pytest.raises(DriverError, match="CAPTURE"):
        gpu.mem_copy_to_host_async(host, bench.ptr, 16, bench.own)
    with pytest.raises(DriverError):
        gpu.end_capture(bench.a)
    gpu.begin_capture(bench.a, "relaxed")
    with gpu.scope(), pytest.raises(DriverError, match="CAPTURE"):
        gpu.mem_set_async(bench.ptr, 7, 16, bench.a.handle)
    with pytest.raises(DriverError):
        gpu.end_capture(bench.a)


def test_on_legacy_it_is_work_like_any_other(bench: Bench) -> None:
    blocking = Stream(bench.gpu, non_blocking=False)
    bench.gpu.launch(blocking, 10 * US, writes=[(bench.ptr, 512)])
    with bench.gpu.scope():
        bench.gpu.mem_set_async(bench.ptr, 7, 512, LEGACY)  # behind the kernel: no race
    assert bench.gpu.races == []
    bench.gpu.run_until_idle()
    assert bench.gpu.contents.read(bench.ptr, 512, bench.gpu.now_ns) == b"\7" * 512

"""Checked mode: a late writer is found and named, an honest program is left alone, and each half of it is needed."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from allocator import (
    CachingAllocator,
    Config,
    CorruptionError,
    DriverError,
    Event,
    OutOfMemoryError,
    PoolClosed,
    SimDevice,
    Stream,
)
from allocator.blocks import LIVE
from allocator.caching.canary import PATTERN, Canary
from allocator.caching.checked_shelves import CheckedShelves
from allocator.caching.shelves import Shelves

KIB = 1 << 10
MIB = 1 << 20
SIZE = 4 * MIB
US = 1000


class Lab:
    """A device, streams by name, and checked pools.  Races are looked at where a test is about them."""

    def __init__(self) -> None:
        self.gpu = SimDevice(memory=256 * MIB)
        self.a, self.b, self.c = (Stream(self.gpu, name=name) for name in "abc")
        self.pools: list[CachingAllocator] = []

    def pool(self, **options: Any) -> CachingAllocator:
        options.setdefault("canary", True)
        self.pools.append(CachingAllocator(self.gpu, config=Config(**options), name=f"lab{len(self.pools)}"))
        return self.pools[-1]

    def used(self, pool: CachingAllocator, stream: Stream, nbytes: int = SIZE, us: int = 1) -> tuple[int, int]:
        """Memory that was allocated, written, freed and filled: (ptr, size)."""
        x = pool.allocate(nbytes, stream=stream)
        self.gpu.launch(stream, us * US, writes=[x])
        span = x.ptr, x.size
        x.close()
        self.gpu.run_until_idle()
        pool.stats()
        return span

    def write(self, stream: Stream, span: tuple[int, int], us: int = 1) -> None:
        """The user's bug: a kernel on memory that was given back; it has finished when this returns."""
        self.gpu.launch(stream, us * US, writes=[span])
        self.gpu.run_until_idle()


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab()
    yield lab
    lab.gpu.before_call = None
    lab.gpu.clear_faults()
    lab.gpu.run_until_idle()
    gc.collect()
    for pool in lab.pools:
        pool.close()
    with CachingAllocator(lab.gpu, config=Config()) as other:
        for _ in range(100):  # a thread of another test may be giving it back at this moment
            other.stats()
            if lab.gpu.used_bytes == 0:
                break
            time.sleep(0.01)
    assert lab.gpu.used_bytes == 0
    assert lab.gpu.violations == []


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text and "\n" not in text
    return text


# -- an honest program --------------------------------------------------------------------------------


def test_free_memory_is_filled_once_its_work_is_over_and_not_before(lab: Lab) -> None:
    pool = lab.pool()
    x = pool.allocate(SIZE, stream=lab.a)
    lab.gpu.launch(lab.a, 5 * US, writes=[x])
    x.close()
    pool.stats()
    filled = lab.gpu.calls["cuMemsetD8Async"]
    assert pool.stats().in_flight_bytes == SIZE
    lab.gpu.run_until_idle()
    stats = pool.stats()
    assert lab.gpu.calls["cuMemsetD8Async"] == filled + 1
    assert (stats.in_flight_bytes, stats.idle_bytes) == (0, SIZE)
    assert bytes(lab.gpu.contents.read(x.ptr, SIZE, lab.gpu.now_ns)) == bytes([PATTERN]) * SIZE


def test_memory_serves_every_stream_again_and_counts_as_ever(lab: Lab) -> None:
    pool = lab.pool()
    for stream in (lab.a, lab.a, lab.b):
        assert lab.used(pool, stream) == lab.used(pool, stream)
        pool.check()
    stats = pool.stats()
    assert stats.reserved_bytes == SIZE
    assert stats.allocations["new_memory"] == 1
    assert stats.allocations["same_stream"] + stats.allocations["opportunistic"] == 5
    assert lab.gpu.races == []


def test_the_own_stream_too_gets_a_block_only_once_its_work_is_over(lab: Lab) -> None:
    pool = lab.pool()
    x = pool.allocate(SIZE, stream=lab.a)
    lab.gpu.launch(lab.a, 5 * US, writes=[x])
    x.close()
    y = pool.allocate(SIZE, stream=lab.a)
    assert y.ptr != x.ptr
    y.close()


def test_at_the_limit_the_host_waits_for_the_own_stream(lab: Lab) -> None:
    pool = lab.pool(limit=SIZE)
    for _ in range(5):
        x = pool.allocate(SIZE, stream=lab.a)
        lab.gpu.launch(lab.a, 5 * US, writes=[x])
        x.close()
    stats = pool.stats()
    assert (stats.reserved_bytes, stats.out_of_memory, stats.stream_waits) == (SIZE, 0, 0)
    assert stats.out_of_memory_retries["host_wait"] == 4
    assert lab.gpu.races == []


def test_a_wait_put_on_a_stream_is_not_enough(lab: Lab) -> None:
    pool = lab.pool()
    x = pool.allocate(SIZE, stream=lab.a)
    lab.gpu.launch(lab.a, 5 * US, writes=[x])
    x.close()
    lab.b.wait_stream(lab.a)
    y = pool.allocate(SIZE, stream=lab.b)
    assert y.ptr != x.ptr
    assert pool.stats().allocations["event_dependency"] == 0
    y.close()


def test_memory_that_a_block_grew_by_is_not_taken_for_filled(lab: Lab) -> None:
    pool = lab.pool()
    lab.used(pool, lab.a, 2 * MIB)
    for nbytes in (3 * MIB, 5 * MIB, 2 * MIB, MIB, 7 * MIB):
        lab.used(pool, lab.a, nbytes)
        pool.check()
    reserved = pool.stats().reserved_bytes
    assert pool.trim() == reserved > 0
    assert pool.corruptions == 0 and lab.gpu.races == []


def test_without_the_option_nothing_is_filled_or_read(lab: Lab) -> None:
    pool = lab.pool(canary=False)
    lab.write(lab.b, lab.used(pool, lab.a))
    pool.allocate(SIZE, stream=lab.b).close()
    pool.check()
    assert not {"cuMemsetD8Async", "cuMemcpyDtoHAsync"} & set(lab.gpu.calls)
    assert (pool.corruptions, pool.damaged_bytes) == (0, 0)
    assert not isinstance(pool._shelves, CheckedShelves) and not pool.front.careful


def test_the_environment_switches_it_on() -> None:
    assert Config.from_env({"WEIR_CANARY": "1"}).canary
    assert not Config().canary


# -- a late writer --------------------------------------------------------------------------------


def test_a_write_on_the_same_stream_after_the_free_is_found(lab: Lab) -> None:
    pool = lab.pool()
    span = lab.used(pool, lab.a)
    lab.write(lab.a, (span[0] + KIB, 3 * KIB))
    with pytest.raises(CorruptionError) as caught:
        pool.allocate(SIZE, stream=lab.a)
    error = caught.value
    assert (error.pool, error.ptr, error.nbytes, error.damaged) == (pool.name, span[0] + KIB, 3 * KIB, 3 * KIB)
    assert error.found == b"\x5a" * 16 and error.requested == SIZE and error.generation > 0
    assert error.owner == "stream 'a' (non-blocking)" and error.users == ()
    assert error.writer is None and len(error.candidates) == 3  # nobody was seen at work: it may have been any of them
    text = one_line(error)
    for part in (pool.name, hex(error.ptr), "3072 bytes", "5a 5a", "stream 'a'", "4.00 MiB", "record_stream"):
        assert part in text


def test_the_only_stream_there_is_is_named(lab: Lab) -> None:
    pool = lab.pool()
    for stream in (lab.b, lab.c):
        stream.close()
    lab.write(lab.a, lab.used(pool, lab.a))
    with pytest.raises(CorruptionError, match="the only stream known") as caught:
        pool.check()
    assert caught.value.writer == "stream 'a' (non-blocking)"


def test_the_one_stream_that_was_at_work_is_named(lab: Lab) -> None:
    """`b` reads and writes a block that nobody declared it to use, and is late."""
    pool = lab.pool()
    x = pool.allocate(1000, stream=lab.a)
    lab.gpu.launch(lab.b, 100 * US, writes=[x])
    x.close()
    pool.stats()  # `a` is idle: filled, while `b` is at work
    lab.gpu.run_until_idle()
    with pytest.raises(CorruptionError, match=r"written by stream 'b'.*only stream with unfinished work") as caught:
        pool.allocate(1000, stream=lab.c)
    assert caught.value.writer == "stream 'b' (non-blocking)" and caught.value.candidates == (caught.value.writer,)
    assert caught.value.requested == 1000


def test_two_streams_at_work_are_both_candidates(lab: Lab) -> None:
    pool = lab.pool()
    x = pool.allocate(SIZE, stream=lab.a)
    lab.gpu.launch(lab.b, 100 * US, writes=[(x.ptr, 512)])
    lab.gpu.launch(lab.c, 200 * US)
    x.close()
    pool.stats()
    lab.gpu.run_until_idle()
    with pytest.raises(CorruptionError, match="one of the streams with unfinished work") as caught:
        pool.allocate(SIZE, stream=lab.a)
    assert set(caught.value.candidates) == {"stream 'b' (non-blocking)", "stream 'c' (non-blocking)"}
    assert caught.value.writer is None


def test_a_stream_that_was_done_before_the_fill_is_no_candidate(lab: Lab) -> None:
    pool = lab.pool(limit=SIZE)
    x = pool.allocate(SIZE, stream=lab.a)
    lab.gpu.launch(lab.a, 10 * US, writes=[x])
    lab.gpu.launch(lab.b, 900 * US, writes=[x])
    x.close()
    y = pool.allocate(SIZE, stream=lab.a)  # waits for `a`, then fills and verifies, and `b` has not written yet
    y.close()
    pool.stats()
    lab.gpu.run_until_idle()
    with pytest.raises(CorruptionError) as caught:
        pool.allocate(SIZE, stream=lab.a)
    assert caught.value.writer == "stream 'b' (non-blocking)"


def test_work_on_legacy_is_told_from_work_on_blocking_streams(lab: Lab) -> None:
    pool = lab.pool()
    legacy, blocking = Stream.legacy(lab.gpu), Stream(lab.gpu, non_blocking=False, name="blocking")
    for late, name in ((legacy, "the legacy stream"), (blocking, "stream 'blocking' (blocking)")):
        x = pool.allocate(SIZE, stream=lab.a)
        lab.gpu.launch(late, 100 * US, writes=[x])
        x.close()
        pool.stats()
        lab.gpu.run_until_idle()
        with pytest.raises(CorruptionError) as caught:
            pool.allocate(SIZE, stream=lab.b)
        assert caught.value.writer == name


def test_a_stream_that_has_ended_is_still_named(lab: Lab) -> None:
    pool = lab.pool()
    gone = Stream(lab.gpu, name="gone")
    x = pool.allocate(SIZE, stream=lab.a)
    lab.gpu.launch(gone, 100 * US, writes=[x])
    x.close()
    gone.close()
    pool.stats()
    lab.gpu.run_until_idle()
    with pytest.raises(CorruptionError) as caught:
        pool.check()
    assert caught.value.writer == "stream 'gone' (non-blocking)"


def test_declared_users_are_named_and_a_declared_use_is_no_mistake(lab: Lab) -> None:
    pool = lab.pool()
    x = pool.allocate(SIZE, stream=lab.a)
    x.record_stream(lab.b)
    lab.b.wait_stream(lab.a)
    lab.gpu.launch(lab.b, 100 * US, writes=[x])
    span = x.ptr, x.size
    x.close()
    pool.stats()
    lab.gpu.run_until_idle()
    pool.check()
    lab.write(lab.c, span)
    with pytest.raises(CorruptionError, match="also used on stream 'b'") as caught:
        pool.check()
    assert caught.value.users == ("stream 'b' (non-blocking)",)


def test_after_split_and_merge_the_last_owner_of_the_very_bytes_is_named(lab: Lab) -> None:
    pool = lab.pool()
    parts = [pool.allocate(n * MIB, stream=s) for n, s in ((1, lab.a), (2, lab.b), (1, lab.c))]
    spans = sorted((x.ptr, x.size, x.stream.name) for x in parts)
    parts.clear()
    pool.stats()
    assert pool.stats().blocks["idle"] == 1
    for ptr, size, name in spans:
        lab.write(lab.a, (ptr + size - 512, 512))
        with pytest.raises(CorruptionError) as caught:
            pool.check()
        assert (caught.value.ptr, caught.value.nbytes) == (ptr + size - 512, 512)
        assert caught.value.owner == f"stream '{name}' (non-blocking)" and caught.value.requested == size
    assert pool.damaged_bytes == 3 * 512
    big = pool.allocate(MIB - 512, stream=lab.b)
    big.close()


def test_bytes_that_nobody_has_had_are_watched_as_well(lab: Lab) -> None:
    pool = lab.pool()
    kept = pool.allocate(KIB, stream=lab.a)
    pool.stats()
    lab.write(lab.a, (kept.ptr + 4 * KIB, KIB))  # past the end
    with pytest.raises(CorruptionError, match="nobody has had them") as caught:
        pool.check()
    assert (caught.value.owner, caught.value.requested, caught.value.generation) == ("", 0, 0)
    kept.close()


def test_two_writes_are_one_report_from_the_first_byte_to_the_last(lab: Lab) -> None:
    pool = lab.pool()
    ptr, _ = lab.used(pool, lab.a, 16 * MIB)
    lab.write(lab.a, (ptr + MIB, 100))
    lab.write(lab.a, (ptr + 11 * MIB, 200))
    with pytest.raises(CorruptionError, match="300 of them wrong") as caught:
        pool.check()
    assert (caught.value.ptr, caught.value.nbytes, caught.value.damaged) == (ptr + MIB, 10 * MIB + 200, 300)


# -- where it is found ----------------------------------------------------------------------------

FINDERS: dict[str, Callable[[CachingAllocator], object]] = {
    "check": CachingAllocator.check,
    "trim": CachingAllocator.trim,
    "close": CachingAllocator.close,
    "set_limit": lambda pool: pool.set_limit(1),
    "allocate": lambda pool: pool.allocate(SIZE),
    "release for another size": lambda pool: pool.allocate(256 * MIB),
}


@pytest.mark.parametrize("backing", ["vmm", "malloc"])
@pytest.mark.parametrize("how", FINDERS)
def test_the_call_that_finds_it_raises_and_logs_once_and_the_pool_stays_usable(
    lab: Lab, how: str, backing: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = lab.pool(backing=backing)
    span = lab.used(pool, lab.a)
    lab.write(lab.b, (span[0], 512))
    with caplog.at_level(logging.ERROR, "allocator"), pytest.raises(CorruptionError) as caught:
        FINDERS[how](pool)
    assert [record.getMessage() for record in caplog.records] == [str(caught.value)]
    if how != "close":
        assert (pool.corruptions, pool.damaged_bytes) == (1, 512)
        pool.set_limit(0)
        pool.check()
        with pool.allocate(SIZE, stream=lab.c) as x:
            assert not x.ptr <= span[0] < x.ptr + x.size  # never handed out again
        stats = pool.stats()
        assert stats.in_flight_bytes >= 512
        assert stats.blocks["live"] == 0


def test_memory_of_a_pool_that_was_dropped_is_verified_and_what_is_wrong_only_logged(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    pool = lab.pool()
    lab.write(lab.b, lab.used(pool, lab.a))
    lab.pools.clear()
    with caplog.at_level(logging.ERROR, "allocator"):
        del pool
        gc.collect()
        with CachingAllocator(lab.gpu, config=Config()) as other:
            other.stats()
    assert len(caplog.records) == 1 and "was written after it had been freed" in caplog.text


def test_an_error_of_the_body_is_not_hidden_by_what_close_finds(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError), lab.pool() as pool:
        lab.write(lab.b, lab.used(pool, lab.a))
        raise KeyError("mine")
    assert "was written after" in caplog.text
    with pytest.raises(CorruptionError), lab.pool() as pool:
        lab.write(lab.b, lab.used(pool, lab.a))
    assert pool.closed


def test_damaged_memory_goes_back_only_when_every_stream_is_idle(lab: Lab) -> None:
    pool = lab.pool()
    lab.write(lab.b, lab.used(pool, lab.a))
    with pytest.raises(CorruptionError):
        pool.check()
    lab.gpu.launch(lab.b, 100 * US)  # the writer may write again
    pool.close()
    assert lab.gpu.used_bytes == SIZE
    lab.gpu.run_until_idle()
    with CachingAllocator(lab.gpu, config=Config()) as other:
        other.stats()
    assert lab.gpu.used_bytes == 0


def test_the_private_stream_goes_with_the_pool(lab: Lab) -> None:
    before = lab.gpu.calls["cuStreamDestroy"]
    pool = lab.pool()
    lab.used(pool, lab.a)
    pool.close()
    assert lab.gpu.calls["cuStreamDestroy"] == before + 1
    with pytest.raises(PoolClosed):
        pool.allocate(1)


# -- trouble --------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["cuMemsetD8Async", "cuMemcpyDtoHAsync", "cuStreamSynchronize"])
@pytest.mark.parametrize("backing", ["vmm", "malloc"])
def test_s10_a_call_of_its_own_may_fail_at_any_position_and_nothing_is_lost(call: str, backing: str) -> None:
    def run(at: int) -> int:
        lab = Lab()
        pool = lab.pool(backing=backing)
        before = lab.gpu.calls[call]
        if at:
            lab.gpu.fail(call, at=at, error="CUDA_ERROR_INVALID_VALUE")
        for step in range(6):
            try:
                lab.used(pool, (lab.a, lab.b)[step % 2], (step % 3 + 1) * MIB)
                if step == 3:
                    pool.trim()
            except DriverError as error:
                assert error.call == call
            stats = pool.stats()
            assert stats.reserved_bytes == stats.allocated_bytes + stats.in_flight_bytes + stats.idle_bytes
            assert stats.blocks["live"] == 0
        made = lab.gpu.calls[call] - before
        lab.gpu.clear_faults()
        pool.check()
        lab.used(pool, lab.c, 9 * MIB)
        pool.close()
        assert (lab.gpu.used_bytes, lab.gpu.races, lab.gpu.violations) == (0, [], [])
        return made

    for at in range(1, run(0) + 1):
        run(at)


def test_memory_that_could_not_be_filled_is_not_served_before_it_was(lab: Lab) -> None:
    pool = lab.pool(limit=SIZE, wait_timeout=0)
    x = pool.allocate(SIZE, stream=lab.a)
    lab.gpu.fail("cuMemsetD8Async", error="CUDA_ERROR_INVALID_VALUE", times=0)
    x.close()
    with pytest.raises(OutOfMemoryError):
        pool.allocate(SIZE, stream=lab.a)
    lab.gpu.clear_faults()
    pool.allocate(SIZE, stream=lab.a).close()


@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemRelease"])
def test_s10_memory_that_the_driver_does_not_take_back_is_filled_again_or_tried_again(lab: Lab, call: str) -> None:
    pool = lab.pool()
    lab.used(pool, lab.a)
    lab.gpu.fail(call, error="CUDA_ERROR_UNKNOWN")
    assert pool.trim() == 0
    pool.check()
    pool.stats()
    pool.trim()
    assert lab.gpu.used_bytes == 0 and pool.stats().reserved_bytes == 0
    lab.used(pool, lab.b)
    pool.check()
    assert lab.gpu.races == []


def test_s16_memory_that_another_thread_is_reading_is_waited_for_before_an_error(lab: Lab) -> None:
    """The reader stands still until the allocation has begun to wait, which only the reader's end can end."""
    pool = lab.pool(limit=SIZE, wait_timeout=30)
    lab.used(pool, lab.a)
    reading, go_on = threading.Event(), threading.Event()

    def hook(name: str) -> None:
        if name == "cuMemcpyDtoHAsync" and threading.current_thread() is reader:
            reading.set()
            assert go_on.wait(30)

    lab.gpu.before_call = hook
    reader = threading.Thread(target=pool.check)
    reader.start()
    assert reading.wait(30)
    canary = pool._canary
    assert canary is not None and canary.at_work

    def release_the_reader(nbytes: int) -> bool:
        go_on.set()
        return False

    pool.on_out_of_memory(release_the_reader)  # step 10; 9 has found nothing
    x = pool.allocate(SIZE, stream=lab.b)
    reader.join(30)
    assert not reader.is_alive()
    x.close()


def test_r11_a_lost_device_is_no_second_error(lab: Lab) -> None:
    gpu = SimDevice()
    pool = CachingAllocator(gpu, config=Config(canary=True))
    pool.allocate(SIZE).close()
    pool.stats()
    gpu.fail("cuMemcpyDtoHAsync", error="CUDA_ERROR_ILLEGAL_ADDRESS", sticky=True)
    with pytest.raises(DriverError):
        pool.allocate(SIZE)
    with pytest.raises(DriverError):
        pool.trim()
    pool.close()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("non_blocking", [True, False])
def test_r10_no_capture_is_harmed(lab: Lab, mode: str, non_blocking: bool) -> None:
    pool = lab.pool()
    captured = Stream(lab.gpu, non_blocking=non_blocking)
    x = pool.allocate(SIZE, stream=captured)
    y = pool.allocate(SIZE, stream=lab.a)
    lab.gpu.begin_capture(captured, mode)
    lab.gpu.launch(captured, US, writes=[x])
    y.close()
    lab.used(pool, lab.a)
    pool.check()
    pool.trim()
    lab.gpu.end_capture(captured)
    x.close()
    lab.gpu.run_until_idle()
    pool.check()
    assert lab.gpu.races == []


def test_s16_a_hook_may_use_the_pool_in_the_middle_of_a_fill_and_a_read(lab: Lab) -> None:
    pool = lab.pool()
    seen: set[str] = set()
    me = threading.get_ident()

    def hook(name: str) -> None:
        if threading.get_ident() == me and name in ("cuMemsetD8Async", "cuMemcpyDtoHAsync", "cuStreamSynchronize"):
            seen.add(name)
            thread = threading.Thread(target=lambda: pool.allocate(MIB, stream=lab.c).close())
            thread.start()
            thread.join(30)
            assert not thread.is_alive()
            pool.stats()

    lab.used(pool, lab.a)
    lab.gpu.before_call = hook
    lab.used(pool, lab.a)
    lab.gpu.before_call = None
    assert len(seen) == 3
    pool.check()
    assert lab.gpu.races == []


def test_s15_threads_share_a_checked_pool(lab: Lab) -> None:
    pool = lab.pool(limit=16 * MIB)
    errors: list[BaseException] = []

    def work(stream: Stream, seed: int) -> None:
        try:
            for i in range(25):
                with pool.allocate(((i + seed) % 3 + 1) * 512 * KIB, stream=stream) as x:
                    lab.gpu.launch(stream, US, writes=[x])
                if i % 8 == seed:
                    pool.trim()
                    pool.stats()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(s, i)) for i, s in enumerate((lab.a, lab.b, lab.c))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    lab.gpu.run_until_idle()
    pool.settle()
    pool.check()
    assert lab.gpu.races == [] and pool.stats().in_flight_bytes == 0


def test_s21_a_forked_child_says_nothing_and_hangs_nowhere(lab: Lab) -> None:
    pool = lab.pool()
    kept = pool.allocate(SIZE, stream=lab.a)
    lab.write(lab.b, lab.used(pool, lab.a))
    child = os.fork()
    if child == 0:
        try:
            kept.close()
            pool.close()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    kept.close()
    with pytest.raises(CorruptionError):
        pool.close()


def test_a_process_ends_without_a_word_also_with_damage_that_nobody_has_found() -> None:
    code = (
        "import allocator\n"
        "gpu = allocator.SimDevice()\n"
        "pool = allocator.CachingAllocator(gpu, config=allocator.Config(canary=True))\n"
        "a = allocator.Stream(gpu); x = pool.allocate(1000, stream=a); span = x.ptr, x.size; x.close()\n"
        "gpu.hold(a); gpu.launch(a, writes=[span])\n"
        "cycle = [pool.allocate(5), pool, a]; cycle.append(cycle)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_streams_that_come_and_go_leave_no_names_behind(lab: Lab) -> None:
    pool = lab.pool()
    for _ in range(300):
        stream = Stream(lab.gpu)
        with pool.allocate(512, stream=stream) as x:
            lab.gpu.launch(stream, US, writes=[x])
        pool.stats()
        stream.close()
        lab.gpu.run_until_idle()
    canary = pool._canary
    assert canary is not None and len(canary._busy) <= 257
    shelves = pool._shelves
    assert isinstance(shelves, CheckedShelves) and len(shelves.tenants) <= 16 and len(shelves.fills) <= 16


# -- each half is needed --------------------------------------------------------------------------------


def late_writer(lab: Lab) -> bool:
    """Is the write after the free found?"""
    pool = lab.pool()
    span = lab.used(pool, lab.a)
    lab.write(lab.b, span)
    try:
        pool.allocate(SIZE, stream=lab.a).close()
    except CorruptionError:
        return True
    return False


def honest_program(lab: Lab) -> bool:
    """Is a program that does nothing wrong left alone, and its pool as well?"""
    pool = lab.pool(limit=3 * SIZE)
    event = Event(lab.gpu)
    try:
        for i in range(12):
            one, other = ((lab.a, lab.b), (lab.b, lab.c), (lab.c, lab.a))[i % 3]
            x = pool.allocate(SIZE, stream=one)
            lab.gpu.launch(one, 7 * US, writes=[x])
            event.record(one)
            event.wait(other)
            x.record_stream(other)
            lab.gpu.launch(other, 5 * US, writes=[x])
            x.close()
            lab.gpu.advance(3 * US)
            if i % 4 == 3:
                pool.stats()
        lab.gpu.run_until_idle()
        pool.check()
    except CorruptionError:
        return False
    return lab.gpu.races == []


def test_without_a_mutation_both_are_so(lab: Lab) -> None:
    assert honest_program(lab) and late_writer(lab)


def _no_fill(canary: Canary) -> None:
    shelves = canary._shelves
    with canary._lock:
        for block in shelves.set_aside():
            for start, end in shelves.fills.gaps(block.ptr, block.end):
                shelves.fills.set(start, end, 0)
            shelves.fills.forget(block.ptr, block.end)
            shelves.aside[block.kind].remove(block)
            Shelves.put_idle(shelves, block)


@pytest.mark.source
def test_mutant_skipping_the_fill_is_caught(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Canary, "_fill_all", _no_fill)
    assert not late_writer(lab)


@pytest.mark.source
def test_mutant_skipping_the_verification_is_caught(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Canary, "serve", lambda self, block: self._shelves.moved_in(block))
    assert not late_writer(lab)


@pytest.mark.source
def test_mutant_a_bin_passes_the_verification_by_is_caught(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckedShelves, "hand_out", Shelves.hand_out)
    assert not late_writer(lab)


@pytest.mark.source
def test_mutant_filling_before_the_work_is_over_is_caught(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def place(self: CheckedShelves, block: Any) -> None:
        if block.state == LIVE:
            self.leaves(block)
        self.put_idle(block)

    monkeypatch.setattr(CheckedShelves, "place", place)
    monkeypatch.setattr(CheckedShelves, "check", lambda self: None)
    assert not honest_program(lab)


@pytest.mark.source
def test_mutant_a_block_that_the_stream_only_waited_for_is_caught(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckedShelves, "take", Shelves.take)
    monkeypatch.setattr(CheckedShelves, "put_idle", Shelves.put_idle)
    assert not late_writer(lab)


@pytest.mark.source
def test_mutant_handing_out_before_the_fill_is_known_to_be_over_is_caught(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimDevice, "stream_synchronize", lambda self, stream: None)
    assert not honest_program(lab)


def test_r10_memory_of_a_reported_capture_is_its_graphs_until_that_has_gone(lab: Lab) -> None:
    """Replays write what the capture had: nothing of it is filled, and so nobody is accused, while the graph lives."""
    pool = lab.pool()
    captures = pool._registry.captures
    line, handle = lab.a.line, lab.a.handle
    before = pool.allocate(SIZE, stream=lab.b)
    lab.used(pool, lab.b)  # idle: serves the capture, verified meanwhile
    capture = captures.begin(line, handle)
    lab.gpu.begin_capture(lab.a)
    inner = pool.allocate(SIZE, stream=lab.a)
    lab.gpu.launch(lab.a, US, writes=[inner, before])
    spans = [(x.ptr, x.size) for x in (inner, before)]
    inner.close()
    again = pool.allocate(SIZE, stream=lab.a)
    again.close()
    graph = lab.gpu.end_capture(lab.a)
    token = captures.end(capture)
    before.close()
    for _ in range(3):
        graph.launch(lab.b)
        lab.gpu.run_until_idle()
        pool.check()
        with pool.allocate(SIZE, stream=lab.c) as x:
            assert all(not x.ptr < ptr + size or not ptr < x.ptr + x.size for ptr, size in spans)
    graph.close()
    del token
    pool.stats()
    lab.gpu.run_until_idle()
    pool.settle()
    pool.check()
    stats = pool.stats()
    assert (stats.in_flight_bytes, stats.private_bytes, pool.corruptions) == (0, 0, 0)
    assert lab.gpu.races == []

"""The memory behind CuPy's arrays: whose it is, how long it lives, and what CuPy is told."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import sys
import threading
import warnings
import weakref
from typing import Any

import cupy
import pytest

from allocator import CachingAllocator, SimDevice
from allocator.integrations.cupy.installation import Installation
from allocator.integrations.cupy.lease import HOOKS
from allocator.integrations.cupy.memory import Memory
from tests.unit.integrations.cupy.conftest import Start
from tests.unit.integrations.cupy.fakes import FakeCupy, array, span

MIB = 1 << 20


def test_an_array_holds_memory_of_the_pool(pool: CachingAllocator) -> None:
    a = cupy.ndarray((1000,), dtype=cupy.float32)
    memory = a.data.mem
    assert isinstance(memory, Memory)
    assert memory.size == 4096 == pool.allocated_bytes and memory.requested == 4000
    assert memory.device_id == 0 and memory.pool is pool and not memory.closed
    assert memory.identity == "Weir" and "4096 bytes" in repr(memory)
    assert a.data.ptr == memory.ptr and memory.ptr % 512 == 0


def test_the_size_is_the_whole_block_for_programs_that_write_over_all_of_it(pool: CachingAllocator) -> None:
    for nbytes in (1, 511, 512, 513, 5 * MIB + 1):
        assert array(nbytes).data.mem.size == (nbytes + 511) // 512 * 512
    assert pool.allocated_bytes == 0


def test_s26_zero_bytes_are_pointer_zero_and_no_driver_call(pool: CachingAllocator, gpu: SimDevice) -> None:
    array(1)
    allocations = pool.stats().allocations
    before = dict(gpu.calls)
    pointer = cupy.cuda.alloc(0)
    assert (pointer.ptr, pointer.mem.ptr, pointer.mem.size) == (0, 0, 0)
    pointer.mem.free()
    del pointer
    assert cupy.ndarray((0, 5)).data.ptr == 0
    assert dict(gpu.calls) == before
    assert pool.stats().allocations == allocations


def test_memory_of_zero_bytes_is_closed_and_its_end_frees_nothing(pool: CachingAllocator) -> None:
    memory = cupy.cuda.alloc(0).mem
    assert isinstance(memory, Memory) and memory.closed
    assert (memory.lease, memory.pool, memory.requested) == (None, None, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del memory
    assert pool.stats().pending_frees == 0 and pool._accounts.frees == 0


@pytest.mark.parametrize("nbytes", [0, 4096])
def test_memory_is_not_copied_as_a_copy_would_not_hold_it(pool: CachingAllocator, nbytes: int) -> None:
    memory = cupy.cuda.alloc(nbytes).mem
    for twice in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="copy the array"):
            twice(memory)
    assert pool.allocated_bytes == nbytes


@pytest.mark.parametrize("announced", [True, False])
def test_a_device_that_watches_is_told_of_each_array_for_as_long_as_the_pool_says_so(
    pool: CachingAllocator, announced: bool
) -> None:
    told: list[tuple[int, int, object]] = []
    pool.announce = (lambda *what: told.append((what[0], what[1], what[2]))) if announced else None
    arrays = [array(4096) for _ in range(3)]
    assert told == ([(one.data.ptr, 4096, one.data.mem) for one in arrays] if announced else [])
    told.clear()


def test_what_a_watcher_is_told_of_holds_its_block_already(pool: CachingAllocator) -> None:
    told: list[tuple[str, bool, int, object]] = []

    def watch(ptr: int, size: int, memory: Any) -> None:
        told.append((str(memory), memory.closed, memory.requested, memory.pool))

    pool.announce = watch
    for _ in range(2):  # new, and a hit
        array(4000)
    assert len(told) == 2 and all(what[1:] == (False, 4000, pool) and "closed" not in what[0] for what in told)


def test_a_watcher_may_come_and_go_while_the_pool_is_installed(pool: CachingAllocator) -> None:
    heard: list[int] = []
    for watcher in (None, lambda ptr, size, memory: heard.append(size), None):
        pool.announce = watcher
        array(512)
    assert heard == [512]


def test_memory_that_is_found_while_it_ends_says_so(pool: CachingAllocator, library: FakeCupy) -> None:
    """By a weak reference, which ends after the finaliser; its block is another's by then."""
    with library.Stream():
        held = array(4096)
        found, seen = weakref.ref(held.data.mem), []
        lane = pool.lane

        before = sys.getprofile()
        other = array(4096)
        del other  # the place is taken, so that ours is put into the deque as well

        def look(frame: Any, event: str, arg: object) -> None:
            if event == "c_call" and getattr(arg, "__name__", "") == "append" and found() is not None:
                seen.append(found().closed)  # type: ignore[union-attr]  # it is there still

        sys.setprofile(look)
        try:
            del held
        finally:
            sys.setprofile(before)
    assert lane is None or (seen and all(seen))


def test_a_watcher_that_fails_takes_no_memory_with_it(pool: CachingAllocator) -> None:
    def fail(*what: object) -> None:
        raise RuntimeError("the watcher fails")

    del [array(4096)][0]
    pool.announce = fail
    for nbytes in (4096, 8192):  # what was there, and what is new
        with pytest.raises(RuntimeError, match="the watcher fails"):
            array(nbytes)
    assert pool.allocated_bytes == 0
    pool.check()


@pytest.mark.parametrize("nbytes", [-1, -512])
def test_s26_a_negative_size_raises(pool: CachingAllocator, nbytes: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        cupy.cuda.alloc(nbytes)
    assert pool.allocated_bytes == 0


def test_numbers_of_other_kinds_are_sizes_too(pool: CachingAllocator) -> None:
    import numpy

    assert cupy.cuda.alloc(numpy.int64(700)).mem.size == 1024
    with pytest.raises(TypeError):
        cupy.cuda.alloc(7.5)


def test_views_slices_and_reshapes_keep_the_memory_until_the_last_goes(pool: CachingAllocator) -> None:
    whole = cupy.ndarray((64, 64), dtype=cupy.float32)
    ptr, held = whole.data.ptr, pool.allocated_bytes
    views = [whole[3:], whole.reshape(-1), whole.T, whole[::2, 1], whole.view(cupy.int32), whole.ravel()[5:9]]
    del whole
    while views:
        assert pool.allocated_bytes == held
        again = cupy.ndarray((64, 64), dtype=cupy.float32)
        assert again.data.ptr != ptr
        del again
        views.pop()
    assert pool.allocated_bytes == 0
    assert cupy.ndarray((64, 64), dtype=cupy.float32).data.ptr == ptr


ORDERS = list(itertools.permutations(("memory", "container", "other")))


@pytest.mark.parametrize("order", ORDERS, ids=["-".join(o) for o in ORDERS])
@pytest.mark.parametrize("way", ["list", "dict", "object", "closure"])
def test_every_array_in_a_dead_cycle_is_freed_whatever_was_made_first(
    pool: CachingAllocator, order: tuple[str, ...], way: str
) -> None:
    """50 of 50: CuPy's own `PythonFunctionAllocator` frees none where the container is younger than the memory."""

    class Node:
        pass

    def cycle() -> None:
        made: dict[str, Any] = {}
        for what in order:
            made[what] = array(4096) if what == "memory" else Node()
        container, other = made["container"], made["other"]
        container.other, other.container = other, container
        if way == "list":
            container.held = [made["memory"], other]
        elif way == "dict":
            container.held = {"memory": made["memory"], "back": container}
        elif way == "object":
            container.memory = made["memory"]
        else:
            memory = made["memory"]
            container.call = lambda: (memory, container)

    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            cycle()
        assert pool.allocated_bytes == 50 * 4096  # nothing but a collection can end them
        gc.collect()
        assert pool.allocated_bytes == 0
    finally:
        gc.enable()
    pool.check()


def test_an_array_held_by_a_caught_exception_lives_as_long_as_it(pool: CachingAllocator) -> None:
    def fail() -> None:
        held = array(4096)
        raise RuntimeError(str(held.size))

    try:
        fail()
    except RuntimeError as error:
        caught = error
    assert pool.allocated_bytes == 4096
    del caught
    assert pool.allocated_bytes == 0


def test_an_allocation_that_fails_half_way_leaves_nothing(pool: CachingAllocator, gpu: SimDevice) -> None:
    gpu.fail("cuMemCreate", error="CUDA_ERROR_UNKNOWN")
    with pytest.raises(Exception, match="cuMemCreate"):
        array(MIB)
    assert pool.allocated_bytes == 0
    pool.check()
    assert array(MIB).data.mem.size == MIB


def test_s22_the_last_reference_may_die_in_any_thread(pool: CachingAllocator) -> None:
    held = [array(4096) for _ in range(20)]
    threads = [threading.Thread(target=held.pop) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.allocated_bytes == 0
    pool.check()


def test_s15_threads_with_their_own_streams_share_the_pool(pool: CachingAllocator, library: FakeCupy) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with library.Stream(non_blocking=bool(seed % 2)) as stream:
                for i in range(200):
                    a, b = array(1000 + seed * i % 7000), array(512)
                    stream.kernel(reads=(a,), writes=(b,))
                    view = a[1:]
                    del a
                    stream.kernel(writes=(view,))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert pool.allocated_bytes == 0
    pool.check()


def test_free_gives_the_memory_back_at_once_and_only_once(pool: CachingAllocator) -> None:
    memory = array(4096).data.mem
    memory.free()
    assert memory.closed and memory.ptr == 0 and pool.allocated_bytes == 0
    memory.free()
    other = array(4096)
    del memory
    gc.collect()
    assert pool.allocated_bytes == 4096
    del other


def test_memory_keeps_its_pool(start: Start, gpu: SimDevice) -> None:
    start()
    a = array(4096)
    gc.collect()
    where = span(a)
    assert a.data.mem.pool.allocated_bytes == where[1]


# -- out of memory ----------------------------------------------------------------------------------


def test_failing_for_good_is_cupys_own_error_with_our_numbers(start: Start) -> None:
    pool = start(limit=4 * MIB, wait_timeout=0.0)
    held = array(4 * MIB)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError) as caught:
        array(MIB)
    assert type(caught.value) is cupy.cuda.memory.OutOfMemoryError
    assert "limit set to: 4,194,304 bytes" in str(caught.value) and "allocated so far: 4,194,304" in str(caught.value)
    assert any("pool" in note for note in caught.value.__notes__)
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    del held
    pool.check()


def test_a_retry_collects_dead_cycles_before_it_gives_up(start: Start) -> None:
    start(limit=4 * MIB)
    gc.disable()
    try:
        cycle: list[Any] = [array(4 * MIB)]
        cycle.append(cycle)
        del cycle
        assert array(4 * MIB).size == 4 * MIB
    finally:
        gc.enable()


def test_s07_an_error_that_is_kept_keeps_no_memory(start: Start) -> None:
    pool = start(limit=4 * MIB, wait_timeout=0.0)
    held = [array(2 * MIB), array(2 * MIB)]
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError) as caught:
        array(4 * MIB)
    held.clear()
    assert array(4 * MIB).size == 4 * MIB
    assert caught.value is not None and pool.allocated_bytes == 0


# -- CuPy's memory hooks ----------------------------------------------------------------------------


class Listener(cupy.cuda.MemoryHook):  # type: ignore[misc]  # CuPy's classes have no types
    name = "listener"

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, int]]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.endswith("process"):
            return lambda **named: self.heard.append((name, named))
        return super().__getattribute__(name)


def test_memory_hooks_hear_what_cupys_own_pool_would_tell_them(pool: CachingAllocator) -> None:
    with Listener() as listener:
        a = cupy.cuda.alloc(1000)
        memory, ptr = id(a.mem), a.ptr
        del a
        b = cupy.cuda.alloc(1000)
        assert b.ptr == ptr
    names = [name for name, _ in listener.heard]
    assert names == [
        "malloc_preprocess", "alloc_preprocess", "alloc_postprocess", "malloc_postprocess",
        "free_preprocess", "free_postprocess", "malloc_preprocess", "malloc_postprocess",
    ]  # fmt: skip
    told = dict(listener.heard[:6])
    assert told["malloc_preprocess"] == {"device_id": 0, "size": 1000, "mem_size": 1024}
    assert told["alloc_preprocess"] == {"device_id": 0, "mem_size": 1024}
    assert told["alloc_postprocess"] == {"device_id": 0, "mem_size": 1024, "mem_ptr": ptr}
    assert told["malloc_postprocess"] == {
        "device_id": 0, "size": 1000, "mem_size": 1024, "mem_ptr": ptr, "pmem_id": memory,
    }  # fmt: skip
    assert told["free_preprocess"] == told["free_postprocess"]
    assert told["free_preprocess"] == {"device_id": 0, "mem_size": 1024, "mem_ptr": ptr, "pmem_id": memory}
    del b
    assert len(listener.heard) == 8  # outside the `with` nothing is heard
    assert pool.allocated_bytes == 0


def test_what_allocates_looks_for_memory_hooks_from_the_first_one_on(
    pool: CachingAllocator, installation: Installation
) -> None:
    assert installation.hook.alone is not None and not HOOKS.seen
    for again in (False, True):
        if again:
            installation.install(pool)  # what has been seen stays seen
        with Listener() as listener:
            array(1000)
        assert [name for name, _ in listener.heard][-4:-2] == ["alloc_postprocess", "malloc_postprocess"] or again
        assert len(listener.heard) == (6 if not again else 4)
        assert HOOKS.seen and installation.hook.alone is None


def test_an_installation_that_fails_does_not_forget_that_there_are_memory_hooks(
    pool: CachingAllocator, installation: Installation
) -> None:
    assert installation.hook.alone is not None

    def fails() -> None:
        with Listener():
            pass
        raise RuntimeError("not now")

    installation.watch.start, start = fails, installation.watch.start  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="not now"):
        installation.install(pool)
    installation.watch.start = start  # type: ignore[method-assign]
    with Listener() as listener:
        array(1000)
    assert len(listener.heard) == 6


def test_cupys_own_line_profile_adds_up(pool: CachingAllocator) -> None:
    import io

    hook = cupy.cuda.memory_hooks.LineProfileHook()
    del [cupy.cuda.alloc(1000)][0]
    with hook:
        held = [cupy.cuda.alloc(1000), cupy.cuda.alloc(2000)]
    held.clear()
    report = io.StringIO()
    hook.print_report(file=report)
    assert "_root (3.00KB, 2.00KB)" in report.getvalue()  # handed out, and thereof not had by an array before


def test_memory_hooks_hear_of_an_allocation_that_fails(start: Start) -> None:
    start(limit=2 * MIB, wait_timeout=0.0)
    with Listener() as listener, pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        cupy.cuda.alloc(4 * MIB)
    assert [name for name, _ in listener.heard] == [
        "malloc_preprocess", "alloc_preprocess", "alloc_postprocess", "malloc_postprocess",
    ]  # fmt: skip
    assert listener.heard[-1][1] == {
        "device_id": 0, "size": 4 * MIB, "mem_size": 4 * MIB, "mem_ptr": 0, "pmem_id": 0,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_memory_hook_that_raises_at_a_free_loses_no_memory(pool: CachingAllocator) -> None:
    class Broken(cupy.cuda.MemoryHook):  # type: ignore[misc]  # CuPy's classes have no types
        name = "broken"

        def free_preprocess(self, **named: int) -> None:
            raise RuntimeError("broken")

    with Broken():
        a = array(4096)
        del a
    assert pool.allocated_bytes == 0


def test_the_hot_path_makes_no_driver_call(pool: CachingAllocator, library: FakeCupy, gpu: SimDevice) -> None:
    with library.Stream():
        array(4096)
        before = dict(gpu.calls)
        for _ in range(1000):
            array(4096)
        assert dict(gpu.calls) == before
    assert pool.stats().allocations["same_stream"] >= 1000

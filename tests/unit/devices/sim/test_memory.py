"""Physical memory, mapping rules, refusals, scope and fork."""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import dataclass

import pytest

from allocator.devices import LEGACY, Device, SimDevice
from allocator.errors import DriverError
from tests.unit.devices.sim.words import Words

PAGE = 2 << 20


@dataclass
class Block:
    """What the device needs of an allocation."""

    ptr: int
    size: int
    closed: bool = False


def mapped(gpu: SimDevice, pages: int = 1) -> int:
    ptr = gpu.mem_address_reserve(pages * PAGE)
    for i in range(pages):
        handle = gpu.mem_create(PAGE)
        gpu.mem_map(ptr + i * PAGE, PAGE, handle)
        gpu.mem_release(handle)
    gpu.mem_set_access(ptr, pages * PAGE)
    return ptr


def test_it_is_a_device() -> None:
    gpu: Device = SimDevice(memory=PAGE, ordinal=3, name="Toy")
    assert (gpu.ordinal, gpu.name, gpu.label, gpu.total_memory) == (3, "Toy", "sim:3", PAGE)
    assert gpu.watches and gpu.simulated and gpu.granularity == PAGE
    assert gpu.supports_virtual_memory and gpu.supports_context_events
    assert gpu.key != SimDevice(ordinal=3).key and hash(gpu.key) and hash(gpu)
    older: Device = SimDevice(virtual_memory=False, context_events=False)
    assert not older.supports_virtual_memory and not older.supports_context_events


def test_a_device_goes_when_nobody_holds_it() -> None:
    gpu = SimDevice()
    gpu.launch(LEGACY, 10)
    gpu.launch(2, 10)
    with gpu.scope():
        gpu.event_record(gpu.event_create(), LEGACY)
    gone = weakref.ref(gpu)
    del gpu
    gc.collect()
    assert gone() is None


def test_memory_is_counted_from_creation_until_it_is_released_and_unmapped(gpu: SimDevice) -> None:
    ptr = gpu.mem_address_reserve(4 * PAGE)
    assert gpu.used_bytes == 0
    handle = gpu.mem_create(PAGE)
    gpu.mem_map(ptr, PAGE, handle)
    gpu.mem_release(handle)
    assert gpu.used_bytes == PAGE
    assert gpu.mem_get_info() == ((1 << 30) - PAGE, 1 << 30)
    gpu.mem_unmap(ptr, PAGE)
    assert gpu.used_bytes == 0
    gpu.mem_address_free(ptr, 4 * PAGE)
    assert not gpu.violations


def test_a_full_device_says_so_and_counts_what_others_hold() -> None:
    gpu = SimDevice(memory=4 * PAGE, others=PAGE)
    with gpu.scope():
        gpu.mem_create(2 * PAGE)
        for ask in (gpu.mem_create, gpu.mem_alloc):
            with pytest.raises(DriverError) as caught:
                ask(2 * PAGE)
            assert caught.value.code == "CUDA_ERROR_OUT_OF_MEMORY" and not caught.value.sticky
        gpu.others = 0
        gpu.mem_alloc(2 * PAGE)
        assert gpu.mem_get_info() == (0, 4 * PAGE)
    assert not gpu.violations


def test_a_terabyte_of_addresses_can_be_reserved_many_times(gpu: SimDevice) -> None:
    ranges = {gpu.mem_address_reserve(1 << 40) for _ in range(50)}
    assert len(ranges) == 50
    for ptr in ranges:
        gpu.mem_address_free(ptr, 1 << 40)
    assert gpu.mem_address_reserve(1 << 40) == min(ranges)


def test_plain_allocations_touch_only_if_asked() -> None:
    for touching in (False, True):
        gpu = SimDevice(touching=touching)
        with gpu.scope():
            first, second = gpu.mem_alloc(PAGE), gpu.mem_alloc(1024)
            assert (first + PAGE == second) is touching
            assert first % 512 == 0 == second % 512
            assert gpu.used_bytes == PAGE + 1024
            gpu.mem_free(first)
            gpu.mem_free(second)
            assert gpu.used_bytes == 0 and gpu.mem_alloc(512) == first


def test_devices_have_addresses_of_their_own(gpu: SimDevice) -> None:
    other = SimDevice(ordinal=1)
    ours = gpu.mem_alloc(512)
    with other.scope():
        assert other.mem_alloc(512) != ours


@pytest.mark.parametrize(
    "mistake",
    [
        "map twice",
        "map over",
        "map unaligned",
        "map outside",
        "map part",
        "map released",
        "unmap part",
        "unmap nothing",
        "access nothing",
        "free addresses in use",
        "free addresses twice",
        "release twice",
        "free unknown",
        "free twice",
    ],
)
def test_a_mistake_is_refused_noted_and_changes_nothing(gpu: SimDevice, mistake: str) -> None:
    ptr = gpu.mem_address_reserve(4 * PAGE)
    big, one, two = gpu.mem_create(2 * PAGE), gpu.mem_create(PAGE), gpu.mem_create(PAGE)
    gpu.mem_map(ptr, 2 * PAGE, big)
    released = gpu.mem_create(PAGE)
    gpu.mem_release(released)
    freed = gpu.mem_alloc(512)
    gpu.mem_free(freed)
    unreserved = gpu.mem_address_reserve(PAGE)
    gpu.mem_address_free(unreserved, PAGE)
    used = gpu.used_bytes
    with pytest.raises(DriverError):
        match mistake:
            case "map twice":
                gpu.mem_map(ptr + 2 * PAGE, 2 * PAGE, big)
            case "map over":
                gpu.mem_map(ptr + PAGE, PAGE, one)
            case "map unaligned":
                gpu.mem_map(ptr + 2 * PAGE + 512, PAGE, one)
            case "map outside":
                gpu.mem_map(ptr + 4 * PAGE, PAGE, two)
            case "map part":
                gpu.mem_map(ptr + 2 * PAGE, 2 * PAGE, one)
            case "map released":
                gpu.mem_map(ptr + 2 * PAGE, PAGE, released)
            case "unmap part":
                gpu.mem_unmap(ptr, PAGE)
            case "unmap nothing":
                gpu.mem_unmap(ptr + 2 * PAGE, PAGE)
            case "access nothing":
                gpu.mem_set_access(ptr, 3 * PAGE)
            case "free addresses in use":
                gpu.mem_address_free(ptr, 4 * PAGE)
            case "free addresses twice":
                gpu.mem_address_free(unreserved, PAGE)
            case "release twice":
                gpu.mem_release(released)
            case "free unknown":
                gpu.mem_free(ptr)
            case "free twice":
                gpu.mem_free(freed)
    assert len(gpu.violations) == 1 and gpu.used_bytes == used
    gpu.mem_unmap(ptr, 2 * PAGE)


def test_memory_without_access_or_mapping_breaks_the_device_at_a_launch(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    ptr = mapped(gpu, 2)
    gpu.launch(s, writes=[(ptr, 2 * PAGE)])
    gpu.stream_synchronize(s)
    gpu.mem_unmap(ptr + PAGE, PAGE)
    gpu.launch(s, writes=[(ptr, PAGE)])
    gpu.mem_map(ptr + PAGE, PAGE, gpu.mem_create(PAGE))
    with pytest.raises(DriverError) as caught:
        gpu.launch(s, reads=[(ptr, PAGE + 1)])
    assert caught.value.code == "CUDA_ERROR_ILLEGAL_ADDRESS" and caught.value.sticky
    with pytest.raises(DriverError) as caught:
        gpu.stream_query(s)
    assert caught.value.sticky


def test_memory_of_another_device_can_be_used_once_access_is_set(gpu: SimDevice) -> None:
    other = SimDevice(ordinal=1)
    with other.scope():
        ptr = mapped(other)
        other.hand_out(ptr, 512, "first")
        theirs = other.stream_create(non_blocking=True, priority=0)
    gpu.launch(LEGACY, 1000, writes=[(ptr, 512)])
    with other.scope(), pytest.raises(DriverError, match="in use"):
        other.mem_unmap(ptr, PAGE)
    other.hand_out(ptr, 512, "second")
    other.launch(theirs, reads=[(ptr, 512)])
    assert len(other.races) == 1 and not gpu.races


def test_unmapping_what_queued_work_uses_is_refused(gpu: SimDevice, words: Words) -> None:
    s, t = words.stream(), words.stream()
    ptr = mapped(gpu, 2)
    gpu.launch(s, 1000, writes=[(ptr + 4096, 512)])
    gpu.launch(t, 500, reads=[(ptr + PAGE, 512)])
    with pytest.raises(DriverError, match="in use"):
        gpu.mem_unmap(ptr, 2 * PAGE)
    assert gpu.violations
    gpu.stream_synchronize(t)
    gpu.mem_unmap(ptr + PAGE, PAGE)
    gpu.stream_synchronize(s)
    gpu.mem_unmap(ptr, PAGE)
    assert len(gpu.violations) == 1


def test_r13_unmapping_without_proof_is_noted_even_if_the_work_happens_to_be_over(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    ptr = mapped(gpu)
    gpu.launch(s, 1000, writes=[(ptr, 512)])
    gpu.run_until_idle()
    gpu.mem_unmap(ptr, PAGE)
    assert len(gpu.violations) == 1 and "had not been told" in gpu.violations[0]


def test_a_plain_free_waits_for_the_device_but_not_for_work_on_its_own_bytes(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    used, unused = words.memory(), words.memory()
    gpu.launch(s, 1000, writes=[(used, 512)])
    with pytest.raises(DriverError, match="in use"):
        gpu.mem_free(used)
    assert gpu.now_ns == 0
    gpu.mem_free(unused)
    assert gpu.now_ns == 1000
    gpu.mem_free(used)


def test_attached_memory_is_in_use_until_it_is_detached(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    ptr = mapped(gpu)
    gpu.attach(s, (ptr, 512))
    gpu.launch(s, 1000)
    gpu.run_until_idle()
    with pytest.raises(DriverError, match="attached"):
        gpu.mem_unmap(ptr, PAGE)
    gpu.detach((ptr, 512))
    gpu.detach((ptr, 512))
    gpu.launch(s, 1000)
    assert not gpu.stream_query(s)
    gpu.mem_unmap(ptr, PAGE)  # the second launch no longer uses it


def test_an_allocation_that_was_never_detached_is_not_mistaken_for_a_later_one(gpu: SimDevice, words: Words) -> None:
    """CPython gives an object the address, and so the id, of one that has gone."""
    s, t, forgotten, other = words.stream(), words.stream(), mapped(gpu), mapped(gpu)
    block = Block(forgotten, 512)
    gpu.attach(s, block)
    before = id(block)
    del block
    others: list[Block] = []
    while not others or id(others[-1]) != before:  # sooner or later one lies there
        assert len(others) < 100_000, "no address came twice"
        others.append(Block(other, 512))
    block = others[-1]
    gpu.detach(block)
    gpu.launch(s, 1000)
    gpu.hand_out(forgotten, 512, "second")
    gpu.launch(t, writes=[(forgotten, 512)])
    assert gpu.races, "the launch on s wrote what was attached to it"


def test_a_closed_allocation_cannot_be_launched_on_but_its_bytes_can(gpu: SimDevice, words: Words) -> None:
    s = words.stream()
    block = Block(words.memory(), 512)
    gpu.launch(s, reads=[block], writes=[block])
    block.closed = True
    with pytest.raises(ValueError):
        gpu.launch(s, reads=[block])
    with pytest.raises(ValueError):
        gpu.attach(s, block)
    gpu.launch(s, reads=[(block.ptr, block.size), (0, 0), Block(0, 0)])


def test_streams_are_handles_or_speak_for_themselves(gpu: SimDevice, words: Words) -> None:
    class Ours:
        handle = words.stream()

    class Theirs:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, Ours.handle

    gpu.launch(Ours())
    gpu.launch(Theirs())
    gpu.stream_synchronize(Ours.handle)
    assert gpu.now_ns == 2000
    with pytest.raises(TypeError):
        gpu.launch("stream")
    with pytest.raises(ValueError):
        gpu.launch(Ours(), -1)
    with pytest.raises(ValueError):
        gpu.advance(-1)


def test_a_call_outside_of_the_devices_scope_is_refused() -> None:
    gpu, other = SimDevice(), SimDevice(ordinal=1)
    with pytest.raises(DriverError) as caught:
        gpu.mem_get_info()
    assert caught.value.code == "CUDA_ERROR_INVALID_CONTEXT" and not caught.value.sticky
    with gpu.scope():
        with other.scope(), pytest.raises(DriverError):
            gpu.stream_query(LEGACY)
        assert gpu.stream_query(LEGACY)
    assert len(gpu.violations) == 2


def test_an_inner_scope_of_the_same_device_costs_nothing() -> None:
    gpu, other = SimDevice(), SimDevice(ordinal=1)
    with gpu.scope(), gpu.scope(), gpu.scope():
        assert dict(gpu.calls) == {"cuCtxPushCurrent": 1, "cuThreadExchangeStreamCaptureMode": 1}
    assert dict(gpu.calls) == {"cuCtxPushCurrent": 1, "cuThreadExchangeStreamCaptureMode": 2, "cuCtxPopCurrent": 1}
    with gpu.scope(), other.scope(), gpu.scope():
        pass
    assert gpu.calls["cuCtxPushCurrent"] == 3 == gpu.calls["cuCtxPopCurrent"]


def test_s21_a_call_in_a_forked_child_is_refused(gpu: SimDevice) -> None:
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        try:
            gpu.mem_get_info()
        except DriverError as error:
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gpu.mem_get_info()

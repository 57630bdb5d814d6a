"""R8, R9: from anything stream-like to a handle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from allocator import SimDevice, Stream
from allocator.devices import LEGACY, PER_THREAD
from allocator.streams import Kind, Registry
from allocator.streams.identity import OwnedHandle, handle_of, is_special, owns_handle


class ExternalStream:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, LEGACY),
        (1, LEGACY),
        (2, PER_THREAD),
        (77, 77),
        (SimpleNamespace(ptr=5), 5),
        (SimpleNamespace(ptr=0), LEGACY),
        (SimpleNamespace(cuda_stream=6), 6),
        (SimpleNamespace(handle=7), 7),
        (SimpleNamespace(value=lambda: 8), 8),
        (SimpleNamespace(__cuda_stream__=(0, 9)), 9),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 0)), LEGACY),
        (OwnedHandle(12), 12),
    ],
)
def test_r8_a_handle_is_found_wherever_a_library_keeps_it(stream: object, handle: int) -> None:
    assert handle_of(stream) == handle


@pytest.mark.parametrize("wrong", [object(), "5", 1.5, None, [], True, SimpleNamespace(__cuda_stream__=5)])
def test_r8_what_is_no_stream_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError):
        handle_of(wrong)


@pytest.mark.parametrize("wrong", [SimpleNamespace(ptr="x"), SimpleNamespace(ptr=True), OwnedHandle(None), -1])  # type: ignore[arg-type]
def test_r9_a_stream_without_a_handle_is_refused(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        handle_of(wrong)


def test_r9_ints_and_wrappers_own_nothing() -> None:
    assert not owns_handle(5) and not owns_handle(ExternalStream(5)) and not owns_handle(SimpleNamespace(ptr=5))
    assert owns_handle(SimpleNamespace(__cuda_stream__=(0, 5)))
    assert [is_special(h) for h in (0, 1, 2, 3)] == [False, True, True, False]


def test_r8_owners_are_told_apart_by_is() -> None:
    class ByHandle:
        def __init__(self, ptr: int) -> None:
            self.ptr = ptr

        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, self.ptr)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, ByHandle) and other.ptr == self.ptr

        def __hash__(self) -> int:
            return hash(self.ptr)

    gpu = SimDevice(memory=1 << 24)
    registry = Registry.of(gpu)
    with gpu.scope():
        handle = gpu.stream_create(non_blocking=True, priority=0)
    first = ByHandle(handle)
    line = registry.resolve(first)
    assert registry.resolve(first) is line
    assert registry.resolve(ByHandle(handle)) is line  # the same stream, found by its id
    with gpu.scope():
        gpu.stream_destroy(handle)
        assert gpu.stream_create(non_blocking=True, priority=0) == handle
    assert registry.resolve(ByHandle(handle)) is not line


def test_r8_an_object_seen_before_costs_no_driver_call_and_a_bare_handle_does() -> None:
    gpu = SimDevice(memory=1 << 24)
    registry = Registry.of(gpu)
    with gpu.scope():
        handle = gpu.stream_create(non_blocking=False, priority=0)
    owner = SimpleNamespace(__cuda_stream__=(0, handle))
    assert registry.resolve(owner).kind is Kind.BLOCKING
    before = gpu.calls.total()
    registry.resolve(owner)
    registry.resolve(0)
    assert gpu.calls.total() == before
    registry.resolve(handle)
    registry.resolve(handle)
    assert gpu.calls["cuStreamGetId"] == 3 and gpu.calls["cuStreamGetFlags"] == 1


def test_r9_our_own_stream_dies_when_no_call_uses_it_any_more() -> None:
    gpu = SimDevice(memory=1 << 24)
    s = Stream(gpu)
    registry = Registry.of(gpu)
    with registry.borrow(s.line) as handle:
        assert handle == s.handle
        s.close()
        assert gpu.calls["cuStreamDestroy"] == 0
    assert gpu.calls["cuStreamDestroy"] == 1


def test_r1_one_registry_a_context_and_numbers_are_never_used_again() -> None:
    gpu = SimDevice(memory=1 << 24)
    registry = Registry.of(gpu)
    assert Registry.of(gpu) is registry and Registry.of(SimDevice(memory=1 << 24)) is not registry
    numbers = []
    for _ in range(20):
        s = Stream(gpu)
        numbers.append(s.line.number)
        s.close()
    assert len(set(numbers)) == 20
    registry.check()

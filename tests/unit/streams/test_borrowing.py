"""Handles for the length of a `with`: of one stream, and of several at once, which must come to the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.devices import LEGACY, PER_THREAD
from allocator.streams import Registry, Sealing, Timeline

KIB = 1 << 10


class Foreign:
    """Another library's stream; reading its handle runs that library's code."""

    def __init__(self, gpu: SimDevice) -> None:
        self.gpu = gpu
        self.error: BaseException | None = None
        with gpu.program_scope():
            self.handle: Any = gpu.stream_create(non_blocking=True, priority=0)

    def __cuda_stream__(self) -> tuple[int, int]:
        if self.error is not None:
            raise self.error
        return (0, self.handle)


class Crowd:
    """Streams of every kind, each with work of its own and a block in flight, and what can be wrong with them."""

    def __init__(self) -> None:
        self.gpu = SimDevice()
        self.pool = CachingAllocator(self.gpu, config=Config(uses="declared", seal_frees=10_000))
        self.registry = Registry.of(self.gpu)
        self.sealing = Sealing(self.registry)
        self.own, self.busy, self.closing, self.capturing = (Stream(self.gpu) for _ in range(4))
        self.foreign, self.broken = Foreign(self.gpu), Foreign(self.gpu)
        self.bare = Foreign(self.gpu)
        resolve = self.registry.resolve
        self.elsewhere = self.in_another_thread(lambda: resolve(PER_THREAD))
        self.lines: dict[str, Timeline] = {
            "own": self.own.line,
            "busy": self.busy.line,
            "closing": self.closing.line,
            "capturing": self.capturing.line,
            "foreign": resolve(self.foreign),
            "broken": resolve(self.broken),
            "bare": resolve(int(self.bare.handle)),
            "legacy": self.registry.legacy,
            "per-thread": resolve(PER_THREAD),
            "another thread's": self.elsewhere,
        }
        self.gpu.launch(self.busy, 10**9)

    @staticmethod
    def in_another_thread(call: Any) -> Any:
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(call()))
        thread.start()
        thread.join()
        return got[0]

    def pins(self) -> dict[str, int]:
        owned = {f"{name}'s owner": getattr(line.owner, "pins", 0) for name, line in self.lines.items()}
        return {name: line.pins for name, line in self.lines.items()} | owned


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    one = Crowd()
    yield one
    one.broken.error = None
    one.gpu.clear_faults()
    assert set(one.pins().values()) == {0}
    assert one.gpu.races == [] and one.gpu.violations == []
    one.gpu.run_until_idle()
    one.pool.check()


def spoil(crowd: Crowd) -> None:
    """The owner of one is going, another one's cannot be read, and a hook has told of a capture."""
    crowd.lines["closing"].owner.closing = True  # type: ignore[attr-defined]  # a handle of ours
    crowd.broken.error = ValueError("the library's own fault")
    crowd.registry.captures.begin(crowd.lines["capturing"], crowd.capturing.handle)


def repair(crowd: Crowd) -> None:
    crowd.lines["closing"].owner.closing = False  # type: ignore[attr-defined]  # a handle of ours
    for capture in list(crowd.registry.captures.active.values()):
        crowd.registry.captures.end(capture)


@pytest.mark.parametrize("spoilt", [False, True])
def test_r9_several_are_lent_as_one_is(crowd: Crowd, spoilt: bool) -> None:
    if spoilt:
        spoil(crowd)
    singly = {}
    for name, line in crowd.lines.items():
        with crowd.registry.borrow(line) as handle:
            if handle is not None:
                singly[name] = handle
    with crowd.registry.borrow_each(crowd.lines.values()) as borrowed:
        together = {next(n for n, line in crowd.lines.items() if line is found): handle for found, handle in borrowed}
        held = crowd.pins()
    assert together == singly
    assert singly["legacy"] == LEGACY and singly["per-thread"] == PER_THREAD
    assert {"bare", "another thread's"}.isdisjoint(singly)
    gone = {"closing", "broken", "capturing"}
    assert gone.isdisjoint(singly) if spoilt else gone <= set(singly)
    assert all(held[name] == 1 for name in singly), "a capture that begins waits for them (S18)"
    assert held["own's owner"] == 1, "and their end is put off"
    repair(crowd)


@pytest.mark.parametrize("spoilt", [False, True])
def test_r2_several_are_asked_as_one_is(spoilt: bool) -> None:
    """Also in what is known afterwards."""

    def answers(together: bool) -> tuple[set[str], dict[str, int]]:
        crowd = Crowd()
        if spoilt:
            spoil(crowd)
            crowd.gpu.begin_capture(crowd.own, "relaxed")  # and nobody told us of this one
        lines = list(crowd.lines.values())
        idle = crowd.sealing.ask(lines) if together else [line for line in lines if crowd.sealing.query(line)]
        names = {name for name, line in crowd.lines.items() if line in idle}
        reached = {name: line.completed for name, line in crowd.lines.items() if line in idle}
        if spoilt:
            crowd.gpu.end_capture(crowd.own)
        repair(crowd)
        crowd.broken.error = None
        assert crowd.gpu.violations == []
        return names, {name: int(seqno > 0) for name, seqno in reached.items()}

    together, singly = answers(True), answers(False)
    assert together == singly
    assert "busy" not in together[0] and "foreign" in together[0] and "legacy" in together[0]


def test_r11_one_that_answers_with_an_error_does_not_keep_the_others_from_being_asked(crowd: Crowd) -> None:
    lines = [crowd.lines[name] for name in ("own", "foreign", "broken")]
    crowd.gpu.fail("cuStreamQuery", at=2, error="CUDA_ERROR_UNKNOWN")
    assert crowd.sealing.ask(lines) == [lines[0], lines[2]]
    assert lines[1].poisoned is not None and lines[1].completed == 0
    crowd.gpu.fail("cuStreamIsCapturing", at=2, error="CUDA_ERROR_UNKNOWN")
    assert crowd.sealing.ask(lines) == [lines[0], lines[2]]


def test_r11_after_the_end_of_the_context_nobody_is_asked(crowd: Crowd) -> None:
    lines = [crowd.lines[name] for name in ("own", "foreign", "broken")]
    crowd.gpu.fail("cuStreamQuery", at=2, error="CUDA_ERROR_ILLEGAL_ADDRESS", sticky=True)
    assert crowd.sealing.ask(lines) == [lines[0]]
    before = dict(crowd.gpu.calls)
    assert crowd.sealing.ask(lines) == [] and crowd.gpu.calls["cuStreamQuery"] == before["cuStreamQuery"]


def test_r11_a_scope_that_cannot_be_had_asks_nobody(crowd: Crowd) -> None:
    crowd.gpu.fail("cuCtxPushCurrent", error="CUDA_ERROR_UNKNOWN")
    assert crowd.sealing.ask(list(crowd.lines.values())) == []


def test_a_handle_whose_reading_is_interrupted_is_lent_to_nobody(crowd: Crowd) -> None:
    crowd.broken.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), crowd.registry.borrow_each(crowd.lines.values()):
        pass
    with pytest.raises(KeyboardInterrupt), crowd.registry.borrow(crowd.lines["broken"]):
        pass


def test_r9_a_stream_closed_meanwhile_is_destroyed_afterwards(crowd: Crowd) -> None:
    destroyed = crowd.gpu.calls["cuStreamDestroy"]
    with crowd.registry.borrow_each([crowd.lines["own"], crowd.lines["foreign"]]):
        crowd.own.close()
        assert crowd.gpu.calls["cuStreamDestroy"] == destroyed
    assert crowd.gpu.calls["cuStreamDestroy"] == destroyed + 1


def test_s21_in_a_child_nothing_is_lent(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd.registry, "forked", True)
    with crowd.registry.borrow_each(crowd.lines.values()) as borrowed:
        assert borrowed == []

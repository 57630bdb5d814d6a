"""Many marks in flight on busy streams, of which some are forgotten (R13): random programs, with the race oracle on."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from allocator import Allocation, CachingAllocator, Config, OutOfMemoryError, SimDevice, Stream
from allocator.sizes import MIB
from allocator.streams import Sealed, Timeline, context, timeline

pytestmark = pytest.mark.source  # compiled code has the number of marks in it
SIZES = (512, MIB, 2 * MIB, 3 * MIB)


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Sealed]]:
    """Those of streams, as they are forgotten."""
    found: list[Sealed] = []
    thin = Timeline.thin

    def noted(line: Timeline) -> list[Sealed]:
        gone = thin(line)
        found.extend(gone)
        return gone

    monkeypatch.setattr(Timeline, "thin", noted)
    yield found


def wrong(seed: int, steps: int = 150) -> int:
    """Races and violations in one program, which keeps the contract."""
    rng = random.Random(seed)
    gpu = SimDevice(memory=64 * MIB)
    config = Config(
        uses=rng.choice(("declared", "assumed")), seal_frees=1, limit=32 * MIB, wait_on_demand=rng.random() < 0.5
    )
    streams = [Stream(gpu, non_blocking=rng.random() < 0.7) for _ in range(4)]
    live: list[tuple[Allocation, Stream]] = []
    with CachingAllocator(gpu, config) as pool:
        for _ in range(steps):
            stream = rng.choice(streams)
            match rng.choices(("take", "free", "seal", "look", "time", "wait", "legacy"), (45, 40, 5, 3, 3, 2, 2))[0]:
                case "take":
                    try:
                        block = pool.allocate(rng.choice(SIZES), stream=stream)
                    except OutOfMemoryError:
                        continue
                    gpu.launch(stream, rng.choice((10, 1000, 100_000)), writes=[block])
                    live.append((block, stream))
                case "free" if live:
                    block, user = live.pop(rng.randrange(len(live)))
                    if rng.random() < 0.3:
                        gpu.launch(user, 1000, writes=[block])
                    block.close()
                case "seal":
                    pool._settling.seal()
                case "look":
                    pool.stats()
                case "time":
                    gpu.advance(rng.choice((10, 1000, 50_000)))
                case "wait":
                    stream.wait_stream(rng.choice([other for other in streams if other is not stream]))
                case "legacy":
                    pool._sealing.seal_legacy()
            if rng.random() < 0.1:
                pool.check()
        for block, _ in live:
            block.close()
        gpu.run_until_idle()
        pool.settle()
        pool.check()
        assert pool.stats().in_flight_bytes == 0, "what was forgotten is never found over"
    return len(gpu.races) + len(gpu.violations)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_r13_what_is_forgotten_is_found_over_later_and_never_sooner(
    most: int, forgotten: list[Sealed], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (timeline, context):
        monkeypatch.setattr(module, "MOST_MARKS", most)
    assert sum(wrong(seed) for seed in range(most, 90, 3)) == 0
    assert len(forgotten) > 100, "nothing was tried"


def test_marks_that_are_forgotten_as_if_they_were_over_would_be_seen(
    forgotten: list[Sealed], monkeypatch: pytest.MonkeyPatch
) -> None:
    thin = Timeline.thin

    def careless(line: Timeline) -> list[Sealed]:
        gone = thin(line)
        for sealed in gone:
            line.completed = max(line.completed, sealed.seqno)
        return gone

    monkeypatch.setattr(Timeline, "thin", careless)
    monkeypatch.setattr(timeline, "MOST_MARKS", 1)
    found = 0
    for seed in range(30):
        try:
            found += wrong(seed)
        except AssertionError:
            found += 1
        if found:
            break
    assert found

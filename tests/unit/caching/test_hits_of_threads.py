"""Many threads that hit, in the middle of each other: no block has two holders, and none is lost.

The compiled hot path takes no lock here (gil.py), so this is where it would show.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from allocator import CachingAllocator, Config, SimDevice, Stream

SIZES = (512, 4096, 4096, 65536, 300_000)
TURNS = 1500


@pytest.fixture(autouse=True)
def _threads_change_places_all_the_time() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("uses", ["declared", "assumed"])
@pytest.mark.parametrize("shared", [False, True], ids=["own streams", "shared streams"])
def test_no_block_has_two_holders(uses: str, shared: bool) -> None:
    gpu = SimDevice(memory=1 << 30)
    pool = CachingAllocator(gpu, config=Config(uses=uses))
    pool.announce = None  # no oracle: its lock would let threads change places there alone
    streams = [Stream(gpu) for _ in range(4 if shared else 8)]
    held: dict[int, object] = {}
    passed_on: list[Any] = []
    wrong: list[str] = []

    def work(number: int) -> None:
        draw = random.Random(number)
        mine: list[Any] = []
        for _ in range(TURNS):
            one = pool.allocate(draw.choice(SIZES), streams[(number if draw.random() < 0.9 else 0) % len(streams)])
            me = object()
            if held.setdefault(one.ptr, me) is not me:
                wrong.append(f"{one.ptr:#x} is held twice")
            mine.append(one)
            if len(mine) > draw.randrange(4):
                gone = mine.pop(draw.choice([-1, 0]))
                del held[gone.ptr]
                if draw.random() < 0.1:
                    passed_on.append(gone)  # its end comes in another thread
                elif draw.random() < 0.5:
                    gone.close()
                del gone
            del one
            if passed_on and draw.random() < 0.1:
                with suppress(IndexError):  # another thread took the last
                    passed_on.pop()
        for one in mine:
            del held[one.ptr]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    passed_on.clear()
    assert not wrong
    pool.check()
    stats = pool.stats()
    assert stats.blocks["live"] == 0 and stats.allocated_bytes == 0
    assert sum(stats.allocations.values()) == 8 * TURNS
    pool.settle()
    pool.trim()
    assert pool.stats().reserved_bytes == 0

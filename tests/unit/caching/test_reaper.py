"""Pools that have gone: who serves them, how often, and what one that fails does to the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from allocator.caching import reaper


class Pool:
    """Gives up after so many looks.  error: what its looks raise until then."""

    def __init__(self, looks: int = 1, error: Exception | None = None) -> None:
        self.frees: deque[Any] = deque()
        self.looks = 0
        self._needed = looks
        self._error = error

    def give_up_memory(self) -> bool:
        self.looks += 1
        if self.looks >= self._needed:
            return True
        if self._error is not None:
            raise self._error
        return False


@pytest.fixture(autouse=True)
def _list_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reaper, "_leaving", deque())
    yield


def test_a_pool_stays_until_the_last_of_it_has_been_given_back() -> None:
    one, other = Pool(1), Pool(3)
    reaper.leave(one)
    reaper.leave(other)
    for _ in range(5):
        reaper.reap()
    assert (one.looks, other.looks) == (1, 3)


def test_a_pool_that_fails_holds_no_other_back_and_is_tried_again() -> None:
    broken, fine = Pool(3, RuntimeError("for the moment")), Pool(1)
    reaper.leave(broken)
    reaper.leave(fine)
    reaper.reap()
    assert (broken.looks, fine.looks) == (1, 1)
    reaper.reap()
    reaper.reap()
    reaper.reap()
    assert broken.looks == 3 and not reaper._leaving


def test_allocations_look_at_a_pool_less_and_less_often_until_something_is_freed_in_it() -> None:
    slow = Pool(10_000)
    reaper.leave(slow)
    looks = []
    for _ in range(400):
        reaper.reap(patiently=True)
        looks.append(slow.looks)
    assert looks[0] == 1 and looks[-1] < 400 // 20
    assert looks[-1] - looks[-200] >= 200 // (reaper.MOST_SKIPPED + 2)
    slow.frees.append("a block")
    reaper.reap(patiently=True)
    assert slow.looks == looks[-1] + 1
    reaper.reap()  # and whoever is not patient looks always
    assert slow.looks == looks[-1] + 2


def test_two_threads_may_serve_the_list_at_once() -> None:
    """The other one may have taken the last while this one was about to."""

    class Taken(deque[Any]):
        def popleft(self) -> Any:
            self.clear()
            return super().popleft()

    reaper._leaving = Taken([reaper._Look(Pool())])
    reaper.reap()
    assert not reaper._leaving


def test_s21_a_forked_child_gives_nothing_back() -> None:
    theirs = Pool()
    reaper.leave(theirs)
    reaper.forget_all()
    reaper.reap()
    assert theirs.looks == 0

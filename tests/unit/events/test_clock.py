"""R1, R5: the algebra of vector clocks.  `joined` is the least upper bound of `<=`, a partial order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.events import EMPTY, SyncPoint, VectorClock

clocks = st.dictionaries(st.integers(0, 5), st.integers(1, 6), max_size=5).map(VectorClock)


def test_r1_points_of_two_timelines_have_no_order() -> None:
    a, b = SyncPoint(1, 5), SyncPoint(2, 3)
    with pytest.raises(TypeError):
        _ = a < b  # type: ignore[operator]
    assert a == SyncPoint(1, 5) != b and len({a, SyncPoint(1, 5)}) == 1


@given(clocks)
def test_a_clock_is_at_most_itself_and_nothing_is_at_most_every_clock(a: VectorClock) -> None:
    assert a <= a and a >= EMPTY
    assert (a <= EMPTY) is (not a)


@given(clocks, clocks)
def test_the_order_is_antisymmetric(a: VectorClock, b: VectorClock) -> None:
    assert (a <= b and b <= a) is (a == b)


@given(clocks, clocks, clocks)
def test_the_order_is_transitive(a: VectorClock, b: VectorClock, c: VectorClock) -> None:
    if a <= b and b <= c:
        assert a <= c


@given(clocks, clocks, clocks)
def test_joined_is_the_least_upper_bound(a: VectorClock, b: VectorClock, c: VectorClock) -> None:
    join = a.joined(b)
    assert a <= join and b <= join
    if a <= c and b <= c:
        assert join <= c


@given(clocks, clocks, clocks)
def test_joining_is_commutative_associative_and_idempotent(a: VectorClock, b: VectorClock, c: VectorClock) -> None:
    assert a.joined(b) == b.joined(a)
    assert a.joined(b).joined(c) == a.joined(b.joined(c))
    assert a.joined(a) == a == a.joined(EMPTY) == EMPTY.joined(a)


@given(clocks, clocks)
def test_the_order_is_that_of_every_entry(a: VectorClock, b: VectorClock) -> None:
    assert (a <= b) is all(a.get(n) <= b.get(n) for n in range(6))
    assert (a <= b) is (a.joined(b) == b)


@given(clocks, st.integers(0, 5), st.integers(0, 7))
def test_advancing_is_joining_with_one_entry(a: VectorClock, timeline: int, seqno: int) -> None:
    one = VectorClock({timeline: seqno}) if seqno else EMPTY
    assert a.advanced(timeline, seqno) == a.joined(one)


@given(clocks, clocks)
def test_r5_clocks_never_change(a: VectorClock, b: VectorClock) -> None:
    before = dict(a.at)
    a.joined(b)
    b.joined(a)
    a.advanced(3, 9)
    assert a.at == before


@given(clocks, clocks)
def test_equal_clocks_hash_alike(a: VectorClock, b: VectorClock) -> None:
    same = VectorClock(list(a.items())[::-1])
    assert same == a and hash(same) == hash(a)
    assert (a == b) is (dict(a.at) == dict(b.at))
    assert a != 5


def test_a_join_that_changes_nothing_makes_no_new_clock() -> None:
    a, b = VectorClock({1: 4}), VectorClock({1: 2})
    assert a.joined(b) is a and a.joined(EMPTY) is a and EMPTY.joined(a) is a and a.advanced(1, 3) is a


def test_a_missing_entry_is_nothing() -> None:
    a = VectorClock({1: 4})
    assert (a.get(1), a.get(2), len(a), bool(a), bool(EMPTY), len(EMPTY)) == (4, 0, 1, True, False, 0)
    assert repr(a) == "VectorClock({1: 4})"
    assert VectorClock([(1, 2), (3, 4)]) == VectorClock({3: 4, 1: 2})

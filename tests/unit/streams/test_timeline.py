"""R2: completed <= sealed < pending, and what moves them."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from allocator.events import VectorClock
from allocator.streams import Kind, Sealed, Timeline
from allocator.streams.timeline import MOST_MARKS


def _sealed(line: Timeline, event: int = 1) -> Sealed:
    seqno, clock = line.close_seqno()
    return Sealed(seqno, event, clock)


def test_r2_a_new_timeline_has_nothing() -> None:
    line = Timeline(7, Kind.NON_BLOCKING)
    assert (line.completed, line.sealed, line.closed, line.pending) == (0, 0, 0, 1)
    assert line.here == VectorClock({7: 1})
    line.check()


def test_r2_closing_alone_seals_nothing() -> None:
    line = Timeline(7, Kind.NON_BLOCKING)
    assert line.close_seqno() == (1, VectorClock({7: 1}))
    assert (line.sealed, line.closed, line.pending) == (0, 1, 2)
    assert line.here == VectorClock({7: 2})
    line.check()


def test_r2_a_later_event_seals_all_that_was_closed_before_it() -> None:
    line = Timeline(7, Kind.NON_BLOCKING)
    line.close_seqno()
    line.close_seqno()
    sealed = _sealed(line)
    line.publish(sealed)
    assert line.sealed == 3
    assert line.event_for(1) is line.event_for(3) is sealed and line.event_for(4) is None


def test_r2_completion_counts_as_sealed() -> None:
    line = Timeline(7, Kind.NON_BLOCKING)
    line.close_seqno()
    assert line.complete(1) == []
    assert (line.completed, line.sealed) == (1, 1)
    line.check()


def test_r2_nothing_that_is_not_closed_can_be_complete() -> None:
    line = Timeline(7, Kind.NON_BLOCKING)
    with pytest.raises(AssertionError, match="not closed"):
        line.complete(1)


def test_r2_completed_never_goes_back() -> None:
    line = Timeline(7, Kind.NON_BLOCKING)
    for _ in range(3):
        line.close_seqno()
    line.complete(3)
    assert line.complete(1) == []
    assert line.completed == 3


def test_r2_after_its_end_every_stamp_is_the_last_seqno() -> None:
    line = Timeline(7, Kind.NON_BLOCKING)
    line.close_seqno()
    line.end()
    assert line.here == VectorClock({7: 2}) and line.closed == 2
    assert line.close_seqno() == (2, VectorClock({7: 2}))
    assert line.here == VectorClock({7: 2})
    line.end()
    assert line.closed == 2
    line.check()


def test_r4_the_snapshot_is_the_clock_at_the_close_and_not_later() -> None:
    line = Timeline(7, Kind.NON_BLOCKING)
    sealed = _sealed(line)
    line.learn(VectorClock({3: 9}))
    line.publish(sealed)
    assert sealed.clock == VectorClock({7: 1})
    assert _sealed(line).clock == VectorClock({7: 2, 3: 9})


def test_r4_events_come_back_when_complete_and_unused() -> None:
    line = Timeline(7, Kind.NON_BLOCKING)
    first, second = _sealed(line, 11), _sealed(line, 12)
    line.publish(first)
    line.publish(second)
    first.users = 1  # a thread is inside a driver call with it
    assert line.complete(2) == [first, second]
    assert first.done and second.done and not line.in_flight


def test_r4_events_published_out_of_order_stay_in_order() -> None:
    """Another thread closed later and recorded sooner."""
    line = Timeline(7, Kind.NON_BLOCKING)
    first, second = _sealed(line, 11), _sealed(line, 12)
    line.publish(second)
    line.publish(first)
    assert [s.seqno for s in line.in_flight] == [1, 2]
    line.check()


def test_r4_an_event_published_after_its_completion_is_done() -> None:
    line = Timeline(7, Kind.NON_BLOCKING)
    sealed = _sealed(line)
    line.complete(1)
    line.publish(sealed)
    assert sealed.done and not line.in_flight and line.sealed == 1
    line.check()


def test_r11_a_voided_event_leaves_its_seqnos_unsealed() -> None:
    line = Timeline(7, Kind.NON_BLOCKING)
    first, second = _sealed(line, 11), _sealed(line, 12)
    line.publish(first)
    line.publish(second)
    line.void(second)
    assert (line.sealed, line.closed) == (1, 2)
    line.void(second)
    line.void(first)
    assert line.sealed == 0
    line.check()


@pytest.mark.parametrize("more", [1, 2, 300])
def test_r13_of_many_events_in_flight_every_second_one_is_forgotten(more: int) -> None:
    line = Timeline(7, Kind.NON_BLOCKING)
    live: set[int] = set()
    for number in range(MOST_MARKS + more):
        line.publish(_sealed(line, number))
        live.add(number)
        gone = line.thin()
        assert all(sealed.done for sealed in gone)
        live -= {sealed.event for sealed in gone}
        assert {sealed.event for sealed in line.in_flight} == live and len(live) <= MOST_MARKS
        assert line.in_flight[0].event == 0, "the oldest is the first to say anything"
        assert line.in_flight[-1].event == number and line.sealed == number + 1
        line.check()
    for seqno in range(1, line.pending):
        found = line.event_for(seqno)
        assert found is not None and found.seqno >= seqno and not found.done, "each is covered by a later one"
    assert {sealed.event for sealed in line.complete(line.closed)} == live


def test_r4_an_event_that_a_thread_uses_is_not_forgotten() -> None:
    line = Timeline(7, Kind.NON_BLOCKING)
    for number in range(MOST_MARKS + 1):
        line.publish(_sealed(line, number))
        line.in_flight[-1].users = number % 4 == 1
    gone = line.thin()
    assert gone and not any(sealed.users for sealed in gone)
    assert all(sealed.done for sealed in gone) and not any(sealed.done for sealed in line.in_flight)
    assert sum(sealed.users for sealed in line.in_flight) == MOST_MARKS // 4
    line.check()


def test_r9_what_a_forgotten_event_says_of_other_streams_the_next_one_says() -> None:
    line, other, third = (Timeline(number, Kind.BLOCKING) for number in (7, 8, 9))
    for number in range(MOST_MARKS + 1):
        sealed = _sealed(line, number)
        line.publish(sealed)
        sealed.proves = [(other, number), (third, 5)] if number < 10 else []
    gone = {sealed.event: sealed for sealed in line.thin()}
    assert {1, 3, 5} <= set(gone)
    for number, sealed in gone.items():
        if number < 10:
            after = line.event_for(sealed.seqno)
            assert after is not None
            reached = dict(after.proves)
            assert reached[other] >= number and reached[third] == 5 and len(after.proves) == 2


def test_a_timeline_says_what_it_is() -> None:
    assert "7" in repr(Timeline(7, Kind.BLOCKING, 55))
    assert "loader" in repr(Timeline(7, Kind.BLOCKING, 55, name="loader"))
    ended = Timeline(7, Kind.BLOCKING)
    ended.end()
    assert "ended" in repr(ended)


@pytest.mark.parametrize(
    ("kind", "blocking"),
    [
        (Kind.LEGACY, False),
        (Kind.PER_THREAD, True),
        (Kind.BLOCKING, True),
        (Kind.NON_BLOCKING, False),
        (Kind.CONTEXT, False),
    ],
)
def test_r6_which_kinds_legacy_is_ordered_against(kind: Kind, blocking: bool) -> None:
    assert kind.blocking is blocking


def test_r2_check_notices_counters_that_contradict_each_other() -> None:
    line = Timeline(7, Kind.NON_BLOCKING)
    line.sealed = 1
    with pytest.raises(AssertionError):
        line.check()
    line = Timeline(7, Kind.NON_BLOCKING)
    line.here = VectorClock({7: 9})
    with pytest.raises(AssertionError):
        line.check()


class Life(RuleBasedStateMachine):
    """Any order of closes, publications, completions, voids and an end keeps R2."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Timeline(1, Kind.NON_BLOCKING)
        self.unpublished: list[Sealed] = []
        self.events = 0
        self.before = (0, 0, 1)

    @rule()
    def close(self) -> None:
        self.line.close_seqno()

    @rule()
    def seal(self) -> None:
        self.events += 1
        self.unpublished.append(_sealed(self.line, self.events))

    @precondition(lambda self: self.unpublished)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.unpublished) - 1))
        self.line.publish(self.unpublished.pop(at))

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        seqno = data.draw(st.integers(0, self.line.closed))
        for sealed in self.line.complete(seqno):
            assert sealed.done and sealed.seqno <= seqno and sealed not in self.line.in_flight

    @precondition(lambda self: self.line.in_flight)
    @rule()
    def void(self) -> None:
        self.line.void(self.line.in_flight[-1])
        self.before = (self.before[0], 0, self.before[2])  # the one case in which `sealed` goes back

    @rule()
    def end(self) -> None:
        self.line.end()

    @invariant()
    def r2_holds_and_only_grows(self) -> None:
        line = self.line
        line.check()
        now = (line.completed, line.sealed, line.pending)
        assert all(old <= new for old, new in zip(self.before, now, strict=True))
        self.before = now


TestLife = Life.TestCase


def test_a_copy_of_what_carries_a_timeline_carries_none() -> None:
    """A stream object of CuPy's does: its copy would be believed to own a timeline that no registry knows."""
    line = Timeline(7, Kind.NON_BLOCKING)
    stream = SimpleNamespace(_weir=line)
    line.owner = stream
    copied = copy.deepcopy(stream)
    assert copied._weir is None and stream._weir is line and copy.copy(stream)._weir.owner is stream

"""R3: the timeline of assumed users."""

from __future__ import annotations

import pytest

from allocator.events import EMPTY, VectorClock
from allocator.streams import ContextSeal, Kind, Sealed, Timeline
from allocator.streams.context import ContextTimeline, satisfied
from allocator.streams.timeline import MOST_MARKS


def _lines(**completed: int) -> dict[int, Timeline]:
    lines = {}
    for name, seqno in completed.items():
        number = int(name[1:])
        line = lines[number] = Timeline(number, Kind.NON_BLOCKING)
        for _ in range(9):
            line.close_seqno()
        line.complete(seqno)
    return lines


def test_r3_a_context_seqno_is_complete_when_every_stream_got_as_far() -> None:
    context = ContextTimeline()
    lines = _lines(t1=0, t2=0)
    context.publish(ContextSeal(context.close_seqno(), VectorClock({1: 3, 2: 4})))
    assert context.advance(lines) == [] and context.completed == 0
    lines[1].complete(3)
    context.advance(lines)
    assert context.completed == 0
    lines[2].complete(5)
    context.advance(lines)
    assert (context.completed, context.sealed, context.pending) == (1, 1, 2)
    context.check()


def test_r3_a_stream_that_is_forgotten_is_over() -> None:
    context = ContextTimeline()
    context.publish(ContextSeal(context.close_seqno(), VectorClock({1: 3, 99: 7})))
    context.advance(_lines(t1=3))
    assert context.completed == 1


def test_r3_nothing_needed_is_complete_at_once() -> None:
    context = ContextTimeline()
    context.publish(ContextSeal(context.close_seqno(), EMPTY))
    context.advance({})
    assert context.completed == 1


def test_r3_the_context_event_comes_back_when_its_seal_is_complete() -> None:
    context = ContextTimeline()
    event = Sealed(1, 5, EMPTY)
    context.publish(ContextSeal(context.close_seqno(), VectorClock({1: 1}), event))
    assert context.advance(_lines(t1=0)) == []
    assert context.advance(_lines(t1=1)) == [event]


def test_r3_the_oldest_seal_that_covers_a_seqno_is_found() -> None:
    context = ContextTimeline()
    seals = [ContextSeal(context.close_seqno(), VectorClock({1: n})) for n in (1, 2, 3)]
    for seal in (seals[2], seals[0], seals[1]):
        context.publish(seal)
    assert [context.seal_for(n) for n in (1, 2, 3, 4)] == [*seals, None]
    assert [s.seqno for s in context.in_flight] == [1, 2, 3]
    context.check()


def test_r13_of_many_seals_in_flight_every_second_one_is_forgotten() -> None:
    context, lines = ContextTimeline(), _lines(t1=0)
    forgotten: list[Sealed] = []
    for number in range(3 * MOST_MARKS):
        seqno = context.close_seqno()
        event = Sealed(seqno, number, EMPTY) if number % 3 == 0 else None
        if event is not None:
            event.users = int(number in (9, 21))
        context.publish(ContextSeal(seqno, VectorClock({1: 9}), event))
        forgotten += context.thin()
        assert len(context.in_flight) <= MOST_MARKS
        assert (context.in_flight[0].seqno, context.in_flight[-1].seqno) == (1, number + 1)
        context.check()
    assert forgotten and all(event.done and not event.users for event in forgotten)
    kept = [seal.event for seal in context.in_flight if seal.event is not None]
    assert not any(event.done for event in kept) and {9, 21} <= {event.event for event in kept}
    assert len({event.event for event in (*kept, *forgotten)}) == MOST_MARKS == len(kept) + len(forgotten)
    for seqno in range(1, context.pending):
        assert context.seal_for(seqno) is not None
    lines[1].complete(9)
    context.advance(lines)
    assert context.completed == 3 * MOST_MARKS and not context.in_flight


def test_r2_check_notices_a_context_out_of_order() -> None:
    context = ContextTimeline()
    context.completed = 5
    with pytest.raises(AssertionError):
        context.check()


def test_r3_a_need_is_satisfied_by_completion_by_the_clock_or_by_the_stream_itself() -> None:
    need = VectorClock({1: 3, 2: 4})
    assert not satisfied(need, EMPTY, _lines(t1=0, t2=0))
    assert satisfied(need, VectorClock({1: 3, 2: 9}), _lines(t1=0, t2=0))
    assert satisfied(need, VectorClock({2: 4}), _lines(t1=3, t2=0))
    assert satisfied(need, VectorClock({2: 4}), _lines(t1=0, t2=0), me=1)
    assert not satisfied(need, VectorClock({2: 3}), _lines(t1=3, t2=0))

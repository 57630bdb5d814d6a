"""The rules, each broken on purpose: a mutant is the real code with one piece of text replaced.

`Mutant.applied()` compiles the changed source of a function or method in its module's own namespace and puts it
in place for the length of a `with`.  A text that is not found exactly once is an error, so a mutant cannot go
stale unnoticed.  `catch` says what reveals it: a program of some universe, a pair of threads, or a scene.

Next: scenes.py (programs with failing calls and captures), test_mutants.py.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from tests.model.programs import forget_pools

CACHING, STREAMS, BLOCKS = "allocator.caching", "allocator.streams", "allocator.blocks"


@dataclass(frozen=True)
class Change:
    """One replacement in the source of `module:Class.method`."""

    place: str
    old: str
    new: str


def _apply(place: str, changes: Sequence[Change]) -> list[tuple[Any, str, Any]]:
    """Put the changed function in place, wherever it has been imported to; returns what undoes it."""
    module_name, path = place.split(":")
    module = importlib.import_module(module_name)
    holder: Any = module
    *outer, name = path.split(".")
    for part in outer:
        holder = getattr(holder, part)
    original = inspect.getattr_static(holder, name)
    source = textwrap.dedent(inspect.getsource(getattr(original, "fget", original)))  # of a property, its function
    for change in changes:
        assert source.count(change.old) == 1, f"{place}: {source.count(change.old)} times: {change.old!r}"
        source = source.replace(change.old, change.new)
    scope: dict[str, Any] = {}
    code = compile(source, f"<mutant of {place}>", "exec", __future__.annotations.compiler_flag)
    exec(code, module.__dict__, scope)
    holders = [holder]
    if not outer:
        holders = [
            m for n, m in list(sys.modules.items()) if n.startswith("allocator") and vars(m).get(name) is original
        ]
    for each in holders:
        setattr(each, name, scope[name])
    return [(each, name, original) for each in holders]


@dataclass(frozen=True)
class Mutant:
    """A rule broken.  catch: "universe: program", "pair: name", or "scene: name"."""

    name: str
    changes: tuple[Change, ...]
    catch: str

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The allocator has the mistake inside the `with`."""
        undo: list[tuple[Any, str, Any]] = []
        try:
            for place in dict.fromkeys(change.place for change in self.changes):
                undo.extend(_apply(place, [change for change in self.changes if change.place == place]))
            yield
        finally:
            for holder, name, original in reversed(undo):
                setattr(holder, name, original)
            forget_pools()  # those it broke are nobody's business


def _m(name: str, catch: str, *changes: tuple[str, str, str]) -> Mutant:
    return Mutant(name, tuple(Change(*change) for change in changes), catch)


FREES = f"{CACHING}.frees:Frees"
FRONT = f"{CACHING}.front:Front"
SHELVES = f"{CACHING}.shelves:Shelves"
LADDER = f"{CACHING}.ladder:Ladder"
GROWTH = f"{CACHING}.growth:Growth"
POOL = f"{CACHING}.pool:CachingAllocator"
SEALING = f"{STREAMS}.sealing:Sealing"
REGISTRY = f"{STREAMS}.registry:Registry"
BORROWED = f"{STREAMS}.borrowing:Borrowed"
BORROWED_EACH = f"{STREAMS}.borrowing:BorrowedEach"
ORDER = f"{STREAMS}.order:Order"
TIMELINE = f"{STREAMS}.timeline:Timeline"
EVENT = f"{STREAMS}.event:Event"
HEAP = f"{BLOCKS}.heap:Heap"

_NOT_OVER: Final = "if other is not None and other.completed < seqno:"


def _edges(test: str) -> tuple[tuple[str, str, str], ...]:
    """Let a stream take what another freed wherever `test` of `line` and `other` holds: an order we never asked for."""
    return (
        (f"{ORDER}.known", _NOT_OVER, f"{_NOT_OVER[:-1]} and not ({test}):"),
        (f"{SHELVES}._covering", "own.keys() & line.clock.at.keys()", "list(own)"),
    )


_TO_BLOCKING: Final = "other.kind is Kind.LEGACY and line.kind.blocking"
_TO_LEGACY: Final = "line.kind is Kind.LEGACY and other.kind.blocking"

MUTANTS: Final = (
    _m(
        "r1_a_seqno_of_one_timeline_taken_for_another's",
        "waits: alloc 0 1; wait_stream 1 0; use 0 1; free 0; wait_stream 2 0; alloc 2 1",
        (
            f"{ORDER}.known",
            "at.get(number, 0) >= seqno:\n            continue",
            "max(at.values(), default=0) >= seqno:\n            continue",
        ),
    ),
    _m(
        "r2_an_answer_proves_more_than_was_closed_before",
        "events: alloc 0 1; record 0 0; use 0 0; free 0; stats; tick; query_event 0; alloc 1 1",
        (f"{REGISTRY}.mark", "self.complete(line, seqno)", "self.complete(line, max(seqno, line.close_seqno()[0]))"),
    ),
    _m(
        "r2_a_query_closes_after_it_was_answered",
        "pair: r2_a_free_while_its_stream_is_asked",
        (f"{SEALING}.query", "points = registry.close_for(line)  # before the question (R4)\n", "pass\n"),
        (f"{SEALING}.query", "registry.mark(points)", "registry.mark(registry.close_for(line))"),
    ),
    _m(
        "r2_a_host_wait_closes_after_it_was_over",
        "pair: r2_a_free_while_its_stream_is_waited_for",
        (f"{SEALING}.synchronize", "points = registry.close_for(line)  # before the wait (R4)\n", "pass\n"),
        (f"{SEALING}.synchronize", "registry.mark(points)", "registry.mark(registry.close_for(line))"),
    ),
    _m(
        "r2_a_busy_stream_is_taken_for_idle",
        "waits: alloc 0 1; free 0; alloc 1 1",
        (f"{SEALING}.query", "if not device.stream_query(handle):", "if device.stream_query(handle) is None:"),
        (f"{SEALING}.ask", "if not is_idle(handle):", "if is_idle(handle) is None:"),
    ),
    _m(
        "r2_all_are_closed_after_they_were_asked",
        "pair: r2_a_free_while_its_stream_is_asked_by_a_request",
        (f"{SEALING}.ask", "proved += closed", "proved += registry.close_for(line)"),
    ),
    _m(
        "r2_a_stream_that_ends_is_over",
        "ends: alloc 0 1; free 0; renew 0; alloc 0 1",
        (
            f"{SEALING}._seal_and_release",
            "if reachable and not self.query(line, given) and self.seal(line, given) is None:",
            "registry.mark([(line, line.closed)])\n    if False:",
        ),
    ),
    _m(
        "r3_a_user_left_out_of_the_stamp",
        "waits: alloc 0 1; wait_stream 1 0; use 0 1; free 0; wait_stream 2 0; alloc 2 1",
        (f"{FREES}._stamp_of_several", "users.pop(owner.number, None)", "users.clear()"),
    ),
    _m(
        "r3_a_user_that_only_the_free_names_left_out",
        "named: alloc 0 1; wait_stream 1 0; free_on 0 1; alloc 0 1",
        (f"{FREES}._stamp_of_several", "users[named.number] = named", "pass"),
    ),
    _m(
        "r3_the_owner_left_out_of_the_stamp",
        "waits: alloc 0 1; free 0; alloc 1 1",
        (
            f"{FREES}._retire",
            "stamp = self._order.stamp(owner, block.assumed)",
            "stamp = block.stamp",
        ),
        (f"{FREES}.drain", "if bin_ is None or named is not None or (owner := bin_.owner).ended:", "if True:"),
    ),
    _m(
        "r3_a_stamp_of_sealed_instead_of_pending",
        "waits: alloc 0 1; free 0; alloc 1 1",
        (
            f"{FREES}._retire",
            "stamp = self._order.stamp(owner, block.assumed)",
            "stamp = VectorClock({owner.number: owner.sealed})",
        ),
        (f"{FREES}.drain", "if bin_ is None or named is not None or (owner := bin_.owner).ended:", "if True:"),
    ),
    _m(
        "r3_assumed_users_left_out_of_the_stamp",
        "assumed: alloc 0 1; wait_stream 1 0; use 0 1; free 0; wait_stream 2 0; alloc 2 1",
        (f"{FREES}._retire", "self._order.stamp(owner, block.assumed)", "self._order.stamp(owner, False)"),
        (f"{FREES}.drain", "if not bin_.assumed else", "if True else"),
    ),
    _m(
        "r3_a_second_free_of_a_block_retires_it_again",
        "scene: a_free_queued_twice",
        (f"{FREES}.drain", "if block.generation == generation:", "if True:"),
    ),
    _m(
        "r3_a_context_seqno_needs_no_stream",
        "assumed: alloc 0 1; wait_stream 1 0; use 0 1; free 0; tick; stats; alloc 2 1",
        (f"{STREAMS}.context:satisfied", "return False", "pass"),
    ),
    _m(
        "r3_the_exemption_of_an_owner_is_everybody's",
        "scene: memory_used_undeclared_is_asked_for_by_one_that_declares",
        (f"{SHELVES}._known", "block.owner is line)", "True)"),
    ),
    _m(
        "r3_the_owner's_exemption_survives_a_merge",
        "scene: what_is_left_of_two_blocks_that_were_joined",
        (f"{HEAP}.merge", "left.owner = None", "pass"),
    ),
    _m(
        "r4_a_record_before_the_close",
        "pair: r4_work_and_a_free_while_its_stream_is_sealed",
        (f"{SEALING}.seal", "seqno, clock = line.close_seqno()  # before the record (R4)", "pass"),
        (
            f"{SEALING}.seal",
            "sealed = Sealed(seqno, event, clock)\n    with registry.lock.checked():\n",
            "with registry.lock.checked():\n        seqno, clock = line.close_seqno()\n"
            "        sealed = Sealed(seqno, event, clock)\n",
        ),
    ),
    _m(
        "r4_a_snapshot_after_the_record",
        "pair: r4_a_wait_while_its_stream_is_sealed",
        (
            f"{SEALING}.seal",
            "sealed = Sealed(seqno, event, clock)",
            "sealed = Sealed(seqno, event, line.clock.advanced(line.number, seqno))",
        ),
    ),
    _m(
        "r4_a_snapshot_at_the_wait",
        "waits: alloc 2 1; free 0; record 0 1; wait_stream 1 2; wait 0 0; alloc 0 1",
        (
            f"{EVENT}.wait",
            "line.learn(before.clock)",
            "line.learn(before.line.clock.joined(before.clock) if before.line else before.clock)",
        ),
    ),
    _m(
        "r4_a_seal's_snapshot_at_the_wait",
        "scene: a_stream_that_waits_after_it_was_sealed",
        (
            f"{SEALING}.make_wait",
            "line.learn(one.clock)",
            "[line.learn(other.clock) for other in registry.lines.values() if one in other.in_flight]; "
            "line.learn(one.clock)",
        ),
    ),
    _m(
        "r4_a_join_before_the_wait",
        "scene: a_wait_that_fails",
        (
            f"{SEALING}.make_wait",
            "device.stream_wait_event(handle, one.event)",
            "line.learn(one.clock)\n                    device.stream_wait_event(handle, one.event)",
        ),
    ),
    _m(
        "r4_an_event's_join_before_the_wait",
        "scene: an_event_whose_wait_fails",
        (f"{EVENT}.wait", "before = self._record\n", "before = self._record\n    line.learn(before.clock)\n"),
    ),
    _m(
        "r4_a_failed_record_published",
        "scene: a_record_that_fails",
        (
            f"{SEALING}.seal",
            "registry.events.discard(event)  # it would now query as done (R4)\n                    raise",
            "captured = False",
        ),
    ),
    _m(
        "r4_an_event's_failed_record_published",
        "scene: an_event_whose_record_fails",
        (
            f"{EVENT}.record",
            "device.event_record(self._event, handle)",
            "record = _Record(line, SyncPoint(line.number, seqno), clock)\n"
            "                device.event_record(self._event, handle)",
        ),
    ),
    _m(
        "r4_an_event_given_back_while_it_is_in_use",
        "scene: two_events_that_are_one",
        (f"{REGISTRY}.complete", "if not sealed.users:", "if True:"),
    ),
    _m(
        "r4_an_event_is_forgotten_while_it_is_in_use",
        "scene: an_event_forgotten_while_it_is_waited_for",
        (f"{TIMELINE}.thin", "at % 2 == 0 or sealed.users or", "at % 2 == 0 or"),
    ),
    _m(
        "r9_a_mark_that_was_given_up_proves_an_unknown_stream_over",
        "scene: a_mark_given_up_before_it_is_told_what_it_proves",
        (f"{SEALING}.identify", "if line.completed >= sealed.seqno:", "if sealed.done:"),
    ),
    _m(
        "r9_a_mark_that_was_given_up_proves_blocking_streams_over",
        "scene: a_mark_given_up_before_it_is_told_what_it_proves",
        (f"{SEALING}.seal_legacy", "if registry.legacy.completed >= sealed.seqno:", "if sealed.done:"),
    ),
    _m(
        "r9_a_mark_that_was_given_up_is_relied_on",
        "scene: a_mark_given_up_before_it_is_told_what_it_proves",
        (f"{SEALING}.identify", "elif sealed.done:", "elif False:"),
    ),
    _m(
        "r5_a_user's_event_taken_as_a_seal",
        "events: alloc 0 1; free 0; record 0 0; record 0 1; stats; alloc 1 1",
        (
            f"{EVENT}.record",
            "self._record = record",
            "self._record = record; from allocator.streams import Sealed; "
            "line.publish(Sealed(seqno, self._event, clock))",
        ),
    ),
    _m(
        "r5_an_event_recorded_again_teaches_its_first_record",
        "events: alloc 0 1; free 0; record 0 0; record 0 1; wait 0 2; alloc 2 1",
        (f"{EVENT}.record", "self._record = _NOTHING  #", "pass  #"),
        (
            f"{EVENT}.record",
            "self._record = record",
            "self._record = record if self._record is _NOTHING else self._record",
        ),
    ),
    _m(
        "r5_an_event_recorded_meanwhile_is_not_noticed",
        "pair: r5_an_event_recorded_again_while_it_is_waited_for",
        (f"{EVENT}.wait", "if self._record is before:", "if True:"),
    ),
    _m(
        "r5_an_event_that_two_threads_record_is_the_later's",
        "pair: r5_one_event_recorded_by_two_threads",
        (f"{EVENT}.record", "if alone and mine == self._records:", "if mine == self._records:"),
    ),
    _m(
        "r5_records_and_waits_in_a_capture_believed",
        "scene: an_event_recorded_in_a_capture",
        (f"{EVENT}.record", "captured = registry.capturing(handle)", "captured = False"),
        (f"{EVENT}.record", "if not captured and not registry.capturing(handle):", "if True:"),
        (f"{EVENT}.wait", "if captured or registry is not self._registry:", "if registry is not self._registry:"),
    ),
    _m(
        "r5_making_a_stream_current_orders_it",
        "scene: a_current_stream",
        (f"{STREAMS}.stream:stream", "stack.append(s)", "stack.append(s); s.line.learn(stack[-2].line.here)"),
    ),
    _m(
        "r6_a_blocking_stream_takes_what_legacy_freed",
        "quiet: alloc 0 1; free 0; quiet 1 1; sync 1; use 1 2",
        *_edges(_TO_BLOCKING),
    ),
    _m(
        "r6_legacy_takes_what_a_blocking_stream_freed",
        "quiet-thread: alloc 1 1; free 0; quiet 0 1; use 1 2",
        *_edges(_TO_LEGACY),
    ),
    _m(
        "r6_a_legacy_edge_inherited",
        "quiet: alloc 0 1; free 0; quiet 1 1; free 1; alloc 2 1",
        *_edges(_TO_BLOCKING),
        (f"{SHELVES}.hand_out", "carried = VectorClock(kept)", "carried = EMPTY"),
    ),
    _m(
        "r6_a_miss_on_the_null_stream_marks_it",
        "scene: an_allocation_on_the_null_stream",
        (f"{CACHING}.pool:CachingAllocator._obtain", "and not registry.reachable(line)", "and True"),
    ),
    _m(
        "r6_legacy's_yes_proves_non_blocking_streams",
        "waits-legacy: alloc 0 1; alloc 2 1; free 1; tick; free 0; query 0; alloc 1 1",
        (f"{REGISTRY}.close_each", "if other.kind.blocking]", "if other is not line]"),
    ),
    _m(
        "r6_a_query_of_a_blocking_stream_proves_legacy",
        "waits-legacy: alloc 0 1; free 0; query 1; alloc 2 1",
        (
            f"{REGISTRY}.close_each",
            "if line.kind is Kind.LEGACY:",
            "if line.kind.blocking:\n                proves += [self.legacy]\n            if line.kind is Kind.LEGACY:",
        ),
    ),
    _m(
        "r7_what_was_freed_last_goes_to_whoever_asks",
        "bins: alloc 1 0; free 0; alloc 0 0; free 1; alloc 1 0",
        (f"{FRONT}.acquire", "bin_.taker is line\n", "True\n"),
    ),
    _m(
        "r3_streams_that_take_turns_leave_no_stamp",
        "turns: query 0; alloc 0 1; free 0; alloc 1 1; alloc 2 1; alloc 2 1; alloc 2 1",
        (f"{FRONT}.acquire", "last.stamp = stamp", "pass"),
    ),
    _m(
        "r3_streams_that_take_turns_leave_the_stamp_of_the_one_that_takes",
        "turns: alloc 0 1; free 0; alloc 1 1; free 1; alloc 2 1; stats; alloc 2 1; alloc 2 1; alloc 2 1",
        (f"{FRONT}.acquire", "stamp: VectorClock = theirs.here", "stamp: VectorClock = line.here"),
    ),
    _m(
        "r3_streams_that_take_turns_forget_the_assumed_users",
        "turns-assumed: alloc 0 1; free 0; alloc 1 1; tick; stats",
        (f"{FRONT}.acquire", "stamp = made", "pass"),
    ),
    _m(
        "r7_streams_that_take_turns_take_what_is_anybodys",
        "turns: alloc 1 1; free 0; alloc 0 1; free 1; alloc 2 1; alloc 2 1",
        (f"{FRONT}.acquire", "if mine is not None and mine.owner is line and", "if mine is not None and"),
    ),
    _m(
        "r3_what_was_freed_last_goes_back_past_the_stream_that_the_free_names",
        "named: alloc 0 1; wait_stream 1 0; free_on 0 1; alloc 0 1",
        (f"{POOL}.free", "if lane is None or named is not None:", "if lane is None:"),
    ),
    _m(
        "r7_a_bin_ignores_the_stamp",
        "waits: alloc 0 1; wait_stream 1 0; use 0 1; free 0; wait_stream 2 0; alloc 2 1",
        (f"{POOL}.declare_use", "block.bin = None", "pass"),
    ),
    _m(
        "r7_a_bin_ignores_what_is_carried_on",
        "quiet: alloc 0 1; free 0; quiet 1 1; free 1; alloc 2 1",
        *_edges(_TO_BLOCKING),
        (f"{SHELVES}.hand_out", "binned = not carried.at and (", "binned = True or ("),
    ),
    _m(
        "r7_a_merge_keeps_one_stamp",
        "one-page: alloc 0 0; alloc 1 0; free 0; record 0 0; free 1; wait_stream 0 1; quiet 0 2; wait 0 2; alloc 2 3",
        (f"{HEAP}.merge", "left.stamp = left.stamp.joined(right.stamp)", "pass"),
    ),
    _m(
        "r7_a_split_forgets_the_stamp",
        "one-page: alloc 0 1; free 0; quiet 0 0; alloc 1 0",
        (
            f"{HEAP}.split",
            "rest.stamp = block.state, block.owner, block.sole, block.stamp",
            "rest.stamp = block.state, block.owner, block.sole, block.stamp.__class__()",
        ),
    ),
    _m(
        "r8_identity_by_handle",
        "waits-threads: alloc 0 1; free 0; alloc 1 1",
        (f"{REGISTRY}._look_up", "identity = device.stream_id(handle)", "identity = handle"),
    ),
    _m(
        "r8_a_stream_of_another_device_is_served",
        "scene: a_stream_of_another_device",
        (f"{CACHING}.front:Front.fetch", "self._registry.lines.get(line.number) is not line", "False"),
    ),
    _m(
        "r8_identity_by_equality",
        "scene: two_streams_that_compare_equal",
        (
            f"{REGISTRY}.resolve",
            "line = self.owners.get(id(stream))",
            "line = next((l for l in self.owners.values() if l.owner == stream), None)",
        ),
        (f"{REGISTRY}.resolve", "line.owner is stream", "line.owner == stream"),
    ),
    _m(
        "r8_one_per_thread_stream_for_all_threads",
        "waits-threads: alloc 0 1; free 0; alloc 1 1",
        (f"{REGISTRY}.per_thread", 'getattr(self.local, "per_thread", None)', 'getattr(self, "shared", None)'),
        (f"{REGISTRY}.per_thread", "self.local.per_thread = token =", "self.shared = token ="),
    ),
    _m(
        "r9_handle_2_sealed_by_another_thread",
        "waits-threads: alloc 1 1; free 0; alloc 2 1",
        (f"{REGISTRY}.reachable", "token is not None and token.line is line", "True"),
        (
            f"{STREAMS}.borrowing:_per_thread",
            "PER_THREAD if token is not None and token.line is line else None",
            "PER_THREAD",
        ),
    ),
    _m(
        "r9_a_handle_used_after_its_stream_was_destroyed",
        "ends: alloc 0 1; free 0; renew 0; stats; alloc 0 1",
        (
            f"{SEALING}._seal_and_release",
            "if reachable and not self.query(line, given) and self.seal(line, given) is None:",
            "if False:",
        ),
        (f"{SEALING}._seal_and_release", "owner = registry.release_owner(line)", "owner = line.owner"),
        (f"{STREAMS}.borrowing:unpinned", "dead, owner.handle = owner.handle, None", "dead = owner.handle"),
        (f"{BORROWED}.__enter__", "None if owner.closing else owner.handle", "owner.handle"),
    ),
    _m(
        "r9_an_object_that_goes_ends_its_stream",
        "scene: a_living_stream_whose_object_goes",
        (f"{SEALING}.let_go", "if dies_with(line.owner):", "if True:"),
    ),
    _m(
        "r10_a_mark_that_went_into_a_graph_believed",
        "scene: a_capture_that_begins_during_a_record",
        (f"{SEALING}.seal", "captured = registry.capturing(handle)", "captured = False"),
    ),
    _m(
        "r10_a_capturing_stream_is_asked",
        "scene: a_stream_that_captures",
        (f"{SEALING}.query", "if registry.capturing(handle):", "if False:"),
        (f"{SEALING}.ask", "if captures(handle):", "if False:"),
    ),
    _m(
        "r11_an_error_is_completion",
        "scene: a_query_that_fails",
        (
            f"{SEALING}.query",
            "self.failed_query(line, error)\n            return False",
            "self.failed_query(line, error)",
        ),
        (
            f"{SEALING}.ask",
            "self.failed_query(line, error)\n                    continue",
            "self.failed_query(line, error)",
        ),
    ),
    _m(
        "r11_an_event's_error_is_completion",
        "scene: an_event_query_that_fails",
        (
            f"{SEALING}._newest_done",
            "self.failed_query(line, error, flight[at])\n            return done",
            "yes = True",
        ),
    ),
    _m(
        "r13_memory_in_flight_is_released",
        "pool: alloc 0 1; free 0; trim; alloc 0 1",
        (
            f"{GROWTH}._take_some",
            "for block in self._shelves.idle[kind].from_size(least):",
            "for own in self._shelves.own[kind].values():\n"
            "            for block in list(own.from_size(least)):\n"
            "                own.remove(block)\n"
            "                self._shelves.idle[kind].add(block)\n"
            "        for block in self._shelves.idle[kind].from_size(least):",
        ),
    ),
    _m(
        "r13_a_block_that_is_waited_for_is_taken_without_the_wait",
        "one-page: alloc 0 1; free 0; alloc 1 1",
        (
            f"{LADDER}._depend_on",
            "if ready and self._registry.order.known(block.stamp, request.line, exempt=exempt):",
            "if True:",
        ),
    ),
)

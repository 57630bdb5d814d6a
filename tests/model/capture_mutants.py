"""What is done about captures that hooks report (R6, R10), each clause broken on purpose.

`catch` names what reveals it: a program of contract.py's kind, a scene of capture_scenes.py, a pair of threads.
Not here, as nothing that a program can do would tell the difference: the graph's name on blocks that were allocated
within it (`Capturing.ends`), whose owner is the graph's already; and that a capture makes its stream wait for nothing
(`Ladder._depend`), whose timeline has no handle to do it with.
Next: mutants.py, test_mutants.py.
"""

from __future__ import annotations

from typing import Final

from tests.model.mutants import (
    BORROWED,
    BORROWED_EACH,
    CACHING,
    MUTANTS,
    ORDER,
    POOL,
    REGISTRY,
    SEALING,
    SHELVES,
    STREAMS,
    Change,
    Mutant,
)

CAPTURES = f"{STREAMS}.captures:Captures"
CAPTURING = f"{CACHING}.capturing:Capturing"
SETTLING = f"{CACHING}.settling:Settling"


def _m(name: str, catch: str, *changes: tuple[str, str, str]) -> Mutant:
    return Mutant(name, tuple(Change(*change) for change in changes), catch)


CAPTURE_MUTANTS: Final = (
    # -- which blocks are the graph's ---------------------------------------------------------------
    _m(
        "r10_what_is_live_when_a_capture_begins_is_not_the_graph's",
        "graph-assumed: alloc 0 1; begin 1; work 1; free 0",
        (f"{CAPTURING}.begins", "self._join(block, capture.line)", "pass"),
    ),
    _m(
        "r10_a_block_handed_out_during_a_capture_is_not_the_graph's",
        "graph-usual: begin 1; alloc 0 1; work 1; free 0",
        (f"{CAPTURING}.hand_out", "self._join(block, line)", "pass"),
    ),
    _m(
        "r10_a_block_of_one_capture_is_not_the_graph's_of_another",
        "graph-two: begin 0; begin 1; alloc 1 1; work 0; free 0; end 1; drop 1; stats",
        (f"{CAPTURING}.hand_out", "if all(inner is not owner for _, inner in c.inside.values())", "if not c.inside"),
    ),
    _m(
        "r10_what_a_capture_leaves_is_not_its_stream's",
        "graph-declared: begin 0; alloc 0 1; alloc 0 1; free 0; end 0; drop 0; stats; work 0; free 1",
        (f"{CAPTURING}.ends", "self._join(block, stream)", "pass"),
    ),
    _m(
        "r10_only_one_pool_hears_of_a_capture",
        "graph-two-pools: alloc 0 1; alloc 0 1; begin 1; work 1; free 0; free 1",
        (f"{CAPTURES}.begin", "for pool in registry.all_pools():", "for pool in registry.all_pools()[:1]:"),
    ),
    _m(
        "r10_a_bin_serves_what_is_the_graph's",
        "graph-usual: begin 1; alloc 0 1; work 1; free 0",
        (f"{CAPTURING}._join", "block.bin = None", "pass"),
    ),
    _m(
        "r10_the_hot_path_does_not_see_a_capture",
        "graph-declared: alloc 0 1; free 0; begin 0; alloc 0 1",
        (f"{CAPTURING}.begins", "front.careful = True", "pass"),
    ),
    # -- whose memory a capture takes ----------------------------------------------------------------
    _m(
        "r10_a_capture_takes_its_stream's_memory",
        "graph-declared: alloc 0 1; free 0; begin 0; alloc 0 1",
        (f"{POOL}._look_out", "inside = captures.inside(line) if captures.active else line", "inside = line"),
    ),
    _m(
        "r10_two_streams_of_a_capture_share_what_they_free",
        "graph-join: begin 0; wait_stream 1 0; alloc 0 1; free 0; alloc 1 1",
        (
            f"{CAPTURES}._enter",
            "(line, self._new_line())",
            "(line, next((l for _, l in capture.inside.values()), None) or self._new_line())",
        ),
    ),
    _m(
        "r10_what_a_capture_frees_serves_streams_outside_it",
        "graph-usual: begin 1; alloc 1 1; free 0; alloc 0 1",
        (f"{CAPTURES}.inside", "self.active.get(line.number)", "next(iter(self.active.values()), None)"),
        (f"{CAPTURES}.inside", "capture.inside[line.number][1]", "next(iter(capture.inside.values()))[1]"),
    ),
    _m(
        "r10_a_stream_that_joined_is_outside_the_capture",
        "graph-join: alloc 0 1; free 0; begin 1; wait_stream 0 1; alloc 0 1",
        (f"{CAPTURES}.join", "self._enter(capture, line, handle)", "return True"),
    ),
    # -- how long ------------------------------------------------------------------------------------
    _m(
        "r10_what_a_capture_freed_is_over_when_it_ends",
        "graph-declared: begin 0; alloc 0 1; free 0",
        (
            f"{CAPTURES}.end",
            "line.end()\n        capture.line.end()",
            "line.end()\n            registry.complete(line, line.closed)\n        capture.line.end()",
        ),
    ),
    _m(
        "r10_a_capture_that_is_over_holds_nothing_back",
        "graph-declared: begin 1; alloc 0 1; stats; work 1; free 0",
        (
            f"{ORDER}.known",
            "other = self._lines.get(number)",
            "other = {n: o for n, o in self._lines.items() if o.kind.value != 'graph'}.get(number)",
        ),
    ),
    _m(
        "r10_the_end_of_a_graph_is_the_end_of_its_replays",
        "graph-declared: begin 0; alloc 0 1; free 0",
        (f"{CAPTURES}.bury", "(line, registry.context.pending)", "(line, 0)"),
    ),
    _m(
        "r10_a_mark_before_a_graph's_end_proves_its_last_replay_over",
        "graph-declared: begin 0; alloc 0 1; free 0",
        (f"{CAPTURES}.bury", "(line, registry.context.pending)", "(line, registry.context.pending - 1)"),
    ),
    _m(
        "r10_a_mark_behind_a_replay_is_its_end",
        "graph-declared: begin 0; alloc 0 1; free 0",
        (f"{CAPTURES}.advance", "reached = registry.context.completed", "reached = registry.context.sealed"),
    ),
    _m(
        "r10_a_graph's_memory_is_lost",
        "graph-assumed: alloc 0 1; begin 0",
        (f"{CAPTURES}.end", "capture.line.end()", "pass"),
    ),
    _m(
        "r10_graphs_that_no_memory_waits_for_are_never_forgotten",
        "graph-declared: begin 0; end 0",
        (f"{SHELVES}.context_waits", "if captures.dying:", "if False:"),
    ),
    _m(
        "r10_graphs_that_live_are_forgotten_with_those_that_do_not",
        "scene: a_block_that_lives_through_many_captures",
        (f"{CAPTURING}._join", "if number in lines", "if number not in lines"),
    ),
    _m(
        "r10_a_pool_made_within_a_capture_does_not_see_it",
        "scene: a_pool_made_within_a_capture",
        (f"{POOL}.__init__", "if self._registry.captures.active:", "if False:"),
    ),
    # -- what must not be touched -------------------------------------------------------------------
    _m(
        "r10_a_stream_about_to_capture_is_asked",
        "scene: a_stream_that_is_about_to_capture",
        (f"{BORROWED}.__enter__", "not self._by_program and registry.captures.forbids(line)", "False"),
        (f"{BORROWED_EACH}.__enter__", "if captures.active and captures.forbids(line):", "if False:"),
    ),
    _m(
        "r10_a_stream_about_to_join_is_asked",
        "scene: a_stream_that_is_about_to_join",
        (
            f"{CAPTURES}.forbids",
            "line.number in active",
            "line.number in active and next(iter(active[line.number].inside)) == line.number",
        ),
    ),
    _m(
        "r10_legacy_is_asked_beside_a_blocking_stream_about_to_capture",
        "scene: legacy_beside_a_blocking_stream_that_is_about_to_capture",
        (
            f"{CAPTURES}.forbids",
            "return any(stream.kind.blocking for c in active.values() for stream, _ in c.inside.values())",
            "return False",
        ),
    ),
    _m(
        "r10_a_captured_stream_is_asked_who_it_is",
        "scene: an_allocation_by_the_handle_of_a_captured_stream",
        (f"{REGISTRY}._look_up", "if captured is not None and handle != PER_THREAD:", "if False:"),
    ),
    _m(
        "r10_a_handle_stays_the_captured_stream's",
        "scene: a_stream_handle_that_captures_no_more",
        (f"{CAPTURES}._forget_handle", "del self.by_handle[handle]", "pass"),
    ),
    _m(
        "r6_the_whole_context_is_marked_during_a_capture",
        "graph-context: alloc 0 1; begin 0; free 0",
        (f"{SETTLING}._may_mark_context", "not captures.active and (", "("),
        (f"{CAPTURES}.whole_context", "free = not self.active", "free = True"),
    ),
    _m(
        "r6_a_capture_since_the_decision_to_mark_the_context_is_not_seen",
        "scene: a_capture_that_begins_before_the_whole_context_is_marked",
        (f"{CAPTURES}.whole_context", "free = not self.active", "free = True"),
    ),
    # -- beginning while others are at it (S18) -----------------------------------------------------
    _m(
        "r10_a_capture_begins_while_a_thread_asks_its_stream",
        "pair: s18_a_capture_begins_while_its_stream_is_asked",
        (f"{CAPTURES}.begin", "self._wait_until_left(line)", "pass"),
    ),
    _m(
        "r10_a_stream_joins_while_a_thread_asks_it",
        "pair: s18_a_stream_joins_a_capture_while_it_is_asked",
        (f"{CAPTURES}.join", "self._wait_until_left(line)", "pass"),
    ),
    _m(
        "r10_a_blocking_capture_begins_while_a_thread_asks_legacy",
        "pair: s18_a_blocking_stream_captures_while_legacy_is_asked",
        (f"{CAPTURES}._wait_until_left", "registry.legacy.pins if line.kind.blocking else 0", "0"),
    ),
    _m(
        "r6_a_capture_begins_while_a_thread_marks_the_context",
        "pair: s18_a_capture_begins_while_the_whole_context_is_marked",
        (f"{CAPTURES}._wait_until_left", " + self._in_context_calls", ""),
    ),
    # -- streams that nobody can ask (S19) -----------------------------------------------------------
    _m(
        "r10_a_stream_that_nobody_could_ask_uses_nothing",
        "scene: a_stream_that_nobody_could_ask",
        (f"{REGISTRY}.new_unknown_line", "self.lines[line.number] = line", "pass"),
    ),
    _m(
        "r10_a_stream_that_can_be_asked_at_last_is_over",
        "scene: a_stream_that_can_be_asked_at_last",
        (f"{SEALING}.identify", "if self.query(line):", "if True:"),
    ),
    _m(
        "r10_a_stream_that_can_be_asked_at_last_is_never_over",
        "scene: a_stream_that_can_be_asked_at_last",
        (f"{SEALING}.identify", "sealed.proves.append(point)", "pass"),
    ),
)

ALL_MUTANTS: Final = (*MUTANTS, *CAPTURE_MUTANTS)

"""Whether a program keeps its side of the contract, so that a race can only be the pool's.

Rule (docs/ordering.md, "the contract"): another stream uses a block only after it waited for the block's own stream
at or after the allocation; a use comes before the free; a stream of which nothing is declared is named by the free.
This file decides it on the operations alone, with clocks of its own, and asks neither the pool nor the simulator.

Used by: the tests of every workload, and shrinking.py, which must not leave out a wait that the rest needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from allocator.stress.operations import OWN, PRIVATE, Op, Step

StreamName = tuple[int, int]
"""(worker, number); worker -1 for the streams that all share."""

Clock = dict[StreamName, int]

_FREES: Final = frozenset({"free", "free_on", "drop", "cycle"})


@dataclass
class _Block:
    stream: StreamName
    place: int
    """How far its stream was at the allocation."""
    declared: set[StreamName] = field(default_factory=set)
    named: StreamName | None = None
    """A stream that used it and was not declared; the free has to name it."""


def breach(steps: Iterable[Step]) -> str | None:
    """What the first wrong step does wrong, in one line; None for a right program.

    >>> breach([Step(0, Op("alloc", 1, 0, 512)), Step(0, Op("use", 1, 1, 100))])
    'step 2, 0 use b1 s1 t100: the stream has not waited for the allocation'
    """
    judge = _Judge()
    for number, step in enumerate(steps, 1):
        wrong = judge.step(step.worker, step.op)
        if wrong is not None:
            return f"step {number}, {step}: {wrong}"
    return None


class _Judge:
    def __init__(self) -> None:
        self._places: dict[StreamName, int] = {}
        self._clocks: dict[StreamName, Clock] = {}
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._events: dict[tuple[int, int], Clock] = {}
        self._open: set[StreamName] = set()
        self._mailboxes: dict[int, deque[_Block]] = {}

    def step(self, worker: int, op: Op) -> str | None:
        handler = getattr(self, f"do_{op.verb}", None)
        if handler is not None:
            return handler(worker, op)  # type: ignore[no-any-return]
        block = self._blocks.get((worker, op.a))
        if op.verb in _FREES and block is not None:
            return self._freed(worker, op, block)
        return None

    def _stream(self, worker: int, number: int) -> StreamName | None:
        """None for a private stream that is not open: nothing happens there."""
        name = (worker if number >= PRIVATE else -1, number)
        return name if number < PRIVATE or name in self._open else None

    def _runs(self, stream: StreamName) -> bool:
        return stream[1] < PRIVATE or stream in self._open

    def _position(self, stream: StreamName) -> Clock:
        clock = self._clocks.setdefault(stream, {})
        return {**clock, stream: self._places.get(stream, 0)}

    def _learn(self, stream: StreamName, clock: Clock) -> None:
        mine = self._clocks.setdefault(stream, {})
        for other, place in clock.items():
            if mine.get(other, -1) < place:
                mine[other] = place

    def do_alloc(self, worker: int, op: Op) -> str | None:
        if (worker, op.a) in self._blocks:
            return "the block is there already"
        stream = self._stream(worker, op.b)
        if stream is not None:
            place = self._places[stream] = self._places.get(stream, 0) + 1
            self._blocks[worker, op.a] = _Block(stream, place)
        return None

    def do_use(self, worker: int, op: Op) -> str | None:
        block = self._blocks.get((worker, op.a))
        if block is None:
            return None
        stream = block.stream if op.b == OWN else self._stream(worker, op.b)
        if stream is None or not self._runs(stream):
            return None
        self._places[stream] = self._places.get(stream, 0) + 1
        if stream == block.stream:
            return None
        if self._clocks.get(stream, {}).get(block.stream, -1) < block.place:
            return "the stream has not waited for the allocation"
        if stream not in block.declared:
            if block.named not in (None, stream):
                return "a free can name one undeclared stream only"
            block.named = stream
        return None

    do_read = do_use

    def do_share(self, worker: int, op: Op) -> str | None:
        block, stream = self._blocks.get((worker, op.a)), self._stream(worker, op.b)
        if block is None or stream is None or not self._runs(block.stream):
            return None
        self._learn(stream, self._position(block.stream))
        block.declared.add(stream)
        return None

    def do_declare(self, worker: int, op: Op) -> str | None:
        block, stream = self._blocks.get((worker, op.a)), self._stream(worker, op.b)
        if block is not None and stream is not None:
            block.declared.add(stream)
        return None

    def _freed(self, worker: int, op: Op, block: _Block) -> str | None:
        del self._blocks[worker, op.a]
        named = self._stream(worker, op.b) if op.verb == "free_on" else None
        if block.named is not None and block.named not in block.declared and block.named != named:
            return "the free does not name a stream that used the block undeclared"
        return None

    def do_give(self, worker: int, op: Op) -> str | None:
        block = self._blocks.pop((worker, op.a), None)
        if block is None:
            return None
        if block.stream[1] >= PRIVATE:
            return "a private stream is unknown to the other worker"
        if block.named is not None and block.named not in block.declared:
            return "the receiver cannot know of an undeclared use"
        self._mailboxes.setdefault(op.b, deque()).append(block)
        return None

    def do_take(self, worker: int, op: Op) -> str | None:
        if (worker, op.a) in self._blocks:
            return "the block is there already"
        box = self._mailboxes.get(worker)
        if box:
            self._blocks[worker, op.a] = box.popleft()
        return None

    def do_record(self, worker: int, op: Op) -> str | None:
        stream = self._stream(worker, op.b)
        if stream is not None:
            self._events[worker, op.a] = self._position(stream)
        return None

    def do_wait(self, worker: int, op: Op) -> str | None:
        stream, clock = self._stream(worker, op.b), self._events.get((worker, op.a))
        if stream is not None and clock is not None:
            self._learn(stream, clock)
        return None

    def do_after(self, worker: int, op: Op) -> str | None:
        first, second = self._stream(worker, op.a), self._stream(worker, op.b)
        if first is not None and second is not None:
            self._learn(first, self._position(second))
        return None

    def do_open(self, worker: int, op: Op) -> str | None:
        if op.a < PRIVATE or (worker, op.a) in self._open:
            return "only a private stream that is not open can be opened"
        self._open.add((worker, op.a))
        return None

    def do_end(self, worker: int, op: Op) -> str | None:
        if op.a < PRIVATE:
            return "only a private stream can be ended"
        self._open.discard((worker, op.a))
        return None

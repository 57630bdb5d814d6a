"""Several streams: what each of them costs, and what it costs when memory goes from one to another.

    streams       1 to 1000 streams in turn, each with memory of its own: the cost of an operation; and the most beside
                  one, in turns
    round-robin   16 streams in turn with memory for fewer: each takes and drops one block before it is the next one's
                  turn (`each`), or 16 (`one in 16`)
    handover      made on one stream, used on another, which takes memory for its result, and dropped
    rmm-streams   as RMM publishes it: on stream after stream take, queue work that uses it, drop

Small blocks are of 256 KiB, of which one page holds 8; large ones of 4 MiB, a segment each.  The large ones go round:
every block that is taken was another stream's, or one in 16 was.  So do the small ones until Weir takes a page more for
them (docs/decisions/0017).  Pools that never cross grow to a block a stream and then always hit; the memory that takes
stands in the notes, as `peak_reserved_bytes`.  But for rmm-streams no work is
queued: the figure is the host's alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from allocator import Event
from allocator.sizes import KIB, MIB
from allocator.stress.benchmarks.cases import Allocator, Case, Contender, Door, Stage
from allocator.stress.benchmarks.loops import Run, around_streams, own_blocks, working_streams

SIZE: Final = 4 * KIB
ROUND: Final = 16
ONE: Final = "one-stream"
"""One stream of this pool: what it is called where the pool is its own peer."""
PERIOD: Final = 4 * 64
"""Operations.  With several streams marks are due every 64 frees: four times in the shortest turn."""
STEADY: Final = 64 * 64
"""Operations after which marks are as rare as they get while every stream finds its own memory (decision 0008)."""
CALM: Final = 8 * 64
"""Operations a stream, where there are many, after which that is so: marks are due every 8 frees a stream at first."""
ROUNDS: Final = (
    ("each", 256 * KIB, 1),
    (f"one in {ROUND}", 256 * KIB, ROUND),
    ("each, large", 4 * MIB, 1),
    (f"one in {ROUND}, large", 4 * MIB, ROUND),
)
"""Title, bytes of a block, and operations on a stream before it is the next one's turn."""


def streams(stage: Stage) -> Iterator[Case]:
    """The cost of an operation as streams get more."""
    for count in stage.choose((1, 10, 100, 1000), (1, 10)):
        for door in stage.doors:
            with door.streams(count) as made, door.allocators(several=True, entering=True) as found:
                for allocator in found:
                    with allocator.around():
                        own_blocks(allocator, SIZE, made, door.takes_stream)
                contenders = [one.contender(around_streams(one, SIZE, made, door.takes_stream)) for one in found]
                title = f"{count:,} stream{'s' if count > 1 else ''}"
                yield Case(
                    title, contenders, door.reference, door.name,
                    at=count, operations=2 * count, least=max(PERIOD, count), warm=max(2 * count, STEADY),
                )  # fmt: skip
    yield from _beside_one(stage, stage.choose((1000,), (10,))[0])


def _beside_one(stage: Stage, count: int) -> Iterator[Case]:
    """The most streams beside one, in turns: two cases one after the other would tell how the clock has drifted.

    One pool for both: it stays installed, as taking it off and on again would empty its bins in every turn.
    """
    for door in stage.doors:
        with (
            door.streams(count) as many,
            door.streams(1) as one,
            door.allocators(several=True, entering=True) as found,
        ):
            for allocator in found:
                if allocator.name != "weir":
                    continue
                with allocator.around():
                    contenders = []
                    for name, made in (("weir", many), (ONE, one)):
                        own_blocks(allocator, SIZE, made, door.takes_stream)
                        run = around_streams(allocator, SIZE, made, door.takes_stream)
                        contenders.append(Contender(name, run, notes=allocator.notes))
                    contenders[0].run(CALM * count)
                    yield Case(
                        f"{count:,} streams beside one", contenders, ONE, door.name,
                        operations=2 * count, least=max(PERIOD, count), warm=2 * count,
                    )  # fmt: skip


def round_robin(stage: Stage) -> Iterator[Case]:
    """Memory that goes round."""
    for title, size, burst in stage.choose(ROUNDS, ROUNDS[:2]):
        for door in stage.doors:
            with door.streams(ROUND) as made, door.allocators(several=True, entering=True) as found:
                contenders = [one.contender(around_streams(one, size, made, door.takes_stream, burst)) for one in found]
                whole = ROUND * burst
                yield Case(
                    title, contenders, door.reference, door.name,
                    at=size, operations=whole, least=PERIOD, warm=STEADY if size < MIB else max(2 * whole, PERIOD),
                )  # fmt: skip


def handover(stage: Stage) -> Iterator[Case]:
    """Producer and consumer."""
    for door in stage.doors:
        with door.streams(2) as (producer, consumer), door.allocators(several=True, entering=True) as found:
            make = core_handover if door.takes_stream else hook_handover
            contenders = [one.contender(make(one, stage, producer, consumer)) for one in found]
            yield Case("2 streams", contenders, door.reference, door.name, least=PERIOD // 2, warm=16)


def core_handover(allocator: Allocator, stage: Stage, producer: Any, consumer: Any) -> Run:
    """The use is declared, and the consumer waits for the producer.  The floor has nobody to tell."""
    call, event, tells = allocator.call, Event(stage.device), allocator.real

    def run(n: int) -> None:
        for _ in range(n):
            made = call(SIZE, producer)
            event.record(producer)
            event.wait(consumer)
            if tells:
                made.record_stream(consumer)
            call(SIZE, consumer)
            del made

    return run


def hook_handover(allocator: Allocator, stage: Stage, producer: Any, consumer: Any) -> Run:
    """As programs on CuPy do it: nothing is declared.  On made-up addresses nothing is waited for either."""
    call = allocator.call
    if stage.simulated:

        def run_made_up(n: int) -> None:
            for _ in range(n):
                with producer:
                    made = call(SIZE)
                with consumer:
                    call(SIZE)
                del made

        return run_made_up
    from allocator.stress.benchmarks.hooks import import_cupy

    event = import_cupy().cuda.Event(disable_timing=True)

    def run(n: int) -> None:
        for _ in range(n):
            with producer:
                made = call(SIZE)
                event.record(producer)
            consumer.wait_event(event)
            with consumer:
                call(SIZE)
            del made

    return run


def rmm_streams(stage: Stage) -> Iterator[Case]:
    """Many streams, each with work."""
    for count in stage.choose((1, 4, 16, 64), (1, 4)):
        for door in stage.doors:
            yield from _working(stage, door, count)


def _working(stage: Stage, door: Door, count: int) -> Iterator[Case]:
    with door.streams(count) as made, door.allocators(several=True, entering=True) as found:
        touch = door.touch()
        real: Sequence[Allocator] = [one for one in found if one.real]
        contenders = [one.contender(working_streams(one, SIZE, made, door.takes_stream, touch)) for one in real]
        reference = door.reference if any(one.name == door.reference for one in real) else "weir"
        title = f"{count} stream{'s' if count > 1 else ''} with work"
        yield Case(
            title, contenders, reference, door.name,
            at=count, operations=4 * count, least=PERIOD, warm=max(2 * count, PERIOD),
        )  # fmt: skip

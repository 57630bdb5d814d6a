"""What takes a block without the lock is one step: read in the code as this interpreter has translated it, and tried.

CPython lets other threads and signal handlers in where a function begins, after a call, and where a loop goes back;
3.11 collects wherever it makes what a collection looks at.  A tracer is called between lines, and lets all of them in.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from allocator import Allocation, CachingAllocator, Config, SimDevice, Stream
from allocator.blocks import Bin, Block
from allocator.caching.accounting import Accounts
from allocator.caching.frees import Frees
from allocator.caching.front import Front
from allocator.caching.lane import Lane
from allocator.events import VectorClock
from allocator.gil import COMPILED, STEPS_HOLD, Inside
from allocator.streams import Timeline
from tests.schedules.tracing import AtLine, nobody_takes_anything_inside

pytestmark = [
    pytest.mark.skipif(COMPILED, reason="compiled code has no such steps"),
    pytest.mark.skipif(not STEPS_HOLD, reason="this interpreter takes the lock"),
]

OPENS = ("CALL", "PRECALL", "RESUME", "JUMP_BACKWARD", "SEND", "YIELD", "IMPORT", "BUILD", "MAKE", "FORMAT", "RAISE")
"""Instructions after which, or in which, others may come in, by how their names begin."""


def sections(function: Any) -> list[list[tuple[int, str]]]:
    """The lines, numbered, from each look at `busy` that takes something to the `return` that ends it."""
    lines, first = inspect.getsourcelines(function)
    found: list[list[tuple[int, str]]] = []
    at = 0
    while at < len(lines):
        if ".busy and" in lines[at]:
            section = [(first + at, lines[at])]
            depth = len(lines[at]) - len(lines[at].lstrip())
            while True:
                at += 1
                text = lines[at]
                section.append((first + at, text))
                if "return" in text and ("return block" in text or "append" in text):
                    break
                assert text.strip() == "" or len(text) - len(text.lstrip()) >= depth
            found.append(section)
        at += 1
    return found


def opens(function: Any, lines: set[int]) -> list[str]:
    """Instructions in these lines that let others in."""
    number, found = 0, []
    for step in dis.get_instructions(function):
        if sys.version_info >= (3, 13):
            number = step.line_number or number
        elif step.starts_line is not None:
            number = step.starts_line
        if number in lines and step.opname.startswith(OPENS) and step.opname != "RESUME_CHECK":
            found.append(f"{number}: {step.opname} {step.argrepr}")
    return found


def test_from_the_look_at_busy_to_the_last_change_nothing_lets_others_in() -> None:
    taking = sections(Front.acquire)
    assert len(taking) == 2, "what was freed last, and what lies in the bin"
    for section in taking:
        left = [text for _, text in section if "_locked" in text]  # nothing was taken
        assert len(left) <= 1
        lines = {number for number, text in section if "_locked" not in text}
        assert opens(Front.acquire, lines) == []
    (section,) = sections(Frees.put_down_last)
    lines = {number for number, _ in section[:-1]}
    assert opens(Frees.put_down_last, lines) == []
    last = opens(Frees.put_down_last, {section[-1][0]})
    assert len([step for step in last if ": CALL" in step]) == 1, "the last change is a call: others come in after it"


@pytest.mark.parametrize(
    "function", [Lane.put, Lane._line_up, Allocation.__del__, CachingAllocator.free], ids=lambda f: f.__qualname__
)
def test_the_place_is_looked_at_and_changed_in_one_line(function: Any) -> None:
    lines, first = inspect.getsourcelines(function)
    (at,) = [n for n, text in enumerate(lines) if ".block" in text and ("rest" in text or ".block = None" in text)]
    steps = opens(function, {first + at})
    if function is Lane._line_up:
        assert len([step for step in steps if ": CALL" in step]) == 1 and ".appendleft(entry)" in lines[at]
    else:
        assert steps == []


def test_cupys_lease_does_so_as_well() -> None:
    pytest.importorskip("cupy", reason="CuPy's lease needs CuPy")
    from allocator.integrations.cupy.lease import Lease

    test_the_place_is_looked_at_and_changed_in_one_line(Lease.__del__)


def test_what_is_read_and_written_there_is_no_property() -> None:
    names = set()
    for function in (Front.acquire, Frees.put_down_last, Lane.put, Lane._line_up):
        names |= {s.argval for s in dis.get_instructions(function) if "ATTR" in s.opname or "METHOD" in s.opname}
    assert {"block", "generation", "busy", "allocated"} <= names
    for kind in (Lane, Block, Bin, Accounts, Inside, Timeline, VectorClock, Frees):
        for name in names - ({"requested"} if kind is Accounts else set()):  # a block's is read there
            assert not isinstance(getattr(kind, name, None), property), (kind, name)


def test_the_test_sees_what_lets_others_in() -> None:
    def calls(told: Inside, blocks: list[int]) -> int | None:
        block = None
        if not told.busy and blocks: block = blocks.pop()  # noqa: E701  # fmt: skip
        return block

    ((first, *_),) = sections(calls)
    assert opens(calls, {first[0]}) != []


# -- tried: another thread comes in at each line -----------------------------------------------------------------------


SIZE = 4096
INTRUSIONS = ("take", "take other", "free", "end", "free and take", "drain", "flush", "trim", "stats", "seal")


@pytest.fixture(autouse=True)
def _untraced() -> Iterator[None]:
    before = sys.gettrace()
    yield
    sys.settrace(before)


@pytest.mark.parametrize("uses", ["declared", "assumed"])
@pytest.mark.parametrize("kind", INTRUSIONS)
@pytest.mark.parametrize("freed", ["last", "other", "bin"])
def test_another_thread_comes_in_at_any_line(uses: str, kind: str, freed: str) -> None:
    """A block is freed and one asked for; at one line after the other, another thread does something as well."""
    for nth in range(1, 200):
        gpu = SimDevice(memory=1 << 28)
        pool = CachingAllocator(gpu, config=Config(uses=uses, seal_frees=1000))
        own, second = Stream(gpu), Stream(gpu)
        kept = [pool.allocate(SIZE, stream=stream) for stream in (own, own, second, second, own, second)]
        for one in kept[:4]:
            one.close()
        pool.drain_frees()  # two in each bin, and the bins are noted
        last = {"last": kept[4], "other": kept[5], "bin": None}[freed]
        spare = kept[5] if last is kept[4] else kept[4]
        taken: list[Allocation] = []

        def intrude(
            pool: CachingAllocator = pool, own: Stream = own, second: Stream = second,
            spare: Allocation = spare, taken: list[Allocation] = taken,
        ) -> None:  # fmt: skip
            match kind:
                case "take":
                    taken.extend(pool.allocate(SIZE, stream=own) for _ in range(3))
                case "take other":
                    taken.extend(pool.allocate(SIZE, stream=second) for _ in range(3))
                case "free":
                    spare.close()
                case "end":
                    spare.__del__()
                    spare._generation = -1
                case "free and take":
                    spare.close()
                    taken.append(pool.allocate(SIZE, stream=own))
                case "drain":
                    pool.drain_frees()
                case "flush":
                    with pool._lock:
                        pool._shelves.flush()
                case "trim":
                    pool.trim()
                case "stats":
                    pool.stats()
                case "seal":
                    own.timeline.close()  # type: ignore[union-attr]

        pool._frees.inside.busy = 0  # nobody is
        anywhere = kind in ("free", "end")
        with AtLine(pool, nth, intrude, lambda file, inside, anywhere=anywhere: anywhere or not inside) as at:  # type: ignore[misc]
            if last is not None:
                last.close()
            taken.append(pool.allocate(SIZE, stream=own))
        assert at.failed == []
        held = [one for one in (*taken, *kept[4:]) if not one.closed]
        assert len({one.ptr for one in held}) == len(held), f"held twice; line {nth}"
        pool.drain_frees()
        pool.check()
        assert pool.stats().allocated_bytes == SIZE * len(held)
        everything = held + [pool.allocate(SIZE, stream=own) for _ in range(4)]
        assert len({one.ptr for one in everything}) == len(everything)
        for one in everything:
            one.close()
        gpu.run_until_idle()
        pool.check()
        pool.trim()
        assert pool.stats().allocated_bytes == 0
        assert pool.stats().reserved_bytes == 0, f"lost; line {nth}"
        if at.passed < nth:
            assert nth > 10
            return
    pytest.fail("more lines than were tried")


@pytest.mark.parametrize("uses", ["declared", "assumed"])
def test_nothing_is_taken_while_another_thread_is_inside(uses: str) -> None:
    assert nobody_takes_anything_inside(uses) is None

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
from tests.schedules.tracing import AtLine, nobody_takes_anything_inside, take_turns

pytestmark = [
    pytest.mark.skipif(COMPILED, reason="compiled code has no such steps"),
    pytest.mark.skipif(not STEPS_HOLD, reason="this interpreter takes the lock"),
]

OPENS = ("CALL", "PRECALL", "RESUME", "JUMP_BACKWARD", "SEND", "YIELD", "IMPORT", "BUILD", "MAKE", "FORMAT", "RAISE")
"""Instructions after which, or in which, others may come in, by how their names begin."""


def lines_from(function: Any, first: str, last: str) -> dict[int, str]:
    """The lines of its source by number, from the one with `first` to the next one with `last`."""
    lines, at = inspect.getsourcelines(function)
    begin = next(n for n, text in enumerate(lines) if first in text)
    end = next(n for n, text in enumerate(lines) if n >= begin and last in text)
    return {at + n: lines[n] for n in range(begin, end + 1)}


def without(lines: dict[int, str], first: str, last: str) -> dict[int, str]:
    """The same without the part from `first` to `last`, where nothing has been taken."""
    begin = next(n for n, text in lines.items() if first in text)
    end = next(n for n, text in lines.items() if n >= begin and last in text)
    return {n: text for n, text in lines.items() if not begin < n <= end}


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


def branches(function: Any, lines: set[int]) -> list[str]:
    """Instructions in these lines at which a monitor of branches is called, from Python 3.12 on."""
    found, number = [], 0
    for step in dis.get_instructions(function):
        if sys.version_info >= (3, 13):
            number = step.line_number or number
        elif step.starts_line is not None:
            number = step.starts_line
        if number in lines and ("_IF_" in step.opname or step.opname.startswith("FOR_ITER")):
            found.append(f"{number}: {step.opname}")
    return found


def test_from_the_look_at_busy_to_the_last_change_nothing_lets_others_in() -> None:
    turn = lines_from(Front.acquire, "busy = self.inside.busy", "return last")
    assert opens(Front.acquire, set(without(turn, "if block is not last", "return self._locked"))) == []
    hit = lines_from(Front.acquire, "block = blocks[LAST[self.inside.busy]]; del", "return block")
    assert opens(Front.acquire, set(without(hit, "del blocks[-1]", "return None  # nothing there"))) == []
    both = without(
        lines_from(Front.acquire, "block = blocks[LAST[self.inside.busy]]; back", "bin_.blocks.append(last)"),
        "del blocks[-1]", "return self._locked",
    )  # fmt: skip
    assert opens(Front.acquire, set(both) - {max(both)}) == []
    calls = [step for step in opens(Front.acquire, {max(both)}) if ": CALL" in step]
    assert len(calls) == 1, "the last change is a call: others come in after it"
    down = without(
        lines_from(Frees.put_down_last, "busy = self.inside.busy", "bin_.blocks.append(last)"),
        "if block is not last", "return False",
    )  # fmt: skip
    last = max(down)
    assert opens(Frees.put_down_last, set(down) - {last}) == []
    calls = [step for step in opens(Frees.put_down_last, {last}) if ": CALL" in step]
    assert len(calls) == 1, "the last change is a call: others come in after it"


EXCHANGED = "block = lane.block; then = lane.generation; lane.block = None"
PUT = "before = lane.block; then = lane.generation; lane.block = block; lane.generation = generation"
PLACES = {
    Lane.put: PUT.replace("lane.", "self."), Lane._line_up: EXCHANGED.replace("lane.", "self."),
    Allocation.__del__: PUT, CachingAllocator.free: PUT, Front.acquire: EXCHANGED, Frees.put_down_last: EXCHANGED,
}  # fmt: skip


@pytest.mark.parametrize("function", PLACES, ids=lambda f: f.__qualname__)
def test_what_is_in_the_place_is_read_and_changed_in_one_line_without_a_branch(function: Any) -> None:
    lines, first = inspect.getsourcelines(function)
    at = [n for n, text in enumerate(lines) if PLACES[function].replace("block = lane", "= lane") in text]
    assert len(at) == (2 if function is Front.acquire else 1)
    for n in at:
        assert opens(function, {first + n}) == [] and branches(function, {first + n}) == []


def test_what_is_taken_out_of_a_bin_is_so_too() -> None:
    lines, first = inspect.getsourcelines(Front.acquire)
    at = {first + n for n, text in enumerate(lines) if "block = blocks[LAST[self.inside.busy]]" in text}
    assert len(at) == 2 and branches(Front.acquire, at) == []


def test_cupys_lease_does_so_as_well() -> None:
    pytest.importorskip("cupy", reason="CuPy's lease needs CuPy")
    from allocator.integrations.cupy.lease import Lease

    PLACES[Lease.__del__] = PUT
    test_what_is_in_the_place_is_read_and_changed_in_one_line_without_a_branch(Lease.__del__)


def test_care_and_the_place_where_frees_lie_change_in_one_step() -> None:
    setter = Front.careful.fset  # type: ignore[attr-defined]  # a property
    lines, first = inspect.getsourcelines(setter)
    (at,) = [first + n for n, text in enumerate(lines) if "self._careful = careful; self.lane = lane" in text]
    assert opens(setter, {at}) == [] and branches(setter, {at}) == []


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

    lines = set(lines_from(calls, "told.busy", "pop"))
    assert opens(calls, lines) != [] and branches(calls, lines) != []


# -- tried: another thread comes in at each line -----------------------------------------------------------------------


SIZE = 4096
INTRUSIONS = (
    "take",
    "take other",
    "passed on",
    "free",
    "end",
    "free and take",
    "drain",
    "flush",
    "trim",
    "stats",
    "seal",
)


@pytest.fixture(autouse=True)
def _untraced() -> Iterator[None]:
    before = sys.gettrace()
    yield
    sys.settrace(before)


@pytest.mark.parametrize("uses", ["declared", "assumed"])
@pytest.mark.parametrize("kind", INTRUSIONS)
@pytest.mark.parametrize("freed", ["last", "other", "turns", "bin"])
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
        if freed == "turns":
            take_turns(pool, own, second)
        last = {"last": kept[4], "other": kept[5], "turns": kept[5], "bin": None}[freed]
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
        gpu.launch(own, 1000, writes=[taken[-1]])
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
        assert gpu.races == [], f"line {nth}"
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


def hot(file: str, inside: bool) -> bool:
    """The lines of a hit, outside the pool's lock."""
    return not inside and file.endswith(("front.py", "frees.py", "lane.py"))


def a_hit(pool: CachingAllocator, stream: Stream) -> Allocation:
    """Of another size than all others here; afterwards nobody is inside, and says so."""
    pool.allocate(8 * SIZE, stream=stream).close()
    held = pool.allocate(8 * SIZE, stream=stream)
    assert not pool._frees.inside.busy
    return held


@pytest.mark.parametrize("size", [512, SIZE])
@pytest.mark.parametrize("uses", ["declared", "assumed"])
def test_a_block_that_has_been_somebody_elses_meanwhile_is_not_taken_back(uses: str, size: int) -> None:
    """Freed, looked at, passed on to another stream, used there, and freed by that one before it is taken."""
    for nth in range(1, 200):
        gpu = SimDevice(memory=1 << 28)
        pool = CachingAllocator(gpu, config=Config(uses=uses))
        own, second = Stream(gpu), Stream(gpu)
        first = pool.allocate(SIZE, stream=own)
        held: list[Any] = []

        def intrude(
            pool: CachingAllocator = pool, gpu: SimDevice = gpu, second: Stream = second, held: list[Any] = held
        ) -> None:
            pool.settle()
            other = pool.allocate(size, stream=second)
            gpu.launch(second, 10**9, writes=[other])
            held.append(a_hit(pool, second))
            other.close()

        pool._frees.inside.busy = 0
        with AtLine(pool, nth, intrude, hot) as at:
            first.close()
            taken = pool.allocate(SIZE, stream=own)
        assert at.failed == []
        gpu.launch(own, 10, writes=[taken])
        others = [pool.allocate(SIZE, stream=own) for _ in range(3)]
        assert len({one.ptr for one in (taken, *others, *held)}) == 4 + len(held), f"line {nth}"
        assert taken._block.size == SIZE, f"line {nth}"
        gpu.run_until_idle()
        assert gpu.races == [], f"line {nth}"
        pool.drain_frees()
        pool.check()
        if at.passed < nth:
            return
    pytest.fail("more lines than were tried")


@pytest.mark.parametrize("turns", [False, True], ids=["one stream", "turns"])
@pytest.mark.parametrize("uses", ["declared", "assumed"])
def test_a_stamp_is_no_older_than_its_free(uses: str, turns: bool) -> None:
    """Freed, its stream looked at, taken and used again by that stream behind a seqno that is over, and freed again."""
    for nth in range(1, 200):
        gpu = SimDevice(memory=1 << 28)
        pool = CachingAllocator(gpu, config=Config(uses=uses, seal_frees=10**6))
        own, second = Stream(gpu), Stream(gpu)
        kept = [pool.allocate(n * SIZE, stream=own) for n in (1, 1, 2)]
        kept[0].close()
        kept[2].close()
        if turns:
            pool.allocate(SIZE, stream=second)
        pool.drain_frees()  # the bins are noted
        if turns:
            take_turns(pool, own, second)
        held: list[Any] = []
        used: list[Block] = []

        def intrude(
            pool: CachingAllocator = pool, gpu: SimDevice = gpu, own: Stream = own, held: list[Any] = held,
            used: list[Block] = used,
        ) -> None:  # fmt: skip
            pool.drain_frees()
            mine = pool.allocate(SIZE, stream=own)
            own.timeline.close()  # type: ignore[union-attr]  # as a question does
            pool.stats()  # and it is over
            gpu.launch(own, 10**9, writes=[mine])
            held.append(a_hit(pool, own))
            mine.close()
            used.append(mine._block)

        pool._frees.inside.busy = 0
        with AtLine(pool, nth, intrude, hot) as at:
            kept[1].close()
            held.append(pool.allocate(SIZE, stream=second) if turns else pool.allocate(2 * SIZE, stream=own))
        assert at.failed == [] and len(used) <= 1
        pool.drain_frees()
        for block in used:  # the stream is busy with it
            assert not pool._registry.order.done(block.stamp), f"line {nth}"
        assert gpu.races == [], f"line {nth}"
        if at.passed < nth:
            return
    pytest.fail("more lines than were tried")


@pytest.mark.parametrize("turns", [False, True], ids=["one stream", "turns"])
@pytest.mark.parametrize("first", range(26))
def test_a_stamp_is_no_older_than_its_free_whoever_comes_twice(turns: bool, first: int) -> None:
    """As above, but the block is passed on at one line, and used and freed again at a later one."""
    for second_at in range(first + 2, first + 60):
        gpu = SimDevice(memory=1 << 28)
        pool = CachingAllocator(gpu, config=Config(uses="declared", seal_frees=10**6))
        own, other = Stream(gpu), Stream(gpu)
        kept = [pool.allocate(n * SIZE, stream=own) for n in (1, 1, 2)]
        kept[0].close()
        kept[2].close()
        pool.allocate(SIZE, stream=other)
        pool.drain_frees()
        if turns:
            take_turns(pool, own, other)
        block = kept[1]._block
        held: list[Any] = []
        mine: list[Allocation] = []
        passed = [0]

        def intrude(
            pool: CachingAllocator = pool, gpu: SimDevice = gpu, own: Stream = own, held: list[Any] = held,
            mine: list[Allocation] = mine, block: Block = block, passed: list[int] = passed, until: int = second_at,
        ) -> None:  # fmt: skip
            passed[0] += 1
            if passed[0] == first + 1:
                pool.drain_frees()
                mine.extend(pool.allocate(SIZE, stream=own) for _ in range(2))
                held.append(a_hit(pool, own))
            elif passed[0] == until + 1 and any(one._block is block for one in mine):
                own.query()
                gpu.launch(own, 10**9, writes=mine)
                mine.clear()

        pool._frees.inside.busy = 0
        with AtLine(pool, 0, intrude, hot) as at:
            kept[1].close()
            held.append(pool.allocate(SIZE, stream=other) if turns else pool.allocate(2 * SIZE, stream=own))
        assert at.failed == []
        held += mine
        pool.drain_frees()
        if not any(one._block is block for one in held):  # the stream is busy with it, if it was used
            busy = own.timeline is not None and not own.query()
            assert not (busy and pool._registry.order.done(block.stamp)), f"lines {first}, {second_at}"
        gpu.run_until_idle()
        assert gpu.races == []
        if at.passed < second_at:
            return
    pytest.fail("more lines than were tried")

"""The race oracle: what is a race, what is not, and agreement with a naive one on random programs."""

from __future__ import annotations

import ast
import gc
import random
import sys
import weakref
from pathlib import Path

import pytest

from allocator.devices import LEGACY, PER_THREAD, SimDevice
from allocator.devices.sim import oracle as oracle_module
from tests.unit.devices.sim.naive import Naive, Stream
from tests.unit.devices.sim.words import Elsewhere, Words

UNIT = 512


class Owner:
    """An allocation, as far as the device looks at it."""

    closed = False

    def __init__(self, ptr: int, size: int) -> None:
        self.ptr = ptr
        self.size = size


def test_the_oracle_imports_nothing_of_the_allocator() -> None:
    tree = ast.parse(Path(oracle_module.__file__).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "allocator"] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names | {"sortedcontainers"}


# -- one by one -------------------------------------------------------------------------------


def test_reuse_on_another_stream_without_order_is_a_race(gpu: SimDevice, words: Words) -> None:
    s, t, ptr = words.stream(), words.stream(), words.memory()
    gpu.launch(s, 1000, writes=[(ptr, 1024)])
    gpu.hand_out(ptr + 512, 1024, "second")
    gpu.launch(t, writes=[(ptr + 512, 1024)])
    (race,) = gpu.races
    assert (race.ptr, race.nbytes) == (ptr + 512, 512)
    assert (race.first.stream, race.first.seqno, race.first.write) == (s, 1, True)
    assert (race.second.stream, race.second.seqno, race.second.write) == (t, 1, True)
    assert race.first.allocation == f"first owner of {ptr:#x}" and race.second.allocation == "second"
    assert "race on 512 bytes" in str(race)


def test_virtual_time_proves_nothing(gpu: SimDevice, words: Words) -> None:
    s, t, ptr = words.stream(), words.stream(), words.memory()
    gpu.launch(s, 1000, writes=[(ptr, 512)])
    gpu.run_until_idle()
    gpu.hand_out(ptr, 512, "second")
    gpu.launch(t, writes=[(ptr, 512)])
    assert len(gpu.races) == 1


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_a_race_needs_a_write(gpu: SimDevice, words: Words, first: bool, second: bool) -> None:
    s, t, ptr = words.stream(), words.stream(), words.memory()
    item = [(ptr, 512)]
    gpu.launch(s, writes=item if first else [], reads=[] if first else item)
    gpu.hand_out(ptr, 512, "second")
    gpu.launch(t, writes=item if second else [], reads=[] if second else item)
    assert bool(gpu.races) is (first or second)


def test_one_hand_out_may_do_what_it_likes_with_its_own_bytes(gpu: SimDevice, words: Words) -> None:
    s, t, ptr = words.stream(), words.stream(), words.memory()
    gpu.launch(s, writes=[(ptr, 512)])
    gpu.launch(t, writes=[(ptr, 512)])
    assert not gpu.races


@pytest.mark.parametrize(
    "order",
    [
        "same stream",
        "event wait",
        "two waits",
        "stream sync",
        "stream query",
        "event sync",
        "event query",
        "wait_any",
        "context sync",
        "context event",
        "plain free",
    ],
)
def test_reuse_with_an_order_is_no_race(gpu: SimDevice, words: Words, order: str) -> None:
    s, t, ptr = words.stream(), words.stream(), words.memory()
    gpu.launch(s, 1000, writes=[(ptr, 512)])
    gpu.hand_out(ptr, 512, "second")
    match order:
        case "same stream":
            t = s
        case "event wait":
            gpu.stream_wait_event(t, words.recorded(s))
        case "two waits":
            between = words.stream()
            gpu.stream_wait_event(between, words.recorded(s))
            gpu.stream_wait_event(t, words.recorded(between))
        case "stream sync":
            gpu.stream_synchronize(s)
        case "stream query":
            gpu.run_until_idle()
            assert gpu.stream_query(s)
        case "event sync":
            gpu.event_synchronize(words.recorded(s))
        case "event query":
            event = words.recorded(s)
            gpu.run_until_idle()
            assert gpu.event_query(event)
        case "wait_any":
            assert gpu.wait_any([words.recorded(s)], 1.0)
        case "context sync":
            gpu.ctx_synchronize()
        case "context event":
            event = gpu.event_create()
            gpu.ctx_record_event(event)
            gpu.stream_wait_event(t, event)
        case "plain free":
            gpu.mem_free(gpu.mem_alloc(512))
    gpu.launch(t, writes=[(ptr, 512)])
    assert not gpu.races


@pytest.mark.parametrize(
    "order",
    ["query said no", "event before the work", "wait before the record", "recorded again", "wait the wrong way", "any"],
)
def test_what_only_looks_like_an_order_is_a_race(gpu: SimDevice, words: Words, order: str) -> None:
    s, t, ptr = words.stream(), words.stream(), words.memory()
    event = words.recorded(s)
    if order == "wait before the record":
        gpu.stream_wait_event(t, event)
    gpu.launch(s, 1000, writes=[(ptr, 512)])
    match order:
        case "query said no":
            assert not gpu.stream_query(s) and not gpu.event_query(words.recorded(s))
        case "event before the work":
            gpu.stream_wait_event(t, event)
            gpu.event_synchronize(event)
        case "wait before the record":
            gpu.event_record(event, s)
        case "recorded again":
            gpu.event_record(event, s)
            gpu.event_record(event, words.stream())  # behind the allocator's back (S35)
            gpu.stream_wait_event(t, event)
        case "wait the wrong way":
            gpu.stream_wait_event(s, words.recorded(t))
        case "any":
            assert gpu.wait_any([words.recorded(s), words.recorded(words.stream())], 1.0)
    gpu.hand_out(ptr, 512, "second")
    gpu.launch(t, writes=[(ptr, 512)])
    assert len(gpu.races) == 1


def test_r6_legacy_orders_blocking_streams_and_no_others(gpu: SimDevice, words: Words) -> None:
    for other, ordered in ((words.blocking(), True), (PER_THREAD, True), (words.stream(), False)):
        ptr = words.memory()
        gpu.launch(LEGACY, 1000, writes=[(ptr, 512)])
        gpu.hand_out(ptr, 512, "second")
        gpu.launch(other, writes=[(ptr, 512)])
        gpu.hand_out(ptr, 512, "third")
        gpu.launch(LEGACY, writes=[(ptr, 512)])
        assert len(gpu.races) == (0 if ordered else 2)


def test_r6_a_record_on_legacy_is_a_barrier_between_two_blocking_streams(gpu: SimDevice, words: Words) -> None:
    a, b, ptr = words.blocking(), words.blocking(), words.memory()
    gpu.launch(a, 1000, writes=[(ptr, 512)])
    words.recorded(LEGACY)
    gpu.hand_out(ptr, 512, "second")
    gpu.launch(b, writes=[(ptr, 512)])
    assert not gpu.races


@pytest.mark.parametrize("how", ["query", "sync", "query after a record"])
def test_r6_an_idle_blocking_stream_proves_nothing_about_legacy(gpu: SimDevice, words: Words, how: str) -> None:
    a, t, ptr = words.blocking(), words.stream(), words.memory()
    gpu.launch(LEGACY, 1000, writes=[(ptr, 512)])
    if how == "query after a record":
        words.recorded(a)
    if how == "sync":
        gpu.stream_synchronize(a)
    assert gpu.stream_query(a)
    gpu.hand_out(ptr, 512, "second")
    gpu.launch(t, writes=[(ptr, 512)])
    assert len(gpu.races) == 1


def test_r6_an_event_on_an_idle_blocking_stream_is_behind_legacy(gpu: SimDevice, words: Words) -> None:
    a, t, ptr = words.blocking(), words.stream(), words.memory()
    gpu.launch(LEGACY, 1000, writes=[(ptr, 512)])
    gpu.stream_wait_event(t, words.recorded(a))
    gpu.hand_out(ptr, 512, "second")
    gpu.launch(t, writes=[(ptr, 512)])
    assert not gpu.races


def test_r6_a_query_of_legacy_proves_all_blocking_streams_idle(
    gpu: SimDevice, words: Words, elsewhere: Elsewhere
) -> None:
    a, t = words.blocking(), words.stream()
    one, two, three = words.memory(), words.memory(), words.memory()
    gpu.launch(a, 1000, writes=[(one, 512)])
    elsewhere(lambda: gpu.launch(PER_THREAD, 1000, writes=[(two, 512)]))
    gpu.launch(t, 10, writes=[(three, 512)])
    gpu.run_until_idle()
    assert gpu.stream_query(LEGACY)
    for ptr in (one, two, three):
        gpu.hand_out(ptr, 512, "second")
        gpu.launch(words.stream(), writes=[(ptr, 512)])
    assert [race.ptr for race in gpu.races] == [three]


def test_s03_a_recycled_handle_is_another_stream(gpu: SimDevice, words: Words) -> None:
    s, ptr = words.stream(), words.memory()
    gpu.launch(s, 1000, writes=[(ptr, 512)])
    gpu.stream_destroy(s)
    again = words.stream()
    assert again == s
    gpu.hand_out(ptr, 512, "second")
    gpu.launch(again, writes=[(ptr, 512)])
    (race,) = gpu.races
    assert race.first.stream == race.second.stream and race.first.stream_id != race.second.stream_id


def test_an_event_of_one_device_orders_the_streams_of_another(gpu: SimDevice, words: Words) -> None:
    other = SimDevice(ordinal=1)
    s, ptr = words.stream(), words.memory()
    gpu.launch(s, 1000, writes=[(ptr, 512)])
    event = words.recorded(s)
    gpu.hand_out(ptr, 512, "second")
    with other.scope():
        a, b = (other.stream_create(non_blocking=True, priority=0) for _ in range(2))
        other.stream_wait_event(a, event)
    other.launch(a, writes=[(ptr, 512)])
    assert not gpu.races
    gpu.hand_out(ptr, 512, "third")
    other.launch(b, writes=[(ptr, 512)])
    assert [race.first.stream for race in gpu.races] == [a] and not other.races


def test_bytes_handed_out_twice_are_told_apart_by_their_owners(gpu: SimDevice, words: Words) -> None:
    s, t, ptr = words.stream(), words.stream(), words.memory()
    one, two = Owner(ptr, 512), Owner(ptr, 512)
    gpu.hand_out(ptr, 512, one)
    gpu.hand_out(ptr, 512, two)
    gpu.launch(s, writes=[one])
    gpu.launch(t, writes=[two])
    (race,) = gpu.races
    assert race.first.allocation is one and race.second.allocation is two


def test_the_oracle_keeps_no_owner_alive(gpu: SimDevice, words: Words) -> None:
    s, t, ptr = words.stream(), words.stream(), words.memory()
    owner = Owner(ptr, 512)
    gone = weakref.ref(owner)
    gpu.hand_out(ptr, 512, owner)
    gpu.launch(s, writes=[owner])
    gpu.launch(s, writes=[(ptr, 512)])
    gpu.hand_out(ptr, 512, "second")
    gpu.launch(t, writes=[(ptr, 512)])
    del owner
    gc.collect()
    assert gone() is None and gpu.races[0].first.allocation is None


def test_attached_bytes_are_written_by_every_launch_in_between(gpu: SimDevice, words: Words) -> None:
    s, t, ptr = words.stream(), words.stream(), words.memory()
    item = (ptr, 512)
    gpu.launch(s)
    gpu.attach(s, item)
    gpu.launch(s)
    early = words.recorded(s)
    gpu.launch(s)
    gpu.detach(item)
    late = words.recorded(s)
    gpu.launch(s)
    gpu.hand_out(ptr, 512, "second")
    gpu.stream_wait_event(t, late)
    gpu.launch(t, writes=[item])
    assert not gpu.races
    gpu.hand_out(ptr, 512, "third")
    u = words.stream()
    gpu.stream_wait_event(u, early)
    gpu.launch(u, reads=[item])
    assert {(r.first.stream, r.first.seqno) for r in gpu.races} >= {(t, 1)}


def test_attached_but_never_launched_is_never_used(gpu: SimDevice, words: Words) -> None:
    s, t, ptr = words.stream(), words.stream(), words.memory()
    gpu.attach(s, (ptr, 512))
    gpu.detach((ptr, 512))
    gpu.launch(s)
    gpu.hand_out(ptr, 512, "second")
    gpu.launch(t, writes=[(ptr, 512)])
    assert not gpu.races


def test_the_byte_map_stays_small_in_a_long_run(gpu: SimDevice, words: Words) -> None:
    rng = random.Random(5)
    base = gpu.mem_alloc(256 * UNIT)
    a, b = words.stream(), words.stream()
    event = gpu.event_create()
    for i in range(4000):
        start = rng.randrange(250)
        item = (base + start * UNIT, UNIT * rng.randrange(1, 6))
        one, two = (a, b) if i % 2 else (b, a)
        gpu.event_record(event, one)
        gpu.stream_wait_event(two, event)
        gpu.hand_out(*item, i)
        gpu.launch(two, writes=[item])
    assert not gpu.races
    assert gpu.oracle.cells <= 256
    assert max(len(c.uses) + len(c.shadowed) for c in gpu.oracle._cells.values()) <= 4


# -- random programs --------------------------------------------------------------------------


class Twin:
    """Runs one random program on a simulated device and on the naive oracle."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.gpu = SimDevice()
        self.naive = Naive()
        self.units = self.rng.choice([2, 4, 8])
        with self.gpu.scope():
            self.base = self.gpu.mem_alloc(self.units * UNIT)
            self.keys: dict[object, int] = {"legacy": LEGACY}
            for i in range(self.rng.choice([2, 3, 5])):
                self.add_stream(i)
            self.events = {self.gpu.event_create(): 0 for _ in range(3)}
        self.owners: list[object] = [None]
        self.attached: dict[tuple[int, int], tuple[object, range, object]] = {}
        self.launch_of: dict[tuple[int, int], int] = {}

    def add_stream(self, key: object) -> None:
        blocking = self.rng.random() < 0.4
        self.keys[key] = self.gpu.stream_create(non_blocking=not blocking, priority=0)
        self.naive.streams[key] = Stream(blocking)

    def span(self) -> tuple[range, tuple[int, int]]:
        start = self.rng.randrange(self.units)
        stop = self.rng.randrange(start, self.units) + 1
        return range(start, stop), (self.base + start * UNIT, (stop - start) * UNIT)

    def step(self, attach: str = "") -> None:
        """One random step; attach: "" never, "tidy" ends before the bytes change hands, "untidy" may not."""
        rng, gpu, naive = self.rng, self.gpu, self.naive
        key = rng.choice([*self.keys, *(k for k in self.keys if k != "legacy")])
        stream, event = self.keys[key], rng.choice(list(self.events))
        match rng.choice("lllllhhhhrrwwwsqqecCtx" + ("aaadd" if attach else "")):
            case "l":
                self.launch(key, stream)
            case "h":
                units, item = self.span()
                owner = Owner(*item)
                self.owners.append(owner)
                for theirs in [i for i, a in self.attached.items() if set(a[1]) & set(units)]:
                    if attach == "tidy":
                        gpu.detach(theirs)
                        del self.attached[theirs]
                gpu.hand_out(*item, owner)
                naive.hand_out(units, owner)
            case "r":
                gpu.event_record(event, stream)
                self.events[event] = naive.record(key)
            case "w":
                mask = self.events[event]
                gpu.stream_wait_event(stream, event)
                if mask or event in self.recorded():
                    naive.wait(key, mask)
            case "s":
                gpu.stream_synchronize(stream)
                naive.host_saw(key)
            case "q":
                if gpu.stream_query(stream):
                    naive.host_saw(key)
            case "e":
                if gpu.event_query(event):
                    naive.host |= self.events[event]
            case "c":
                gpu.ctx_record_event(event)
                self.events[event] = naive.record_context()
            case "C":
                if rng.random() < 0.2:
                    gpu.ctx_synchronize()
                    naive.host |= naive.record_context()
            case "t":
                gpu.advance(rng.randrange(3000))
            case "x":
                if key != "legacy" and rng.random() < 0.5:  # the old stream stays known to the naive one
                    gpu.stream_destroy(stream)
                    naive.streams[object()] = naive.streams.pop(key)
                    for item in [i for i, a in self.attached.items() if a[0] == key]:
                        gpu.detach(item)
                        del self.attached[item]
                    self.add_stream(key)
            case "a":
                units, item = self.span()
                owners = {id(naive.owner.get(u)) for u in units}
                if item not in self.attached and len(owners) == 1:
                    gpu.attach(stream, item)
                    self.attached[item] = (key, units, naive.owner.get(units[0]))
            case "d":
                if self.attached:
                    item = rng.choice(list(self.attached))
                    gpu.detach(item)
                    del self.attached[item]

    def recorded(self) -> set[int]:
        return {e for e in self.events if self.gpu._events[e].node is not None}

    def launch(self, key: object, stream: int) -> None:
        rng, naive = self.rng, self.naive
        accesses: list[tuple[int, bool, object]] = []
        reads: list[tuple[int, int]] = []
        writes: list[tuple[int, int]] = []
        for _ in range(rng.randrange(3)):
            units, item = self.span()
            owner = naive.owner.get(units[0])
            if any(naive.owner.get(u) is not owner for u in units):
                continue
            write = rng.random() < 0.6
            (writes if write else reads).append(item)
            accesses += [(unit, write, owner) for unit in units]
        for theirs, units, owner in self.attached.values():
            if theirs == key:
                accesses += [(unit, True, owner) for unit in units]
        naive.launch(key, accesses)
        self.gpu.launch(stream, rng.randrange(1000), reads=reads, writes=writes)
        line = self.gpu.stream_of("test", stream).line
        self.launch_of[line.ident, line.seqno] = naive.launches - 1

    def racy(self) -> set[tuple[int, int]]:
        found = set()
        for race in self.gpu.races:
            launch = self.launch_of[race.second.stream_id, race.second.seqno]
            first = (race.ptr - self.base) // UNIT
            found |= {(launch, first + i) for i in range(race.nbytes // UNIT)}
        return found

    def racy_owners(self) -> set[tuple[object, int]]:
        found = set()
        for race in self.gpu.races:
            first = (race.ptr - self.base) // UNIT
            found |= {(race.second.allocation, first + i) for i in range(race.nbytes // UNIT)}
        return found


def test_random_programs_race_exactly_where_the_naive_oracle_says() -> None:
    races = 0
    for seed in range(300):
        twin = Twin(seed)
        with twin.gpu.scope():
            for _ in range(60):
                twin.step()
        assert twin.racy() == twin.naive.racy, seed
        races += len(twin.naive.racy)
    assert races > 500


def test_attached_bytes_race_exactly_like_bytes_named_in_every_launch() -> None:
    races = 0
    for seed in range(300):
        twin = Twin(seed)
        with twin.gpu.scope():
            for _ in range(60):
                twin.step("tidy")
        assert twin.racy_owners() == twin.naive.racy_owners, seed
        races += len(twin.naive.racy_owners)
    assert races > 500


def test_owners_that_keep_bytes_after_they_changed_hands_are_caught_too() -> None:
    """Here a race may be reported against a newer access only, but never invented, nor all of them missed."""
    for seed in range(300):
        twin = Twin(seed)
        with twin.gpu.scope():
            for _ in range(60):
                twin.step("untidy")
        assert twin.racy_owners() <= twin.naive.racy_owners, seed
        assert bool(twin.gpu.races) == bool(twin.naive.racy), seed

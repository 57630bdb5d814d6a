"""While the GPU works: whether growing waits for it, and whether giving memory back does, or holds others up.

    growth  another stream runs for 2 s; 64 new pieces of 32 MiB are taken.  The longest of these calls, in ms
    trim    10 GiB in segments of 32 MiB are free; another stream runs 200 kernels of 10 ms; the memory is given back.
            How long that call takes, in ms, and how long the kernels take from the first to the last, against how long
            they take where nothing is given back

Time is the device's clock for the host: wall time on a GPU.  On the simulator only waiting takes time, so that 0 there
means that no driver call waited, and 2,000 that one waited for all of the work.
`driver` is the driver alone, with cuMemAlloc and cuMemFree, which is what a pool without virtual memory can do;
`driver-vmm` is the driver alone with virtual memory: the least that its calls take for as many segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from allocator import Config, Event, Stream
from allocator.devices import Device
from allocator.sizes import MIB, format_size
from allocator.stress.benchmarks.cases import Missing, Reading, Stage
from allocator.stress.benchmarks.core import open_pool, queue_work
from allocator.stress.benchmarks.hooks import import_cupy
from allocator.stress.benchmarks.runner import take_turns

SEGMENT: Final = 32 * MIB
KERNELS: Final = 200
KERNEL_NS: Final = 10_000_000
GROWTHS: Final = 64
SEGMENTS: Final = 320
MOST_REPEATS: Final = 5


class Work:
    """A stream with kernels on it, and an event in front of and behind them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.stream = Stream(device)
        self._first, self._last = Event(device, timing=True), Event(device, timing=True)

    def begin(self) -> None:
        """Queue all of it."""
        with self._device.scope():
            self._first.record(self.stream)
            for _ in range(KERNELS):
                queue_work(self._device, self.stream.handle, KERNEL_NS)
            self._last.record(self.stream)

    def going_on(self) -> bool:
        """Is it not over yet?"""
        return not self.stream.query()

    def end(self) -> float:
        """Wait for it; ms from the first kernel to the last."""
        self.stream.synchronize()
        return self._first.elapsed_time(self._last)


class Holder:
    """Memory that is taken in pieces, dropped, and given back to the driver."""

    def __init__(
        self, take: Callable[[], object], give_back: Callable[[], object], close: Callable[[], object]
    ) -> None:
        self._take = take
        self._give_back = give_back
        self.close = close
        self._held: list[object] = []

    def take(self) -> None:
        """One more piece, new from the driver."""
        self._held.append(self._take())

    def drop(self) -> None:
        """The pool gets all of them back."""
        self._held.clear()

    def give_back(self) -> None:
        """And the driver."""
        self._give_back()


def weir(device: Device, backing: str = "vmm") -> Holder:
    """A pool with segments of that size."""
    pool = open_pool(device, Config(large_page=SEGMENT, backing=backing))
    stream = Stream(device)

    def give_back() -> None:
        pool.trim()

    def close() -> None:
        pool.settle()
        pool.close()
        stream.close()

    return Holder(lambda: pool.allocate(SEGMENT, stream), give_back, close)


def driver(device: Device) -> Holder:
    """cuMemAlloc, and cuMemFree of each."""
    pointers: list[int] = []

    def take() -> None:
        with device.scope():
            pointers.append(device.mem_alloc(SEGMENT))

    def give_back() -> None:
        with device.scope():
            while pointers:
                device.mem_free(pointers.pop())

    return Holder(take, give_back, give_back)


def driver_vmm(device: Device) -> Holder:
    """The calls of a pool with virtual memory, and nothing else."""
    size = 2 * SEGMENTS * SEGMENT
    handles: list[int] = []
    with device.scope():
        base = device.mem_address_reserve(size)

    def take() -> None:
        with device.scope():
            handle = device.mem_create(SEGMENT)
            ptr = base + len(handles) * SEGMENT
            handles.append(handle)
            device.mem_map(ptr, SEGMENT, handle)
            device.mem_set_access(ptr, SEGMENT)

    def give_back() -> None:
        with device.scope():
            while handles:
                device.mem_unmap(base + (len(handles) - 1) * SEGMENT, SEGMENT)
                device.mem_release(handles.pop())

    def close() -> None:
        give_back()
        with device.scope():
            device.mem_address_free(base, size)

    return Holder(take, give_back, close)


def cupy_pool(device: Device) -> Holder:
    """CuPy's own pool.  GPU."""
    pool = import_cupy().cuda.MemoryPool()
    return Holder(lambda: pool.malloc(SEGMENT), pool.free_all_blocks, pool.free_all_blocks)


def cupy_async(device: Device) -> Holder:
    """CuPy's async pool.  GPU."""
    pool = import_cupy().cuda.MemoryAsyncPool()
    return Holder(lambda: pool.malloc(SEGMENT), pool.free_all_blocks, pool.free_all_blocks)


def holders(stage: Stage) -> dict[str, Callable[[], Holder]]:
    """Who can be asked here.  The first is the reference."""
    device, wants = stage.device, stage.settings.wants
    found: dict[str, Callable[[], Holder]] = {"driver": partial(driver, device)}
    if device.supports_virtual_memory:
        found["driver-vmm"] = partial(driver_vmm, device)
    if wants("weir"):
        found["weir"] = partial(weir, device)
        found["weir-malloc"] = partial(weir, device, "malloc")
    if not stage.simulated:
        for name, make in (("cupy", cupy_pool), ("cupy-async", cupy_async)):
            if wants(name) and name not in stage.left_out:
                try:
                    make(device).close()
                except Missing as error:
                    stage.left_out[name] = str(error)
                else:
                    found[name] = partial(make, device)
    return found


@contextmanager
def opened(make: Callable[[], Holder]) -> Iterator[Holder]:
    """Its memory goes, whatever happens."""
    with ExitStack() as open_:
        holder = make()
        open_.callback(holder.close)
        open_.callback(holder.drop)
        yield holder


def timed(device: Device, call: Callable[[], object]) -> float:
    """ms of the host's clock."""
    began = device.clock_ns()
    call()
    return (device.clock_ns() - began) / 1e6


# -- growth -----------------------------------------------------------------------------------------------------


def growth(stage: Stage) -> Iterator[Reading]:
    """New memory while another stream is busy."""
    device, count = stage.device, int(stage.choose((GROWTHS,), (4,))[0])
    work = Work(device)
    over: Counter[str] = Counter()

    def turn(name: str, make: Callable[[], Holder]) -> dict[str, float]:
        with opened(make) as holder:
            work.begin()
            longest = max(timed(device, holder.take) for _ in range(count))
            over[name] += not work.going_on()
            work.end()
        return {"longest": longest}

    found = take_turns({name: partial(turn, name, make) for name, make in holders(stage).items()}, _repeats(stage))
    yield Reading(
        f"longest of {count} growths",
        found["longest"],
        "driver",
        "ms",
        notes={name: {"work_was_over_in_turns": over[name]} for name in found["longest"]},
    )


# -- trim -------------------------------------------------------------------------------------------------------


def trim(stage: Stage) -> Iterator[Reading]:
    """Giving back while another stream is busy."""
    device, count = stage.device, int(stage.choose((SEGMENTS,), (4,))[0])
    free = device_memory(device)
    if free < (count + 8) * SEGMENT:
        count = max(1, free // SEGMENT - 8)
    work = Work(device)

    def alone() -> dict[str, float]:
        work.begin()
        return {"others": work.end()}

    def turn(make: Callable[[], Holder]) -> dict[str, float]:
        with opened(make) as holder:
            for _ in range(count):
                holder.take()
            holder.drop()
            work.begin()
            spent = timed(device, holder.give_back)
            return {"call": spent, "others": work.end()}

    contenders: dict[str, Callable[[], dict[str, float]]] = {"alone": alone}
    contenders |= {name: partial(turn, make) for name, make in holders(stage).items()}
    found = take_turns(contenders, _repeats(stage))
    calls = {name: values for name, values in found["call"].items() if values}
    size = format_size(count * SEGMENT)
    yield Reading(f"{size}: the call", calls, "driver", "ms")
    yield Reading(f"{size}: the other stream's work", found["others"], "alone", "ms")


def device_memory(device: Device) -> int:
    """Bytes that are free."""
    with device.scope():
        return device.mem_get_info()[0]


def _repeats(stage: Stage) -> int:
    return min(stage.settings.repeats, MOST_REPEATS)

"""What a benchmark is made of.

    Benchmark   a name, a sentence, what it needs, and `cases`, which yields Cases and Readings
    Case        contenders that take turns at the same work; the runner times them
    Reading     values that a benchmark had to take itself, because a turn is more than a loop: one a repeat
    Stage       where it all happens: the device, the doors to allocate through, the settings
    Door        one way to ask for memory, and the allocators that can be asked that way

Rule: a benchmark says what is to be done; who runs when, how often and what the numbers mean is the runner's.
Cases are yielded from inside the `with` that holds their pools, so that a case's memory goes before the next one's.

Next: runner.py.  Doors: core.py, hooks.py, guests.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from allocator.devices import Device
from allocator.errors import AllocatorError

GUESTS: Final = ("rmm", "rmm-async", "torch", "torch-raw", "cuda-core")
"""Peers whose library can capture graphs without telling Weir: its mere presence changes what Weir may do (R6).  So
they are loaded only after everything has been measured without them, and Weir then runs beside them once more."""

PEERS: Final = {
    "floor": "the least that can be done: ready blocks in a dict, and in the core one lock",
    "floor-unlocked": "the same, freeing without the lock",
    "empty-hook": "asks CuPy for its current stream, makes the two objects CuPy wants, and does nothing else",
    "weir": "this pool",
    "weir-assumed": "this pool with every stream as an assumed user (R3)",
    "per-stream": "peers' rules: a pool for each stream, and nothing crosses",
    "cupy": "CuPy's own pool",
    "cupy-async": "CuPy's MemoryAsyncPool (cudaMallocAsync)",
    "rmm": "RMM's pool through rmm_cupy_allocator",
    "rmm-async": "RMM's CudaAsyncMemoryResource through rmm_cupy_allocator",
    "torch": "torch.empty",
    "torch-raw": "torch.cuda.caching_allocator_alloc and caching_allocator_delete",
    "cuda-core": "cuda.core's DeviceMemoryResource",
}
"""Names for `--peers`, and what each is."""


class Missing(AllocatorError):
    """A peer, a library or a machine that a benchmark needs is not there; the text is the reason."""


@dataclass(frozen=True)
class Settings:
    """repeats: how often all take their turn.  seconds: about how long each case runs.  quick: small cases only."""

    repeats: int = 7
    seconds: float = 2.0
    quick: bool = False
    peers: tuple[str, ...] = ()
    """Only these; empty: all."""

    def wants(self, peer: str) -> bool:
        """Is this peer to take part?"""
        return not self.peers or peer in self.peers


@dataclass
class Contender:
    """run: does so many operations; returns None to be timed, or the value itself in the case's unit.

    around: entered before and left after each turn, not timed.  notes: what is to be kept beside the figures.
    """

    name: str
    run: Callable[[int], float | None]
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    notes: Callable[[], dict[str, Any]] = dict


@dataclass
class Case:
    """Contenders at one work.  operations: a first guess; the runner fits it to the time, unless `fixed`.

    wall: wall time even on the simulator, where otherwise the CPU time of the thread counts.
    batches: turns of each contender in a repeat, whose median is the repeat's value.
    least: a turn has a multiple of so many operations.  What is due only now and then, such as marks every so many
    frees, has to happen in every turn, or the median of the turns would not have it.
    warm: operations before the clock starts in each turn.
    """

    title: str
    contenders: Sequence[Contender]
    reference: str
    door: str = "core"
    at: float | None = None
    operations: int = 500
    fixed: bool = False
    unit: str = "ns"
    wall: bool = False
    batches: int = 3
    least: int = 1
    warm: int = 0
    most_repeats: int = 1 << 30


@dataclass(frozen=True)
class Reading:
    """Values taken by the benchmark itself, one a repeat; contenders took turns there as well."""

    title: str
    values: Mapping[str, Sequence[float]]
    reference: str
    unit: str
    door: str = "core"
    at: float | None = None
    notes: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    text: str = ""
    """What the benchmark says for people, where a table of ratios would say less."""


@dataclass
class Allocator:
    """One contender to allocate from, open for one case.

    call: what a loop calls: (nbytes, stream) through the core door, (nbytes) through CuPy's and guests' own.
    pair: (allocate, free) where memory is a bare number.  real: its addresses can be used.
    apart: no hook of CuPy's, so that no array of CuPy's ever comes from it.
    """

    name: str
    call: Callable[..., Any]
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    pair: tuple[Callable[[int], int], Callable[[int], object]] | None = None
    notes: Callable[[], dict[str, Any]] = dict
    real: bool = True
    apart: bool = False

    def contender(self, run: Callable[[int], float | None]) -> Contender:
        """This allocator at some work."""
        return Contender(self.name, run, self.around, self.notes)


class Door(Protocol):
    """One way to ask for memory."""

    @property
    def name(self) -> str:
        """core: with the stream as an argument.  cupy, made-up: through `cupy.cuda.alloc`, on its current stream."""

    @property
    def reference(self) -> str:
        """Whom ratios are to."""

    @property
    def takes_stream(self) -> bool:
        """Is the stream an argument of `Allocator.call`?"""

    def streams(self, count: int) -> AbstractContextManager[Sequence[Any]]:
        """New streams, for as long as the context lasts."""

    def main(self) -> AbstractContextManager[Any]:
        """The stream of a program that knows of one only, current as long as the context lasts."""

    def allocators(self, *, several: bool = False, entering: bool = False) -> AbstractContextManager[list[Allocator]]:
        """Those that take part, each new.  several: there will be several streams.  entering: streams become current
        within the loops, so that whoever wraps that does so in its own turns only."""

    def touch(self) -> Callable[[Any, Any], object]:
        """What queues a little work on a stream that uses the memory: (stream, memory)."""


@dataclass
class Stage:
    """device: simulated or real.  doors: those that are open here.  guests: libraries of GUESTS are in the process."""

    device: Device
    settings: Settings
    doors: Sequence[Door]
    guests: bool = False
    left_out: dict[str, str] = field(default_factory=dict)
    """Peers that cannot take part, and why."""

    @property
    def simulated(self) -> bool:
        """Is the device a simulated one?"""
        return self.device.simulated

    def choose(self, full: Sequence[Any], quick: Sequence[Any]) -> Sequence[Any]:
        """Sizes, counts and so on, as the settings ask."""
        return quick if self.settings.quick else full


@dataclass(frozen=True)
class Benchmark:
    """needs: "gpu", "cupy", or nothing.  guests: runs again once they are there.  usual: runs where none is named."""

    name: str
    about: str
    cases: Callable[[Stage], Iterator[Case | Reading]]
    needs: tuple[str, ...] = ()
    guests: bool = False
    usual: bool = True

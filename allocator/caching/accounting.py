"""The pool's counters: plain integers, some of them kept up to date only where that costs nothing.

On the hot path four numbers move: bytes allocated and requested, the highest and the lowest that `allocated`
has been.  The rest follows: in flight = reserved - allocated - idle, and while reserved and idle stand still its
peak is where `allocated` was lowest.  Whoever changes reserved or idle calls `mark` before and after.

Under the pool's lock.  Next: ../stats.py, what users read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence

from allocator.blocks import IDLE, KINDS, BestFit, Bin, Block, Heap, Owner
from allocator.caching.shelves import Shelves
from allocator.config import REUSE_KINDS
from allocator.devices import Device
from allocator.sizes import round_up
from allocator.stats import REQUEST_BUCKETS, SECONDS_BUCKETS, Histogram, Stats
from allocator.streams import Registry, Sealing, Timeline

RELEASE_REASONS = ("trim", "limit", "out_of_memory", "quiet", "pressure", "close")
RETRY_STEPS = ("internal_dependency", "move", "release", "host_wait", "callback", "collect")
DRIVER_CALLS = {"joined": ("cuMemCreate", "cuMemUnmap"), "apart": ("cuMemAlloc", "cuMemFree")}
"""The slow driver calls that are timed: with virtual memory, and with plain allocations."""
MOST_STREAMS = 32
"""Streams named one by one in the per-stream figures."""
MOST_AGES = 256
"""Of blocks in flight that are kept one by one: a program that never reads its statistics has no end of them."""

Finished = Sequence[tuple[Bin, int]]
"""Bins, and how many of their blocks are known to be finished, from the bottom."""


class Times:
    """A histogram of seconds that is added to."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS_BUCKETS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(SECONDS_BUCKETS, seconds)] += 1
        self._sum += seconds

    def histogram(self) -> Histogram:
        """As it is now."""
        bounds = (*SECONDS_BUCKETS, float("inf"))
        return Histogram(counts=dict(zip(bounds, self._counts, strict=True)), sum=self._sum)


class Accounts:
    """Counters of one pool."""

    def __init__(self, heap: Heap, shelves: Shelves) -> None:
        self._heap = heap
        self._shelves = shelves
        self.allocated = 0
        self.high = 0
        """The most that `allocated` has been."""
        self.low = 0
        """The least that `allocated` has been since `mark`."""
        self.peak_in_flight = 0
        self.peak_reserved = 0
        self.requested_sum = 0
        """Bytes ever asked for."""
        self.freed_sum = 0
        """Those of them that have been given back."""
        self.frees = 0
        """Those that left a stamp.  What its own stream took back at once is in the next two, and in `Bin.turns`."""
        self.calm = 0
        """Up to so many of those nothing has to be looked at but whether marks are due for the bytes (frees.py)."""
        self.bytes_due = 0
        """What `freed_sum` is when they are."""
        self.turns = 0
        """Blocks that were freed and handed out again in one step, where no mark can be due for them."""
        self.turned_sum = 0
        """Bytes that were given back in them."""
        self.cross_frees = 0
        self.served: Counter[str] = Counter()
        """Allocations by reuse kind, those from the bins apart."""
        self.served_bytes: Counter[str] = Counter()
        self.sizes: Counter[int] = Counter()
        """Allocations by the power of two that the size is rounded up to, those from the bins apart.  Sizes themselves
        would have no end."""
        self.steps: Counter[str] = Counter()
        """How often each step of the ladder was what served."""
        self.retries: Counter[str] = Counter()
        self.out_of_memory = 0
        self.growths = 0
        self.growth_bytes = 0
        self.releases: Counter[str] = Counter()
        self.release_bytes: Counter[str] = Counter()
        # A counter that first appears above 0 has no rate: the calls are there from the start.
        self.driver_seconds: defaultdict[str, float] = defaultdict(
            float, dict.fromkeys(DRIVER_CALLS["joined" if heap.joined else "apart"], 0.0)
        )
        self.in_flight_times = Times()
        self.growth_times = Times()
        self._binned: dict[int, tuple[int, int]] = {}
        """Stream -> seqno of the oldest block in flight in its bins, and when a reading first saw it, in ns."""
        self.device_free = -1

    @property
    def requested(self) -> int:
        """Bytes that the callers of live blocks asked for."""
        return self.requested_sum - self.freed_sum

    @property
    def reserved(self) -> int:
        """Bytes taken from the driver."""
        return self._heap.reserved

    def mark(self) -> None:
        """Reserved or idle bytes are about to change, or have just changed: bring the peaks up to date."""
        shelves, reserved = self._shelves, self._heap.reserved
        if len(shelves.aged) > MOST_AGES:
            self._count_ages()
        small, large = shelves.idle
        in_flight = reserved - small.nbytes - large.nbytes - shelves.private_bytes() - self.low
        if shelves.transit:  # new memory and what it joined, on its way to who asked for it, is not in flight
            in_flight -= sum(block.size for block in shelves.transit if block.state == IDLE)
        if in_flight > self.peak_in_flight:
            self.peak_in_flight = in_flight
        if reserved > self.peak_reserved:
            self.peak_reserved = reserved
        self.low = self.allocated

    def _count_ages(self) -> None:
        """Into the histogram of what was in flight."""
        for age in self._shelves.aged:
            self.in_flight_times.add(age / 1e9)
        self._shelves.aged.clear()

    def hand_out(self, block: Block, requested: int, reuse: str) -> None:
        """A block leaves the shelves for a caller."""
        block.requested = requested
        self.served[reuse] += 1
        self.served_bytes[reuse] += block.size
        self.sizes[(block.size - 1).bit_length()] += 1
        self.requested_sum += requested
        self.allocated += block.size
        if self.allocated > self.high:
            self.high = self.allocated

    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        shelves = self._shelves
        return sum(len(shelf) for shelf in shelves.idle) + sum(map(len, shelves.retired_shelves())) + self._in_bins()

    def in_flight(self) -> int:
        """Bytes freed and not known to be finished."""
        shelves = self._shelves
        return self._heap.reserved - self.allocated - shelves.idle_bytes() - shelves.private_bytes()

    def reset_peaks(self) -> None:
        """Peaks start again from the present values."""
        self.mark()
        self.high = self.allocated
        self.peak_reserved = self._heap.reserved
        self.peak_in_flight = self.in_flight()

    # -- reading --------------------------------------------------------------------------------

    def stats(
        self,
        device: Device,
        registry: Registry,
        sealing: Sealing,
        *,
        limit: int,
        unreleased: int,
        pending_frees: int,
        per_stream: bool,
    ) -> Stats:
        """All of it, consistent in itself.  O(bins + large idle blocks + streams).

        unreleased: bytes that the driver has not taken back yet, which count as idle.
        """
        self.mark()
        self._count_ages()
        idle_shelves = self._shelves.idle
        # What is finished and still lies in a bin counts as idle: moving it is work, and a reading's is bounded.
        graphs = registry.captures.numbers
        done = [(bin_, n) for bin_, n in self._shelves.finished() if bin_.owner.number not in graphs]
        done_blocks = sum(n for _, n in done)
        done_bytes = sum(bin_.size * n for bin_, n in done)
        idle = self._shelves.idle_bytes() + unreleased + done_bytes
        private = self._shelves.private_bytes()
        reserved = self._heap.reserved + unreleased
        largest = max(*(shelf.largest() for shelf in idle_shelves), *(bin_.size for bin_, _ in done))
        releasable = self._releasable(idle_shelves, done, device.granularity) + unreleased
        hits, hit_bytes, turns, turned = self._hits()
        allocations = {reuse: self.served[reuse] for reuse in REUSE_KINDS}
        allocations["same_stream"] += sum(hits.values())
        nbytes = {reuse: self.served_bytes[reuse] for reuse in REUSE_KINDS}
        nbytes["same_stream"] += hit_bytes
        live = sum(allocations.values()) - self.frees - turns
        idle_blocks = sum(len(shelf) for shelf in idle_shelves) + done_blocks
        retired_blocks = sum(map(len, self._shelves.retired_shelves())) + self._in_bins() - done_blocks
        with registry.lock.checked():
            lines = registry.seen()
        in_flight = reserved - self.allocated - idle - private
        totals = (self.allocated, in_flight, idle)
        by_stream = self._per_stream(lines, done, graphs, totals) if per_stream else ({}, {}, {})
        now = device.clock_ns()
        oldest = min(self._shelves.oldest_since(now), self._binned_since(done, graphs, now))
        return Stats(
            allocated_bytes=self.allocated,
            requested_bytes=self.requested,
            reserved_bytes=reserved,
            in_flight_bytes=in_flight,
            idle_bytes=idle,
            private_bytes=private,
            largest_free_block_bytes=largest,
            releasable_bytes=releasable,
            stranded_bytes=idle - releasable,
            peak_allocated_bytes=self.high,
            peak_reserved_bytes=self.peak_reserved,
            peak_in_flight_bytes=self.peak_in_flight,
            limit_bytes=limit,
            device_free_bytes=self.device_free,
            device_size_bytes=device.total_memory,
            external_fragmentation_ratio=1 - largest / idle if idle else 0.0,
            internal_fragmentation_ratio=1 - self.requested / self.allocated if self.allocated else 0.0,
            blocks={"live": live, "retired": retired_blocks, "idle": idle_blocks},
            segments=len(self._heap.segments),
            streams=sum(not line.ended for line in lines),
            device_lost=int(registry.lost is not None),
            poisoned_streams=sum(line.poisoned is not None for line in lines),
            orphaned_bytes=self._orphaned(registry),
            events={"idle": registry.events.idle, "in_use": registry.events.in_use},
            pending_frees=pending_frees,
            oldest_in_flight_seconds=max(0, now - oldest) / 1e9,
            allocations=allocations,
            allocation_bytes=nbytes,
            frees={"same_stream": self.frees + turns - self.cross_frees, "cross_stream": self.cross_frees},
            growths=self.growths,
            growth_bytes=self.growth_bytes,
            releases={reason: self.releases[reason] for reason in RELEASE_REASONS},
            release_bytes={reason: self.release_bytes[reason] for reason in RELEASE_REASONS},
            page_moves=0,
            page_move_bytes=0,
            out_of_memory=self.out_of_memory,
            out_of_memory_retries={step: self.retries[step] for step in RETRY_STEPS},
            stream_waits=sealing.counts["stream_waits"],
            event_records=sealing.counts["event_records"],
            event_queries=sealing.counts["event_queries"],
            host_synchronizations=sealing.counts["host_synchronizations"],
            block_splits=self._heap.splits,
            block_merges=self._heap.merges,
            driver_seconds=dict(self.driver_seconds),
            request_size_bytes=self._request_sizes(hits, self.requested_sum + turned),
            in_flight_seconds=self.in_flight_times.histogram(),
            growth_seconds=self.growth_times.histogram(),
            stream_allocated_bytes=by_stream[0],
            stream_in_flight_bytes=by_stream[1],
            stream_idle_bytes=by_stream[2],
        )

    def _releasable(self, shelves: Sequence[BestFit], done: Finished, granularity: int) -> int:
        """Bytes of segments that lie wholly in one idle block.  Only blocks of a segment's least size can hold one."""
        blocks = [block for bin_, n in done if bin_.size >= granularity for block in bin_.blocks[:n]]
        for shelf in shelves:
            blocks += shelf.from_size(granularity if self._heap.joined else 1)
        if self._heap.joined:
            return sum(segment.size for block in blocks for segment in self._heap.inside(block))
        return sum(block.size for block in blocks if block.prev is None and block.next is None)  # one piece each

    def _hits(self) -> tuple[Counter[int], int, int, int]:
        """What the bins have served: as `sizes`, and bytes; what turned round on the way, and bytes asked for in it."""
        shelves = self._shelves
        hits, nbytes = Counter(shelves.past_hits), shelves.past_hit_bytes
        turns, turned = self.turns + shelves.past_turns, self.turned_sum + shelves.past_turned
        for bins in self._shelves.bins:
            for sizes in bins.values():
                for size, bin_ in sizes.by_size.items():
                    served = bin_.hits + bin_.turns
                    hits[(size - 1).bit_length()] += served
                    nbytes += size * served
                    turns += bin_.turns
                    turned += bin_.turns * bin_.request
        return hits, nbytes, turns, turned

    def _in_bins(self) -> int:
        return sum(len(b.blocks) for bins in self._shelves.bins for s in bins.values() for b in s.by_size.values())

    def _request_sizes(self, hits: Mapping[int, int], total: int) -> Histogram:
        """Bounds are multiples of 512, so a request and its rounded size fall into the same bucket."""
        bounds = (*REQUEST_BUCKETS, float("inf"))
        counts = [0] * len(bounds)
        for by_power in (self.sizes, hits):
            for power, n in by_power.items():  # the bounds are powers of two: none lies between a size and its own
                counts[bisect_left(REQUEST_BUCKETS, 1 << power)] += n
        return Histogram(counts=dict(zip(bounds, counts, strict=True)), sum=total)

    def _orphaned(self, registry: Registry) -> int:
        """Bytes in flight behind a stream with unsealed work and no handle to seal it by (R9)."""
        with registry.lock.checked():
            orphans = {line.number: line.sealed for line in registry.seen() if registry.orphaned(line)}
        if not orphans:
            return 0
        return sum(
            block.size
            for block in self._shelves.retired()
            if any(n in orphans and q > orphans[n] for n, q in block.stamp.items())
        )

    def _binned_since(self, done: Finished, graphs: Container[int], now: int) -> int:
        """When a reading first saw the oldest block that is in flight in a bin; `now` if there is none.

        No time is taken on the hot path, so the age of what lies in bins begins with the first look at it.
        """
        over = {id(bin_): n for bin_, n in done}
        before, self._binned = self._binned, {}
        for bins in self._shelves.bins:
            for owner, sizes in bins.items():
                number = owner.number
                if number in graphs:
                    continue
                for bin_ in sizes.by_size.values():
                    n = over.get(id(bin_), 0)
                    if n < len(bin_.blocks):
                        seqno = bin_.blocks[n].stamp.at[number]
                        known = self._binned.get(number)
                        if known is None or seqno < known[0]:
                            then = before.get(number)
                            since = then[1] if then is not None and then[0] == seqno else now
                            self._binned[number] = (seqno, since)
        return min((since for _, since in self._binned.values()), default=now)

    def _per_stream(
        self, lines: Iterable[Timeline], done: Finished, graphs: Container[int], totals: Sequence[int]
    ) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Bytes live, in flight and idle by owner: the largest by name, the rest as `other`.  O(bins + streams).

        totals: the pool's figures, which these add up to; what is on its way between two places is `other`.
        """
        shelves = self._shelves
        over = {id(bin_): n for bin_, n in done}
        live, in_flight, idle = Counter(shelves.live), Counter[Owner | None](), Counter[Owner | None]()
        for bins in shelves.bins:
            for owner, sizes in bins.items():
                for size, bin_ in sizes.by_size.items():
                    if bin_.blocks:
                        n = over.get(id(bin_), 0)
                        live[owner] -= len(bin_.blocks) * size
                        idle[owner] += n * size
                        if owner.number not in graphs:  # else private, as in the totals
                            in_flight[owner] += (len(bin_.blocks) - n) * size
        for shelf in shelves.idle:
            idle.update(shelf.by_owner)
        for shelf in shelves.retired_shelves(graphs):
            in_flight.update(shelf.by_owner)
        by_owner = (live, in_flight, idle)
        for sums, total in zip(by_owner, totals, strict=True):
            sums[None] += total - sums.total()
        names = {line.number: line.name or str(line.number) for line in lines}
        figures: dict[str, list[int]] = {}
        for at, sums in enumerate(by_owner):
            for whose, nbytes in sums.items():
                if not nbytes:
                    continue
                name = names.get(whose.number, "other") if whose is not None else "other"
                figures.setdefault(name, [0, 0, 0])[at] += nbytes
        ranked = sorted(figures, key=lambda name: (name == "other", -sum(figures[name])))
        result: tuple[dict[str, int], dict[str, int], dict[str, int]] = ({}, {}, {})
        for rank, name in enumerate(ranked):
            shown = name if rank < MOST_STREAMS else "other"
            for figure, value in zip(result, figures[name], strict=True):
                figure[shown] = figure.get(shown, 0) + value
        return result

    def check(self, live: Iterable[Block]) -> None:
        """Raise AssertionError unless the counters equal what is there.  O(live).

        What another thread is working on at this moment is neither live nor lost.
        """
        transit = self._shelves.transit
        blocks = [block for block in live if block not in transit]
        assert self.allocated == sum(b.size for b in blocks), (self.allocated, sum(b.size for b in blocks))
        assert self.requested == sum(b.requested for b in blocks)
        by_owner = Counter[Owner | None]()
        for block in blocks:
            by_owner[block.owner] += block.size
        for bins in self._shelves.bins:
            for owner, sizes in bins.items():
                by_owner[owner] += sum(len(b.blocks) * b.size for b in sizes.by_size.values())
        assert +by_owner == self._shelves.live, (by_owner, self._shelves.live)
        assert all(0 < b.requested <= b.size and b.size == round_up(b.requested) for b in blocks)
        held = sum(b.size for b in self._shelves.retired())
        held += sum(
            len(b.blocks) * b.size for bins in self._shelves.bins for s in bins.values() for b in s.by_size.values()
        )
        held += sum(b.size for b in transit)
        assert self.allocated + held + self._shelves.idle_bytes() == self._heap.reserved, "bytes lost"
        assert len(KINDS) == len(self._shelves.idle)

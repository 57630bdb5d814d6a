"""Where free blocks lie, by who may take them.

    bins     exact sizes, one set a stream: freed there, used by nobody else.  The hot path (R7)
    own      one index a stream: in flight, but the stream itself may take them at once
    idle     one index: finished, safe for every stream
    shared   one index: in flight for more than one stream, or for users that are only assumed

A block on `own` or `shared` is *watched*: noted under the first seqno that it waits for, and looked at again
when that is complete.  So a block moves a few times in its life, whatever the number of streams.

Idle neighbours merge at once.  In flight, only neighbours with the same stamp do: joining a finished block to
a busy one would take it from everybody (R7); `gather` does that on purpose, when the alternative is growing.

Longer than other modules: putting down, picking up and looking again must agree on one set of invariants, which
`check` walks.  Under the pool's lock; no driver call.
Next: ladder.py, the one place that decides the order of all this.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from itertools import islice

from allocator.blocks import IDLE, KINDS, LIVE, MANY, NOBODY, RETIRED, SMALL, BestFit, Bin, Bins, Block, Heap, Owner
from allocator.config import REUSE_KINDS, Config
from allocator.events import EMPTY, VectorClock
from allocator.sizes import QUANTUM
from allocator.streams import CONTEXT, Kind, Registry, Timeline
from allocator.sync import shield

TOLD = 8
"""Entries that the stamp of an idle block keeps: nothing of it is unfinished."""
SCAN = 32
"""Blocks looked at, best fit first, where some of them may turn out not to be takeable."""
MANY_SIZES = 64
"""Bins of a stream from which on a size has to be asked for twice to get one."""
FEW_BINS = 256
"""Up to so many bins of a pool, none goes for want of use."""


class Shelves:
    """All free blocks of one pool."""

    def __init__(self, heap: Heap, registry: Registry, config: Config) -> None:
        self._heap = heap
        self._registry = registry
        self._order = registry.order
        self.bins: tuple[dict[Owner, Bins], dict[Owner, Bins]] = ({}, {})
        """Bins of declared and of assumed uses, by owner and size."""
        self._open = 0
        """How many bins there are."""
        self._unused_at = FEW_BINS
        """How many there have to be before those that are out of use are looked for again."""
        self.filled: list[Bin] = []
        """Bins that may hold blocks: all that do are here."""
        self._owners_at = 16
        """Owners of bins from which on those that have ended are looked for."""
        self.idle = [BestFit() for _ in KINDS]
        self.own: tuple[dict[int, BestFit], ...] = tuple({} for _ in KINDS)
        self.shared = [BestFit() for _ in KINDS]
        self._watch: dict[int, dict[int, list[tuple[Block, int]]]] = {}
        self._watched = 0
        self._forget_at = 64
        self._version = -1
        self._placed = EMPTY
        """The stamp of the last block placed: many blocks share one."""
        self._placed_at = -1
        self._placed_left = EMPTY
        """What was unfinished of it at that version of the registry."""
        self._small_request = config.small_request
        self._slack = (0, config.fit_slack)  # SMALL, LARGE
        self._any_kind = config.reuse >= set(REUSE_KINDS)
        self._reuse = config.reuse
        self.transit: set[Block] = set()
        """Free blocks that a thread has taken off to work on outside the lock: on no shelf, and not lost."""
        self.stamped: set[int] = set()
        """Streams named by frees that passed the bins by; a stream is taken out when it is sealed."""
        self.crossing = False
        """More than one stream frees memory here."""
        self.past_hits: Counter[int] = Counter()
        """Allocations that bins which have gone served, by the power of two that the size is rounded up to."""
        self.past_hit_bytes = 0
        self.past_turns = 0
        self.past_turned = 0
        """Those of them that were counted by `Bin.turns`, and bytes asked for in them."""
        self.live: dict[Owner | None, int] = {}
        """Bytes that were handed out and have not been put down here since, bins included, by owner."""
        self.aged: list[int] = []
        """ns that blocks spent in flight here, since last read: for the histogram."""

    # -- putting blocks down --------------------------------------------------------------------

    def place(self, block: Block) -> None:
        """Put a free block where it belongs by its stamp, and merge it with its neighbours as R7 allows."""
        if block.state == LIVE:
            self.leaves(block)
        stamp = block.stamp
        version = self._registry.version  # read first: what turns out to be over meanwhile is looked at again
        if stamp is self._placed and version == self._placed_at:
            left = self._placed_left
        else:
            left = self._order.unfinished(stamp)
            self._placed, self._placed_at, self._placed_left = stamp, version, left
        if not left.at:
            self.put_idle(block)
            return
        block.state = RETIRED
        if not block.since:
            block.since = self._registry.device.clock_ns()
        shelf = self._shelf_for(block, left)
        other = block.prev
        if other is not None and other.shelf is shelf and self._alike(other, block):
            shelf.remove(other)
            block = self._heap.merge(other, block)
        other = block.next
        if other is not None and other.shelf is shelf and self._alike(other, block):
            shelf.remove(other)
            block = self._heap.merge(block, other)
        shelf.add(block)
        self._note(block, left)

    def put_idle(self, block: Block) -> None:
        """All its work is over: any stream may have it."""
        block.state = IDLE
        block.stamp = _told(block.stamp)
        if block.since:
            self.aged.append(self._registry.device.clock_ns() - block.since)
            block.since = 0
        shelf = self.idle[block.kind]
        other = block.prev
        if other is not None and other.shelf is shelf:
            shelf.remove(other)
            block = self._heap.merge(other, block)
        other = block.next
        if other is not None and other.shelf is shelf:
            shelf.remove(other)
            block = self._heap.merge(block, other)
        block.stamp = _told(block.stamp)  # or it grows with every neighbour that has been another stream's
        shelf.add(block)

    @staticmethod
    def _alike(a: Block, b: Block) -> bool:
        """May two neighbours in flight be one: do they wait for the same, and come back to the same (R7)?"""
        return a.owner is b.owner and a.assumed == b.assumed and (a.stamp is b.stamp or a.stamp == b.stamp)

    def _shelf_for(self, block: Block, left: VectorClock) -> BestFit:
        """`own` if one stream may take it at once: the only unfinished user, or an owner with assumed ones (R3)."""
        owner = block.owner.number if block.owner is not None else 0
        if CONTEXT not in left.at:
            mine = next(iter(left.at)) if len(left.at) == 1 else 0
        else:
            mine = owner if owner and left.at.keys() <= {CONTEXT, owner} else 0
        if not mine:
            return self.shared[block.kind]
        own = self.own[block.kind]
        shelf = own.get(mine)
        if shelf is None:
            shelf = own[mine] = BestFit()
        return shelf

    def _note(self, block: Block, left: VectorClock) -> None:
        """Watch the block under the first seqno that it waits for; the context last, as it covers the rest."""
        at = left.at
        number, seqno = next(iter(at.items())) if len(at) == 1 else max(at.items())  # CONTEXT is 0, so a stream
        if CONTEXT in at:
            self.stamped.add(CONTEXT)
        by_seqno = self._watch.get(number)
        if by_seqno is None:
            by_seqno = self._watch[number] = {}
        notes = by_seqno.get(seqno)
        if notes is None:
            notes = by_seqno[seqno] = []
        notes.append((block, block.generation))
        self._watched += 1
        if self._watched > self._forget_at:
            self._forget_stale()
            self._forget_at = 64 + 4 * self._watched

    def _forget_stale(self) -> None:
        self._watched = 0
        for number, by_seqno in list(self._watch.items()):
            for seqno, notes in list(by_seqno.items()):
                fresh = [note for note in notes if note[0].generation == note[1] and note[0].shelf is not None]
                if fresh:
                    by_seqno[seqno] = fresh
                    self._watched += len(fresh)
                else:
                    del by_seqno[seqno]
            if not by_seqno:
                del self._watch[number]

    def note_bin(self, bin_: Bin) -> Bin:
        """A block is about to go into a bin that is not noted: which one it has to be, should that one have gone.

        Noted twice is harmless, should Ctrl-C part the last two steps.
        """
        sizes = self.bins[bin_.assumed].get(bin_.owner)
        if sizes is None or sizes.by_size.get(bin_.size) is not bin_:
            with shield:
                bin_ = self.bin(bin_.owner, bin_.size, bin_.assumed)
            if bin_.filled:
                return bin_
        self.filled.append(bin_)
        bin_.home.noted.append(bin_)
        bin_.filled = True
        return bin_

    def flush(self) -> bool:
        """Empty the bins into the indexes.  True if there was anything there.  O(blocks put in since the last time)."""
        any_there = ended = False
        filled, self.filled = self.filled, []
        for bin_ in filled:
            bin_.filled = False
            bin_.home.noted.clear()
            ended = ended or bin_.owner.ended
            blocks = bin_.blocks
            while blocks:
                any_there = True
                block = blocks.pop()
                block.generation += 1
                self.place(block)
        if ended or len(self.bins[0]) + len(self.bins[1]) > self._owners_at:
            self._forget_ended()
        return any_there

    def _forget_ended(self) -> None:
        """Let the bins of streams that have ended go; later frees of their blocks pass the bins by."""
        for bins in self.bins:
            for line in [line for line, sizes in bins.items() if line.ended and not sizes.any()]:
                for bin_ in bins.pop(line).by_size.values():
                    self._gone(bin_)
        self._owners_at = 16 + 2 * (len(self.bins[0]) + len(self.bins[1]))

    def _forget_unused(self) -> None:
        """Let empty bins go that nobody has used since the last time, so that sizes without end take no memory without
        end (S13).  A block in use keeps its bin, and `note_bin` finds another when it comes back.

        O(bins), after as many new ones as are in use, and FEW_BINS at least: O(1) for each of them.
        """
        filled, self.filled = self.filled, []
        for bin_ in filled:
            bin_.home.noted.clear()
        for bin_ in filled:
            if bin_.blocks:
                self.filled.append(bin_)
                bin_.home.noted.append(bin_)
            else:
                bin_.filled = False
        used = 0
        for bins in self.bins:
            for sizes in bins.values():
                for bin_ in list(sizes.by_size.values()):
                    if bin_.blocks or bin_.hits + bin_.turns != bin_.seen:
                        if bin_.blocks or bin_.seen >= 0:  # else it may be new, and no more than that
                            used += 1
                        bin_.seen = bin_.hits + bin_.turns
                    else:
                        sizes.close(bin_.size)
                        self._gone(bin_)
        self._unused_at = self._open + max(FEW_BINS, used)

    def _gone(self, bin_: Bin) -> None:
        """What a bin that goes has served still counts."""
        self._open -= 1
        bin_.taker = None
        bin_.after = None  # or one that has gone keeps the next one, and so on
        served = bin_.hits + bin_.turns
        self.past_hits[(bin_.size - 1).bit_length()] += served
        self.past_hit_bytes += served * bin_.size
        self.past_turns += bin_.turns
        self.past_turned += bin_.turns * bin_.request

    def flush_finished(self, most: int) -> None:
        """Move what is finished from the bins to `idle`, at most `most` blocks, oldest first.  O(bins + most)."""
        for bin_, n in self.finished():
            if most <= 0:
                return
            n = min(most, n)
            most -= n
            blocks = bin_.blocks[:n]
            del bin_.blocks[:n]
            for block in blocks:
                block.generation += 1
                self.place(block)

    def finished(self) -> Iterator[tuple[Bin, int]]:
        """Each bin that has blocks known to be finished, and how many, from its bottom.  O(bins)."""
        completed = self._registry.context.completed
        for bins in self.bins:
            for sizes in list(bins.values()):
                for bin_ in sizes.by_size.values():
                    if bin_.blocks and (n := self.finished_in(bin_, completed)):
                        yield bin_, n

    def finished_in(self, bin_: Bin, context_completed: int) -> int:
        """How many blocks of a bin, from its bottom, are known to be finished.  O(log n): seqnos only grow."""
        number = bin_.owner.number
        line = self._registry.lines.get(number)
        blocks = bin_.blocks
        if line is None:
            n = len(blocks)
        elif blocks[0].stamp.at[number] > line.completed:
            return 0
        else:
            n = bisect_right(blocks, line.completed, key=lambda b: b.stamp.at[number])
        if bin_.assumed:
            n = min(n, bisect_right(blocks, context_completed, key=lambda b: b.stamp.at[CONTEXT]))
        return n

    def refresh(self, most: int | None = None) -> bool:
        """Look again at the blocks whose watched seqno is complete now.  True if any has moved.

        most: put down that many at most, and leave the others to the next call; None for all.
        """
        registry = self._registry
        if registry.version == self._version:
            return False
        self._version = registry.version
        moved = False
        for own in self.own:
            for number in [n for n, shelf in own.items() if n not in registry.lines and not shelf]:
                del own[number]  # the stream has ended, and nothing of it is in flight
        for number in list(self._watch):
            line = registry.lines.get(number)
            done = registry.context.completed if number == CONTEXT else line.completed if line is not None else None
            by_seqno = self._watch[number]
            for seqno in [q for q in by_seqno if done is None or q <= done]:
                notes = by_seqno.pop(seqno)
                if most is not None:
                    if len(notes) > most:
                        by_seqno[seqno] = notes[most:]
                        del notes[most:]
                        self._version = -1
                    most -= len(notes)
                for block, generation in notes:
                    self._watched -= 1
                    if block.generation == generation and block.shelf is not None and block.state == RETIRED:
                        block.shelf.remove(block)
                        block.generation += 1
                        self.place(block)
                        moved = True
            if not by_seqno:
                del self._watch[number]
        return moved

    def waiting(self) -> list[Timeline]:
        """The streams that free blocks wait for, as far as is known at once; bins included.  O(streams).

        Every stream seen, where users that are only assumed are waited for (R3).
        """
        registry = self._registry
        if self.context_waits:
            with registry.lock.checked():
                return registry.seen()
        lines = registry.lines
        numbers = self._watch.keys() | self.stamped
        numbers.update(bin_.owner.number for bin_ in self.filled if bin_.blocks)
        return [line for line in map(lines.get, numbers) if line is not None and line.kind is not Kind.GRAPH]

    @property
    def context_waits(self) -> bool:
        """Do free blocks wait for users that are only assumed, or for the last replays of graphs that have gone?"""
        if CONTEXT in self._watch or CONTEXT in self.stamped:
            return True
        captures = self._registry.captures
        if captures.dying:
            return True
        graphs = captures.numbers
        return any(bin_.blocks for bin_ in self.filled if bin_.assumed and bin_.owner.number not in graphs)

    def unsealed(self, lines: Iterable[Timeline]) -> list[Timeline]:
        """Those on which memory was freed that no event of ours is behind.  An upper bound.

        O(streams + seqnos watched + bins filled since they were last emptied).
        """
        newest: dict[int, int] = {}
        for bin_ in self.filled:
            if bin_.blocks:
                number = bin_.owner.number
                newest[number] = max(newest.get(number, 0), bin_.blocks[-1].stamp.get(number))
        return [
            line
            for line in lines
            if line.number in self.stamped
            or newest.get(line.number, 0) > line.sealed
            or any(seqno > line.sealed for seqno in self._watch.get(line.number, ()))
        ]

    def retired(self) -> Iterator[Block]:
        """Every block in flight, bins apart."""
        for shelf in self.retired_shelves():
            yield from shelf

    def retired_shelves(self, but: Container[int] = ()) -> Iterator[BestFit]:
        """Where they lie.  but: streams whose own shelves are left out."""
        for own in self.own:
            yield from (shelf for number, shelf in own.items() if number not in but)
        yield from self.shared

    def oldest_since(self, now: int) -> int:
        """When the oldest block in flight was put down, bins apart, in ns; `now` if there is none.

        The first that is still there under the first seqno that its stream is watched for.  One that was put under it
        later, when something else that it waited for was over, may be older, by no more than the time between two
        marks on the stream.  O(streams), and notes that are out of date are forgotten on the way.
        """
        oldest = now
        for by_seqno in self._watch.values():
            for seqno in sorted(by_seqno):
                notes = by_seqno[seqno]
                stale = 0
                for block, generation in notes:
                    if block.generation == generation and block.shelf is not None:
                        if block.since:
                            oldest = min(oldest, block.since)
                        break
                    stale += 1
                del notes[:stale]
                self._watched -= stale
                if notes:
                    break
        return oldest

    # -- picking blocks up ----------------------------------------------------------------------

    def take(self, line: Timeline, size: int, kind: int, assumed: bool) -> tuple[Block, str] | None:
        """Steps 1 and 2, which compete on fit: the stream's own in flight, its bins among them, and idle ones."""
        own = self.own[kind].get(line.number)
        slack = self._slack[kind]
        mine = own.find(size, slack) if own is not None else None
        if assumed and own is not None and mine is not None and not self.returns(mine, line):
            mine = next((b for b in islice(own.from_size(size), SCAN) if self.returns(b, line)), None)
        free = self.idle[kind].find(size, slack)
        if free is not None and not self._any_kind and not self._allowed(free, line):
            free = next((b for b in self.idle[kind].from_size(size) if self._allowed(b, line)), None)
        if own is not None and mine is not None and not self._any_kind and not self._allowed(mine, line):
            fit = islice(own.from_size(size), SCAN)
            mine = next((b for b in fit if self._allowed(b, line) and (not assumed or self.returns(b, line))), None)
        if mine is None or (free is not None and free.size < mine.size):
            mine = free
        sizes = self.bins[assumed].get(line)
        if sizes is not None:
            end = self._small_request + 1 if kind == SMALL else 1 << 62
            bin_ = sizes.best_fit(size, end if mine is None or mine.size > end else mine.size)
            if bin_ is not None:
                mine = bin_.blocks.pop()
        return None if mine is None else self._serve(mine, line, size)

    @staticmethod
    def returns(block: Block, line: Timeline) -> bool:
        """Does a block in flight come back to whom a pool that never crosses streams would give it (R3)?

        A program that declares nothing may use memory on another stream without a wait where it knows the owner to be
        idle.  What the owner waited for, or what another library left it, would be behind the owner only.
        """
        return block.owner is line and block.assumed

    def take_covered(self, line: Timeline, size: int, kind: int, assumed: bool) -> tuple[Block, str] | None:
        """Step 3: what the stream has already waited for; the best fit among a few of each shelf."""
        if "event_dependency" not in self._reuse:
            return None
        best: Block | None = None
        for shelf in self._covering(line, kind):
            for looked, block in enumerate(shelf.from_size(size)):
                if looked >= SCAN or (best is not None and block.size >= best.size):
                    break
                if self._known(block, line) and (not assumed or self.returns(block, line)):
                    best = block
                    break
        return None if best is None else self._serve(best, line, size)

    def _covering(self, line: Timeline, kind: int) -> Iterator[BestFit]:
        """Shelves that may hold what `line` has waited for."""
        own = self.own[kind]
        for number in own.keys() & line.clock.at.keys():
            if number != line.number:
                yield own[number]
        yield self.shared[kind]

    def _known(self, block: Block, line: Timeline) -> bool:
        return self._order.known(block.stamp, line, block.owner is line)

    def takeable(self, block: Block | None, line: Timeline, assumed: bool) -> bool:
        """May `line` take this block as it is, by steps 1 to 3?"""
        if block is None or block.shelf is None:
            return False
        idle = block.shelf is self.idle[block.kind]
        if assumed and not idle and not self.returns(block, line):
            return False
        if idle or block.shelf is self.own[block.kind].get(line.number):
            return self._any_kind or self._allowed(block, line)
        return "event_dependency" in self._reuse and self._known(block, line)

    def reuse_kind(self, block: Block, line: Timeline) -> str:
        """How this would count; the first that holds."""
        if block.sole == line.number:
            return "same_stream"
        if block.sole == NOBODY:
            return "new_memory"
        return "event_dependency" if self._by_clock(block.stamp, line) else "opportunistic"

    def _by_clock(self, stamp: VectorClock, line: Timeline) -> bool:
        """stamp <= clock(S): everything in it is the stream's own or was waited for."""
        at = line.clock.at
        return all(number == line.number or at.get(number, 0) >= seqno for number, seqno in stamp.items())

    def _allowed(self, block: Block, line: Timeline) -> bool:
        return self.reuse_kind(block, line) in self._reuse

    def _serve(self, block: Block, line: Timeline, size: int) -> tuple[Block, str]:
        reuse = self.reuse_kind(block, line)
        return self.carve(block, size), reuse

    def carve(self, block: Block, size: int) -> Block:
        """Take a block off its shelf and put what is more than `size` back."""
        shelf = block.shelf
        if shelf is not None:
            shelf.remove(block)
        block.generation += 1
        if block.size - size >= QUANTUM:
            rest = self._heap.split(block, size)
            if shelf is not None and shelf is self.idle[block.kind]:
                self.idle[block.kind].add(
                    rest
                )  # as idle as it was; its neighbour behind is not, or would have been part of it
            else:
                self.place(rest)
        return block

    def leaves(self, block: Block) -> None:
        """A block that was LIVE, or lay in a bin, does not count as its owner's any more.  Once, before it changes."""
        owner = block.owner
        left = self.live[owner] - block.size
        if left:
            self.live[owner] = left
        else:
            del self.live[owner]

    def hand_out(self, block: Block, line: Timeline, size: int, assumed: bool) -> None:
        """Make a block on no shelf LIVE, owned by `line`.

        What the owner was exempt from, the users that are only assumed, is still unfinished: it is carried on into the
        next stamp, should the next user of the block be one that declares its uses (R3).
        """
        carried = EMPTY
        if block.state == RETIRED:
            stamped = block.stamp.at
            only = len(stamped)
            if line.number not in stamped or (only > 1 and (only > 2 or not assumed or CONTEXT not in stamped)):
                at = line.clock.at
                left = self._order.unfinished(block.stamp)
                kept = {n: q for n, q in left.items() if n != line.number and at.get(n, 0) < q}
                if assumed:
                    kept.pop(CONTEXT, None)  # the next stamp names a later seqno of the context
                if kept:
                    carried = VectorClock(kept)
        elif block.state == LIVE:  # out of a bin
            self.leaves(block)
        block.state = LIVE
        self.live[line] = self.live.get(line, 0) + block.size
        block.since = 0
        block.stamp = carried
        block.users = None
        block.assumed = assumed
        block.owner = line
        block.sole = line.number if not carried else MANY
        # Large blocks go through the index once several streams share: memory put by for one stream by its exact
        # size could not grow together with its neighbours, nor move to lower addresses, and that costs more than it
        # saves (docs/decisions/0020).
        binned = not carried.at and (block.kind == SMALL or not self.crossing)
        block.bin = self._bin_for(line, size, assumed) if binned else None

    def _bin_for(self, owner: Owner, size: int, assumed: bool) -> Bin | None:
        """The bin that a block which is handed out shall come back to.

        None for a size that a stream of many sizes asks for the first time: it may never ask for it again.
        """
        sizes = self.bins[assumed].get(owner)
        if sizes is not None:
            found = sizes.by_size.get(size)
            if found is not None:
                found.seen = -1
                return found
            if len(sizes.by_size) >= MANY_SIZES and not sizes.met_again(size):
                return None
        return self.bin(owner, size, assumed)

    def bin(self, owner: Owner, size: int, assumed: bool) -> Bin:
        """The bin for blocks of exactly `size` bytes that `owner` frees."""
        bins = self.bins[assumed]
        sizes = bins.get(owner)
        if sizes is None:
            sizes = bins[owner] = Bins()
        found = sizes.by_size.get(size)
        if found is None:
            if self._open >= self._unused_at:
                self._forget_unused()
            self._open += 1
            return sizes.open(owner, size, assumed)
        found.seen = -1
        return found

    def gather(self, line: Timeline, size: int, kind: int, assumed: bool) -> Block | None:
        """Neighbours that the stream may all take, joined on purpose into the smallest run that is enough.

        The joined block is on no shelf.  O(blocks of the stream's own and of what it has waited for).
        """
        best: tuple[int, list[Block]] | None = None
        seen: set[Block] = set()
        shelves = [self.own[kind].get(line.number), *self._covering(line, kind)]
        for shelf in shelves:
            for block in list(shelf or ()):
                if block in seen or not self.takeable(block, line, assumed):
                    continue
                run = self._run(block, line, assumed)
                seen.update(run)
                total = sum(b.size for b in run)
                if total < size:
                    continue
                for end in (0, -1):  # no more than is needed: what is joined is tied to the busiest part (R7)
                    while total - run[end].size >= size:
                        total -= run.pop(end).size
                if best is None or total < best[0]:
                    best = (total, list(run))
        if best is None:
            return None
        first, *rest = best[1]
        for block in best[1]:
            if block.shelf is not None:
                block.shelf.remove(block)
        for block in rest:
            first = self._heap.merge(first, block)
        return first

    def _run(self, block: Block, line: Timeline, assumed: bool) -> list[Block]:
        run = [block]
        while (other := run[-1].prev) is not None and self.takeable(other, line, assumed):
            run.append(other)
        run.reverse()
        while (other := run[-1].next) is not None and self.takeable(other, line, assumed):
            run.append(other)
        return run

    # -- numbers --------------------------------------------------------------------------------

    def private_bytes(self) -> int:
        """Bytes that only a capture under way, or its graph, may use: freed within it (R10).  No lock."""
        graphs = self._registry.captures.numbers
        if not graphs:
            return 0
        total = 0
        for own in self.own:
            total += sum(shelf.nbytes for number, shelf in list(own.items()) if number in graphs)
        for bins in self.bins:
            for owner, sizes in list(bins.items()):
                if owner.number in graphs:
                    total += sum(len(bin_.blocks) * size for size, bin_ in list(sizes.by_size.items()))
        return total

    def parked_bytes(self) -> int:
        """Bytes in flight that no wait can free: a graph that lives may still use them (R10).  O(retired) if any."""
        captures = self._registry.captures
        graphs = captures.numbers - {line.number for line, _ in captures.dying}
        if not graphs:
            return 0
        return sum(b.size for shelf in self.shared for b in shelf if not graphs.isdisjoint(b.stamp.at))

    def idle_bytes(self) -> int:
        """Bytes known to be safe for everyone, bins apart."""
        small, large = self.idle
        return small.nbytes + large.nbytes

    def check(self) -> None:
        """Raise AssertionError unless every free block lies where its stamp says.  O(blocks)."""
        registry = self._registry
        for kind in KINDS:
            for shelf in (self.idle[kind], self.shared[kind], *self.own[kind].values()):
                shelf.check()
                assert all(block.kind == kind for block in shelf)
            for block in self.idle[kind]:
                assert block.state == IDLE and registry.order.done(block.stamp), block
                assert len(block.stamp.at) <= TOLD, block
                assert block.next is None or block.next.shelf is not self.idle[kind], ("not merged", block)
            for number, shelf in self.own[kind].items():
                for block in shelf:
                    mine = block.owner.number if block.owner is not None else 0
                    allowed = {number} | ({CONTEXT} if mine == number else set())
                    assert block.state == RETIRED and set(registry.order.unfinished(block.stamp).at) <= allowed, block
            assert all(block.state == RETIRED for block in self.shared[kind])
        watched = {
            id(block)
            for by in self._watch.values()
            for notes in by.values()
            for block, gen in notes
            if block.generation == gen
        }
        for block in itertools.chain.from_iterable(Shelves.retired_shelves(self)):
            assert id(block) in watched, ("not watched", block)
        noted = {id(bin_) for bins in self.bins for sizes in bins.values() for bin_ in sizes.noted}
        assert noted >= {id(bin_) for bin_ in self.filled if bin_.blocks}, "its stream has not noted a bin with blocks"
        opened = 0
        for assumed, bins in enumerate(self.bins):
            for by, sizes in bins.items():
                opened += len(sizes.by_size)
                for size, bin_ in sizes.by_size.items():
                    assert bin_.filled or not bin_.blocks, ("a bin is not noted", bin_.owner, size)
                    for block in bin_.blocks:
                        assert block.shelf is None and block.size == size and block.owner is by, block
                        names = {by.number, CONTEXT} if assumed else {by.number}
                        assert set(block.stamp.at) <= names, ("a bin holds its owner's only (R7)", block)
        assert self._open == opened, ("bins miscounted", self._open, opened)


def _told(stamp: VectorClock) -> VectorClock:
    """What an idle block keeps of its stamp: nothing of it is unfinished, so that it only names the kind of a reuse."""
    return stamp if len(stamp.at) <= TOLD else VectorClock(dict(islice(stamp.at.items(), TOLD)))

"""A naive race oracle, to check the fast one against.

Every launch is a bit; what is ordered before a point is the set of those bits, copied in full everywhere.
Every launch is compared with every earlier access, byte unit by byte unit.  Nothing is ever forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Stream:
    """What is before the stream's next launch."""

    blocking: bool
    before: int = 0


@dataclass
class Naive:
    """Streams by any key; "legacy" is the legacy stream."""

    streams: dict[object, Stream] = field(default_factory=lambda: {"legacy": Stream(True)})
    host: int = 0
    legacy_base: int = 0
    launches: int = 0
    accesses: list[tuple[int, int, bool, object]] = field(default_factory=list)  # bit, unit, write, hand-out
    owner: dict[int, object] = field(default_factory=dict)
    racy: set[tuple[int, int]] = field(default_factory=set)  # launch, unit
    racy_owners: set[tuple[object, int]] = field(default_factory=set)  # hand-out of the second, unit

    def hand_out(self, units: range, owner: object) -> None:
        for unit in units:
            self.owner[unit] = owner

    def legacy_operation(self) -> None:
        legacy = self.streams["legacy"]
        for stream in self.streams.values():
            if stream.blocking:
                legacy.before |= stream.before

    def launch(self, key: object, accesses: list[tuple[int, bool, object]]) -> None:
        stream = self.streams[key]
        if key == "legacy":
            self.legacy_operation()
        elif stream.blocking:
            stream.before |= self.legacy_base
        known = stream.before | self.host
        bit = 1 << self.launches
        for unit, write, owner in accesses:
            for earlier, their_unit, their_write, their_owner in self.accesses:
                if (
                    unit == their_unit
                    and owner is not their_owner
                    and (write or their_write)
                    and not earlier & known
                    and earlier != bit
                ):
                    self.racy.add((self.launches, unit))
                    self.racy_owners.add((owner, unit))
        self.accesses += [(bit, unit, write, owner) for unit, write, owner in accesses]
        self.launches += 1
        stream.before |= bit
        if key == "legacy":
            self.legacy_base = stream.before

    def record(self, key: object) -> int:
        stream = self.streams[key]
        if key == "legacy":
            self.legacy_operation()
            self.legacy_base = stream.before
        return stream.before | (self.legacy_base if stream.blocking else 0)

    def record_context(self) -> int:
        mask = 0
        for stream in self.streams.values():
            mask |= stream.before
        return mask

    def wait(self, key: object, mask: int) -> None:
        stream = self.streams[key]
        if key == "legacy":
            self.legacy_operation()
        stream.before |= mask
        if key == "legacy":
            self.legacy_base = stream.before

    def host_saw(self, key: object) -> None:
        self.host |= self.streams[key].before
        if key == "legacy":
            for stream in self.streams.values():
                if stream.blocking:
                    self.host |= stream.before

"""A stream's handle for the length of a `with`, from an owner that is known to keep it alive (R9).

A class and not a generator: it is entered once or more for every answer of the driver.
Next: registry.py, whose `borrow` makes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from allocator.devices import LEGACY, PER_THREAD
from allocator.streams.identity import OwnedHandle, handle_of, is_special
from allocator.streams.timeline import Kind, Timeline

if TYPE_CHECKING:
    from allocator.streams.registry import Registry


class Borrowed:
    """What `Registry.borrow` answers.  Used once."""

    __slots__ = ("_by_program", "_given", "_line", "_owned", "_owner", "_pinned", "_registry", "_waits")

    def __init__(self, registry: Registry, line: Timeline, given: int | None, by_program: bool, waits: bool) -> None:
        self._registry = registry
        self._line = line
        self._given = given
        self._by_program = by_program
        self._waits = waits
        self._pinned = False
        self._owned: OwnedHandle | None = None
        """A stream of ours that is not destroyed meanwhile."""
        self._owner: object = None
        """A foreign object, held meanwhile."""

    def __enter__(self) -> int | None:
        registry, line = self._registry, self._line
        if registry.forked:
            return None
        with registry.lock.checked():
            forbidden = not self._by_program and registry.captures.forbids(line)
            if forbidden:
                return None
            if not self._waits:
                line.pins += 1
                self._pinned = True
            if self._given is not None:
                return self._given
            owner = line.owner
            if isinstance(owner, OwnedHandle):
                owner.pins += 1
                self._owned = owner
                return None if owner.closing else owner.handle
        if line.kind is Kind.LEGACY:
            return LEGACY
        if line.kind is Kind.PER_THREAD:
            return _per_thread(registry, line)
        self._owner = owner
        try:
            return _read(owner)
        except BaseException:
            self._give_back()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pinned or self._owned is not None:
            self._give_back()

    def _give_back(self) -> None:
        registry, owned = self._registry, self._owned
        dead: int | None = None
        with registry.lock.checked():
            if self._pinned:
                self._line.pins -= 1
            if owned is not None:
                dead = unpinned(owned)
        if dead is not None:
            registry.destroy_handle(dead)


class BorrowedEach:
    """What `Registry.borrow_each` answers.  Used once."""

    __slots__ = ("_lines", "_owned", "_owners", "_pinned", "_registry")

    def __init__(self, registry: Registry, lines: Iterable[Timeline]) -> None:
        self._registry = registry
        self._lines = lines
        self._pinned: list[Timeline] = []
        self._owned: list[OwnedHandle] = []
        """Streams of ours that are not destroyed meanwhile."""
        self._owners: list[object] = []
        """Foreign objects, held meanwhile."""

    def __enter__(self) -> list[tuple[Timeline, int]]:
        registry = self._registry
        if registry.forked:
            return []
        found: list[tuple[Timeline, int | None, object]] = []
        with registry.lock.checked():
            captures = registry.captures
            for line in self._lines:
                if captures.active and captures.forbids(line):
                    continue
                line.pins += 1
                self._pinned.append(line)
                owner = line.owner
                if isinstance(owner, OwnedHandle):
                    owner.pins += 1
                    self._owned.append(owner)
                    found.append((line, None if owner.closing else owner.handle, None))
                else:
                    self._owners.append(owner)
                    found.append((line, None, owner))
        try:
            handles = []
            for line, handle, owner in found:
                if line.kind is Kind.LEGACY:
                    handle = LEGACY
                elif line.kind is Kind.PER_THREAD:
                    handle = _per_thread(registry, line)
                elif owner is not None:
                    handle = _read(owner)
                if handle is not None:
                    handles.append((line, handle))
            return handles
        except BaseException:
            self._give_back()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()

    def _give_back(self) -> None:
        registry = self._registry
        dead = []
        with registry.lock.checked():
            for line in self._pinned:
                line.pins -= 1
            self._pinned.clear()
            for owned in self._owned:
                handle = unpinned(owned)
                if handle is not None:
                    dead.append(handle)
            self._owned.clear()
        for handle in dead:
            registry.destroy_handle(handle)


def unpinned(owner: OwnedHandle) -> int | None:
    """One thread less is inside a call with the handle; the handle, if it is to be destroyed now.  Under the lock."""
    owner.pins -= 1
    dead: int | None = None
    if owner.closing and not owner.pins:
        dead, owner.handle = owner.handle, None
    return dead


def _per_thread(registry: Registry, line: Timeline) -> int | None:
    """Its handle, in its own thread: in another one it would mean that one's stream (R9)."""
    token = getattr(registry.local, "per_thread", None)
    return PER_THREAD if token is not None and token.line is line else None


def _read(owner: object) -> int | None:
    """The owner's handle, read anew; None for a bare handle, and once the owner has been closed."""
    if owner is None:
        return None
    try:
        handle = handle_of(owner)
    except Exception:  # foreign code: whatever it raises, there is no handle to use
        return None
    return None if is_special(handle) else handle

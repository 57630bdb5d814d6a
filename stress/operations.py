"""What a stress program is made of: operations, which are plain data.

Rule: *an operation can be printed, recorded and played again*.  It names blocks, streams and events by numbers of
the worker (the thread) that runs it; only the shared streams are the same for all.  An operation whose block or
stream is not there, because its allocation failed or was left out, does nothing.

    alloc b12 s3 n4096     block 12 is 4096 bytes, allocated on stream 3

Next: workloads.py (who makes them), contract.py (what a right program may do), player.py (who runs them).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, NamedTuple

from allocator.errors import AllocatorError

OWN: Final = -1
"""As a stream: the one that the block was allocated on."""

LEGACY: Final = -2
"""As a stream: the legacy default stream."""

PRIVATE: Final = 1000
"""Streams from this number on belong to one worker, which opens and ends them; those below are shared."""

VERBS: Final[Mapping[str, str]] = {
    "alloc": "bsn",  # a block of n bytes on a stream
    "use": "bst",  # a kernel of t ns on the stream writes the block
    "read": "bst",  # likewise, reads
    "share": "bs",  # the stream waits for the block's own one, and the block is declared to be used there
    "declare": "bs",  # record_stream
    "free": "b",  # close()
    "free_on": "bs",  # close(stream)
    "drop": "b",  # the last reference goes
    "cycle": "b",  # the last reference goes with a reference cycle, which the garbage collector finds
    "collect": "",  # it looks for some
    "give": "bw",  # into the mailbox of another worker
    "take": "b",  # the oldest of one's own mailbox, if there is any
    "record": "es",  # an event, made at its first record
    "wait": "es",  # the stream waits for it
    "after": "ss",  # the first stream waits for the second
    "open": "s",  # a private stream
    "end": "s",
    "sync": "s",  # the host waits for the stream
    "query": "s",
    "pass": "t",  # virtual time; nothing on a GPU, where it passes by itself
    "stats": "",
    "scrape": "",
    "check": "",
    "trim": "n",  # bytes to keep
    "settle": "",
}
"""Verb -> its operands: b block, s stream, e event, n bytes, t ns, w worker."""

FORMAT: Final = "weir stress 1"
_STREAMS: Final = {"own": OWN, "legacy": LEGACY}
_WORDS: Final = {number: word for word, number in _STREAMS.items()}
_LARGEST: Final = 1 << 62


class Op(NamedTuple):
    """One operation; `a`, `b`, `c` are its operands in the order of `VERBS`.

    >>> str(Op("alloc", 12, 3, 4096)), str(Op("use", 12, OWN, 1000))
    ('alloc b12 s3 n4096', 'use b12 own t1000')
    """

    verb: str
    a: int = 0
    b: int = 0
    c: int = 0

    def __str__(self) -> str:
        words = [self.verb]
        for kind, value in zip(VERBS[self.verb], self[1:], strict=False):
            words.append(_WORDS[value] if kind == "s" and value < 0 else f"{kind}{value}")
        return " ".join(words)


class Step(NamedTuple):
    """An operation and the worker who runs it."""

    worker: int
    op: Op

    def __str__(self) -> str:
        return f"{self.worker} {self.op}"


def parse(text: str) -> Op:
    """The operation that `str` wrote; ValueError says what is wrong.

    >>> parse("share b1 legacy")
    Op(verb='share', a=1, b=-2, c=0)
    """
    verb, *words = text.split()
    kinds = VERBS.get(verb)
    if kinds is None:
        raise ValueError(f"no operation is called {verb[:40]!r}")
    if len(words) != len(kinds):
        raise ValueError(f"{verb} takes {len(kinds)} operands, not {len(words)}")
    values = []
    for kind, word in zip(kinds, words, strict=True):
        if kind == "s" and word in _STREAMS:
            values.append(_STREAMS[word])
        elif re.fullmatch(rf"{kind}[0-9]{{1,19}}", word) and int(word[1:]) <= _LARGEST:
            values.append(int(word[1:]))
        else:
            raise ValueError(f"{verb}: {word[:40]!r} should be {kind} and a number")
    return Op(verb, *values)


class RecordingError(AllocatorError, ValueError):
    """A recording that cannot be read.  One line: the file, the line, what is wrong."""


@dataclass(frozen=True)
class Setting:
    """What a program runs on.

    workers: threads.  streams: shared ones.  limit: of the pool, in bytes; 0 = none.  seed: what made the
    operations, for people.  alone: True if one thread, playing the steps in this order, is enough.
    """

    workers: int
    streams: int
    limit: int
    seed: int = 0
    alone: bool = True

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("streams", 1), ("limit", 0), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= _LARGEST:
                raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}")
        if self.workers > 1024 or self.streams >= PRIVATE:
            raise ValueError(f"at most 1024 workers and {PRIVATE - 1} streams")


@dataclass(frozen=True)
class Recording:
    """A program, and what was wrong when it ran ("" if nothing)."""

    setting: Setting
    steps: tuple[Step, ...]
    wrong: str = ""

    def write(self, path: str | Path) -> None:
        """As text, one step a line.  OSError if it cannot be written."""
        head = {**asdict(self.setting), "wrong": self.wrong}
        lines = [f"# {FORMAT}", f"# {json.dumps(head)}", *map(str, self.steps)]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_recording(path: str | Path) -> Recording:
    """What `Recording.write` wrote.  RecordingError names the line that is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise RecordingError(f"{path}: cannot be read: {reason}") from None
    lines = text.splitlines()
    if len(lines) < 2 or lines[0] != f"# {FORMAT}":
        raise RecordingError(f"{path}, line 1: no recording of weir stress; the first line should be '# {FORMAT}'")
    try:
        head = json.loads(lines[1].removeprefix("# "))
        wrong = str(head.pop("wrong", ""))
        setting = _setting(head)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RecordingError(f"{path}, line 2: {' '.join(str(error).split())[:200]}") from None
    return Recording(setting, tuple(_steps(path, lines[2:], setting)), wrong)


def _setting(head: Mapping[str, Any]) -> Setting:
    known = {field.name for field in fields(Setting)}
    if unknown := set(head) - known:
        raise ValueError(f"unknown setting {sorted(unknown)[0][:40]!r}")
    return Setting(**head)


def _steps(path: str | Path, lines: Iterable[str], setting: Setting) -> Iterable[Step]:
    for number, line in enumerate(lines, 3):
        if not line.strip():
            continue
        worker, _, rest = line.strip().partition(" ")
        try:
            if not (worker.isascii() and worker.isdigit() and int(worker) < setting.workers):
                raise ValueError(f"{worker[:40]!r} is no worker: they are 0 to {setting.workers - 1}")
            if not rest:
                raise ValueError("there is no operation")
            op = parse(rest)
            _check_operands(op, setting)
        except ValueError as error:
            raise RecordingError(f"{path}, line {number}: {error}") from None
        yield Step(int(worker), op)


def _check_operands(op: Op, setting: Setting) -> None:
    for kind, value in zip(VERBS[op.verb], op[1:], strict=False):
        if kind == "w" and value >= setting.workers:
            raise ValueError(f"{op.verb}: w{value} is no worker: they are 0 to {setting.workers - 1}")
        if kind == "s" and setting.streams <= value < PRIVATE:
            raise ValueError(f"{op.verb}: s{value} is no stream: they are 0 to {setting.streams - 1}, or {PRIVATE} on")

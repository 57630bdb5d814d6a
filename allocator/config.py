"""The settings of a pool, each with its unit and default.

A `Config` is frozen: a pool never changes its behaviour behind the user's back (`set_limit` is the one
exception, and is a call).  `Config.from_env()` reads `WEIR_` + the field's name in capitals.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from allocator.sizes import GIB, KIB, MIB, QUANTUM, parse_size

REUSE_KINDS: Final = ("same_stream", "new_memory", "event_dependency", "opportunistic", "internal_dependency")
"""How an allocation was served; the values of the label `reuse`, in the order in which they are tried."""

ALWAYS: Final = frozenset({"same_stream", "new_memory"})
USES: Final = ("auto", "declared", "assumed")
BACKINGS: Final = ("vmm", "malloc")
NOT_FIELDS: Final = frozenset({"WEIR_AUTOINSTALL", "WEIR_COMPILE"})
"""Environment names that start like a field and are not one."""

_SIZES: Final = frozenset(
    {"limit", "max_in_flight", "small_page", "large_page", "small_request", "seal_bytes", "apart_bytes"}
)
_SWITCHES: Final = (
    "detect_captures",
    "context_events",
    "canary",
    "move_pages",
    "release_on_demand",
    "wait_on_demand",
    "collect_on_demand",
)
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of one pool.

    >>> Config(limit=512 << 20).limit
    536870912
    """

    limit: int = 0
    """Bytes.  Reserved memory never grows past it.  0: no limit but the device."""

    backing: str = "vmm"
    """"vmm": virtual memory, which grows and shrinks without stalling the device.  "malloc": plain
    `cuMemAlloc`, for devices without virtual memory and for legacy IPC."""

    reuse: frozenset[str] = field(default=frozenset(REUSE_KINDS))
    """The kinds of reuse allowed, of `REUSE_KINDS`.  "same_stream" and "new_memory" always are."""

    max_in_flight: int = 0
    """Bytes.  Above it, poll and wait (at most `wait_timeout`) before growing (R13).  0: no bound."""

    uses: str = "auto"
    """Which uses of a block gate its reuse (R3).  "declared": the owner, `record_stream`, and the stream a
    free names.  "assumed": also every other stream seen, unless the owner takes the block back.
    "auto": what the library that asks is written for."""

    small_page: int = 2 * MIB
    """Bytes.  The piece of memory taken from the driver for small requests."""

    large_page: int = 2 * MIB
    """Bytes.  The least piece taken from the driver for a large request; a larger one gets a segment of
    its own size, rounded up to the driver's 2 MiB."""

    small_request: int = 256 * KIB
    """Bytes.  Requests up to this size are small: they share `small_page` pieces, apart from large ones."""

    apart_bytes: int = 32 * MIB
    """Bytes.  Where small memory passes from stream to stream at request after request, as much as this in all is taken
    from the driver beyond what must be, so that it need not.  0: never."""

    fit_slack: int = 5
    """Percent.  A large request that nothing fits exactly takes the lowest address among the blocks at most this
    much larger than the best fit, which keeps large holes whole.  0: strict best fit."""

    seal_frees: int = 64
    """Frees.  Once a second stream frees memory, events are recorded at least this many frees apart (R13)."""

    seal_bytes: int = 1 * GIB
    """Bytes freed after which events are recorded even before `seal_frees` frees."""

    wait_timeout: float = 1.0
    """Seconds.  The longest the host waits for memory in flight before it goes on to the next step."""

    detect_captures: bool = False
    """Ask the driver at every allocation whether the stream is capturing (about 0.6 us each)."""

    context_events: bool | None = None
    """Whether `cuCtxRecordEvent`, one event for all streams, may be used.  It kills every graph capture of the context
    (R6).  None: where every library in the process that can capture reports its captures to this package, as CuPy
    does after `allocator.cupy.install()` while no other such library is loaded.  True: always, for programs in which
    nothing captures.  False: never."""

    canary: bool = False
    """Checked mode: memory that nobody has is filled with a pattern and verified before it serves again, so that a
    write after the free is found.  Slower, and reuses memory only once all its work is over: docs/checked-mode.md."""

    move_pages: bool = True
    """Step 7 of the ladder: idle pages may be moved together.  This version never moves a page."""

    release_on_demand: bool = True
    """Step 8 of the ladder: release idle memory when growing is impossible."""

    wait_on_demand: bool = True
    """Step 9 of the ladder: wait on the host, at most `wait_timeout`, for memory in flight."""

    collect_on_demand: bool = True
    """Step 10 of the ladder: out-of-memory callbacks, then `gc.collect()`."""

    def __post_init__(self) -> None:
        if isinstance(self.reuse, str):
            raise ValueError(f"reuse must be a set of kinds, not the text {self.reuse!r}")
        object.__setattr__(self, "reuse", frozenset(self.reuse) | ALWAYS)
        unknown = self.reuse - set(REUSE_KINDS)
        if unknown:
            raise ValueError(f"unknown kind of reuse {sorted(unknown)[0]!r}; known: {', '.join(REUSE_KINDS)}")
        _one_of("uses", self.uses, USES)
        _one_of("backing", self.backing, BACKINGS)
        for name in (*sorted(_SIZES), "seal_frees"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        for name in ("small_page", "large_page"):
            value = getattr(self, name)
            if value < 2 * MIB or value % (2 * MIB):
                raise ValueError(f"{name} must be a multiple of 2 MiB, the driver's granularity, got {value}")
        if self.small_request < QUANTUM or self.small_request > self.small_page:
            raise ValueError(f"small_request must lie between {QUANTUM} and small_page, got {self.small_request}")
        if not isinstance(self.fit_slack, int) or not 0 <= self.fit_slack <= 100:
            raise ValueError(f"fit_slack must be a whole number of percent between 0 and 100, got {self.fit_slack!r}")
        for name in _SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "context_events"):
                raise TypeError(f"{name} must be True or False, not {value!r}")
        if self.seal_frees < 1 or self.seal_bytes < 1:
            raise ValueError("seal_frees and seal_bytes must be at least 1")
        if isinstance(self.wait_timeout, bool) or not isinstance(self.wait_timeout, (int, float)):
            raise TypeError(f"wait_timeout must be a number of seconds, not {type(self.wait_timeout).__name__}")
        if not 0 <= self.wait_timeout <= 3600:
            raise ValueError(f"wait_timeout must lie between 0 and 3600 seconds, got {self.wait_timeout}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, *, device_memory: int | None = None) -> Config:
        """The configuration that `WEIR_*` variables ask for.

        Sizes are digits with optional KiB, MiB, GiB, TiB, or `%` of the device where `device_memory`
        (bytes) is given; sets are comma-separated.  ValueError names the variable that is wrong or unknown.

        >>> Config.from_env({"WEIR_LIMIT": "1GiB", "WEIR_REUSE": "opportunistic"}).limit
        1073741824
        """
        environ = os.environ if environ is None else environ
        known = {f"WEIR_{f.name.upper()}": f for f in fields(cls)}
        values: dict[str, Any] = {}
        for name, text in environ.items():
            if not name.startswith("WEIR_") or name in NOT_FIELDS:
                continue
            if name not in known:
                raise ValueError(f"unknown setting {name} in the environment; known: {', '.join(sorted(known))}")
            f = known[name]
            try:
                values[f.name] = _parse(
                    f.name, f.type if isinstance(f.type, str) else f.type.__name__, text, device_memory
                )
            except ValueError as error:
                raise ValueError(f"{name}={text!r}: {error}") from None
        try:
            return cls(**values)
        except (ValueError, TypeError) as error:
            raise ValueError(f"the WEIR_ settings in the environment do not fit together: {error}") from None


def _one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def _parse(name: str, kind: str, text: str, device_memory: int | None) -> object:
    text = text.strip()
    if name in _SIZES:
        return parse_size(text, whole=device_memory)
    if kind == "bool | None" and text.lower() == "none":
        return None
    if kind.startswith("bool"):
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise ValueError("write 1 or 0")
    if kind == "int":
        return int(text)
    if kind == "float":
        return float(text)
    if kind.startswith("frozenset"):
        return frozenset(part.strip() for part in text.split(",") if part.strip())
    return text

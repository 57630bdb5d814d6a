"""A whole run: which stages there are on this machine, in which order, and what is told while it lasts.

    first   everything, with nothing in the process but CuPy
    then    on a GPU, with the guests loaded (guests.py), those benchmarks again in which they take part

Next: runner.py; allocator/cli/bench.py, which is all this on the command line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from allocator import CudaDevice, SimDevice
from allocator.devices import Device
from allocator.stress.benchmarks import acceptance, machine, picture, report
from allocator.stress.benchmarks.cases import GUESTS, PEERS, Benchmark, Door, Missing, Settings, Stage
from allocator.stress.benchmarks.core import CoreDoor
from allocator.stress.benchmarks.guests import GuestDoor
from allocator.stress.benchmarks.hooks import import_cupy, open_hook_door
from allocator.stress.benchmarks.registry import BENCHMARKS, chosen
from allocator.stress.benchmarks.runner import Measured, Results, run, told_as
from allocator.stress.benchmarks.ticker import Ticker

MEMORY: Final = 1 << 36
"""Bytes of the simulated device."""


def open_device(ordinal: int | None) -> Device:
    """The simulator for None.  Raises what `CudaDevice` raises."""
    if ordinal is None:
        return SimDevice(memory=MEMORY)
    device: Device = CudaDevice(ordinal)
    return device


def stages(device: Device, settings: Settings) -> Iterator[Stage]:
    """One after the other: the second one's libraries are loaded when it is asked for."""
    left_out: dict[str, str] = {}
    doors: list[Door] = [CoreDoor(device, settings)]
    try:
        doors.append(open_hook_door(device, settings, left_out))
    except Missing as error:
        left_out |= {name: str(error) for name in ("cupy", "cupy-async", *GUESTS) if settings.wants(name)}
    if device.simulated:
        for name in ("cupy", "cupy-async", *GUESTS):
            if settings.wants(name):
                left_out.setdefault(name, "needs a GPU")
    yield Stage(device, settings, doors, left_out=left_out)
    if len(doors) == 1 or device.simulated or not any(settings.wants(name) for name in GUESTS):
        return
    beside = GuestDoor(device, settings, import_cupy(), left_out)
    yield Stage(device, settings, [beside], guests=True, left_out=beside.left_out)


class Session:
    """One run.  ordinal: of a GPU; None for the simulator.  Raises ValueError for an unknown name."""

    def __init__(self, names: Sequence[str], settings: Settings, ordinal: int | None = None) -> None:
        for peer in settings.peers:
            if peer not in PEERS:
                raise ValueError(f"unknown peer {peer!r}; known: {', '.join(PEERS)}")
        self.benchmarks: Sequence[Benchmark] = chosen(names)
        self._settings = settings
        self._device = open_device(ordinal)
        self._simulated = self._device.simulated
        self.about: dict[str, Any] = machine.about(self._device)
        self.results = Results()

    @classmethod
    def read(cls, paths: Sequence[str]) -> Session:
        """What earlier runs have written, put together: of a case that several have, the last one's figures.

        ValueError where a file is none of ours, or from another machine or another Weir; OSError names the file.
        """
        session = cls.__new__(cls)
        session.benchmarks, session.results = [], Results()
        cases: dict[tuple[object, ...], Measured] = {}
        first: dict[str, Any] = {}
        for path in paths:
            document = _load(path)
            first = first or document
            for key in ("weir", "build"):
                if document[key] != first[key]:
                    raise ValueError(f"{path}: {key} is {document[key]!r}, and {first[key]!r} in {paths[0]}")
            for key in ("processor", "device_label", "device"):
                if document["hardware"][key] != first["hardware"][key]:
                    raise ValueError(f"{path}: is from another machine than {paths[0]}, by its {key}")
            for one in report.read(document):
                cases[one.benchmark, one.case, one.door, one.guests] = one
                session.results.failed.pop(told_as(one.benchmark, one.guests), None)  # an earlier run's
                session.results.skipped.pop(one.benchmark, None)
            for name in ("left_out", "skipped", "failed"):
                getattr(session.results, name).update(document[name])
        session.results.measured.extend(cases.values())
        session.about = {key: first[key] for key in ("date", "weir", "build", "hardware", "versions")}
        settings = dict(first["settings"])
        session._settings = Settings(settings["repeats"], settings["seconds"], settings["quick"])
        session.benchmarks = [BENCHMARKS[name] for name in {one.benchmark: 0 for one in cases.values()}]
        session._simulated = str(first["hardware"]["device_label"]).startswith("sim")
        return session

    headline: Final = report.HEADLINE
    needed_for_table: Final = acceptance.NEEDED

    @staticmethod
    def listed() -> str:
        """All benchmarks and peers."""
        width = max(map(len, (*BENCHMARKS, *PEERS)))
        rows = ["benchmarks (* runs where none is named):"]
        for one in BENCHMARKS.values():
            needs = f"; needs {' and '.join(one.needs)}" if one.needs else ""
            rows.append(f"  {'*' if one.usual else ' '} {one.name:{width}}  {one.about}{needs}")
        return "\n".join([*rows, "", "peers:", *(f"    {name:{width}}  {text}" for name, text in PEERS.items())])

    def run_and_tell(self, tell: Callable[[str], object], json_path: str | None = None) -> None:
        """Measure, with what is under way on stderr; each case is told when it is ready, and the file kept up to date.

        OSError where the file cannot be written, before anything is measured.
        """
        if json_path is not None:
            self.write_json(json_path)
        ticker = Ticker()

        def done(measured: Measured) -> None:
            ticker.wipe()
            tell(self.text(measured))
            if json_path is not None:
                self.write_json(json_path)

        try:
            self.run(ticker, done)
        finally:
            ticker.wipe()

    def run(
        self, say: Callable[[str], object] = lambda text: None, done: Callable[[Measured], object] = lambda one: None
    ) -> Results:
        """Measure.  say: what is under way.  done: each case as it is ready."""
        if self._simulated:
            for one in self.benchmarks:  # each on a device of its own, on which no streams of others have been seen
                run([one], stages(open_device(None), self._settings), self.results, say, done)
        else:
            run(self.benchmarks, stages(self._device, self._settings), self.results, say, done)
        return self.results

    @property
    def failed(self) -> bool:
        """Has a benchmark failed, or a contender?"""
        return bool(self.results.failed) or any(one.failed for one in self.results.measured)

    @property
    def sentence(self) -> str:
        """Where and with what, in one line."""
        return machine.sentence(self.about)

    def rows(self) -> list[acceptance.Row]:
        """The aims."""
        return acceptance.table(self.results.measured, self.about["build"], simulated=self._simulated)

    def table(self) -> str:
        """The aims, a line each."""
        return report.acceptance_table(self.rows(), self.about["build"])

    def text(self, measured: Measured) -> str:
        """One case for people."""
        return "\n".join([*([measured.text] if measured.text else []), *report.lines(measured)])

    def missing(self) -> str:
        """What was not measured, and why."""
        return "\n".join(report.missing(self.results))

    def document(self) -> dict[str, Any]:
        """Everything, for JSON."""
        settings = {
            "repeats": self._settings.repeats,
            "seconds": self._settings.seconds,
            "quick": self._settings.quick,
            "peers": list(self._settings.peers) or list(PEERS),
            "benchmarks": [one.name for one in self.benchmarks],
        }
        return report.as_json(self.about, settings, self.results, self.rows())

    def write_json(self, path: str) -> None:
        """`document` as a file, whole or not at all.  OSError names the file."""
        try:
            beside = Path(f"{path}.part")
            beside.write_text(report.json_text(self.document()), encoding="utf-8")
            beside.replace(path)
        except OSError as error:
            raise OSError(f"{path}: {error.strerror or error}") from error

    def draw(self, path: str) -> None:
        """One picture of all ratios, .svg or .png.  OSError names the file."""
        title = f"Weir and its peers, {self.about['hardware']['device']}, {self.about['build']} build"
        picture.write(path, title, self.sentence, self.results.measured)


def _load(path: str) -> dict[str, Any]:
    """A document with the parts that are looked at."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OSError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    parts = ("date", "weir", "build", "hardware", "versions", "settings", "results", "left_out", "skipped", "failed")
    if not isinstance(document, dict) or any(part not in document for part in parts):
        raise ValueError(f"{path}: not the JSON of weir bench")
    return document

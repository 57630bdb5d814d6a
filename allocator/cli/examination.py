"""What `weir doctor` looks at: the installation, the GPUs, the settings.  Each finding is one sentence.

Rule: *nothing is imported that may not be there or may fail badly*: versions come from the installed packages' own
records, and only this package's device opens the driver.  Whatever goes wrong is a finding, never an exception.
Next: doctor.py, which shows them.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Final

import allocator
from allocator.caching import CachingAllocator
from allocator.config import NOT_FIELDS, Config
from allocator.devices import CudaDevice, Device, SimDevice
from allocator.gil import COMPILED
from allocator.sizes import MIB, format_size

OK: Final = "ok"
NOTE: Final = "note"
"""Good to know; nothing is wrong."""
MISSING: Final = "missing"
"""Not there, and not needed for what is."""
WRONG: Final = "wrong"
"""To be put right: the exit status is 1."""


@dataclass(frozen=True)
class Finding:
    """topic: installed, gpu, settings, check.  name: what it is about.  value: a version, number, setting or None."""

    topic: str
    name: str
    state: str
    text: str
    value: str | None = None


@dataclass(frozen=True)
class Package:
    """A library, under the names of its distributions, and what it would be good for here."""

    name: str
    distributions: tuple[str, ...]
    purpose: str
    install: str
    needed: bool = False


CUPY: Final = Package(
    "CuPy",
    ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy", "cupy-rocm-7-0", "cupy-rocm-5-0"),
    "allocator.cupy.install() and weir run",
    '"weir-allocator[cupy]"',
)
PACKAGES: Final = (
    Package("sortedcontainers", ("sortedcontainers",), "the index of free memory", "sortedcontainers", needed=True),
    Package("prometheus-client", ("prometheus-client",), "allocator.metrics", "prometheus-client", needed=True),
    Package("cuda-bindings", ("cuda-bindings",), "every GPU", '"weir-allocator[cuda]"'),
    CUPY,
    Package("PyTorch", ("torch",), "streams of PyTorch as arguments", "torch"),
    Package("RMM", ("rmm-cu13", "rmm-cu12", "rmm"), "streams of RMM as arguments", "rmm-cu13"),
    Package("cuda.core", ("cuda-core",), "streams of cuda.core as arguments", "cuda-core"),
    Package("numba-cuda", ("numba-cuda",), "streams of Numba as arguments", "numba-cuda"),
    Package("bokeh", ("bokeh",), "the live page of weir serve", '"weir-allocator[dashboard]"'),
    Package("locust", ("locust",), "load tests with users of locust", '"weir-allocator[stress]"'),
)


def examine(environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Everything, in the order in which it is shown.  Driver calls: see `gpus`."""
    environ = os.environ if environ is None else environ
    found = list(guarded("installed", installed))
    devices: list[CudaDevice] = []
    found += guarded("gpu", lambda: gpus(devices, environ))
    found += guarded("settings", lambda: settings(environ, devices))
    found += guarded("check", lambda: fits(devices))
    found += guarded("check", lambda: trials(devices, environ))
    return found


def guarded(topic: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Whatever a look runs into is one more finding."""
    try:
        yield from look()
    except Exception as error:
        yield Finding(topic, "doctor", WRONG, f"This part of the examination failed: {said(error)}.")


def said(error: BaseException) -> str:
    """An error in one line, without its last full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


# -- installed ------------------------------------------------------------------------------------------


def installed() -> Iterator[Finding]:
    """Python, Weir, and the libraries that it works with."""
    python = platform.python_version()
    yield Finding("installed", "Python", OK, f"Python {python} at {sys.executable}.", python)
    where = Path(allocator.__file__).parent
    recorded = version_of("weir-allocator")
    if recorded is None:
        text = f"Weir {allocator.__version__} in {where}, not installed as a package: pip install -e . in its checkout."
        yield Finding("installed", "Weir", NOTE, text, allocator.__version__)
    elif recorded != allocator.__version__:
        text = f"Weir {allocator.__version__} in {where} is installed as {recorded}: pip install it once more."
        yield Finding("installed", "Weir", WRONG, text, allocator.__version__)
    else:
        yield Finding("installed", "Weir", OK, f"Weir {recorded} in {where}.", recorded)
    if COMPILED:
        yield Finding("installed", "hot path", OK, "The hot path is compiled.", "compiled")
    else:
        text = (
            "The hot path runs as source, at half the speed or less: an editable install always does; else install a C "
            "compiler and Python's headers, then pip install --force-reinstall --no-cache-dir weir-allocator."
        )
        yield Finding("installed", "hot path", NOTE, text, "source")
    for package in PACKAGES:
        yield look_for(package)


def look_for(package: Package) -> Finding:
    """Is the library there, once?"""
    there = {name: version for name in package.distributions if (version := version_of(name)) is not None}
    if not there:
        text = f"{package.name} is not installed; it is for {package.purpose}: pip install {package.install}."
        return Finding("installed", package.name, WRONG if package.needed else MISSING, text)
    names = " and ".join(there)
    value = ", ".join(there.values())
    if len(there) > 1:
        text = (
            f"{package.name} is installed {len(there)} times, as {names}, which overwrite each other: "
            f"pip uninstall {' '.join(there)}, then install one."
        )
        return Finding("installed", package.name, WRONG, text, value)
    shown = f"{package.name} {value}" if names.lower() == package.name.lower() else f"{package.name} {value} ({names})"
    return Finding("installed", package.name, OK, f"{shown}, for {package.purpose}.", value)


def version_of(distribution: str) -> str | None:
    """The version that is on record; None if there is none.  Nothing is imported."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


# -- GPUs -----------------------------------------------------------------------------------------------


def gpus(devices: list[CudaDevice], environ: Mapping[str, str]) -> Iterator[Finding]:
    """What each GPU can do; those found are added to `devices`.

    Driver calls: those of `CudaDevice`, and questions about devices.  No context is made.
    """
    try:
        first = CudaDevice(0)
        count = first.device_count()
    except Exception as error:
        yield without(error, environ)
        return
    major, minor = first.driver_version
    kernel = kernel_driver()
    text = f"The driver{f' {kernel}' if kernel else ''} is for CUDA {major}.{minor}; Weir needs 12.0 or newer."
    yield Finding("gpu", "driver", OK, text, f"{major}.{minor}")
    for ordinal in range(count):
        try:
            device = CudaDevice(ordinal)
            devices.append(device)
            yield from abilities(device)
        except Exception as error:
            yield Finding("gpu", f"GPU {ordinal}", WRONG, f"GPU {ordinal} does not answer: {said(error)}.")
    for device in devices:
        others = [str(other.ordinal) for other in devices if other is not device and device.reaches(other)]
        if len(devices) > 1:
            text = f"reads memory of GPU {', '.join(others)}" if others else "reads no other GPU's memory"
            yield Finding("gpu", f"GPU {device.ordinal}", OK, f"GPU {device.ordinal} {text}.", ", ".join(others))


def without(error: Exception, environ: Mapping[str, str]) -> Finding:
    """No device: is that as it should be?"""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if not hardware():
        text = f"No GPU here ({said(error)}); the simulator works without one: weir replay."
        return Finding("gpu", "GPU", NOTE, text)
    if visible is not None and visible.strip() in ("", "-1"):
        text = f"The GPUs are hidden by CUDA_VISIBLE_DEVICES={visible!r}: unset it to use them."
        return Finding("gpu", "GPU", NOTE, text)
    return Finding("gpu", "GPU", WRONG, f"There is a GPU, and Weir cannot use it: {said(error)}.")


def hardware(nodes: Path = Path("/dev")) -> bool:
    """Does the system show an NVIDIA GPU, or WSL's, whatever the driver says?"""
    try:
        return any(nodes.glob("nvidia[0-9]*")) or (nodes / "dxg").exists()
    except OSError:
        return False


def kernel_driver(record: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The driver's own version, such as 580.159.03; None where it is not told."""
    try:
        match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", record.read_text(errors="replace"))
    except OSError:
        return None
    return match[1] if match else None


def abilities(device: CudaDevice) -> Iterator[Finding]:
    """Name, memory, virtual memory, context events, IPC."""
    name = f"GPU {device.ordinal}"
    text = f"{name} is a {device.name} with {format_size(device.total_memory)}."
    yield Finding("gpu", name, OK, text, device.name)
    if device.supports_virtual_memory:
        text = f"{name} has virtual memory management; legacy IPC (cudaIpcGetMemHandle) needs WEIR_BACKING=malloc."
        yield Finding("gpu", f"{name} virtual memory", OK, text, "yes")
    else:
        text = f"{name} has no virtual memory management: set WEIR_BACKING=malloc, with which legacy IPC works."
        yield Finding("gpu", f"{name} virtual memory", NOTE, text, "no")
    if device.supports_context_events:
        text = f"{name} has context events, one mark for all streams."
        yield Finding("gpu", f"{name} context events", OK, text, "yes")
    else:
        text = f"{name} has no context events; a driver for CUDA 12.5 and cuda-bindings 12.5 or newer have them."
        yield Finding("gpu", f"{name} context events", NOTE, text, "no")


# -- settings -------------------------------------------------------------------------------------------


def settings(environ: Mapping[str, str], devices: list[CudaDevice]) -> Iterator[Finding]:
    """Every variable that Weir reads, and what is wrong with it."""
    memory = devices[0].total_memory if devices else SimDevice().total_memory
    names = sorted(name for name in environ if name.startswith("WEIR_"))
    known = {f"WEIR_{field.name.upper()}" for field in fields(Config)} | NOT_FIELDS
    together = why_not({name: environ[name] for name in names if name in known}, memory)
    explained = False
    for name in names:
        value = environ[name]
        # One that is wrong by itself may be right beside the others.
        alone = why_not({name: value}, memory) if together is not None else None
        if name not in known:
            yield Finding("settings", name, WRONG, unknown(name, known), value)
        elif alone is not None:
            explained = True
            yield Finding("settings", name, WRONG, f"{name}={value!r}: {alone}: correct it, or unset it.", value)
        elif name == "WEIR_AUTOINSTALL" and look_for(CUPY).state == MISSING:
            text = f"{name}={value} does nothing without CuPy: pip install {CUPY.install}."
            yield Finding("settings", name, NOTE, text, value)
        else:
            yield Finding("settings", name, OK, f"{name}={value} applies{meaning(name, value)}.", value)
    if together is not None and not explained:
        yield Finding("settings", "WEIR_*", WRONG, f"The WEIR_ settings do not fit together: {together}.")
    if not names:
        yield Finding("settings", "WEIR_*", OK, "No WEIR_ variable is set: the defaults apply.")
    yield from limit_of_cupy(environ)
    if "PROMETHEUS_MULTIPROC_DIR" in environ:
        text = (
            "PROMETHEUS_MULTIPROC_DIR is set: metrics need one port a process, register(pool, registry, own_port=True)."
        )
        yield Finding("settings", "PROMETHEUS_MULTIPROC_DIR", NOTE, text, environ["PROMETHEUS_MULTIPROC_DIR"])


def why_not(variables: Mapping[str, str], memory: int) -> str | None:
    """What a pool has against these variables; None if nothing."""
    try:
        Config.from_env(variables, device_memory=memory)
    except ValueError as error:
        return said(error).rpartition("together: ")[2].removeprefix(f"{next(iter(variables))}=").rpartition("': ")[2]
    return None


def unknown(name: str, known: frozenset[str] | set[str]) -> str:
    """A name nobody reads, and the one that was probably meant."""
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    return (
        f"{name} is no setting, and every pool refuses it: unset it{f', or did you mean {near[0]}?' if near else '.'}"
    )


def meaning(name: str, value: str) -> str:
    """What a setting does, where its name does not say it."""
    if name == "WEIR_CANARY" and Config.from_env({name: value}).canary:
        return ": freed memory is filled and verified, which is slower"
    return ""


def limit_of_cupy(environ: Mapping[str, str]) -> Iterator[Finding]:
    """CuPy's own limit, which its users keep."""
    name = "CUPY_GPU_MEMORY_LIMIT"
    text = environ.get(name)
    if not text:
        return
    try:
        good = 0 <= float(text[:-1]) <= 100 if text.endswith("%") else int(text) >= 0
    except ValueError:
        good = False
    if not good:
        yield Finding("settings", name, WRONG, f"{name}={text} is neither bytes nor a percentage such as 50%.", text)
    elif "WEIR_LIMIT" in environ:
        yield Finding("settings", name, NOTE, f"{name}={text} is overruled by WEIR_LIMIT.", text)
    else:
        yield Finding("settings", name, OK, f"{name}={text} applies to arrays of CuPy.", text)


# -- do the parts fit together? -----------------------------------------------------------------------------


def fits(devices: list[CudaDevice]) -> Iterator[Finding]:
    """Packages for a newer CUDA than the driver's do not work."""
    if not devices:
        return
    driver = devices[0].driver_version
    cupy = next((name for name in ("cupy-cuda13x", "cupy-cuda12x") if version_of(name) is not None), None)
    for name, major in (
        ("cuda-bindings", major_of(version_of("cuda-bindings"))),
        (cupy, int(cupy[9:11]) if cupy else None),
    ):
        if name is None or major is None or major <= driver[0]:
            continue
        other = '"weir-allocator[cuda12]"' if name == "cuda-bindings" else '"weir-allocator[cupy12]"'
        text = (
            f"{name} is for CUDA {major}, the driver for CUDA {driver[0]}.{driver[1]}: "
            f"update the driver, or pip uninstall {name} and pip install {other}."
        )
        yield Finding("check", name, WRONG, text, str(major))


def major_of(version: str | None) -> int | None:
    """13 of "13.5.0"."""
    match = re.match(r"\d+", version or "")
    return int(match[0]) if match else None


def trials(devices: list[CudaDevice], environ: Mapping[str, str]) -> Iterator[Finding]:
    """A pool on the simulator, and one on each GPU: allocate, free, give back.

    Driver calls on a GPU: those of a small allocation, which make the process's context.
    """
    everywhere: list[Device] = [SimDevice(), *devices]
    for device in everywhere:
        name = "simulator" if device.simulated else f"GPU {device.ordinal}"
        try:
            try:
                config = Config.from_env(environ, device_memory=device.total_memory)
            except ValueError:  # told already
                config = Config()
            with CachingAllocator(device, config=config, name="doctor") as pool:
                pool.allocate(MIB).close()
                pool.settle()
                pool.check()
                reserved = pool.stats().reserved_bytes
                given = pool.trim()
            if given != reserved:
                raise RuntimeError(f"{reserved - given} bytes did not go back")
        except Exception as error:
            yield Finding("check", name, WRONG, f"A small allocation on the {name} failed: {said(error)}.")
        else:
            yield Finding("check", name, OK, f"A small allocation on the {name} came, was freed, and went back.")

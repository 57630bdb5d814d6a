"""Where and with what a benchmark ran: hardware, versions, date, and whether Weir runs compiled.

Rule: versions come from the installed packages' records; nothing is imported for them.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import allocator
from allocator.devices import Device
from allocator.gil import COMPILED
from allocator.sizes import format_size

PACKAGES: Final = (
    "cupy-cuda13x", "cupy-cuda12x", "cupy", "cuda-bindings", "cuda-core", "rmm-cu13", "rmm-cu12", "torch", "numpy",
    "sortedcontainers",
)  # fmt: skip


def build() -> str:
    """ "compiled" or "plain": which kind of Weir runs here."""
    told: Any = getattr(allocator, "build_info", None)
    told = told() if callable(told) else told
    if isinstance(told, Mapping):
        told = told.get("compiled", told.get("accelerated"))
    if told is None:
        told = getattr(allocator, "COMPILED", COMPILED)
    return "compiled" if str(told).lower() in ("true", "1", "yes", "compiled", "mypyc") else "plain"


def about(device: Device) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "weir": allocator.__version__,
        "build": build(),
        "hardware": hardware(device),
        "versions": versions(),
    }


def hardware(device: Device) -> dict[str, Any]:
    """Processor, cores, load, and the device."""
    version = getattr(device, "driver_version", None)
    return {
        "processor": processor(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "device": device.name,
        "device_label": device.label,
        "device_memory": device.total_memory,
        "driver": ".".join(map(str, version)) if isinstance(version, tuple) else None,
    }


def processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, as far as the system tells."""
    try:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Python, the system, and what is installed of the libraries that take part."""
    found = {"python": platform.python_version(), "system": platform.platform(terse=True)}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def sentence(told: Mapping[str, Any]) -> str:
    """One line for people."""
    hard, found = told["hardware"], told["versions"]
    cupy = next((f", CuPy {found[name]}" for name in found if name.startswith("cupy")), "")
    return (
        f"Weir {told['weir']} ({told['build']}), Python {found['python']}{cupy}; {hard['device']} with "
        f"{format_size(hard['device_memory'])}, {hard['processor']}, {hard['cores']} cores, load {hard['load']:.1f}; "
        f"{told['date'][:10]}"
    )

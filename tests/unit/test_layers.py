"""Lower never imports higher: every import of every module, against the list of layers.

Rule: the table below is the architecture.  `blocks | streams` share a layer and never meet; packages
use each other's front (`__init__`) only; one package may import the driver's bindings.
Arguments: CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LAYERS: dict[str, int] = {
    **dict.fromkeys(("errors", "config", "sizes", "stats", "resource", "allocation", "sync", "collector", "gil"), 0),
    "devices": 1,
    "events": 2,
    "blocks": 3,
    "streams": 3,
    "caching": 4,
    "integrations": 5,
    "traces": 5,
    "metrics": 6,
    "stress": 7,
    "cli": 8,
}
# allocator/<name>.py is the public name of one integration, and does nothing but re-export it.
FACES = {"cupy": "allocator.integrations.cupy"}
LAYERS |= dict.fromkeys(FACES, LAYERS["integrations"])
# Within layer 0 the modules are one group and may use each other; everything else that shares a layer may not.
FACE = "allocator"  # allocator/__init__.py re-exports from everywhere, and nothing below the integrations uses it
FACE_FROM = 5
DRIVER = "cuda.bindings"
TOP_LEVEL = {"metrics", "stress", "tests"}


def module_names() -> dict[str, Path]:
    """Every module under the name it is imported by."""
    found = {}
    for folder, prefix in (
        ("allocator", "allocator"),
        ("metrics", "allocator.metrics"),
        ("stress", "allocator.stress"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT / folder)
            if folder == "allocator" and relative.parts[0] in ("metrics", "stress"):
                continue  # links, on a Python that follows them
            parts = [prefix, *relative.with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts)] = path
    return found


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str, list[str]]]:
    """(line, module imported from, names taken) of each import statement, relative ones resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, []
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                package = package[: len(package) - (node.level - 1)]
                base = ".".join([*package, *([node.module] if node.module else [])])
            yield node.lineno, base, [alias.name for alias in node.names]


def package_of(module: str) -> str | None:
    """ "caching" for "allocator.caching.ladder"; None for the face and for foreign modules."""
    parts = module.split(".")
    return parts[1] if parts[0] == "allocator" and len(parts) > 1 else None


def violations(source: str, module: str, *, is_package: bool = False, known: frozenset[str] = frozenset()) -> list[str]:
    """What `source`, imported as `module`, imports against the rules; `known` are the existing modules."""
    wrong = []
    own = package_of(module)
    leaf = module.rsplit(".", 1)[-1]
    for line, target, names in imports(source, module, is_package):

        def bad(why: str, line: int = line, target: str = target) -> None:
            wrong.append(f"{module}:{line}: imports {target}: {why}")

        if target.split(".")[0] in TOP_LEVEL:
            bad("not an import name; write allocator.metrics, allocator.stress")
        full = [target, *(f"{target}.{name}" for name in names)]
        if any(name == DRIVER or name.startswith(f"{DRIVER}.") for name in full) and own != "devices":
            bad("only allocator/devices opens the door to the driver")
        if target.split(".")[0] != "allocator":
            continue
        if own == "devices" and leaf == "oracle":
            bad("the oracle judges the allocator, and shares nothing with it")
        if own is None:
            continue  # the face re-exports anything
        if own not in LAYERS:
            bad(f"{own} has no layer; add it to the list")
            continue
        if own in FACES:
            if target != FACES[own]:
                bad(f"{module} re-exports {FACES[own]} and does nothing else")
            continue
        # `from allocator import caching` and `from allocator.caching import ladder` name modules too.
        reached = {name for name in full if name in known or name == target} - {FACE}
        taken_from_face = target == FACE and any(f"{FACE}.{n}" not in known for n in names)
        if (taken_from_face or (target == FACE and not names)) and LAYERS[own] < FACE_FROM:
            bad("the face imports this module; take the name from where it is made")
        for name in sorted(reached):
            other = package_of(name)
            if other is None or other == own:
                continue
            if other not in LAYERS:
                bad(f"{other} has no layer; add it to the list")
            elif LAYERS[other] > LAYERS[own]:
                bad(f"layer {LAYERS[own]} ({own}) must not import layer {LAYERS[other]} ({other})")
            elif LAYERS[other] == LAYERS[own] and LAYERS[own] != 0:
                bad(f"{own} and {other} share a layer and never meet")
            if name.count(".") > 1 and other in LAYERS and LAYERS[other] != 0:
                bad(f"another package is used by its front only: from allocator.{other} import ...")
    return wrong


def test_a_face_re_exports_its_integration_and_nothing_else() -> None:
    assert violations("from allocator.integrations.cupy import install", "allocator.cupy") == []
    assert violations("from allocator.caching import CachingAllocator", "allocator.cupy")


def test_every_import_obeys_the_layers() -> None:
    modules = module_names()
    known = frozenset(modules)
    wrong = [
        problem
        for name, path in modules.items()
        for problem in violations(path.read_text(), name, is_package=path.name == "__init__.py", known=known)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_is_in_a_layer() -> None:
    packages = {package_of(name) for name in module_names()} - {None}
    assert packages <= set(LAYERS), packages - set(LAYERS)


KNOWN = frozenset(
    {"allocator", "allocator.caching", "allocator.caching.ladder", "allocator.errors", "allocator.streams"}
)


@pytest.mark.parametrize(
    ("module", "source", "why"),
    [
        ("allocator.blocks.heap", "from allocator.caching import ladder", "layer 3"),
        ("allocator.blocks.heap", "from allocator import caching", "layer 3"),
        ("allocator.blocks.heap", "import allocator.caching", "layer 3"),
        ("allocator.blocks.heap", "from ..caching import CachingAllocator", "layer 3"),
        ("allocator.blocks.heap", "from allocator.streams import Stream", "never meet"),
        ("allocator.streams.stream", "def f():\n    from allocator.blocks import Block", "never meet"),
        ("allocator.traces.replay", "from allocator.caching.pool import CachingAllocator", "front only"),
        ("allocator.traces.replay", "from allocator.caching import ladder", "front only"),
        ("allocator.traces.replay", "from allocator.integrations import cupy", "never meet"),
        ("allocator.errors", "from allocator.devices import Device", "layer 0"),
        ("allocator.caching.pool", "from allocator import CachingAllocator", "the face"),
        ("allocator.caching.pool", "import allocator", "the face"),
        ("allocator.caching.pool", "from cuda.bindings import driver", "the driver"),
        ("allocator.caching.pool", "import cuda.bindings.driver", "the driver"),
        ("allocator.caching.pool", "from cuda import bindings", "the driver"),
        ("allocator.devices.sim.oracle", "from allocator.errors import AllocatorError", "the oracle"),
        ("allocator.devices.sim.oracle", "from . import memory", "the oracle"),
        ("allocator.cli.serve", "import metrics", "not an import name"),
        ("allocator.metrics.collector", "from allocator.stress import hammer", "layer 6"),
        ("allocator.newcomer", "import allocator.errors", "no layer"),
        ("allocator.cli.run", "import allocator.newcomer", "no layer"),
    ],
)
def test_the_check_can_fail(module: str, source: str, why: str) -> None:
    (problem, *_) = violations(source, module, known=KNOWN)
    assert why in problem


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("allocator.caching.ladder", "from allocator.blocks import Heap\nfrom allocator.caching.frees import Frees"),
        ("allocator.caching.ladder", "from .frees import Frees\nfrom ..streams import Stream"),
        ("allocator.allocation", "from allocator.errors import AllocatorError"),
        ("allocator.devices.cuda", "from cuda.bindings import driver"),
        ("allocator.traces.replay", "from allocator.caching import CachingAllocator"),
        ("allocator.integrations.cupy", "import allocator\nfrom allocator import CachingAllocator"),
        ("allocator.devices.sim.oracle", "import collections"),
        ("allocator", "from allocator.caching import CachingAllocator"),
    ],
)
def test_the_check_lets_good_imports_pass(module: str, source: str) -> None:
    assert violations(source, module, is_package=module == "allocator", known=KNOWN) == []

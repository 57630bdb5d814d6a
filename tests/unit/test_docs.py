"""The documentation says what is so: examples run, links lead somewhere, what is named in code style exists.

What is checked of a text in backquotes: paths of this repository, names of tests, mutants and pairs of threads
(`test_...`, `r4_...`), and `Class.attribute` of our own classes.  Anything else in backquotes is prose.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import allocator
from allocator.config import NOT_FIELDS
from tests.model.capture_mutants import ALL_MUTANTS as MUTANTS
from tests.model.pairs import PAIRS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "tests/gpu/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
RULES = range(1, 14)
EXAMPLES: set[str] = set()
"""Names that only show what a name looks like."""

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_NAME = re.compile(r"test_\w+|r\d+_[\w']+")
_PATH = re.compile(r"(allocator|docs|metrics|stress|tests|src)(/[\w.*-]+)+/?")
_ATTRIBUTE = re.compile(r"([A-Z]\w+)\.(\w+)(\(.*\))?")


def _id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def examples(page: Path) -> str:
    """The interactive sessions of a page, one after the other."""
    return "\n".join(body for kind, body in _BLOCK.findall(page.read_text()) if kind == "pycon")


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return _BLOCK.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """What a link may name behind `#`: headings, as GitHub writes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        found.add(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    return found


@cache
def names() -> frozenset[str]:
    """Every test of the repository, every mutant, every pair of threads."""
    found = {mutant.name for mutant in MUTANTS} | {pair.name for pair in PAIRS}
    for path in (ROOT / "tests").rglob("test_*.py"):
        found.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.add(node.name)
    return frozenset(found)


@cache
def classes() -> dict[str, list[type]]:
    """Our own classes by name."""
    found: dict[str, list[type]] = {}
    for module in pkgutil.walk_packages(allocator.__path__, "allocator."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if inspect.isclass(value) and value.__module__.startswith("allocator") and value not in found.get(name, ()):
                found.setdefault(name, []).append(value)
    return found


def has(cls: type, attribute: str) -> bool:
    """As an attribute of the class, or one that its methods set."""
    return hasattr(cls, attribute) or f"self.{attribute}" in inspect.getsource(cls)


def wrong_names(page: Path) -> Iterator[str]:
    """What a page names and is not there."""
    for code in _CODE.findall(prose(page)):
        if _NAME.fullmatch(code):
            if code not in names() | EXAMPLES and not code.endswith("_"):
                yield code
        elif _PATH.fullmatch(code):
            if not (any(ROOT.glob(code)) if "*" in code else (ROOT / code).exists()):
                yield code
        elif match := _ATTRIBUTE.fullmatch(code):
            owners = classes().get(match[1])
            if owners is not None and not any(has(cls, match[2]) for cls in owners):
                yield code


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=_id)
def test_examples_do_what_they_show(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for field in allocator.Config.__dataclass_fields__:
        monkeypatch.delenv(f"WEIR_{field.upper()}", raising=False)
    for name in NOT_FIELDS:
        monkeypatch.delenv(name, raising=False)
    test = doctest.DocTestParser().get_doctest(examples(page), {}, _id(page), str(page), 0)
    told: list[str] = []
    results = doctest.DocTestRunner().run(test, out=told.append)
    assert results.attempted and not results.failed, "".join(told)


def test_the_first_page_has_an_example() -> None:
    assert ">>> import allocator" in examples(ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{_id(page)}: {link}"
        assert not anchor or anchor in anchors(target), f"{_id(page)}: {link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_what_is_named_exists(page: Path) -> None:
    assert list(wrong_names(page)) == []


@pytest.mark.source
def test_a_name_that_does_not_exist_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`test_r99_no` `r1_no` `allocator/no.py` `Timeline.no` `Timeline.publish` `Frees.queue` `no/prose`")
    assert list(wrong_names(page)) == ["test_r99_no", "r1_no", "allocator/no.py", "Timeline.no"]


@pytest.mark.parametrize("rule", RULES, ids=lambda n: f"R{n}")
def test_every_rule_has_its_section(rule: int) -> None:
    text = (ROOT / "docs/ordering.md").read_text()
    sections = re.findall(rf"^## R{rule} .*?(?=^## )", text, re.MULTILINE | re.DOTALL)
    assert len(sections) == 1
    for part in ("**Rule.**", "**Why", "**Where.**", "**Guarded by.**"):
        assert part in sections[0], part
    assert f"test_r{rule}_" in sections[0]


def test_every_mutant_is_named_under_its_rule() -> None:
    text = (ROOT / "docs/ordering.md").read_text()
    assert [mutant.name for mutant in MUTANTS if f"`{mutant.name}`" not in text] == []


def test_every_test_of_the_driver_that_is_named_for_a_fact_is_one_of_tests_gpu() -> None:
    facts = (ROOT / "docs/ordering.md").read_text().partition("## Driver facts")[2]
    there = "".join(path.read_text() for path in (ROOT / "tests/gpu").glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", facts)
    assert len(named) > 40
    assert [name for name in named if f"def {name}(" not in there] == []

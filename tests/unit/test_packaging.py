"""One import name: `allocator`, the same in a checkout, an editable install and a wheel.

Rule: a user's own metrics.py and stress.py are never shadowed, and never shadow ours.
Why: docs/decisions/0001-import-names.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "allocator", "metrics", "stress", "src", "pyproject.toml", "setup.py", "mypyc.ini", "MANIFEST.in", "README.md",
    "LICENSE",
)  # fmt: skip

# What a user's program does: its own metrics and stress beside ours.
PROGRAM = """
import metrics, stress
assert metrics.MINE and stress.MINE, (metrics, stress)
import allocator, allocator.metrics, allocator.stress
for module, name in ((allocator.metrics, "allocator.metrics"), (allocator.stress, "allocator.stress")):
    assert module.__name__ == name and not hasattr(module, "MINE"), module
print(allocator.__file__)
"""

# What must not exist where the user has no such modules.
BARE = """
import importlib.util
for name in ("metrics", "stress", "tests"):
    assert importlib.util.find_spec(name) is None, importlib.util.find_spec(name)
"""


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Standard output of a command; fails the test with what it said otherwise."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV_", "COVERAGE"))}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=clean | (env or {}), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built, so that building leaves nothing in the checkout; links stay links."""
    return copy_source(tmp_path_factory.mktemp("source"))


def copy_source(copy: Path) -> Path:
    """The same, there."""
    copy.mkdir(exist_ok=True)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A user's project: a folder with a metrics.py and a stress.py of its own."""
    for name in ("metrics", "stress"):
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def environment(where: Path) -> tuple[Path, Path]:
    """(python, its site-packages): a new environment that sees this one's packages, but not its editable installs.

    A path named in a .pth file is searched, but .pth files inside it are not read.
    """
    venv.create(where, with_pip=False, symlinks=True)
    python = where / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=where).strip())
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python, site


def build(source: Path, out: Path, *kinds: str, compiled: bool = False) -> Path:
    """Build without network, and return the one wheel: of source, as compiling takes long, unless that is asked for."""
    env = {"WEIR_COMPILE": str(int(compiled)), "MYPYC_OPT_LEVEL": "0"}
    run(sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", out, source, cwd=out, env=env)
    (wheel,) = out.glob("*.whl")
    return wheel


def expected_modules() -> set[str]:
    """Every module of the checkout, under the name it is imported by."""
    found = set()
    for folder, prefix in (
        ("allocator", "allocator"),
        ("metrics", "allocator/metrics"),
        ("stress", "allocator/stress"),
    ):
        top = ROOT / folder
        for path in top.rglob("*.py"):  # rglob does not follow the links in allocator/
            package = path.parent
            if path.is_relative_to(ROOT / "allocator" / folder):
                continue
            while package != top and (package / "__init__.py").exists():
                package = package.parent
            if package == top:  # else a folder that is not a package yet
                found.add(f"{prefix}/{path.relative_to(top)}")
    return found


def test_a_wheel_holds_one_top_level_package_with_metrics_and_stress_inside(source: Path, tmp_path: Path) -> None:
    wheel = build(source, tmp_path, "--wheel")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"allocator", f"{wheel.name.split('-')[0]}-{wheel.name.split('-')[1]}.dist-info"}
    modules = {name for name in names if name.endswith(".py")}
    assert modules == expected_modules()
    assert "allocator/py.typed" in names
    assert "allocator/traces/samples/serve-8-streams.csv.gz" in names
    assert {"allocator/metrics/dashboards/grafana.json", "allocator/metrics/dashboards/rules.yml"} <= names
    assert any(name.endswith("LICENSE") for name in names)


def test_a_wheel_built_from_the_source_archive_is_the_same(source: Path, tmp_path: Path) -> None:
    """Links become real folders in an sdist, and the wheel must not depend on them."""
    both, direct = tmp_path / "both", tmp_path / "direct"
    both.mkdir()
    direct.mkdir()
    via_archive = set(zipfile.ZipFile(build(source, both)).namelist())
    assert via_archive == set(zipfile.ZipFile(build(source, direct, "--wheel")).namelist())


def test_an_installed_wheel_lives_beside_the_users_own_modules(source: Path, user: Path) -> None:
    out = user / "dist"
    out.mkdir()
    python, site = environment(user / "env")
    zipfile.ZipFile(build(source, out, "--wheel")).extractall(site)
    assert str(site) in run(python, "program.py", cwd=user)
    empty = user / "empty"
    empty.mkdir()
    run(python, "-c", BARE, cwd=empty)


def test_an_editable_install_lives_beside_the_users_own_modules(source: Path, user: Path) -> None:
    python, _ = environment(user / "env")
    install = ("-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index")
    run(python, *install, "--ignore-installed", "--editable", source, cwd=user)
    assert str(source) in run(python, "program.py", cwd=user)
    empty = user / "empty"
    empty.mkdir()
    run(python, "-c", BARE, cwd=empty)
    # A module added later is there at once: nothing was copied.
    (source / "metrics" / "added_later.py").write_text("HERE = True\n")
    try:
        run(python, "-c", "import allocator.metrics.added_later as m; assert m.HERE", cwd=user)
    finally:
        (source / "metrics" / "added_later.py").unlink()


def test_type_checkers_resolve_an_editable_install(source: Path, user: Path) -> None:
    python, _ = environment(user / "env")
    install = ("-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index")
    run(python, *install, "--ignore-installed", "--editable", source, cwd=user)
    (user / "typed.py").write_text(
        "import allocator.metrics\nimport allocator.stress\nreveal_type(allocator.metrics)\n"
    )
    said = run(
        sys.executable, "-m", "mypy", "--strict", "--cache-dir", user / "cache", "--python-executable", python,
        "--follow-imports", "skip", "typed.py", cwd=user,
    )  # fmt: skip
    assert "Success" in said


def test_a_checkout_works_without_any_install(user: Path) -> None:
    """PYTHONPATH=src is all an editor needs; it holds `allocator` and nothing else."""
    assert str(ROOT) in run(sys.executable, "program.py", cwd=user, env={"PYTHONPATH": str(ROOT / "src")})
    assert sorted(p.name for p in (ROOT / "src").iterdir() if not p.name.endswith(".egg-info")) == ["allocator"]


def test_the_links_are_relative_so_that_a_clone_anywhere_works() -> None:
    for link, target in (("src/allocator", "../allocator"), ("allocator/metrics", "../metrics")):
        assert os.readlink(ROOT / link) == target
    assert os.readlink(ROOT / "allocator/stress") == "../stress"


def test_make_runs_every_folder_of_tests() -> None:
    named = set(re.findall(r"tests/(\w+)", (ROOT / "Makefile").read_text()))
    folders = {path.parent.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert folders <= named, "a folder of tests that make does not run"


def test_compiled_modules_enter_locks_in_the_way_that_holds_for_every_kind() -> None:
    """Compiled code looks for `__exit__` in the type, where the lock of locust runs and of tests has none."""
    modules = re.findall(r'"(allocator/[^"]+[.]py)"', (ROOT / "setup.py").read_text())
    assert len(modules) > 10
    for module in modules:
        for number, line in enumerate((ROOT / module).read_text().splitlines(), 1):
            plain = re.search(r"^\s*with .*lock\b(?![.]checked)", line)
            assert plain is None, f"{module}:{number}: with ...lock.checked()"

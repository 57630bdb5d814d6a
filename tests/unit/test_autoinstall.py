"""`WEIR_AUTOINSTALL`, which `import allocator` reads."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

# Stands for CuPy's integration: what is asked is whether it is called, not what it does.
STAND_IN = """
import sys, types
class CuPy(types.ModuleType):
    def install(self): print("installed")
sys.modules["allocator.cupy"] = CuPy("allocator.cupy")
import allocator
"""


def python(code: str, value: str | None) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("WEIR_")}
    if value is not None:
        environ["WEIR_AUTOINSTALL"] = value
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)


@pytest.mark.parametrize("value", ["1", "true", "on", " 1 "])
def test_importing_the_package_installs(value: str) -> None:
    done = python(STAND_IN, value)
    assert (done.stdout, done.stderr) == ("installed\n", "")


@pytest.mark.parametrize("value", [None, "", "0", "off"])
def test_it_is_off_unless_asked_for(value: str | None) -> None:
    done = python(STAND_IN, value)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_value_that_is_no_answer_is_a_warning() -> None:
    done = python(STAND_IN, "maybe")
    assert done.stdout == "" and "WEIR_AUTOINSTALL: nothing was installed: write 1 or 0, not 'maybe'" in done.stderr


def test_a_missing_cupy_is_a_warning_and_the_package_works() -> None:
    done = python("import sys; sys.modules['cupy'] = None; import allocator; print(allocator.SimDevice())", "1")
    assert "pip install" in done.stderr and "SimDevice" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy's package (no GPU)")
def test_a_missing_gpu_is_a_warning_and_the_package_works() -> None:
    import cupy

    if cupy.cuda.is_available():
        pytest.skip("a GPU is here")
    done = python("import allocator; print(allocator.SimDevice())", "1")
    assert "finds no GPU" in done.stderr and "SimDevice" in done.stdout


def test_the_setting_is_no_field_of_the_configuration() -> None:
    done = python("import allocator; print(allocator.Config.from_env().limit)", "0")
    assert done.stdout == "0\n"

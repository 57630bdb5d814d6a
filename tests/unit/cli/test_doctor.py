"""`weir doctor`: on any machine it says what is so, and how to put right what is not; never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import allocator
from allocator import AllocatorError, CachingAllocator, DriverError, SimDevice
from allocator.cli import examination, main
from allocator.cli.doctor import as_text, verdict
from allocator.cli.examination import MISSING, NOTE, OK, WRONG, Finding, examine

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30


class FakeGpu(SimDevice):
    """A simulated device that says it is a GPU."""

    simulated = False  # type: ignore[misc]  # the protocol has it read-only

    def __init__(self, ordinal: int, **options: Any) -> None:
        super().__init__(memory=4 * GIB, ordinal=ordinal, name="H400", **options)
        self.driver_version = (13, 0)
        self.count = 1
        self.peers: set[int] = set()

    def device_count(self) -> int:
        return self.count

    def reaches(self, other: FakeGpu) -> bool:
        return other.ordinal in self.peers


class Machine:
    """What is installed, and which GPUs there are; nothing else is looked at."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.versions: dict[str, str] = {
            "weir-allocator": allocator.__version__,
            "sortedcontainers": "2.4.0",
            "prometheus-client": "0.22",
            "cuda-bindings": "13.3.0",
        }
        self.gpus: list[FakeGpu] = []
        self.error: Exception = AllocatorError("no NVIDIA driver was found")
        self.hardware = False
        self.environ: dict[str, str] = {}
        patch.setattr(examination, "version_of", self.versions.get)
        patch.setattr(examination, "CudaDevice", self.device)
        patch.setattr(examination, "hardware", lambda: self.hardware)
        patch.setattr(examination, "kernel_driver", lambda: "580.1")

    def device(self, ordinal: int) -> FakeGpu:
        if not self.gpus:
            raise self.error
        return self.gpus[ordinal]

    def add_gpu(self, **options: Any) -> FakeGpu:
        self.gpus.append(FakeGpu(len(self.gpus), **options))
        for gpu in self.gpus:
            gpu.count = len(self.gpus)
        return self.gpus[-1]

    def look(self) -> dict[str, Finding]:
        """The findings by name; each a sentence on one line."""
        found = examine(self.environ)
        for finding in found:
            assert finding.text and "\n" not in finding.text and "Traceback" not in finding.text
            assert finding.text[0].isupper() or finding.text.startswith(finding.name), finding.text
            assert finding.text[-1] in ".?", finding.text
        assert len({(f.topic, f.name) for f in found}) == len(found)
        return {f"{f.topic}: {f.name}": f for f in found}

    def wrong(self) -> dict[str, str]:
        return {name: finding.text for name, finding in self.look().items() if finding.state == WRONG}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


# -- all is well --------------------------------------------------------------------------------------------


def test_without_a_gpu_the_simulator_is_what_works(machine: Machine) -> None:
    found = machine.look()
    assert machine.wrong() == {}
    assert found["gpu: GPU"].state == NOTE and "simulator works without one" in found["gpu: GPU"].text
    assert found["check: simulator"].state == OK
    assert verdict(list(found.values())) == "Weir works here with the simulator; there is no GPU."


def test_a_gpu_is_described_and_tried(machine: Machine) -> None:
    gpu = machine.add_gpu()
    found = machine.look()
    assert machine.wrong() == {}
    assert found["gpu: driver"].text == "The driver 580.1 is for CUDA 13.0; Weir needs 12.0 or newer."
    assert found["gpu: GPU 0"].text == "GPU 0 is a H400 with 4.00 GiB."
    assert "cudaIpcGetMemHandle" in found["gpu: GPU 0 virtual memory"].text
    assert found["gpu: GPU 0 context events"].value == "yes"
    assert found["check: GPU 0"].state == OK
    assert gpu.calls["cuMemCreate"] == gpu.calls["cuMemRelease"] > 0 and gpu.used_bytes == 0
    assert verdict(list(found.values())) == "Weir works on GPU 0."


def test_two_gpus_say_whether_they_reach_each_other(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = machine.add_gpu(), machine.add_gpu()
    one.peers.add(1)
    texts = [f.text for f in examine(machine.environ) if f.topic == "gpu"]
    assert "GPU 0 reads memory of GPU 1." in texts and "GPU 1 reads no other GPU's memory." in texts


def test_every_library_is_named_with_what_it_is_for_and_how_to_get_it(machine: Machine) -> None:
    found = machine.look()
    for package in examination.PACKAGES:
        finding = found[f"installed: {package.name}"]
        assert package.purpose in finding.text
        assert finding.state == OK or (finding.state == MISSING and f"pip install {package.install}" in finding.text)
    machine.versions.update({"cupy-cuda12x": "13.6.0", "torch": "2.11", "rmm-cu13": "26.10"})
    assert machine.look()["installed: CuPy"].text.startswith("CuPy 13.6.0 (cupy-cuda12x)")
    assert machine.look()["installed: RMM"].value == "26.10"


# -- what is to be put right -----------------------------------------------------------------------------------


def test_a_needed_package_that_is_missing_is_wrong(machine: Machine) -> None:
    del machine.versions["prometheus-client"]
    assert "pip install prometheus-client" in machine.wrong()["installed: prometheus-client"]


def test_two_installations_of_cupy_are_wrong(machine: Machine) -> None:
    machine.versions.update({"cupy-cuda12x": "13.6.0", "cupy-cuda13x": "14.2.0"})
    text = machine.wrong()["installed: CuPy"]
    assert "cupy-cuda13x and cupy-cuda12x" in text and "pip uninstall cupy-cuda13x cupy-cuda12x" in text


@pytest.mark.parametrize("there", [None, "0.0.9"])
def test_an_installation_that_is_not_this_one_is_told(machine: Machine, there: str | None) -> None:
    del machine.versions["weir-allocator"]
    assert machine.look()["installed: Weir"].state == NOTE
    machine.versions["weir-allocator"] = "0.0.9"
    assert "is installed as 0.0.9" in machine.wrong()["installed: Weir"]


@pytest.mark.parametrize(
    ("installed", "name", "fix"),
    [
        ({"cuda-bindings": "13.3.0"}, "cuda-bindings", "weir-allocator[cuda12]"),
        ({"cuda-bindings": "12.9.0", "cupy-cuda13x": "14.2.0"}, "cupy-cuda13x", "weir-allocator[cupy12]"),
    ],
)
def test_packages_for_a_newer_cuda_than_the_drivers_are_wrong(
    machine: Machine, installed: dict[str, str], name: str, fix: str
) -> None:
    machine.add_gpu().driver_version = (12, 8)
    machine.versions.update(installed)
    text = machine.wrong()[f"check: {name}"]
    assert "CUDA 12.8" in text and fix in text
    machine.gpus[0].driver_version = (13, 1)
    assert machine.wrong() == {}


def test_a_gpu_that_is_there_and_cannot_be_used_is_wrong(machine: Machine) -> None:
    machine.hardware = True
    machine.error = AllocatorError('CudaDevice needs bindings: pip install "weir-allocator[cuda]"')
    assert "pip install" in machine.wrong()["gpu: GPU"]
    machine.error = RuntimeError("something\nodd")
    assert "something odd" in machine.wrong()["gpu: GPU"]


@pytest.mark.parametrize("value", ["", "-1"])
def test_gpus_that_are_hidden_on_purpose_are_not_wrong(machine: Machine, value: str) -> None:
    machine.hardware = True
    machine.environ["CUDA_VISIBLE_DEVICES"] = value
    assert machine.wrong() == {} and "CUDA_VISIBLE_DEVICES" in machine.look()["gpu: GPU"].text


def test_a_gpu_without_virtual_memory_needs_the_other_backing(machine: Machine) -> None:
    machine.add_gpu(virtual_memory=False, context_events=False)
    found = machine.look()
    assert "WEIR_BACKING=malloc" in found["gpu: GPU 0 virtual memory"].text
    assert "12.5" in found["gpu: GPU 0 context events"].text
    assert "WEIR_BACKING=malloc" in machine.wrong()["check: GPU 0"]
    machine.environ["WEIR_BACKING"] = "malloc"
    assert machine.wrong() == {}


def test_a_gpu_that_refuses_to_work_is_wrong(machine: Machine) -> None:
    machine.add_gpu().fail("cuMemCreate", error="CUDA_ERROR_UNKNOWN", times=0)
    assert "CUDA_ERROR_UNKNOWN" in machine.wrong()["check: GPU 0"]
    assert verdict(list(machine.look().values())) == "1 thing to put right, marked !! above."


def test_one_gpu_of_two_that_does_not_answer_is_wrong_and_the_other_is_served(machine: Machine) -> None:
    machine.add_gpu().count = 2
    machine.gpus.append(None)  # type: ignore[arg-type]
    assert "GPU 1" in " ".join(machine.wrong())
    assert machine.look()["check: GPU 0"].state == OK


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("WEIR_LIMT", "1GiB", "did you mean WEIR_LIMIT?"),
        ("WEIR_XYZZY", "1", "unset it."),
        ("WEIR_LIMIT", "much", "WEIR_LIMIT='much'"),
        ("WEIR_BACKING", "heap", "backing must be one of"),
        ("CUPY_GPU_MEMORY_LIMIT", "half", "50%"),
        ("CUPY_GPU_MEMORY_LIMIT", "150%", "50%"),
    ],
)
def test_a_wrong_setting_is_explained(machine: Machine, name: str, value: str, says: str) -> None:
    machine.environ[name] = value
    (text,) = machine.wrong().values()
    assert name in text and says in text


def test_settings_that_do_not_fit_together_are_wrong(machine: Machine) -> None:
    machine.environ.update(WEIR_SMALL_REQUEST="4MiB", WEIR_SMALL_PAGE="2MiB")
    assert any("small_request" in text for text in machine.wrong().values())
    machine.environ["WEIR_SMALL_PAGE"] = "8MiB"
    assert machine.wrong() == {}


def test_settings_that_apply_are_listed(machine: Machine) -> None:
    machine.environ.update(WEIR_LIMIT="50%", WEIR_CANARY="1", CUPY_GPU_MEMORY_LIMIT="1000", PATH="x")
    machine.environ["PROMETHEUS_MULTIPROC_DIR"] = "/tmp/x"
    found = machine.look()
    assert machine.wrong() == {}
    assert "slower" in found["settings: WEIR_CANARY"].text
    assert "overruled by WEIR_LIMIT" in found["settings: CUPY_GPU_MEMORY_LIMIT"].text
    assert "own_port" in found["settings: PROMETHEUS_MULTIPROC_DIR"].text
    del machine.environ["WEIR_LIMIT"]
    machine.environ["CUPY_GPU_MEMORY_LIMIT"] = "50%"
    assert machine.look()["settings: CUPY_GPU_MEMORY_LIMIT"].state == OK
    machine.environ["WEIR_AUTOINSTALL"] = "1"
    assert "does nothing without CuPy" in machine.look()["settings: WEIR_AUTOINSTALL"].text
    machine.versions["cupy-cuda13x"] = "14.2.0"
    assert machine.look()["settings: WEIR_AUTOINSTALL"].state == OK


def test_memory_that_does_not_come_back_is_wrong(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachingAllocator, "trim", lambda self, keep=0: 0)
    assert "did not go back" in machine.wrong()["check: simulator"]


def test_whatever_fails_is_one_more_finding(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Finding]:
        yield Finding("installed", "half", OK, "Half.")
        raise DriverError("cuInit", "CUDA_ERROR_UNKNOWN")

    monkeypatch.setattr(examination, "installed", broken)
    assert "cuInit failed" in machine.wrong()["installed: doctor"]


# -- the machine it runs on -----------------------------------------------------------------------------------


def test_versions_come_from_the_packages_records() -> None:
    assert examination.version_of("pytest") == metadata.version("pytest")
    assert examination.version_of("no-such-package-here") is None


def test_hardware_is_what_the_system_shows(tmp_path: Path) -> None:
    assert not examination.hardware(tmp_path) and not examination.hardware(tmp_path / "none")
    (tmp_path / "nvidiactl").touch()
    assert not examination.hardware(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert examination.hardware(tmp_path)


def test_the_kernel_drivers_version_is_read_where_it_is_told(tmp_path: Path) -> None:
    record = tmp_path / "version"
    assert examination.kernel_driver(record) is None
    record.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue\nGCC version: 12\n")
    assert examination.kernel_driver(record) == "580.159.03"
    record.write_text("nothing")
    assert examination.kernel_driver(record) is None


# -- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the environment's WEIR_ variables, and no others."""
    for name in [name for name in os.environ if name.startswith(("WEIR_", "CUPY_"))]:
        monkeypatch.delenv(name)

    def set_them(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_them


def test_it_speaks_in_sentences_under_four_titles(
    machine: Machine, settings: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    lines = shown.out.splitlines()
    assert [line for line in lines if line and not line.startswith("  ")][:-1] == [
        "Installed", "GPUs", "Settings", "Checks",
    ]  # fmt: skip
    assert all(line[2:4] in ("ok", "..", "--", "!!") for line in lines if line.startswith("  "))
    assert lines[-1] == "Weir works here with the simulator; there is no GPU."


def test_what_is_to_be_put_right_is_marked_and_the_status_is_1(
    machine: Machine, settings: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    settings(WEIR_NONSENSE="1", WEIR_LIMIT="x")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.count("  !!  WEIR_") == 2 and out.endswith("2 things to put right, marked !! above.\n")


def test_json_says_the_same(
    machine: Machine, settings: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    machine.add_gpu()
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["gpus"], answer["verdict"]) == (True, ["GPU 0"], "Weir works on GPU 0.")
    assert {"topic", "name", "state", "text", "value"} == set(answer["findings"][0])
    settings(WEIR_NONSENSE="1")
    assert main(["doctor", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert not answer["ok"] and any(f["name"] == "WEIR_NONSENSE" for f in answer["findings"])


def test_help_says_what_the_statuses_mean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    out = capsys.readouterr().out
    assert "exit status" in out and "simulator" in out and "--json" in out


def test_no_library_of_the_gpu_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from allocator.cli import main; status = main(['doctor']); "
        "bad = {'cupy', 'torch', 'rmm', 'numba', 'bokeh', 'locust'} & set(sys.modules); "
        "sys.exit(', '.join(bad) if bad else 0)"
    )
    environ = {n: v for n, v in os.environ.items() if not n.startswith("WEIR_")}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_finding_is_a_line() -> None:
    text = as_text([Finding("gpu", "GPU 0", WRONG, "GPU 0 is on fire.")])
    assert "  !!  GPU 0 is on fire.\n" in text

"""Locust itself, in processes of its own: importing it replaces the threading module of the whole process.

Rule: nothing here waits for a time; a run has a limit, or is ended once it has said what is waited for.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from allocator.stress import WORKLOADS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("locust") is None, reason='locust is missing: pip install "weir-allocator[stress]"'
)

ROOT = Path(__file__).resolve().parents[3]
LOCUSTFILE = ROOT / "stress/locustfile.py"
SMALL = ("--weir-limit", "128MiB", "--weir-share", "4MiB")

BROKEN = """
import importlib.util
spec = importlib.util.spec_from_file_location("of_weir", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
globals().update({{name: value for name, value in vars(module).items() if isinstance(value, type)}})
{change}
"""
CARELESS = "from allocator.streams import Order; Order.known = lambda *args, **more: True"
LEAKING = "from allocator import CachingAllocator; CachingAllocator.trim = lambda pool, keep=0: 0"


def environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WEIR_", "LOCUST_", "COV_", "COVERAGE"))}
    return clean | {"PYTHONPATH": str(ROOT / "src")} | more


def command(*words: str, file: Path = LOCUSTFILE) -> list[str]:
    return [sys.executable, "-m", "locust", "-f", str(file), "--only-summary", "--stop-timeout", "0", *words]


def two_processes() -> tuple[str, ...]:
    """Beside the master, which a test in another process has at the same time: not all on the same port, and none
    that the system might give to a connection meanwhile."""
    port = str(5600 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]))
    return ("--processes", "2", "--master-port", port, "--master-bind-port", port)


def run(*words: str, file: Path = LOCUSTFILE, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("--headless", *words, file=file), env=environment(**more), capture_output=True, text=True, timeout=120,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


@contextmanager
def started(*words: str, until: str, file: Path = LOCUSTFILE) -> Iterator[subprocess.Popen[str]]:
    """A run that has said `until`; one that never does is ended, and the test fails."""
    process = subprocess.Popen(
        command(*words, file=file), env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    patience = threading.Timer(120, os.killpg, (process.pid, signal.SIGKILL))
    patience.start()
    try:
        assert process.stderr is not None
        assert any(until in line for line in process.stderr), f"it never said {until!r}"
        patience.cancel()
        yield process
    finally:
        patience.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def broken(tmp_path: Path) -> Any:
    def broken(change: str) -> Path:
        path = tmp_path / "locustfile.py"
        path.write_text(BROKEN.format(path=str(LOCUSTFILE), change=change))
        return path

    return broken


def operations(text: str) -> int:
    (found,) = re.findall(r"^Weir: ([\d,]+) operations on", text, re.MULTILINE)
    return int(found.replace(",", ""))


def test_users_of_every_workload_run_headless_and_the_report_has_microseconds() -> None:
    """S31: non-zero averages and percentiles of operations that take a few microseconds."""
    done = run(*SMALL, "-u", "12", "-r", "12", "-t", "3s")
    assert done.returncode == 0, done.stderr
    assert "final check: nothing wrong" in done.stderr and operations(done.stderr) > 0
    (row,) = re.findall(r"^free +(.*)$", done.stderr, re.MULTILINE)
    assert all(float(figure.replace(",", "")) > 0 for figure in row.split())
    assert "0(0.00%)" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_s31_a_signal_ends_a_run_with_one_check(number: signal.Signals) -> None:
    with started("--headless", *SMALL, "-u", "3", "-r", "3", "SteadyUser", until="All users spawned") as process:
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert errors.count("final check: nothing wrong") == 1


def test_s31_an_interruption_of_master_and_workers_at_once_ends_with_one_report() -> None:
    words = ("--headless", *SMALL, *two_processes(), "-u", "2", "-r", "2", "SteadyUser")
    with started(*words, until="All users spawned") as process:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert errors.count("final check: nothing wrong") == 1 and "operations on 2 pools" in errors


@pytest.mark.source
def test_s31_a_violation_gives_status_1(broken: Any) -> None:
    done = run(
        *SMALL, "--weir-seed", "3", "-u", "4", "-r", "4", "-t", "30s", "ManyUsersUser", file=broken(CARELESS)
    )  # fmt: skip
    assert done.returncode == 1
    assert "VIOLATION: race: " in done.stderr and "--run-time limit reached" not in done.stderr


def test_s31_a_leak_after_the_end_of_a_shape_gives_status_1_although_no_request_failed(broken: Any) -> None:
    words = ("-u", "2", "--weir-shape", "steps", "--weir-length", "2", "SteadyUser")
    done = run(*SMALL, *words, file=broken(LEAKING))
    assert done.returncode == 1
    assert done.stderr.count("VIOLATION: leak: ") == 2  # when it is found, and in the report
    assert "Shape test stopping" in done.stderr and "0(0.00%)" in done.stdout + done.stderr


def test_each_process_has_a_pool_of_its_own_and_the_master_adds_up() -> None:
    done = run(*SMALL, *two_processes(), "-u", "4", "-r", "4", "-t", "3s", "SteadyUser", "GarbageUser")
    assert done.returncode == 0, done.stderr
    assert "operations on 2 pools" in done.stderr and operations(done.stderr) > 0
    assert done.stderr.count("final check: nothing wrong") == 1


def test_what_a_worker_finds_is_the_masters_status(broken: Any) -> None:
    done = run(*SMALL, *two_processes(), "-u", "2", "-r", "2", "-t", "2s", "SteadyUser", file=broken(LEAKING))
    assert done.returncode == 1
    assert re.search(r"VIOLATION: worker \S+: leak: ", done.stderr)


def test_without_the_replaced_threading_module_it_works_as_well() -> None:
    done = run(*SMALL, "-u", "3", "-r", "3", "-t", "2s", "PipelineUser", LOCUST_SKIP_MONKEY_PATCH="1")
    assert done.returncode == 0 and "final check: nothing wrong" in done.stderr


@contextmanager
def served() -> Iterator[str]:
    """The address of a `weir serve`."""
    serve = "import sys; from allocator.cli import main; sys.exit(main(['serve', '--port', '0', '--loop']))"
    process = subprocess.Popen(
        [sys.executable, "-c", serve], env=environment(), stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "live page" in line:
                yield line.split()[-1].rstrip("/")
                break
        else:
            pytest.fail("weir serve has not begun")
    finally:
        process.terminate()
        process.communicate()


def test_http_users_ask_weir_serve_for_scrapes_page_and_snapshot() -> None:
    missing = {"/metrics", "/healthz", "/snapshot"}
    with served() as url:
        for time in ("4s", "20s", "60s"):  # as long as it takes a busy machine to answer each of them once
            done = run("-u", "6", "-r", "6", "-t", time, "--host", url, "ScrapeUser", "PageUser", "SnapshotUser")
            assert done.returncode == 0, done.stdout + done.stderr
            told = done.stdout + done.stderr
            missing -= {path for path in missing if re.search(rf"^GET +{path} +[1-9]", told, re.MULTILINE)}
            if not missing:
                break
    assert not missing, told
    assert "Weir: " not in done.stderr  # no pool was opened here


def test_http_users_without_a_server_are_told_what_is_missing() -> None:
    done = run("-u", "1", "-t", "1s", "ScrapeUser")
    assert "name it, for example --host http://127.0.0.1:9478" in done.stderr


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_the_web_page_has_our_figures_beside_it() -> None:
    port = free_port()
    words = ("--autostart", "--web-host", "127.0.0.1", "--web-port", str(port), "-u", "2", "-r", "2", "SteadyUser")
    with started(*SMALL, *words, until="All users spawned") as process:
        for path in ("/", "/weir"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
                content = answer.read()
        assert set(json.loads(content)) == {"operations", "pools", "latency_us", "wrong"}
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "final check: nothing wrong" in errors


LOCKS = """
import importlib.util, sys, threading
import locust, gevent
spec = importlib.util.spec_from_file_location("locustfile", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from allocator.devices.sim.world import WORLD
from allocator.stress.load import Options, Session
session = Session(Options())
lock = session.pool._lock
def kinds():
    return {type(one).__module__ for one in (lock.inner, WORLD.lock, session._lock)}
before, in_child = kinds(), None
if gevent.fork() == 0:
    import os
    os._exit(0 if kinds() == {"_thread"} and threading.local.__module__.startswith("gevent") else 9)
import os
print(sorted(before), os.waitstatus_to_exitcode(os.wait()[1]), threading.local.__module__)
"""


def test_the_pool_has_real_locks_although_locust_replaced_them_and_in_forked_workers_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOCKS, str(LOCUSTFILE)], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "['_thread'] 0 gevent._gevent_clocal", done.stdout + done.stderr


def test_whoever_looks_at_the_package_does_not_import_locust() -> None:
    code = "import sys, allocator.stress.locustfile; print('locust' in sys.modules, 'gevent' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_every_workload_has_a_user_class() -> None:
    listed = set(run("--list").stdout.split())
    names = {"".join(map(str.capitalize, name.split("-"))) + "User" for name in WORKLOADS}
    assert names | {"ScrapeUser", "PageUser", "SnapshotUser"} <= listed

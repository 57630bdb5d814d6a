"""The ends of processes: interpreter exit with everything alive, fork at any moment, signals, full disks, broken pipes.

Whatever happens there, a process says nothing it should not say, hangs nowhere, and ends with the right status.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from allocator import AllocatorError, CachingAllocator, Config, SimDevice, Stream
from allocator.metrics import serve
from allocator.sizes import KIB, MIB
from tests.faults.desk import Desk, Prepare, a_host_wait, a_trim, many_allocations, settling, statistics

TIMEOUT_S = 60
WEIR = [sys.executable, "-c", "import sys; from allocator.cli import main; sys.exit(main())"]
SAMPLE = "allocator/traces/samples/serve-8-streams.csv.gz"
ROOT = Path(__file__).parents[2]
TRACE = "time_ns,op,stream,pointer,bytes,gpu_start_ns,gpu_duration_ns\n0,alloc,1,0x200,300,,\n20,free,1,0x200,300,,\n"

needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def python(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, in the repository."""
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore::ResourceWarning", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=ROOT,
        env={**os.environ, **variables},
    )


# -- exit -----------------------------------------------------------------------------------------

ALIVE = """
import gc, sys, threading, time
import allocator
from allocator import CachingAllocator, Config, Event, SimDevice, Stream

gpu = SimDevice(memory=256 << 20)
pool = CachingAllocator(gpu, config=Config(seal_frees=2{config}))
streams = [Stream(gpu) for _ in range(4)]
events = [s.record_event() for s in streams]
closed = CachingAllocator(gpu)
left = closed.allocate(1 << 20, stream=streams[0])
closed.close()
kept = []
for i in range(20):
    x = pool.allocate(3 << 18, stream=streams[i % 4])
    gpu.launch(streams[i % 4], writes=[x])
    x.record_stream(streams[(i + 1) % 4])
    kept.append(x)
cycle = [kept[3], streams[1], pool]
cycle.append(cycle)
gpu.hold(streams[0])
gpu.launch(streams[0], writes=[kept[0]])
kept[0].close()
del kept[0]
"""


@pytest.mark.parametrize("config", ["", ", backing='malloc'", ", canary=True", ", uses='assumed'"])
def test_an_interpreter_that_ends_with_everything_alive_says_nothing(config: str) -> None:
    done = python(ALIVE.format(config=config))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_interpreter_that_ends_while_threads_are_inside_the_pool_says_nothing() -> None:
    done = python(
        ALIVE.format(config="")
        + """
def work(number):
    while True:
        x = pool.allocate(1 << (10 + number), stream=streams[number])
        gpu.launch(streams[number], writes=[x])
        x.close()
        pool.stats()
        if number == 3:
            pool.trim()

for number in range(1, 4):
    threading.Thread(target=work, args=(number,), daemon=True).start()
while pool.stats().allocations["same_stream"] < 50:
    pass
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_interpreter_that_ends_with_a_server_and_the_cupy_hook_says_nothing() -> None:
    pytest.importorskip("tornado")
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    assert cupy.__name__ == "cupy"
    done = python(
        """
import warnings
warnings.simplefilter("ignore")
import cupy, allocator, allocator.cupy, allocator.metrics
from allocator import CachingAllocator, SimDevice, Stream
gpu = SimDevice(memory=256 << 20)
pool = CachingAllocator(gpu)
stream = Stream(gpu)
allocator.cupy.install(pool, current_stream=lambda: stream)
server = allocator.metrics.serve(pool, port=0)
array = cupy.ndarray((1000,), dtype=cupy.float32)
ring = [array]
ring.append(ring)
"""
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr and "Error" not in done.stderr, done.stderr


def test_a_finaliser_that_allocates_at_exit_hangs_nowhere() -> None:
    done = python(
        ALIVE.format(config="")
        + """
class Late:
    def __init__(self):
        self.pool, self.stream = pool, streams[2]
    def __del__(self):
        try:
            self.pool.allocate(1 << 20, stream=self.stream).close()
            self.pool.stats()
        except Exception:
            pass
late = Late()
me = [late]
me.append(me)
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- fork -----------------------------------------------------------------------------------------


@needs_fork
@pytest.mark.parametrize("prepare", [many_allocations, statistics, a_trim, settling, a_host_wait])
def test_s21_a_fork_at_any_driver_call_leaves_a_child_that_hangs_nowhere(prepare: Prepare) -> None:
    """In the middle of the call that makes it, in the same thread: what the child inherits is half done."""
    desk, names = Desk(), list[str]()
    operation = prepare(desk)
    desk.gpu.before_call = names.append
    operation()
    for at in sorted({1, 2, len(names) // 3, len(names) // 2, len(names)} - {0}):
        desk, statuses, made = Desk(), list[int](), list[str]()
        operation = prepare(desk)

        def fork(
            name: str, desk: Desk = desk, at: int = at, made: list[str] = made, statuses: list[int] = statuses
        ) -> None:
            made.append(name)
            if len(made) == at:
                pid = os.fork()
                if pid == 0:
                    os._exit(_child(desk))
                statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

        desk.gpu.before_call = fork
        operation()
        desk.gpu.before_call = None
        assert statuses == [0], at
        assert desk.wrong() == []


def _child(desk: Desk) -> int:
    """Everything is refused with one error or does nothing, and no driver call is made.  5: it hangs."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(5))
    signal.alarm(20)
    desk.gpu.before_call = None
    calls = dict(desk.gpu.calls)
    pool = desk.pool
    try:
        for call in (
            lambda: pool.allocate(KIB, stream=desk.a),
            lambda: pool.allocate(MIB),
            pool.stats,
            pool.trim,
            pool.settle,
            pool.check,
            desk.a.query,
            desk.event.query,
            lambda: desk.kept.clear(),
            desk.a.close,
            pool.close,
        ):
            try:
                call()
            except AllocatorError:
                continue
        if dict(desk.gpu.calls) != calls:
            return 3
        with CachingAllocator(SimDevice(memory=64 * MIB), config=Config()) as other:  # its own works
            other.allocate(KIB, stream=Stream(other.device)).close()
        return 0
    except BaseException as error:
        os.write(2, f"in the child: {type(error).__name__}: {error}\n".encode())
        return 4


# -- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_ends_weir_serve_at_once_and_cleanly(number: signal.Signals) -> None:
    pytest.importorskip("tornado")
    process = subprocess.Popen(
        [*WEIR, "serve", "--port", "0", "--trace", SAMPLE, "--loop", "--speed", "1000"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        while "snapshot" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(number)
        out, rest = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in rest, rest


def test_ctrl_c_in_the_middle_of_a_command_is_one_line_and_its_own_status(trace: str) -> None:
    done = python(
        f"""
        import signal, sys
        from allocator import SimDevice
        from allocator.cli import main
        SimDevice.launch = SimDevice.mem_create = lambda *_, **__: signal.raise_signal(signal.SIGINT)
        sys.exit(main(["replay", {trace!r}]))
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "weir: interrupted\n")


# -- full disks and broken pipes -------------------------------------------------------------------


def weir(*arguments: str, stdout: str | int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """A command, perhaps with its output going to a file."""
    target = open(stdout, "w") if isinstance(stdout, str) else stdout  # noqa: SIM115  # closed below
    try:
        return subprocess.run(
            [*WEIR, *arguments], cwd=ROOT, stdout=target, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S
        )
    finally:
        if not isinstance(target, int):
            target.close()


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "small.csv"
    path.write_text(TRACE)
    return str(path)


def one_line(done: subprocess.CompletedProcess[str]) -> None:
    """Refused in one clear line, besides progress."""
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower() or "space" in line.lower()]
    assert done.returncode not in (0, 1) and "Traceback" not in done.stderr, done.stderr
    assert len(lines) == 1, done.stderr


@needs_full
@pytest.mark.parametrize(
    "arguments",
    [("replay", "{trace}", "--json"), ("replay", "{trace}"), ("dashboard", "grafana"), ("doctor",)],
    ids=" ".join,
)
def test_a_full_disk_under_stdout_is_one_clear_line(arguments: tuple[str, ...], trace: str) -> None:
    one_line(weir(*(a.replace("{trace}", trace) for a in arguments), stdout="/dev/full"))


@needs_full
@pytest.mark.parametrize("where", ["/dev/full", "/no/such/folder/plot.svg"])
def test_a_plot_that_cannot_be_written_is_one_clear_line(trace: str, tmp_path: Path, where: str) -> None:
    name = str(tmp_path / "plot.svg")
    os.symlink(where, name)
    done = weir("replay", trace, "--plot", name)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and name in done.stderr


@needs_full
@pytest.mark.parametrize("what", ["grafana", "alerts"])
def test_a_dashboard_that_cannot_be_written_is_one_clear_line(what: str) -> None:
    done = weir("dashboard", what, "--output", "/dev/full")
    assert (done.returncode, done.stderr) == (2, "weir: cannot write /dev/full: No space left on device\n")


@needs_full
def test_weir_top_on_a_full_disk_is_one_clear_line() -> None:
    pytest.importorskip("tornado")
    with CachingAllocator(SimDevice()) as pool, serve(pool, port=0) as server:
        one_line(weir("top", server.url, "--once", stdout="/dev/full"))


@pytest.mark.parametrize(
    "arguments", [("dashboard", "grafana"), ("dashboard", "alerts"), ("replay", "{trace}", "--json")]
)
def test_a_reader_that_goes_away_is_no_error_worth_a_traceback(arguments: tuple[str, ...], trace: str) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = weir(*(a.replace("{trace}", trace) for a in arguments), stdout=write)
    finally:
        os.close(write)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr

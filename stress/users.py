"""What the locust users do, and who has the last word: the parts of locustfile.py that need no locust.

Rule: *one verdict a process that has a pool, one for all at the master*.  A session is opened by the first user of a
test and concluded when the test stops, or locust quits, whichever comes first; a second conclusion finds it done.
A worker sends its verdict to the master, also when asked again; the master asks every worker it has, waits, and
counts one that never answers as a violation.

Threads: everything here runs in greenlets of locust's thread, but for the batches, which run in real ones.
Next: load.py (the session), locustfile.py (the classes).
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from allocator.sizes import MIB, parse_size
from allocator.stress.load import Options, Part, Session, Verdict
from allocator.stress.native import native_lock, native_threads
from allocator.stress.player import Violation
from allocator.stress.report import aligned, latency, latency_table
from allocator.stress.shapes import SHAPES

_log = logging.getLogger("allocator.stress")

VERDICT: Final = "weir_verdict"
FINISH: Final = "weir_finish"
ALARM: Final = "weir_alarm"
"""Messages between master and workers."""

PATIENCE_S: Final = 30.0
"""How long the master waits for verdicts."""

LOOK_S: Final = 0.05


class Coordinator:
    """What the users of one process share: the session, and the verdicts.

    pause: sleeps for so many seconds, letting other greenlets run.  spawn: runs a function in a greenlet of its own.
    """

    def __init__(self, pause: Callable[[float], object], spawn: Callable[[Callable[[], object]], object]) -> None:
        self._pause = pause
        self._spawn = spawn
        self._lock = native_lock()
        self.session: Session | None = None
        self.total = Verdict()
        """Of all tests of this process; at a master, of all workers."""
        self.batch = 100
        self.token = ""
        self._mine = Verdict()
        """Of this test, as sent to the master; the session's once that is over, and then it has been counted."""
        self._answers: dict[str, Verdict] = {}
        self._partial: dict[str, Verdict] = {}
        self._workers: set[str] = set()
        """Of this test: who has to answer, also if it has gone meanwhile."""
        self._alarmed = False
        self._role = "local"

    def install(self, events: Any) -> None:
        """Listen to locust's events."""
        events.init_command_line_parser.add_listener(add_options)
        events.init.add_listener(self.on_init)
        events.test_start.add_listener(self.on_test_start)
        events.test_stop.add_listener(self.on_test_stop)
        events.quit.add_listener(self.on_quit)
        events.report_to_master.add_listener(self.on_report_to_master)
        events.worker_report.add_listener(self.on_worker_report)

    # -- the life of a test ----------------------------------------------------------------------

    def on_init(self, environment: Any, runner: Any, **_: object) -> None:
        """Messages; and HTTP users only where there is somebody to ask."""
        # Listeners are called in reverse, and the runner has one by now: a worker has to say what it found before it
        # says that it quits, or the master would wait for it in vain.
        environment.events.quitting.add_listener(self.on_quitting)
        role = self._role = role_of(runner)
        if role == "master":
            runner.register_message(VERDICT, self._take_verdict)
            runner.register_message(ALARM, lambda environment, msg, **_: self.alarm(environment))
        elif role == "worker":
            runner.register_message(FINISH, lambda environment, msg, **_: self.conclude(environment))
        if not environment.host:
            kept = [one for one in environment.user_classes if not getattr(one, "asks_http", False)]
            if not kept:
                _log.error("these users ask a server: name it, for example --host http://127.0.0.1:9478")
            environment.user_classes = kept or environment.user_classes
        if environment.web_ui is not None:
            environment.web_ui.app.add_url_rule("/weir", "weir", lambda: self.live())

    def on_test_start(self, environment: Any, **_: object) -> None:
        """A new test: nothing of an earlier one counts."""
        self.session, self._mine, self._alarmed = None, Verdict(), False
        self._answers.clear()
        self._partial.clear()
        runner = environment.runner
        self._workers = {client.id for client in runner.clients.all} if role_of(runner) == "master" else set()
        options = environment.parsed_options
        self.batch, self.token = options.weir_batch, options.weir_token

    def join(self, environment: Any, workload: str) -> Part:
        """A user begins.  The first one of a process opens the device; raises what that raises."""
        with self._lock:
            if self.session is None:
                self.session = Session(options_of(environment.parsed_options))
            return self.session.join(workload)

    def on_test_stop(self, environment: Any, **_: object) -> None:
        """Users have been stopped, or soon are."""
        self.conclude(environment)

    def on_quitting(self, environment: Any, **_: object) -> None:
        """The end, also by a signal, in which case users may still be at work."""
        self.conclude(environment)
        if self.total.wrong:
            environment.process_exit_code = 1

    def conclude(self, environment: Any) -> None:
        """The final check; where it has been made, its verdict is only told again."""
        role = role_of(environment.runner)
        if role == "master":
            self._collect(environment.runner)
        else:
            if self.session is not None:
                verdict = self.session.finish()
                if verdict is not self._mine:
                    self._mine = verdict
                    self._count(verdict)
            if role == "worker":
                environment.runner.send_message(VERDICT, self._mine.to_json())
        if self.total.wrong:
            environment.process_exit_code = 1

    def fail(self, text: str) -> None:
        """Something that no session can say."""
        _log.error("%s", text)
        self.total.wrong.append(text)

    def alarm(self, environment: Any) -> None:
        """Something is wrong: the test need not go on."""
        if self._alarmed:
            return
        self._alarmed = True
        runner = environment.runner
        if role_of(runner) == "worker":
            runner.send_message(ALARM, {})
        else:
            self._spawn(runner.stop if environment.web_ui is not None else runner.quit)

    def _count(self, verdict: Verdict) -> None:
        self.total.merge(verdict)
        for text in verdict.wrong:
            _log.error("VIOLATION: %s", text)

    # -- master and workers ----------------------------------------------------------------------

    def _take_verdict(self, environment: Any, msg: Any, **_: object) -> None:
        if msg.node_id in self._answers:
            return
        verdict = self._answers[msg.node_id] = Verdict.from_json(msg.data)
        verdict.wrong = [f"worker {msg.node_id}: {text}" for text in verdict.wrong]
        self._count(verdict)

    def _collect(self, runner: Any) -> None:
        """Ask every worker for its verdict, and wait."""
        asked = {client.id for client in runner.clients.all} | self._workers | set(self._partial)
        for worker in sorted(asked - set(self._answers)):
            runner.send_message(FINISH, {}, worker)
        deadline = time.monotonic() + PATIENCE_S
        while (missing := asked - set(self._answers)) and time.monotonic() < deadline:
            self._pause(LOOK_S)
        for worker in sorted(missing):
            self.fail(f"worker {worker} never said what its final check found")
            self._answers[worker] = Verdict()

    def on_report_to_master(self, client_id: str, data: dict[str, Any], **_: object) -> None:
        """A worker adds its figures so far to its regular report."""
        if self.session is not None:
            data["weir"] = self.session.figures().to_json()

    def on_worker_report(self, client_id: str, data: Mapping[str, Any], **_: object) -> None:
        """The master keeps the latest."""
        if "weir" in data:
            self._partial[client_id] = Verdict.from_json(data["weir"])

    # -- reports ---------------------------------------------------------------------------------

    def live(self) -> dict[str, Any]:
        """The test so far, for the page /weir beside locust's own."""
        sofar = Verdict()
        if self.session is not None:
            sofar.merge(self.session.figures())
        for worker, partial in self._partial.items():
            sofar.merge(self._answers.get(worker, partial))
        return {
            "operations": sofar.operations,
            "pools": sofar.sessions,
            "latency_us": {name: latency(one) for name, one in sofar.latencies.items()},
            "wrong": sofar.wrong + self.total.wrong,
        }

    def on_quit(self, exit_code: int | None = None, **_: object) -> None:
        """The report, behind locust's own; a worker's is part of its master's."""
        if self._role == "worker":
            return
        if self.total.sessions or self.total.wrong:
            print(report(self.total), file=sys.stderr, flush=True)


class PoolUser:
    """A user of the pool.  workload: which.  Mixed with locust's `User`."""

    workload: str
    coordinator: Coordinator
    environment: Any
    part: Part | None = None

    def on_start(self) -> None:
        """Takes part in the process's session."""
        try:
            self.part = self.coordinator.join(self.environment, self.workload)
        except Exception as error:
            self.coordinator.fail(f"the test cannot begin: {' '.join(str(error).split())}")
            self.coordinator.alarm(self.environment)

    def on_stop(self) -> None:
        """Frees what it has."""
        part, session = self.part, self.coordinator.session
        if part is not None and session is not None:
            session.leave(part)

    def one_batch(self, in_thread: Callable[..., Any]) -> bool:
        """Run a batch by `in_thread(function, arguments)` and report it as one request; False: this user has ended."""
        if self.part is None:
            return False
        done, ns, violation = in_thread(play_batch, (self.part, self.coordinator.batch))
        if not done and violation is None:
            return False
        self.environment.events.request.fire(
            request_type="pool",
            name=self.workload,
            response_time=ns / 1e6,
            response_length=done,
            exception=violation,
            context={},
        )
        if violation is not None:
            self.coordinator.alarm(self.environment)
        return violation is None


def play_batch(part: Part, operations: int) -> tuple[int, int, Violation | None]:
    """(operations done, ns, what was wrong).  In a real thread; an error is a result, as gevent prints raised ones."""
    began = time.perf_counter_ns()
    try:
        done, violation = part.play(operations), None
    except Violation as found:
        done, violation = 0, found
    return done, time.perf_counter_ns() - began, violation


class HttpQuestions:
    """Asks a server of `allocator.metrics.serve` or `weir serve`.  Mixed with locust's `HttpUser`."""

    asks_http = True
    coordinator: Coordinator
    client: Any

    def ask(self, path: str, expected: bytes, accept: str = "*/*") -> None:
        """One question; a failure unless the answer is 200 and holds what is expected."""
        headers = {"Accept": accept}
        if self.coordinator.token:
            headers["Authorization"] = f"Bearer {self.coordinator.token}"
        with self.client.get(path, headers=headers, catch_response=True) as answer:
            if answer.status_code != 200:
                answer.failure(f"{path}: status {answer.status_code}")
            elif expected not in answer.content:
                answer.failure(f"{path}: there is no {expected.decode()} in the answer")


def role_of(runner: Any) -> str:
    """ "master", "worker" or "local"."""
    if hasattr(runner, "clients"):
        return "master"
    return "worker" if hasattr(runner, "master_host") else "local"


def options_of(parsed: Any) -> Options:
    """What a session is to be; ValueError or AllocatorError's kin say what is wrong."""
    device = parsed.weir_device
    if device != "sim" and not (device.isascii() and device.isdigit()):
        raise ValueError(f"--weir-device: {device!r} is neither sim nor the number of a GPU")
    return Options(
        device=None if device == "sim" else int(device),
        streams=parsed.weir_streams,
        limit=parse_size(parsed.weir_limit),
        share=parse_size(parsed.weir_share),
        seed=parsed.weir_seed,
    )


def add_options(parser: Any, **_: object) -> None:
    """What a test can be told, beside locust's own options."""
    group = parser.add_argument_group("Weir", "the pool under the users")
    group.add_argument("--weir-device", default="sim", metavar="sim|N", help="sim, or the number of a GPU")
    group.add_argument("--weir-streams", type=_positive, default=8, metavar="N", help="shared streams (default: 8)")
    group.add_argument("--weir-threads", type=_positive, default=8, metavar="N", help="real threads for batches")
    group.add_argument("--weir-batch", type=_positive, default=100, metavar="N", help="operations in a batch")
    group.add_argument("--weir-limit", type=_size, default="1GiB", metavar="SIZE", help="limit of each pool")
    group.add_argument("--weir-share", type=_size, default="16MiB", metavar="SIZE", help="working set of each user")
    group.add_argument("--weir-seed", type=int, default=0, metavar="N", help="of the operations")
    group.add_argument("--weir-token", default="", metavar="TOKEN", help="what the server asks HTTP users for")
    group.add_argument("--weir-shape", choices=["", *SHAPES], default="", help="how the number of users changes")
    group.add_argument(
        "--weir-length", type=_positive, default=60, metavar="N", help="seconds that the shape lasts (default: 60)"
    )


def _positive(text: str) -> int:
    if text.isascii() and text.isdigit() and 1 <= int(text) <= 1_000_000:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")


def _size(text: str) -> str:
    """As text, because a master sends its options to its workers; 1 MiB at least."""
    try:
        if parse_size(text) >= MIB:
            return text
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    raise argparse.ArgumentTypeError(f"{text} is less than 1MiB")


def report(total: Verdict) -> str:
    """For people."""
    rate = total.operations / total.seconds if total.seconds else 0.0
    served = sum(total.reuse.values())
    reuse = ", ".join(f"{kind} {100 * n / served:.1f} %" for kind, n in sorted(total.reuse.items())) if served else "-"
    lines = [
        f"Weir: {total.operations:,} operations on {total.sessions} pools, {rate:,.0f} a second",
        *latency_table(total.latencies, total.seconds),
        *aligned([["refused, out of memory", f"{total.counts['refused']:,}"], ["allocations served by", reuse]]),
    ]
    if total.wrong:
        lines += [f"VIOLATION: {text}" for text in total.wrong]
    else:
        lines.append("final check: nothing wrong")
    return "\n".join(lines)


def make_coordinator(pause: Callable[[float], object], spawn: Callable[[Callable[[], object]], object]) -> Coordinator:
    """One for this process, with real locks."""
    with native_threads():
        return Coordinator(pause, spawn)

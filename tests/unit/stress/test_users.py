"""The locust users and their coordinator, with stand-ins for locust: who checks, who is told, what decides."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from allocator.stress import users
from allocator.stress.load import Verdict
from allocator.stress.users import ALARM, FINISH, VERDICT, Coordinator, HttpQuestions, PoolUser, add_options, options_of


class Hook:
    def __init__(self) -> None:
        self.listeners: list[Callable[..., Any]] = []

    def add_listener(self, listener: Callable[..., Any]) -> None:
        self.listeners.append(listener)

    def fire(self, **values: Any) -> None:
        for listener in self.listeners:
            listener(**values)


class Events:
    def __init__(self) -> None:
        self.hooks: dict[str, Hook] = {}

    def __getattr__(self, name: str) -> Hook:
        return self.hooks.setdefault(name, Hook())


class Runner:
    """A local one; the others say more."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any, str | None]] = []
        self.listeners: dict[str, Callable[..., Any]] = {}
        self.ended: list[str] = []

    def register_message(self, name: str, listener: Callable[..., Any]) -> None:
        self.listeners[name] = listener

    def send_message(self, name: str, data: Any = None, client_id: str | None = None) -> None:
        self.sent.append((name, data, client_id))

    def quit(self) -> None:
        self.ended.append("quit")

    def stop(self) -> None:
        self.ended.append("stop")


class Worker(Runner):
    master_host = "there"


class Master(Runner):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.clients = SimpleNamespace(all=[SimpleNamespace(id=name) for name in names])


def parsed(*words: str) -> Any:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(["--weir-limit", "64MiB", "--weir-share", "2MiB", "--weir-streams", "3", *words])


class Test:
    """One process of locust."""

    __test__ = False

    def __init__(self, runner: Runner, *words: str, web: Any = None, host: str = "", pause: Any = None) -> None:
        self.runner = runner
        self.spawned: list[Callable[[], object]] = []
        self.coordinator = Coordinator(pause or (lambda seconds: None), self.spawned.append)
        self.events = Events()
        self.environment: Any = SimpleNamespace(
            runner=runner, events=self.events, web_ui=web, host=host, parsed_options=parsed(*words),
            user_classes=[PoolUser], process_exit_code=None,
        )  # fmt: skip
        self.coordinator.install(self.events)
        self.events.init.fire(environment=self.environment, runner=runner, web_ui=web)
        self.events.test_start.fire(environment=self.environment)

    def user(self, workload: str = "steady") -> PoolUser:
        user = PoolUser()
        user.workload, user.coordinator, user.environment = workload, self.coordinator, self.environment
        user.on_start()
        return user

    def end(self) -> int | None:
        """Locust quits; its exit status, as far as it was decided here."""
        self.events.quitting.fire(environment=self.environment)
        self.events.quit.fire(exit_code=self.environment.process_exit_code)
        return self.environment.process_exit_code  # type: ignore[no-any-return]


def at_once(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


def test_a_batch_is_one_request_with_its_time_and_operations(capsys: pytest.CaptureFixture[str]) -> None:
    test = Test(Runner(), "--weir-batch", "40")
    requests: list[dict[str, Any]] = []
    test.events.request.add_listener(lambda **values: requests.append(values))
    user = test.user()
    assert user.one_batch(at_once) and user.one_batch(at_once)
    user.on_stop()
    assert [(one["name"], one["response_length"], one["exception"]) for one in requests] == [("steady", 40, None)] * 2
    assert all(one["response_time"] > 0 and one["request_type"] == "pool" for one in requests)
    test.events.test_stop.fire(environment=test.environment)
    assert test.end() is None
    shown = capsys.readouterr().err
    assert "80 operations on 1 pools" in shown and "p99.9 us" in shown and "final check: nothing wrong" in shown


def test_the_check_runs_once_however_the_test_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """S31: a signal fires quitting alone, a time limit fires test_stop first."""
    for stops in (0, 1, 2):
        test = Test(Runner())
        test.user().one_batch(at_once)
        assert test.coordinator.session is not None
        for _ in range(stops):
            test.events.test_stop.fire(environment=test.environment)
        test.end()
        assert test.coordinator.session.over
        assert test.coordinator.total.sessions == 1 and test.coordinator.total.operations == 100


def test_a_leak_gives_status_1_although_no_request_failed(capsys: pytest.CaptureFixture[str]) -> None:
    """S31."""
    test = Test(Runner())
    test.user().one_batch(at_once)
    session = test.coordinator.session
    assert session is not None
    session.pool.trim = lambda keep=0: 0  # type: ignore[method-assign]
    assert test.end() == 1
    assert "VIOLATION: leak" in capsys.readouterr().err


@pytest.mark.usefixtures("careless")
@pytest.mark.parametrize(("web", "ended"), [(None, "quit"), (True, "stop")])
def test_a_violation_fails_its_batch_and_ends_the_test(web: object, ended: str) -> None:
    page: Any = web and SimpleNamespace(app=SimpleNamespace(add_url_rule=lambda *args: None))
    test = Test(Runner(), "--weir-share", "8MiB", "--weir-seed", "3", web=page)
    failed: list[Any] = []
    test.events.request.add_listener(lambda **values: failed.append(values["exception"]))
    users_ = [test.user("many-users") for _ in range(2)]
    while all(user.one_batch(at_once) for user in users_):
        pass
    assert failed[-1].kind == "race"
    test.coordinator.alarm(test.environment)
    (spawned,) = test.spawned
    spawned()
    assert test.runner.ended == [ended]
    assert not users_[0].one_batch(at_once)
    assert test.end() == 1


def test_a_device_that_cannot_be_opened_is_said_once_and_ends_the_test() -> None:
    test = Test(Runner(), "--weir-device", "zero")
    user = test.user()
    assert not user.one_batch(at_once)
    user.on_stop()
    assert len(test.spawned) == 1 and test.end() == 1
    assert "--weir-device: 'zero' is neither sim nor" in test.coordinator.total.wrong[0]


def test_each_test_of_the_web_page_has_a_pool_of_its_own() -> None:
    test = Test(Runner())
    for _ in range(2):
        test.events.test_start.fire(environment=test.environment)
        test.user().one_batch(at_once)
        test.events.test_stop.fire(environment=test.environment)
    assert test.coordinator.total.sessions == 2 and test.coordinator.total.operations == 200
    assert test.end() is None


class OneSession:
    """A session whose verdict lies where the one before it lay, as memory that was freed does."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict

    def finish(self) -> Verdict:
        return self.verdict


def test_the_verdict_of_a_later_test_counts_wherever_it_lies_in_memory() -> None:
    """Each is dropped before the next is made: CPython gives the next one its address."""
    test = Test(Runner())
    addresses = set()
    for number in range(1, 51):
        test.events.test_start.fire(environment=test.environment)
        session = OneSession(Verdict(operations=1, wrong=[f"leak: {number}"], sessions=1))
        addresses.add(id(session.verdict))
        test.coordinator.session = session  # type: ignore[assignment]
        del session
        test.events.test_stop.fire(environment=test.environment)
        test.coordinator.conclude(test.environment)  # told again, counted once
        assert test.coordinator.total.sessions == number
        assert test.coordinator.total.wrong[-1] == f"leak: {number}"
    assert len(addresses) < 50, "no address came twice: this test shows nothing"


def test_a_worker_tells_its_verdict_when_it_stops_and_again_when_asked() -> None:
    test = Test(Worker())
    test.user().one_batch(at_once)
    report: dict[str, Any] = {}
    test.events.report_to_master.fire(client_id="me", data=report)
    assert Verdict.from_json(report["weir"]).operations == 100
    test.events.test_stop.fire(environment=test.environment)
    test.runner.listeners[FINISH](environment=test.environment, msg=None)
    assert [name for name, _, _ in test.runner.sent] == [VERDICT, VERDICT]
    assert test.runner.sent[0][1] == test.runner.sent[1][1]
    assert Verdict.from_json(test.runner.sent[0][1]).operations == 100


def test_a_worker_without_users_answers_with_an_empty_verdict() -> None:
    test = Test(Worker())
    report: dict[str, Any] = {}
    test.events.report_to_master.fire(client_id="me", data=report)
    assert report == {}
    test.runner.listeners[FINISH](environment=test.environment, msg=None)
    assert Verdict.from_json(test.runner.sent[0][1]).sessions == 0


def test_a_worker_says_what_it_found_before_the_runner_says_that_it_quits() -> None:
    """Locust calls listeners in reverse; the runner registers its own before the init event."""
    test = Test(Worker())
    assert test.events.quitting.listeners == [test.coordinator.on_quitting]
    events = Events()
    Coordinator(lambda s: None, lambda f: None).install(events)
    assert events.quitting.listeners == []


def test_a_worker_reports_nothing_on_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    test = Test(Worker())
    test.user().one_batch(at_once)
    test.end()
    assert "operations" not in capsys.readouterr().err


def test_a_worker_that_finds_something_tells_the_master_who_ends_the_test() -> None:
    worker, master = Test(Worker()), Test(Master("w1"))
    worker.coordinator.alarm(worker.environment)
    assert worker.runner.sent == [(ALARM, {}, None)]
    master.runner.listeners[ALARM](environment=master.environment, msg=SimpleNamespace(node_id="w1"))
    assert len(master.spawned) == 1


def answer(test: Test, worker: str, verdict: Verdict) -> None:
    message = SimpleNamespace(node_id=worker, data=verdict.to_json())
    test.runner.listeners[VERDICT](environment=test.environment, msg=message)


def test_a_master_asks_every_worker_and_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    def pause(seconds: float) -> None:
        for worker in ("w1", "w2"):
            answer(test, worker, Verdict(operations=10, sessions=1, wrong=["leak: 5 bytes"] if worker == "w2" else []))
            answer(test, worker, Verdict(operations=99))  # told twice, counted once

    test = Test(Master("w1", "w2"), pause=pause)
    test.events.worker_report.fire(client_id="w1", data={"weir": Verdict(operations=7, sessions=1).to_json()})
    test.events.worker_report.fire(client_id="w2", data={})
    assert test.coordinator.live()["operations"] == 7
    assert test.end() == 1
    assert test.runner.sent == [(FINISH, {}, "w1"), (FINISH, {}, "w2")]
    assert test.coordinator.total.operations == 20
    assert test.coordinator.total.wrong == ["worker w2: leak: 5 bytes"]
    assert "20 operations on 2 pools" in capsys.readouterr().err


def test_a_worker_that_never_answers_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "PATIENCE_S", 0)
    test = Test(Master("w1"))
    assert test.end() == 1
    assert test.coordinator.total.wrong == ["worker w1 never said what its final check found"]


def test_a_worker_that_has_gone_without_a_word_is_a_violation_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "PATIENCE_S", 0)
    test = Test(Master("w1", "w2"))
    answer(test, "w2", Verdict(sessions=1))
    test.runner.clients.all.clear()  # type: ignore[attr-defined]  # a master's
    assert test.end() == 1
    assert test.coordinator.total.wrong == ["worker w1 never said what its final check found"]


def test_users_that_ask_a_server_need_one(caplog: pytest.LogCaptureFixture) -> None:
    for host, classes, left in (
        ("", [PoolUser, HttpQuestions], [PoolUser]),
        ("http://here", [PoolUser, HttpQuestions], [PoolUser, HttpQuestions]),
        ("", [HttpQuestions], [HttpQuestions]),
    ):
        test = Test(Runner(), host=host)
        test.environment.user_classes = classes
        test.coordinator.on_init(test.environment, test.runner)
        assert test.environment.user_classes == left
    assert "name it, for example --host" in caplog.text


def test_the_page_beside_locusts_own_shows_microseconds() -> None:
    rules: dict[str, Callable[[], Any]] = {}
    page = SimpleNamespace(app=SimpleNamespace(add_url_rule=lambda path, name, view: rules.__setitem__(path, view)))
    test = Test(Runner(), web=page)
    test.user().one_batch(at_once)
    shown = rules["/weir"]()
    assert shown["operations"] == 100 and shown["pools"] == 1 and shown["latency_us"]["allocate"]["p50"] > 0
    assert shown["wrong"] == []
    test.end()


class Client:
    """Answers what it is told to."""

    def __init__(self, status: int, content: bytes) -> None:
        self.answer = SimpleNamespace(status_code=status, content=content, failure=self.fail)
        self.failures: list[str] = []
        self.asked: list[tuple[str, dict[str, str]]] = []

    def fail(self, text: str) -> None:
        self.failures.append(text)

    @contextmanager
    def get(self, path: str, headers: dict[str, str], catch_response: bool) -> Iterator[Any]:
        self.asked.append((path, headers))
        yield self.answer


@pytest.mark.parametrize(
    ("status", "content", "failures"),
    [
        (200, b"weir_reserved_bytes{", []),
        (200, b"odd", ["/metrics: there is no weir in the answer"]),
        (401, b"", ["/metrics: status 401"]),
    ],
)
def test_an_answer_without_what_it_should_hold_is_a_failure(status: int, content: bytes, failures: list[str]) -> None:
    test = Test(Runner(), "--weir-token", "secret-token")
    user = HttpQuestions()
    user.coordinator, user.client = test.coordinator, Client(status, content)
    user.ask("/metrics", b"weir")
    assert user.client.failures == failures
    assert user.client.asked == [("/metrics", {"Accept": "*/*", "Authorization": "Bearer secret-token"})]


def test_options_are_checked_where_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of(parsed("--weir-device", "2", "--weir-seed", "9"))
    assert (options.device, options.streams, options.limit, options.seed) == (2, 3, 64 << 20, 9)
    for words in (["--weir-batch", "0"], ["--weir-limit", "much"], ["--weir-share", "1KiB"], ["--weir-shape", "odd"]):
        with pytest.raises(SystemExit):
            parsed(*words)
    assert "less than 1MiB" in capsys.readouterr().err

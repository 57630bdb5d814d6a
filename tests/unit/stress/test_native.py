"""Real locks where gevent has replaced the threading module; and the file that locust reads, with stand-ins for locust.

The same with locust and gevent themselves: test_locust.py.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from allocator.stress import WORKLOADS, native
from allocator.stress.load import Options, Session
from allocator.sync import OwnedLock, use_lock_factory

LOCUSTFILE = Path(__file__).resolve().parents[3] / "stress/locustfile.py"
ORIGINAL = threading.Lock


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """gevent, as far as it matters here, has replaced `threading.Lock`."""

    def greenlet_lock() -> None:
        raise AssertionError("a greenlet's lock was made")

    monkey = ModuleType("gevent.monkey")
    originals = {("threading", "Lock"): ORIGINAL}
    monkey.is_module_patched = lambda name: True  # type: ignore[attr-defined]  # a stand-in
    monkey.get_original = lambda name, item: originals.get((name, item), getattr(sys.modules[name], item))  # type: ignore[attr-defined]  # a stand-in
    monkeypatch.setitem(sys.modules, "gevent.monkey", monkey)
    monkeypatch.setattr(threading, "Lock", greenlet_lock)
    return greenlet_lock


def test_originals_are_back_inside_and_only_there(replaced: Callable[[], object]) -> None:
    with native.native_threads():
        assert threading.Lock is ORIGINAL
    assert threading.Lock is replaced


def test_they_are_put_back_after_an_error_as_well(replaced: Callable[[], object]) -> None:
    with pytest.raises(ZeroDivisionError), native.native_threads():
        _ = 1 / 0
    assert threading.Lock is replaced


def test_nothing_changes_where_nothing_was_replaced() -> None:
    assert not native.replaced()
    with native.native_threads():
        assert threading.Lock is ORIGINAL


@pytest.mark.usefixtures("replaced")
def test_a_session_makes_its_pool_with_real_locks() -> None:
    try:
        session = Session(Options())
        assert isinstance(session.pool._lock, OwnedLock)
        assert type(session.pool._lock.inner).__module__ == "_thread"
        session.join("steady").play(20)
        assert session.finish().wrong == []
    finally:
        use_lock_factory(None)


class Hook:
    def __init__(self) -> None:
        self.listeners: list[Any] = []

    def add_listener(self, listener: Any) -> Any:
        self.listeners.append(listener)
        return listener


class Events:
    def __init__(self) -> None:
        self.hooks: dict[str, Hook] = {}

    def __getattr__(self, name: str) -> Hook:
        return self.hooks.setdefault(name, Hook())


class User:
    pass


class HttpUser(User):
    pass


class LoadTestShape:
    start_time = 0.0


@pytest.fixture
def locustfile(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file as locust would import it: (its content, locust's events, gevent's thread pool)."""
    pool = SimpleNamespace(apply=lambda function, arguments: function(*arguments), maxsize=10)
    locust: Any = ModuleType("locust")
    locust.User, locust.HttpUser, locust.LoadTestShape = User, HttpUser, LoadTestShape
    locust.events = Events()
    locust.task = lambda what: what if callable(what) else lambda function: function
    locust.constant = locust.constant_throughput = lambda seconds: lambda user: seconds
    locust.between = lambda least, most: lambda user: least
    stop: Any = ModuleType("locust.exception")
    stop.StopUser = type("StopUser", (Exception,), {})
    gevent: Any = ModuleType("gevent")
    gevent.sleep, gevent.spawn = (lambda seconds: None), (lambda function: function())
    loop = SimpleNamespace(run_callback_threadsafe=lambda function, error: function(error))
    gevent.get_hub = lambda: SimpleNamespace(threadpool=pool, loop=loop)
    thrown: list[Any] = []
    main = SimpleNamespace(throw=thrown.append)
    gevent.getcurrent = lambda: main
    for name, module in (("locust", locust), ("locust.exception", stop), ("gevent", gevent)):
        monkeypatch.setitem(sys.modules, name, module)
    forks: list[dict[str, Any]] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: forks.append(hooks))
    spec = importlib.util.spec_from_file_location("locustfile", LOCUSTFILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return SimpleNamespace(
        **{**vars(module), "locust": locust, "pool": pool, "forks": forks, "thrown": thrown, "stop": stop.StopUser}
    )


def user_classes(file: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(file).items() if isinstance(value, type) and issubclass(value, User)}


def test_the_file_has_a_class_for_each_workload_and_three_that_ask_a_server(locustfile: Any) -> None:
    classes = {name: one for name, one in user_classes(locustfile).items() if not one.__dict__.get("abstract")}
    assert {one.workload for one in classes.values() if not issubclass(one, HttpUser)} == set(WORKLOADS)
    assert {name for name, one in classes.items() if issubclass(one, HttpUser)} == {
        "ScrapeUser", "PageUser", "SnapshotUser",
    }  # fmt: skip
    assert classes["ManyUsersUser"].workload == "many-users"


def test_what_a_forked_worker_makes_anew_is_made_between_the_two_swaps(locustfile: Any) -> None:
    assert [hooks["after_in_child"].__name__ for hooks in locustfile.forks] == ["swap_in", "swap_out"]


def test_a_user_whose_session_is_over_ends(locustfile: Any) -> None:
    user = locustfile.SteadyUser()
    with pytest.raises(locustfile.stop):
        user.batch()


def test_the_users_of_a_server_ask_for_everything_it_has(locustfile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name, tasks in (
        ("ScrapeUser", ("scrape", "scrape_openmetrics")),
        ("PageUser", ("page", "health")),
        ("SnapshotUser", ("snapshot",)),
    ):
        cls = user_classes(locustfile)[name]
        monkeypatch.setattr(cls, "ask", lambda user, path, *expected: asked.append(path))
        for task in tasks:
            getattr(cls(), task)()
    assert asked == ["/metrics", "/metrics", "/", "/healthz", "/snapshot"]


def test_an_interruption_is_the_main_greenlets_and_the_second_one_everybodys(locustfile: Any) -> None:
    (prepare,) = [one for one in locustfile.locust.events.init.listeners if one.__name__ == "_prepare"]
    before = signal.getsignal(signal.SIGINT)
    try:
        options = SimpleNamespace(weir_threads=3, weir_shape="")
        prepare(environment=SimpleNamespace(parsed_options=options))
        os.kill(os.getpid(), signal.SIGINT)
        assert [type(error) for error in locustfile.thrown] == [KeyboardInterrupt]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_threads_and_shape_are_those_asked_for(locustfile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (prepare,) = [one for one in locustfile.locust.events.init.listeners if one.__name__ == "_prepare"]
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    options = SimpleNamespace(weir_threads=3, weir_shape="", num_users=None, weir_length=10)
    environment = SimpleNamespace(parsed_options=options, shape_class=None)
    prepare(environment=environment)
    assert locustfile.pool.maxsize == 3 and environment.shape_class is None
    options.weir_shape = "steps"
    prepare(environment=environment)
    shape: Any = environment.shape_class
    assert shape.tick() is None  # it began, by the stand-in's clock, long ago
    shape.start_time = time.perf_counter()
    assert shape.tick() == (2, 8.0)

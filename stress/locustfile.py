"""For locust: a user class for each workload, HTTP users for `weir serve`, load shapes, and one final check.

    locust -f "$(weir stress --locustfile)" --headless -u 8 -t 30s
    locust -f "$(weir stress --locustfile)" --processes 4 ChurnUser GarbageUser
    locust -f "$(weir stress --locustfile)" --host http://127.0.0.1:9478 ScrapeUser PageUser SnapshotUser

Rule: *the pool is used by real threads with real locks*.  Locust's users are greenlets of one thread; each hands its
batch of operations to gevent's thread pool, and reports one request for it.  Devices are opened by the first user of
a process, never before: `--processes` forks after this file was imported.

Only locust gets anything from this file: importing locust replaces the threading module of the whole process, and
whoever looks at this package must not suffer that.  Next: users.py, load.py, native.py.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

if "locust" in sys.modules:
    import gevent
    import locust
    from locust.exception import StopUser

    # From the file, since the package itself is not imported before the original threading module is back in place.
    _spec = importlib.util.spec_from_file_location("_weir_native", Path(__file__).resolve().with_name("native.py"))
    assert _spec is not None and _spec.loader is not None
    _native = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_native)
    # `--processes` forks, and what makes its locks anew in the child must find the original ones there as well: what is
    # registered first runs first, and what is registered last, last.
    os.register_at_fork(after_in_child=_native.swap_in)
    with _native.native_threads():
        from allocator.stress import users
        from allocator.stress.shapes import SHAPES
        from allocator.stress.workloads import WORKLOADS
    os.register_at_fork(after_in_child=_native.swap_out)

    events: Any = locust.events
    coordinator = users.make_coordinator(gevent.sleep, gevent.spawn)
    coordinator.install(events)

    class _PoolUser(users.PoolUser, locust.User):
        abstract = True
        wait_time = locust.constant(0)

        @locust.task
        def batch(self) -> None:
            """As many operations as a batch has, in a real thread."""
            if not self.one_batch(gevent.get_hub().threadpool.apply):
                raise StopUser

    for _workload in WORKLOADS.values():
        _name = "".join(map(str.capitalize, _workload.name.split("-"))) + "User"
        _members = {
            "workload": _workload.name,
            "coordinator": coordinator,
            "__doc__": _workload.about,
            "abstract": False,
        }
        globals()[_name] = type(_name, (_PoolUser,), _members)

    class _Asker(users.HttpQuestions, locust.HttpUser):
        abstract = True
        coordinator = coordinator

    class ScrapeUser(_Asker):
        """A Prometheus that scrapes, in both formats."""

        wait_time = locust.constant_throughput(2)

        @locust.task(3)
        def scrape(self) -> None:
            self.ask("/metrics", b"weir_reserved_bytes{")

        @locust.task
        def scrape_openmetrics(self) -> None:
            self.ask("/metrics", b"# EOF", "application/openmetrics-text; version=1.0.0")

    class PageUser(_Asker):
        """Somebody who opens the live page, and a health check."""

        wait_time = locust.between(0.5, 2)

        @locust.task
        def page(self) -> None:
            self.ask("/", b"<html")

        @locust.task(2)
        def health(self) -> None:
            self.ask("/healthz", b"")

    class SnapshotUser(_Asker):
        """An engineer who takes snapshots."""

        wait_time = locust.between(1, 3)

        @locust.task
        def snapshot(self) -> None:
            self.ask("/snapshot", b"segments")

    def _prepare(environment: Any, **_: object) -> None:
        """Threads for the batches, the shape asked for, and an interruption that nobody else has to suffer.

        Python raises it in whatever greenlet runs, which may be the one that listens to the workers; here it is the
        main one's, where locust expects it.
        """
        main, loop = gevent.getcurrent(), gevent.get_hub().loop

        def interrupted(number: int, frame: object) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # the second one ends it where it is
            loop.run_callback_threadsafe(main.throw, KeyboardInterrupt())

        signal.signal(signal.SIGINT, interrupted)
        options = environment.parsed_options
        gevent.get_hub().threadpool.maxsize = options.weir_threads
        if options.weir_shape:
            environment.shape_class = _shape(options.weir_shape, options.num_users or 8, options.weir_length)

    events.init.add_listener(_prepare)

    def _shape(name: str, most: int, seconds: int) -> Any:
        class Shape(locust.LoadTestShape):
            use_common_options = True

            def tick(self) -> tuple[int, float] | None:
                return SHAPES[name](time.perf_counter() - self.start_time, most, seconds)

        return Shape()  # type: ignore[no-untyped-call]  # locust's own constructor says nothing of types

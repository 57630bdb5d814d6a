"""What pools are read on: one thread, beside the event loop, and one reading for all who wait for it.

Rules:

* A reading that somebody gets has begun after he asked: nothing comes from a cache.
* One reading at a time, and a pause behind each, several times as long as it took: however many ask, the program
  keeps most of the interpreter.
* The thread is a daemon: a driver call that hangs holds up answers, not the loop and not the interpreter's exit.

Next: readings.py (what is read).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

TIMES: Final = 4.0
"""The pause behind a reading, in times of what it took."""


class Worker:
    """A daemon thread that does one job after the other."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()

    async def run(self, job: Callable[[], V]) -> V:
        """Do a job there; its result, or what it raised."""
        future: concurrent.futures.Future[V] = concurrent.futures.Future()
        self._jobs.put((job, future))
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """End the thread once its present job is done; does not wait."""
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None]) -> None:
    while (item := jobs.get()) is not None:
        job, future = item
        del item
        if future.set_running_or_notify_cancel():
            try:
                result = job()
            except BaseException as error:  # it is the asker's
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del job, future  # a thread that waits holds nobody's pool


class Shared(Generic[K, V]):
    """Readings that are shared by all who ask at the same time.

    work(keys): read once, for every key that was asked for; a dict of results.  gap_s: the shortest pause.
    Within one event loop only.
    """

    def __init__(self, worker: Worker, work: Callable[[Iterable[K]], dict[K, V]], gap_s: float) -> None:
        self._worker = worker
        self._work = work
        self._gap_s = gap_s
        self._keys: dict[K, None] = {}
        self._next: asyncio.Task[dict[K, V]] | None = None
        self._running: asyncio.Task[dict[K, V]] | None = None
        self._not_before = 0.0

    async def get(self, key: K) -> V:
        """The result for `key` of a reading that begins after this call."""
        self._keys[key] = None
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._read(self._running))
        task = self._next
        # Shielded: who goes away must not take it from the others.
        return (await asyncio.shield(task))[key]

    async def _read(self, before: asyncio.Task[dict[K, V]] | None) -> dict[K, V]:
        loop = asyncio.get_running_loop()
        if before is not None:
            await asyncio.wait([before])
        if (pause := self._not_before - loop.time()) > 0:
            await asyncio.sleep(pause)
        self._running, self._next = self._next, None  # who comes now waits for the next one
        keys, self._keys = self._keys, {}
        began = loop.time()
        try:
            return await self._worker.run(lambda: self._work(keys))
        finally:
            ended = loop.time()
            self._not_before = ended + max(self._gap_s, TIMES * (ended - began))
            self._running = None

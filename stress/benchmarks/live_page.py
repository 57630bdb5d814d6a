"""The live page with an hour of history and 20,000 blocks in the map: how long until it is there, and a second later.

What is timed is what a visitor sees, in a headless Chromium on the same machine:

* load: from asking for the page to the frame in which every panel and the map are drawn.
* update: from the first message of a sample to the frame after the last of them.  Once with a few per cent of the
  blocks changed, as a running program does, and once with all of them.

Needs selenium, Bokeh, Chromium and its driver; times include whatever else the machine does.
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from allocator import Allocation, CachingAllocator, Config, SimDevice, Stream
from allocator.errors import AllocatorError
from allocator.metrics import History, serve

BLOCKS = 20_000
HOUR = 3600
LOADS = 7
UPDATES = 12
DRIVERS = ("chromedriver", "chromium-driver")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# In the page, before anything else: notes when the map was drawn, and how long each update took.
PROBE = """
window.probe = {drawn: 0, updates: []};
(function watch() {
  const doc = window.Bokeh?.documents?.[0];
  if (document.documentElement?.dataset.ready !== "yes" || !weir.map.painted) return requestAnimationFrame(watch);
  const frame = (then) => requestAnimationFrame(() => setTimeout(then, 0));
  frame(() => frame(() => { window.probe.drawn = performance.now(); }));  // the picture is shown a frame later
  const apply = doc.apply_json_patch.bind(doc);
  let began = 0, last = 0;
  doc.apply_json_patch = (...patch) => {
    if (!began) {
      began = performance.now();
      const end = () => requestAnimationFrame(() => setTimeout(() => {
        const now = performance.now();
        if (now - last < 8) return end();
        window.probe.updates.push(now - began);
        began = 0;
      }, 0));
      end();
    }
    apply(...patch);
    last = performance.now();
  };
})();
"""


class Clock:
    """An hour in no time, and then the real one."""

    def __init__(self) -> None:
        self._now = time.time() - HOUR - 1
        self._offset: float | None = None

    def __call__(self) -> float:
        if self._offset is not None:
            return time.monotonic() + self._offset
        self._now += 1
        return self._now

    def go_on(self) -> None:
        """From here on in real time."""
        self._offset = self._now - time.monotonic()


class Program:
    """Holds many blocks of 8 streams, and exchanges some of them when told."""

    def __init__(self, pool: CachingAllocator, gpu: SimDevice) -> None:
        self._pool = pool
        self._random = random.Random(7)
        self._streams = [Stream(gpu, name=f"stream {n}") for n in range(8)]
        self._held: list[Allocation] = []
        while sum(pool.stats().blocks.values()) < BLOCKS:
            for _ in range(500):
                self._held.append(self._one())
            for at in range(0, len(self._held) // 8, 9):  # holes, so that idle blocks lie between
                self._held[-at - 1].close()
            self._held = [one for one in self._held if not one.closed]

    def _one(self) -> Allocation:
        return self._pool.allocate(self._random.randint(1, 1 << 17), stream=self._random.choice(self._streams))

    def exchange(self, share: float) -> None:
        """Free that share of the blocks, and allocate as many."""
        chosen = self._random.sample(range(len(self._held)), int(len(self._held) * share))
        for at in chosen:
            self._held[at].close()
        for at in chosen:
            self._held[at] = self._one()


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        raise AllocatorError("this benchmark needs selenium: pip install selenium") from None
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = next(filter(None, map(shutil.which, DRIVERS)), None)
    if program is None or driver is None:
        raise AllocatorError("this benchmark needs Chromium and its driver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,2200"):
        options.add_argument(argument)
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


@contextmanager
def served(pool: CachingAllocator, history: History) -> Iterator[str]:
    """The page as `serve` serves it, with this history behind it; its address."""
    with mock.patch("allocator.metrics.history.History", lambda pools: history), serve(pool, port=0) as server:
        yield server.url


def until(condition: Callable[[], Any]) -> Any:
    """The first true answer; AllocatorError after a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AllocatorError("the page did not get there in a minute")


def measure() -> dict[str, list[float]]:
    """Milliseconds of each load and update."""
    gpu = SimDevice(memory=64 << 30)
    pool = CachingAllocator(gpu, config=Config(), name="benchmark")
    program = Program(pool, gpu)
    clock = Clock()
    history = History(lambda: [pool], clock=clock)
    for _ in range(HOUR):
        program.exchange(0.001)
        history.sample()
    clock.go_on()
    found: dict[str, list[float]] = {"load": [], "update": [], "update, all blocks new": []}
    history.start()
    with served(pool, history) as url, browser() as chrome:
        chrome.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": PROBE})
        for _ in range(LOADS):
            chrome.get(url)
            found["load"].append(until(lambda: chrome.execute_script("return window.probe.drawn")))
        for name, share in (("update", 0.03), ("update, all blocks new", 1.0)):
            chrome.execute_script("window.probe.updates.length = 0")
            while len(found[name]) < UPDATES:
                program.exchange(share)
                time.sleep(history.interval_s)
                found[name] = chrome.execute_script("return window.probe.updates")
        found["blocks"] = [float(sum(pool.stats().blocks.values()))]
        found["rows"] = [float(len(history.pools()[0].since(0)["time"]))]
    history.stop()
    return found


def main() -> tuple[str, dict[str, Any]]:
    """Text for people, and the figures."""
    found = measure()
    lines = [f"live page, {found['rows'][0]:.0f} samples, {found['blocks'][0]:,.0f} blocks; milliseconds"]
    lines.append(f"  {'':28} {'median':>8} {'least':>8} {'most':>8}")
    for name in ("load", "update", "update, all blocks new"):
        values = found[name]
        lines.append(f"  {name:28} {statistics.median(values):8.0f} {min(values):8.0f} {max(values):8.0f}")
    return "\n".join(lines), dict(found)

"""A headless Chromium, and a simulated pool under a trace with its live page to look at.

Skipped, with the reason, where the browser or its driver is missing; CI installs both.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allocator import CachingAllocator, Config, SimDevice
from allocator.metrics import Server, serve
from allocator.traces import LiveReplay, read_trace
from tests.browser.chrome import Browser

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "allocator/traces/samples/serve-8-streams.csv.gz"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is missing: pip install selenium")
    from selenium.webdriver.chrome.service import Service

    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("Chromium or its driver is missing (Debian: packages chromium and chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    yield Browser(chrome)
    chrome.quit()


@pytest.fixture
def served(chromium: Browser) -> Iterator[Callable[..., str]]:
    """Serves pools until the end of the test; returns the page's address."""
    servers: list[Server] = []

    def start(*pools: CachingAllocator) -> str:
        servers.append(serve(list(pools), port=0))
        return servers[-1].url

    yield start
    chromium.leave()  # before its server goes, or it would complain in the next test
    for server in servers:
        server.close()


@pytest.fixture
def busy() -> Iterator[CachingAllocator]:
    """A pool that works: a recorded inference server, again and again."""
    gpu = SimDevice(memory=8 << 30)
    with CachingAllocator(gpu, config=Config(), name="busy") as pool:
        live = LiveReplay(read_trace(SAMPLE), pool, loop=True).start()
        yield pool
        live.stop()

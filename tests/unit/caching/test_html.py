"""A pool in a notebook cell: readable, self-contained, escaped, and never an error."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.caching.html import MOST_STREAMS
from allocator.errors import DriverError, OutOfMemoryError

MIB = 1 << 20
VOID = {"br", "hr", "img", "input", "link", "meta"}


class Page(HTMLParser):
    """The text of a page; AssertionError unless every element is closed in its turn."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def gpu() -> SimDevice:
    return SimDevice(memory=1 << 30)


@pytest.fixture
def make(gpu: SimDevice) -> Callable[..., CachingAllocator]:
    def make(name: str = "main", **config: Any) -> CachingAllocator:
        return CachingAllocator(gpu, config=Config(**config), name=name)

    return make


def show(pool: CachingAllocator) -> Page:
    """What the cell shows."""
    return Page(pool._repr_html_())


def test_a_new_pool_says_that_there_is_nothing_yet(make: Callable[..., CachingAllocator]) -> None:
    page = show(make())
    assert page.text.startswith("main on sim:0 0 B reserved")
    assert "nothing has been allocated yet" in page.text
    assert "no stream holds memory in flight" in page.text


def test_totals_reuse_streams_and_fragmentation_are_those_of_the_statistics(
    gpu: SimDevice, make: Callable[..., CachingAllocator]
) -> None:
    pool = make(limit=64 * MIB)
    copy, compute = Stream(gpu, name="copy"), Stream(gpu, name="compute")
    held = pool.allocate(4 * MIB, stream=compute)
    gpu.hold(copy.handle)
    for freed in [pool.allocate(nbytes, stream=copy) for nbytes in (2 * MIB, 4 * MIB)]:
        gpu.launch(copy, writes=[freed])
        freed.record_stream(compute)
        freed.close()
    page = show(pool)
    stats = pool.stats()
    assert (stats.allocated_bytes, stats.in_flight_bytes) == (4 * MIB, 6 * MIB)
    assert "10.00 MiB reserved of 64.00 MiB allowed" in page.text
    assert "allocated 4.00 MiB" in page.text
    assert "in flight 6.00 MiB" in page.text
    assert "idle 0 B" in page.text
    assert "private" not in page.text
    assert "3 allocations, by what made their memory safe" in page.text
    assert "new_memory 3 never used before" in page.text
    assert "fragmentation: external 0% (largest free block 0 B), internal 0%" in page.text
    assert page.text.endswith("in flight, by stream copy 6.00 MiB")
    assert not held.closed
    gpu.resume(copy.handle)


def test_of_many_streams_those_that_hold_most_are_listed(gpu: SimDevice, make: Callable[..., CachingAllocator]) -> None:
    pool = make()
    streams = [Stream(gpu, name=f"s{n:02}") for n in range(MOST_STREAMS + 3)]
    for n, stream in enumerate(streams):
        gpu.hold(stream.handle)
        freed = pool.allocate((n + 1) * MIB, stream=stream)
        gpu.launch(stream, writes=[freed])
        freed.close()
    text = show(pool).text
    listed = re.findall(r"(s\d\d) (\d+)\.00 MiB", text)
    assert listed == [(f"s{n:02}", str(n + 1)) for n in range(MOST_STREAMS + 2, 2, -1)]
    assert text.endswith("3 more 6.00 MiB")
    for stream in streams:
        gpu.resume(stream.handle)


def test_the_age_of_what_does_not_drain_is_said(gpu: SimDevice, make: Callable[..., CachingAllocator]) -> None:
    pool = make()
    gpu.advance(1000)
    stuck, other = Stream(gpu), Stream(gpu)
    gpu.hold(stuck.handle)
    freed = pool.allocate(MIB, stream=stuck)
    gpu.launch(stuck, writes=[freed])
    freed.record_stream(other)
    freed.close()
    pool.stats()
    gpu.advance(90_000_000_000)
    assert "the oldest for 90.0 s" in show(pool).text
    gpu.resume(stuck.handle)


def test_names_are_escaped(gpu: SimDevice, make: Callable[..., CachingAllocator]) -> None:
    nasty = "<script>alert('x')</script>&\""
    pool = make(name=nasty)
    stream = Stream(gpu, name=nasty[:30])
    gpu.hold(stream.handle)
    freed = pool.allocate(MIB, stream=stream)
    gpu.launch(stream, writes=[freed])
    freed.close()
    page = show(pool)
    assert page.text.startswith(nasty)
    assert nasty[:30] in page.text.removeprefix(nasty)
    assert "script" not in {tag for tag, _ in page.elements}
    gpu.resume(stream.handle)


def test_it_brings_no_script_no_style_sheet_and_nothing_from_elsewhere(make: Callable[..., CachingAllocator]) -> None:
    page = show(make())
    assert {tag for tag, _ in page.elements} <= {"div", "span", "table", "tr", "td"}
    for _, attributes in page.elements:
        assert set(attributes) <= {"style", "title"}
        assert "url(" not in (attributes.get("style") or "")


def test_text_takes_its_colour_from_the_page_so_that_light_and_dark_work(make: Callable[..., CachingAllocator]) -> None:
    colours = {
        colour
        for _, attributes in show(make()).elements
        for colour in re.findall(r"(?<![-\w])color:([^;]+)", attributes.get("style") or "")
    }
    assert colours == {"inherit"}


def test_a_closed_pool_says_so(make: Callable[..., CachingAllocator]) -> None:
    pool = make()
    held = pool.allocate(MIB)
    pool.close()
    page = show(pool)
    assert "closed: no new allocations" in page.text
    assert "allocated 1.00 MiB" in page.text
    del held
    assert "closed" in show(pool).text


def test_a_lost_device_says_so(gpu: SimDevice, make: Callable[..., CachingAllocator]) -> None:
    pool = make()
    held = pool.allocate(MIB)
    gpu.fail("cuMemCreate", error="CUDA_ERROR_ILLEGAL_ADDRESS", sticky=True)
    with pytest.raises(DriverError):
        pool.allocate(512 * MIB)
    assert pool.stats().device_lost == 1
    page = show(pool)
    assert "the device is lost (CUDA_ERROR_ILLEGAL_ADDRESS)" in page.text
    assert "allocated 1.00 MiB" in page.text
    assert not held.closed


def test_errors_raised_to_the_program_are_said(make: Callable[..., CachingAllocator]) -> None:
    pool = make(limit=MIB)
    with pytest.raises(OutOfMemoryError):
        pool.allocate(64 * MIB)
    assert pool.stats().device_lost == 0
    assert "1 allocations have failed: out of memory" in show(pool).text


def test_a_pool_from_before_a_fork_says_so_and_takes_no_lock(make: Callable[..., CachingAllocator]) -> None:
    pool = make()
    pool._registry.forked = True
    try:
        shown: list[str] = []
        with pool._lock, pool._registry.lock:  # as another thread of the parent may have held them
            thread = threading.Thread(target=lambda: shown.append(pool._repr_html_()), daemon=True)
            thread.start()
            thread.join(20)
        assert "does not survive a fork" in Page(shown[0]).text
    finally:
        pool._registry.forked = False


def test_whatever_goes_wrong_is_shown_and_not_raised(
    make: Callable[..., CachingAllocator], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make()

    def stats(**_: object) -> None:
        raise RuntimeError("<broken>")

    monkeypatch.setattr(pool, "stats", stats)
    page = show(pool)
    assert page.text == "main on sim:0 cannot be read: <broken>"


def test_showing_a_pool_keeps_no_memory_alive(gpu: SimDevice, make: Callable[..., CachingAllocator]) -> None:
    pool = make()
    held = pool.allocate(MIB)
    show(pool)
    del held
    gc.collect()
    gpu.run_until_idle()
    assert pool.stats().allocated_bytes == 0

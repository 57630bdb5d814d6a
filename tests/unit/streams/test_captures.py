"""Captures that hooks tell of: how their begin waits for calls that other threads are in."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from allocator import SimDevice, Stream
from allocator.streams import Registry, captures


@pytest.fixture
def gpu() -> Iterator[SimDevice]:
    yield SimDevice()


def test_s18_a_capture_begins_once_the_threads_in_calls_on_its_stream_have_left(gpu: SimDevice) -> None:
    stream = Stream(gpu)
    registry = Registry.of(gpu)
    inside, leave, begun = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        with registry.borrow(stream.line):
            inside.set()
            assert leave.wait(10)

    def begin() -> None:
        registry.captures.end(registry.captures.begin(stream.line, stream.handle))
        begun.set()

    threads = [threading.Thread(target=call), threading.Thread(target=begin)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    assert not begun.wait(0.1)
    leave.set()
    assert begun.wait(10)
    for thread in threads:
        thread.join()


def test_s18_a_call_that_never_comes_back_does_not_stop_the_program(
    gpu: SimDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may wait for what the capturing thread does next: a host callback, a full queue."""
    monkeypatch.setattr(captures, "PATIENCE_S", 0.05)
    stream = Stream(gpu)
    registry = Registry.of(gpu)
    with registry.borrow(stream.line), caplog.at_level(logging.WARNING, "allocator"):
        registry.captures.end(registry.captures.begin(stream.line, stream.handle))
    assert "a thread has been in a call on its stream" in caplog.text

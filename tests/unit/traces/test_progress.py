"""Progress is for people who wait: nothing on stdout, nothing for what ends soon."""

from __future__ import annotations

import io

from allocator.traces import Meter


class Screen(io.StringIO):
    """A stream that says whether it is a terminal."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_terminal_gets_one_line_that_is_rewritten_and_wiped() -> None:
    screen, clock = Screen(True), Clock()
    with Meter("job", screen, clock) as meter:
        meter.rows(10, 100)
        assert screen.getvalue() == ""
        clock.now += 2
        meter.rows(50, 100)
        meter.rows(51, 100)  # too soon
        clock.now += 0.3
        meter.share(0.9)
    shown = screen.getvalue().split("\r")
    assert [text.rstrip() for text in shown] == ["", "job: 50 %, 25 rows/s", "job: 90 %", "", ""]


def test_a_file_gets_a_line_every_few_seconds() -> None:
    screen, clock = Screen(False), Clock()
    with Meter("job", screen, clock) as meter:
        for done in range(0, 120, 10):
            meter.rows(done, 0)
            clock.now += 1
    assert screen.getvalue() == "job: 10 rows/s\njob: 10 rows/s\n"

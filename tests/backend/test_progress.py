"""What is shown on a terminal and in a log."""

from __future__ import annotations

from io import StringIO

from backend.progress import StreamProgress


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_log_gets_a_line_per_stage_and_per_quarter() -> None:
    stream, clock = StringIO(), Clock()
    progress = StreamProgress(stream, clock)
    progress.stage("fetching")
    clock.now_s += 2.5
    for done in range(0, 101, 5):
        progress.advance(done * 10**6, 100 * 10**6)
    progress.stage("converting")
    progress.close()
    assert stream.getvalue().splitlines() == [
        "headrace    0.0 s  fetching",
        "headrace    2.5 s  fetching 25% of 100 MB",
        "headrace    2.5 s  fetching 50% of 100 MB",
        "headrace    2.5 s  fetching 75% of 100 MB",
        "headrace    2.5 s  fetching 100% of 100 MB",
        "headrace    2.5 s  converting",
    ]


def test_terminal_redraws_one_line_at_most_ten_times_a_second() -> None:
    stream, clock = Terminal(), Clock()
    progress = StreamProgress(stream, clock)
    progress.stage("fetching")
    for _ in range(100):
        clock.now_s += 0.01
        progress.advance(50, 100)
    assert 8 <= stream.getvalue().count("\r") <= 12
    assert "[############............]  50%" in stream.getvalue()
    progress.close()
    assert stream.getvalue().endswith("\n")


def test_share_never_exceeds_one_and_nothing_to_do_is_done() -> None:
    stream = Terminal()
    progress = StreamProgress(stream, Clock())
    progress.stage("fetching")
    progress.advance(200, 100)
    progress.advance(0, 0)
    assert stream.getvalue().count("100%") == 2


def test_closing_twice_writes_nothing_more() -> None:
    stream = Terminal()
    progress = StreamProgress(stream, Clock())
    progress.close()
    assert stream.getvalue() == ""

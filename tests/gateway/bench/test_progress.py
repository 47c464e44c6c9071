"""The line of progress."""

from __future__ import annotations

import io

from gateway.bench.progress import ProgressLine, Tally
from tests.gateway.bench.runs import sample


def tally(num_ended: int = 4, num_failed: int = 0) -> Tally:
    counted = Tally()
    for number in range(num_ended + 2):
        counted.sent()
        if number < num_ended:
            counted.num_frames += 3
            error = "connect" if number < num_failed else None
            counted.ended(sample(number, output_tokens=6, error=error))
    return counted


def test_line_says_how_far_it_is() -> None:
    line = ProgressLine(tally(num_failed=1), io.StringIO(), total=8, is_terminal=True)
    assert line.line(2.0) == (
        "[##########..........] 4/8  2 running  2.0 req/s  12 tok/s  TTFT p50 1000 ms  1 failed"
    )


def test_line_goes_by_time_where_that_is_the_end() -> None:
    line = ProgressLine(tally(0), io.StringIO(), duration_s=10.0, is_terminal=False)
    assert line.line(2.0) == "2/10 s  2 running  0.0 req/s  0 tok/s"
    assert "[" + "#" * 20 + "]" in ProgressLine(tally(), io.StringIO(), None, 10.0, True).line(99.0)


def test_line_without_an_end_counts() -> None:
    assert ProgressLine(tally(), io.StringIO()).line(2.0).startswith("4 done in 2 s")


def test_rates_are_of_the_last_seconds() -> None:
    counted = tally(4)
    line = ProgressLine(counted, io.StringIO(), total=99, is_terminal=True)
    for second in range(1, 20):
        assert line.line(second)
    assert "  0.0 req/s  0 tok/s" in line.line(20)
    counted.num_frames += 50
    assert "  20 tok/s" in line.line(20.0 + 1e-9)


def test_terminal_is_redrawn_five_times_a_second_at_most() -> None:
    out = io.StringIO()
    line = ProgressLine(tally(), out, total=8, is_terminal=True)
    for step in range(100):
        line.tick(step / 100)
    assert out.getvalue().count("\r") == 5
    assert "\n" not in out.getvalue()
    line.close()
    assert out.getvalue().endswith("\r\x1b[K")


def test_elsewhere_a_line_comes_each_ten_seconds() -> None:
    out = io.StringIO()
    line = ProgressLine(tally(), out, total=8)
    for second in range(35):
        line.tick(float(second))
    line.close()
    assert len(out.getvalue().splitlines()) == 3
    assert "\r" not in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_line_is_cut_to_the_terminal() -> None:
    out = io.StringIO()
    line = ProgressLine(tally(num_failed=1), out, total=8, is_terminal=True)
    line.tick(1.0)
    assert len(out.getvalue().strip("\r").removesuffix("\x1b[K")) < 80

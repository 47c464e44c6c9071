"""The table for a terminal."""

from __future__ import annotations

import pytest

from gateway.bench.document import document_of
from gateway.bench.figures import FigureOptions
from gateway.bench.rows import share, shown
from gateway.bench.table import table
from tests.gateway.bench.runs import document, run, sample

EXPECTED = """\
http://127.0.0.1:8000/v1/chat/completions  scripted
closed loop, 2 at once; prompts 10, answers 3 tokens

Requests         2 measured, 1 ok, 1 failed
Measured         1.50 s of 1.50 s
Requests/s       0.667
Output tokens/s  2.00
Prompt tokens/s  6.67
Total tokens/s   8.67
At once          2.00 on average, 2 at most
Tokens           10 prompt, 3 output
Frames per token 1.000
Stalled tokens   0.0 % over 450 ms after the one before; 0.0 % of requests
Goodput          50.0 % of requests, 0.667 requests/s
  TTFT <= 2,000 ms 50.0 %
Client           0.0 % of a core; its loop late by 0.00 ms at p50, 0.00 at p99

Latency, ms         mean     min     p50     p90     p95     p99     max
TTFT               1,000   1,000   1,000   1,000   1,000   1,000   1,000
TPOT                 150     150     150     150     150     150     150
TBT                  150     100     150     190     195     199     200
E2E                1,500   1,500   1,500   1,500   1,500   1,500   1,500

Failures
error_frame      1  the queue is full
"""


def test_table_as_it_looks() -> None:
    samples = [sample(), sample(1, error="error_frame", detail="the queue\nis full")]
    limits = FigureOptions(limits_ms={"ttft": 2000})
    assert table(document_of(samples, run(duration_s=1.5), limits)) == EXPECTED


def test_table_keeps_to_its_width_and_has_no_escapes() -> None:
    text = table(document(mode="open", rate=3.0, arrivals="poisson"))
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 88  # the turns have one column more
    assert "TTFT from due" in text


def test_table_has_escapes_on_a_terminal_only_for_its_titles() -> None:
    text = table(document(), is_terminal=True)
    assert text.count("\x1b[1m") == text.count("\x1b[0m") == text.count("\x1b") / 2 > 2


def test_table_of_nothing_says_so() -> None:
    assert "0 measured, 0 ok, 0 failed" in table(document_of([], run()))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0, "0.00"),
        (0.1234, "0.123"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (123.4, "123"),
        (12345.6, "12,346"),
        (99.96, "100"),
        (9.996, "10.0"),
        (0.9996, "1.00"),
        (-0.9996, "-1.00"),
        (0.0004, "0.00"),
        (5e-324, "0.00"),
    ],
)
def test_numbers_have_three_digits(value: float, told: str) -> None:
    assert shown(value) == told


@pytest.mark.parametrize(
    ("value", "told"),
    [(0, "0.0 %"), (1, "100.0 %"), (0.5, "50.0 %"), (0.00123, "0.12 %"), (0.9987, "99.87 %")],
)
def test_shares_are_finer_near_their_ends(value: float, told: str) -> None:
    assert share(value) == told

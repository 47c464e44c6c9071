"""What no server can mean: the report is made without it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.bench.document import document_of, from_json, to_json
from gateway.bench.page import page
from gateway.bench.plausible import MAX_COUNT, MAX_MS, MAX_TIMINGS, plausible
from gateway.bench.table import table
from tests.gateway.bench.runs import run, sample

HUGE = 10**400


def test_what_can_be_true_is_the_same_object() -> None:
    told = [
        sample(timings={"queue_ms": MAX_MS, "kv_ms": None}, output_tokens=MAX_COUNT),
        sample(timings=None),
    ]
    assert all(before is after for before, after in zip(told, plausible(told), strict=True))


@pytest.mark.parametrize("count", [HUGE, MAX_COUNT + 1, -1], ids=["huge", "above", "negative"])
@pytest.mark.parametrize("name", ["prompt_tokens", "output_tokens", "cached_tokens"])
def test_an_impossible_count_is_as_if_not_told(name: str, count: int) -> None:
    (found,) = plausible([sample(**{name: count})])
    assert getattr(found, name) is None
    assert found.frames_s == sample().frames_s


@pytest.mark.parametrize(
    "value", [pytest.param(HUGE, id="huge"), 1e308, MAX_MS * 1.01, -0.5, float("nan"), float("inf"), "1", [1]]
)
def test_an_impossible_time_is_left_out(value: object) -> None:
    timings: dict[str, Any] = {"queue_ms": value, "ttft_ms": 2.0}
    assert plausible([sample(timings=timings)])[0].timings == {"ttft_ms": 2.0}


def test_there_are_never_very_many_stages() -> None:
    timings = {f"stage{number}_ms": 1.0 for number in range(9 * MAX_TIMINGS)}
    (found,) = plausible([sample(timings=timings)])
    assert list(found.timings or ()) == list(timings)[:MAX_TIMINGS]


@pytest.mark.parametrize(
    "odd",
    [
        {"output_tokens": HUGE},
        {"prompt_tokens": HUGE, "cached_tokens": HUGE},
        {"timings": {"queue_ms": 1e308, "ttft_ms": HUGE, "kv_ms": float("nan")}},
    ],
)
def test_odd_answers_do_not_spoil_the_report(odd: dict[str, Any]) -> None:
    samples = [sample(0, **odd), sample(1, **odd), sample(2)]
    document = document_of(samples, run(), keeps_samples=True)
    assert document.figures.num_ok == 3
    assert "3 ok, 0 failed" in table(document)
    assert "3 ok" in page([("run", document)])
    assert from_json(to_json(document)).figures.num_ok == 3

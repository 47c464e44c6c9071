"""Figures of a run: by hand, and against an oracle that computes each from scratch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from gateway.bench.figures import FigureOptions, Figures, Measured, figures_of
from gateway.bench.run_info import RunInfo
from gateway.bench.sample import Sample
from gateway.bench.throughput import last_s
from tests.gateway.bench.runs import random_samples, run, sample


def figures(samples: Sequence[Sample], told: RunInfo | None = None, **options: Any) -> Figures:
    return figures_of(Measured(samples, told or run()), FigureOptions(**options))


def test_one_request_by_hand() -> None:
    (one,) = [sample(sent_s=1.0, due_s=0.8, cached_tokens=5)]
    found = figures([one])
    told = {name: spread["p50"] for name, spread in found.latencies_ms.items()}
    assert told == pytest.approx({"ttft": 1000, "ttft_from_due": 1200, "tpot": 150, "tbt": 150, "e2e": 1500})
    assert (found.num_requests, found.num_ok, found.num_failed) == (1, 1, 0)
    assert found.window_s == pytest.approx(2.5)  # from the run's start to the end of the last
    rate = found.throughput
    assert rate.requests_per_s == pytest.approx(1 / 2.5)
    assert rate.output_tokens_per_s == pytest.approx(3 / 2.5)
    assert rate.prompt_tokens_per_s == pytest.approx(10 / 2.5)
    assert rate.total_tokens_per_s == pytest.approx(13 / 2.5)
    assert found.concurrency_mean == pytest.approx(1.5 / 2.5)
    assert found.concurrency_peak == 1
    assert found.cached_share == 0.5
    assert found.frames_per_token == 1
    assert found.lateness_ms["max"] == pytest.approx(200)
    assert found.turns == ()


@pytest.mark.parametrize(
    "samples", [[], [sample(error="connect", frames_s=[], ended_s=None, output_tokens=None)]]
)
def test_a_run_without_success_has_counts_and_no_times(samples: list[Sample]) -> None:
    found = figures(samples, limits_ms={"ttft": 1})
    assert (found.num_ok, found.num_failed) == (0, len(samples))
    assert found.latencies_ms == {}
    assert found.throughput.requests_per_s == 0
    assert (found.stalls, found.frames_per_token, found.cached_share) == (None, None, None)
    assert found.goodput is not None
    assert found.goodput.share == 0


def test_error_frame_and_truncated_stream_are_failures() -> None:
    kinds = (None, "error_frame", "truncated", "interrupted")
    found = figures([sample(number, error=kind) for number, kind in enumerate(kinds)])
    assert (found.num_ok, found.num_failed, found.num_interrupted) == (1, 2, 1)
    assert found.latencies_ms["ttft"]["count"] == 1
    assert found.output_tokens == 3


def test_only_the_steady_window_is_measured() -> None:
    samples = [
        sample(0, sent_s=0.0, is_warm_up=True),  # its frames are at 1.0, 1.1, 1.3; it ends at 1.5
        sample(1, sent_s=1.0),
        sample(2, sent_s=2.9),  # it ends after the window: its times count, its end does not
        sample(3, sent_s=3.0),  # drain
    ]
    found = figures(samples, run(steady_from_s=1.0, steady_until_s=3.0))
    assert (found.num_requests, found.num_outside) == (2, 2)
    assert found.window_s == 2
    assert found.throughput.requests_per_s == 2 / 2  # of warm-up and of number 1
    assert found.throughput.output_tokens_per_s == (3 + 3) / 2
    assert found.concurrency_mean == pytest.approx((0.5 + 1.5 + 0.1) / 2)
    assert found.concurrency_peak == 2


def test_tpot_goes_by_tokens_and_tbt_by_frames() -> None:
    found = figures([sample(output_tokens=7, frames_s=[1.0, 1.1, 1.3])])
    assert found.latencies_ms["tpot"]["p50"] == pytest.approx(50)
    assert found.latencies_ms["tbt"]["max"] == pytest.approx(200)
    assert found.frames_per_token == pytest.approx(3 / 7)


def test_without_usage_frames_count_as_tokens() -> None:
    found = figures([sample(output_tokens=None)])
    assert (found.output_tokens, found.has_usage, found.frames_per_token) == (3, False, None)
    assert found.latencies_ms["tpot"]["p50"] == pytest.approx(150)


def test_one_token_has_neither_tpot_nor_gaps() -> None:
    found = figures([sample(frames_s=[1.0])], limits_ms={"tpot": 1, "tbt": 1})
    assert sorted(found.latencies_ms) == ["e2e", "ttft", "ttft_from_due"]
    assert found.goodput is not None
    assert found.goodput.share == 1


def test_stalls_are_relative_to_the_median_gap() -> None:
    steady = [1.0 + 0.03 * index for index in range(10)]
    stalled = [*steady, steady[-1] + 0.1]  # over 3 times 30 ms
    found = figures([sample(0, frames_s=steady), sample(1, frames_s=stalled)]).stalls
    assert found is not None
    assert found.limit_ms == pytest.approx(90)
    assert found.token_share == pytest.approx(1 / 19)
    assert found.request_share == 0.5


def test_stalls_below_what_a_screen_shows_are_none() -> None:
    found = figures([sample(frames_s=[1.0, 1.001, 1.002, 1.019])]).stalls
    assert found is not None
    assert (found.limit_ms, found.token_share) == (20, 0)


def test_stalls_have_the_limit_that_was_given() -> None:
    found = figures([sample(frames_s=[1.0, 1.1, 1.3])], stall_ms=150).stalls
    assert found is not None
    assert (found.limit_ms, found.token_share) == (150, 0.5)


def test_goodput_counts_failures_as_missed() -> None:
    slow = sample(1, frames_s=[1.5, 1.6, 1.7], ended_s=2.0)
    failed = sample(2, error="http_503", frames_s=[])
    cut = sample(3, error="interrupted", frames_s=[])
    found = figures([sample(0), slow, failed, cut], limits_ms={"ttft": 1001, "tbt": 199.9})
    assert found.goodput is not None
    assert found.goodput.shares == pytest.approx({"ttft": 1 / 3, "tbt": 2 / 3})
    assert found.goodput.share == pytest.approx(1 / 3)
    assert found.goodput.requests_per_s == pytest.approx(1 / 2)


def test_goodput_a_second_is_of_the_requests_a_second() -> None:
    samples = [
        sample(0, sent_s=0.0, is_warm_up=True),  # it ends at 1.5, in the window, and meets the limits
        sample(1, sent_s=0.2, is_warm_up=True, frames_s=[1.9, 2.0], ended_s=2.0),  # so, but it is too slow
        sample(2, sent_s=1.0),
        sample(3, sent_s=2.9),  # after the window
        sample(4, sent_s=1.0, error="lost"),
    ]
    told = run(steady_from_s=1.0, steady_until_s=3.0)
    found = figures(samples, told, limits_ms={"ttft": 1001, "tbt": 250})
    assert found.goodput is not None
    assert (found.throughput.requests_per_s, found.goodput.requests_per_s) == (3 / 2, 2 / 2)
    assert found.goodput.share == pytest.approx(2 / 3)
    unlimited = figures(samples, told, limits_ms={"e2e": 1e9}).goodput
    assert unlimited is not None
    assert unlimited.requests_per_s == found.throughput.requests_per_s


def test_an_interrupt_does_not_take_the_tokens_that_had_come() -> None:
    """Two streams of 20 tokens a second, two tokens in a frame; one of them is cut off at 4 s."""
    frames_s = [0.1 * index for index in range(1, 41)]
    cut = sample(1, frames_s=frames_s, output_tokens=None, ended_s=4.0, error="interrupted")
    found = figures([sample(0, frames_s=frames_s, output_tokens=80, ended_s=4.0), cut])
    assert found.throughput.output_tokens_per_s == pytest.approx(2 * 80 / 4)
    assert found.throughput.requests_per_s == pytest.approx(1 / 4)
    assert (found.num_failed, found.num_interrupted, found.output_tokens) == (0, 1, 80)


def test_stages_and_what_lies_between() -> None:
    timings = {"queue_ms": 3.0, "ttft_ms": 950.0, "tpot_ms": None, "cached_tokens": 4.0}
    found = figures([sample(timings=timings)])
    assert {name: each["p50"] for name, each in found.stages_ms.items()} == {"queue": 3.0, "ttft": 950.0}
    assert found.added_ttft_ms["p50"] == pytest.approx(50)


def test_turns_are_told_apart() -> None:
    samples = [sample(0, cached_tokens=0), sample(1, turn=1, cached_tokens=8, frames_s=[0.25])]
    first, second = figures(samples).turns
    assert (first.turn, first.ttft_ms["p50"], first.cached_share) == (0, 1000, 0)
    assert (second.turn, second.ttft_ms["p50"], second.cached_share) == (1, 250, 0.8)


@pytest.mark.parametrize("seed", range(30))
def test_random_runs_are_as_an_oracle_has_them(seed: int) -> None:
    numpy = pytest.importorskip("numpy")
    rng = random.Random(seed)
    samples = random_samples(rng, rng.choice((0, 1, 2, 40)))
    until_s = rng.choice((None, 4.0))
    told = run(steady_from_s=1.0, steady_until_s=until_s, duration_s=6.0)
    limits = {"ttft": 300, "tpot": 30, "tbt": 100, "e2e": 900}
    found = figures(samples, told, limits_ms=limits)

    end_s = max([6.0, *(last_s(each) for each in samples)])
    stop_s = end_s if until_s is None else until_s
    inside = [s for s in samples if not s.is_warm_up and 1.0 <= s.sent_s < stop_s]
    ok = [s for s in inside if s.error is None]
    tokens = {s.number: len(s.frames_s) if s.output_tokens is None else s.output_tokens for s in samples}
    times: dict[str, list[float]] = {
        "ttft": [s.frames_s[0] - s.sent_s for s in ok],
        "ttft_from_due": [s.frames_s[0] - s.due_s for s in ok],
        "tpot": [
            (s.frames_s[-1] - s.frames_s[0]) / (tokens[s.number] - 1) for s in ok if tokens[s.number] > 1
        ],
        "tbt": [after - before for s in ok for before, after in pairwise(s.frames_s)],
        "e2e": [(s.ended_s or 0) - s.sent_s for s in ok],
    }
    for name, values in times.items():
        spread = found.latencies_ms.get(name, {})
        assert spread.get("count", 0) == len(values)
        for percent in (50, 90, 95, 99):
            if values:
                expected = numpy.percentile(values, percent) * 1e3
                assert spread[f"p{percent}"] == pytest.approx(expected, abs=1e-3)  # gaps: microseconds

    all_ok = [s for s in samples if s.error is None]
    ended = [s for s in all_ok if 1.0 <= (s.ended_s or 0) <= stop_s]
    counted = [s for s in ok if s.output_tokens]
    num_counted = sum(len(s.frames_s) for s in counted)
    per_frame = sum(tokens[s.number] for s in counted) / num_counted if num_counted else 1.0
    came = sum(
        per_frame if s.error and s.output_tokens is None else tokens[s.number] / len(s.frames_s)
        for s in samples
        if s.error in (None, "interrupted")
        for each in s.frames_s
        if 1.0 <= each <= stop_s
    )
    length_s = stop_s - 1.0
    assert found.throughput.requests_per_s == pytest.approx(len(ended) / length_s)
    assert found.throughput.output_tokens_per_s == pytest.approx(came / length_s)
    assert found.num_failed == sum(s.error not in (None, "interrupted") for s in inside)

    def is_good(s: Sample) -> bool:
        gaps = [after - before for before, after in pairwise(s.frames_s)]
        later = tokens[s.number] - 1
        return (
            s.frames_s[0] - s.sent_s <= 0.3
            and (later < 1 or (s.frames_s[-1] - s.frames_s[0]) / later <= 0.03)
            and (not gaps or numpy.percentile(gaps, 99) <= 0.1)
            and (s.ended_s or 0) - s.sent_s <= 0.9
        )

    judged = len(ok) + found.num_failed
    assert found.goodput is not None
    assert found.goodput.share == pytest.approx(sum(map(is_good, ok)) / judged if judged else 0)


@pytest.mark.parametrize("seed", range(10))
def test_concurrency_is_as_counted_at_many_moments(seed: int) -> None:
    samples = random_samples(random.Random(seed), 30)
    found = figures(samples, run(duration_s=6.0))
    end_s = max([6.0, *(last_s(each) for each in samples)])
    spans = [(each.sent_s, end_s if each.ended_s is None else each.ended_s) for each in samples]
    peak = max(sum(from_s <= at_s < to_s for from_s, to_s in spans) for at_s, _ in spans)
    assert found.concurrency_peak == peak
    assert found.concurrency_mean == pytest.approx(sum(to_s - from_s for from_s, to_s in spans) / end_s)


def test_one_that_ends_as_the_next_is_sent_is_not_under_way_with_it() -> None:
    assert figures([sample(0, sent_s=0.0), sample(1, sent_s=1.5)]).concurrency_peak == 1

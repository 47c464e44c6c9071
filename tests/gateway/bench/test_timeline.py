"""The timeline: slices that add up, and no more points than a picture holds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from gateway.bench.figures import Measured, figures_of
from gateway.bench.sample import Sample
from gateway.bench.throughput import last_s
from gateway.bench.timeline import MAX_POINTS, MAX_SLICES, Timeline, timeline_of
from tests.gateway.bench.runs import random_samples, run, sample


def timeline_until(samples: Sequence[Sample], end_s: float) -> Timeline:
    return timeline_of(Measured(samples, run(duration_s=end_s)))


def test_slices_by_hand() -> None:
    samples = [sample(0, sent_s=0.0), sample(1, sent_s=1.0, error="truncated", ended_s=2.45)]
    timeline = timeline_until(samples, 10.0)
    assert timeline.slice_s == pytest.approx(0.2)
    first = timeline.slices[5]  # from 1.0 to 1.2: two frames of the first, and the second is sent
    assert (first.num_sent, first.num_ok, first.output_tokens) == (1, 0, 2)
    assert first.ttft_p50_ms == pytest.approx(1000)
    assert first.running == pytest.approx(2)
    assert timeline.slices[12].num_failed == 1
    assert timeline.failures == ((2.45, "truncated"),)
    assert [each for each, _ in timeline.first_tokens] == [0.0, 1.0]
    assert [each for _, each in timeline.first_tokens] == pytest.approx([1000, 1000])


@pytest.mark.parametrize("seed", range(10))
def test_slices_add_up_to_the_run(seed: int) -> None:
    samples = random_samples(random.Random(seed), 50)
    end_s = max(last_s(each) for each in samples)
    measured = Measured(samples, run(duration_s=end_s))
    slices = timeline_of(measured).slices
    assert sum(each.num_sent for each in slices) == len(samples)
    assert sum(each.num_failed for each in slices) == figures_of(measured).num_failed
    assert sum(each.num_ok for each in slices) == sum(each.error is None for each in samples)
    tokens = sum(
        len(each.frames_s) * (measured.tokens_per_frame if each.error else 1.0)
        if each.output_tokens is None
        else each.output_tokens
        for each in samples
        if each.frames_s
    )
    assert sum(each.output_tokens for each in slices) == pytest.approx(tokens)


def test_what_comes_at_the_very_end_is_in_the_last_slice() -> None:
    """4.3 / 0.1 is a little below 43, and 43 * 0.1 is 4.3."""
    slices = timeline_until([sample(ended_s=4.3)], 4.3).slices
    assert (slices[-1].num_ok, len(slices)) == (1, 43)


@pytest.mark.parametrize("end_s", [0.0, 0.05, 1.0, 7.9, 8.0, 59.0, 3600.0, 1e6])
def test_there_are_never_too_many_slices(end_s: float) -> None:
    assert 1 <= len(timeline_until([], end_s).slices) <= MAX_SLICES


def test_many_points_are_thinned_out_evenly() -> None:
    samples = [sample(number, sent_s=number / 1000) for number in range(4 * MAX_POINTS)]
    points = timeline_until(samples, 10.0).first_tokens
    assert len(points) == MAX_POINTS
    assert (points[0][0], points[-1][0]) == (0.0, samples[-1].sent_s)
    distances = [after[0] - before[0] for before, after in pairwise(points)]
    assert max(distances) < 1.5 * min(distances)


@pytest.mark.parametrize("end_s", [0.02, 1.04, 4.3001, 61.0])
def test_slices_have_one_length_to_the_end_of_the_run(end_s: float) -> None:
    timeline = timeline_until([sample(sent_s=0.0, frames_s=[end_s], ended_s=end_s)], end_s)
    assert timeline.slice_s * len(timeline.slices) == pytest.approx(end_s)
    assert [each.running for each in timeline.slices] == pytest.approx([1.0] * len(timeline.slices))
    assert timeline.slices[-1].output_tokens == 1


def test_failures_are_those_that_the_figures_count() -> None:
    kinds = ("interrupted", "http_503", "lost")
    samples = [sample(number, sent_s=1.0, error=kind) for number, kind in enumerate(kinds)]
    samples.append(sample(3, sent_s=0.5, error="http_429", is_warm_up=True))
    measured = Measured(samples, run(steady_from_s=1.0))
    timeline, figures = timeline_of(measured), figures_of(measured)
    assert [kind for _, kind in timeline.failures] == ["http_503", "lost"]
    assert sum(each.num_failed for each in timeline.slices) == figures.num_failed == 2
    assert (figures.num_interrupted, figures.num_outside, figures.num_failed_outside) == (1, 1, 1)

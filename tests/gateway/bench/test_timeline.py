"""The timeline: slices that add up, and no more points than a picture holds."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from gateway.bench.throughput import last_s
from gateway.bench.timeline import MAX_POINTS, MAX_SLICES, timeline_of
from tests.gateway.bench.runs import random_samples, sample


def test_slices_by_hand() -> None:
    samples = [sample(0, sent_s=0.0), sample(1, sent_s=1.0, error="truncated", ended_s=2.45)]
    timeline = timeline_of(samples, 10.0)
    assert timeline.slice_s == pytest.approx(0.2)
    first = timeline.slices[5]  # from 1.0 to 1.2: two frames of the first, and the second is sent
    assert (first.num_sent, first.num_ok, first.output_tokens) == (1, 0, 2)
    assert first.ttft_p50_ms == pytest.approx(1000)
    assert first.running == pytest.approx(2)
    assert timeline.slices[12].num_failed == 1
    assert timeline.failures == ((2.45, "truncated"),)
    assert timeline.first_tokens == ((0.0, 1000.0), (1.0, pytest.approx(1000)))


@pytest.mark.parametrize("seed", range(10))
def test_slices_add_up_to_the_run(seed: int) -> None:
    samples = random_samples(random.Random(seed), 50)
    end_s = max(last_s(each) for each in samples)
    slices = timeline_of(samples, end_s).slices
    assert sum(each.num_sent for each in slices) == len(samples)
    assert sum(each.num_ok + each.num_failed for each in slices) == len(samples)
    tokens = sum(
        len(each.frames_s) if each.output_tokens is None else each.output_tokens
        for each in samples
        if each.frames_s
    )
    assert sum(each.output_tokens for each in slices) == pytest.approx(tokens)


def test_what_comes_at_the_very_end_is_in_the_last_slice() -> None:
    """4.3 / 0.1 is a little below 43, and 43 * 0.1 is 4.3."""
    slices = timeline_of([sample(ended_s=4.3)], 4.3).slices
    assert (slices[-1].num_ok, len(slices)) == (1, 43)


@pytest.mark.parametrize("end_s", [0.0, 0.05, 1.0, 7.9, 8.0, 59.0, 3600.0, 1e6])
def test_there_are_never_too_many_slices(end_s: float) -> None:
    assert 1 <= len(timeline_of([], end_s).slices) <= MAX_SLICES


def test_many_points_are_thinned_out_evenly() -> None:
    samples = [sample(number, sent_s=number / 1000) for number in range(4 * MAX_POINTS)]
    points = timeline_of(samples, 10.0).first_tokens
    assert len(points) == MAX_POINTS
    assert (points[0][0], points[-1][0]) == (0.0, samples[-1].sent_s)
    distances = [after[0] - before[0] for before, after in pairwise(points)]
    assert max(distances) < 1.5 * min(distances)

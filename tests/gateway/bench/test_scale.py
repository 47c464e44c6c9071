"""Axes: places and ticks."""

from __future__ import annotations

import random

import pytest

from gateway.bench.scale import Scale, fitting, linear


def test_values_have_their_places() -> None:
    scale = Scale(0, 10, 100, 200)
    assert [scale.at(each) for each in (0, 5, 10, -1, 99)] == [100, 150, 200, 100, 200]
    assert Scale(0, 10, 200, 100).at(2.5) == 175  # upward
    assert Scale(1, 100, 0, 2, is_log=True).at(10) == pytest.approx(1)


def test_axis_is_logarithmic_for_a_long_tail_only() -> None:
    assert not fitting(10, 100, 0, 1).is_log
    assert fitting(10, 1000, 0, 1).is_log
    assert not fitting(0, 1000, 0, 1).is_log


@pytest.mark.parametrize("seed", range(30))
def test_ticks_are_few_round_and_on_the_axis(seed: int) -> None:
    rng = random.Random(seed)
    median, high = sorted(10 ** rng.uniform(-4, 7) for _ in range(2))
    for scale in (linear(high, 0, 1), fitting(median, high, 0, 1)):
        ticks = scale.ticks()
        assert 2 <= len(ticks) <= 8
        assert all(scale.low <= each <= scale.high * (1 + 1e-9) for each in ticks)
        assert all(float(f"{each:.1e}") == pytest.approx(each) for each in ticks)


def test_axis_of_nothing_has_0_only() -> None:
    assert linear(0.0, 0, 1).ticks() == [0.0]

"""Percentiles, against numpy and by hand."""

from __future__ import annotations

import random

import pytest

from gateway.bench.percentiles import Distribution, GapCounts, percentile

numpy = pytest.importorskip("numpy")
PERCENTS = (0, 0.1, 1, 25, 50, 90, 95, 99, 99.9, 100)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([5.0], 99, 5.0),
        ([1.0, 2.0], 50, 1.5),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 90, 4.6),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 100, 5.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0, 1.0),
    ],
)
def test_percentile_lies_between_the_two_nearest(
    values: list[float], percent: float, expected: float
) -> None:
    assert percentile(values, percent) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_percentiles_are_those_of_numpy(seed: int) -> None:
    rng = random.Random(seed)
    values = [rng.choice((rng.random(), 0.5, 7.0)) for _ in range(rng.choice((1, 2, 3, 10, 999)))]
    distribution = Distribution.of(values)
    for each in PERCENTS:
        assert distribution.at(each) == pytest.approx(numpy.percentile(values, each), rel=1e-12)
    assert distribution.mean() == pytest.approx(numpy.mean(values), rel=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_counted_values_are_as_if_each_stood_alone(seed: int) -> None:
    rng = random.Random(seed)
    counts = {rng.randint(0, 50): rng.randint(1, 9) for _ in range(rng.randint(1, 30))}
    single = Distribution.of(value * 0.5 for value, count in counts.items() for _ in range(count))
    counted = Distribution.counted(counts, 0.5)
    assert len(counted) == len(single) == sum(counts.values())
    assert counted.spread(PERCENTS) == pytest.approx(single.spread(PERCENTS))
    for limit in (-1, 0, 3.25, 10, 100):
        assert counted.num_above(limit) == single.num_above(limit)


def test_spread_without_values_is_empty() -> None:
    assert Distribution.of([]).spread((50,)) == {}
    assert Distribution.of([]).curve((50,)) == []
    assert GapCounts().distribution().spread((50,)) == {}


def test_spread_names_what_was_asked() -> None:
    spread = Distribution.of([2.0, 1.0]).spread((50, 99.9))
    assert spread == {"count": 2, "mean": 1.5, "min": 1.0, "max": 2.0, "p50": 1.5, "p99.9": 1.999}


def test_num_above_leaves_out_the_limit_itself() -> None:
    distribution = Distribution.of([1.0, 2.0, 2.0, 3.0])
    assert [distribution.num_above(each) for each in (0.5, 1, 2, 2.5, 3)] == [4, 3, 1, 1, 0]


def test_gaps_are_whole_microseconds() -> None:
    gaps = GapCounts()
    assert gaps.add([1.0]) == []
    assert gaps.add([1.0, 1.0200004, 1.0200004]) == [20000, 0]
    gaps.add([3.0, 3.01])
    assert gaps.distribution().spread((50,)) == pytest.approx(
        {"count": 3, "mean": 10, "min": 0, "max": 20, "p50": 10}
    )

import math
import re
from collections.abc import Sequence
from random import Random
from statistics import fmean, pstdev

import pytest

from gateway.bench.lengths import MAX_TOKENS, parse_lengths

COUNT = 4000


def drawn(text: str, seed: int = 1) -> Sequence[int]:
    lengths, random = parse_lengths(text), Random(seed)
    return [lengths.draw(random) for _ in range(COUNT)]


@pytest.mark.parametrize("text", ["512", "fixed:512"])
def test_a_fixed_length_is_always_that(text: str) -> None:
    assert set(drawn(text)) == {512}
    assert parse_lengths(text).text == text


def test_uniform_lengths_take_both_bounds_and_all_between() -> None:
    values = drawn("uniform:3:12")
    assert set(values) == set(range(3, 13))
    error = 5 * math.sqrt((10**2 - 1) / 12 / COUNT)
    assert abs(fmean(values) - 7.5) < error


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [("normal:500:50", 500, 50), ("lognormal:500:200", 500, 200), ("exponential:300", 300, 300)],
)
def test_lengths_have_the_moments_that_were_asked_for(text: str, mean: float, deviation: float) -> None:
    values = drawn(text)
    assert abs(fmean(values) - mean) < 5 * deviation / math.sqrt(COUNT)
    assert abs(pstdev(values) / deviation - 1) < 0.15


def test_lognormal_lengths_are_skewed_and_normal_ones_are_not() -> None:
    def skew(values: Sequence[int]) -> float:
        mean, deviation = fmean(values), pstdev(values)
        return fmean([((value - mean) / deviation) ** 3 for value in values])

    assert abs(skew(drawn("normal:500:50"))) < 0.2
    assert 0.7 < skew(drawn("lognormal:500:200")) < 2  # 1.26 by its formula


def test_zipf_lengths_fall_by_the_power_of_their_rank() -> None:
    values = drawn("zipf:1:50")
    assert min(values) == 1
    assert max(values) <= 50
    expected = 1 / sum(1 / rank for rank in range(1, 51))
    assert abs(values.count(1) / COUNT - expected) < 0.04
    assert abs(values.count(2) / values.count(1) - 0.5) < 0.12


def test_no_length_is_below_1_or_over_the_limit() -> None:
    assert min(drawn("normal:1:100")) == 1
    assert max(drawn(f"exponential:{MAX_TOKENS}")) == MAX_TOKENS


def test_the_same_seed_draws_the_same_lengths() -> None:
    assert drawn("lognormal:500:200") == drawn("lognormal:500:200")
    assert drawn("lognormal:500:200") != drawn("lognormal:500:200", seed=2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0", "the length is 0; it must be a whole number from 1 to 1048576"),
        ("1.5", "the length is 1.5"),
        ("1048577", "the length is 1.04858e+06"),
        ("many", "'many' has N 'many'; it must be a number"),
        ("nan", "'nan' has N 'nan'"),
        ("uniform:5", "'uniform:5' has 1 numbers; it must be uniform:LOW:HIGH"),
        ("uniform:5:4", "HIGH is 4; it must be a whole number from 5"),
        ("normal:0:1", "MEAN is 0; it must be above 0"),
        ("normal:10:-1", "DEVIATION is -1; it must be above 0"),
        ("lognormal:10:x", "has DEVIATION 'x'"),
        ("zipf:1:100000", "MAX is 100000; it must be a whole number from 1 to 65536"),
        ("gamma:1:2", "'gamma:1:2' is not a length; it must be one of: N, uniform:LOW:HIGH"),
    ],
)
def test_a_bad_length_is_told_with_its_limit(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        parse_lengths(text)

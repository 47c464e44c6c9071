import math
from itertools import islice, pairwise
from random import Random
from statistics import fmean, pstdev

import pytest

from gateway.bench.arrivals import CONSTANT, POISSON, arrivals

COUNT = 5000


def first(count: int, kind: str, rate: float, ramp_s: float = 0.0, seed: int = 1) -> list[float]:
    return list(islice(arrivals(kind, rate, ramp_s, Random(seed)), count))


def test_constant_arrivals_come_evenly_from_the_start() -> None:
    assert first(4, CONSTANT, 4.0) == [0.0, 0.25, 0.5, 0.75]


def test_poisson_arrivals_have_exponential_gaps_of_the_rate() -> None:
    times = first(COUNT, POISSON, 50.0)
    gaps = [after - before for before, after in pairwise(times)]
    assert min(gaps) >= 0
    assert abs(fmean(gaps) * 50 - 1) < 5 / math.sqrt(COUNT)
    assert abs(pstdev(gaps) / fmean(gaps) - 1) < 0.1  # a constant rate would have 0
    # Of an exponential distribution, the share over the mean is 1/e.
    assert abs(sum(gap > 1 / 50 for gap in gaps) / len(gaps) - 1 / math.e) < 0.03


def test_poisson_arrivals_are_the_same_for_the_same_seed() -> None:
    assert first(9, POISSON, 5.0) == first(9, POISSON, 5.0)
    assert first(9, POISSON, 5.0) != first(9, POISSON, 5.0, seed=2)


@pytest.mark.parametrize("kind", [CONSTANT, POISSON])
def test_a_ramp_has_half_of_the_arrivals_and_the_full_rate_after_it(kind: str) -> None:
    times = first(COUNT, kind, 100.0, ramp_s=20.0)
    during = sum(time < 20 for time in times)
    assert abs(during - 1000) < 5 * math.sqrt(1000)
    assert abs(sum(time < 10 for time in times) / during - 0.25) < 0.08
    after = [time for time in times if time >= 20]
    assert abs(len(after) / (after[-1] - 20) - 100) < 8
    assert times == sorted(times)

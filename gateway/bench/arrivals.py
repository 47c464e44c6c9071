"""When the requests of an open loop are due: at a rate that does not look at the answers.

Not here: sending them (`gateway/bench/run.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Final

POISSON: Final = "poisson"
CONSTANT: Final = "constant"


def arrivals(kind: str, rate: float, ramp_s: float, random: Random) -> Iterator[float]:
    """Due times in seconds from the start, without end.

    `rate` is in arrivals a second; over the first `ramp_s` it rises evenly from 0. Poisson arrivals have
    exponential gaps; constant ones come evenly, the first at once.
    """
    expected = random.expovariate(1.0) if kind == POISSON else 0.0
    while True:
        yield _time_of(expected, rate, ramp_s)
        expected += random.expovariate(1.0) if kind == POISSON else 1.0


def _time_of(expected: float, rate: float, ramp_s: float) -> float:
    """When so many arrivals are expected to have come: the integral of the rate, turned around."""
    during_ramp = rate * ramp_s / 2
    if expected < during_ramp:
        return math.sqrt(2 * ramp_s * expected / rate)
    return ramp_s + (expected - during_ramp) / rate

"""The distribution of a measured value: its percentiles, mean and curve.

A percentile lies between the two nearest values, by linear interpolation of ranks: numpy's default, which
`vllm bench serve` uses. Not here: what is measured (`gateway/bench/latencies.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import floor, fsum

from gateway.bench.bounds import Number

# By name: count, mean, min, max, and p50, p99.9, ... as they were asked for.
Spread = Mapping[str, Number]


class Distribution:
    """Values in order, each as often as it came. Milliseconds, wherever a time is measured."""

    def __init__(self, values: Sequence[float], ends: Sequence[int]) -> None:
        """`values` ascend; `ends[i]`: how many are at most `values[i]`."""
        self._values = values
        self._ends = ends

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        ordered = sorted(values)
        return cls(ordered, range(1, len(ordered) + 1))

    @classmethod
    def counted(cls, counts: Mapping[int, int], unit: float) -> Distribution:
        """Of whole multiples of a unit: {3: 2} is twice the value 3 * unit."""
        ordered = sorted(counts)
        return cls([each * unit for each in ordered], list(accumulate(counts[each] for each in ordered)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def at(self, percent: float) -> float:
        """The percentile, 0 to 100. Raises `IndexError` without values."""
        rank = percent / 100 * (len(self) - 1)
        low = floor(rank)
        below = self._values[bisect_right(self._ends, low)]
        above = self._values[bisect_right(self._ends, min(low + 1, len(self) - 1))]
        return below + (above - below) * (rank - low)

    def num_above(self, limit: float) -> int:
        """How many values are over it."""
        index = bisect_right(self._values, limit)
        return len(self) - (self._ends[index - 1] if index else 0)

    def mean(self) -> float:
        num_before = [0, *self._ends]
        each = (
            value * (end - before)
            for value, end, before in zip(self._values, self._ends, num_before, strict=False)
        )
        return fsum(each) / len(self)

    def spread(self, percents: Sequence[float]) -> dict[str, float]:
        """Empty without values."""
        if not len(self):
            return {}
        ends = {"mean": self.mean(), "min": self._values[0], "max": self._values[-1]}
        return {"count": float(len(self)), **ends, **{name_of(each): self.at(each) for each in percents}}

    def curve(self, percents: Sequence[float]) -> list[tuple[float, float]]:
        """(percent, value) pairs, to be drawn. Empty without values."""
        return [(each, self.at(each)) for each in percents] if len(self) else []


class GapCounts:
    """Gaps between frames, counted in whole microseconds.

    A run may have fifty million of them: sorted as numbers they take a minute and gigabytes, and no event
    loop tells times more finely than that.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, times_s: Sequence[float]) -> list[int]:
        """Count the gaps of one request; returns them, in microseconds."""
        gaps_us = gaps_us_of(times_s)
        self._counts.update(gaps_us)
        return gaps_us

    def distribution(self) -> Distribution:
        """In milliseconds."""
        return Distribution.counted(self._counts, 1e-3)


def gaps_us_of(times_s: Sequence[float]) -> list[int]:
    """The gaps between times in order, in whole microseconds."""
    return [round((after - before) * 1e6) for before, after in pairwise(times_s)]


def percentile(values: Iterable[float], percent: float) -> float:
    """The percentile of some values, 0 to 100. Raises `IndexError` without values."""
    return Distribution.of(values).at(percent)


def name_of(percent: float) -> str:
    """p50, p99.9."""
    return f"p{percent:g}"

"""A chart's axis: from values to places, with round numbers as ticks.

Not here: what is drawn (`gateway/bench/charts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10

_LOG_RATIO = 12.0  # a largest value so many times the median: on a linear axis the rest would be a stroke
_LOG_DECADES = 3.0  # below the largest value; what is smaller stands at the axis


@dataclass(frozen=True, slots=True)
class Scale:
    """`low` lies at the pixel `start`, `high` at `end`; `low` < `high`, and above 0 where `is_log`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False
    is_flat: bool = False  # all values are 0: no other number has a place on it

    def at(self, value: float) -> float:
        """Where the value is; one outside the axis is at its nearer end."""
        value = min(self.high, max(self.low, value))
        if self.is_log:
            part = (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self, num: int = 5) -> list[float]:
        """About so many round numbers on it."""
        if self.is_flat:
            return [0.0]
        if self.is_log:
            return _log_ticks(self.low, self.high, num)
        step = _round_step((self.high - self.low) / num)
        first, last = ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def linear(high: float, start: float, end: float) -> Scale:
    """From 0 to a little over the largest value."""
    return Scale(0.0, high * 1.04, start, end) if high > 0 else Scale(0.0, 1.0, start, end, is_flat=True)


def fitting(median: float, high: float, start: float, end: float) -> Scale:
    """Linear, unless the largest value is many times the median (0: there is none)."""
    if median <= 0 or high <= _LOG_RATIO * median:
        return linear(high, start, end)
    low = max(high / 10**_LOG_DECADES, min(median / 10, high / 100))
    return Scale(low, high * 1.1, start, end, is_log=True)


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, at least so much."""
    power = 10.0 ** floor(log10(least))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9)))


def _log_ticks(low: float, high: float, num: int) -> list[float]:
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**power for power in decades for factor in factors]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= num + 2:
            return inside
    return inside

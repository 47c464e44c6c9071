"""Counting without prometheus_client: plain numbers, moved into its objects by `flush`.

An `observe` of its own costs 1.5 us with locks, and finding a child by its labels as much again; a request
has fifteen of them. An amount that prometheus_client does not take, say a negative one, is logged and lost,
and nothing else with it: a `flush` never raises, or one wrong number would end the scrapes.
Not here: what is counted (`gateway/metrics.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from prometheus_client import Counter, Histogram

from backend.fault_log import log_fault

Labels = TypeVar("Labels", bound=Hashable)


class HotHistogram:
    """Counts observations; `flush` moves them into `target`."""

    __slots__ = ("_bounds", "_counts", "_sum", "_target")

    def __init__(self, bounds: Sequence[float], target: Histogram) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._target = target

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def flush(self) -> None:
        """prometheus_client has no public way to add many observations; its buckets are `inc`-able values."""
        counts, self._counts = self._counts, [0] * len(self._counts)
        total, self._sum = self._sum, 0.0
        try:
            for bucket, count in zip(self._target._buckets, counts, strict=True):
                if count:
                    bucket.inc(count)
            if math.isfinite(total):  # a sum with one that is not would stay so
                self._target._sum.inc(total)
        except Exception as error:
            log_fault(error, "none")


class HotCounts(Generic[Labels]):
    """Amounts by labels; `flush` adds them to the counters that `target` gives for these labels."""

    __slots__ = ("_amounts", "_target")

    def __init__(self, target: Callable[[Labels], Counter]) -> None:
        self._amounts: dict[Labels, float] = {}
        self._target = target

    def add(self, labels: Labels, amount: float = 1) -> None:
        self._amounts[labels] = self._amounts.get(labels, 0) + amount

    def flush(self) -> None:
        amounts, self._amounts = self._amounts, {}
        for labels, amount in amounts.items():
            try:
                if not math.isfinite(amount):
                    raise ValueError(f"an amount of {amount}")
                self._target(labels).inc(amount)
            except Exception as error:
                log_fault(error, "none")

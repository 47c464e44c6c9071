"""Counting without prometheus_client: plain numbers, moved into its objects by `flush`.

An `observe` of its own costs 1.5 us with locks, and finding a child by its labels as much again; a request
has fifteen of them. Not here: what is counted (`gateway/metrics.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from prometheus_client import Counter, Histogram

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
        for bucket, count in zip(self._target._buckets, counts, strict=True):
            if count:
                bucket.inc(count)
        if total:
            self._target._sum.inc(total)


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
            self._target(labels).inc(amount)

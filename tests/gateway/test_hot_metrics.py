"""Counting in plain numbers: what is flushed is what prometheus_client would have counted itself."""

from __future__ import annotations

import math
import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from gateway.hot_metrics import HotCounts, HotHistogram

BOUNDS = (0.1, 1.0, 10.0)


def test_histogram_of_a_label_is_flushed_into_its_own_child() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("h", "h", ("model",), buckets=BOUNDS, registry=registry)
    hot = {model: HotHistogram(BOUNDS, histogram.labels(model)) for model in "ab"}
    rng, sums = random.Random(1), {"a": 0.0, "b": 0.0}
    for _ in range(100):
        model, value = rng.choice("ab"), rng.expovariate(1)
        hot[model].observe(value)
        sums[model] += value
    assert registry.get_sample_value("h_count", {"model": "a"}) == 0, "nothing before the flush"
    for each in hot.values():
        each.flush()
    for model, total in sums.items():
        assert registry.get_sample_value("h_sum", {"model": model}) == pytest.approx(total)
    counts = [registry.get_sample_value("h_count", {"model": model}) or 0 for model in "ab"]
    assert sum(counts) == 100


def test_counts_are_added_once_to_the_counter_of_their_labels() -> None:
    registry = CollectorRegistry()
    counter = Counter("c", "c", ("route", "status"), registry=registry)
    counts = HotCounts[tuple[str, str]](lambda labels: counter.labels(*labels))
    for labels, amount in ((("/a", "200"), 1), (("/b", "500"), 1), (("/a", "200"), 4)):
        counts.add(labels, amount)
    counts.flush()
    counts.flush()
    counts.add(("/b", "500"))
    counts.flush()
    assert registry.get_sample_value("c_total", {"route": "/a", "status": "200"}) == 5
    assert registry.get_sample_value("c_total", {"route": "/b", "status": "500"}) == 2


def test_amount_that_is_none_loses_no_other(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    counter = Counter("c", "c", ("model",), registry=registry)
    counts = HotCounts[str](lambda model: counter.labels(model))
    for model, amount in (("a", 3), ("b", -(1 << 62)), ("c", math.nan), ("d", 4)):
        counts.add(model, amount)
    counts.flush()
    assert [registry.get_sample_value("c_total", {"model": model}) for model in "ad"] == [3, 4]
    assert caplog.text.count("unexpected ValueError") == 2
    for model in "bc":
        counts.add(model, 2)
    counts.flush()
    assert [registry.get_sample_value("c_total", {"model": model}) for model in "bc"] == [2, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_observation_that_is_no_number_does_not_stay_in_the_sum(value: float) -> None:
    registry = CollectorRegistry()
    hot = HotHistogram(BOUNDS, Histogram("h", "h", buckets=BOUNDS, registry=registry))
    hot.observe(value)
    hot.flush()
    hot.observe(0.5)
    hot.flush()
    assert registry.get_sample_value("h_sum") == 0.5
    assert registry.get_sample_value("h_count") == 2


def test_histogram_that_takes_nothing_raises_nothing() -> None:
    histogram = Histogram("h", "h", buckets=BOUNDS, registry=CollectorRegistry())
    hot = HotHistogram((*BOUNDS, 100.0), histogram)  # its buckets are others
    hot.observe(50.0)
    hot.flush()

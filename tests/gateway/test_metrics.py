"""Metrics: an exposition that parses, the quick histogram, and sums over processes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from backend.pool import WorkerStatus
from gateway.metrics import TOKEN_BUCKETS_S, WORKER_GAUGES, HotHistogram, Metrics

STATUS = WorkerStatus(
    address="tcp://w:1",
    name="w-1",
    state="ready",
    reason="",
    models=("m",),
    scripted=False,
    engine_path="steps",
    versions={},
    max_running=8,
    running=3,
    waiting=2,
    kv_usage=0.5,
    prefix_queries=100,
    prefix_hits=40,
    preemptions=1,
    outstanding_requests=5,
    outstanding_tokens=700,
    waiting_requests=2,
    waiting_tokens=300,
    dropped_entries=0,
    copied_bytes=0,
    num_connects=1,
)


def samples(exposition: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Name and labels -> value of all that a scraper reads."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition.decode())
        for sample in family.samples
    }


def test_hot_histogram_equals_prometheus_own() -> None:
    rng = random.Random(1)
    quick, slow = (
        Histogram("h", "h", buckets=TOKEN_BUCKETS_S, registry=CollectorRegistry()) for _ in range(2)
    )
    hot = HotHistogram(TOKEN_BUCKETS_S, quick)
    values = [*TOKEN_BUCKETS_S, 0.0, 1e-9, 99.0, *(rng.expovariate(20) for _ in range(2000))]
    for number, value in enumerate(values):
        hot.observe(value)
        slow.observe(value)
        if number % 500 == 0:
            hot.flush()
    hot.flush()
    hot.flush()
    (got,), (expected,) = quick.collect(), slow.collect()
    for mine, theirs in zip(got.samples, expected.samples, strict=True):
        if mine.name == "h_created":
            continue
        assert (mine.name, mine.labels) == (theirs.name, theirs.labels)
        assert mine.value == pytest.approx(theirs.value, rel=1e-12)


def test_exposition_parses_and_shows_what_was_counted_per_token() -> None:
    metrics = Metrics()
    metrics.gaps.observe(0.02)
    metrics.requests.labels("/v1/completions", "200", "complete").inc()
    metrics.publish_workers([STATUS, replace(STATUS, address="tcp://w:2", state="connecting")])
    seen = samples(metrics.exposition())
    assert seen["headrace_time_between_tokens_seconds_count", ()] == 1
    labels = (("ended", "complete"), ("route", "/v1/completions"), ("status", "200"))
    assert seen["headrace_requests_total", labels] == 1
    assert seen["headrace_worker_ready", (("worker", "tcp://w:1"),)] == 1
    assert seen["headrace_worker_ready", (("worker", "tcp://w:2"),)] == 0
    assert seen["headrace_worker_kv_usage", (("worker", "tcp://w:1"),)] == 0.5
    assert seen["headrace_worker_outstanding_tokens", (("worker", "tcp://w:1"),)] == 700


def test_every_worker_gauge_is_a_figure_of_the_status() -> None:
    metrics = Metrics()
    metrics.publish_workers([STATUS])
    seen = samples(metrics.exposition())
    for name in WORKER_GAUGES.keys() - {"ready"}:
        assert seen[f"headrace_worker_{name}", (("worker", "tcp://w:1"),)] == getattr(STATUS, name)


def test_stage_buckets_are_fine_below_a_millisecond() -> None:
    metrics = Metrics()
    metrics.stage.labels("parse").observe(3e-5)
    bounds = [
        float(dict(labels)["le"])
        for name, labels in samples(metrics.exposition())
        if name == "headrace_stage_seconds_bucket"
    ]
    assert len([bound for bound in bounds if bound < 1e-3]) >= 6


def test_held_peak_only_rises() -> None:
    metrics = Metrics()
    for num in (3, 7, 2):
        metrics.note_held(num)
    assert samples(metrics.exposition())["headrace_held_peak_characters", ()] == 7


PROCESS = """
import sys
from gateway.metrics import Metrics
metrics = Metrics()
number = int(sys.argv[1])
metrics.requests.labels("/v1/completions", "200", "complete").inc(number)
metrics.gaps.observe(0.02 * number)
metrics.note_held(number)
metrics.open_requests.set(number)
metrics.buffered_peak.set(number)
if number == 0:
    sys.stdout.buffer.write(metrics.exposition())
    sys.exit()
metrics.flush()
print("ready", flush=True)
sys.stdin.read()
"""


def test_processes_are_summed_up(tmp_path: Path) -> None:
    """Two that live and one that is asked; each writes into the shared folder, as the supervisor has it."""
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROCESS]
    root = Path(__file__).parents[2]
    children = [
        subprocess.Popen(
            [*command, str(number)], cwd=root, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for number in (1, 2)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
        asked = subprocess.run(
            [*command, "0"], cwd=root, env=env, capture_output=True, timeout=60, check=True
        )
    finally:
        for child in children:
            child.communicate(timeout=30)
    seen = samples(asked.stdout)
    labels = (("ended", "complete"), ("route", "/v1/completions"), ("status", "200"))
    assert seen["headrace_requests_total", labels] == 3
    assert seen["headrace_time_between_tokens_seconds_count", ()] == 3
    assert seen["headrace_time_between_tokens_seconds_sum", ()] == pytest.approx(0.06)
    assert seen["headrace_open_requests", ()] == 3
    assert seen["headrace_held_peak_characters", ()] == 2
    assert seen["headrace_buffered_peak_bytes", ()] == 2

"""Totals for the link's stats. What vLLM itself records: test_vllm_steps and test_vllm_engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from backend.link import Stats
from backend.vllm_metrics import Tally


def scheduler(
    running: int, waiting: int, usage: float, queries: int = 0, hits: int = 0, skipped: int = 0
) -> Any:
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=skipped,
        kv_cache_usage=usage,
        prefix_cache_stats=SimpleNamespace(queries=queries, hits=hits),
    )


def test_nothing_recorded_is_all_zero() -> None:
    assert Tally().stats() == Stats()


def test_gauges_are_the_last_ones_and_counters_add_up() -> None:
    tally = Tally()
    tally.record(scheduler(2, 1, 0.5, queries=100, hits=10), SimpleNamespace(num_preempted_reqs=1), 0)
    last = scheduler(1, 0, 0.25, queries=50, hits=40, skipped=3)
    tally.record(last, SimpleNamespace(num_preempted_reqs=2), 0)
    assert tally.stats() == Stats(
        running=1, waiting=3, kv_usage=0.25, prefix_queries=150, prefix_hits=50, preemptions=3
    )


def test_engines_of_one_worker_add_up() -> None:
    tally = Tally()
    tally.record(scheduler(2, 1, 0.5), None, 0)
    tally.record(scheduler(3, 0, 0.75), None, 1)
    stats = tally.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (5, 1, 0.75)


def test_parts_may_be_missing() -> None:
    tally = Tally()
    tally.record(None, SimpleNamespace(num_preempted_reqs=4), 0)
    tally.record(scheduler(1, 1, 0.5), None, 0)
    assert (tally.stats().preemptions, tally.stats().running) == (4, 1)

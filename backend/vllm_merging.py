"""What lets `vllm_metrics` record several engine steps as one, with every figure as if step by step.

Most of what vLLM records are sums, or lists of observations of which each is made. Two histograms are not:
tokens per iteration, which is one observation per record, and the time between tokens, which is one
observation per token and mostly the same for all tokens of a step. Both are fed from here.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Final

# What of a SchedulerStats may be replaced by a later one, or is added up. Anything else that is there makes
# its step recorded at once.
_REPLACED: Final = frozenset(
    (
        "num_running_reqs",
        "num_waiting_reqs",
        "num_skipped_waiting_reqs",
        "num_kv_fetch_reqs_by_stage",
        "step_counter",
        "current_wave",
        "kv_cache_usage",
        "prefix_cache_stats",
    )
)
_ADDED: Final = (
    "requests",
    "queries",
    "hits",
    "preempted_requests",
    "preempted_queries",
    "preempted_hits",
)


class Merging:
    """What waits for those two histograms, and which steps may wait. `of` says whether any may."""

    def __init__(self, logger: Any, extras: tuple[str, ...]) -> None:
        self._logger = logger
        self._extras = extras
        self._latencies: dict[float, int] = {}
        self._total = 0  # tokens of all steps that wait
        self._iterations = _Iterations(logger.histogram_iteration_tokens[0])
        self._between_tokens = _Repeating(logger.histogram_inter_token_latency[0])
        logger.histogram_iteration_tokens[0] = self._iterations

    @classmethod
    def of(cls, manager: Any) -> Merging | None:
        """None where a stat logger could see the difference, or counts what is not counted here."""
        from dataclasses import fields

        import vllm.envs
        from vllm.v1.metrics.loggers import PrometheusStatLogger
        from vllm.v1.metrics.stats import SchedulerStats

        loggers = _known_loggers(manager)
        prometheus = [logger for logger in loggers or () if type(logger) is PrometheusStatLogger]
        if len(prometheus) != 1 or vllm.envs.VLLM_COMPUTE_NANS_IN_LOGITS:
            return None
        names = {field.name for field in fields(SchedulerStats)}
        return cls(prometheus[0], tuple(sorted(names - _REPLACED)))

    def latency(self, latency_s: float) -> None:
        """One output's time since the one before."""
        self._latencies[latency_s] = self._latencies.get(latency_s, 0) + 1

    def step(self, total: int) -> None:
        """A step ends; `total` are the tokens of all steps that wait, this one included."""
        self._iterations.waiting.append(total - self._total)
        self._total = total

    def is_due(self, scheduler: Any) -> bool:
        """Whether a step with these figures, or None, must be recorded at once."""
        if scheduler is None:
            return False
        return any(getattr(scheduler, name) for name in self._extras) or scheduler.prefix_cache_stats.reset

    def flushed(self) -> None:
        """What waited was recorded: the times between tokens follow."""
        latencies, self._latencies, self._total = self._latencies, {}, 0
        for latency_s, count in latencies.items():
            self._between_tokens.observe(latency_s, count)

    def close(self) -> None:
        self._logger.histogram_iteration_tokens[0] = self._iterations.histogram


def add_prefix_queries(earlier: Any, later: Any) -> None:
    """Count the prefix cache's queries of an earlier step with a later one's."""
    for name in _ADDED:
        setattr(later, name, getattr(later, name) + getattr(earlier, name))


class _Iterations:
    """Stands for the histogram of tokens per iteration: one `observe` of all, but each step's own is made."""

    def __init__(self, histogram: Any) -> None:
        self.histogram = histogram
        self.waiting: list[int] = []

    def observe(self, total: float) -> None:
        waiting, self.waiting = self.waiting, []
        for num_tokens in waiting or (total,):
            self.histogram.observe(num_tokens)


class _Repeating:
    """A histogram's `observe`, many times for one value at the cost of one."""

    def __init__(self, histogram: Any) -> None:
        self._histogram = histogram
        self._parts = _parts(histogram) if _is_understood() else None

    def observe(self, value: float, count: int) -> None:
        if self._parts is None or count == 1:
            for _ in range(count):
                self._histogram.observe(value)
            return
        total, bounds, buckets = self._parts
        total.inc(value * count)
        buckets[bisect_left(bounds, value)].inc(count)


def _parts(histogram: Any) -> tuple[Any, list[float], list[Any]]:
    return histogram._sum, histogram._upper_bounds, histogram._buckets


def _is_understood() -> bool:
    """Whether this `prometheus_client` counts inside as we think; the parts are private."""
    from prometheus_client import Histogram

    plain, repeated = (Histogram("probe", "probe", buckets=(1.0, 2.0), registry=None) for _ in range(2))
    try:
        repeating = _Repeating.__new__(_Repeating)
        repeating._histogram, repeating._parts = repeated, _parts(repeated)
        for value in (0.5, 1.0, 1.5, 4.0):
            repeating.observe(value, 2)
            plain.observe(value)
            plain.observe(value)
        return _counts(plain) == _counts(repeated)
    except (AttributeError, TypeError, IndexError):
        return False


def _counts(histogram: Any) -> list[Any]:
    (metric,) = histogram.collect()
    return [
        (sample.name, sample.labels, sample.value)
        for sample in metric.samples
        if not sample.name.endswith("_created")
    ]


def _known_loggers(manager: Any) -> list[Any] | None:
    """The manager's loggers, where each is vLLM's own or the link's and there is one engine; else None."""
    from vllm.v1.metrics.loggers import LoggingStatLogger, PerEngineStatLoggerAdapter, PrometheusStatLogger

    if getattr(manager, "engine_indexes", None) != [0]:
        return None
    loggers: list[Any] = []
    for logger in manager.stat_loggers:
        if type(logger) is PerEngineStatLoggerAdapter:
            loggers += logger.per_engine_stat_loggers.values()
        else:
            loggers.append(logger)
    for logger in loggers:
        is_ours = getattr(logger, "is_additive", False)
        if type(logger) not in (LoggingStatLogger, PrometheusStatLogger) and not is_ours:
            return None
    return loggers

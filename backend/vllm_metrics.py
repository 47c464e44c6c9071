"""Counting what the engine does: vLLM's own metrics for `/metrics`, and the link's once-a-second figures.

vLLM records both per engine step through its `logger_manager`. On the generate path its own output handler
does so; on the step path that handler never runs, so `StepRecorder` does it, with vLLM's own classes.
"""

from __future__ import annotations

from typing import Any

from backend.link import Stats


class Tally:
    """Totals for the link's stats. A vLLM stat logger feeds it, on both paths."""

    def __init__(self) -> None:
        self._gauges: dict[int, tuple[int, int, float]] = {}  # per engine: running, waiting, KV usage
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._preemptions = 0

    def record(self, scheduler: Any, iteration: Any, engine: int) -> None:
        if scheduler is not None:
            waiting = scheduler.num_waiting_reqs + getattr(scheduler, "num_skipped_waiting_reqs", 0)
            self._gauges[engine] = (scheduler.num_running_reqs, waiting, scheduler.kv_cache_usage)
            self._prefix_queries += scheduler.prefix_cache_stats.queries
            self._prefix_hits += scheduler.prefix_cache_stats.hits
        if iteration is not None:
            self._preemptions += iteration.num_preempted_reqs

    def stats(self) -> Stats:
        gauges = self._gauges.values()
        return Stats(
            running=sum(running for running, _, _ in gauges),
            waiting=sum(waiting for _, waiting, _ in gauges),
            kv_usage=max((usage for _, _, usage in gauges), default=0.0),
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=self._preemptions,
        )


def stat_logger(tally: Tally) -> Any:
    """A factory of vLLM stat loggers that feed the tally."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class TallyLogger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._engine = engine_index

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, *args: Any, engine_idx: int = 0, **kwargs: Any
        ) -> None:
            tally.record(scheduler_stats, iteration_stats, self._engine or engine_idx)

        def log_engine_initialized(self) -> None:
            pass

    return TallyLogger


class StepRecorder:
    """Does per engine step what vLLM's output handler would do for `/metrics`."""

    def __init__(self, llm: Any) -> None:
        from vllm.v1.metrics.stats import IterationStats, LoRARequestStates, RequestStateStats

        self._manager = llm.logger_manager  # None with --disable-log-stats
        self._renderer = llm.renderer
        self._new_iteration = IterationStats
        self._new_request = RequestStateStats
        self._lora_states = LoRARequestStates(False)
        self._iteration: Any = None

    def request(self, arrival_s: float) -> Any:
        """The figures of one request, kept with it. `arrival_s` is wall-clock time, as vLLM wants it."""
        return self._new_request(arrival_time=arrival_s)

    def begin(self) -> None:
        """A step's outputs follow."""
        self._iteration = self._new_iteration() if self._manager is not None else None

    def output(self, item: Any, step_s: float, is_first: bool, figures: Any) -> None:
        """One request's output of this step. `step_s` is the engine core's monotonic time of the step."""
        if self._iteration is not None:
            self._iteration.update_from_output(item, step_s, is_first, figures, self._lora_states, None)

    def finished(
        self, item: Any, num_prompt_tokens: int, params: Any, num_cached_tokens: int, figures: Any
    ) -> None:
        """A request's last output. `params` are its SamplingParams."""
        iteration = self._iteration
        if iteration is None:
            return
        iteration.update_from_finished_request(
            finish_reason=item.finish_reason,
            request_id=item.request_id,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens_param=params.max_tokens,
            req_stats=figures,
            num_cached_tokens=num_cached_tokens,
        )
        iteration.max_num_generation_tokens_iter.append(figures.num_generation_tokens)
        iteration.n_params_iter.append(1)

    def end(self, batch: Any) -> None:
        """Record the step; also one without outputs, which carries the scheduler's figures."""
        if self._manager is not None:
            self._manager.record(
                engine_idx=batch.engine_index,
                scheduler_stats=batch.scheduler_stats,
                iteration_stats=self._iteration if batch.outputs else None,
                mm_cache_stats=self._renderer.stat_mm_cache(),
            )

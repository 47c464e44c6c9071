"""Counting what the engine does: vLLM's own metrics for `/metrics`, and the link's once-a-second figures.

vLLM records both per engine step through its `logger_manager`. On the generate path its own output handler
does so; on the step path that handler never runs, so `StepRecorder` does it, with vLLM's own classes. What
makes it exact to record several steps together is `vllm_merging`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from backend.link import Stats
from backend.vllm_merging import Merging, add_prefix_queries

MAX_OUTPUTS: Final = 256  # counted at a time, 1 us each; and steps
MAX_FINISHED: Final = 16  # answers recorded at a time, 15 us each
# An output, its request with `figures`, `num_prompt`, `num_cached` and `params`, and whether it is the first.
Counted = tuple[Any, Any, bool]


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
        is_additive = True  # several steps recorded as one give the same figures

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
    """Does for the engine's steps what vLLM's output handler would do for `/metrics`.

    Steps are kept as they are and counted together: in a loop that takes a third of what it takes right after
    a step, when nothing of it is in the processor's caches. Prometheus' objects cost more per step than its
    tokens do, so they learn of it at a `flush`, when many answers have ended, or when figures cannot wait.
    Sums and every single observation are the same as step by step. With a stat logger that is not known to
    see no difference, each step is recorded by itself, at once.
    """

    def __init__(self, llm: Any) -> None:
        from vllm.v1.metrics.stats import (
            IterationStats,
            LoRARequestStates,
            RequestStateStats,
            SchedulerStats,
        )

        self._manager = llm.logger_manager  # None with --disable-log-stats
        self._renderer = llm.renderer
        self._decode = msgspec.msgpack.Decoder(SchedulerStats | None).decode
        self._new_iteration = IterationStats
        self._new_request = RequestStateStats
        self._lora_states = LoRARequestStates(False)
        self._merging = Merging.of(self._manager)
        self._steps: list[tuple[Any, float, Sequence[Counted]]] = []  # not counted yet; each with its time
        self._num_outputs = 0  # of theirs
        self._iteration: Any = None  # of the steps that are not recorded yet
        self._scheduler: Any = None  # the last one of theirs, with all their prefix cache queries
        self._engine = 0
        self._has_outputs = False

    def request(self, arrival_s: float) -> Any:
        """The figures of one request, kept with it. `arrival_s` is wall-clock time, as vLLM wants it."""
        return self._new_request(arrival_time=arrival_s)

    def step(self, batch: Any, outputs: Sequence[Counted]) -> None:
        """A step; also one without outputs, which carries the scheduler's figures."""
        if self._manager is None:
            return
        self._steps.append((batch, time.time(), outputs))
        self._num_outputs += len(outputs)
        is_much = self._num_outputs >= MAX_OUTPUTS or len(self._steps) >= MAX_OUTPUTS
        if self._merging is None or is_much:
            self._count()

    def _count(self) -> None:
        steps, self._steps, self._num_outputs = self._steps, [], 0
        for batch, now_s, outputs in steps:
            if self._iteration is None:
                self._iteration = self._new_iteration()
            self._iteration.iteration_timestamp = now_s
            for item, request, is_first in outputs:
                self._output(item, batch.timestamp, is_first, request.figures)
                if item.finish_reason is not None:
                    self._finished(item, request)
            self._end(batch)

    def _output(self, item: Any, step_s: float, is_first: bool, figures: Any) -> None:
        """One request's output of a step. `step_s` is the engine core's monotonic time of the step."""
        iteration = self._iteration
        if self._merging is None or is_first or item.events is not None:
            iteration.update_from_output(item, step_s, is_first, figures, self._lora_states, None)
            return
        num_tokens = len(item.new_token_ids)  # as `update_from_output`, for the many
        iteration.num_generation_tokens += num_tokens
        figures.num_generation_tokens += num_tokens
        self._merging.latency(step_s - figures.last_token_ts)
        figures.last_token_ts = step_s

    def _finished(self, item: Any, request: Any) -> None:
        """A request's last output."""
        iteration, figures = self._iteration, request.figures
        iteration.update_from_finished_request(
            finish_reason=item.finish_reason,
            request_id=item.request_id,
            num_prompt_tokens=request.num_prompt,
            max_tokens_param=request.params.max_tokens,
            req_stats=figures,
            num_cached_tokens=request.num_cached,
        )
        iteration.max_num_generation_tokens_iter.append(figures.num_generation_tokens)
        iteration.n_params_iter.append(1)

    def _end(self, batch: Any) -> None:
        merging, scheduler, iteration = self._merging, batch.scheduler_stats, self._iteration
        if type(scheduler) is msgspec.Raw:
            scheduler = self._decode(scheduler)
        self._has_outputs = self._has_outputs or bool(batch.outputs)
        self._engine = batch.engine_index
        if merging is None:
            self._scheduler = scheduler
            self._record()
            return
        if batch.outputs:
            merging.step(iteration.prompt_token_stats.computed + iteration.num_generation_tokens)
        if scheduler is not None:
            self._replace(scheduler)
        if len(iteration.finished_requests) >= MAX_FINISHED or merging.is_due(scheduler):
            self._record()

    def _replace(self, scheduler: Any) -> None:
        """These figures instead of those that wait, if any."""
        earlier, self._scheduler = self._scheduler, scheduler
        if earlier is None:
            return
        if scheduler.prefix_cache_stats.reset:  # it forgets what came before, so that must be recorded now
            self._manager.record(engine_idx=self._engine, scheduler_stats=earlier, iteration_stats=None)
        else:
            add_prefix_queries(earlier.prefix_cache_stats, scheduler.prefix_cache_stats)

    def flush(self) -> None:
        """Record what has not been recorded yet."""
        self._count()
        if self._iteration is not None:
            self._record()

    def _record(self) -> None:
        iteration, scheduler, has_outputs = self._iteration, self._scheduler, self._has_outputs
        self._iteration, self._scheduler, self._has_outputs = None, None, False
        self._manager.record(
            engine_idx=self._engine,
            scheduler_stats=scheduler,
            iteration_stats=iteration if has_outputs else None,
            mm_cache_stats=self._renderer.stat_mm_cache(),
        )
        if self._merging is not None:
            self._merging.flushed()

    def close(self) -> None:
        """Record the rest, and leave vLLM's loggers as they were found."""
        if self._manager is not None:
            self.flush()
        if self._merging is not None:
            self._merging.close()

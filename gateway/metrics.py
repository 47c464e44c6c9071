"""All of the gateway's metrics, in one table.

Names follow OpenTelemetry's gen_ai conventions where one exists.

With several processes prometheus_client keeps the values in files of PROMETHEUS_MULTIPROC_DIR (set by the
supervisor before this module is imported), and `/metrics` of any process shows the sum.

What happens once per token or once per request is counted in plain numbers (`gateway/hot_metrics.py`) and
moved into prometheus_client at each scrape, and with several processes once a second.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

from backend.pool import WorkerStatus
from backend.replica import READY
from gateway.hot_metrics import HotCounts, HotHistogram

# Stages of ours take tens of microseconds to milliseconds; prefill takes seconds.
STAGE_BUCKETS_S: Final = (
    5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3,
    1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
TOKEN_BUCKETS_S: Final = (
    5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 1e-2, 1.5e-2, 2e-2, 2.5e-2, 3e-2,
    4e-2, 5e-2, 7.5e-2, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
REQUEST_BUCKETS_S: Final = (
    1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0,
    2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
SIZE_BUCKETS_TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)

MODEL_LABEL: Final = "gen_ai_request_model"
GaugeMode = Literal["livesum", "livemax", "livemin", "livemostrecent"]  # over several processes


class ModelFigures:
    """What is observed once for each request of one model."""

    __slots__ = ("duration", "input_tokens", "output_tokens", "queue", "tpot", "ttft")

    def __init__(self, metrics: Metrics, model: str) -> None:
        requests, sizes = REQUEST_BUCKETS_S, SIZE_BUCKETS_TOKENS
        self.duration = HotHistogram(requests, metrics.duration.labels(model))
        self.ttft = HotHistogram(requests, metrics.ttft.labels(model))
        self.tpot = HotHistogram(TOKEN_BUCKETS_S, metrics.tpot.labels(model))
        self.queue = HotHistogram(requests, metrics.queue.labels(model))
        self.input_tokens = HotHistogram(sizes, metrics.tokens.labels(model, "input"))
        self.output_tokens = HotHistogram(sizes, metrics.tokens.labels(model, "output"))

    def flush(self) -> None:
        for name in self.__slots__:
            getattr(self, name).flush()


class Metrics:
    """Built once per process by `gateway/app.py`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.is_shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ  # other processes show them, too
        self._held_peak = 0
        self._latencies()
        self._counters()
        self._gauges()
        self.counts = HotCounts[tuple[Counter, tuple[str, ...]]](lambda key: key[0].labels(*key[1]))
        self._models: dict[str, ModelFigures] = {}
        self._stages: dict[str, HotHistogram] = {}

    def of_model(self, model: str) -> ModelFigures:
        """What is observed of this model's requests, until `flush`."""
        figures = self._models.get(model)
        if figures is None:
            figures = self._models[model] = ModelFigures(self, model)
        return figures

    def stage_took(self, stage: str, seconds: float) -> None:
        """One of our own stages has ended."""
        histogram = self._stages.get(stage)
        if histogram is None:
            histogram = HotHistogram(STAGE_BUCKETS_S, self.stage.labels(stage))
            self._stages[stage] = histogram
        histogram.observe(seconds)

    def _histogram(self, name: str, help_: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, help_, labels, buckets=buckets, registry=self.registry)

    def counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(name, help_, labels, registry=self.registry)

    def _latencies(self) -> None:
        make, requests, tokens = self._histogram, REQUEST_BUCKETS_S, TOKEN_BUCKETS_S
        name = "gen_ai_server_request_duration_seconds"
        self.duration = make(name, "From the parsed head to the last byte (E2E).", requests, MODEL_LABEL)
        name = "gen_ai_server_time_to_first_token_seconds"
        self.ttft = make(name, "From the parsed head to the first token (TTFT).", requests, MODEL_LABEL)
        name = "gen_ai_server_time_per_output_token_seconds"
        self.tpot = make(name, "Mean time per output token after the first (TPOT).", tokens, MODEL_LABEL)
        name = "headrace_time_between_tokens_seconds"
        self.gaps = HotHistogram(tokens, make(name, "Gap between two tokens of one choice (TBT).", tokens))
        name = "headrace_queue_seconds"
        self.queue = make(
            name, "Time in the engine's queue, as the worker reports it.", requests, MODEL_LABEL
        )
        name = "headrace_stage_seconds"
        self.stage = make(name, "Time in one of our own stages.", STAGE_BUCKETS_S, "stage")
        name = "headrace_warmup_seconds"
        self.warmup = make(name, "Time of one warm-up, its wait in the engine included.", requests)
        name = "headrace_store_append_seconds"
        self.store_append = make(name, "One append of stream events to the store.", STAGE_BUCKETS_S)
        help_ = "Prompt and output tokens per request."
        sizes, name = SIZE_BUCKETS_TOKENS, "gen_ai_client_token_usage"
        self.tokens = make(name, help_, sizes, MODEL_LABEL, "gen_ai_token_type")

    def _counters(self) -> None:
        make = self.counter
        help_ = "Requests by route, HTTP status and who or what ended them."
        self.requests = make("headrace_requests", help_, "route", "status", "ended")
        help_ = "Prompt tokens that the engine found in its prefix cache."
        self.cached_tokens = make("headrace_cached_prompt_tokens", help_, MODEL_LABEL)
        help_ = "Messages that a context policy left out."
        self.dropped_messages = make("headrace_context_dropped_messages", help_, MODEL_LABEL)
        help_ = "Tokens by which context policies made prompts shorter."
        self.dropped_tokens = make("headrace_context_dropped_tokens", help_, MODEL_LABEL)
        help_ = "Content rule hits, by rule, where it matched, and what was done."
        self.hits = make("headrace_rule_hits", help_, "rule", "direction", "channel", "action")
        help_ = "What parsers of reasoning or tool calls could not read as they should."
        self.parser_problems = make("headrace_parser_problems", help_, MODEL_LABEL, "problem")
        help_ = "Lines of the request log and the audit that could not be written."
        self.lost_lines = make("headrace_lost_log_lines", help_)
        help_ = "Exchanges of the content rules while requests ran."
        self.rules_reloads = make("headrace_rules_reloads", help_)
        help_ = "Changed rule files that were refused; the rules before stayed on."
        self.rules_failed_reloads = make("headrace_rules_failed_reloads", help_)
        help_ = "Texts of requests, by whether they were known from an earlier scan (known, new)."
        self.scanned_texts = make("headrace_scanned_texts", help_, "seen")
        help_ = "Choices sent to another worker after theirs was lost."
        self.resubmitted = make("headrace_resubmitted", help_)
        help_ = "Warm prompts put into a worker's prefix cache, by what made it necessary."
        self.warmups = make("headrace_warmups", help_, "worker", "reason")
        help_ = "Attempts to warm a prompt that failed."
        self.warmup_failures = make("headrace_warmup_failures", help_, "worker")
        self.store_events = make("headrace_store_events", "Stream events that the store has taken.")
        help_ = "Commands to the store of the streams that failed."
        self.store_errors = make("headrace_store_errors", help_)
        help_ = "Characters that a filter let go undecided: at a bound, or because rules fail open."
        self.leaks = make("headrace_released_at_bound_characters", help_)

    def gauge(self, name: str, help_: str, mode: GaugeMode, *labels: str) -> Gauge:
        return Gauge(name, help_, labels, registry=self.registry, multiprocess_mode=mode)

    def _gauges(self) -> None:
        make = self.gauge
        self.open_requests = make("headrace_open_requests", "Requests in progress.", "livesum")
        self.conversations = make("headrace_conversations", "Open conversations over WebSocket.", "livesum")
        help_ = "Tasks on the event loop: one or two per open request, and a few that stay."
        self.tasks = make("headrace_tasks", help_, "livesum")
        self.buffered_bytes = make("headrace_buffered_bytes", "Bytes that wait for slow clients.", "livesum")
        help_ = "Most bytes that ever waited for one client."
        self.buffered_peak = make("headrace_buffered_peak_bytes", help_, "livemax")
        help_ = "Most characters that a filter ever held."
        self.held_peak = make("headrace_held_peak_characters", help_, "livemax")
        self.workers = {
            name: make(f"headrace_worker_{name}", help_, "livemostrecent", "worker")
            for name, help_ in WORKER_GAUGES.items()
        }
        help_ = "The content rules in force: 1 at the start, one more after each reload."
        self.rules_version = make("headrace_rules_version", help_, "livemax")
        help_ = "Memory for texts that need no scan, because the rules in force have seen them."
        self.seen_text_bytes = make("headrace_seen_text_bytes", help_, "livesum")
        help_ = "Warm prompts of a worker by their state, of one gateway process."
        self.warm_prompts = make("headrace_warm_prompts", help_, "livemostrecent", "worker", "state")
        help_ = "Tokens sent to the worker and not yet answered, by this gateway."
        self.worker_outstanding = make("headrace_worker_outstanding_tokens", help_, "livesum", "worker")

    def exposition(self) -> bytes:
        """The Prometheus text format, summed over processes where there are several."""
        self.flush()
        if not self.is_shared:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

    def note_held(self, num_characters: int) -> None:
        """A filter has held so many characters at its peak."""
        if num_characters > self._held_peak:
            self._held_peak = num_characters
            self.held_peak.set(num_characters)

    def publish_workers(self, statuses: Sequence[WorkerStatus]) -> None:
        """Bring the workers' gauges up to date."""
        for status in statuses:
            worker = status.address
            self.worker_outstanding.labels(worker).set(status.outstanding_tokens)
            self.workers["ready"].labels(worker).set(status.state == READY)
            for name in WORKER_GAUGES.keys() - {"ready"}:
                self.workers[name].labels(worker).set(getattr(status, name))

    def flush(self) -> None:
        """Move what was counted per token and per request to where a scrape sees it."""
        self.counts.flush()
        for histogram in (self.gaps, *self._stages.values()):
            histogram.flush()
        for figures in self._models.values():
            figures.flush()


WORKER_GAUGES: Final = {
    "ready": "1 when the worker takes requests.",
    "running": "Requests that the engine runs.",
    "waiting": "Requests that wait in the engine.",
    "kv_usage": "Used share of the KV cache, 0 to 1.",
    "preemptions": "Preemptions since the engine started.",
    "prefix_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_hits": "Prompt tokens found in the prefix cache.",
    "dropped_entries": "Late entries for an earlier use of a slot, dropped.",
    "copied_bytes": "Bytes of prompt ids copied on their way to this worker.",
}

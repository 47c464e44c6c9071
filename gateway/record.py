"""What is remembered of one request, for its log line, the metrics and `timings`: stages, counts, its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from gateway.metrics import Metrics
from pipeline.values import Dropped, FirstToken, MediaKind, Usage


@dataclass(slots=True)
class RequestRecord:
    """Mutable: filled in while the request runs. All times are monotonic seconds of this process."""

    request_id: str
    route: str
    started_s: float
    client: str | None = None  # its address; None: not known, or not to be logged
    key_id: str | None = None
    model: str = ""
    worker: str = ""
    stream: bool = False
    num_choices: int = 1
    status: int = 0
    prompt_tokens: int = 0
    is_counted: bool = True  # the prompt's tokens; a server of text may not say
    output_tokens: int = 0
    reasoning_tokens: int | None = None  # of the output tokens; None: no parser of reasoning
    cached_tokens: int | None = None  # of the prompt tokens; None: the engine has not told
    media_tokens: dict[MediaKind, int] = field(default_factory=dict)  # of the prompt tokens
    dropped: Dropped | None = None  # by a context policy
    stages_s: dict[str, float] = field(default_factory=dict)
    first_token_s: float | None = None
    last_token_s: float | None = None
    first: FirstToken | None = None
    finish: list[str] = field(default_factory=list)
    ended: str = ""  # complete, client, or the error's code
    detail: str = ""
    resubmitted: int = 0
    rule_hits: int = 0
    held_peak: int = 0  # raw characters
    undecided: int = 0  # raw characters that a filter still held when the answer was broken off
    buffered_peak: int = 0
    _stage_s: float = 0.0

    def begin(self) -> None:
        """The first stage begins: what came before it was the network."""
        self._stage_s = monotonic()

    def done(self, stage: str) -> None:
        """A stage ends, the next one begins."""
        now_s = monotonic()
        self.stages_s[stage] = now_s - self._stage_s
        self._stage_s = now_s

    def add_cached(self, num_tokens: int | None) -> None:
        """So much of one more prompt was cached; None where the engine does not tell."""
        if num_tokens is not None:
            self.cached_tokens = num_tokens + (self.cached_tokens or 0)

    @property
    def usage(self) -> Usage | None:
        """None where nobody has counted the prompt."""
        if not self.is_counted:
            return None
        return Usage(
            self.prompt_tokens,
            self.output_tokens,
            self.cached_tokens,
            self.dropped,
            self.reasoning_tokens,
            self.media_tokens,
        )

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first, per choice."""
        num_later = self.output_tokens - self.num_choices
        if self.first_token_s is None or self.last_token_s is None or num_later <= 0:
            return None
        return (self.last_token_s - self.first_token_s) * self.num_choices / num_later

    def timings(self, now_s: float) -> dict[str, Any]:
        """The object of `stream_options.include_timings`: milliseconds, and cached prompt tokens.

        What the engine does in that time is there only where it tells it.
        """
        timings: dict[str, Any] = {f"{name}_ms": _ms(seconds) for name, seconds in self.stages_s.items()}
        first = self.first or FirstToken()
        if first.queue_ms is not None:
            timings["queue_ms"] = round(first.queue_ms, 3)
        if first.prefill_ms is not None:
            timings["prefill_ms"] = round(first.prefill_ms, 3)
        return timings | {
            "ttft_ms": _ms(self.ttft_s),
            "tpot_ms": _ms(self.tpot_s),
            "total_ms": _ms(now_s - self.started_s),
            "cached_tokens": self.cached_tokens,
        }

    def server_timing(self) -> bytes:
        """The `server-timing` header: the stages known when the head is sent."""
        parts = [f"{name};dur={seconds * 1e3:.3f}" for name, seconds in self.stages_s.items()]
        if self.first is not None and self.first.queue_ms is not None:
            parts.append(f"queue;dur={self.first.queue_ms:.3f}")
        return ", ".join(parts).encode()

    def context(self) -> bytes | None:
        """The `x-headrace-context` header: what a context policy has dropped; None if nothing."""
        dropped = self.dropped
        if dropped is None:
            return None
        counts = {
            "messages": dropped.num_messages,
            "characters": dropped.num_characters,
            "tokens": dropped.num_tokens,
        }
        parts = [f"{name}={number}" for name, number in counts.items() if number]
        return "; ".join([dropped.policy, *parts]).encode()

    def log_fields(self, now_s: float, wall_s: float) -> dict[str, Any]:
        """The request log's line. No text."""
        return {
            "time": round(wall_s, 3),
            "id": self.request_id,
            "route": self.route,
            "client": self.client,
            "key": self.key_id,
            "model": self.model,
            "worker": self.worker,
            "stream": self.stream,
            "status": self.status,
            "prompt_tokens": self.prompt_tokens if self.is_counted else None,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "reasoning_tokens": self.reasoning_tokens,
            "dropped_messages": 0 if self.dropped is None else self.dropped.num_messages,
            "dropped_tokens": 0 if self.dropped is None else self.dropped.num_tokens,
            "choices": self.num_choices,
            **self.timings(now_s),
            "finish": self.finish,
            "ended": self.ended,
            "detail": self.detail,
            "resubmitted": self.resubmitted,
            "rule_hits": self.rule_hits,
            "held_peak_characters": self.held_peak,
            "undecided_characters": self.undecided,
            "buffered_peak_bytes": self.buffered_peak,
        }

    def count(self, metrics: Metrics, now_s: float) -> None:
        """Add this request to the metrics, once, at its end."""
        add = metrics.counts.add
        add((metrics.requests, (self.route, str(self.status), self.ended)))
        for name, seconds in self.stages_s.items():
            metrics.stage_took(name, seconds)
        metrics.note_held(self.held_peak)
        if not self.model:
            return
        labels, figures = (self.model,), metrics.of_model(self.model)
        figures.duration.observe(now_s - self.started_s)
        figures.input_tokens.observe(self.prompt_tokens)
        figures.output_tokens.observe(self.output_tokens)
        if self.cached_tokens is not None:
            add((metrics.cached_tokens, labels), self.cached_tokens)
        if self.dropped is not None:
            add((metrics.dropped_messages, labels), self.dropped.num_messages)
            add((metrics.dropped_tokens, labels), self.dropped.num_tokens)
        if self.first_token_s is not None:
            figures.ttft.observe(self.first_token_s - self.started_s)
        if self.first is not None and self.first.queue_ms is not None:
            figures.queue.observe(self.first.queue_ms / 1e3)
        tpot_s = self.tpot_s
        if tpot_s is not None:
            figures.tpot.observe(tpot_s)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)

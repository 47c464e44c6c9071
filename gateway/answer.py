"""One request after its submission: its choices, their ends, and every limit that can cut it short.

A choice is the engine's `Sink`: the engine calls `Choice.tokens` from the event loop for each step, and the
text leaves in that same call. An answer ends exactly once: complete, failed with a named error, or because
its client has gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.metrics import Metrics
from gateway.outlet import Outlet
from gateway.record import RequestRecord
from gateway.writers import Writer
from pipeline.errors import (
    ClientGone,
    DeadlineExceeded,
    EngineFailed,
    HeadraceError,
    QueueTimeout,
    WorkerLost,
    WorkerStalled,
)
from pipeline.outbound import FINISH, Outbound
from pipeline.ports import Engine, Handle
from pipeline.values import EngineCall, FinishReason, FirstToken, TokenLogprobs

COMPLETE: Final = "complete"


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """When an answer is cut short, in seconds."""

    queue_s: float = 60.0  # to the first token
    stall_s: float = 30.0  # between two tokens
    request_s: float = 600.0  # all of it
    hold_s: float = 2.0  # text held by a filter
    slow_reader_s: float = 30.0  # a client that does not read
    heartbeat_s: float = 5.0  # silence before a comment is sent


class Choice:
    """One choice of an answer: the engine's sink."""

    __slots__ = (
        "_answer",
        "_call",
        "_has_text",
        "_held_since_s",
        "_index",
        "_is_second",
        "_make",
        "_outbound",
        "handle",
        "last_s",
        "num_tokens",
    )

    def __init__(self, answer: Answer, index: int, call: EngineCall, make: Callable[[], Outbound]) -> None:
        self._answer = answer
        self._index = index
        self._call = call
        self._make = make
        self._outbound = make()
        self._has_text = False  # something was written
        self._is_second = False  # submitted again after its worker was lost
        self._held_since_s: float | None = None
        self.handle: Handle | None = None
        self.last_s: float | None = None  # monotonic time of the last token
        self.num_tokens = 0

    @property
    def is_done(self) -> bool:
        return self._outbound.finish is not None

    @property
    def worker(self) -> str:
        return self.handle.worker if self.handle is not None else ""

    def submit(self, engine: Engine) -> None:
        self.handle = engine.submit(self._call, self)

    def tokens(
        self,
        ids: list[int],
        finish: str | None,
        stop: int | str | None,
        first: FirstToken | None,
        logprobs: Sequence[TokenLogprobs] | None,
        now_s: float,
    ) -> None:
        """`pipeline.ports.Sink.tokens`: the token path."""
        answer = self._answer
        outbound = self._outbound
        if finish is not None and finish not in FINISH:
            self.failed(EngineFailed(f"The engine ended the request with the reason {finish!r}."))
            return
        if first is not None or self.last_s is None:
            answer.on_first(first, now_s)
        else:
            answer.observe_gap(now_s - self.last_s)
        self.last_s = now_s
        self.num_tokens += len(ids)
        answer.record.output_tokens += len(ids)
        text = outbound.feed(ids, finish, stop, logprobs)
        if text:
            self._has_text = True
            if outbound.logprobs:
                self._write_with_logprobs(text)
            else:
                answer.writer.text(self._index, text)
        if outbound.num_held:
            if self._held_since_s is None or text:
                self._held_since_s = now_s
        else:
            self._held_since_s = None
        if outbound.finish is not None:
            self._end(now_s)

    def failed(self, error: HeadraceError) -> None:
        """`pipeline.ports.Sink.failed`. A lost worker costs nothing, once, if nothing was delivered yet."""
        answer = self._answer
        may_restart = isinstance(error, WorkerLost) and not self._is_second and not answer.is_ended
        if may_restart and (not self._has_text or answer.writer.take_back(self._index)):
            self._restart()
        else:
            answer.fail(error)

    def abort(self) -> None:
        if self.handle is not None and not self.is_done:
            self.handle.abort()

    def expire_hold(self, now_s: float, limit_s: float) -> None:
        """Text that the filter holds for too long is decided by its policy."""
        if self._held_since_s is None or now_s - self._held_since_s < limit_s or self.is_done:
            return
        self._held_since_s = None
        text = self._outbound.expire()
        if text:
            self._has_text = True
            self._answer.writer.text(self._index, text)
        if self._outbound.finish is not None:
            self._end(now_s)

    def report(self, record: RequestRecord, metrics: Metrics) -> None:
        """What the filter found and held, when the answer has ended."""
        outbound = self._outbound
        record.rule_hits += len(outbound.hits)
        record.held_peak = max(record.held_peak, outbound.peak_held)
        record.undecided += 0 if self.is_done else outbound.num_held
        metrics.leaks.inc(outbound.num_leaked)
        for hit in outbound.hits:
            metrics.hits.labels(hit.rule_id, "output", "shadow" if hit.shadow else hit.action).inc()

    def _write_with_logprobs(self, text: str) -> None:
        entries, self._outbound.logprobs = self._outbound.logprobs, []
        self._answer.writer.text_with_logprobs(self._index, text, entries)

    def _end(self, now_s: float) -> None:
        outbound = self._outbound
        if outbound.ended_here and self.handle is not None:
            self.handle.abort()
        assert outbound.finish is not None
        if outbound.logprobs:  # of tokens without text
            self._write_with_logprobs("")
        self._answer.writer.finish(self._index, outbound.finish, outbound.stop_reason)
        self._answer.on_choice_end(outbound.finish, now_s)

    def _restart(self) -> None:
        answer = self._answer
        self._is_second = True
        self._has_text = False
        self._outbound = self._make()
        self._held_since_s = self.last_s = None
        answer.record.output_tokens -= self.num_tokens
        self.num_tokens = 0
        try:
            self.submit(answer.engine)
        except HeadraceError as error:
            answer.fail(WorkerLost(f"The worker was lost and no other one took the request: {error}"))
        else:
            answer.on_resubmit(self)


class Answer:
    """All choices of one request, until the last of them has ended."""

    def __init__(
        self,
        engine: Engine,
        writer: Writer,
        outlet: Outlet,
        record: RequestRecord,
        metrics: Metrics,
        limits: AnswerLimits,
    ) -> None:
        self.engine = engine
        self.writer = writer
        self.outlet = outlet
        self.record = record
        self.metrics = metrics
        self.observe_gap = metrics.gaps.observe
        self.is_ended = False
        self._limits = limits
        self._choices: list[Choice] = []
        self._num_open = 0
        self._started_s = record.started_s
        self._written_s = record.started_s
        self._num_frames = 0

    def start(self, calls: Sequence[EngineCall], make: Callable[[], Outbound]) -> None:
        """Submit every call. Raises what the engine raises for one, with nothing left running."""
        self._choices = [Choice(self, index, call, make) for index, call in enumerate(calls)]
        self._num_open = self.record.num_choices = len(calls)
        try:
            for choice in self._choices:
                choice.submit(self.engine)
        except HeadraceError:
            self._abort_all()
            self.is_ended = True
            raise
        self.record.worker = self._choices[0].worker

    def on_first(self, first: FirstToken | None, now_s: float) -> None:
        """The first token of a choice. The first of all opens the response."""
        if self.record.first_token_s is None:
            self.record.first_token_s = now_s
            self.record.first = first
            self.record.cached_tokens = first.cached_tokens if first is not None else 0
            self.writer.first()

    def on_choice_end(self, finish: FinishReason, now_s: float) -> None:
        record = self.record
        record.last_token_s = now_s
        record.finish.append(finish)
        self._num_open -= 1
        if self._num_open == 0 and not self.is_ended:
            self._finish(COMPLETE)
            self.writer.end(lambda: record.timings(now_s))

    def fail(self, error: HeadraceError) -> None:
        """End with a named error; the engine stops at once."""
        if self.is_ended:
            return
        self._abort_all()
        self._finish(error.code or error.type, error.log_detail)
        self.writer.fail(error)

    def client_gone(self, reason: str) -> None:
        """Nobody is left to take the answer, or its last bytes: the engine stops, held text is dropped."""
        if self.is_ended and self.record.ended != COMPLETE:
            return
        self._abort_all()
        self._finish(ClientGone.code or "", reason)
        self.record.status = self.record.status or ClientGone.status_hint
        self.outlet.drop()

    def on_resubmit(self, choice: Choice) -> None:
        """Another worker has taken over a choice."""
        self.record.worker = choice.worker
        self.record.resubmitted += 1
        self.metrics.resubmitted.inc()

    def check(self, now_s: float) -> None:
        """Enforce every time limit; called several times a second."""
        error = self._expired(now_s)
        if error is not None:
            self.fail(error)
            return
        for choice in self._choices:
            choice.expire_hold(now_s, self._limits.hold_s)
        if not self.is_ended:
            self._keep_alive(now_s)

    def check_reader(self, now_s: float) -> str | None:
        """Why the client must be dropped, or None. Also asked after the end, while the last bytes wait."""
        since_s = self.outlet.blocked_since_s
        if since_s is None or now_s - since_s < self._limits.slow_reader_s:
            return None
        return f"has not read for {now_s - since_s:.0f} s; the limit is {self._limits.slow_reader_s:g} s"

    def _expired(self, now_s: float) -> HeadraceError | None:
        limits, age_s = self._limits, now_s - self._started_s
        if age_s > limits.request_s:
            return DeadlineExceeded(f"The request took longer than {limits.request_s:g} s.")
        for choice in self._choices:
            if choice.is_done:
                continue
            if choice.last_s is None and age_s > limits.queue_s:
                return QueueTimeout(f"No first token within {limits.queue_s:g} s.")
            if choice.last_s is not None and now_s - choice.last_s > limits.stall_s:
                return WorkerStalled(f"The worker {choice.worker!r} sent no token for {limits.stall_s:g} s.")
        return None

    def _keep_alive(self, now_s: float) -> None:
        num_frames = self.writer.num_frames
        if num_frames != self._num_frames:
            self._num_frames = num_frames
            self._written_s = now_s
        elif now_s - self._written_s >= self._limits.heartbeat_s:
            self.writer.ping()
            self._num_frames = self.writer.num_frames
            self._written_s = now_s

    def _abort_all(self) -> None:
        for choice in self._choices:
            choice.abort()

    def _finish(self, ended: str, detail: str = "") -> None:
        record = self.record
        record.ended, record.detail = ended, detail
        if not self.is_ended:
            self.is_ended = True
            for choice in self._choices:
                choice.report(record, self.metrics)

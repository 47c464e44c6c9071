"""One request after its submission: its choices, their ends, and every limit that can cut it short.

An answer ends exactly once: complete, failed with a named error, or because its client has gone. What happens
to a choice's tokens is in `gateway/token_choice.py` and `gateway/text_choice.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from filters.hit import Hit
from gateway.audit import Audit
from gateway.client import Outgoing
from gateway.error_body import INTERNAL_CODE, how_it_ended
from gateway.metrics import Metrics
from gateway.outlet import why_too_slow
from gateway.record import RequestRecord
from gateway.text_choice import TextChoice
from gateway.token_choice import TokenChoice
from gateway.writers import Writer
from pipeline.errors import (
    ClientGone,
    DeadlineExceeded,
    HeadraceError,
    QueueTimeout,
    WorkerStalled,
)
from pipeline.outbound import Outbound
from pipeline.ports import Engine
from pipeline.text_outbound import TextOutbound
from pipeline.values import EngineCall, FinishReason, FirstToken, MediaKind, TextCall, TextUsage

COMPLETE: Final = "complete"
_MAX_CHECK_GAP_S: Final = 1.0
# Told with each choice's first token: worker, the prompt's ids, its cache salt, what the engine told, now_s.
ObservePrompt = Callable[[str, memoryview, str | None, FirstToken, float], None]


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """When an answer is cut short, in seconds."""

    queue_s: float = 60.0  # from the submission to the first token
    stall_s: float = 30.0  # between two tokens
    request_s: float = 600.0  # all of it
    hold_s: float = 2.0  # text held by a filter while tokens come
    slow_reader_s: float = 30.0  # a client that does not read
    heartbeat_s: float = 5.0  # silence before a comment is sent

    @property
    def max_check_gap_s(self) -> float:
        """How long nobody need look. What begins unseen, as a silence does, is noticed so much later."""
        return min(
            _MAX_CHECK_GAP_S, min(self.queue_s, self.stall_s, self.slow_reader_s, self.heartbeat_s) / 5
        )


class Answer:
    """All choices of one request, until the last of them has ended."""

    def __init__(
        self,
        engine: Engine,
        writer: Writer,
        outlet: Outgoing,
        record: RequestRecord,
        metrics: Metrics,
        audit: Audit,
        limits: AnswerLimits,
        observe_prompt: ObservePrompt = lambda worker, ids, cache_salt, first, now_s: None,
    ) -> None:
        self.engine = engine
        self.writer = writer
        self.outlet = outlet
        self.record = record
        self.metrics = metrics
        self._audit = audit
        self.observe_gap = metrics.gaps.observe
        self._observe_prompt = observe_prompt
        self.is_ended = False
        self._limits = limits
        self._choices: Sequence[TokenChoice | TextChoice] = ()
        self._num_open = 0
        self._prompts: list[int] = []  # per choice the number of its prompt
        self._new_prompts: set[int] = set()  # without a first token
        self._prompt_tokens: list[int] = []  # per choice, as they were sent
        self._media: list[Sequence[MediaKind]] = []  # per choice, one for each placeholder of its prompt
        self._started_s = record.started_s
        self._written_s = record.started_s
        self._num_frames = 0

    def start(self, calls: Sequence[EngineCall], make: Callable[[EngineCall], Outbound]) -> None:
        """Submit every call. Raises what the engine raises for one, with nothing left running."""
        numbers: dict[int, int] = {}
        prompts = [numbers.setdefault(id(call.prompt), len(numbers)) for call in calls]
        self._prompt_tokens = [call.prompt.num_tokens for call in calls]
        self._media = [[medium.kind for medium in call.media] for call in calls]
        self._begin([TokenChoice(self, index, call, make) for index, call in enumerate(calls)], prompts)

    def start_text(self, calls: Sequence[TextCall], make: Callable[[], TextOutbound]) -> None:
        """The same where the engine's servers give text. What they count is known at the end."""
        self.record.is_counted = False
        choices = [TextChoice(self, index, call, make) for index, call in enumerate(calls)]
        self._begin(choices, [call.prompt_index for call in calls])

    def _begin(self, choices: Sequence[TokenChoice | TextChoice], prompts: list[int]) -> None:
        self._choices = choices
        self._num_open = self.record.num_choices = len(choices)
        self._prompts, self._new_prompts = prompts, set(prompts)
        try:
            for choice in self._choices:
                choice.submit(self.engine)
        except BaseException:
            self._abort_all()
            self.is_ended = True
            for choice in self._choices:
                choice.let_go()
            raise
        self.record.worker = self._choices[0].worker

    def on_first(self, index: int, call: EngineCall | None, first: FirstToken | None, now_s: float) -> None:
        """The first token of a choice. The first of all opens the response. `call`: if it is still held."""
        record, prompt = self.record, self._prompts[index]
        if call is not None and first is not None:
            worker = self._choices[index].worker
            begun_s = now_s if record.first_token_s is None else record.first_token_s  # it may be told late
            self._observe_prompt(worker, call.prompt.ids, call.cache_salt, first, begun_s)
        if first is not None and prompt in self._new_prompts:
            self._new_prompts.remove(prompt)  # its other choices find the cache filled by the first
            record.add_cached(first.cached_tokens)
            if first.prompt_tokens is not None:
                self._count_media(index, first.prompt_tokens - self._prompt_tokens[index])
        if record.first_token_s is None:
            record.first_token_s = now_s
            record.first = first
            self.writer.first()

    def on_usage(self, index: int, usage: TextUsage) -> None:
        """What a server of text has counted of a choice's prompt."""
        record, prompt = self.record, self._prompts[index]
        if usage.prompt_tokens is not None and prompt in self._new_prompts:
            self._new_prompts.remove(prompt)
            record.prompt_tokens += usage.prompt_tokens
            record.add_cached(usage.cached_tokens)
        record.is_counted = not self._new_prompts

    def _count_media(self, index: int, num_more: int) -> None:
        """The engine has made so many tokens more of the placeholders in a choice's prompt."""
        record, kinds = self.record, self._media[index]
        record.prompt_tokens += num_more
        if len(set(kinds)) == 1:
            record.media_tokens[kinds[0]] = record.media_tokens.get(kinds[0], 0) + num_more + len(kinds)

    def on_choice_end(self, finish: FinishReason, now_s: float) -> None:
        record = self.record
        record.last_token_s = now_s
        record.finish.append(finish)
        self._num_open -= 1
        if self._num_open == 0 and not self.is_ended:
            self._finish(COMPLETE)
            self._end(now_s)

    def _end(self, now_s: float) -> None:
        """The whole answer is there. A fault of ours in writing it must not leave the client waiting."""
        try:
            self.writer.end(lambda: self.record.timings(now_s))
        except Exception:
            self.record.ended = INTERNAL_CODE
            self.writer.fail(HeadraceError("An internal error ended this answer."))
            raise

    def fail(self, error: HeadraceError) -> None:
        """End with a named error; the engine stops at once."""
        if self.is_ended:
            return
        self._abort_all()
        for choice in self._choices:
            choice.abandon()
        self._finish(*how_it_ended(error))
        self.writer.fail(error)

    def client_gone(self, reason: str) -> None:
        """Nobody is left to take the answer, or its last bytes: the engine stops, held text is dropped."""
        if self.is_ended and self.record.ended != COMPLETE:
            return
        self._abort_all()
        self._finish(ClientGone.code or "", reason)
        self.record.status = self.record.status or ClientGone.status_hint
        self.outlet.drop()

    def on_resubmit(self, worker: str) -> None:
        """Another worker has taken over a choice."""
        self.record.worker = worker
        self.record.resubmitted += 1
        self.metrics.resubmitted.inc()

    def on_hits(self, index: int, hits: Sequence[tuple[str, Hit]]) -> None:
        """Rules have matched in a choice."""
        for channel, hit in hits:
            self._audit.hit(self.record, "output", channel, hit, index)

    def check(self, now_s: float) -> None:
        """Enforce every time limit; called whenever `next_check_s` has come."""
        error = self._expired(now_s)
        if error is not None:
            self.fail(error)
            return
        for choice in self._choices:
            choice.expire_hold(now_s, self._limits.hold_s)
        if not self.is_ended:
            self._keep_alive(now_s)

    def next_check_s(self, now_s: float) -> float:
        """Until then no limit can be passed that runs now, nor one of the hold that may begin."""
        limits = self._limits
        if self.is_ended or self.outlet.blocked_since_s is not None:
            return now_s  # its last bytes wait, or its client does not read
        due_s = min(
            now_s + limits.max_check_gap_s,
            self._started_s + limits.request_s,
            self._written_s + limits.heartbeat_s,
        )
        for choice in self._choices:
            due_s = min(due_s, choice.next_check_s(now_s, limits.queue_s, limits.stall_s, limits.hold_s))
        return due_s

    def check_reader(self, now_s: float) -> str | None:
        """Why the client must be dropped, or None. Also asked after the end, while the last bytes wait."""
        return why_too_slow(self.outlet.blocked_since_s, now_s, self._limits.slow_reader_s)

    def _expired(self, now_s: float) -> HeadraceError | None:
        limits, age_s = self._limits, now_s - self._started_s
        if age_s > limits.request_s:
            return DeadlineExceeded(f"The request took longer than {limits.request_s:g} s.")
        for choice in self._choices:
            if choice.is_done:
                continue
            if choice.waits_since_s is None:
                choice.waits_since_s = now_s
            if choice.last_s is None and now_s - choice.waits_since_s > limits.queue_s:
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
                choice.let_go()
            self._choices = ()  # they hold this answer: parsers and filters would wait for the collector

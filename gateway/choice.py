"""One choice of an answer, from the engine's ids to the writer: the token path.

A choice is the engine's `Sink`: the engine calls `Choice.tokens` from the event loop for each step, and the
text leaves in that same call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Protocol

from filters.hit import Hit
from gateway.metrics import Metrics
from gateway.record import RequestRecord
from gateway.writers import Writer, WriteText
from pipeline.errors import EngineFailed, HeadraceError, QueueFull, WorkerLost, WorkerStalled
from pipeline.events import CONTENT, Event, Finish, TextDelta
from pipeline.outbound import FINISH, Outbound
from pipeline.ports import Engine, Handle
from pipeline.values import EngineCall, FinishReason, FirstToken, TextUsage, TokenLogprobs

# From an `EngineCall` to an `Outbound`, or from a `TextCall` to a `TextOutbound`.
MakeOutbound = Callable[[Any], Any]


class Owner(Protocol):
    """What a choice needs of its answer."""

    engine: Engine
    writer: Writer
    record: RequestRecord
    is_ended: bool

    @property
    def observe_gap(self) -> Callable[[float], None]: ...

    def on_first(
        self, index: int, call: EngineCall | None, first: FirstToken | None, now_s: float
    ) -> None: ...

    def on_choice_end(self, finish: FinishReason, now_s: float) -> None: ...

    def on_usage(self, index: int, usage: TextUsage) -> None: ...

    def on_resubmit(self, choice: Choice) -> None: ...

    def on_hits(self, index: int, hits: Sequence[tuple[str, Hit]]) -> None: ...

    def fail(self, error: HeadraceError) -> None: ...


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
        "_num_counted",
        "_observe_gap",
        "_outbound",
        "_write",
        "handle",
        "last_s",
        "num_tokens",
        "waits_since_s",
    )

    def __init__(self, answer: Owner, index: int, call: Any, make: MakeOutbound) -> None:
        self._answer = answer
        self._index = index
        # For a second submission, and no longer: it keeps the prompt's buffer from going to another request.
        self._call: EngineCall | None = call
        self._make = make
        self._outbound = make(call)
        self._observe_gap = answer.observe_gap
        self._write: WriteText | None = None  # content, once something was written
        self._num_counted = 0  # of `num_tokens`, in the record
        self._has_text = False  # something was written
        self._is_second = False  # submitted again after its worker was lost
        self._held_since_s: float | None = None
        self.handle: Handle | None = None
        self.last_s: float | None = None  # monotonic time of the last token
        self.num_tokens = 0
        self.waits_since_s: float | None = None  # monotonic time of the first look after its submission

    @property
    def is_done(self) -> bool:
        return self._outbound.finish is not None

    @property
    def worker(self) -> str:
        return self.handle.worker if self.handle is not None else ""

    def submit(self, engine: Engine) -> None:
        assert self._call is not None, "the call was let go of"
        self.waits_since_s = None
        self.handle = self._submitted(engine, self._call)
        if self._is_second:
            self._call = None

    def _submitted(self, engine: Engine, call: Any) -> Handle:
        handle: Handle = engine.submit(call, self)
        return handle

    def let_go(self) -> None:
        """It will not be submitted again."""
        self._call = None

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
        outbound, write = self._outbound, self._write
        if write is not None and finish is None and logprobs is None and outbound.is_plain:
            assert self.last_s is not None, "text before the first token"
            self._observe_gap(now_s - self.last_s)  # the token path: no object of the answer's is touched
            self.last_s = now_s
            self.num_tokens += len(ids)
            text = outbound.feed_text(ids)
            if text:
                write(text)
            if outbound.is_new_hold:
                self._held_since_s = now_s
            if outbound.needs_look:
                self._deliver(outbound.look(), now_s)
                self._look(outbound)
            return
        self._tokens(ids, finish, stop, first, logprobs, now_s)

    def _tokens(
        self,
        ids: list[int],
        finish: str | None,
        stop: int | str | None,
        first: FirstToken | None,
        logprobs: Sequence[TokenLogprobs] | None,
        now_s: float,
    ) -> None:
        """Whatever is not content in the middle of a text."""
        answer, outbound = self._answer, self._outbound
        if finish is not None and finish not in FINISH:
            self.failed(EngineFailed(f"The engine ended the request with the reason {finish!r}."))
            return
        if self.last_s is not None:
            self._observe_gap(now_s - self.last_s)
        if first is not None or self.last_s is None:  # some servers tell it with the last token
            answer.on_first(self._index, self._call, first, now_s)
        self.last_s = now_s
        self.num_tokens += len(ids)
        self._count()
        events = outbound.feed(ids, finish, stop, logprobs)
        if outbound.is_new_hold or outbound.waits_for_parser:
            self._held_since_s = now_s
        if events:
            self._deliver(events, now_s)
        if outbound.has_hits or outbound.failure is not None:
            self._look(outbound)

    def failed(self, error: HeadraceError) -> None:
        """`pipeline.ports.Sink.failed`.

        A worker that is lost, silent or full costs nothing, once, if nothing was delivered yet.
        """
        answer = self._answer
        is_workers = isinstance(error, WorkerLost | WorkerStalled | QueueFull)  # another one may do better
        may_restart = is_workers and not self._is_second and not answer.is_ended
        if may_restart and (not self._has_text or answer.writer.take_back(self._index)):
            self._restart(error)
        else:
            answer.fail(error)

    def abandon(self) -> None:
        """The answer ends with an error: what only rules that fail open still hold leaves before it."""
        if self.last_s is not None and not self.is_done:
            self._deliver(self._outbound.abandon(), self.last_s)
            self._take_hits()

    def abort(self) -> None:
        if self.handle is not None and not self.is_done:
            self.handle.abort()

    def expire_hold(self, now_s: float, limit_s: float) -> None:
        """Text that the filter holds for too long is decided by its policy."""
        outbound, since_s = self._outbound, self._held_since_s
        if since_s is None or self.last_s is None or not outbound.num_held or self.is_done:
            return
        # Only time in which tokens came: while the engine pauses there is nothing that could decide it.
        if self.last_s - since_s < limit_s:
            return
        self._deliver(outbound.expire(), now_s)
        self._look(outbound)

    def next_check_s(self, now_s: float, queue_s: float, stall_s: float, hold_s: float) -> float:
        """When the first of these limits can be passed that run now, or a hold that begins now."""
        if self.is_done:
            return inf
        if self.waits_since_s is None:
            return now_s
        waits_due_s = self.waits_since_s + queue_s if self.last_s is None else self.last_s + stall_s
        held_since_s = self._held_since_s if self._outbound.num_held else None
        return min(waits_due_s, (now_s if held_since_s is None else held_since_s) + hold_s)

    def report(self, record: RequestRecord, metrics: Metrics) -> None:
        """What the filter found and held, when the answer has ended."""
        outbound = self._outbound
        self._count()
        record.held_peak = max(record.held_peak, outbound.peak_held)
        record.undecided += 0 if self.is_done else outbound.num_held
        metrics.leaks.inc(outbound.num_leaked)
        if outbound.num_reasoning_tokens is not None:
            record.reasoning_tokens = (record.reasoning_tokens or 0) + outbound.num_reasoning_tokens

    def _deliver(self, events: Sequence[Event], now_s: float) -> None:
        writer, index = self._answer.writer, self._index
        for event in events:
            if isinstance(event, Finish):
                self._end(event, now_s)
                return
            if not self._has_text:
                self._first_text()
            if type(event) is TextDelta and event.channel is CONTENT and not event.logprobs:
                writer.text(index, event.text)  # the token path
            else:
                writer.delta(index, event)

    def _count(self) -> None:
        """Bring the record up to date: the token path does not."""
        self._answer.record.output_tokens += self.num_tokens - self._num_counted
        self._num_counted = self.num_tokens

    def _look(self, outbound: Outbound) -> None:
        """What rules have found, and an answer that is not what was asked for."""
        self._take_hits()
        if outbound.failure is not None:
            if outbound.ended_here and self.handle is not None:
                self.handle.abort()
            self._answer.fail(outbound.failure)

    def _take_hits(self) -> None:
        hits = self._outbound.take_hits()
        if hits:
            self._answer.on_hits(self._index, hits)

    def _first_text(self) -> None:
        """From here on only a writer that keeps all text until the end makes a second submission possible."""
        self._has_text = True
        writer = self._answer.writer
        if not writer.take_back(self._index):  # there is nothing yet: only a question
            self.let_go()
        self._write = writer.text_writer(self._index)

    def _end(self, finish: Finish, now_s: float) -> None:
        self.let_go()
        if self._outbound.ended_here and self.handle is not None:
            self.handle.abort()
        self._take_hits()
        self._answer.writer.finished(self._index, finish)
        self._answer.on_choice_end(finish.reason, now_s)

    def _restart(self, error: HeadraceError) -> None:
        answer = self._answer
        self._is_second = True
        self._has_text = False
        self._write = None
        assert self._call is not None, "the call was let go of"
        self._outbound = self._make(self._call)
        self._held_since_s = self.last_s = None
        answer.record.output_tokens -= self._num_counted
        self.num_tokens = self._num_counted = 0
        try:
            self.submit(answer.engine)
        except HeadraceError:
            answer.fail(error)  # nobody else takes it: what happened first is the reason
        else:
            answer.on_resubmit(self)

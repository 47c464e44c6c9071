"""One choice of an answer, whatever its engine gives: its submissions, its writer, its limits and its end.

Not here: what comes from the engine, and so the token path: ids are `token_choice.py`, text is
`text_choice.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import inf
from typing import Generic, Protocol, TypeVar

from filters.hit import Hit
from gateway.metrics import Metrics
from gateway.record import RequestRecord
from gateway.writers import Writer, WriteText
from pipeline.any_outbound import AnyOutbound
from pipeline.errors import HeadraceError, QueueFull, WorkerLost, WorkerStalled
from pipeline.events import CONTENT, Event, Finish, TextDelta
from pipeline.ports import Engine, Handle
from pipeline.values import EngineCall, FinishReason, FirstToken, TextUsage

Call = TypeVar("Call")  # what the engine is given for it
Out = TypeVar("Out", bound=AnyOutbound)


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

    def on_resubmit(self, worker: str) -> None: ...

    def on_hits(self, index: int, hits: Sequence[tuple[str, Hit]]) -> None: ...

    def fail(self, error: HeadraceError) -> None: ...


class Choice(ABC, Generic[Call, Out]):
    """One choice of an answer. `make`: opens its way out, again for a second submission."""

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

    def __init__(self, answer: Owner, index: int, call: Call, make: Callable[[Call], Out]) -> None:
        self._answer = answer
        self._index = index
        # For a second submission, and no longer: it keeps the prompt's buffer from going to another request.
        self._call: Call | None = call
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

    @abstractmethod
    def _submitted(self, engine: Engine, call: Call) -> Handle:
        """The engine has it, with this choice as its sink."""

    def let_go(self) -> None:
        """It will not be submitted again."""
        self._call = None

    def failed(self, error: HeadraceError) -> None:
        """As in `pipeline.ports.Sink` and `TextSink`.

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
        self._look()

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

    def _came(self, now_s: float, call: EngineCall | None = None, first: FirstToken | None = None) -> None:
        """The engine has sent something. `call` and `first`: as in `Owner.on_first`."""
        if self.last_s is not None:
            self._observe_gap(now_s - self.last_s)
        if first is not None or self.last_s is None:  # some servers tell it with the last token
            self._answer.on_first(self._index, call, first, now_s)
        self.last_s = now_s

    def _took(self, events: Sequence[Event], now_s: float) -> None:
        """What the way out has made of it."""
        outbound = self._outbound
        if outbound.is_new_hold or outbound.waits_for_parser:
            self._held_since_s = now_s
        if events:
            self._deliver(events, now_s)
        if outbound.has_hits or outbound.failure is not None:
            self._look()

    def _deliver(self, events: Sequence[Event], now_s: float) -> None:
        writer, index = self._answer.writer, self._index
        for event in events:
            if isinstance(event, Finish):
                self._end(event, now_s)
                return
            if not self._has_text:
                self._first_text()
            if type(event) is TextDelta and event.channel is CONTENT and not event.logprobs:
                writer.text(index, event.text)
            else:
                writer.delta(index, event)

    def _count(self) -> None:
        """Bring the record up to date: the token path does not."""
        self._answer.record.output_tokens += self.num_tokens - self._num_counted
        self._num_counted = self.num_tokens

    def _look(self) -> None:
        """What rules have found, and an answer that is not what was asked for."""
        outbound = self._outbound
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
            answer.on_resubmit(self.worker)

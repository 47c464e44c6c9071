"""One choice of an answer whose server gives text: the other kind of sink, with the same way out.

Not here: what both kinds do (`choice.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gateway.choice import Choice, Owner
from pipeline.events import Fragment
from pipeline.ports import Engine, Handle
from pipeline.text_outbound import TextOutbound
from pipeline.values import TextCall, TextUsage

MakeTextOutbound = Callable[[], TextOutbound]


class TextChoice(Choice):
    """One choice of an answer: the server's sink."""

    __slots__ = ()

    def __init__(self, answer: Owner, index: int, call: TextCall, make: MakeTextOutbound) -> None:
        super().__init__(answer, index, call, lambda call: make())

    def text(self, fragments: Sequence[Fragment], num_tokens: int, now_s: float) -> None:
        """`pipeline.ports.TextSink.text`: the token path of text."""
        outbound = self._outbound
        self._came(now_s)
        self.num_tokens += num_tokens
        self._count()
        events = outbound.feed(fragments, num_tokens)
        if outbound.is_new_hold:
            self._held_since_s = now_s
        if events:
            self._deliver(events, now_s)
        if outbound.has_hits or outbound.failure is not None:
            self._look(outbound)

    def ended(self, finish: str, stop: int | str | None, usage: TextUsage, now_s: float) -> None:
        """`pipeline.ports.TextSink.ended`."""
        answer, outbound = self._answer, self._outbound
        self._came(now_s)
        if usage.completion_tokens is not None:
            self.num_tokens = usage.completion_tokens
        self._count()
        answer.on_usage(self._index, usage)
        if usage.reasoning_tokens is not None:
            outbound.num_reasoning_tokens = usage.reasoning_tokens
        self._deliver(outbound.end(finish, stop), now_s)
        if outbound.has_hits or outbound.failure is not None:
            self._look(outbound)

    def _came(self, now_s: float) -> None:
        if self.last_s is None:
            self._answer.on_first(self._index, None, None, now_s)
        else:
            self._answer.observe_gap(now_s - self.last_s)
        self.last_s = now_s

    def _submitted(self, engine: Engine, call: Any) -> Handle:
        return engine.submit_text(call, self)

"""One choice of an answer whose server gives text: the other kind of sink, with the same way out.

Not here: what it shares with choices of ids (`choice.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.choice import Choice, Owner
from pipeline.events import Fragment
from pipeline.ports import Engine, Handle
from pipeline.text_outbound import TextOutbound
from pipeline.values import TextCall, TextUsage


class TextChoice(Choice[TextCall, TextOutbound]):
    """`pipeline.ports.TextSink`."""

    __slots__ = ()

    def __init__(self, answer: Owner, index: int, call: TextCall, make: Callable[[], TextOutbound]) -> None:
        super().__init__(answer, index, call, lambda call: make())

    def text(self, fragments: Sequence[Fragment], num_tokens: int, now_s: float) -> None:
        """As in `pipeline.ports.TextSink`: the token path of text."""
        outbound, write = self._outbound, self._write
        self._came(now_s)
        self.num_tokens += num_tokens
        text = None if write is None else outbound.feed_text(fragments)
        if write is None or text is None:
            self._count()
            self._took(outbound.feed(fragments, num_tokens), now_s)
            return
        if text:
            write(text)
        if outbound.is_new_hold:
            self._held_since_s = now_s
        if outbound.needs_look:
            self._deliver(outbound.look(), now_s)
            self._look()

    def ended(self, finish: str, stop: int | str | None, usage: TextUsage, now_s: float) -> None:
        """As in `pipeline.ports.TextSink`."""
        outbound = self._outbound
        self._came(now_s)
        if usage.completion_tokens is not None:
            self.num_tokens = usage.completion_tokens
        self._count()
        self._answer.on_usage(self._index, usage)
        if usage.reasoning_tokens is not None:
            outbound.num_reasoning_tokens = usage.reasoning_tokens
        self._took(outbound.end(finish, stop), now_s)

    def _submitted(self, engine: Engine, call: TextCall) -> Handle:
        return engine.submit_text(call, self)

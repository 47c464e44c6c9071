"""One choice of an answer whose engine gives ids: the token path, from the engine to the writer.

The engine calls `TokenChoice.tokens` from the event loop for each step, and the text leaves in that same
call.

Not here: what it shares with choices of text (`choice.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.choice import Choice
from pipeline.errors import EngineFailed
from pipeline.outbound import FINISH, Outbound
from pipeline.ports import Engine, Handle
from pipeline.values import EngineCall, FirstToken, TokenLogprobs


class TokenChoice(Choice[EngineCall, Outbound]):
    """`pipeline.ports.Sink`."""

    __slots__ = ()

    def tokens(
        self,
        ids: list[int],
        finish: str | None,
        stop: int | str | None,
        first: FirstToken | None,
        logprobs: Sequence[TokenLogprobs] | None,
        now_s: float,
    ) -> None:
        """As in `pipeline.ports.Sink`: the token path, then whatever is not content amid a text."""
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
                self._look()
            return
        if finish is not None and finish not in FINISH:
            self.failed(EngineFailed(f"The engine ended the request with the reason {finish!r}."))
            return
        self._came(now_s, self._call, first)
        self.num_tokens += len(ids)
        self._count()
        self._took(outbound.feed(ids, finish, stop, logprobs), now_s)

    def _submitted(self, engine: Engine, call: EngineCall) -> Handle:
        return engine.submit(call, self)

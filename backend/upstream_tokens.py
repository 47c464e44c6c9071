"""The stream of one choice of token ids, as both of vLLM's APIs write it: what they have in common.

An event has at most one choice here, with the new ids. The one with the finish reason is held back until the
event after it, which counts the prompt's cached tokens if the server tells them
(--enable-prompt-tokens-details), or `[DONE]`: they come in one write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from backend.upstream_errors import server_error, words_of
from backend.upstream_faults import UpstreamFault
from pipeline.errors import WorkerLost
from pipeline.ports import Sink
from pipeline.values import FirstToken, TokenLogprobs

DONE: Final = b"[DONE]"


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class StreamUsage(msgspec.Struct):
    prompt_tokens_details: PromptDetails | None = None


L = TypeVar("L")


class StreamChoice(msgspec.Struct, Generic[L]):
    """`logprobs` in the API's own shape."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: L | None = None


class StreamEvent(msgspec.Struct, Generic[L]):
    choices: list[StreamChoice[L]] = []
    usage: StreamUsage | None = None
    error: Any = None


class TokenReader(ABC, Generic[L]):
    """`upstream_ports.AnswerReader`. `num_top`: how many of the most likely tokens the call asked for."""

    __slots__ = ("_has_begun", "_last", "_num_top", "_sink")

    def __init__(self, sink: Sink, num_top: int | None) -> None:
        self._sink = sink
        self._num_top = num_top
        self._has_begun = False
        self._last: StreamChoice[L] | None = None

    @abstractmethod
    def _decode(self, payload: bytes) -> StreamEvent[L]:
        """Raises `ValueError`."""

    @abstractmethod
    def _positions(self, logprobs: L, num_top: int) -> Sequence[TokenLogprobs]:
        """One for each id. Raises `ValueError`."""

    def event(self, payload: bytes, now_s: float) -> bool:
        if payload == DONE:
            return self._done(now_s)
        event = self._decode(payload)
        if event.choices:
            choice = event.choices[0]
            if choice.token_ids and choice.finish_reason is None:  # the token path
                self._has_begun = True
                self._sink.tokens(choice.token_ids, None, None, None, self._logprobs(choice), now_s)
                return False
            return self._look(choice)
        if event.error is not None:
            words, code = words_of(event.error)
            self._sink.failed(server_error(code, words, self._has_begun))
            return True
        if event.usage is not None and self._last is not None:
            details = event.usage.prompt_tokens_details
            cached = details.cached_tokens if details is not None else None
            return self._end(self._last, None if cached is None else FirstToken(cached), now_s)
        return False

    def closed(self, now_s: float) -> bool:
        return self._last is not None and self._end(self._last, None, now_s)

    def _look(self, choice: StreamChoice[L]) -> bool:
        """A finish, or an event without ids."""
        if choice.token_ids is None:
            self._sink.failed(
                UpstreamFault(
                    "the upstream server gives no token ids back: it is no vLLM, or one older than 0.10.2"
                )
            )
            return True
        if choice.finish_reason is not None:
            self._last = choice
        return False

    def _done(self, now_s: float) -> bool:
        if self._last is not None:
            return self._end(self._last, None, now_s)
        self._sink.failed(WorkerLost("the upstream server ended its stream without a finish"))
        return True

    def _end(self, last: StreamChoice[L], first: FirstToken | None, now_s: float) -> bool:
        ids = last.token_ids or []
        self._sink.tokens(ids, last.finish_reason, last.stop_reason, first, self._logprobs(last), now_s)
        return True

    def _logprobs(self, choice: StreamChoice[L]) -> Sequence[TokenLogprobs] | None:
        if self._num_top is None or choice.logprobs is None:
            return None
        positions = self._positions(choice.logprobs, self._num_top)
        if len(positions) != len(choice.token_ids or ()):
            raise ValueError(f"{len(positions)} logprobs for {len(choice.token_ids or ())} tokens")
        return positions

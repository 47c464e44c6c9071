"""The stream of one choice of token ids, as both of vLLM's APIs write it: what they have in common.

An event has at most one choice here, with the new ids. The one with the finish reason is held back until the
event after it, which counts the prompt's cached tokens if the server tells them
(--enable-prompt-tokens-details), or `[DONE]`: they come in one write.

Ids that no vocabulary can have, and logprobs of other ids, are no answer of this API. More ids than were
asked for are cut off, and then the choice has ended by its length, whatever the server says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec

from backend.lenient import checked_reason, count, holds_nothing, is_first
from backend.upstream_errors import words_of
from backend.upstream_faults import UpstreamFault, server_error
from backend.upstream_ports import MAX_ANSWER_BYTES
from pipeline.errors import WorkerLost
from pipeline.ports import Sink
from pipeline.values import EngineCall, FirstToken, TokenLogprobs

DONE: Final = b"[DONE]"
MAX_TOKEN_ID: Final = (1 << 31) - 1  # of a vocabulary; the link and the prompts have ids as int32
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]

L = TypeVar("L")


class StreamChoice(msgspec.Struct, Generic[L]):
    """`logprobs` in the API's own shape."""

    index: Any = 0
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    logprobs: L | None = None


class StreamEvent(msgspec.Struct, Generic[L]):
    choices: list[StreamChoice[L]] | None = None
    usage: Any = None
    error: Any = None


class TokenReader(ABC, Generic[L]):
    """`upstream_ports.AnswerReader`. `decode` raises `ValueError` or `RecursionError`."""

    max_bytes = MAX_ANSWER_BYTES
    __slots__ = ("_decode", "_has_begun", "_last", "_num_left", "_num_top", "_sink", "has_finish")

    def __init__(self, call: EngineCall, sink: Sink, decode: Callable[[bytes], StreamEvent[L]]) -> None:
        self._decode = decode
        self._sink = sink
        self._num_top: int | None = call.sampling.get("logprobs")  # the most likely tokens it asked for
        self._num_left = call.max_tokens
        self._has_begun = False
        self._last: StreamChoice[L] | None = None  # with the finish
        self.has_finish = False

    @abstractmethod
    def _positions(self, logprobs: L, num_top: int) -> Sequence[TokenLogprobs]:
        """One for each id. Raises `ValueError`."""

    def refused(self, status: int, body: bytes) -> bool:
        """`AnswerReader`: there is no other way to ask."""
        return False

    def event(self, payload: bytes, now_s: float) -> bool:
        if payload == DONE:
            return self._done(now_s)
        try:
            event = self._decode(payload)
        except (ValueError, RecursionError) as error:
            return self._unreadable(payload, error, now_s)
        if event.choices and event.error is None and not self.has_finish:
            choice = event.choices[0]
            ids = choice.token_ids
            if ids and choice.finish_reason is None and not choice.index:
                num_left = self._num_left - len(ids)
                if num_left >= 0:  # the token path
                    self._num_left, self._has_begun = num_left, True
                    logprobs = None if choice.logprobs is None else self._logprobs(choice)
                    self._sink.tokens(ids, None, None, None, logprobs, now_s)
                    return False
        return self._look(event, now_s)

    def closed(self, now_s: float) -> bool:
        return self._last is not None and self._end(self._last, None, now_s)

    def _unreadable(self, payload: bytes, error: Exception, now_s: float) -> bool:
        if payload.strip() == DONE:
            return self._done(now_s)
        if self.has_finish or holds_nothing(payload):
            return False
        raise ValueError("an event that cannot be read") from error

    def _look(self, event: StreamEvent[L], now_s: float) -> bool:
        """Whatever is not ids in the middle of a choice."""
        last = self._last
        if event.error is not None and last is None:
            words, code = words_of(event.error)
            self._sink.failed(server_error(code, words, self._has_begun))
            return True
        if last is not None:  # all ids have come
            is_counted = event.usage is not None or event.error is not None
            return is_counted and self._end(last, _first(event.usage), now_s)
        choice = next((choice for choice in event.choices or () if is_first(choice.index)), None)
        if choice is None:
            return False
        if choice.token_ids is None:
            self._sink.failed(
                UpstreamFault(
                    "the upstream server gives no token ids back: it is no vLLM, or one older than 0.10.2"
                )
            )
            return True
        if len(choice.token_ids) > self._num_left:
            return self._end(choice, None, now_s)
        if choice.finish_reason is not None:
            checked_reason(choice.finish_reason)
            self._last, self.has_finish = choice, True
            return event.usage is not None and self._end(choice, _first(event.usage), now_s)
        return False

    def _done(self, now_s: float) -> bool:
        if self._last is not None:
            return self._end(self._last, None, now_s)
        self._sink.failed(WorkerLost("the upstream server ended its stream without a finish"))
        return True

    def _end(self, last: StreamChoice[L], first: FirstToken | None, now_s: float) -> bool:
        """The last ids. Those that were not asked for are left out."""
        ids, logprobs = last.token_ids or [], self._logprobs(last)
        finish, stop = last.finish_reason, last.stop_reason
        if len(ids) > self._num_left:
            finish, stop = "length", None
            ids = ids[: self._num_left]
            logprobs = None if logprobs is None else logprobs[: self._num_left]
        stop = stop if type(stop) is int and 0 <= stop <= MAX_TOKEN_ID else None
        self._sink.tokens(ids, finish, stop, first, logprobs, now_s)
        return True

    def _logprobs(self, choice: StreamChoice[L]) -> Sequence[TokenLogprobs] | None:
        if self._num_top is None or choice.logprobs is None:
            return None
        ids, positions = choice.token_ids or [], self._positions(choice.logprobs, self._num_top)
        check_positions(positions, ids)
        return positions


def check_positions(positions: Sequence[TokenLogprobs], ids: Sequence[int]) -> None:
    """Raises `ValueError` for logprobs that are not those of these ids."""
    if len(positions) != len(ids):
        raise ValueError(f"{len(positions)} logprobs for {len(ids)} tokens")
    for position, token_id in zip(positions, ids, strict=True):
        if position.token_ids[0] != token_id:
            raise ValueError(f"logprobs of token {position.token_ids[0]} came with token {token_id}")


def _first(usage: Any) -> FirstToken | None:
    """The prompt's cached tokens, where a usage tells them."""
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = count(details.get("cached_tokens")) if isinstance(details, dict) else None
    return None if cached is None else FirstToken(cached)

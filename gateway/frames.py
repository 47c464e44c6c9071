"""The bytes of an answer in OpenAI's shapes: stream chunks and whole objects, for chat and for raw
completions.

Only the text differs from token to token, so a stream's chunk is cut once into what comes before and after
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from pipeline.events import PositionLogprobs
from pipeline.values import Dropped, FinishReason, Usage

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"
# A token that cannot be sampled has -inf, which JSON lacks; vLLM and OpenAI write this number.
MIN_LOGPROB: Final = -9999.0
Json = Any

_encode: Final = msgspec.json.Encoder().encode
_TEXT_MARK: Final = "\x00text\x00"

# Legal inside a JSON string, but `str.splitlines` and httpx's `iter_lines` take them for line ends.
_LINE_ENDS: Final = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def json_string(text: str) -> bytes:
    """A JSON string that no client cuts at."""
    encoded = _encode(text)
    if not text.isascii():
        for line_end, escaped in _LINE_ENDS:
            if line_end in encoded:
                encoded = encoded.replace(line_end, escaped)
    return encoded


def json_bytes(value: Json) -> bytes:
    """Like `json_string`, for any value."""
    encoded = _encode(value)
    for line_end, escaped in _LINE_ENDS:
        if line_end in encoded:
            encoded = encoded.replace(line_end, escaped)
    return encoded


def data_frame(value: Json) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


class TokenTexts(Protocol):
    """What the logprobs' shape needs of a vocabulary."""

    def token_text(self, token_id: int, /) -> str: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


class Shape(Protocol):
    """How one kind of answer is written. Shared by all choices of a request."""

    kind: str

    def opening(self, index: int) -> Json | None:
        """The choice that opens a stream, if this kind has one."""

    def delta(self, index: int, text: str, logprobs: Json) -> Json:
        """A stream choice with text."""

    def ending(self, index: int, finish: FinishReason, stop_reason: int | str | None) -> Json:
        """The stream choice that ends it."""

    def whole(
        self, index: int, text: str, logprobs: Json, finish: FinishReason, stop: int | str | None
    ) -> Json:
        """The choice of an answer that is not streamed."""

    def logprobs(self, entries: Sequence[PositionLogprobs], texts: TokenTexts) -> Json: ...

    def chunk(self, choices: Sequence[Json]) -> dict[str, Json]: ...

    def document(self, choices: Sequence[Json], usage: Json) -> dict[str, Json]: ...


class ChatShape:
    """`chat.completion.chunk` and `chat.completion`."""

    kind = "chat"

    def __init__(self, request_id: str, created: int, model: str) -> None:
        self._head = {"id": f"chatcmpl-{request_id}", "created": created, "model": model}

    def opening(self, index: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, text: str, logprobs: Json) -> Json:
        return {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}

    def ending(self, index: int, finish: FinishReason, stop_reason: int | str | None) -> Json:
        choice = {
            "index": index,
            "delta": {},
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": stop_reason,
        }
        return _with_filter_result(choice, finish)

    def whole(
        self, index: int, text: str, logprobs: Json, finish: FinishReason, stop: int | str | None
    ) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish,
            "stop_reason": stop,
        }
        return _with_filter_result(choice, finish)

    def logprobs(self, entries: Sequence[PositionLogprobs], texts: TokenTexts) -> Json:
        return {"content": [_chat_logprobs(entry, texts) for entry in entries], "refusal": None}

    def chunk(self, choices: Sequence[Json]) -> dict[str, Json]:
        return self._object("chat.completion.chunk", choices)

    def document(self, choices: Sequence[Json], usage: Json) -> dict[str, Json]:
        return self._object("chat.completion", choices) | {"usage": usage}

    def _object(self, kind: str, choices: Sequence[Json]) -> dict[str, Json]:
        head = self._head
        return {
            "id": head["id"],
            "object": kind,
            "created": head["created"],
            "model": head["model"],
            "choices": choices,
        }


class CompletionShape:
    """`text_completion`, streamed or whole."""

    kind = "completion"

    def __init__(self, request_id: str, created: int, model: str) -> None:
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": created,
            "model": model,
        }

    def opening(self, index: int) -> Json | None:
        return None

    def delta(self, index: int, text: str, logprobs: Json) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def ending(self, index: int, finish: FinishReason, stop_reason: int | str | None) -> Json:
        return self.whole(index, "", None, finish, stop_reason)

    def whole(
        self, index: int, text: str, logprobs: Json, finish: FinishReason, stop: int | str | None
    ) -> Json:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish,
            "stop_reason": stop,
        }
        return _with_filter_result(choice, finish)

    def logprobs(self, entries: Sequence[PositionLogprobs], texts: TokenTexts) -> Json:
        return {
            "text_offset": [entry.start for entry in entries],
            "token_logprobs": [_finite(entry.logprobs.logprobs[0]) for entry in entries],
            "tokens": [texts.token_text(entry.token_id) for entry in entries],
            "top_logprobs": [_top_by_text(entry, texts) for entry in entries],
        }

    def chunk(self, choices: Sequence[Json]) -> dict[str, Json]:
        return self._head | {"choices": choices}

    def document(self, choices: Sequence[Json], usage: Json) -> dict[str, Json]:
        return self._head | {"choices": choices, "usage": usage}


class TextFrames:
    """The SSE frame of one choice's text: three joins a token."""

    __slots__ = ("_after", "_before")

    def __init__(self, shape: Shape, index: int) -> None:
        frame = data_frame(shape.chunk([shape.delta(index, _TEXT_MARK, None)]))
        self._before, self._after = frame.split(_encode(_TEXT_MARK))

    def frame(self, text: str) -> bytes:
        return self._before + json_string(text) + self._after


def usage_object(usage: Usage) -> dict[str, Json]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens} | _dropped(usage.dropped),
    }


def _dropped(dropped: Dropped | None) -> dict[str, Json]:
    """What a context policy left out of the prompt; nothing if that is nothing."""
    if dropped is None:
        return {}
    counts = {"dropped_messages": dropped.num_messages, "dropped_tokens": dropped.num_tokens}
    return counts | ({"dropped_characters": dropped.num_characters} if dropped.num_characters else {})


def _with_filter_result(choice: dict[str, Json], finish: FinishReason) -> dict[str, Json]:
    if finish == "content_filter":
        choice["content_filter_results"] = {"blocked": True}
    return choice


def _chat_logprobs(entry: PositionLogprobs, texts: TokenTexts) -> Json:
    ids, values = entry.logprobs.token_ids, entry.logprobs.logprobs
    alternatives = zip(ids[1:], values[1:], strict=True)
    return _token_logprob(entry.token_id, values[0], texts) | {
        "top_logprobs": [_token_logprob(token_id, value, texts) for token_id, value in alternatives]
    }


def _token_logprob(token_id: int, value: float, texts: TokenTexts) -> dict[str, Json]:
    text, data = texts.token_text(token_id), texts.token_bytes(token_id)
    return {"token": text, "logprob": _finite(value), "bytes": list(data)}


def _top_by_text(entry: PositionLogprobs, texts: TokenTexts) -> Mapping[str, float]:
    """OpenAI's legacy shape; two alternatives of one text keep the more likely."""
    ids, values = entry.logprobs.token_ids, entry.logprobs.logprobs
    top: dict[str, float] = {}
    for token_id, value in zip(ids, values, strict=True):
        top.setdefault(texts.token_text(token_id), _finite(value))
    return top


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB  # in this order NaN does not pass

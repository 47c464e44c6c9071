"""The logprobs objects of an answer, in OpenAI's shapes for chats and for raw completions.

Which tokens may be shown, and when, is decided before (`pipeline/logprob_queue.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from pipeline.events import PositionLogprobs

# A token that cannot be sampled has -inf, which JSON lacks; vLLM and OpenAI write this number.
MIN_LOGPROB: Final = -9999.0
Json = Any


class TokenTexts(Protocol):
    """What the logprobs' shape needs of a vocabulary."""

    def token_text(self, token_id: int, /) -> str: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


def chat_logprobs(entries: Sequence[PositionLogprobs], texts: TokenTexts) -> Json:
    """An object per token, with the most likely ones in its place."""
    return {"content": [_position(entry, texts) for entry in entries], "refusal": None}


def completion_logprobs(entries: Sequence[PositionLogprobs], texts: TokenTexts) -> Json:
    """OpenAI's legacy shape: four lists."""
    return {
        "text_offset": [entry.start for entry in entries],
        "token_logprobs": [_finite(entry.logprobs.logprobs[0]) for entry in entries],
        "tokens": [texts.token_text(entry.token_id) for entry in entries],
        "top_logprobs": [_top_by_text(entry, texts) for entry in entries],
    }


def _position(entry: PositionLogprobs, texts: TokenTexts) -> Json:
    ids, values = entry.logprobs.token_ids, entry.logprobs.logprobs
    alternatives = zip(ids[1:], values[1:], strict=True)
    return _token_logprob(entry.token_id, values[0], texts) | {
        "top_logprobs": [_token_logprob(token_id, value, texts) for token_id, value in alternatives]
    }


def _token_logprob(token_id: int, value: float, texts: TokenTexts) -> dict[str, Json]:
    text, data = texts.token_text(token_id), texts.token_bytes(token_id)
    return {"token": text, "logprob": _finite(value), "bytes": list(data)}


def _top_by_text(entry: PositionLogprobs, texts: TokenTexts) -> Mapping[str, float]:
    """Two alternatives of one text keep the more likely."""
    ids, values = entry.logprobs.token_ids, entry.logprobs.logprobs
    top: dict[str, float] = {}
    for token_id, value in zip(ids, values, strict=True):
        top.setdefault(texts.token_text(token_id), _finite(value))
    return top


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB  # in this order NaN does not pass

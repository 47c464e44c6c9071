"""vLLM's `/v1/completions` as a `TokenWire`: `prompt` is a list of ids, `return_token_ids` gives them back.

Any vLLM from 0.10.2 on has it. Stop strings are never sent: the gateway finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from backend.http_ports import HttpRequest
from backend.upstream_ports import STREAM_HEADERS
from backend.upstream_tokens import MAX_TOKEN_ID, StreamEvent, TokenReader
from pipeline.ports import Sink
from pipeline.values import EngineCall, TokenLogprobs

COMPLETIONS: Final = "/v1/completions"
_ID: Final = "token_id:"  # how a token is named with `return_tokens_as_token_ids`
# Where SamplingParams and the API have other names for the same.
_RENAMED: Final = {"extra_args": "vllm_xargs"}


class CompletionsWire:
    """`upstream_ports.TokenWire`."""

    def request(self, call: EngineCall, request_id: str) -> HttpRequest:
        body: dict[str, Any] = {
            "model": call.model,
            "prompt": call.prompt.tokens.tolist(),
            "max_tokens": call.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        for name, value in call.sampling.items():
            if value is not None:
                body[_RENAMED.get(name, name)] = value
        if "logprobs" in body:
            body["return_tokens_as_token_ids"] = True
        add_scheduling(body, call)
        headers = (*STREAM_HEADERS, (b"x-request-id", request_id.encode()))
        return HttpRequest("POST", COMPLETIONS, headers, msgspec.json.encode(body))

    def reader(self, call: EngineCall, sink: Sink) -> CompletionsReader:
        return CompletionsReader(call, sink, _decode)

    def abort(self, request_id: str) -> None:
        """vLLM aborts when the connection closes."""


def add_scheduling(body: dict[str, Any], call: EngineCall) -> None:
    """Only where they say something: a server without priorities, or of another version, may refuse them."""
    if call.priority:
        body["priority"] = call.priority
    if call.cache_salt is not None:
        body["cache_salt"] = call.cache_salt


class _Logprobs(msgspec.Struct):
    """OpenAI's legacy shape; a place is None where the engine has no figures for it."""

    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


_decode: Final = msgspec.json.Decoder(StreamEvent[_Logprobs]).decode


class CompletionsReader(TokenReader[_Logprobs]):
    """`upstream_ports.AnswerReader`."""

    __slots__ = ()

    def _positions(self, logprobs: _Logprobs, num_top: int) -> Sequence[TokenLogprobs]:
        return [
            _position(token, value, top, num_top)
            for token, value, top in zip(
                logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
            )
        ]


def _position(token: str, value: float | None, top: dict[str, float] | None, num_top: int) -> TokenLogprobs:
    """`top` has the k most likely, and the sampled one if it is none of them: then its rank is unknown."""
    best = sorted((top or {}).items(), key=lambda item: -item[1])
    names = [name for name, _ in best[:num_top]]
    return TokenLogprobs(
        [_id(token), *map(_id, names)],
        [-9999.0 if value is None else value, *(each for _, each in best[:num_top])],
        names.index(token) + 1 if token in names else 0,
    )


def _id(token: str) -> int:
    if not token.startswith(_ID):
        raise ValueError("a token of its logprobs is not named by its id")
    token_id = int(token[len(_ID) :])
    if not 0 <= token_id <= MAX_TOKEN_ID:
        raise ValueError(f"a token of its logprobs has the id {token_id}; the limit is {MAX_TOKEN_ID}")
    return token_id

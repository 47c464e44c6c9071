"""vLLM's `/inference/v1/generate` as a `TokenWire`: ids in, ids out, nothing is decoded to text.

It takes `SamplingParams` as they are and adds no defaults of the model: only calls that hold them come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from backend.http_ports import HttpRequest
from backend.upstream_completions import add_scheduling
from backend.upstream_ports import STREAM_HEADERS
from backend.upstream_tokens import StreamEvent, TokenId, TokenReader
from pipeline.ports import Sink
from pipeline.values import EngineCall, TokenLogprobs

GENERATE: Final = "/inference/v1/generate"
MAX_LOGPROBS: Final = 20  # vLLM's default --max-logprobs


class GenerateWire:
    """`upstream_ports.TokenWire`."""

    def request(self, call: EngineCall, request_id: str) -> HttpRequest:
        params = {name: value for name, value in call.sampling.items() if value is not None}
        params |= {"max_tokens": call.max_tokens, "detokenize": False}
        num_top = params.get("logprobs")
        if num_top and num_top < MAX_LOGPROBS:
            # The list is cut to as many as were asked for, the sampled one among them: so one more is needed
            # where that is none of the most likely.
            params["logprobs"] = num_top + 1
        body: dict[str, Any] = {
            "model": call.model,
            "token_ids": call.prompt.tokens.tolist(),
            "sampling_params": params,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        add_scheduling(body, call)
        if call.reasoning_ended is not None:  # when a grammar begins to bind
            body["reasoning_ended"] = call.reasoning_ended
        if call.reasoning_parser_kwargs is not None:
            body["reasoning_parser_kwargs"] = call.reasoning_parser_kwargs
        headers = (*STREAM_HEADERS, (b"x-request-id", request_id.encode()))
        return HttpRequest("POST", GENERATE, headers, msgspec.json.encode(body))

    def reader(self, call: EngineCall, sink: Sink) -> GenerateReader:
        return GenerateReader(call, sink, _decode)

    def abort(self, request_id: str) -> None:
        """vLLM aborts when the connection closes."""


class _Candidate(msgspec.Struct):
    token_id: TokenId
    logprob: float
    rank: int | None = None


class _Position(_Candidate):
    top_logprobs: list[_Candidate] = []


class _Logprobs(msgspec.Struct):
    content: list[_Position] | None = None


_decode: Final = msgspec.json.Decoder(StreamEvent[_Logprobs]).decode


class GenerateReader(TokenReader[_Logprobs]):
    """`upstream_ports.AnswerReader`."""

    __slots__ = ()

    def _positions(self, logprobs: _Logprobs, num_top: int) -> Sequence[TokenLogprobs]:
        return [_position(each, num_top) for each in logprobs.content or ()]


def _position(position: _Position, num_top: int) -> TokenLogprobs:
    best = sorted(position.top_logprobs, key=lambda each: each.rank or 1 << 31)[:num_top]
    return TokenLogprobs(
        [position.token_id, *(each.token_id for each in best)],
        [position.logprob, *(each.logprob for each in best)],
        position.rank or 0,
    )

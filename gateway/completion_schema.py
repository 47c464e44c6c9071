"""The body of `POST /v1/completions` -> `CompletionRequest`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import Meta

from gateway.generation import check_num_logprobs, to_delivery, to_generation
from gateway.json_body import decode, show
from gateway.sampling_fields import (
    DEFAULT_LIMITS,
    MAX_LOGPROBS,
    RequestLimits,
    SamplingFields,
    TokenId,
)
from gateway.unsupported_fields import refuse_unsupported
from pipeline.errors import InvalidRequest
from pipeline.values import CompletionRequest

DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's and vLLM's, for this route only


class CompletionBody(SamplingFields, kw_only=True):
    """A raw prompt to continue: no chat template."""

    prompt: Annotated[
        str | list[str | TokenId | list[TokenId]],
        Meta(description="A text, a list of texts, a list of token ids, or a list of such lists."),
    ]
    logprobs: Annotated[
        int | None,
        Meta(
            description="Give the log probabilities of every token and of this many most likely ones.",
            extra_json_schema={"minimum": 0, "maximum": MAX_LOGPROBS},
        ),
    ] = None
    best_of: Annotated[int | None, Meta(description="Must equal n: choosing the best is not supported.")] = (
        None
    )
    add_special_tokens: Annotated[
        bool | None,
        Meta(description="Encode texts with the tokenizer's own special tokens. True is the default."),
    ] = None


_DECODER: Final = msgspec.json.Decoder(CompletionBody)


def parse_completion(body: bytes, limits: RequestLimits = DEFAULT_LIMITS) -> CompletionRequest:
    """The request that the bytes of a completion body ask for. Raises `InvalidRequest`, and nothing else."""
    fields = decode(_DECODER, body, limits.max_containers, drop_lone_surrogates=limits.drop_lone_surrogates)
    refuse_unsupported(fields)
    max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else int(fields.max_tokens)
    logprobs = check_num_logprobs(fields.logprobs, "logprobs")
    generation = to_generation(fields, limits, max_tokens, logprobs)
    _check_best_of(fields.best_of, generation.n)
    prompts = _prompts(fields.prompt)
    num_choices = len(prompts) * generation.n
    if num_choices > limits.max_choices:
        raise InvalidRequest(
            f"Prompts times 'n' must be at most {limits.max_choices}, got {num_choices}.", "prompt"
        )
    return CompletionRequest(
        model=fields.model,
        prompts=prompts,
        generation=generation,
        delivery=to_delivery(fields, limits),
        add_special_tokens=fields.add_special_tokens is not False,
    )


def _check_best_of(best_of: int | None, n: int) -> None:
    if best_of is not None and best_of != n:
        raise InvalidRequest(
            f"'best_of' other than 'n' is not supported by this server: got {show(best_of)} with n = {n}.",
            "best_of",
            "unsupported_field",
        )


def _prompts(prompt: str | list[str | int | list[int]]) -> Sequence[str | Sequence[int]]:
    """The single prompts, whichever of the four forms they came in."""
    if isinstance(prompt, str):
        _check_prompt(prompt, "prompt")
        return (prompt,)
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise InvalidRequest("'prompt' must not mix texts, token ids and lists of token ids.", "prompt")
    if kinds <= {int}:
        ids = cast(list[int], prompt)
        _check_prompt(ids, "prompt")
        return (ids,)
    for index, single in enumerate(prompt):
        _check_prompt(single, f"prompt[{index}]")
    return cast("list[str | Sequence[int]]", prompt)


def _check_prompt(prompt: Any, param: str) -> None:
    if len(prompt) == 0:
        raise InvalidRequest(f"'{param}' must not be empty.", param)

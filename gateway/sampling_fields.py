"""The body fields that both generation routes share, and their ranges.

Names and ranges are vLLM's (`vllm.sampling_params.SamplingParams`, 0.32), which the engine applies. Where
vLLM has no upper limit there is one here: a number that float32 or int32 cannot hold fails inside the engine,
for everyone. `null` means "not given", as in OpenAI's API.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from filters.escaping import ESCAPES
from gateway.structured_outputs import ResponseFormat, StructuredOutputs
from gateway.unsupported_fields import UnsupportedFields

INT32_MAX: Final = 2**31 - 1
INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
MAX_LOGPROBS: Final = 20  # OpenAI's limit for chats, and vLLM's default --max-logprobs


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on one request body that a deployment may want to move."""

    max_n: int = 16
    max_choices: int = 1024  # prompts times n
    max_stop_strings: int = 4  # OpenAI's and vLLM's
    max_stop_chars: int = 256  # what the text filter may hold
    max_tools: int = 1024  # 20 us each, on the event loop
    max_bad_words: int = 128  # vLLM's VLLM_MAX_NUM_BAD_WORDS
    max_token_ids: int = 262_144  # in one list: as many as the largest vocabularies have
    max_depth: int = 64  # of JSON inside one field; vLLM's limit for schemas
    max_containers: int = 1_000_000  # arrays and objects in one body
    drop_lone_surrogates: bool = False  # in the whole body, instead of refusing it
    allow_escape: bool = False  # a request may say how its answer's text is escaped


DEFAULT_LIMITS: Final = RequestLimits()

# An integer may be written as 16.0: vLLM takes it, and some languages have no other numbers.
PositiveInt = (
    Annotated[int, Meta(ge=1, le=INT32_MAX)] | Annotated[float, Meta(ge=1, le=INT32_MAX, multiple_of=1)]
)
Count = Annotated[int, Meta(ge=0, le=INT32_MAX)] | Annotated[float, Meta(ge=0, le=INT32_MAX, multiple_of=1)]
CountOrMinusOne = (
    Annotated[int, Meta(ge=-1, le=INT32_MAX)] | Annotated[float, Meta(ge=-1, le=INT32_MAX, multiple_of=1)]
)
Int64 = Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
NonZeroShare = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
# float32 logits are multiplied and divided by it: beyond these bounds they become infinite.
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
XargNumber = Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)] | float
Xarg = str | XargNumber | list[str | XargNumber]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries besides text. Only with `stream: true`."""

    include_usage: Annotated[bool | None, Meta(description="Send a last chunk with the token counts.")] = None
    continuous_usage_stats: Annotated[
        bool | None, Meta(description="Token counts on every chunk. Takes effect with include_usage only.")
    ] = None
    include_timings: Annotated[
        bool | None,
        Meta(
            description="Every stage in milliseconds, on the usage chunk (which it turns on). An extension."
        ),
    ] = None


class Output(msgspec.Struct, kw_only=True):
    """How the answer's text is written. An extension."""

    escape: Annotated[
        str | None,
        Meta(
            description="Escape the text of the answer for this markup. Only where the server allows it.",
            extra_json_schema={"enum": [*ESCAPES, None]},
        ),
    ] = None


class RepetitionDetection(msgspec.Struct, kw_only=True, omit_defaults=True):
    """End the generation when a pattern of tokens repeats."""

    max_pattern_size: Count = 0
    min_pattern_size: Count = 0
    min_count: Count = 0


class SamplingFields(UnsupportedFields, kw_only=True):
    """Fields of a chat and of a completion body that steer the generation."""

    model: Annotated[str, Meta(min_length=1, description="A name from GET /v1/models.")]
    stream: Annotated[
        bool | None, Meta(description="Send the answer piece by piece as server-sent events.")
    ] = None
    stream_options: StreamOptions | None = None
    output: Output | None = None
    max_tokens: Annotated[PositiveInt | None, Meta(description="The most tokens to generate per choice.")] = (
        None
    )
    n: Annotated[PositiveInt | None, Meta(description="How many choices to generate per prompt.")] = None
    temperature: Annotated[Temperature | None, Meta(description="0 is greedy; higher is more random.")] = None
    top_p: Annotated[
        NonZeroShare | None, Meta(description="Sample from the most likely tokens of this mass.")
    ] = None
    top_k: Annotated[
        CountOrMinusOne | None, Meta(description="Sample from this many most likely tokens; 0 or -1 is all.")
    ] = None
    min_p: Annotated[
        Share | None, Meta(description="Drop tokens less likely than this share of the likeliest one.")
    ] = None
    presence_penalty: Annotated[Penalty | None, Meta(description="Against tokens that have appeared.")] = None
    frequency_penalty: Annotated[
        Penalty | None, Meta(description="Against tokens by how often they appeared.")
    ] = None
    repetition_penalty: Annotated[
        RepetitionPenalty | None, Meta(description="Against tokens of prompt and answer; 1 is none.")
    ] = None
    seed: Annotated[Int64 | None, Meta(description="Makes sampling repeatable; choice i uses seed + i.")] = (
        None
    )
    stop: Annotated[
        str | list[str] | None,
        Meta(description="Strings that end the generation; they are not part of the answer."),
    ] = None
    stop_token_ids: Annotated[list[TokenId] | None, Meta(description="Tokens that end the generation.")] = (
        None
    )
    include_stop_str_in_output: Annotated[bool | None, Meta(description="Keep the stop string.")] = None
    ignore_eos: Annotated[bool | None, Meta(description="Go on after the end-of-sequence token.")] = None
    min_tokens: Annotated[Count | None, Meta(description="No stop before this many tokens.")] = None
    skip_special_tokens: Annotated[
        bool | None, Meta(description="Leave special tokens out of the answer.")
    ] = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: Annotated[
        dict[str, float] | None, Meta(description="Token id to a bias, which is cut to -100..100.")
    ] = None
    allowed_token_ids: Annotated[
        list[TokenId] | None, Meta(description="Only these tokens are generated.")
    ] = None
    bad_words: Annotated[list[str] | None, Meta(description="Words that are never generated.")] = None
    response_format: Annotated[
        ResponseFormat | None,
        Meta(
            description="Constrain the answer: text, json_object, json_schema, structural_tag. JSON is "
            "checked again as it passes, unless the answer calls tools."
        ),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Meta(description="vLLM's constraints: json, regex, choice, grammar and others."),
    ] = None
    thinking_token_budget: Annotated[
        CountOrMinusOne | None, Meta(description="The most tokens of reasoning; -1 is no limit.")
    ] = None
    repetition_detection: RepetitionDetection | None = None
    watermarking: Annotated[bool | None, Meta(description="False leaves the engine's watermark out.")] = None
    vllm_xargs: Annotated[
        dict[str, Xarg] | None, Meta(description="Extra arguments for the engine's own extensions.")
    ] = None
    priority: Annotated[Int64 | None, Meta(description="Lower is earlier. 0 is the default.")] = None
    cache_salt: Annotated[
        str | None, Meta(description="Only requests with the same salt share cached prefixes.")
    ] = None
    user: Annotated[str | None, Meta(description="Accepted, not used.")] = None

"""The body fields that both generation routes share, their ranges, and their way into a `Generation`.

Names and ranges are vLLM's (`vllm.sampling_params.SamplingParams`, 0.32), which the engine applies. Where
vLLM has no upper limit there is one here: a number that float32 or int32 cannot hold fails inside the engine,
for everyone. `null` means "not given", as in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from gateway.json_body import show
from gateway.structured_outputs import ResponseFormat, StructuredOutputs, to_sampling
from gateway.unsupported_fields import UnsupportedFields
from pipeline.errors import InvalidRequest
from pipeline.values import Delivery, Generation

INT32_MAX: Final = 2**31 - 1
INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
MAX_LOGPROBS: Final = 20  # OpenAI's limit for chats, and vLLM's default --max-logprobs
NO_SEED: Final = -1  # vLLM: the same as no seed
GREEDY_BELOW: Final = 1e-5  # vLLM treats smaller temperatures as greedy
MAX_CACHE_SALT_CHARS: Final = 128
CACHE_SALT_FORBIDDEN: Final = frozenset("@/\\\0")  # vLLM: they would escape into cache keys and paths


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on one request body that a deployment may want to move."""

    max_n: int = 16
    max_choices: int = 1024  # prompts times n
    max_stop_strings: int = 4  # OpenAI's and vLLM's
    max_stop_chars: int = 256  # what the text filter may hold
    max_bad_words: int = 128  # vLLM's VLLM_MAX_NUM_BAD_WORDS
    max_token_ids: int = 262_144  # in one list: as many as the largest vocabularies have
    max_depth: int = 64  # of JSON inside one field; vLLM's limit for schemas
    max_containers: int = 1_000_000  # arrays and objects in one body


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
        Meta(description="Constrain the answer: text, json_object, json_schema, structural_tag."),
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


# Fields that go into `Generation.sampling` as they are.
_PLAIN: Final = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "watermarking",
)
_INTEGERS: Final = ("top_k", "min_tokens")


def to_generation(
    body: SamplingFields, limits: RequestLimits, max_tokens: int | None, logprobs: int | None
) -> Generation:
    """What the body asks of the engine. Raises `InvalidRequest`."""
    n = int(body.n or 1)
    _check_combinations(body, n, max_tokens, limits)
    priority = body.priority or 0
    return Generation(
        sampling=_sampling(body, limits),
        max_tokens=max_tokens,
        n=n,
        stop=_stop_strings(body.stop, limits),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=logprobs,
        priority=priority,
        cache_salt=_cache_salt(body.cache_salt),
    )


def to_delivery(body: SamplingFields) -> Delivery:
    """How the answer is to travel. Raises `InvalidRequest` for stream options without a stream."""
    stream, options = bool(body.stream), body.stream_options
    if options is None:
        return Delivery(stream)
    if not stream:
        raise InvalidRequest("'stream_options' is only allowed with 'stream': true.", "stream_options")
    include_usage = bool(options.include_usage or options.include_timings)
    return Delivery(
        stream=True,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.continuous_usage_stats),
        include_timings=bool(options.include_timings),
    )


def check_num_logprobs(value: float | None, param: str) -> int | None:
    """A number of most likely tokens as an int. Raises `InvalidRequest` past what the engine gives."""
    if value is None:
        return None
    if not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequest(f"'{param}' must be from 0 to {MAX_LOGPROBS}, got {show(value)}.", param)
    return int(value)


def _check_combinations(body: SamplingFields, n: int, max_tokens: int | None, limits: RequestLimits) -> None:
    if n > limits.max_n:
        raise InvalidRequest(f"'n' must be at most {limits.max_n}, got {n}.", "n")
    if n > 1 and body.temperature is not None and body.temperature < GREEDY_BELOW:
        raise InvalidRequest(
            f"'n' must be 1 when 'temperature' is 0 (all choices would be equal), got {n}.", "n"
        )
    if body.seed is not None and body.seed + n - 1 > INT64_MAX:
        raise InvalidRequest(
            f"'seed' + 'n' - 1 must be at most {INT64_MAX}, got {body.seed + n - 1}.", "seed"
        )
    if max_tokens is not None and body.min_tokens is not None and body.min_tokens > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' must be at most max_tokens = {max_tokens}, got {body.min_tokens}.", "min_tokens"
        )
    if body.spaces_between_special_tokens is False and body.skip_special_tokens is False:
        raise InvalidRequest(
            "'spaces_between_special_tokens': false is not supported with 'skip_special_tokens': false.",
            "spaces_between_special_tokens",
        )


def _sampling(body: SamplingFields, limits: RequestLimits) -> dict[str, Any]:
    """vLLM's sampling parameters that the body gives, and no others."""
    sampling = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    sampling.update((name, int(value)) for name in _INTEGERS if (value := getattr(body, name)) is not None)
    if body.seed is not None and body.seed != NO_SEED:
        sampling["seed"] = body.seed
    if body.stop_token_ids:
        sampling["stop_token_ids"] = _token_ids(body.stop_token_ids, "stop_token_ids", limits)
    if body.allowed_token_ids is not None:
        sampling["allowed_token_ids"] = _allowed_token_ids(body.allowed_token_ids, limits)
    if body.logit_bias is not None:
        sampling["logit_bias"] = _logit_bias(body.logit_bias, limits)
    if body.bad_words:
        sampling["bad_words"] = _bad_words(body.bad_words, limits)
    if body.thinking_token_budget is not None and body.thinking_token_budget != -1:
        sampling["thinking_token_budget"] = int(body.thinking_token_budget)
    if body.repetition_detection is not None:
        sampling["repetition_detection"] = _repetition_detection(body.repetition_detection)
    if body.vllm_xargs:
        sampling["extra_args"] = body.vllm_xargs
    constraint = to_sampling(body.structured_outputs, body.response_format, limits.max_depth)
    if constraint is not None:
        sampling["structured_outputs"] = constraint
    return sampling


def _stop_strings(stop: str | list[str] | None, limits: RequestLimits) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    _check_length(strings, limits.max_stop_strings, "stop", "strings")
    for index, string in enumerate(strings):
        param = "stop" if isinstance(stop, str) else f"stop[{index}]"
        if not 1 <= len(string) <= limits.max_stop_chars:
            raise InvalidRequest(
                f"'{param}' must have from 1 to {limits.max_stop_chars} characters, got {len(string)}.", param
            )
    return tuple(dict.fromkeys(strings))


def _token_ids(ids: list[int], param: str, limits: RequestLimits) -> list[int]:
    _check_length(ids, limits.max_token_ids, param, "token ids")
    return list(dict.fromkeys(ids))


def _allowed_token_ids(ids: list[int], limits: RequestLimits) -> list[int]:
    if not ids:
        raise InvalidRequest(
            "'allowed_token_ids' must not be empty: nothing could be generated.", "allowed_token_ids"
        )
    _check_length(ids, limits.max_token_ids, "allowed_token_ids", "token ids")
    return ids


def _logit_bias(biases: dict[str, float], limits: RequestLimits) -> dict[int, float]:
    _check_length(biases, limits.max_token_ids, "logit_bias", "entries")
    sampling: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= INT32_MAX):
            raise InvalidRequest(
                f"The keys of 'logit_bias' must be token ids from 0 to {INT32_MAX}, got {show(key)}.",
                "logit_bias",
            )
        sampling[int(key)] = min(100.0, max(-100.0, bias))
    return sampling


def _bad_words(words: list[str], limits: RequestLimits) -> list[str]:
    _check_length(words, limits.max_bad_words, "bad_words", "words")
    for index, word in enumerate(words):
        if not word.strip():
            param = f"bad_words[{index}]"
            raise InvalidRequest(f"'{param}' must not be empty.", param)
    return list(dict.fromkeys(words))


def _repetition_detection(fields: RepetitionDetection) -> dict[str, int]:
    smallest, largest, count = (
        int(fields.min_pattern_size),
        int(fields.max_pattern_size),
        int(fields.min_count),
    )
    if smallest > largest:
        param = "repetition_detection.min_pattern_size"
        raise InvalidRequest(
            f"'{param}' must be at most max_pattern_size = {largest}, got {smallest}.", param
        )
    if largest > 0 and count < 2:
        param = "repetition_detection.min_count"
        raise InvalidRequest(f"'{param}' must be at least 2, got {count}.", param)
    return {"max_pattern_size": largest, "min_pattern_size": smallest, "min_count": count}


def _cache_salt(salt: str | None) -> str | None:
    if salt is None or (0 < len(salt) <= MAX_CACHE_SALT_CHARS and CACHE_SALT_FORBIDDEN.isdisjoint(salt)):
        return salt
    raise InvalidRequest(
        f"'cache_salt' must have from 1 to {MAX_CACHE_SALT_CHARS} characters, none of them '@', '/', '\\' "
        f"or NUL, got {len(salt)} characters.",
        "cache_salt",
    )


def _check_length(values: Sequence[Any] | dict[str, Any], limit: int, param: str, what: str) -> None:
    if len(values) > limit:
        raise InvalidRequest(f"'{param}' must have at most {limit} {what}, got {len(values)}.", param)

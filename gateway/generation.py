"""The shared body fields -> `Generation` and `Delivery`, and the rules that span several fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from filters.escaping import ESCAPES
from gateway.json_body import show
from gateway.sampling_fields import (
    INT32_MAX,
    INT64_MAX,
    MAX_LOGPROBS,
    Output,
    RepetitionDetection,
    RequestLimits,
    SamplingFields,
)
from gateway.structured_outputs import to_answer_format, to_sampling
from pipeline.errors import InvalidRequest
from pipeline.values import Delivery, Generation

NO_SEED: Final = -1  # vLLM: the same as no seed
GREEDY_BELOW: Final = 1e-5  # vLLM treats smaller temperatures as greedy
MAX_CACHE_SALT_CHARS: Final = 128
CACHE_SALT_FORBIDDEN: Final = frozenset("@/\\\0")  # vLLM: they would escape into cache keys and paths

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
    body: SamplingFields,
    limits: RequestLimits,
    max_tokens: int | None,
    logprobs: int | None,
    *,
    calls_tools: bool = False,
) -> Generation:
    """What the body asks of the engine. Raises `InvalidRequest`.

    `calls_tools`: the engine must call a tool, and the answer's format does not matter.
    """
    n = int(body.n or 1)
    _check_combinations(body, n, max_tokens, limits)
    if calls_tools and body.structured_outputs is not None:
        raise InvalidRequest(
            "'structured_outputs' cannot be used with a 'tool_choice' by which a tool must be called.",
            "structured_outputs",
        )
    priority = body.priority or 0
    constraint = to_sampling(body.structured_outputs, body.response_format, limits.max_depth)
    return Generation(
        sampling=_sampling(body, limits, constraint),
        max_tokens=max_tokens,
        n=n,
        stop=_stop_strings(body.stop, limits),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=logprobs,
        answer_format=None
        if calls_tools
        else to_answer_format(constraint, body.response_format, limits.max_depth),
        priority=priority,
        cache_salt=_cache_salt(body.cache_salt),
    )


def to_delivery(body: SamplingFields, limits: RequestLimits, always_streams: bool = False) -> Delivery:
    """How the answer is to travel. Raises `InvalidRequest` for stream options without a stream."""
    stream = bool(body.stream) or always_streams
    options, escape = body.stream_options, _escape(body.output, limits)
    if options is None:
        return Delivery(stream, escape=escape)
    if not stream:
        raise InvalidRequest("'stream_options' is only allowed with 'stream': true.", "stream_options")
    include_usage = bool(options.include_usage or options.include_timings)
    return Delivery(
        stream=True,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.continuous_usage_stats),
        include_timings=bool(options.include_timings),
        escape=escape,
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


def _escape(output: Output | None, limits: RequestLimits) -> str | None:
    """How text is escaped, if the request says so."""
    escape = None if output is None else output.escape
    if escape is None:
        return None
    param = "output.escape"
    if escape not in ESCAPES:
        raise InvalidRequest(f"'{param}' must be one of {', '.join(ESCAPES)}, got {show(escape)}.", param)
    if not limits.allow_escape:
        raise InvalidRequest(
            f"'{param}' is not allowed by this server's configuration, got {show(escape)}.",
            param,
            "unsupported_field",
        )
    return escape


def _sampling(
    body: SamplingFields, limits: RequestLimits, constraint: dict[str, Any] | None
) -> dict[str, Any]:
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

"""A call as the body of SGLang's `POST /generate`: token ids in, and vLLM's sampling parameters in its words.

Source: SGLang 0.5.23, `srt/sampling/sampling_params.py` and `srt/managers/io_struct.py` (`GenerateReqInput`).
It refuses a sampling parameter that it does not know, so only those that have a counterpart are sent; a call
that needs another one is refused here, by its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pipeline.errors import InvalidRequest
from pipeline.values import EngineCall, Json

_SAME: Final = (
    *("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("ignore_eos", "stop_token_ids", "logit_bias"),
)
_RENAMED: Final = {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}
# Read elsewhere, or without a meaning for ids.
_NOT_SENT: Final = frozenset(("top_k", "structured_outputs", "logprobs", "max_tokens", "watermarking"))
_GRAMMAR_OPTIONS: Final = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_REGEX_MARK: Final = re.compile(r"[\\.^$*+?{}\[\]|()/]")


@dataclass(frozen=True, slots=True)
class PriorityRule:
    """How a server schedules by priority. `is_on`: it was started with --enable-priority-scheduling."""

    is_on: bool = False
    low_first: bool = False  # as vLLM, whose numbers the gateway has; SGLang's default is the other way round

    def of(self, priority: int) -> int | None:
        if not self.is_on:
            return None  # it may refuse a request that has one
        return priority if self.low_first else -priority


def generate_body(call: EngineCall, request_id: str, rule: PriorityRule) -> dict[str, Any]:
    """All fields. Raises `InvalidRequest` for what this server cannot do."""
    sampling = call.sampling
    body: dict[str, Any] = {
        "rid": request_id,
        "input_ids": call.prompt.tokens.tolist(),
        "sampling_params": sampling_params(sampling, call.max_tokens),
        "stream": True,
    }
    if sampling.get("logprobs") is not None:
        body |= {"return_logprob": True, "top_logprobs_num": sampling["logprobs"]}
    if (priority := rule.of(call.priority)) is not None:
        body["priority"] = priority
    if call.cache_salt is not None:
        body["cache_salt"] = body["extra_key"] = call.cache_salt  # before 0.5.20 there was the second alone
    if call.reasoning_ended is False and sampling.get("structured_outputs"):
        body["require_reasoning"] = True  # the grammar binds after the thinking
    return body


def sampling_params(sampling: Mapping[str, Json], max_tokens: int) -> dict[str, Any]:
    """SGLang's `SamplingParams`. Raises `InvalidRequest`, which names the field."""
    params: dict[str, Any] = {"max_new_tokens": max_tokens, "skip_special_tokens": False}
    for name, value in sampling.items():
        if value is None or name in _NOT_SENT:
            continue
        if name not in _SAME and name not in _RENAMED:
            raise InvalidRequest(f"'{name}' is not supported by the SGLang server of this model.", name)
        params[_RENAMED.get(name, name)] = value
    if sampling.get("top_k") is not None:
        params["top_k"] = sampling["top_k"] or -1  # vLLM: 0 is all, too
    if "logit_bias" in params:
        params["logit_bias"] = {str(token_id): bias for token_id, bias in params["logit_bias"].items()}
    constraint = sampling.get("structured_outputs")
    if constraint:
        name, value = _grammar(constraint)
        params[name] = value
    return params


def _grammar(constraint: Mapping[str, Json]) -> tuple[str, str]:
    """vLLM's constraint in SGLang's words."""
    given = {name: value for name, value in constraint.items() if name not in _GRAMMAR_OPTIONS}
    [(name, value)] = given.items()
    match name:
        case "json":
            return "json_schema", value if isinstance(value, str) else msgspec.json.encode(value).decode()
        case "json_object":
            return "json_schema", '{"type": "object"}'
        case "regex":
            return "regex", value
        case "choice":
            return "regex", "(" + "|".join(_REGEX_MARK.sub(r"\\\g<0>", each) for each in value) + ")"
        case "grammar":
            return "ebnf", value
        case "structural_tag":
            return name, value if isinstance(value, str) else msgspec.json.encode(value).decode()
    raise InvalidRequest(
        f"'structured_outputs.{name}' is not supported by the SGLang server of this model.",
        f"structured_outputs.{name}",
    )

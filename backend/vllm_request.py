"""One job made into vLLM's terms: the prompt's bytes into ids, the sampling mapping into `SamplingParams`.

Everything that is wrong with a job is found here, before the engine core sees it: the core does not check,
and a value that it trips over ends every stream.
"""

from __future__ import annotations

import array
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from backend.ports import Job

# Longer prompts than these are prepared in a thread, so that no engine step waits for them. A list costs
# 0.02 us per id to make and vLLM as much to check; an id that is only packed costs 0.0007 us.
LONG_LIST_TOKENS: Final = 4096
LONG_PACKED_TOKENS: Final = 256 << 10
SHORT_TOKENS: Final = 512  # up to here a list is quicker
_ARRAY_32: Final = 0xDD  # msgpack's names for what it packs
_UINT_32: Final = 0xCE
_INT64: Final = range(-(2**63), 2**63)
_MAX_MESSAGE_CHARS: Final = 500
# Fields of SamplingParams that are not a gateway's to set: it finds stop strings and makes text itself, and
# the link has no place for what the others return.
_OURS: Final = frozenset(
    (
        "detokenize",
        "output_kind",
        "stop",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stream_interval",
        "skip_clone",
        "output_text_buffer_length",
        "flat_logprobs",
        "prompt_logprobs",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "logprob_token_ids",
        "trace_decode_token_ids",
        "routed_experts_prompt_start",
    )
)
_GRAMMARS: Final = frozenset(("json", "regex", "choice", "grammar", "json_object", "structural_tag"))
_GRAMMAR_OPTIONS: Final = frozenset(
    ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
)


class BadJobError(ValueError):
    """The engine would not take this job; the message names the field."""


def is_slow(job: Job, long_tokens: int) -> bool:
    """Whether preparing this job takes long enough to keep it off the event loop."""
    return len(job.ids) > 4 * long_tokens or "structured_outputs" in job.sampling


def prompt_ids(ids: bytes) -> list[int]:
    """Int32 little-endian bytes as a list. Raises `BadJobError` for a torn id."""
    _check_whole(ids)
    values = array.array("i")
    values.frombytes(ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


class Extent:
    """Stands for a prompt's ids where vLLM checks them: it asks for their number, least and largest."""

    def __init__(self, num_tokens: int, smallest: int, largest: int) -> None:
        self._num_tokens = num_tokens
        self._ends = smallest, largest

    def __len__(self) -> int:
        return self._num_tokens

    def __iter__(self) -> Iterator[int]:
        return iter(self._ends)


def packed_ids(ids: bytes) -> tuple[Extent, msgspec.Raw | list[int]]:
    """What vLLM checks of a prompt, and what it sends: int32 little-endian bytes as a list, packed or not.

    vLLM makes a list, looks through it twice, and packs it into a message: 5 ms per 100,000 ids, in steps of
    up to 2 ms in which no other thread runs. Packed it is the same list, in 0.07 ms: every id as a `uint 32`.
    A short list is quicker than the dozen calls of NumPy, whose code is in no cache between two requests.
    Raises `BadJobError` for a torn id.
    """
    if len(ids) <= 4 * SHORT_TOKENS:
        short = prompt_ids(ids)
        return Extent(len(short), min(short, default=0), max(short, default=0)), short

    import numpy as np

    _check_whole(ids)
    values = np.frombuffer(ids, "<i4")
    num_tokens = values.size
    packed = np.empty(5 + 5 * num_tokens, np.uint8)
    packed[0] = _ARRAY_32
    packed[1:5].view(">u4")[0] = num_tokens
    items = packed[5:].view([("type", "u1"), ("id", ">i4")])
    items["type"], items["id"] = _UINT_32, values
    return Extent(num_tokens, int(values.min()), int(values.max())), msgspec.Raw(packed.data)


def sampling_params(sampling: Mapping[str, Any], vocab_size: int) -> Any:
    """vLLM's `SamplingParams`. Raises `BadJobError`, which names the field."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    values = {name: value for name, value in sampling.items() if value is not None or name == "max_tokens"}
    allowed = SamplingParams.__struct_fields__
    for name in values:
        if name not in allowed or name.startswith("_"):
            raise BadJobError(f"{name[:100]}: this engine has no such sampling parameter")
        if name in _OURS:
            raise BadJobError(f"{name}: not for the worker; the gateway does this")
    _check_numbers(values, vocab_size)
    if "structured_outputs" in values:
        _check_structured(values["structured_outputs"])
    try:
        params = msgspec.convert(values, SamplingParams, str_keys=True)
    except Exception as error:  # msgspec's for a type; for a value vLLM's own, which is no ValueError
        raise BadJobError(_plain(refusal(error))) from error
    params.detokenize = False
    params.output_kind = RequestOutputKind.DELTA
    params.skip_clone = True  # they are this job's alone: a deep copy takes two thirds of the preparation
    return params


def engine_prompt(llm: Any, job: Job, ids: list[int] | Extent) -> Any:
    """The prompt as vLLM's renderer gives it to its engine: ids only, nothing is tokenized."""
    from vllm.inputs import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=ids)
    if job.cache_salt is not None:
        prompt["cache_salt"] = job.cache_salt
    return llm.renderer.process_for_engine(prompt, time.time())


class Reasoning:
    """What goes with a grammar, so that it binds after the thinking: whether that is over, and how to tell.

    The engine core makes its reasoning parser of a request's arguments in the middle of a step, and what it
    trips over there ends every stream. So one is made of them here first: 0.03 ms.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._name = reasoning_parser(getattr(llm, "vllm_config", None))

    def fields(self, job: Job) -> dict[str, Any]:
        """By vLLM's names; empty for a job without a grammar. Raises `BadJobError`."""
        if self._name is None or job.sampling.get("structured_outputs") is None:
            return {}  # the engine would not look at them
        if job.reasoning_parser_kwargs is not None:
            self._check(job.reasoning_parser_kwargs)
        return {
            "reasoning_ended": job.reasoning_ended,
            "reasoning_parser_kwargs": job.reasoning_parser_kwargs,
        }

    def _check(self, arguments: Mapping[str, Any]) -> None:
        from vllm.reasoning import ReasoningParserManager

        try:
            ReasoningParserManager.get_reasoning_parser(self._name)(
                tokenizer=self._llm.renderer.get_tokenizer(), **arguments
            )
        except Exception as error:  # whatever a parser makes of them
            raise BadJobError(f"reasoning_parser_kwargs: {refusal(error)}") from error


def reasoning_parser(config: Any) -> str | None:
    """The name of the engine's reasoning parser, out of vLLM's config, where an empty one is none."""
    return getattr(getattr(config, "structured_outputs_config", None), "reasoning_parser", None) or None


def engine_request(
    llm: Any, request_id: str, job: Job, vocab_size: int, reasoning: Reasoning, prompt: Any = None
) -> Any:
    """The `EngineCoreRequest` of a job, its ids packed. Raises `BadJobError`, or what vLLM raises.

    `prompt`: of a job with media, from `vllm_media`; its ids stay a list.
    """
    packed = None
    if prompt is None:
        extent, packed = packed_ids(job.ids)
        prompt = engine_prompt(llm, job, extent)
    request = llm.input_processor.process_inputs(
        request_id,
        prompt,
        sampling_params(job.sampling, vocab_size),
        supported_tasks=("generate",),
        priority=job.priority,
    )
    request.external_req_id = request_id
    if packed is not None:
        request.prompt_token_ids = packed
    for name, value in reasoning.fields(job).items():
        setattr(request, name, value)
    return request


def refusal(error: BaseException) -> str:
    """An exception's words, of bounded length."""
    return str(error)[:_MAX_MESSAGE_CHARS] or type(error).__name__


def _check_whole(ids: bytes) -> None:
    if len(ids) % 4:
        raise BadJobError(f"prompt: {len(ids)} bytes are not a whole number of 4-byte ids")


def _check_numbers(values: Mapping[str, Any], vocab_size: int) -> None:
    """What vLLM lets through and its engine core dies of: numbers for no tensor, ids without a row."""
    if values.get("n", 1) != 1:
        raise BadJobError(f"n: a job is one choice, got {values['n']!r}")
    seed = values.get("seed")
    if isinstance(seed, int) and seed not in _INT64:
        raise BadJobError(f"seed: must fit 64 bits, got {seed}")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        ids = values.get(name)
        if isinstance(ids, Iterable):
            _check_ids(name, ids, vocab_size)
    for name in ("max_tokens", "min_tokens", "top_k", "thinking_token_budget"):
        value = values.get(name)
        if isinstance(value, int) and value >= 2**31:
            raise BadJobError(f"{name}: must be less than {2**31}, got {value}")


def _check_ids(name: str, ids: Iterable[Any], vocab_size: int) -> None:
    for value in ids:
        try:
            token_id = int(value)
        except (TypeError, ValueError):
            raise BadJobError(f"{name}: expected token ids, got {type(value).__name__}") from None
        if not 0 <= token_id < vocab_size:
            raise BadJobError(f"{name}: token id {token_id} is outside the vocabulary of {vocab_size}")


def _check_structured(value: Any) -> None:
    if not isinstance(value, Mapping):
        raise BadJobError(f"structured_outputs: expected an object, got {type(value).__name__}")
    for name in value:
        if name not in _GRAMMARS and name not in _GRAMMAR_OPTIONS:
            raise BadJobError(f"structured_outputs: unknown field {str(name)[:100]}")
    given = sorted(name for name in _GRAMMARS if value.get(name) is not None)
    if len(given) != 1:
        raise BadJobError(f"structured_outputs: exactly one kind of constraint is allowed, got {len(given)}")


def _plain(message: str) -> str:
    """msgspec's "Expected `float`, got `str` - at `$.temperature`" with the field first."""
    what, _, path = message.partition(" - at `$.")
    return f"{path.rstrip('`')}: {what}" if path else message

"""Hop 6: a request and its prompts' ids -> one `EngineCall` per choice.

Decides how many tokens may be generated, with which sampling parameters, and what routing goes by. Nothing
here looks at text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from pipeline.encoding import BYTES_PER_ID
from pipeline.errors import ContextTooLong, InvalidRequest
from pipeline.leaves import prompt_path
from pipeline.media import first_medium
from pipeline.tool_choice import with_forced_calls
from pipeline.values import (
    ChatRequest,
    CompletionRequest,
    EngineCall,
    Generation,
    Json,
    Medium,
    ModelInfo,
    Prompt,
)

# What vLLM's server takes from a model's generation_config, and only that.
_FROM_MODEL: Final = frozenset(
    {
        "frequency_penalty",
        "min_p",
        "presence_penalty",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
    }
)
_AFFINITY_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The gateway's own defaults: they come after the request and before the model's generation_config."""

    max_tokens: int = 2048
    sampling: Mapping[str, Json] = field(default_factory=dict)


def assemble(
    request: ChatRequest | CompletionRequest,
    prompts: Sequence[memoryview],
    model: ModelInfo,
    defaults: GenerationDefaults,
    media: tuple[Medium, ...] = (),
) -> list[EngineCall]:
    """The calls for all choices: those of the first prompt, then those of the second, …

    `prompts`: packed ids. `media`: those of a chat's only prompt. Raises `ContextTooLong` for a prompt that
    leaves no room for what is asked, and `InvalidRequest` for one without any token.
    """
    calls = []
    for index, ids in enumerate(prompts):
        path = "messages" if isinstance(request, ChatRequest) else prompt_path(request, index)
        first = first_medium(ids, media, model) if media else ""
        prompt = Prompt(ids, ids.nbytes // BYTES_PER_ID, affinity(ids, model.block_size, first))
        calls += _choices(request, prompt, path, model, defaults, media)
    return calls


def affinity(ids: memoryview, block_size: int, first_digest: str = "") -> int:
    """Hash of the ids up to the first prefix boundary, the same in every process.

    The boundary is the end of the first KV block (`block_size` tokens), for a prefix cache shares whole
    blocks; a shorter prompt counts whole. `first_digest`: of the first image in that block, which is nothing
    but a placeholder among the ids.
    """
    hashed = blake2b(ids[: block_size * BYTES_PER_ID], digest_size=_AFFINITY_BYTES)
    hashed.update(first_digest.encode())
    return int.from_bytes(hashed.digest(), "little")


def _choices(
    request: ChatRequest | CompletionRequest,
    prompt: Prompt,
    path: str,
    model: ModelInfo,
    defaults: GenerationDefaults,
    media: tuple[Medium, ...],
) -> list[EngineCall]:
    generation = request.generation
    max_tokens = _max_tokens(generation, prompt.num_tokens, path, model, defaults)
    sampling = with_forced_calls(_sampling(generation, model, defaults), request)
    min_tokens = sampling.get("min_tokens", 0)
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens}, but at most {max_tokens} tokens can be generated.", "min_tokens"
        )
    return [
        EngineCall(
            model=model.name,
            prompt=prompt,
            sampling=_with_seed(sampling, index),
            max_tokens=max_tokens,
            priority=generation.priority,
            cache_salt=generation.cache_salt,
            fingerprint=model.fingerprint,
            media=media,
        )
        for index in range(generation.n)
    ]


def _max_tokens(
    generation: Generation, num_tokens: int, path: str, model: ModelInfo, defaults: GenerationDefaults
) -> int:
    """The request's limit if it fits, else the default, as far as there is room."""
    room = model.max_model_len - num_tokens
    if num_tokens == 0:
        raise InvalidRequest(f"{path} makes a prompt of 0 tokens; at least 1 is needed.", path)
    if room < 1:
        raise ContextTooLong(num_tokens, 1, model.max_model_len, path)
    if generation.max_tokens is None:
        return min(defaults.max_tokens, room)
    if generation.max_tokens > room:
        raise ContextTooLong(num_tokens, generation.max_tokens, model.max_model_len, path)
    return generation.max_tokens


def _sampling(generation: Generation, model: ModelInfo, defaults: GenerationDefaults) -> dict[str, Any]:
    """Request over gateway over model, as vLLM's server does it; stop tokens of all three count."""
    layers = [model.default_sampling, defaults.sampling, generation.sampling]
    sampling: dict[str, Any] = {
        name: value for name, value in model.default_sampling.items() if name in _FROM_MODEL
    }
    sampling |= defaults.sampling
    sampling |= generation.sampling
    stop_token_ids = [token_id for layer in reversed(layers) for token_id in layer.get("stop_token_ids", ())]
    if stop_token_ids:
        sampling["stop_token_ids"] = list(dict.fromkeys(stop_token_ids))
    if generation.logprobs is not None:
        sampling["logprobs"] = generation.logprobs
    return sampling


def _with_seed(sampling: Mapping[str, Json], index: int) -> Mapping[str, Json]:
    """Choice `index` of a seeded request uses seed + index, as in vLLM; else all would be the same."""
    seed = sampling.get("seed")
    return sampling if seed is None else {**sampling, "seed": seed + index}

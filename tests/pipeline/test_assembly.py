"""Calls from requests and ids."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.assembly import GenerationDefaults, affinity, assemble
from pipeline.encoding import pack_ids
from pipeline.errors import ContextTooLong, InvalidRequest
from pipeline.values import EngineCall, ModelInfo
from tests.pipeline.requests import chat, completion, generation

DEFAULTS = GenerationDefaults()


def model(**fields: Any) -> ModelInfo:
    settings = {
        "name": "m",
        "max_model_len": 100,
        "block_size": 4,
        "default_sampling": {},
        "fingerprint": "f",
    }
    return ModelInfo(**{**settings, **fields})


def prompt(num_tokens: int, first: int = 0) -> memoryview:
    return memoryview(pack_ids(range(first, first + num_tokens)))


def call(
    num_tokens: int = 10, defaults: GenerationDefaults = DEFAULTS, info: ModelInfo | None = None, **gen: Any
) -> EngineCall:
    calls = assemble(chat(gen=generation(**gen)), [prompt(num_tokens)], info or model(), defaults)
    assert len(calls) == 1
    return calls[0]


@pytest.mark.parametrize(
    ("asked", "default", "num_tokens", "expected"),
    [(None, 2048, 10, 90), (None, 20, 10, 20), (5, 20, 10, 5), (90, 20, 10, 90), (None, 2048, 99, 1)],
)
def test_max_tokens_is_the_requests_or_the_default_as_far_as_there_is_room(
    asked: int | None, default: int, num_tokens: int, expected: int
) -> None:
    assert call(num_tokens, GenerationDefaults(default), max_tokens=asked).max_tokens == expected


@pytest.mark.parametrize(
    ("asked", "num_tokens", "numbers"),
    [
        (91, 10, ("10 tokens", "91 were", "101 in total")),
        (None, 100, ("100 tokens",)),
        (1, 150, ("150 tokens",)),
    ],
)
def test_prompt_without_room_is_refused_with_the_numbers(
    asked: int | None, num_tokens: int, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(ContextTooLong) as caught:
        call(num_tokens, max_tokens=asked)
    assert caught.value.param == "messages"
    for number in ("100 tokens", *numbers):
        assert number in caught.value.message


def test_prompt_that_is_too_long_is_named() -> None:
    for request, param in ((completion("a"), "prompt"), (completion("a", "b"), "prompt[1]")):
        prompts = [prompt(3), prompt(100)][-len(request.prompts) :]
        with pytest.raises(ContextTooLong) as caught:
            assemble(request, prompts, model(), DEFAULTS)
        assert caught.value.param == param


def test_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="0 tokens") as caught:
        assemble(completion(""), [prompt(0)], model(), DEFAULTS)
    assert caught.value.param == "prompt"


def test_min_tokens_beyond_the_room_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens is 95, but at most 90") as caught:
        call(10, sampling={"min_tokens": 95})
    assert caught.value.param == "min_tokens"
    assert call(10, sampling={"min_tokens": 90}).max_tokens == 90


def test_request_beats_gateway_beats_model() -> None:
    info = model(default_sampling={"temperature": 0.6, "top_p": 0.95, "top_k": 20})
    defaults = GenerationDefaults(sampling={"top_p": 0.9, "top_k": 5})
    assert call(defaults=defaults, info=info, sampling={"top_k": 1}).sampling == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 1,
    }


def test_only_sampling_parameters_are_taken_from_the_model() -> None:
    info = model(default_sampling={"max_tokens": 7, "min_p": 0.1, "transformers_version": "5"})
    made = call(info=info)
    assert made.sampling == {"min_p": 0.1}
    assert made.max_tokens == 90


def test_stop_tokens_of_all_layers_count() -> None:
    info = model(default_sampling={"stop_token_ids": [1, 2]})
    made = call(info=info, sampling={"stop_token_ids": [3, 1]})
    assert made.sampling["stop_token_ids"] == [3, 1, 2]


@pytest.mark.parametrize("logprobs", [0, 5])
def test_logprobs_are_a_sampling_parameter(logprobs: int) -> None:
    assert call(logprobs=logprobs).sampling == {"logprobs": logprobs}
    assert "logprobs" not in call().sampling


def test_choices_are_calls_with_their_own_seeds() -> None:
    request = completion("a", "b", gen=generation(n=3, sampling={"seed": 7}, priority=2, cache_salt="s"))
    calls = assemble(request, [prompt(3), prompt(4)], model(), DEFAULTS)
    assert [made.sampling["seed"] for made in calls] == [7, 8, 9] * 2
    assert [made.prompt.num_tokens for made in calls] == [3, 3, 3, 4, 4, 4]
    assert {(made.model, made.priority, made.cache_salt) for made in calls} == {("m", 2, "s")}
    assert {made.fingerprint for made in calls} == {"f"}
    assert calls[0].prompt is calls[2].prompt
    assert bytes(calls[3].prompt.ids) == pack_ids(range(4))


def test_choices_without_a_seed_have_none() -> None:
    calls = assemble(chat(gen=generation(n=2)), [prompt(3)], model(), DEFAULTS)
    assert [made.sampling for made in calls] == [{}, {}]


def test_affinity_is_of_the_first_block() -> None:
    base = affinity(prompt(4), 4)
    assert affinity(prompt(40), 4) == base
    assert affinity(prompt(3), 4) != base
    assert affinity(prompt(40, first=1), 4) != base
    assert affinity(memoryview(pack_ids([0, 1, 2, 3, 9])), 4) == base


def test_affinity_fits_64_bits() -> None:
    values = [affinity(prompt(4, first), 4) for first in range(100)]
    assert len(set(values)) == 100
    assert all(0 <= value < 2**64 for value in values)

"""Jobs into vLLM's terms: what is taken, what is refused, and by which name."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from backend.ports import Job
from backend.vllm_request import (
    BadJobError,
    Reasoning,
    engine_request,
    is_slow,
    packed_ids,
    prompt_ids,
    refusal,
    sampling_params,
)
from tests.backend.vllm_parts import FakeLlm, import_vllm, pack

VOCAB = 1000


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    import_vllm()


def test_ids_are_little_endian_int32() -> None:
    assert prompt_ids(b"\x01\x00\x00\x00\xff\x00\x01\x00\xff\xff\xff\xff") == [1, 65791, -1]
    assert prompt_ids(b"") == []


@pytest.mark.parametrize("unpack", [prompt_ids, packed_ids])
def test_torn_id_is_refused(unpack: Any) -> None:
    with pytest.raises(BadJobError, match="prompt: 5 bytes"):
        unpack(b"\0" * 5)


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 300, 512, 513, 70_000])
def test_packed_ids_are_the_list_that_vllm_would_send(num_tokens: int) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    rng = random.Random(num_tokens)
    ids = [rng.choice((rng.randrange(128), rng.randrange(70_000), 2**31 - 1)) for _ in range(num_tokens)]
    rest = dict.fromkeys(("mm_features", "pooling_params", "lora_request", "data_parallel_rank"))
    request = EngineCoreRequest(
        "7", [], sampling_params=SamplingParams(), arrival_time=1.0, cache_salt="s", **rest
    )
    _, request.prompt_token_ids = packed_ids(pack(ids))
    received = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))
    assert received.prompt_token_ids == ids
    assert (received.request_id, received.cache_salt) == ("7", "s")


def test_what_vllm_checks_of_a_prompt_it_can_check() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.base import BaseRenderer

    renderer: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(max_token_id=90), model_config=SimpleNamespace(get_vocab_size=lambda: 100)
    )
    extent, _ = packed_ids(pack([5, 99, 0]))
    assert len(extent) == 3
    BaseRenderer.validate_token_ids(renderer, extent)
    for bad, count in ((100, 1), (-1, 1), (100, 1000), (-1, 1000)):
        with pytest.raises(VLLMValidationError, match=f"Token id {bad} is out of vocabulary"):
            BaseRenderer.validate_token_ids(renderer, packed_ids(pack([5, bad, 7] * count))[0])
    assert not packed_ids(b"")[0]


def test_engine_request_has_the_packed_ids_and_all_fields() -> None:
    import msgspec

    llm = FakeLlm()
    short = engine_request(llm, "6", Job(pack([5, 70_000]), {}), 100_000, Reasoning(llm))
    assert short.prompt_token_ids == [5, 70_000]
    job = Job(pack([5, 70_000] * 400), {"max_tokens": 3})
    request = engine_request(llm, "7", job, 100_000, Reasoning(llm))
    assert msgspec.msgpack.decode(request.prompt_token_ids) == [5, 70_000] * 400
    assert (request.external_req_id, request.sampling_params.max_tokens) == ("7", 3)


class Tokenizer:
    """As much as the parser olmo3 wants of one."""

    def get_vocab(self) -> dict[str, int]:
        return {"Ġ</": 1, "</": 2, "think": 3, ">": 4}


def reasoning(parser: str) -> Reasoning:
    llm = FakeLlm()
    structured = SimpleNamespace(reasoning_parser=parser)
    llm.vllm_config = SimpleNamespace(structured_outputs_config=structured)  # type: ignore[attr-defined]
    llm.renderer.get_tokenizer = Tokenizer
    return Reasoning(llm)


GRAMMAR = {"structured_outputs": {"json_object": True}}
ARGUMENTS = {"chat_template_kwargs": {"thinking": True}}


def test_reasoning_goes_with_a_grammar_to_an_engine_that_parses_it() -> None:
    job = Job(b"", GRAMMAR, reasoning_ended=False, reasoning_parser_kwargs=ARGUMENTS)
    assert reasoning("olmo3").fields(job) == {
        "reasoning_ended": False,
        "reasoning_parser_kwargs": ARGUMENTS,
    }
    request = engine_request(FakeLlm(), "7", replace(job, ids=pack([5])), VOCAB, reasoning("olmo3"))
    assert (request.reasoning_ended, request.reasoning_parser_kwargs) == (False, ARGUMENTS)
    assert reasoning("").fields(job) == {}
    assert reasoning("olmo3").fields(replace(job, sampling={})) == {}


@pytest.mark.parametrize("arguments", [{"tokenizer": 1}, {"no": 1, "tokenizer": None}, {1: 2}, [1]])
def test_arguments_that_no_reasoning_parser_can_be_made_of_are_refused(arguments: Any) -> None:
    job = Job(b"", GRAMMAR, reasoning_parser_kwargs=arguments)
    with pytest.raises(BadJobError, match=r"reasoning_parser_kwargs: .+"):
        reasoning("olmo3").fields(job)


def test_fields_are_passed_on_and_tokens_stay_ids() -> None:
    from vllm.sampling_params import RequestOutputKind

    params = sampling_params(
        {"temperature": 0.5, "top_k": 7, "seed": 3, "max_tokens": 9, "logit_bias": {"5": 1}, "min_p": None},
        VOCAB,
    )
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.5, 7, 3, 9)
    assert params.logit_bias == {5: 1.0}
    assert params.detokenize is False
    assert params.output_kind is RequestOutputKind.DELTA


def test_parameters_are_not_copied_deeply_and_jobs_share_none() -> None:
    sampling = {"stop_token_ids": [1, 2], "extra_args": {"a": [1]}}
    one, other = (sampling_params(sampling, VOCAB) for _ in range(2))
    copy = one.clone()
    assert copy.extra_args is one.extra_args
    assert one.stop_token_ids is not other.stop_token_ids
    assert one._all_stop_token_ids is not other._all_stop_token_ids


def test_missing_max_tokens_is_vllms_own_default_and_none_means_no_limit() -> None:
    assert sampling_params({}, VOCAB).max_tokens == 16
    assert sampling_params({"max_tokens": None}, VOCAB).max_tokens is None


def test_structured_outputs_become_vllms_own() -> None:
    params = sampling_params({"structured_outputs": {"choice": ["yes", "no"]}}, VOCAB)
    assert params.structured_outputs.choice == ["yes", "no"]


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"_eos_token_id": 1}, "_eos_token_id"),
        ({"stop": ["x"]}, "stop"),
        ({"detokenize": True}, "detokenize"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"n": 2}, "n:"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 7}, "top_p"),
        ({"top_k": 2.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"min_tokens": 2**31}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"allowed_token_ids": [2**40]}, "allowed_token_ids"),
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
        ({"logit_bias": {"1": "much"}}, "logit_bias"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"json": "{}", "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
    ],
)
def test_bad_values_are_refused_and_the_field_is_named(sampling: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        sampling_params(sampling, VOCAB)


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_seeds_of_64_bits_are_taken(seed: int) -> None:
    assert sampling_params({"seed": seed}, VOCAB).seed == seed


def test_long_prompts_and_grammars_are_slow() -> None:
    assert not is_slow(Job(pack([1] * 100), {}), 100)
    assert is_slow(Job(pack([1] * 101), {}), 100)
    assert is_slow(Job(pack([1]), {"structured_outputs": {"regex": "a"}}), 100)


def test_refusals_are_bounded_and_never_empty() -> None:
    assert refusal(ValueError("x" * 10_000)) == "x" * 500
    assert refusal(ValueError()) == "ValueError"

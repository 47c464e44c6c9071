"""What vLLM is asked, and what its answers about itself mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from backend.http_client import HttpResponse
from backend.upstream_completions import CompletionsWire
from backend.upstream_generate import GenerateWire
from backend.upstream_metrics import label, values
from backend.upstream_models import read_models
from backend.upstream_ports import UNKNOWN_MODEL_LEN, EngineStats, ServedModel
from backend.upstream_vllm import VllmKind
from tests.backend.linked import make_call
from tests.backend.vllm_streams import METRICS

SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 3,
    "min_tokens": 2,
    "ignore_eos": True,
    "stop_token_ids": [7],
    "logit_bias": {"5": 1.5},
    "structured_outputs": {"json": {"type": "object"}},
    "bad_words": None,
    "logprobs": 2,
    "extra_args": {"session_id": "s"},
}


class Asked:
    """Plays the server: path -> status and body. What is not there is 404."""

    def __init__(self, **answers: tuple[int, bytes]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def __call__(
        self, method: str, target: str, body: bytes = b"", allowed: Sequence[int] = ()
    ) -> HttpResponse:
        self.asked.append(f"{method} {target}")
        status, answer = self.answers.get(target.rsplit("/", 1)[-1], (404, b""))
        assert status == 200 or status in allowed, f"{target}: {status}"
        return HttpResponse(status, (), answer)


def body_of(wire: CompletionsWire | GenerateWire, **options: Any) -> dict[str, Any]:
    from dataclasses import replace

    fields = {
        name: options.pop(name) for name in ("priority", "cache_salt", "reasoning_ended") if name in options
    }
    request = wire.request(replace(make_call([1, 70_000, 3], model="m", **options), **fields), "id-1")
    assert (request.method, dict(request.headers)[b"x-request-id"]) == ("POST", b"id-1")
    body: dict[str, Any] = msgspec.json.decode(request.body)
    return body


def test_completion_is_asked_by_ids_and_gives_ids_back() -> None:
    body = body_of(CompletionsWire(), max_tokens=9, **SAMPLING)
    assert (body["prompt"], body["max_tokens"], body["model"]) == ([1, 70_000, 3], 9, "m")
    assert (body["stream"], body["return_token_ids"]) == (True, True)
    assert body["stream_options"] == {"include_usage": True}
    assert (body["logprobs"], body["return_tokens_as_token_ids"]) == (2, True)
    assert (body["vllm_xargs"], body["stop_token_ids"]) == ({"session_id": "s"}, [7])
    assert not {"stop", "bad_words", "extra_args", "priority", "cache_salt", "n"} & set(body)


def test_completion_sends_only_what_was_given() -> None:
    assert set(body_of(CompletionsWire())) == {
        "model",
        "prompt",
        "max_tokens",
        "stream",
        "stream_options",
        "return_token_ids",
    }


def test_generation_is_asked_without_text() -> None:
    body = body_of(
        GenerateWire(), max_tokens=9, priority=4, cache_salt="salt", reasoning_ended=False, **SAMPLING
    )
    params = body["sampling_params"]
    assert (body["token_ids"], body["stream"], body["model"]) == ([1, 70_000, 3], True, "m")
    assert (params["max_tokens"], params["detokenize"], params["temperature"]) == (9, False, 0.5)
    assert (body["priority"], body["cache_salt"], body["reasoning_ended"]) == (4, "salt", False)
    assert params["extra_args"] == {"session_id": "s"}
    assert "bad_words" not in params
    assert "priority" not in body_of(GenerateWire())


@pytest.mark.parametrize(("asked", "sent"), [(0, 0), (1, 2), (19, 20), (20, 20)])
def test_generation_asks_for_one_logprob_more_as_far_as_the_server_allows(asked: int, sent: int) -> None:
    assert body_of(GenerateWire(), logprobs=asked)["sampling_params"]["logprobs"] == sent


# -- what it tells -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 400, 422])
async def test_generate_is_used_where_it_exists_and_all_defaults_are_sent(status: int) -> None:
    ask = Asked(generate=(status, b"{}"), metrics=(200, METRICS), version=(200, b'{"version":"0.32.0"}'))
    traits = await VllmKind().traits(ask, sends_defaults=True)
    assert (traits.api, traits.block_size, traits.versions) == ("generate", 128, {"vllm": "0.32.0"})
    assert isinstance(traits.wire, GenerateWire)


@pytest.mark.parametrize(("status", "sends_defaults"), [(403, True), (404, True), (405, True), (400, False)])
async def test_completions_are_used_else(status: int, sends_defaults: bool) -> None:
    traits = await VllmKind().traits(Asked(generate=(status, b"{}")), sends_defaults)
    assert (traits.api, traits.block_size, traits.versions) == ("completions", 16, {})
    assert isinstance(traits.wire, CompletionsWire)


async def test_stats_are_the_sums_over_its_engines() -> None:
    stats = await VllmKind().stats(Asked(health=(200, b""), metrics=(200, METRICS)))
    assert stats == EngineStats(
        running=5, waiting=4, kv_usage=0.5, prefix_queries=1796023, prefix_hits=17, preemptions=1
    )


async def test_server_without_metrics_has_none() -> None:
    assert await VllmKind().stats(Asked(health=(200, b""))) == EngineStats()


@pytest.mark.parametrize("status", [401, 403])
async def test_pages_that_only_operators_may_see_are_no_fault(status: int) -> None:
    server = Asked(health=(200, b""), metrics=(status, b"<html>"), version=(status, b"<html>"))
    assert await VllmKind().stats(server) == EngineStats()
    assert (await VllmKind().traits(server, sends_defaults=False)).block_size == 16


async def test_adapter_has_its_base_models_context() -> None:
    cards = [
        {"id": "base", "max_model_len": 4096, "parent": None, "permission": [{"id": "x"}]},
        {"id": "lora", "max_model_len": None, "parent": "base"},
        {"id": "orphan", "parent": "elsewhere"},
    ]
    body = msgspec.json.encode({"object": "list", "data": cards})
    assert await VllmKind().models(Asked(models=(200, body))) == [
        ServedModel("base", 4096),
        ServedModel("lora", 4096),
        ServedModel("orphan", UNKNOWN_MODEL_LEN),
    ]


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"data":[5]}', b"{}"])
def test_list_of_models_that_is_none_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_models(body)


def test_endless_list_of_models_is_refused() -> None:
    body = msgspec.json.encode({"data": [{"id": f"m{number}"} for number in range(1025)]})
    with pytest.raises(ValueError, match="1025 models; the limit is 1024"):
        read_models(body)


# -- metrics -----------------------------------------------------------------------------------------------


def test_metric_is_found_by_its_whole_name_wherever_it_stands() -> None:
    page = b'a 1\nab{x="}1"} 2 1700000000\n# a 9\nb_a 3\na{} 4.5e1\nab_total 6'
    assert [*values(page, b"a")] == [1.0, 45.0]
    assert [*values(page, b"ab")] == [2.0]
    assert [*values(page, b"ab_total")] == [6.0]
    assert [*values(page, b"c")] == [*values(b"", b"a")] == []
    for bad in (b"a x", b"a{}", b"a "):
        with pytest.raises(ValueError, match=r"."):
            [*values(bad, b"a")]


def test_label_is_found_by_its_whole_name() -> None:
    page = b'z 1\nm{hash_block_size="1",block_size="32",x="y"} 1.0\n'
    assert label(page, b"m", b"block_size") == "32"
    assert label(page, b"m", b"hash_block_size") == "1"
    assert label(page, b"m", b"size") is None
    assert label(page, b"z", b"block_size") is None


async def test_load_of_an_older_version_has_its_cache_by_the_old_name() -> None:
    asked = Asked(health=(200, b""), metrics=(200, b'vllm:gpu_cache_usage_perc{model_name="m"} 0.25\n'))
    assert await VllmKind().stats(asked) == EngineStats(kv_usage=0.25)

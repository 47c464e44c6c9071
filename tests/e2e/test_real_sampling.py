"""The sampling fields of a body reach the real engine and do there what they say.

That they are the parameters of vLLM's own server is shown in `tests/gateway/test_sampling_equality.py`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.e2e.asking import CHAT
from tests.e2e.resting import statuses, wait_for
from tests.stack import Gateway, Worker
from tests.wire import connect

pytestmark = pytest.mark.engine

MODEL = "smollm2-135m-instruct"
FRANCE = "What is the capital of France?"  # it answers in 8 tokens
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def tokenizer(embedded_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(embedded_model / "tokenizer.json"))


async def post(gateway: Gateway, path: str, **body: Any) -> Any:
    async with connect(gateway.port) as wire:
        head = await wire.post(path, {"model": MODEL, **body})
        document = await wire.json()
        assert head.status == 200, document
        return document


async def ask(gateway: Gateway, content: str = FRANCE, **fields: Any) -> tuple[str, dict[str, Any], int]:
    """The greedy answer of up to 16 tokens, unless `fields` say otherwise: text, choice, output tokens."""
    messages = [{"role": "user", "content": content}]
    options = {"temperature": 0, "max_tokens": 16, **fields}
    document = await post(gateway, CHAT, messages=messages, **options)
    (choice,) = document["choices"]
    return choice["message"]["content"], choice, document["usage"]["completion_tokens"]


async def test_a_json_schema_constrains_the_answer(engine_gateway: Gateway) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "is_capital": {"type": "boolean"}},
        "required": ["city", "is_capital"],
        "additionalProperties": False,
    }
    response_format = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    text, choice, _ = await ask(engine_gateway, response_format=response_format, max_tokens=60)
    assert choice["finish_reason"] == "stop"
    answer = json.loads(text)
    assert set(answer) == {"city", "is_capital"}
    assert answer["city"] in ("Paris", "Rome")
    assert type(answer["is_capital"]) is bool


async def test_a_regex_constrains_the_answer(engine_gateway: Gateway) -> None:
    text, choice, _ = await ask(engine_gateway, structured_outputs={"regex": "[0-9]{3}-[a-c]{2}"})
    assert choice["finish_reason"] == "stop"
    digits, _, letters = text.partition("-")
    assert (len(digits), len(letters)) == (3, 2)
    assert digits.isdecimal()
    assert set(letters) <= set("abc")


async def test_a_seed_repeats_what_another_one_does_not(engine_gateway: Gateway) -> None:
    await ask(engine_gateway, "Tell me a story.", max_tokens=1)  # each finds the same in the prefix cache
    texts = [
        (await ask(engine_gateway, "Tell me a story.", temperature=1.5, seed=seed))[0] for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1] != texts[2]


async def test_min_tokens_and_ignore_eos_put_off_the_end(engine_gateway: Gateway) -> None:
    _, choice, num_tokens = await ask(engine_gateway)
    assert choice["finish_reason"] == "stop"
    assert num_tokens < 12, "it ends by itself, or this test shows nothing"
    assert (await ask(engine_gateway, min_tokens=12))[2] >= 12
    _, choice, num_tokens = await ask(engine_gateway, ignore_eos=True)
    assert (choice["finish_reason"], num_tokens) == ("length", 16)


async def test_a_stop_token_ends_the_answer_and_is_named(
    engine_gateway: Gateway, tokenizer: Tokenizer
) -> None:
    token_id = tokenizer.token_to_id("Ġis")
    text, choice, _ = await ask(engine_gateway, stop_token_ids=[token_id])
    assert text == "The capital of France"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token_id)


async def test_biases_and_bad_words_change_the_choice_of_tokens(
    engine_gateway: Gateway, tokenizer: Tokenizer
) -> None:
    paris, rome = tokenizer.token_to_id("ĠParis"), tokenizer.token_to_id("ĠRome")
    assert "Paris" in (await ask(engine_gateway))[0]
    assert "Paris" not in (await ask(engine_gateway, logit_bias={str(paris): -100}))[0]
    text, _, _ = await ask(engine_gateway, logit_bias={str(rome): 100}, max_tokens=3)
    assert text == " Rome Rome Rome"
    assert "Paris" not in (await ask(engine_gateway, bad_words=["Paris"]))[0]
    text, _, _ = await ask(engine_gateway, allowed_token_ids=[paris, rome], max_tokens=4)
    assert set(text.split()) <= {"Paris", "Rome"}
    assert len(text.split()) == 4


async def test_an_urgent_request_overtakes_those_that_wait(
    engine_worker: Worker, engine_gateway: Gateway
) -> None:
    """The engine is full, two wait, one place becomes free: the urgent one takes it, which came last."""
    (status,) = statuses(engine_gateway)
    num_running = status["max_running"]
    ended: list[int] = []

    async def wait_for_counts(running: int, waiting: int) -> None:
        def are_true() -> bool:
            counts = [engine_worker.metric(f"vllm:num_requests_{kind}") for kind in ("running", "waiting")]
            return counts == [running, waiting]

        await asyncio.to_thread(wait_for, engine_gateway, are_true, f"at {running} and {waiting} requests")

    async def fill(num_choices: int) -> None:
        options = {"max_tokens": 4000, "ignore_eos": True}
        await post(engine_gateway, COMPLETIONS, prompt=[[7]] * num_choices, **options)

    async def queue(priority: int) -> None:
        await post(engine_gateway, COMPLETIONS, prompt=[7], max_tokens=2, priority=priority)
        ended.append(priority)

    async with asyncio.TaskGroup() as group:
        many = group.create_task(fill(num_running - 1))
        one = group.create_task(fill(1))
        await wait_for_counts(num_running, 0)
        patient = group.create_task(queue(5))
        await wait_for_counts(num_running, 1)
        urgent = group.create_task(queue(-5))
        await wait_for_counts(num_running, 2)
        one.cancel()  # closes its connection
        await asyncio.wait_for(asyncio.gather(patient, urgent), 60)
        many.cancel()
    assert ended == [-5, 5]
    await wait_for_counts(0, 0)

"""Every error that the `openai` Python client can meet here, as the class and the code that its users catch.

Scripted workers, which fail when they are told to. The client's way with good answers is in
`test_real_openai_client.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from tests import stack
from tests.gateway.programs import wait_until
from tests.stack import Gateway, Worker

MODEL = "scripted"
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 8}
WORD = "forbidden"
SAID = f"This is a {WORD} word."
BODY_LIMIT = 8192

StartWorker = Callable[..., Worker]
StartGateway = Callable[..., Gateway]


def client_of(gateway: Gateway, api_key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{gateway.url}/v1", api_key=api_key, timeout=30.0, max_retries=0)


@pytest.fixture(scope="module")
def client(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """Of a gateway with a key, a block rule and a small body limit, before a worker that says `SAID`."""
    folder = tmp_path_factory.mktemp("openai")
    rules, script = folder / "words.txt", folder / "script.json"
    rules.write_text(WORD + "\n")
    script.write_text(json.dumps({"Say it": SAID}))
    with ExitStack() as started:
        worker = started.enter_context(stack.start_scripted(folder, embedded_model, "--script", str(script)))
        flags = ["--rules", str(rules), "--rules-action", "block", "--max-body-bytes", str(BODY_LIMIT)]
        flags += ["--api-key", "first-key", "--api-key", "second-key"]
        gateway = started.enter_context(stack.start_gateway(folder, [worker], *flags))
        yield started.enter_context(client_of(gateway, "second-key"))


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"temperature": 3}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"tools": []}, "tools"),
    ({"n": 1000}, "n"),
    ({"seed": 1.5}, "seed"),
    ({"logit_bias": {"no id": 1}}, "logit_bias"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
]


@pytest.mark.parametrize(("change", "param"), BAD, ids=[str(change) for change, _ in BAD])
def test_a_bad_field_is_a_bad_request_that_names_it(
    client: OpenAI, change: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**CHAT | change)
    error = caught.value
    assert (error.status_code, error.type) == (400, "invalid_request_error")
    assert error.param == param
    assert param in error.message


def test_a_prompt_over_the_context_names_both_numbers(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**CHAT | {"max_tokens": 2_000_000})
    assert caught.value.code == "context_length_exceeded"
    assert "2000000" in caught.value.message
    assert str(client.models.retrieve(MODEL).max_model_len) in caught.value.message  # type: ignore[attr-defined]


def test_a_wrong_key_is_an_authentication_error_and_each_right_one_works(client: OpenAI) -> None:
    for key in ("wrong", "first-key2", "FIRST-KEY"):
        with pytest.raises(openai.AuthenticationError) as caught:
            client.with_options(api_key=key).chat.completions.create(**CHAT)
        assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
        assert caught.value.response.headers["www-authenticate"].startswith("Bearer")
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key=key).models.list()
    for key in ("first-key", "second-key"):
        answer = client.with_options(api_key=key).chat.completions.create(**CHAT)
        assert answer.choices[0].message.content


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    for call in (
        lambda: client.chat.completions.create(**CHAT | {"model": "nobody"}),
        lambda: client.completions.create(model="nobody", prompt="Hello"),
        lambda: client.models.retrieve("nobody"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert MODEL in caught.value.message, "it says what there is"


def test_a_body_over_the_limit_is_a_status_error_413(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=MODEL, prompt="a" * (BODY_LIMIT + 1))
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")
    assert str(BODY_LIMIT) in caught.value.message


def test_a_blocked_prompt_is_a_bad_request(client: OpenAI) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": part} for part in ("forb", "idden")]}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**CHAT | {"messages": messages})
    assert caught.value.code == "content_filter"
    assert WORD not in caught.value.message


def test_a_blocked_answer_ends_with_content_filter(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "Say it"}]
    request = CHAT | {"messages": messages, "max_tokens": 30}
    (choice,) = client.chat.completions.create(**request).choices
    assert choice.finish_reason == "content_filter"
    assert choice.message.content == SAID[: SAID.index(WORD)]
    assert choice.content_filter_results == {"blocked": True}

    streamed: dict[str, Any] = request | {"stream": True, "stream_options": {"include_usage": True}}
    *body, last = client.chat.completions.create(**streamed)
    finishes = [choice.finish_reason for chunk in body for choice in chunk.choices]
    assert finishes == [None] * (len(body) - 1) + ["content_filter"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == choice.message.content
    assert last.usage

    with (
        client.chat.completions.stream(**request) as stream,
        pytest.raises(openai.ContentFilterFinishReasonError),
    ):
        stream.get_final_completion()


def test_a_gateway_without_a_worker_is_an_internal_server_error_with_retry_after(
    gateway: StartGateway, tmp_path: Path
) -> None:
    started = gateway([f"unix://{tmp_path}/nobody.sock"], until_ready=False)
    with client_of(started) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(**CHAT)
        assert client.models.list().data == []
    error = caught.value
    assert (error.status_code, error.type, error.code) == (503, "overloaded_error", "no_worker")
    assert int(error.response.headers["retry-after"]) >= 1
    assert int(error.response.headers["retry-after-ms"]) >= 1


def test_a_full_queue_is_an_internal_server_error_with_retry_after(
    scripted_worker: StartWorker, gateway: StartGateway
) -> None:
    """One request runs, one waits; there is room for no more."""
    started = gateway([scripted_worker("--max-running", "1", "--step-ms", "50")], "--queue-max-requests", "1")
    endless = CHAT | {"max_tokens": 2000, "extra_body": {"ignore_eos": True}, "stream": True}
    with client_of(started) as client, client.chat.completions.create(**endless) as running:
        next(iter(running))  # it has its first token: it does not wait
        with client.chat.completions.with_streaming_response.create(
            **endless, extra_headers={"x-stainless-read-timeout": "0.2"}
        ) as waiting:  # it has begun, with a heartbeat
            assert waiting.status_code == 200
            with pytest.raises(openai.InternalServerError) as caught:
                client.chat.completions.create(**CHAT)
    assert (caught.value.status_code, caught.value.code) == (503, "queue_full")
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_a_client_with_retries_outlives_a_start(
    scripted_worker: StartWorker, gateway: StartGateway, tmp_path: Path
) -> None:
    """503 and `retry-after` are what the client needs to try again by itself."""
    started = gateway([f"unix://{tmp_path}/late.sock"], until_ready=False)
    with client_of(started) as client:
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(**CHAT)
        scripted_worker(name="late")
        answer = client.with_options(max_retries=8).chat.completions.create(**CHAT)
    assert answer.choices[0].message.content


def wait_for_end(worker: Worker) -> None:
    """A worker whose engine has died ends by itself."""
    wait_until(lambda: worker.process.returncode is not None, worker.process.log_text)
    assert worker.process.returncode != 0


def test_a_worker_that_dies_in_mid_stream_is_an_api_error(
    scripted_worker: StartWorker, gateway: StartGateway
) -> None:
    worker = scripted_worker("--die-after-tokens", "5", "--step-ms", "20")
    chunks: list[ChatCompletionChunk] = []
    with (
        client_of(gateway([worker])) as client,
        client.chat.completions.create(**CHAT, stream=True) as stream,
        pytest.raises(openai.APIError) as caught,
    ):
        chunks.extend(stream)
    assert any(chunk.choices[0].delta.content for chunk in chunks), "what came before the fault is delivered"
    assert not any(chunk.choices[0].finish_reason for chunk in chunks)
    assert not isinstance(caught.value, openai.APIStatusError), "in the stream, after a 200"
    assert (caught.value.type, caught.value.code) == ("engine_error", "worker_lost")
    wait_for_end(worker)


async def test_a_worker_that_dies_under_a_whole_answer_is_an_internal_server_error(
    scripted_worker: StartWorker, gateway: StartGateway
) -> None:
    worker = scripted_worker("--die-after-tokens", "5", "--step-ms", "20")
    url = f"{gateway([worker]).url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(**CHAT)
    assert (caught.value.status_code, caught.value.code) == (502, "worker_lost")
    wait_for_end(worker)

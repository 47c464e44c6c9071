"""The `openai` Python client on the real engine: chats, streams, logprobs, choices, stops, headers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from tests.stack import Gateway

pytestmark = pytest.mark.engine

MODEL = "smollm2-135m-instruct"
LIMIT_S = 90.0
COUNT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Count from one to ten."}]
SKY: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Explain why the sky is blue."}]


@pytest.fixture(scope="module")
def client(engine_gateway: Gateway) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{engine_gateway.url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0
    ) as client:
        for messages in (COUNT, SKY):  # from here on each finds the same part of it in the prefix cache
            greedy(client, messages, 1)
        yield client


def greedy(client: OpenAI, messages: list[ChatCompletionMessageParam], max_tokens: int) -> str:
    """The whole answer at temperature 0: on an idle engine the same each time."""
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=max_tokens
    )
    assert answer.choices[0].message.content
    return answer.choices[0].message.content


def test_a_chat_of_several_turns_grows_with_each_turn(client: OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = []
    num_prompt_tokens = 0
    for question in ("What is the capital of France?", "And of Italy?", "Which is larger?"):
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=12)
        (choice,) = answer.choices
        assert (answer.object, answer.model) == ("chat.completion", MODEL)
        assert choice.message.role == "assistant"
        assert choice.finish_reason in ("stop", "length")
        assert answer.usage
        assert answer.usage.prompt_tokens > num_prompt_tokens
        assert 1 <= answer.usage.completion_tokens <= 12
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        num_prompt_tokens = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
        messages.append({"role": "assistant", "content": choice.message.content})
    assert "Paris" in str(messages[1]), "the model knows the first one"


def check_stream(chunks: list[ChatCompletionChunk]) -> str:
    """The text of a whole stream with usage; its chunks are as OpenAI's."""
    *body, last = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert body[0].choices[0].delta.role == "assistant"
    assert not any(chunk.choices[0].delta.role for chunk in body[1:])
    assert [chunk.choices[0].finish_reason for chunk in body] == [None] * (len(body) - 1) + ["length"]
    assert last.choices == []
    assert last.usage
    assert last.usage.completion_tokens == 16
    assert not any(chunk.usage for chunk in body)
    return "".join(chunk.choices[0].delta.content or "" for chunk in body)


def test_a_stream_has_the_text_of_the_whole_answer_and_its_usage(client: OpenAI) -> None:
    with client.chat.completions.create(
        model=MODEL,
        messages=COUNT,
        temperature=0,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert check_stream(chunks) == greedy(client, COUNT, 16)
    assert len(chunks) > 8, "a stream in few pieces"


async def test_the_async_client_streams_too(engine_gateway: Gateway) -> None:
    async with AsyncOpenAI(base_url=f"{engine_gateway.url}/v1", api_key="none", timeout=LIMIT_S) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=COUNT,
            temperature=0,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
        text = check_stream([chunk async for chunk in stream])
        whole = await client.chat.completions.create(
            model=MODEL, messages=COUNT, temperature=0, max_tokens=16
        )
        assert whole.choices[0].message.content == text
        async with client.chat.completions.stream(
            model=MODEL, messages=COUNT, temperature=0, max_tokens=16
        ) as helper:
            deltas = [event.delta async for event in helper if event.type == "content.delta"]
        assert "".join(deltas) == text


def test_the_stream_helper_collects_the_answer(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=COUNT,
        temperature=0,
        max_tokens=24,
        stop="3",
        stream_options={"include_usage": True},
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event.delta for event in events if event.type == "content.delta"]
    (done,) = [event.content for event in events if event.type == "content.done"]
    assert "".join(deltas) == done == final.choices[0].message.content
    assert done
    assert final.choices[0].finish_reason == "stop"  # the helper raises for `length`
    assert final.usage
    assert 1 < final.usage.completion_tokens < 24


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat_spell_its_text(client: OpenAI, stream: bool) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Repeat after me: 🎉🚀 Ok"}]
    options: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 10}
    options |= {"logprobs": True, "top_logprobs": 2}
    if stream:
        with client.chat.completions.create(**options, stream=True) as chunks:
            choices = [chunk.choices[0] for chunk in chunks]
        text = "".join(choice.delta.content or "" for choice in choices)
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
    else:
        (choice,) = client.chat.completions.create(**options).choices
        assert choice.logprobs
        text, entries = choice.message.content, choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == text
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        # Greedy takes the likeliest; of two that are equally likely, either may be sampled.
        assert entry.logprob == entry.top_logprobs[0].logprob


def test_logprobs_of_a_completion_have_the_legacy_shape(client: OpenAI) -> None:
    prompt = "def reverse(items):\n    return"
    answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8, logprobs=2)
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert logprobs
    assert logprobs.tokens
    assert logprobs.token_logprobs
    assert logprobs.text_offset
    assert logprobs.top_logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 8
    for token, offset, logprob, top in zip(
        logprobs.tokens, logprobs.text_offset, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert choice.text[offset:].startswith(token)
        assert logprob == max(top.values()) == top[token]
        assert len(top) == 2


def test_two_choices_with_a_seed_differ(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=COUNT, n=2, seed=7, temperature=1.5, max_tokens=16
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    first, second = (choice.message.content for choice in answer.choices)
    assert first
    assert second
    assert first != second
    with client.chat.completions.create(
        model=MODEL, messages=COUNT, n=2, seed=7, temperature=1.5, max_tokens=16, stream=True
    ) as stream:
        choices = [choice for chunk in stream for choice in chunk.choices]
    for index in (0, 1):
        own = [choice for choice in choices if choice.index == index]
        assert own[0].delta.role == "assistant"
        assert own[-1].finish_reason


def stop_across_tokens(tokens: list[str]) -> tuple[str, int]:
    """A string of the end of one token and the beginning of the next, and where it first stands."""
    text = "".join(tokens)
    end = 0
    for left, right in pairwise(tokens):
        end += len(left)
        stop = left[-1:] + right[:2]
        if end > 4 and len(stop) == 3 and text.find(stop) == end - 1:
            return stop, end - 1
    raise AssertionError(f"no boundary of two tokens is unique in {tokens}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_ends_the_answer_before_it(client: OpenAI, stream: bool) -> None:
    known = client.chat.completions.create(
        model=MODEL, messages=SKY, temperature=0, max_tokens=24, logprobs=True
    ).choices[0]
    assert known.logprobs
    stop, start = stop_across_tokens([entry.token for entry in known.logprobs.content or ()])
    options: dict[str, Any] = {"model": MODEL, "messages": SKY, "temperature": 0, "max_tokens": 24}
    options |= {"stop": ["never said", stop]}
    if stream:
        with client.chat.completions.create(**options, stream=True) as chunks:
            choices = [chunk.choices[0] for chunk in chunks]
        text, last = "".join(choice.delta.content or "" for choice in choices), choices[-1]
    else:
        (last,) = client.chat.completions.create(**options).choices
        text = last.message.content
    assert text == (known.message.content or "")[:start]
    assert last.finish_reason == "stop"
    assert last.stop_reason == stop  # vLLM's field


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "headrace")
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("no/such model")
    assert caught.value.code == "model_not_found"


def test_headers_of_an_answer(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=COUNT, max_tokens=2, extra_headers={"x-request-id": "my-request.1"}
    )
    assert raw.headers["x-request-id"] == "my-request.1"
    assert raw.headers["content-type"] == "application/json"
    assert {"parse", "tokenize", "queue"} <= stages(raw.headers["server-timing"])
    assert raw.parse()._request_id == "my-request.1"


def test_headers_of_a_stream(client: OpenAI) -> None:
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=COUNT, max_tokens=2, stream=True, extra_headers={"x-request-id": "spaces in it"}
    ) as raw:
        headers = raw.headers
        raw.read()
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-request-id"] not in ("", "spaces in it"), "not a sane id: ours instead"
    assert {"parse", "tokenize", "queue"} <= stages(headers["server-timing"])
    assert "content-encoding" not in headers


def stages(server_timing: str) -> set[str]:
    """The names in a `server-timing` header, each of which must have a duration."""
    parts = [part.strip().split(";dur=") for part in server_timing.split(",")]
    assert all(float(duration) >= 0 for _, duration in parts)
    return {name for name, _ in parts}

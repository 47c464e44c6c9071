"""Chats and completions over a server that takes and gives text, from the route to the last byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from filters.rules import Rule
from gateway.models import TextModel
from gateway.writers import SseWriter
from pipeline.errors import EngineFailed, WorkerLost
from pipeline.events import REASONING, TOOL_ARGUMENTS, TOOL_NAME, Fragment
from pipeline.inbound import InboundOptions
from pipeline.text_inbound import TextInbound
from pipeline.values import ModelInfo, TextUsage
from tests.gateway.answering import MODEL, Client, TextStream, until
from tests.gateway.asgi import Request
from tests.gateway.serving import CHAT, RAW, Service, chat, raw, service

MASK = Rule("m", ("敏感词",), "mask", replacement="*")
BLOCK = Rule("b", ("敏感词",), "block")
USAGE: Final = TextUsage(prompt_tokens=11, completion_tokens=5, cached_tokens=8)
INFO = ModelInfo(MODEL, 0, 1, {}, "f", is_text=True)


@asynccontextmanager
async def text_service(**options: Any) -> AsyncIterator[Service]:
    async with service(loaded=False, **options) as made:
        made.models._models[MODEL] = TextModel(INFO, TextInbound(INFO, InboundOptions()))
        yield made


async def asked(
    made: Service, body: bytes, route: str = CHAT, num: int = 1
) -> tuple[Request, list[TextStream]]:
    request = Request(route, body)
    request.start(made)
    await until(lambda: len(made.engine.text_streams) >= num)
    return request, made.engine.text_streams


async def logged(made: Service) -> Any:
    """The request's line, which comes after its last byte."""
    await until(lambda: made.lines)
    return made.lines[0]


async def ended(client: Client) -> Client:
    await until(lambda: client.is_ended)
    return client


async def test_a_chat_streams_what_the_server_says_with_its_usage() -> None:
    async with text_service() as made:
        body = chat("hi", stream=True, stream_options={"include_usage": True}, odd=[1], top_p=0.5)
        request, (stream,) = await asked(made, body)
        assert stream.call.fields == {"messages": [{"role": "user", "content": "hi"}], "top_p": 0.5}
        stream.say("Hel")
        stream.say("lo")
        stream.end("length", None, USAGE)
        client = await ended(request.client)
        assert client.is_done
        assert client.text() == "Hello"
        assert client.finishes() == [(0, "length")]
        usage = client.chunks[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (11, 5)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 8
        line = await logged(made)
    assert (line["prompt_tokens"], line["output_tokens"], line["ended"]) == (11, 5, "complete")
    assert stream.num_aborts == 0


async def test_without_the_servers_usage_none_is_made_up() -> None:
    async with text_service() as made:
        request, (stream,) = await asked(made, chat("hi"))
        stream.say("Hello")
        stream.end()
        client = await ended(request.client)
        assert client.json["usage"] is None
        assert client.json["choices"][0]["message"]["content"] == "Hello"
        assert (await logged(made))["prompt_tokens"] is None


async def test_reasoning_and_tool_calls_are_kept() -> None:
    async with text_service() as made:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        request, (stream,) = await asked(made, chat("hi", tools=tools))
        assert stream.call.fields["tools"] == tools
        stream.say(Fragment(REASONING, "hm"))
        stream.say(Fragment(TOOL_NAME, "f", 0, "c1"), Fragment(TOOL_ARGUMENTS, '{"a"', 0))
        stream.say(Fragment(TOOL_ARGUMENTS, ": 1}", 0))
        stream.end("tool_calls", None, TextUsage(3, 9, 0, reasoning_tokens=4))
        document = (await ended(request.client)).json
        (choice,) = document["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning"] == "hm"
        (call,) = choice["message"]["tool_calls"]
        assert call == {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        assert document["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


@pytest.mark.parametrize("pieces", [["x敏感词y"], ["x敏", "感词y"], [*"x敏感词y"]])
async def test_a_rule_masks_across_the_servers_events(pieces: list[str]) -> None:
    async with text_service(rules=[MASK]) as made:
        request, (stream,) = await asked(made, chat("hi", stream=True))
        for piece in pieces:
            stream.say(piece)
        stream.end()
        assert (await ended(request.client)).text() == "x***y"


async def test_content_after_the_first_goes_past_the_writers_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    through: list[str] = []
    text = SseWriter.text

    def noted(self: SseWriter, index: int, said: str) -> None:
        through.append(said)
        text(self, index, said)

    monkeypatch.setattr(SseWriter, "text", noted)
    async with text_service() as made:
        request, (stream,) = await asked(made, chat("hi", stream=True))
        for said in ("a", "b", "", "c"):
            stream.say(said, num_tokens=2)
        stream.say(Fragment(REASONING, "hm"))
        stream.say("d", Fragment(REASONING, "so"), "e")
        stream.say("f")
        stream.end()
        client = await ended(request.client)
        assert client.text() == "abcdef"
        deltas = [choice["delta"] for chunk in client.chunks for choice in chunk["choices"]]
        assert [delta["reasoning"] for delta in deltas if "reasoning" in delta] == ["hm", "so"]
        assert (await logged(made))["output_tokens"] == 11
    assert through == ["a", "d", "e"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_hit_after_the_first_text_is_told_once(stream: bool) -> None:
    async with text_service(rules=[MASK]) as made:
        request, (said,) = await asked(made, chat("hi", stream=stream))
        for piece in "xy敏感词z":
            said.say(piece)
        said.end()
        client = await ended(request.client)
        text = client.text() if stream else client.json["choices"][0]["message"]["content"]
        assert text == "xy***z"
        assert (await logged(made))["rule_hits"] == 1
        assert len(made.audit_lines) == 1


async def test_text_held_after_the_first_is_decided_in_time() -> None:
    """Its time runs from when it was first held, not from the last text before."""
    async with text_service(rules=[MASK]) as made:
        request, (stream,) = await asked(made, chat("hi", stream=True))
        choice: Any = stream.sink
        stream.say("x")
        made.engine.now_s += 5
        since_s = made.engine.now_s
        stream.say("敏")
        made.engine.now_s += 2
        stream.say("感")
        choice.expire_hold(since_s + 2, 2.5)
        assert not request.client.is_ended
        choice.expire_hold(since_s + 2, 2.0)
        client = await ended(request.client)
        assert client.text() == "x"
        assert client.finishes() == [(0, "content_filter")]
        assert stream.num_aborts == 1


async def test_a_block_stops_the_server_and_counts_nothing_that_it_was_not_told() -> None:
    async with text_service(rules=[BLOCK]) as made:
        request, (stream,) = await asked(
            made, chat("hi", stream=True, stream_options={"include_usage": True})
        )
        stream.say("fine ")
        stream.say("敏感词")
        client = await ended(request.client)
        assert stream.num_aborts == 1
        assert client.text() == "fine "
        assert client.finishes() == [(0, "content_filter")]
        assert client.chunks[-1]["usage"] is None


async def test_choices_are_streams_of_their_own_and_share_a_prompt() -> None:
    async with text_service() as made:
        request, streams = await asked(made, chat("hi", n=2, seed=1), num=2)
        assert [stream.call.fields["seed"] for stream in streams] == [1, 2]
        for stream, text in zip(streams, ("a", "b"), strict=True):
            stream.say(text)
            stream.end("stop", None, TextUsage(7, 1))
        document = (await ended(request.client)).json
        assert [choice["message"]["content"] for choice in document["choices"]] == ["a", "b"]
        assert document["usage"]["prompt_tokens"] == 7
        assert document["usage"]["completion_tokens"] == 2


async def test_prompts_of_a_completion_each_count() -> None:
    async with text_service() as made:
        request, streams = await asked(made, raw(["one", "two"], max_tokens=4), RAW, num=2)
        assert [stream.call.fields["prompt"] for stream in streams] == ["one", "two"]
        for stream in streams:
            stream.say("x")
            stream.end("length", None, TextUsage(3, 1))
        document = (await ended(request.client)).json
        assert document["usage"]["prompt_tokens"] == 6
        assert [choice["text"] for choice in document["choices"]] == ["x", "x"]


async def test_a_server_lost_before_any_text_is_replaced_and_after_it_is_an_error() -> None:
    async with text_service() as made:
        request, (first,) = await asked(made, chat("hi", stream=True))
        first.fail(WorkerLost("the server is gone"))
        second = made.engine.text_streams[1]
        assert second.call is first.call
        second.say("He")
        second.fail(WorkerLost("the server is gone"))
        client = await ended(request.client)
        assert client.text() == "He"
        assert not client.is_done
        assert client.chunks[-1]["error"]["code"] == "worker_lost"
        assert len(made.engine.text_streams) == 2
        assert (await logged(made))["resubmitted"] == 1


async def test_a_failure_before_the_first_text_is_a_status() -> None:
    async with text_service() as made:
        request, (stream,) = await asked(made, chat("hi", stream=True))
        stream.fail(EngineFailed("The server failed."))
        assert (await ended(request.client)).status == 502


async def test_a_client_that_leaves_stops_the_server() -> None:
    async with text_service() as made:
        request, (stream,) = await asked(made, chat("hi", stream=True))
        stream.say("He")
        request.disconnect()
        await until(lambda: stream.num_aborts)
        assert (await logged(made))["ended"] == "client_closed"


async def test_what_needs_tokens_is_refused_by_its_name() -> None:
    async with text_service() as made:
        client = await Request(CHAT, chat("hi", logprobs=True)).run(made)
        assert client.status == 400
        assert client.json["error"]["param"] == "logprobs"
        assert made.engine.text_streams == []


async def test_an_answer_that_breaks_its_format_is_an_error() -> None:
    async with text_service() as made:
        body = chat("hi", response_format={"type": "json_object"})
        request, (stream,) = await asked(made, body)
        assert stream.call.fields["response_format"] == {"type": "json_object"}
        stream.say("no json")
        await until(lambda: stream.num_aborts or request.client.is_ended)
        client = await ended(request.client)
        assert client.status == 502
        assert json.loads(client.body)["error"]["code"] == "invalid_answer"


async def test_a_resumable_stream_over_text() -> None:
    async with text_service() as made:
        request = Request("/v1/streams", chat("hi"))
        created = await request.run(made)
        assert created.status == 201, created.body
        await until(lambda: made.engine.text_streams)
        (stream,) = made.engine.text_streams
        stream.say("Hello")
        stream.end("stop", None, USAGE)
        location = created.json["url"]
        path, _, query = location.partition("?")
        events = await Request(path, b"", method="GET", query=query.encode()).run(made)
        assert b"Hello" in events.body
        await asyncio.sleep(0)

"""What a writer makes of an answer's events: SSE with its head, or one JSON document."""

from __future__ import annotations

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.frames import json_bytes
from gateway.writers import send_error
from pipeline.errors import BadKey, QueueFull
from pipeline.values import Dropped
from tests.gateway.answering import CREATED, REQUEST_ID, Case, ids_of

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
    "x-request-id": REQUEST_ID,
    "server-timing": "parse;dur=0.250, scan;dur=1.000, queue;dur=1.500",
}


def case(**options: bool | int) -> Case:
    made = Case(**options)  # type: ignore[arg-type]
    made.record.stages_s = {"parse": 0.00025, "scan": 0.001}
    return made.start()


async def test_stream_has_its_headers_and_no_length() -> None:
    one = case()
    one.streams[0].say("a", "stop")
    assert one.client.headers == STREAM_HEADERS


@pytest.mark.parametrize("stream", [True, False])
async def test_head_says_what_a_context_policy_dropped(stream: bool) -> None:
    one = case(stream=stream)
    one.record.dropped = Dropped("drop_oldest", 4, 1234)
    one.streams[0].say("a", "stop")
    assert one.client.headers["x-headrace-context"] == "drop_oldest; messages=4; tokens=1234"


async def test_head_of_a_heartbeat_does_not_know_the_queue() -> None:
    one = case()
    one.writer.ping()
    one.streams[0].say("a", "stop")
    assert one.client.headers["server-timing"] == "parse;dur=0.250, scan;dur=1.000"
    assert [message["type"] for message in one.client.messages].count("http.response.start") == 1
    assert one.client.bodies[0] == b": ping\n\n"


async def test_every_frame_of_a_stream_has_the_same_identity() -> None:
    one = case(include_usage=True, num_choices=2)
    one.streams[0].say("a", "stop")
    one.streams[1].say("b", "stop")
    seen = {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in one.client.chunks}
    assert seen == {(f"chatcmpl-{REQUEST_ID}", "chat.completion.chunk", CREATED, "m")}


async def test_usage_is_the_last_chunk_and_only_there() -> None:
    one = case(include_usage=True)
    one.streams[0].say("a")
    one.streams[0].say("b", "stop")
    *others, last = one.client.chunks
    assert all("usage" not in chunk for chunk in others)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert "timings" not in last
    assert one.client.is_done


async def test_without_usage_the_finish_is_last() -> None:
    one = case()
    one.streams[0].say("a", "stop")
    assert one.client.chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert b"usage" not in one.client.body


async def test_continuous_usage_is_on_every_chunk() -> None:
    one = case(include_usage=True, continuous_usage=True)
    for text in ("a", "b", "c"):
        one.streams[0].say(text)
    one.streams[0].say("d", "length")
    counts = [chunk["usage"]["completion_tokens"] for chunk in one.client.chunks]
    assert counts == [0, 1, 2, 3, 4, 4, 4]
    for chunk in one.client.chunks:
        assert chunk["usage"]["total_tokens"] == 5 + chunk["usage"]["completion_tokens"]
        ChatCompletionChunk.model_validate_json(json_bytes(chunk), strict=True)


async def test_timings_come_with_the_usage() -> None:
    one = case(include_usage=True, include_timings=True)
    one.later(0.25)
    one.streams[0].say("a")
    one.later(0.5)
    one.streams[0].say("b", "length")
    assert one.client.chunks[-1]["timings"] == {
        "parse_ms": 0.25,
        "scan_ms": 1.0,
        "queue_ms": 1.5,
        "prefill_ms": 2.5,
        "ttft_ms": 250.0,
        "tpot_ms": 500.0,
        "total_ms": 750.0,
        "cached_tokens": 3,
    }


async def test_heartbeats_are_whole_comments() -> None:
    one = case()
    one.streams[0].say("a")
    one.writer.ping()
    one.streams[0].say("b", "stop")
    assert one.client.frames.count(b": ping") == 1
    assert one.client.text() == "ab"


async def test_error_before_the_head_has_no_stream_headers() -> None:
    one = case()
    one.streams[0].fail(QueueFull("full"))
    one.streams[1].fail(QueueFull("full"))
    assert one.client.headers == {
        "content-type": "application/json",
        "retry-after": "1",
        "retry-after-ms": "1000",
        "x-request-id": REQUEST_ID,
        "content-length": str(len(one.client.body)),
    }


async def test_whole_answer_is_one_document() -> None:
    one = case(stream=False, num_choices=2)
    one.streams[1].say("wor")
    one.streams[0].say("hel", logprobs=True)
    one.streams[1].say("ld", "length")
    assert one.client.messages == []
    one.streams[0].say("lo", "stop", logprobs=True)
    assert one.client.headers == {
        "content-type": "application/json",
        "x-request-id": REQUEST_ID,
        "server-timing": STREAM_HEADERS["server-timing"],
        "content-length": str(len(one.client.body)),
    }
    assert one.client.is_ended
    answer = ChatCompletion.model_validate_json(one.client.body, strict=True)
    assert [choice.message.content for choice in answer.choices] == ["hello", "world"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert len(answer.choices[0].logprobs.content) == len(ids_of("hel") + ids_of("lo"))
    assert answer.choices[1].logprobs is None
    assert one.record.status == 200


async def test_raw_completions_have_no_opening() -> None:
    one = case(completion=True)
    one.streams[0].say("a", "length")
    assert [chunk["choices"][0]["text"] for chunk in one.client.chunks] == ["a", ""]
    assert one.client.chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert one.client.is_done


@pytest.mark.parametrize(("error", "status"), [(BadKey(), 401), (RuntimeError("user text"), 500)])
async def test_an_error_is_a_whole_response(error: Exception, status: int) -> None:
    one = case()
    send_error(one.outlet, error, one.record)
    assert (one.client.status, one.record.status) == (status, status)
    assert one.client.headers["x-request-id"] == REQUEST_ID
    assert one.client.is_ended
    assert "user text" not in one.client.body.decode()
    assert set(one.client.json["error"]) == {"message", "type", "param", "code"}

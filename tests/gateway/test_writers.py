"""What a writer makes of an answer's events: SSE with its head, or one JSON document."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.frames import ChatShape, data_frame, json_bytes
from gateway.json_writer import JsonWriter
from gateway.outlet import Outlet
from gateway.record import RequestRecord
from gateway.writers import SseWriter, Writer, send_error
from pipeline.errors import BadKey, QueueFull
from pipeline.events import CONTENT, REASONING, Finish, PositionLogprobs, TextDelta, ToolCallDelta
from pipeline.values import Delivery, Dropped, TokenLogprobs
from tests.gateway.answering import CREATED, REQUEST_ID, Case, Client, ids_of, vocabulary

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


# -- channels ------------------------------------------------------------------------------------------------

Event = TextDelta | ToolCallDelta
SHAPE = ChatShape(REQUEST_ID, CREATED, "m")
ENTRY = PositionLogprobs(7, 0, 1, TokenLogprobs([7, 8], [-0.5, -1.5], 1))
PLAIN = Delivery(stream=True)
CONTINUOUS = Delivery(stream=True, include_usage=True, continuous_usage=True)
CALL = [ToolCallDelta(0, "f", "", "x"), ToolCallDelta(0, None, '{"a":'), ToolCallDelta(0, None, "1}")]
PIECES = (
    "a",
    "b c",
    "流水",
    "👋",
    "\u2028",
    "\u2029x",
    "\u0085",
    '"',
    "\\",
    "\n\ndata: [DONE]\n\n",
    "",
    "</b>",
)


def written(
    events: Sequence[Event],
    finish: Finish | None = None,
    shape: ChatShape = SHAPE,
    kind: type[SseWriter] | type[JsonWriter] = SseWriter,
    delivery: Delivery = PLAIN,
) -> tuple[Client, Writer]:
    """What a client gets of an answer of one choice."""
    client = Client()
    record = RequestRecord(REQUEST_ID, "/v1/chat/completions", 0.0, model="m")
    outlet = Outlet(client, 1 << 20, lambda reason: None)
    writer: Writer = (
        JsonWriter(outlet, shape, vocabulary(), record, 1)
        if issubclass(kind, JsonWriter)
        else kind(outlet, shape, vocabulary(), record, delivery, 1, keeps_text=True)
    )
    writer.first()
    for event in events:
        if isinstance(event, TextDelta) and event.channel == CONTENT and not event.logprobs:
            writer.text(0, event.text)
        else:
            writer.delta(0, event)
    writer.finished(0, finish or Finish("stop"))
    writer.end(dict)
    return client, writer


def whole(*events: Event, finish: Finish | None = None, shape: ChatShape = SHAPE) -> ChatCompletion:
    client, _ = written(events, finish, shape, JsonWriter)
    return ChatCompletion.model_validate_json(client.body, strict=True)


def accumulated(client: Client) -> ChatCompletion:
    """What OpenAI's own client makes of a stream."""
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in client.chunks:
        parsed = ChatCompletionChunk.model_validate_json(json_bytes(chunk), strict=True)
        assert parsed.to_dict(mode="json", exclude_unset=True) == chunk
        list(state.handle_chunk(parsed))
    return state.get_final_completion()


def random_events(rng: random.Random) -> list[Event]:
    """Text of both channels in turn, and calls whose pieces stay together."""
    events: list[Event] = []
    num_calls = 0
    for _ in range(rng.randrange(6)):
        texts = ["".join(rng.choices(PIECES, k=rng.randrange(3))) for _ in range(rng.randrange(5))]
        channel = rng.choice((CONTENT, REASONING, "call"))
        if channel == "call":
            call_id = rng.choice((None, f"id {num_calls}"))
            events.append(ToolCallDelta(num_calls, rng.choice(PIECES) + "f", "", call_id))
            events += [ToolCallDelta(num_calls, None, text) for text in texts]
            num_calls += 1
        else:
            events += [TextDelta(channel, text, [ENTRY] * rng.choice((0, 0, 1))) for text in texts]
    return events


def joined(events: Sequence[Event]) -> dict[str, Any]:
    """What a message holds, by the events themselves."""
    names = {event.call: event.name for event in events if isinstance(event, ToolCallDelta) and event.name}
    return {
        channel: "".join(e.text for e in events if isinstance(e, TextDelta) and e.channel == channel)
        for channel in (CONTENT, REASONING)
    } | {
        "calls": [
            (name, "".join(e.arguments for e in events if isinstance(e, ToolCallDelta) and e.call == call))
            for call, name in names.items()
        ],
        "logprobs": sum(len(e.logprobs) for e in events if isinstance(e, TextDelta)),
    }


def held(answer: ChatCompletion) -> dict[str, Any]:
    """The same of what a client has."""
    choice = answer.choices[0]
    message = choice.message
    calls = [call for call in message.tool_calls or () if call.type == "function"]
    entries = choice.logprobs.content if choice.logprobs is not None else None
    return {
        "content": message.content or "",
        "reasoning": (message.model_extra or {}).get("reasoning", ""),
        "calls": [(call.function.name, call.function.arguments) for call in calls],
        "logprobs": len(entries or ()),
    }


@pytest.mark.parametrize("seed", range(40))
async def test_every_channel_arrives_whole_in_a_stream_and_in_a_document(seed: int) -> None:
    events = random_events(random.Random(seed))
    expected = joined(events)
    assert held(whole(*events)) == expected
    for delivery in (PLAIN, CONTINUOUS):
        client, writer = written(events, delivery=delivery)
        assert client.is_done
        assert held(accumulated(client)) == expected
        assert writer.num_frames == len(events) + 3  # opening, finish, end
        assert all(len(frame.decode().splitlines()) == 1 for frame in client.frames)


async def test_quick_frames_are_those_of_the_shape() -> None:
    events: list[Event] = [
        TextDelta(REASONING, "h\u2028m"),
        TextDelta(CONTENT, "a"),
        TextDelta(REASONING, "x"),
        *CALL,
    ]
    client, _ = written(events)
    choices = [
        SHAPE.opening(0),
        *(
            SHAPE.tool_call(0, event)
            if isinstance(event, ToolCallDelta)
            else SHAPE.delta(0, event.text, None, event.channel)
            for event in events
        ),
        SHAPE.ending(0, Finish("stop")),
    ]
    assert client.bodies[:-1] == [data_frame(SHAPE.chunk([choice])) for choice in choices]


async def test_each_choice_and_each_call_has_its_own_number() -> None:
    one = case(num_choices=2)
    one.writer.first()
    for index in (1, 0):
        one.writer.delta(index, TextDelta(REASONING, "hm"))
        for call in range(2):
            one.writer.delta(index, ToolCallDelta(call, "f", ""))
            one.writer.delta(index, ToolCallDelta(call, None, "{"))
            one.writer.delta(index, ToolCallDelta(call, None, "}"))
    choices = [chunk["choices"][0] for chunk in one.client.chunks[2:]]
    assert [choice["index"] for choice in choices] == [1] * 7 + [0] * 7
    pieces = [choice["delta"]["tool_calls"][0] for choice in choices if "tool_calls" in choice["delta"]]
    assert [piece["index"] for piece in pieces] == [0, 0, 0, 1, 1, 1] * 2
    assert ["id" in piece and "type" in piece for piece in pieces] == [True, False, False] * 4
    assert ["name" in piece["function"] for piece in pieces] == [True, False, False] * 4


@pytest.mark.parametrize("kind", [SseWriter, JsonWriter])
async def test_a_call_keeps_its_id_or_gets_one(kind: type[SseWriter] | type[JsonWriter]) -> None:
    events = [ToolCallDelta(0, "f", "{}", "own"), ToolCallDelta(1, "f", "{}"), ToolCallDelta(2, "f", "{}")]
    client, _ = written(events, kind=kind)
    own, *made = re.findall(rb'"id":"([^"]*)","type":"function"', client.body)
    assert own == b"own"
    assert all(re.fullmatch(rb"call_[0-9a-f]{24}", call_id) for call_id in made)
    assert len(set(made)) == 2


async def test_reasoning_has_its_older_name_only_if_asked_for() -> None:
    events = [TextDelta(REASONING, "h"), TextDelta(REASONING, "m")]
    both = ChatShape(REQUEST_ID, CREATED, "m", reasoning_content=True)
    for shape, names in ((SHAPE, {"reasoning"}), (both, {"reasoning", "reasoning_content"})):
        client, _ = written(events, shape=shape)
        for answer in (accumulated(client), whole(*events, shape=shape)):
            extra = answer.choices[0].message.model_extra or {}
            assert extra == dict.fromkeys(names, "hm")


async def test_content_is_null_only_beside_calls() -> None:
    assert whole(*CALL).choices[0].message.content is None
    assert whole(TextDelta(CONTENT, "a"), *CALL).choices[0].message.content == "a"
    assert whole(TextDelta(REASONING, "hm")).choices[0].message.content == ""


async def test_a_problem_of_the_format_is_told_beside_the_finish() -> None:
    finish = Finish("stop", None, "not JSON")
    client, _ = written([TextDelta(CONTENT, "{")], finish)
    results = {"valid": False, "problem": "not JSON"}
    assert [chunk["choices"][0].get("format_results") for chunk in client.chunks] == [None, None, results]
    assert whole(TextDelta(CONTENT, "{"), finish=finish).choices[0].to_dict()["format_results"] == results


async def test_continuous_usage_is_on_the_frames_of_every_channel() -> None:
    client, _ = written([TextDelta(REASONING, "hm"), *CALL], delivery=CONTINUOUS)
    assert all("usage" in chunk for chunk in client.chunks)


async def test_usage_has_the_reasoning_tokens() -> None:
    one = case(include_usage=True)
    one.record.reasoning_tokens = 2
    one.streams[0].say("a", "stop")
    assert one.client.chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


async def test_what_is_taken_back_is_gone_in_every_channel() -> None:
    one = case(stream=False)
    events: list[Event] = [TextDelta(REASONING, "hm"), TextDelta(CONTENT, "a", [ENTRY]), *CALL]
    for event in events:
        one.writer.delta(0, event)
    assert one.writer.take_back(0)
    one.streams[0].say("b", "stop")
    choice = one.client.json["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "b", "refusal": None}
    assert choice["logprobs"] is None


@pytest.mark.parametrize("kind", [SseWriter, JsonWriter])
@pytest.mark.parametrize(
    ("events", "kept"),
    [
        ([TextDelta(CONTENT, "a"), TextDelta(CONTENT, "b", [ENTRY])], "ab"),
        ([TextDelta(REASONING, "hm"), TextDelta(CONTENT, "a")], "a"),
        ([TextDelta(CONTENT, "a"), *CALL], ""),
    ],
)
async def test_kept_text_is_what_a_plain_message_is_sent_back_with(
    kind: type[SseWriter] | type[JsonWriter], events: list[Event], kept: str
) -> None:
    _, writer = written(events, kind=kind)
    assert writer.whole_text() == kept

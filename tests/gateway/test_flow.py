"""The twelve steps in their order: what is refused where, what the engine is asked, and how it all ends."""

from __future__ import annotations

import asyncio
import json
from array import array

import pytest

from filters.rules import Rule
from gateway.answer import AnswerLimits
from gateway.flow import BodyLimits
from pipeline.encoding import MAX_INLINE_CHARACTERS
from pipeline.errors import HeadraceError, NoWorker, QueueFull, UnknownModel
from pipeline.values import MediaKind, MediaSupport
from tests.gateway.answering import ids_of, until
from tests.gateway.asgi import Request
from tests.gateway.serving import CHAT, RAW, Service, chat, raw, service

BLOCK = Rule("b", ("敏感词",), "block")
MASK = Rule("m", ("敏感词",), "mask", replacement="*")


async def submitted(made: Service, num: int = 1) -> None:
    await until(lambda: len(made.engine.streams) >= num)


# -- refusals, in order --------------------------------------------------------------------------------------


async def test_key_is_asked_for_before_anything_is_read() -> None:
    async with service(keys=["secret"]) as made:
        request = Request(CHAT, b"{", headers={"content-type": "text/plain", "content-length": "99999999999"})
        client = await request.run(made)
        assert client.status == 401
        assert client.headers["www-authenticate"] == 'Bearer realm="headrace"'
        assert request.num_received == 0
        good = Request(CHAT, chat(), headers={"authorization": "Bearer secret"})
        task = good.start(made)
        await submitted(made)
        made.engine.streams[0].say("a", "stop")
        await asyncio.wait_for(task, 5)
        assert good.client.status == 200


@pytest.mark.parametrize(
    ("headers", "body", "status", "param"),
    [
        ({"content-type": "text/plain"}, chat(), 400, "content-type"),
        ({}, b"{", 400, None),
        ({}, b"", 400, None),
        ({}, chat(temperature="hot"), 400, "temperature"),
        ({}, chat("x" * 3000), 413, None),
        (
            {},
            json.dumps({"model": "nobody", "messages": [{"role": "user", "content": "x"}]}).encode(),
            404,
            "model",
        ),
        ({}, chat("a\0b"), 400, "messages[0].content"),
        ({}, chat(max_tokens=70000), 400, "messages"),
    ],
    ids=["type", "syntax", "empty", "value", "size", "model", "character", "context"],
)
async def test_bad_requests_are_named(
    headers: dict[str, str], body: bytes, status: int, param: str | None
) -> None:
    async with service(body=BodyLimits(max_bytes=2000)) as made:
        client = await Request(CHAT, body, headers=headers).run(made)
        assert client.status == status
        assert client.json["error"]["param"] == param
        assert client.is_ended
        assert made.engine.streams == []
        assert len(made.flow.open) == 0


async def test_before_the_first_worker_the_model_is_not_unknown() -> None:
    async with service(loaded=False) as made:
        client = await Request(CHAT, chat()).run(made)
        assert (client.status, client.json["error"]["code"]) == (503, "no_worker")
        assert client.headers["retry-after"] == "1"


@pytest.mark.parametrize("error", [QueueFull("full"), NoWorker("gone"), UnknownModel("m")], ids=str)
async def test_engine_is_asked_for_room_before_the_prompt_is_looked_at(error: HeadraceError) -> None:
    async with service() as made:
        made.engine.room = error
        client = await Request(CHAT, chat("a\0b")).run(made)
        assert client.json["error"]["code"] == error.code


async def test_media_are_what_the_workers_that_are_ready_now_take() -> None:
    picture = {"type": "image_url", "image_url": "data:image/png;base64,AAAA"}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [picture]}]}).encode()
    async with service() as made:
        said = []
        rounds: list[dict[MediaKind, MediaSupport]] = [{}, {"image": MediaSupport(5, 0)}, {}]
        for taken in rounds:
            made.engine.taken = taken
            client = await Request(CHAT, body).run(made)
            said.append((client.json["error"]["code"], client.json["error"]["message"]))
        assert said[0] == said[2]
        assert "takes no images" in said[0][1]
        assert said[1] == ("too_many_media", "'messages' has 1 images; the limit is 0.")


async def test_draining_takes_nothing_new() -> None:
    async with service() as made:
        made.flow.is_draining = True
        client = await Request(CHAT, chat()).run(made)
        assert (client.status, client.json["error"]["code"]) == (503, "draining")


async def test_blocked_prompt_is_a_400_and_counted() -> None:
    async with service(rules=[BLOCK]) as made:
        client = await Request(
            CHAT, chat([{"type": "text", "text": "敏"}, {"type": "text", "text": "感词"}])
        ).run(made)
        assert client.status == 400
        assert client.json["error"]["code"] == "content_filter"
        assert made.engine.streams == []


async def test_refused_submission_is_an_http_error() -> None:
    async with service() as made:
        made.engine.refuse = [None, QueueFull("full")]
        client = await Request(CHAT, chat(n=2)).run(made)
        assert client.status == 503
        assert made.engine.streams[0].is_aborted
        assert len(made.flow.open) == 0


# -- what the engine is asked --------------------------------------------------------------------------------


async def test_a_chat_is_streamed_from_end_to_end() -> None:
    async with service() as made:
        request = Request(CHAT, chat("敏感", stream=True, stream_options={"include_usage": True}))
        task = request.start(made)
        await submitted(made)
        stream = made.engine.streams[0]
        prompt = array("i", bytes(stream.call.prompt.ids)).tolist()
        stream.say("你")
        stream.say("好", "stop")
        await asyncio.wait_for(task, 5)
        assert request.client.text() == "你好"
        assert request.client.is_done
        assert request.client.chunks[-1]["usage"]["prompt_tokens"] == len(prompt)
        timing = request.client.headers["server-timing"]
        names = [part.partition(";")[0] for part in timing.split(", ")]
        assert names == ["parse", "validate", "render", "tokenize", "assemble", "queue"]
        assert len(made.flow.open) == 0


async def test_long_texts_are_encoded_elsewhere_with_the_same_result() -> None:
    text = "word " * (MAX_INLINE_CHARACTERS // 5 + 1)
    async with service() as made:
        for _ in range(2):
            request = Request(RAW, raw([text, "short"], add_special_tokens=False))
            task = request.start(made)
            await submitted(made, 2)
            ids = [array("i", bytes(stream.call.prompt.ids)).tolist() for stream in made.engine.streams]
            assert ids == [ids_of(text), ids_of("short")]
            for stream in made.engine.streams:
                stream.say("a", "stop")
            await asyncio.wait_for(task, 5)
            assert [choice["index"] for choice in request.client.json["choices"]] == [0, 1]
            assert request.client.json["usage"]["prompt_tokens"] == sum(map(len, ids))
            made.engine.streams.clear()


async def test_options_of_the_text_reach_the_way_out() -> None:
    async with service() as made:
        body = raw(
            n=2,
            seed=7,
            stop=["END"],
            include_stop_str_in_output=True,
            min_tokens=4,
            skip_special_tokens=False,
        )
        request = Request(RAW, body)
        task = request.start(made)
        await submitted(made, 2)
        first, second = made.engine.streams
        assert [each.call.sampling["seed"] for each in (first, second)] == [7, 8]
        assert "stop" not in first.call.sampling
        for stream in (first, second):
            for char in "END":  # within the first tokens it does not count
                stream.say(char)
            stream.say([2])
            stream.say("END tail")
            assert stream.is_aborted
        await asyncio.wait_for(task, 5)
        choices = request.client.json["choices"]
        assert [choice["text"] for choice in choices] == ["END<|im_end|>END"] * 2
        assert [choice["stop_reason"] for choice in choices] == ["END"] * 2


async def test_rules_filter_what_comes_out() -> None:
    async with service(rules=[MASK]) as made:
        request = Request(CHAT, chat(stream=True))
        task = request.start(made)
        await submitted(made)
        made.engine.streams[0].say("a敏感")
        made.engine.streams[0].say("词", "stop")
        await asyncio.wait_for(task, 5)
        assert request.client.text() == "a***"
        assert (
            made.sample(
                "headrace_rule_hits_total", rule="m", direction="output", channel="content", action="mask"
            )
            == 1
        )


@pytest.mark.parametrize(
    ("header", "after_s"), [({"x-stainless-read-timeout": "3"}, 1.5), ({}, 5.0)], ids=["told", "not"]
)
async def test_clients_read_timeout_sets_the_heartbeat(header: dict[str, str], after_s: float) -> None:
    async with service(limits=AnswerLimits(heartbeat_s=5)) as made:
        request = Request(CHAT, chat(stream=True), headers=header)
        task = request.start(made)
        await submitted(made)
        made.engine.streams[0].say("a")
        now_s = made.engine.now_s + 1000  # the first look sees the frames
        made.flow.open.look(made.engine.now_s)
        made.flow.open.look(made.engine.now_s + after_s - 0.1)
        assert b": ping" not in request.client.body
        made.flow.open.look(made.engine.now_s + after_s + 0.1)
        assert request.client.frames[-1] == b": ping"
        made.flow.open.look(now_s)
        await asyncio.wait_for(task, 5)


# -- ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["queue", "decode", "hold"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_disconnect_stops_the_engine(phase: str, stream: bool) -> None:
    async with service(rules=[MASK]) as made:
        request = Request(CHAT, chat(stream=stream, n=2))
        task = request.start(made)
        await submitted(made, 2)
        if phase != "queue":
            made.engine.streams[0].say("hello" if phase == "decode" else "敏")
        request.disconnect()
        await asyncio.wait_for(task, 5)
        assert [each.num_aborts for each in made.engine.streams] == [1, 1]
        assert len(made.flow.open) == 0
        assert made.lines[0]["ended"] == "client_closed"
        assert made.lines[0]["undecided_characters"] == (1 if phase == "hold" else 0)
        assert not request.client.is_ended


async def test_disconnect_while_the_prompt_is_encoded_is_seen_at_once() -> None:
    async with service() as made:
        request = Request(RAW, raw("word " * (MAX_INLINE_CHARACTERS // 5 + 1)))
        task = request.start(made)
        request.disconnect()
        await asyncio.wait_for(task, 5)
        assert all(stream.is_aborted for stream in made.engine.streams)
        assert len(made.flow.open) == 0


async def test_a_cancelled_request_stops_the_engine() -> None:
    async with service() as made:
        task = Request(CHAT, chat()).start(made)
        await submitted(made)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert made.engine.streams[0].num_aborts == 1
        assert len(made.flow.open) == 0
        assert made.lines[0]["ended"] == "client_closed"

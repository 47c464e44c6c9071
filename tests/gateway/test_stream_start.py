"""`POST /v1/streams`: what is answered at once and what is refused, its keys, and the answer that runs on."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from filters.rules import Rule
from gateway.answer import Answer
from gateway.exchange import ABORT_EXTENSION
from gateway.flow import BodyLimits
from gateway.journal import Journal
from gateway.outlet import ReaderLimits
from gateway.own_store import OwnStore
from gateway.streams import RESERVED_BYTES, StreamLimits, Streams
from pipeline.encoding import MAX_INLINE_CHARACTERS
from pipeline.errors import Draining, EngineRejected, HeadraceError, NoWorker, QueueFull, UnknownModel
from pipeline.stream_errors import StoreUnavailable
from tests.gateway.answering import turns, until
from tests.gateway.asgi import Request
from tests.gateway.serving import Service, chat, service
from tests.gateway.streaming import STREAMS, SharedStore, post, read, start

MARKER = "xylophone"
LONG = f"{MARKER} " * (MAX_INLINE_CHARACTERS // len(MARKER) + 1)  # encoded elsewhere
BLOCK = Rule("b", ("敏感词",), "block")


def assert_nothing_left(made: Service) -> None:
    assert made.streams._streams == {}
    assert not made.flow.in_progress
    assert len(made.flow.open) == 0
    assert all(stream.is_over for stream in made.engine.streams)


class Prompts:
    """Long prompts wait until they are let through."""

    def __init__(self, made: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_waiting = 0
        self._gate = asyncio.Event()
        encode = made.encoders.encode

        async def held(need: Any) -> Any:
            self.num_waiting += 1
            await self._gate.wait()
            return await encode(need)

        monkeypatch.setattr(made.encoders, "encode", held)

    def go_on(self) -> None:
        self._gate.set()


# -- what is answered ----------------------------------------------------------------------------------------


async def test_a_stream_is_answered_at_once_and_its_url_works() -> None:
    async with service() as made:
        before_s = time.time()
        client = await post(made, chat(MARKER), x_request_id="abc")
        lifetime_s = made.streams.limits.lifetime_s
        (engine,) = made.engine.streams
        assert client.status == 201
        assert client.is_ended
        document = client.json
        assert document.keys() == {"id", "object", "url", "token", "expires_at"}
        assert document["object"] == "stream"
        events = f"/v1/streams/{document['id']}/events"
        assert document["url"] == f"{events}?token={document['token']}"
        assert isinstance(document["expires_at"], int)
        assert before_s + lifetime_s - 1 <= document["expires_at"] <= time.time() + lifetime_s
        headers = client.headers
        timing = [part.partition(";")[0] for part in headers.pop("server-timing").split(", ")]
        assert timing == ["parse", "validate", "render", "tokenize", "assemble"]
        assert headers == {
            "content-type": "application/json",
            "cache-control": "no-store",
            "location": events,
            "x-request-id": "abc",
            "content-length": str(len(client.body)),
        }
        path, _, query = document["url"].partition("?")
        reader = Request(path, method="GET", query=query.encode())
        task = reader.start(made)
        engine.say("你", "stop")
        await asyncio.wait_for(task, 5)
        assert b"event: done\n" in reader.client.body


async def test_ids_and_tokens_are_random_and_long() -> None:
    async with service() as made:
        documents = [(await post(made)).json for _ in range(20)]
    ids, tokens = ({document[name] for document in documents} for name in ("id", "token"))
    assert len(ids) == len(tokens) == 20
    assert all(len(each) == 32 and int(each, 16) >= 0 for each in ids)
    assert all(len(each) >= 22 for each in tokens)  # 128 bits in base64
    assert not any(document["token"] in document["id"] for document in documents)


@pytest.mark.parametrize(
    "fields",
    [{}, {"stream": False}, {"stream": True}, {"stream": None}, {"stream": False, "stream_options": None}],
    ids=str,
)
async def test_it_streams_whatever_the_body_says(fields: dict[str, Any]) -> None:
    async with service() as made:
        stream = await start(made, chat(**fields))
        reader = await read(made, stream)
        stream.engine.say("a")
        stream.engine.say("b", "stop")
        await reader.to_end()
        assert reader.ids == ["1", "2", "3", "4", "5"]  # the role, two texts, the finish, the end
        assert b"usage" not in reader.events
        assert made.lines[0]["stream"] is True


async def test_stream_options_need_no_stream_true() -> None:
    options = {"include_usage": True, "include_timings": True}
    async with service() as made:
        stream = await start(made, chat(stream=False, stream_options=options))
        reader = await read(made, stream)
        await stream.ends()
        await reader.to_end()
        usage, done = reader.events.split(b"\n\n")[-3:-1]
        chunk = json.loads(usage.split(b"\n")[1].removeprefix(b"data: "))
        assert chunk["choices"] == []
        assert chunk["usage"]["completion_tokens"] > 1
        assert "ttft_ms" in chunk["timings"]
        assert done.endswith(b"event: done\ndata: [DONE]")


async def test_several_choices_are_one_stream() -> None:
    async with service() as made:
        stream = await start(made, chat(n=2))
        reader = await read(made, stream)
        first, second = stream.engines
        second.say("b")
        first.say("a")
        second.say("B", "length")
        assert stream.kept.answer is not None
        first.say("A", "stop")
        await reader.to_end()
        frames = [
            json.loads(line.removeprefix(b"data: "))
            for line in reader.events.split(b"\n")
            if line.startswith(b"data: {")
        ]
        texts = ["", ""]
        for (choice,) in (each["choices"] for each in frames):
            texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts == ["aA", "bB"]


async def test_rules_filter_what_is_journalled() -> None:
    async with service(rules=[Rule("m", ("敏感词",), "mask", replacement="*")]) as made:
        stream = await start(made)
        stream.engine.say("a敏感")
        stream.engine.say("词", "stop")
        reader = await (await read(made, stream)).to_end()
        assert "敏感" not in reader.events.decode()
        assert b'"content":"***"' in reader.events


async def test_a_client_that_leaves_before_its_201_has_a_stream_all_the_same() -> None:
    """It does not know the token, but its idempotency key finds it."""
    async with service() as made:
        request = Request(STREAMS, chat(), headers={"idempotency-key": "k"})
        request.client.error = ConnectionResetError()
        await request.run(made)
        (stream,) = made.streams._streams.values()
        assert stream.answer is not None
        again = await post(made, idempotency_key="k")
        assert again.json["id"] == stream.meta.id
        assert len(made.engine.streams) == 1


async def test_a_client_that_does_not_read_its_201_is_cut_and_its_stream_goes_on() -> None:
    async with service(reader=ReaderLimits(1 << 16, 0.02)) as made:
        cut: list[bool] = []
        request = Request(STREAMS, chat(), extensions={ABORT_EXTENSION: lambda: cut.append(True)})
        request.client.stops_reading()
        await request.run(made)
        assert cut == [True]
        (stream,) = made.streams._streams.values()
        assert stream.answer is not None
        assert not made.engine.streams[0].is_aborted


# -- refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "body", "status", "param"),
    [
        ({"content-type": "text/plain"}, chat(MARKER), 400, "content-type"),
        ({}, MARKER.encode(), 400, None),
        ({}, b"", 400, None),
        ({}, chat(MARKER, temperature=MARKER), 400, "temperature"),
        ({}, chat(MARKER * 1000), 413, None),
        ({}, chat(MARKER).replace(b'"m"', b'"xylophone"'), 404, "model"),
        ({}, chat(MARKER + "\0"), 400, "messages[0].content"),
        ({}, chat(MARKER, max_tokens=70000), 400, "messages"),
        ({}, json.dumps({"model": "m", "messages": []}).encode(), 400, "messages"),
        ({}, json.dumps({"model": "m", "prompt": MARKER}).encode(), 400, "messages"),
        ({}, chat(f"敏感词 {MARKER}"), 400, "messages"),
        ({}, chat(MARKER, tools=[]), 400, "tools"),
    ],
    ids=[
        *("type", "syntax", "empty", "value", "size", "model", "character", "context"),
        *("no messages", "no chat", "blocked", "no tools"),
    ],
)
async def test_what_is_wrong_with_a_prompt_is_a_plain_error(
    headers: dict[str, str], body: bytes, status: int, param: str | None
) -> None:
    async with service(rules=[BLOCK], body=BodyLimits(max_bytes=2000)) as made:
        client = await Request(STREAMS, body, headers=headers | {"idempotency-key": "k"}).run(made)
        assert client.status == status
        assert client.json["error"]["param"] == param
        assert made.engine.streams == []
        assert_nothing_left(made)
        (line,) = made.lines
        assert (line["route"], line["status"]) == (STREAMS, status)
        assert MARKER not in made.log
        assert (await post(made, idempotency_key="k")).status == 201  # its key is free


@pytest.mark.parametrize("error", [QueueFull("full"), NoWorker("gone"), UnknownModel("m")], ids=repr)
async def test_overload_is_told_by_the_post(error: HeadraceError) -> None:
    async with service() as made:
        made.engine.room = error
        client = await post(made, idempotency_key="k")
        assert (client.status, client.json["error"]["code"]) == (error.status_hint, error.code)
        assert ("retry-after" in client.headers) == (client.status == 503)
        assert_nothing_left(made)
        made.engine.room = None
        await start(made, idempotency_key="k")


async def test_before_the_first_worker_and_while_draining_nothing_is_started() -> None:
    async with service(loaded=False) as made:
        client = await post(made)
        assert (client.status, client.json["error"]["code"]) == (503, "no_worker")
        made.flow.is_draining = True
        client = await post(made)
        assert (client.status, client.json["error"]["code"]) == (503, "draining")
        assert_nothing_left(made)


async def test_the_key_of_the_api_is_asked_for_before_anything_is_read() -> None:
    async with service(keys=["secret"]) as made:
        request = Request(STREAMS, chat(), headers={"authorization": "Bearer wrong"})
        client = await request.run(made)
        assert client.status == 401
        assert client.headers["www-authenticate"] == 'Bearer realm="headrace"'
        assert request.num_received == 0
        await start(made, authorization="Bearer secret")


async def test_several_processes_without_a_store_refuse_by_name() -> None:
    async with service(streams=Streams(StreamLimits(), OwnStore(), is_shared=True)) as made:
        client = await post(made, chat(MARKER), idempotency_key="k")
        assert (client.status, client.json["error"]["code"]) == (501, "no_shared_store")
        assert "--redis" in client.json["error"]["message"]
        assert made.engine.streams == []
        assert_nothing_left(made)


async def test_without_memory_for_one_more_none_is_started() -> None:
    async with service(streams=Streams(StreamLimits(max_bytes=2 * RESERVED_BYTES), OwnStore())) as made:
        first = await start(made)
        await start(made, chat("other"))
        client = await post(made, chat(MARKER), idempotency_key="k")
        assert (client.status, client.json["error"]["code"]) == (503, "journal_full")
        assert client.headers["retry-after"] == "1"
        assert len(made.engine.streams) == made.streams.num_live == 2
        await first.ends()
        third = await start(made, chat(MARKER), idempotency_key="k")
        assert first.id not in made.streams._streams  # a finished one makes way
        assert third.id in made.streams._streams


async def test_a_limit_below_what_one_stream_may_need_lets_one_run() -> None:
    async with service(streams=Streams(StreamLimits(max_bytes=4096), OwnStore())) as made:
        stream = await start(made)
        assert (await post(made)).json["error"]["code"] == "journal_full"
        await stream.ends()
        await start(made)


@pytest.mark.parametrize("error", [QueueFull("full"), NoWorker("gone"), RuntimeError(MARKER)], ids=repr)
async def test_of_what_the_engine_refuses_nothing_is_left(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    store = SharedStore()
    async with service(streams=Streams(StreamLimits(), store)) as made:
        made.engine.refuse = [None, error]  # type: ignore[list-item]
        client = await post(made, chat(n=2), idempotency_key="k")
        assert client.status == getattr(error, "status_hint", 500)
        assert made.engine.streams[0].num_aborts == 1
        assert_nothing_left(made)
        assert store.metas == {}
        ((_, made_id),) = [call for call in store.calls if call[0] == "create"]
        assert ("delete", made_id) in store.calls
        (line,) = made.lines
        assert line["status"] == client.status
        assert MARKER not in made.log + caplog.text + client.body.decode()
        await start(made, chat(n=2), idempotency_key="k")


async def test_what_the_engine_refuses_later_is_told_to_the_readers() -> None:
    async with service() as made:
        stream = await start(made)
        reader = await read(made, stream)
        stream.engine.fail(EngineRejected(f"no grammar {MARKER}"))
        await reader.to_end()
        assert reader.ids == ["1"]
        assert reader.error["code"] == "engine_rejected"
        await turns()
        (line,) = made.lines
        assert (line["status"], line["ended"]) == (201, "engine_rejected")
        assert MARKER not in made.log


async def test_an_unexpected_error_is_a_500_that_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError(MARKER)

    async with service() as made:
        with monkeypatch.context() as patch:
            patch.setattr(made.models, "get", broken)
            client = await post(made, idempotency_key="k")
        assert (client.status, client.json["error"]["code"]) == (500, "internal_error")
        assert MARKER not in client.body.decode() + made.log + caplog.text
        assert_nothing_left(made)
        await start(made, idempotency_key="k")


async def test_a_client_that_leaves_while_its_prompt_is_prepared_starts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with service() as made:
        prompts = Prompts(made, monkeypatch)
        request = Request(STREAMS, chat(LONG), headers={"idempotency-key": "k"})
        task = request.start(made)
        await until(lambda: prompts.num_waiting)
        request.disconnect()
        await asyncio.wait_for(task, 5)
        assert request.client.messages == []
        (line,) = made.lines
        assert (line["status"], line["ended"]) == (499, "client_closed")
        assert made.engine.streams == []
        assert_nothing_left(made)
        prompts.go_on()
        await start(made, chat(LONG), idempotency_key="k")


async def test_a_prompt_that_is_prepared_when_the_server_cuts_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with service() as made:
        prompts = Prompts(made, monkeypatch)
        request = Request(STREAMS, chat(LONG))
        task = request.start(made)
        await until(lambda: prompts.num_waiting)
        made.flow.cut(Draining())
        await asyncio.wait_for(task, 5)
        assert (request.client.status, request.client.json["error"]["code"]) == (503, "draining")
        assert_nothing_left(made)


@pytest.mark.parametrize("key", [{}, {"idempotency_key": "k"}], ids=["no key", "key"])
async def test_a_store_that_is_away_is_told_by_the_post(key: dict[str, Any]) -> None:
    store = SharedStore()
    async with service(streams=Streams(StreamLimits(), store)) as made:
        store.error = StoreUnavailable()
        client = await post(made, **key)
        assert (client.status, client.json["error"]["code"]) == (503, "store_unavailable")
        assert client.headers["retry-after"] == "1"
        assert made.engine.streams == []
        assert_nothing_left(made)


async def test_why_a_request_failed_is_not_hidden_by_a_store_that_went_away_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = SharedStore()
    async with service(streams=Streams(StreamLimits(), store)) as made:
        prompts = Prompts(made, monkeypatch)
        made.engine.refuse = [QueueFull("full")]
        request = Request(STREAMS, chat(LONG), headers={"idempotency-key": "k"})
        task = request.start(made)
        await until(lambda: prompts.num_waiting)
        release, store.release = store.release, None  # type: ignore[method-assign,assignment]

        async def failing(key: str, stream_id: str) -> None:
            await release(key, stream_id)
            raise StoreUnavailable

        store.release = failing  # type: ignore[method-assign]
        prompts.go_on()
        await asyncio.wait_for(task, 5)
        assert request.client.json["error"]["code"] == "queue_full"
        assert [call for call in store.calls if call[0] == "release"]


# -- idempotency keys ----------------------------------------------------------------------------------------


async def test_the_same_key_and_body_are_the_same_stream() -> None:
    async with service() as made:
        stream = await start(made, chat(MARKER), idempotency_key="k")
        for _ in range(2):
            again = await post(made, chat(MARKER), idempotency_key="k")
            assert (again.status, again.body) == (201, stream.client.body)
            assert again.headers["cache-control"] == "no-store"
            assert again.headers["location"] == stream.client.headers["location"]
            await stream.ends() if stream.kept.answer is not None else None  # the same after its end
        assert len(made.engine.streams) == 1
        assert [line["status"] for line in made.lines] == [201, 201, 201]
        assert sorted(line["output_tokens"] > 0 for line in made.lines) == [False, False, True]
        assert all(line["ended"] == "complete" for line in made.lines)
        assert MARKER not in made.log


async def test_the_same_key_finds_its_stream_where_there_is_no_memory_for_another() -> None:
    async with service(streams=Streams(StreamLimits(max_bytes=RESERVED_BYTES), OwnStore())) as made:
        stream = await start(made, idempotency_key="k")
        again = await post(made, idempotency_key="k")
        assert (again.status, again.body) == (201, stream.client.body)
        await stream.ends()
        assert (await post(made, chat("other"), idempotency_key="k")).status == 422
        assert (await post(made, idempotency_key="k")).body == stream.client.body


async def test_the_same_key_with_another_body_is_refused() -> None:
    async with service() as made:
        await start(made, chat(MARKER), idempotency_key="k")
        client = await post(made, chat(f"{MARKER}!"), idempotency_key="k")
        assert client.status == 422
        error = client.json["error"]
        assert (error["code"], error["param"]) == ("idempotency_key_reused", "idempotency-key")
        assert len(made.engine.streams) == made.streams.num_live == 1
        await start(made, chat(f"{MARKER}!"), idempotency_key="other")
        await start(made, chat(MARKER))  # without a key each is one of its own
        assert len(made.engine.streams) == 3


async def test_a_key_whose_request_is_being_prepared_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service() as made:
        prompts = Prompts(made, monkeypatch)
        request = Request(STREAMS, chat(LONG), headers={"idempotency-key": "k"})
        task = request.start(made)
        await until(lambda: prompts.num_waiting)
        same = await post(made, chat(LONG), idempotency_key="k")
        assert (same.status, same.json["error"]["code"]) == (409, "idempotency_key_in_progress")
        other = await post(made, chat("other"), idempotency_key="k")
        assert (other.status, other.json["error"]["code"]) == (422, "idempotency_key_reused")
        prompts.go_on()
        await asyncio.wait_for(task, 5)
        assert request.client.status == 201  # neither has taken its key
        again = await post(made, chat(LONG), idempotency_key="k")
        assert again.body == request.client.body


async def test_a_key_is_its_senders_alone() -> None:
    async with service(keys=["alice", "bob"]) as made:
        hers = await start(made, chat("hers"), idempotency_key="k", authorization="Bearer alice")
        his = await start(made, chat("his"), idempotency_key="k", authorization="Bearer bob")
        assert hers.id != his.id
        for stream, name, text in ((hers, "alice", "hers"), (his, "bob", "his")):
            again = await post(made, chat(text), idempotency_key="k", authorization=f"Bearer {name}")
            assert again.body == stream.client.body


@pytest.mark.parametrize("key", ["", "a b", " ", "a" * 256, "schlüssel", "k\tk", "\x7f"])
async def test_a_bad_key_is_refused(key: str) -> None:
    async with service() as made:
        client = await post(made, chat(MARKER), idempotency_key=key)
        assert (client.status, client.json["error"]["param"]) == (400, "idempotency-key")
        assert f"{len(key.encode())} characters" in client.json["error"]["message"]
        assert made.engine.streams == []
        assert_nothing_left(made)


async def test_a_key_may_be_any_visible_characters() -> None:
    async with service() as made:
        for key in ("a" * 255, "!", "~", '"a,b;c:d"'):
            stream = await start(made, chat(key), idempotency_key=key)
            assert (await post(made, chat(key), idempotency_key=key)).body == stream.client.body


@pytest.mark.parametrize("how", ["kept", "deleted"])
async def test_a_key_is_free_when_its_stream_is_forgotten(how: str) -> None:
    async with service() as made:
        stream = await start(made, chat("one"), idempotency_key="k")
        await stream.ends()
        if how == "kept":
            made.streams.look(time.monotonic() + made.streams.limits.keep_s + 1)
            await turns()
        else:
            query = f"token={stream.token}".encode()
            assert (await Request(stream.path, method="DELETE", query=query).run(made)).status == 204
        other = await start(made, chat("two"), idempotency_key="k")
        assert other.id != stream.id


# -- the answer that runs on ---------------------------------------------------------------------------------


async def test_a_stream_leaves_one_line_and_one_count_when_it_has_ended() -> None:
    async with service(keys=["secret"]) as made:
        stream = await start(made, chat(MARKER), authorization="Bearer secret", x_request_id="abc")
        stream.engine.say(MARKER)
        assert made.lines == []
        stream.engine.say(MARKER, "stop")
        await turns()
        (line,) = made.lines
        assert (line["id"], line["route"], line["model"], line["worker"]) == ("abc", STREAMS, "m", "w0")
        assert (line["status"], line["stream"]) == (201, True)
        assert (line["ended"], line["finish"]) == ("complete", ["stop"])
        assert line["output_tokens"] > 2
        assert len(line["key"]) == 8
        assert line["buffered_peak_bytes"] == 0
        for secret in (MARKER, stream.token, "secret"):
            assert secret not in made.log
        labels = {"route": STREAMS, "status": "201", "ended": "complete"}
        assert made.sample("headrace_requests_total", **labels) == 1
        assert made.sample("gen_ai_server_time_to_first_token_seconds_count", gen_ai_request_model="m") == 1
        assert made.sample("headrace_stage_seconds_count", stage="tokenize") == 1


async def test_a_stream_is_in_progress_until_it_has_ended() -> None:
    async with service() as made:
        stream = await start(made)
        await turns()
        assert (len(made.flow.in_progress), len(made.flow.open)) == (1, 1)
        await stream.ends()
        assert (len(made.flow.in_progress), len(made.flow.open)) == (0, 0)


async def test_its_answer_is_watched_as_any_other() -> None:
    async with service() as made:
        stream = await start(made)
        reader = await read(made, stream)
        made.flow.open.look(made.engine.now_s)
        made.flow.open.look(made.engine.now_s + 61)
        await reader.to_end()
        assert reader.error["code"] == "queue_timeout"
        assert stream.engine.is_aborted
        await turns()
        assert made.lines[0]["ended"] == "queue_timeout"


async def test_the_next_turn_learns_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[str] = []
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    async with service() as made:
        monkeypatch.setattr(made.next_turns, "learn", lambda *given: learned.append(given[2]))
        stream = await start(made, json.dumps({"model": "m", "messages": messages}).encode())
        stream.engine.say("one ")
        await stream.ends("two")
        assert learned == ["one two"]


async def test_a_fault_after_the_end_loses_neither_its_line_nor_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError(MARKER)

    async with service() as made:
        monkeypatch.setattr(made.next_turns, "learn", broken)
        with caplog.at_level(logging.ERROR):
            stream = await start(made, x_request_id="abc")
            await stream.ends()
        assert "request abc: unexpected KeyError" in caplog.text
        assert MARKER not in caplog.text
        assert [line["ended"] for line in made.lines] == ["complete"]
        assert not made.flow.in_progress
        reader = await (await read(made, stream)).to_end()
        assert b"event: done" in reader.events


async def test_a_server_that_stops_ends_its_streams_by_name() -> None:
    async with service() as made:
        streams = [await start(made, chat(n=2)) for _ in range(3)]
        readers = [await read(made, stream) for stream in streams]
        streams[0].engine.say("a")
        assert len(made.flow.in_progress) == 6
        made.flow.cut(Draining("The server is shutting down; the answer was cut off."))
        for reader in readers:
            await reader.to_end()
            assert reader.error["code"] == "draining"
            assert f"id: {len(reader.ids)}\nevent: failed" in reader.events.decode()
        assert all(engine.is_aborted for engine in made.engine.streams)
        await turns()
        assert len(made.flow.in_progress) == 0  # what a drain waits for
        assert [line["ended"] for line in made.lines] == ["draining"] * 3
        back = await (await read(made, streams[0], last_event_id=readers[0].ids[-1])).to_end()
        assert back.client.status == 204


async def test_closing_ends_what_still_runs() -> None:
    async with service() as made:
        stream = await start(made)
        await turns()
    assert stream.engine.is_aborted
    assert not made.flow.in_progress
    assert made.lines[0]["ended"] == "client_closed"


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Tracked(Journal):
    """A journal that can be watched."""

    __slots__ = ("__weakref__",)


@pytest.mark.parametrize("end", ["complete", "cancelled", "cut"])
async def test_nothing_of_a_stream_waits_for_the_garbage_collector(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.streams.Journal", Tracked)
    async with service() as made:
        with without_collector():
            answer, journal = await _one_life(made, end)
            for engine in made.engine.streams:
                engine.sink = None  # type: ignore[assignment]  # as a real one, which lets go of what is over
            await turns()
            assert answer() is None
            assert journal() is not None  # those who come back need it
            made.streams.look(time.monotonic() + made.streams.limits.keep_s + 1)
            await turns()
            assert journal() is None


async def _one_life(made: Service, end: str) -> tuple[Any, Any]:
    stream = await start(made)
    reader = await read(made, stream)
    answer, journal = weakref.ref(stream.kept.answer), weakref.ref(stream.kept.journal)
    assert isinstance(answer(), Answer)
    stream.engine.say("a")
    if end == "complete":
        stream.engine.say("b", "stop")
    elif end == "cancelled":
        await made.streams.cancel(stream.kept.meta)
    else:
        made.flow.cut(Draining())
    await reader.to_end()
    return answer, journal


async def test_no_exchange_is_left_behind() -> None:
    async with service() as made:
        for _ in range(3):
            await start(made)
        await post(made, b"{")
        assert made.stream_edge._start._handed_on == set()

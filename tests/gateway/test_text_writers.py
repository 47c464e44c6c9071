"""Streams as JSON lines and as plain text: what is in them, and that a broken one never looks whole."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import httpx
import pytest

from filters.rules import Rule
from gateway.answer import AnswerLimits
from gateway.exchange import ABORT_EXTENSION
from gateway.outlet import Outlet, ReaderLimits
from gateway.record import RequestRecord
from gateway.text_writers import NDJSON, PlainTextWriter
from gateway.writers import SSE, Framing, SseWriter, Writer
from pipeline.errors import EngineFailed, QueueFull, WorkerLost
from pipeline.events import CONTENT, REASONING, Finish, TextDelta, ToolCallDelta
from pipeline.values import Delivery
from tests.components import need
from tests.gateway.answering import REQUEST_ID, Client, turns, until, vocabulary
from tests.gateway.asgi import Request, served
from tests.gateway.serving import CHAT, RAW, Service, chat, raw, service
from tests.gateway.test_writers import CONTINUOUS, ENTRY, PIECES, PLAIN, SHAPE, Event, random_events

TIMED = Delivery(stream=True, include_usage=True, include_timings=True)
TEXT_ACCEPT = {"accept": "text/plain"}
NDJSON_ACCEPT = {"accept": "application/x-ndjson"}
BLOCK = Rule("b", ("forbidden",), "block")
STREAM_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
    "x-content-type-options": "nosniff",
    "x-request-id": REQUEST_ID,
}


class Case:
    """A writer and the client that it writes to."""

    def __init__(self, make: Callable[[Outlet, RequestRecord, Case], Writer]) -> None:
        self.client = Client()
        self.record = RequestRecord(REQUEST_ID, CHAT, 0.0, model="m")
        self.outlet = Outlet(self.client, 1 << 20, pytest.fail)
        self.num_cuts = 0
        self.writer = make(self.outlet, self.record, self)

    def cut(self) -> None:
        self.num_cuts += 1

    def say(self, *events: Event | str) -> Case:
        for event in events:
            if isinstance(event, str):
                self.writer.text(0, event)
            elif isinstance(event, TextDelta) and event.channel == CONTENT and not event.logprobs:
                self.writer.text(0, event.text)
            else:
                self.writer.delta(0, event)
        return self

    def end(self, finish: Finish | None = None) -> Case:
        self.writer.finished(0, finish or Finish("stop"))
        self.writer.end(lambda: {"total_ms": 1.0})
        return self

    @property
    def lines(self) -> list[Any]:
        """The JSON of each line. A line that is empty or no JSON is an error."""
        *lines, rest = self.client.body.split(b"\n")
        assert rest == b""
        assert len(self.client.body.decode().splitlines()) == len(lines)
        return [json.loads(line) for line in lines]


def chunks(
    framing: Framing = NDJSON, delivery: Delivery = PLAIN, num_choices: int = 1, keeps_text: bool = False
) -> Case:
    return Case(
        lambda outlet, record, case: SseWriter(
            outlet, SHAPE, vocabulary(), record, delivery, num_choices, framing, keeps_text
        )
    )


def plain(keeps_text: bool = False) -> Case:
    return Case(lambda outlet, record, case: PlainTextWriter(outlet, record, case.cut, keeps_text))


# -- JSON lines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delivery", [PLAIN, CONTINUOUS, TIMED], ids=["plain", "continuous", "timed"])
@pytest.mark.parametrize("seed", range(8))
async def test_lines_are_the_chunks_of_sse(seed: int, delivery: Delivery) -> None:
    events = random_events(random.Random(seed))
    lines, frames = chunks(NDJSON, delivery), chunks(SSE, delivery)
    for case in (lines, frames):
        case.writer.first()
        case.say(*events).end()
    *framed, done = re.sub(rb"call_[0-9a-f]{24}", b"ID", frames.client.body).split(b"\n\n")[:-1]
    assert done == b"data: [DONE]"
    written = re.sub(rb"call_[0-9a-f]{24}", b"ID", lines.client.body)
    assert written == b"".join(frame.removeprefix(b"data: ") + b"\n" for frame in framed)
    assert len(lines.lines) == len(framed)
    assert lines.client.is_ended
    assert ("timings" in lines.lines[-1]) == delivery.include_timings
    assert lines.writer.num_frames == frames.writer.num_frames


async def test_lines_have_their_headers() -> None:
    case = chunks()
    case.writer.first()
    assert case.client.headers == {
        "content-type": "application/x-ndjson; charset=utf-8",
        **STREAM_HEADERS,
    }
    assert case.record.status == 200


@pytest.mark.parametrize("seed", range(10))
async def test_lines_parse_wherever_heartbeats_fall(seed: int) -> None:
    rng = random.Random(seed)
    case, quiet = chunks(num_choices=2), chunks(num_choices=2)
    steps: list[Callable[[Writer], None]] = [lambda writer: writer.first()]
    for number in range(rng.randrange(6)):
        text = rng.choice(PIECES)
        steps.append(lambda writer, n=number, t=text: writer.text(n % 2, t))  # type: ignore[misc]
    steps += [
        lambda writer: writer.finished(1, Finish("stop")),
        lambda writer: writer.finished(0, Finish("stop")),
    ]
    for step in steps:
        for _ in range(rng.randrange(3)):
            case.writer.ping()
        step(case.writer)
        step(quiet.writer)
    case.writer.end(dict)
    quiet.writer.end(dict)
    assert case.lines == quiet.lines
    assert re.sub(rb"(?m)^ +", b"", case.client.body) == quiet.client.body


async def test_a_heartbeat_before_the_first_token_sends_the_head() -> None:
    case = chunks()
    case.writer.ping()
    assert case.client.bodies == [b" "]
    assert case.client.status == 200


@pytest.mark.parametrize("pings", [0, 1])
async def test_lines_that_fail_end_with_the_error(pings: int) -> None:
    case = chunks()
    case.writer.first()
    case.say("a")
    for _ in range(pings):
        case.writer.ping()
    case.writer.fail(WorkerLost("gone"))
    assert case.lines[-1] == {
        "error": {"message": "gone", "type": "engine_error", "param": None, "code": "worker_lost"}
    }
    assert case.client.is_ended


async def test_lines_that_fail_before_the_head_are_an_http_error() -> None:
    case = chunks()
    case.writer.fail(QueueFull("full"))
    assert case.client.status == 503
    assert case.client.headers["content-type"] == "application/json"


async def test_lines_can_keep_their_text() -> None:
    case = chunks(keeps_text=True)
    case.say("a", TextDelta(REASONING, "hm"), "b").end()
    assert case.writer.whole_text() == "ab"
    assert case.lines[-1]["choices"][0]["finish_reason"] == "stop"


# -- plain text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
async def test_plain_text_is_the_content_however_it_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices(PIECES, k=30))
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(20)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    case = plain().say(*(pieces if seed else text)).end()  # the first one by one
    assert case.client.body == text.encode()
    assert case.client.is_ended
    assert case.num_cuts == 0


@pytest.mark.parametrize("finish", [Finish("stop"), Finish("length"), Finish("stop", None, "not JSON")])
async def test_only_content_is_in_plain_text(finish: Finish) -> None:
    case = plain()
    case.writer.first()
    events = [
        TextDelta(REASONING, "hm"),
        TextDelta(CONTENT, "a", [ENTRY]),
        TextDelta(REASONING, "!"),
        "b",
        "",
    ]
    case.say(*events).end(finish)  # type: ignore[arg-type]
    assert case.client.body == b"ab"
    assert case.client.is_ended
    assert case.num_cuts == 0


async def test_plain_text_has_its_headers_with_the_first_text() -> None:
    case = plain()
    case.writer.first()
    case.say(TextDelta(REASONING, "hm"), "")
    assert case.client.messages == []
    case.say("a")
    assert case.client.headers == {"content-type": "text/plain; charset=utf-8", **STREAM_HEADERS}
    assert case.record.status == 200
    case.say("b")
    assert [each["type"] for each in case.client.messages].count("http.response.start") == 1


async def test_a_heartbeat_of_plain_text_is_its_head_alone() -> None:
    case = plain()
    case.writer.ping()
    assert case.client.status == 200
    num_frames = case.writer.num_frames
    case.writer.ping()
    case.say("a")
    case.writer.ping()
    case.end()
    assert case.client.body == b"a"
    assert num_frames == 1


async def test_plain_text_without_text_is_a_whole_answer() -> None:
    case = plain()
    case.writer.first()
    case.end()
    assert (case.client.status, case.client.body, case.client.is_ended) == (200, b"", True)


async def test_plain_text_keeps_its_text_if_asked_to() -> None:
    events = ("a", TextDelta(REASONING, "hm"), "b")
    assert plain(keeps_text=True).say(*events).end().writer.whole_text() == "ab"
    assert plain().say(*events).end().writer.whole_text() == ""


async def test_plain_text_takes_nothing_back() -> None:
    """A second submission would have to go on where the first one was."""
    assert not plain().writer.take_back(0)


def _fails(writer: Writer) -> None:
    writer.fail(WorkerLost("gone"))


def _is_blocked(writer: Writer) -> None:
    writer.finished(0, Finish("content_filter"))
    writer.end(dict)


def _calls_a_tool(writer: Writer) -> None:
    """As a parser of its own mind may say it: no tools were asked for."""
    writer.delta(0, ToolCallDelta(0, "f", ""))
    writer.finished(0, Finish("tool_calls"))
    writer.end(dict)


UNTOLD = [
    (_fails, 502, "worker_lost"),
    (_is_blocked, 400, "content_filter"),
    (_calls_a_tool, 502, "engine_failed"),
]


@pytest.mark.parametrize(("ends", "status", "code"), UNTOLD, ids=["failed", "blocked", "called"])
async def test_what_plain_text_cannot_say_is_an_http_error_before_the_head(
    ends: Callable[[Writer], None], status: int, code: str
) -> None:
    case = plain()
    case.writer.first()
    ends(case.writer)
    await turns()
    assert (case.client.status, case.record.status) == (status, status)
    assert case.client.json["error"]["code"] == code
    assert case.client.is_ended
    assert case.num_cuts == 0


@pytest.mark.parametrize(("ends", "status", "code"), UNTOLD, ids=["failed", "blocked", "called"])
@pytest.mark.parametrize("begins", ["text", "heartbeat"])
async def test_what_plain_text_cannot_say_cuts_it_after_the_head(
    begins: str, ends: Callable[[Writer], None], status: int, code: str
) -> None:
    case = plain()
    if begins == "text":
        case.say("a", "b")
    else:
        case.writer.ping()
    ends(case.writer)
    await turns()
    assert case.num_cuts == 1
    assert case.client.body == (b"ab" if begins == "text" else b"")
    assert not case.client.is_ended
    assert case.outlet.closed
    assert case.record.status == 200


async def test_what_was_allowed_leaves_before_the_cut_even_slowly() -> None:
    case = plain().say("a")
    case.client.stops_reading()
    case.say("b", "c", "d")
    case.writer.fail(EngineFailed("no more"))
    await turns(20)
    assert case.num_cuts == 0
    case.client.reads_again()
    await until(lambda: case.num_cuts)
    assert case.client.body == b"abcd"
    assert not case.client.is_ended


@pytest.mark.parametrize("make", [chunks, plain])
async def test_half_a_surrogate_pair_cannot_leave(make: Callable[[], Case]) -> None:
    case = make()
    with pytest.raises(UnicodeEncodeError):
        case.say("\ud83d")
    assert case.client.body == b""


# -- through the flow ----------------------------------------------------------------------------------------


async def stream_of(made: Service, number: int = 0) -> Any:
    await until(lambda: len(made.engine.streams) > number)
    return made.engine.streams[number]


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat), (RAW, raw)], ids=["chat", "completion"])
async def test_both_routes_stream_in_the_form_that_is_accepted(path: str, body: Any) -> None:
    async with service() as made:
        for number, (headers, kind) in enumerate(
            [
                ({}, "text/event-stream"),
                ({"accept": "application/json, text/plain, */*"}, "text/event-stream"),
                (TEXT_ACCEPT, "text/plain"),
                (NDJSON_ACCEPT, "application/x-ndjson"),
            ]
        ):
            request = Request(path, body(stream=True), headers=headers)
            task = request.start(made)
            stream = await stream_of(made, number)
            stream.say("hel")
            stream.say("lo", "stop")
            await asyncio.wait_for(task, 5)
            assert request.client.headers["content-type"] == f"{kind}; charset=utf-8"
            assert request.client.is_ended
            if kind == "text/plain":
                assert request.client.body == b"hello"


@pytest.mark.parametrize("headers", [TEXT_ACCEPT, NDJSON_ACCEPT])
async def test_without_a_stream_accept_changes_nothing(headers: dict[str, str]) -> None:
    async with service() as made:
        request = Request(CHAT, chat(logprobs=True), headers=headers)
        task = request.start(made)
        (await stream_of(made)).say("a", "stop", logprobs=True)
        await asyncio.wait_for(task, 5)
        assert request.client.headers["content-type"] == "application/json"


async def test_what_plain_text_cannot_carry_never_reaches_the_engine() -> None:
    async with service() as made:
        client = await Request(CHAT, chat(stream=True, n=2), headers=TEXT_ACCEPT).run(made)
        assert (client.status, client.json["error"]["param"]) == (400, "n")
        assert made.engine.streams == []


@pytest.mark.parametrize("headers", [TEXT_ACCEPT, NDJSON_ACCEPT])
async def test_other_forms_have_the_headers_of_sse(headers: dict[str, str]) -> None:
    async with service() as made:
        names = []
        for number, each in enumerate(({}, headers)):
            request = Request(CHAT, chat(stream=True), headers=each)
            task = request.start(made)
            (await stream_of(made, number)).say("a", "stop")
            await asyncio.wait_for(task, 5)
            assert "queue;dur=" in request.client.headers["server-timing"]
            names.append(set(request.client.headers))
        assert names[1] == names[0] | {"x-content-type-options"}


@pytest.mark.parametrize(("headers", "sent"), [(NDJSON_ACCEPT, b" "), (TEXT_ACCEPT, b"")])
async def test_heartbeats_follow_the_clients_read_timeout(headers: dict[str, str], sent: bytes) -> None:
    async with service(limits=AnswerLimits(heartbeat_s=5)) as made:
        request = Request(CHAT, chat(stream=True), headers={"x-stainless-read-timeout": "3", **headers})
        before_s = monotonic()
        task = request.start(made)
        stream = await stream_of(made)
        made.flow.open.look(before_s + 1.4)
        assert request.client.messages == []
        made.flow.open.look(monotonic() + 1.6)
        assert (request.client.status, request.client.body) == (200, sent)
        stream.say("a", "stop")
        await asyncio.wait_for(task, 5)


async def test_a_cut_is_logged_as_what_it_was() -> None:
    """The abort ends the connection, and that is not the client's doing."""
    async with service(rules=[BLOCK]) as made:
        for number, ends in enumerate(("block", "fail")):
            request = Request(CHAT, chat(stream=True), headers=TEXT_ACCEPT)
            request.scope["extensions"][ABORT_EXTENSION] = request.disconnect
            task = request.start(made)
            stream = await stream_of(made, number)
            stream.say("it is ")
            if ends == "block":
                stream.say("forbidden")
            else:
                stream.fail(WorkerLost("gone"))
            await asyncio.wait_for(task, 5)
            assert request.client.body == b"it is "
            assert not request.client.is_ended
        blocked, failed = made.lines
        assert (blocked["ended"], blocked["finish"]) == ("complete", ["content_filter"])
        assert failed["ended"] == "worker_lost"
        assert len(made.flow.open) == 0


@pytest.mark.parametrize("headers", [{}, TEXT_ACCEPT, NDJSON_ACCEPT], ids=["sse", "text", "ndjson"])
async def test_a_client_that_does_not_read_is_dropped_at_the_same_bound(headers: dict[str, str]) -> None:
    async with service(reader=ReaderLimits(4096, 5)) as made:
        request = Request(CHAT, chat(stream=True), headers=headers)
        task = request.start(made)
        stream = await stream_of(made)
        stream.say("a")
        request.client.stops_reading()
        while not stream.is_aborted:
            stream.say("word " * 20)
        request.disconnect()
        await asyncio.wait_for(task, 5)
        (line,) = made.lines
        assert line["ended"] == "client_closed"
        assert "reads too slowly" in line["detail"]
        assert 4096 < line["buffered_peak_bytes"] <= 4096 + 512


# -- what clients make of a cut ------------------------------------------------------------------------------


@asynccontextmanager
async def cut_stream() -> AsyncIterator[int]:
    """A port whose every plain text answer says `it is ` and is blocked at the next word."""
    async with service(rules=[BLOCK]) as made, served(made) as port:

        async def drive() -> None:
            for number in range(100):
                stream = await stream_of(made, number)
                stream.say("it is ")
                stream.say("forbidden")

        driver = asyncio.create_task(drive())
        try:
            yield port
        finally:
            driver.cancel()


async def test_http_client_sees_a_cut() -> None:
    def ask(port: int) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        headers = {"content-type": "application/json", **TEXT_ACCEPT}
        connection.request("POST", CHAT, chat(stream=True), headers)
        response = connection.getresponse()
        with pytest.raises(http.client.IncompleteRead) as cut:
            response.read()
        connection.close()
        return response.status, cut.value.partial

    async with cut_stream() as port:
        assert await asyncio.to_thread(ask, port) == (200, b"it is ")


async def test_httpx_sees_a_cut() -> None:
    headers = {"content-type": "application/json", **TEXT_ACCEPT}
    async with cut_stream() as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}{CHAT}"
        async with client.stream("POST", url, content=chat(stream=True), headers=headers) as response:
            pieces = response.aiter_raw()
            assert await anext(pieces) == b"it is "
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
                await anext(pieces)


async def test_curl_sees_a_cut() -> None:
    async with cut_stream() as port:
        fields = [
            "-H",
            "content-type: application/json",
            "-H",
            "accept: text/plain",
            "-d",
            chat(stream=True).decode(),
        ]
        curl = await asyncio.create_subprocess_exec(
            need("curl"), "-sN", *fields, f"http://127.0.0.1:{port}{CHAT}", stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asyncio.wait_for(curl.communicate(), 10)
    assert (curl.returncode, out) == (18, b"it is ")  # a partial file

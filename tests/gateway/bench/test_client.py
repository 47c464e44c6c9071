import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import Any

import pytest

from backend.http_client import HttpClient, HttpLimits
from gateway.bench.answer_frames import AnswerFrames
from gateway.bench.client import BenchClient
from gateway.bench.sample import Sample
from gateway.bench.target import CHAT, BodyMaker, parse_target
from tests.gateway.bench.fake_server import (
    DONE,
    HEAD,
    LAST,
    Answer,
    Asked,
    Server,
    answer_well,
    chunk,
    delta,
    event,
    plain,
    serving,
    until,
    usage,
    whole,
)

DEEP = b"[" * 20_000 + b"]" * 20_000


def with_usage(value: bytes) -> list[bytes]:
    """A good answer but for one of its counts."""
    told = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": %b}}\n\n' % value
    return [delta("stop", content="x"), told, DONE]


BODY = BodyMaker("tiny").body([{"role": "user", "content": "a b c"}], 3)
FOREVER_S = 60.0
TIMEOUT_S = 77.0  # no other timer has it


def noted_timers(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> list[Callable[[], Any]]:
    """What is to be called after just that time; a test calls it when it likes."""

    def call_later(given_s: float, callback: Callable[..., Any], *given: Any, **more: Any) -> Any:
        if given_s == delay_s:
            noted.append(partial(callback, *given))
        return real(given_s, callback, *given, **more)

    noted: list[Callable[[], Any]] = []
    loop = asyncio.get_running_loop()
    real = loop.call_later
    monkeypatch.setattr(loop, "call_later", call_later)
    return noted


@asynccontextmanager
async def client_of(url: str, timeout_s: float = FOREVER_S, max_idle: int = 9) -> AsyncIterator[BenchClient]:
    http = HttpClient(HttpLimits(max_idle=max_idle))
    try:
        yield BenchClient(http, parse_target(url, CHAT), monotonic(), timeout_s)
    finally:
        await http.close()


@asynccontextmanager
async def asking(answer: Answer, timeout_s: float = FOREVER_S) -> AsyncIterator[tuple[BenchClient, Server]]:
    async with serving(answer) as server, client_of(server.url, timeout_s) as client:
        yield client, server


async def sample_of(answer: Answer, timeout_s: float = FOREVER_S) -> Sample:
    """What becomes of one request that is answered so."""
    sample = Sample(number=0, due_s=0.0)
    async with asking(answer, timeout_s) as (client, _):
        await client.ask(BODY, sample)
    assert sample.ended_s is not None
    assert sample.ended_s >= sample.sent_s
    return sample


async def test_a_good_answer_is_measured() -> None:
    async with asking(answer_well) as (client, server):
        sample = Sample(number=0, due_s=0.0)
        assert await client.ask(BODY, sample, keeps_text=True) == "w0 w1 w2 "
    assert (sample.error, sample.status, sample.finish) == (None, 200, "length")
    assert (sample.prompt_tokens, sample.output_tokens) == (7, 3)
    assert sample.num_bytes == sum(map(len, whole(["w0 ", "w1 ", "w2 "])))
    assert sample.headers_s is not None
    assert sample.ended_s is not None
    assert (
        0 < sample.sent_s <= sample.headers_s <= sample.frames_s[0] <= sample.frames_s[-1] <= sample.ended_s
    )
    assert len(sample.frames_s) == 3
    assert (client.tally.num_sent, client.tally.num_ended, client.tally.num_frames) == (1, 1, 3)
    assert client.tally.num_failed == 0
    assert server.asked[0].path == "/v1/chat/completions"


async def test_a_frame_has_the_time_at_which_it_came() -> None:
    """The server sends each frame only when the client has counted the one before."""

    async def answer(asked: Asked) -> None:
        await asked.send(HEAD)
        for number in range(3):
            await asked.stream(delta(content=f"w{number}"))
            await until(lambda number=number: client.tally.num_frames > number)
            seen_s.append(client.now_s())
        await asked.send(*map(chunk, (delta("stop"), usage(1, 3), DONE)), LAST)

    seen_s: list[float] = []
    sample = Sample(number=0, due_s=0.0)
    async with asking(answer) as (client, _):
        await client.ask(BODY, sample)
    assert (
        sample.frames_s[0] <= seen_s[0] <= sample.frames_s[1] <= seen_s[1] <= sample.frames_s[2] <= seen_s[2]
    )


@pytest.mark.parametrize(
    ("pieces", "error", "detail"),
    [
        ((plain(429, b'{"error": {"message": "too many"}}'),), "http_429", "too many"),
        ((plain(502, b"<h1>bad gateway</h1>", "text/html"),), "http_502", "<h1>bad gateway</h1>"),
        ((plain(307, b""),), "http_307", ""),
        (
            (plain(200, b'{"error": {"message": "no\\u001b[31m room"}}'),),
            "no_stream",
            "the answer is 'application/json', not text/event-stream: no [31m room",
        ),
        ((plain(500, b"[" * 4000),), "http_500", "[[[["),
        ((plain(500, b"d\xe9faut \x1b]0;x\x07"),), "http_500", "d\ufffdfaut ]0;x"),
        (
            (HEAD, chunk(event({"error": {"message": "lost it"}})), chunk(DONE), LAST),
            "error_frame",
            "lost it",
        ),
        ((HEAD, chunk(delta(content="x")), LAST), "truncated", "the stream ended without a finish_reason"),
        ((HEAD, chunk(delta(content="x")), chunk(delta("stop")), LAST), "truncated", "without [DONE]"),
        ((HEAD, chunk(delta("stop")), chunk(DONE), LAST), "empty", "no output; finish_reason 'stop'"),
        ((HEAD, chunk(b"data: nothing\n\n")), "bad_frame", "a frame is no chunk of an answer"),
        ((HEAD, *map(chunk, with_usage(b"1e999"))), "bad_frame", "a frame's counts cannot be read"),
        ((HEAD, *map(chunk, with_usage(b'"\xff"'))), "bad_frame", "a frame is no chunk of an answer"),
        ((HEAD, *map(chunk, with_usage(DEEP))), "bad_frame", "a frame is no chunk of an answer"),
        ((HEAD, chunk(b'data: {"object": %b}\n\n' % DEEP)), "bad_frame", "a frame is no chunk"),
    ],
)
async def test_a_bad_answer_is_a_failure(pieces: tuple[bytes, ...], error: str, detail: str) -> None:
    sample = await sample_of(lambda asked: asked.send(*pieces))
    assert sample.error == error
    assert detail in sample.detail


@pytest.mark.parametrize(
    "sent",
    [b"", HEAD[:20], HEAD, HEAD + chunk(delta(content="x"))],
    ids=["nothing", "half a head", "head", "a frame"],
)
async def test_a_connection_that_breaks_is_a_failure(sent: bytes) -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(sent)
        asked.writer.close()

    sample = await sample_of(answer)
    assert sample.error == ("lost" if sent else "no_response")
    assert sample.detail
    assert len(sample.frames_s) == sent.count(b'"x"')


async def test_an_answer_without_length_is_whole_when_the_connection_ends_after_done() -> None:
    async def answer(asked: Asked) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        await asked.send(head, *whole(["x"]))
        asked.writer.close()

    assert (await sample_of(answer)).error is None


async def test_a_connection_that_breaks_after_done_spoils_nothing() -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(HEAD, *map(chunk, whole(["x"])))
        asked.writer.close()

    sample = await sample_of(answer)
    assert (sample.error, sample.output_tokens) == (None, 1)


async def test_an_answer_is_whole_with_done_though_its_body_stays_open() -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(HEAD, *map(chunk, whole(["x"])))
        await until(asked.reader.at_eof)
        gone.set()

    gone = asyncio.Event()
    sample = Sample(number=0, due_s=0.0)
    async with asking(answer) as (client, _):
        await client.ask(BODY, sample)
        assert (sample.error, sample.output_tokens) == (None, 1)
        assert sample.ended_s == sample.frames_s[-1]  # they came in one read
        await gone.wait()  # the connection is of no use
    assert client.tally.num_failed == 0


async def test_an_answer_ends_with_done_and_not_with_its_body() -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(HEAD, *map(chunk, whole(["x"])))
        await until(lambda: sample.ended_s is not None)
        await asked.send(LAST)

    sample = Sample(number=0, due_s=0.0)
    async with asking(answer) as (client, _):
        await client.ask(BODY, sample)
        ended_s = sample.ended_s
        assert (sample.error, client.tally.num_ended) == (None, 1)
        await client.ask(BODY, sample2 := Sample(number=1, due_s=0.0))
        assert (sample.ended_s, sample2.error) == (ended_s, None)


async def test_an_error_after_the_last_token_is_an_error_also_where_the_body_stays_open() -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(HEAD, *map(chunk, (delta(content="x"), delta("abort"), DONE)))
        await until(asked.reader.at_eof)

    assert (await sample_of(answer)).error == "aborted"


async def test_the_media_type_of_a_stream_may_be_in_capitals() -> None:
    head = HEAD.replace(b"text/event-stream", b"Text/Event-Stream ")
    assert (await sample_of(lambda asked: asked.send(head, *map(chunk, whole(["x"])), LAST))).error is None
    head = HEAD.replace(b"text/event-stream", b"text/event-streams")
    assert (await sample_of(lambda asked: asked.send(head, LAST))).error == "no_stream"


async def test_a_fault_of_our_own_fails_the_request_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(AnswerFrames, "feed", broken)
    sample = await sample_of(answer_well)
    assert (sample.error, sample.detail) == ("bad_frame", "KeyError: 'x'")


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        async with client_of(f"http://127.0.0.1:{unused.getsockname()[1]}") as client:
            sample = Sample(number=0, due_s=0.0)
            await client.ask(BODY, sample)
    assert sample.error == "connect"
    assert (sample.status, sample.headers_s, client.tally.num_failed) == (0, None, 1)


@pytest.mark.parametrize(
    ("sent", "where"),
    [(b"", "headers"), (HEAD + chunk(delta(content="x")), "its end")],
    ids=["nothing", "a frame"],
)
async def test_an_answer_that_takes_too_long_is_a_failure(
    sent: bytes, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(sent)
        await until(asked.reader.at_eof)

    timers = noted_timers(monkeypatch, TIMEOUT_S)
    sample = Sample(number=0, due_s=0.0)
    async with asking(answer, TIMEOUT_S) as (client, server):
        task = asyncio.ensure_future(client.ask(BODY, sample))
        await until(lambda: bool(sample.frames_s if sent else server.asked))
        (time_out,) = timers
        time_out()
        await task
    assert (sample.error, sample.detail) == ("timeout", f"no answer up to {where} within 77 s")


async def test_a_cancelled_request_is_aborted_and_interrupted() -> None:
    came, gone = asyncio.Event(), asyncio.Event()

    async def answer(asked: Asked) -> None:
        came.set()
        await asked.send(HEAD, chunk(delta(content="x")))
        await until(asked.reader.at_eof)
        gone.set()

    sample = Sample(number=0, due_s=0.0)
    async with asking(answer) as (client, _):
        task = asyncio.ensure_future(client.ask(BODY, sample))
        await came.wait()
        await until(lambda: bool(sample.frames_s))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gone.wait()
    assert (sample.error, len(sample.frames_s)) == ("interrupted", 1)


@pytest.mark.parametrize(("max_idle", "num_connections"), [(9, 1), (0, 3)])
async def test_connections_are_kept_where_they_may_be(max_idle: int, num_connections: int) -> None:
    async with serving(answer_well) as server, client_of(server.url, max_idle=max_idle) as client:
        for number in range(3):
            sample = Sample(number=number, due_s=0.0)
            await client.ask(BODY, sample)
            assert sample.error is None
    assert server.num_connections == num_connections

"""The benchmark of resumable streams: its client, its store, and its arithmetic."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.bench_streams import Window, Windows, chat
from benchmarks.event_load import EventClient, Started, delete_stream, start_stream
from benchmarks.load import chat_request
from benchmarks.store_server import store_server
from tests.components import need
from tests.tcp_server import listening

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [
    b"retry: 1000\n\n",
    b'id: 1\ndata: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'id: 2\ndata: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'id: 3\ndata: {"choices":[{"delta":{"content":"id: 9"}}]}\n\n',
    b'id: 4\ndata: {"choices":[],"usage":{"completion_tokens":2}}\n\n',
    b"id: 5\nevent: done\ndata: [DONE]\n\n",
]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.mark.parametrize("coded", [chunk, bytes])
async def test_a_reader_counts_text_and_knows_the_last_number(coded: object) -> None:
    assert callable(coded)
    client = EventClient("/v1/streams/s/events?token=t")
    for data in (HEAD, *(coded(event) for event in EVENTS)):
        client.data_received(data)
    result = await client.done
    assert (result.is_done, result.num_content, result.num_tokens) == (True, 2, 2)
    assert client.last_id == 5
    assert client.num_bytes == len(HEAD) + sum(len(coded(event)) for event in EVENTS)


async def test_a_replay_that_comes_at_once_is_counted_too() -> None:
    client = EventClient("/v1/streams/s/events?token=t")
    client.data_received(HEAD + b"".join(EVENTS))
    assert ((await client.done).num_content, client.last_id) == (2, 5)


async def test_a_stream_that_fails_is_no_measurement() -> None:
    client = EventClient("/v1/streams/s/events?token=t")
    for data in (HEAD, EVENTS[2], b'id: 3\nevent: failed\ndata: {"error":{}}\n\n'):
        client.data_received(data)
    client.connection_lost(None)
    result = await client.done
    assert (result.is_done, result.error) == (False, "the stream failed")


def test_a_reader_asks_from_the_beginning_or_after_a_number() -> None:
    assert EventClient.asking("/e?token=t").startswith(b"GET /e?token=t HTTP/1.1\r\n")
    assert b"last-event-id" not in EventClient.asking("/e")
    assert b"\r\nlast-event-id: 7\r\n" in EventClient.asking("/e", 7)


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server with one answer; its port, and the requests that came."""
    requests: list[bytes] = []

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        requests.append(head + await reader.readexactly(int(lines[b"content-length"])))
        writer.write(answer)
        writer.close()

    async with listening(answered) as server:
        yield server.port, requests


async def test_a_stream_is_started_with_the_chat_of_plain_sse() -> None:
    body = b'{"id":"s","url":"/v1/streams/s/events?token=t","token":"t"}'
    answer = b"HTTP/1.1 201 Created\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    async with answering(answer) as (port, requests):
        started = await start_stream("127.0.0.1", port, chat("m", "stream 3", 7))
    assert started == Started("s", "/v1/streams/s/events?token=t", "t")
    head, _, sent = requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/streams HTTP/1.1\r\n")
    assert json.loads(sent) == json.loads(chat_request("m", "stream 3", 7).partition(b"\r\n\r\n")[2])


async def test_refusals_are_no_measurement() -> None:
    started = Started("s", "/v1/streams/s/events?token=t", "t")
    async with answering(b'HTTP/1.1 503 Busy\r\n\r\n{"error":{}}') as (port, requests):
        with pytest.raises(RuntimeError, match="503"):
            await start_stream("127.0.0.1", port, {})
        with pytest.raises(RuntimeError, match="503"):
            await delete_stream("127.0.0.1", port, started)
    assert requests[1].startswith(b"DELETE /v1/streams/s?token=t HTTP/1.1\r\n")


def test_processes_are_summed_in_each_window() -> None:
    windows = Windows(
        [Window({"a": 1.0, "b": 2.0}, [20, 21, 40]), Window({"a": 3.0, "b": 5.0}, [20, 20, 20])]
    )
    assert windows.us("a") == [1, 3]
    assert windows.us("a", "b") == [3, 8]
    assert windows.gaps_ms(0.5) == [21, 20]
    assert windows.gaps_ms(0.99) == [40, 20]


def test_the_store_tells_what_it_uses(tmp_path: Path) -> None:
    need("valkey")
    with store_server(tmp_path) as server:
        before = server.used_bytes()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(server.url.removeprefix("unix://"))
            client.sendall(b"SET key %s\r\n" % (b"x" * 60_000))  # an inline command has 64 KiB at most
            assert client.recv(5) == b"+OK\r\n"
        assert 60_000 <= server.used_bytes() - before < 200_000
        assert server.process.memory_bytes() > 0

"""The harness of the resume tests, against a played server: its EventSource and its breaking proxy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.e2e.breaking_proxy import PLACES, Break, breaking_proxy, random_breaks
from tests.e2e.event_source import EventParser, EventSource, Message
from tests.tcp_server import listening

NUM_EVENTS = 60
PLAIN = "message"


def parsed(pieces: list[bytes]) -> tuple[list[tuple[str, str, str]], EventParser]:
    """The events of one stream."""
    events: list[tuple[str, str, str]] = []
    parser = EventParser(lambda *event: events.append(event))
    for piece in pieces:
        parser.feed(piece)
    return events, parser


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [(PLAIN, "a", "")]),
        (b"data:a\r\n\r\ndata:  b\r\rdata: c\n\n", [(PLAIN, each, "") for each in ("a", " b", "c")]),
        (b"data\n\ndata\ndata\n\ndata:", [(PLAIN, "", ""), (PLAIN, "\n", "")]),
        (b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n", [(PLAIN, "a", "")]),
        (b": x\nid: 1\ndata: a\n\ndata: b\n\n", [(PLAIN, "a", "1"), (PLAIN, "b", "1")]),
        (b"id: 1\n\nid\ndata: c\n\n", [(PLAIN, "c", "")]),
        (b"id: 1\0\ndata: a\n\nid: 7\n\n", [(PLAIN, "a", "")]),
        (b"event: done\ndata: a\n\ndata: b\n\nevent: lost\n\n", [("done", "a", ""), (PLAIN, "b", "")]),
        ("data: 流水\u2028\x85🌊\n\n".encode(), [(PLAIN, "流水\u2028\x85🌊", "")]),
        (b"data: \xe6\xb5\n\n", [(PLAIN, "\ufffd", "")]),
        (b"other: 1\nretry: 5\ndata: a\n\nretry: 1e3\nretry: -1\n\n", [(PLAIN, "a", "")]),
    ],
)
def test_parser_reads_what_the_standard_says(stream: bytes, events: list[tuple[str, str, str]]) -> None:
    rng = random.Random(1)
    splits = [[stream], [stream[at : at + 1] for at in range(len(stream))]]
    splits += [[stream[:at], stream[at:]] for at in range(len(stream))]
    splits += [list(_split(stream, rng)) for _ in range(20)]
    for pieces in splits:
        got, parser = parsed(pieces)
        assert got == events, pieces
        assert parser.retry_ms == (5 if b"retry" in stream else 3000)


def _split(stream: bytes, rng: random.Random) -> Iterator[bytes]:
    while stream:
        size = rng.randrange(5)
        yield stream[:size]
        stream = stream[size:]


@pytest.mark.parametrize(("by_the_letter", "kept"), [(False, "4"), (True, "")])
def test_a_blank_line_forgets_the_last_id_by_the_letter_alone(by_the_letter: bool, kept: str) -> None:
    parser = EventParser(lambda *event: None, by_the_letter)
    parser.feed(b"id: 4\ndata: a\n\nid: 5\ndata: b\n")  # cut within the event
    parser.begin()
    assert parser.last_event_id == "4"
    parser.feed(b": ping\n\n")
    assert parser.last_event_id == kept


class Played:
    """A server of one numbered stream, which says `done` at its end, then 204."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.port = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._answer(reader, writer)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        ids = [line.partition(": ")[2] for line in head.split("\r\n") if line.startswith("last-event-id")]
        self.asked.append(ids[0] if ids else None)
        after = int(ids[0]) if ids else 0
        if after > NUM_EVENTS:
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
            writer.write(b"transfer-encoding: chunked\r\n\r\n")
            await _chunk(writer, b"retry: 1000\n")
            for number in range(after + 1, NUM_EVENTS + 1):
                await _chunk(writer, f"id: {number}\ndata: <{number}流>\n\n".encode())
            await _chunk(writer, b"id: %d\nevent: done\ndata: [DONE]\n\n" % (NUM_EVENTS + 1))
            writer.write(b"0\r\n\r\n")


async def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
    await writer.drain()


@asynccontextmanager
async def playing() -> AsyncIterator[Played]:
    played = Played()
    async with listening(played.connected) as server:
        played.port = server.port
        yield played


def assert_whole(messages: list[Message]) -> None:
    assert [message.last_event_id for message in messages] == [
        str(number) for number in range(1, NUM_EVENTS + 2)
    ]
    assert [message.data for message in messages[:-1]] == [f"<{n}流>" for n in range(1, NUM_EVENTS + 1)]
    assert messages[-1].type == "done"


@pytest.mark.parametrize("by_the_letter", [False, True])
async def test_event_source_comes_back_until_it_is_told_not_to(by_the_letter: bool) -> None:
    async with playing() as played:
        source = await EventSource(played.port, "/", by_the_letter=by_the_letter).run()
    assert_whole(source.messages)
    assert played.asked == [None, str(NUM_EVENTS + 1)]
    assert [connection.status for connection in source.connections] == [200, 204]
    assert source.has_failed


async def test_event_source_that_is_closed_does_not_come_back() -> None:
    def close(source: EventSource, message: Message) -> None:
        if message.type == "done":
            source.close()

    async with playing() as played:
        source = await EventSource(played.port, "/", on_message=close).run()
    assert_whole(source.messages)
    assert len(played.asked) == 1
    assert not source.has_failed


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["reset", "close"])
async def test_proxy_breaks_at_each_place_and_the_stream_is_whole(place: str, how: str) -> None:
    async with playing() as played, breaking_proxy([played.port], [Break(place, 40, how)]) as proxy:
        source = await EventSource(proxy.port, "/").run()
    assert_whole(source.messages)
    assert proxy.broken == {(place, how): 1}
    assert proxy.num_connections == len(source.connections) == 3
    first = source.connections[0]
    assert not first.is_complete
    assert (first.status, first.num_bytes > 0) == {
        "before the request": (0, False),
        "before the head": (0, False),
        "in the head": (0, False),
        "after the head": (200, False),
    }.get(place, (200, True))
    assert len(played.asked) == (2 if place == "before the request" else 3)


async def test_proxy_breaks_at_random_as_often_as_it_is_told() -> None:
    async with (
        playing() as played,
        breaking_proxy([played.port], random_breaks(40, seed=3, max_bytes=30)) as proxy,
    ):
        source = await EventSource(proxy.port, "/").run()
    assert_whole(source.messages)
    assert proxy.num_broken == 40
    assert proxy.num_missed == 0
    assert {place for place, _ in proxy.broken} == set(PLACES)

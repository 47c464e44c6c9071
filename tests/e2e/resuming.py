"""How the end-to-end tests start a resumable stream, read it, and judge what its readers got."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.e2e.asking import COMPLETE, ask
from tests.e2e.breaking_proxy import Break, breaking_proxy
from tests.e2e.event_source import EventSource, Message
from tests.e2e.listening import Listener
from tests.wire import Frame, Head, connect

STREAMS: Final = "/v1/streams"
DONE: Final = "done"
FAILED: Final = "failed"

# What is easily cut or read wrong: characters of two to four bytes, line ends of all kinds, SSE's own words.
SONG: Final = (
    "流水不腐，戶樞不蠹。 Été à Zürich, Ελλάδα, Привет! 🌊🎵👩‍👩‍👧 e\u0301 "
    "data: [DONE]\n\nid: 7\r\nevent: error\r"
    'retry: 0\u2028\u2029\x85 "\\u6d41" {"content": null} \ufeff¡Olé! ไหลริน 물레방아 → 水車 '
) * 4


@dataclass(frozen=True, slots=True)
class Created:
    """A stream as its POST has answered."""

    id: str
    url: str
    token: str
    expires_at: float

    @property
    def events(self) -> str:
        """What an EventSource is given."""
        return self.url if "token=" in self.url else f"{self.url}?token={self.token}"

    @property
    def path(self) -> str:
        return f"{STREAMS}/{self.id}"


async def post(
    port: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> tuple[Head, dict[str, Any]]:
    """The answer to a POST on a connection of its own."""
    async with connect(port) as wire:
        head = await wire.post(STREAMS, body, {"connection": "close", **(headers or {})})
        return head, await wire.json()


async def create(port: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Created:
    """A new stream."""
    head, document = await post(port, body, headers)
    assert head.status == 201, document
    assert document["object"] == "stream"
    assert document["id"] in document["url"]
    return Created(*(document[name] for name in ("id", "url", "token", "expires_at")))


async def delete(port: int, stream: Created, token: str | None = None) -> tuple[int, Any]:
    """Status and document of a DELETE with the stream's token."""
    async with connect(port) as wire:
        path = f"{stream.path}?token={stream.token if token is None else token}"
        head = await wire.request("DELETE", path, headers={"connection": "close"})
        body = await wire.body()
        return head.status, json.loads(body) if body else None


@dataclass(frozen=True, slots=True)
class Told:
    """What a stream says from its first event on. `error` if its end is `failed`, or it has none yet."""

    text: str
    is_done: bool
    error: dict[str, Any] | None


def told(messages: Sequence[Message]) -> Told:
    """What a reader was told from the first event on. Any gap, repetition or disorder is an
    `AssertionError`."""
    listener = Listener()
    error: dict[str, Any] | None = None
    for number, message in enumerate(messages, start=1):
        assert message.last_event_id == str(number), f"event {message.last_event_id} is the {number}th"
        assert error is None, "something follows the failure"
        if message.type == FAILED:
            assert not listener.is_done, "a failure after the end"
            error = json.loads(message.data)["error"]
            assert error.keys() == {"message", "type", "param", "code"}
        else:
            assert message.type == (DONE if message.data == "[DONE]" else "message")
            listener.take(Frame(f"data: {message.data}\n\n".encode(), 0.0))
    return Told(listener.said.content, listener.is_done, error)


def events(messages: Sequence[Message]) -> list[tuple[str, str, str]]:
    """Whatever connection brought them: the same for every reader."""
    return [(message.last_event_id, message.type, message.data) for message in messages]


def assert_refused(source: EventSource, code: str) -> None:
    """A reader that was told why it gets nothing, and then not to come back."""
    (message,) = source.messages
    assert (message.type, message.last_event_id) == (FAILED, FAILED)
    assert json.loads(message.data)["error"]["code"] == code
    assert_came_back_once(source)


def assert_came_back_once(source: EventSource) -> None:
    """After the end of its stream, which it has from one connection, it asked once more: no loop."""
    assert [connection.status for connection in source.connections[-2:]] == [200, 204]
    assert source.connections[-1].last_event_id == source.messages[-1].last_event_id
    assert source.has_failed


async def text_of(port: int, body: Mapping[str, Any]) -> str:
    """The engine's text, from a plain request."""
    plain = {name: value for name, value in body.items() if not name.startswith("stream")}
    outcome = await ask(port, plain)
    assert outcome.kind == COMPLETE, outcome
    return outcome.text


async def read(port: int, path: str, **options: Any) -> EventSource:
    """A reader up to the stream's end."""
    return await EventSource(port, path, **options).run()


async def read_through_breaks(
    ports: Sequence[int], body: Mapping[str, Any], breaks: Sequence[Break], by_the_letter: bool = False
) -> None:
    """The connection breaks at these places of one answer, and nobody can tell from what was read.

    Each new connection goes to the next of these ports.
    """
    count = len(breaks)
    expected = await text_of(ports[0], body)
    stream = await create(ports[0], body)
    async with breaking_proxy(ports, breaks) as proxy:
        source = await read(proxy.port, stream.events, by_the_letter=by_the_letter)
    result = told(source.messages)
    assert result.text == expected
    assert result.is_done
    assert proxy.num_broken == count, proxy.broken
    assert proxy.num_missed == 0
    assert len(source.connections) == proxy.num_connections == count + 2  # the last for `done`, then for 204
    assert_came_back_once(source)
    assert events((await read(ports[-1], stream.events)).messages) == events(source.messages)


async def until_told(source: EventSource, num_messages: int) -> None:
    """Wait for a reader that runs to have so many events."""
    async with asyncio.timeout(30):
        while len(source.messages) < num_messages:
            assert not source.has_failed, source.messages[-1:]
            await asyncio.sleep(0.005)

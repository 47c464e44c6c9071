"""A client of /v1/realtime that remembers every event, and what a response's events must look like.

A wait ends with the event that is waited for; an `error` event on the way to another one fails the test, and
so does one that nobody has waited for when a talk ends. What is said and what must come of it is the tests'
business.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.e2e.asking import MODEL

LIMIT_S: Final = 30.0  # for one wait; far longer than any answer takes
PATH: Final = "/v1/realtime"
ERROR: Final = "error"
DELTA: Final = "response.output_text.delta"
DONE: Final = "response.done"

Event = dict[str, Any]


@dataclass(slots=True)
class Spoken:
    """One response as its events told it, all of which came in order. `calls`: name and arguments of each."""

    id: str
    deltas: list[str] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    items: list[dict[str, Any]] = field(default_factory=list)
    response: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    @property
    def status(self) -> str:
        return str(self.response["status"])

    @property
    def reason(self) -> str | None:
        """Why it is not complete."""
        details = self.response["status_details"] or {}
        return details.get("reason")

    @property
    def item_id(self) -> str:
        """Of a response of one item."""
        (item,) = self.items
        return str(item["id"])


class Talk:
    """One connection. `events`: all that have come, in order.

    Waits raise `AssertionError` and `TimeoutError`.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.events: list[Event] = []
        self._num_read = 0  # up to here somebody has waited for them

    async def send(self, kind: str, **fields: Any) -> None:
        await self.send_text(json.dumps({"type": kind, **fields}))

    async def send_text(self, text: str | bytes) -> None:
        """A message as it is."""
        async with asyncio.timeout(LIMIT_S):
            await self.connection.send(text)

    async def next(self) -> Event:
        """The next event, of whatever kind. Raises `ConnectionClosed`."""
        if self._num_read == len(self.events):
            async with asyncio.timeout(LIMIT_S):
                message = await self.connection.recv()
            assert isinstance(message, str), "a binary message"
            event = json.loads(message)
            assert event["event_id"] not in {each["event_id"] for each in self.events[-64:]}
            self.events.append(event)
        self._num_read += 1
        return self.events[self._num_read - 1]

    async def until(self, kind: str, **fields: Any) -> Event:
        """The next event of this type whose fields have these values."""
        while True:
            event = await self.next()
            if event["type"] == kind and all(event.get(name) == value for name, value in fields.items()):
                return event
            assert event["type"] != ERROR, event

    async def error(self) -> dict[str, Any]:
        """What the next error event says, which must have our shape."""
        return error_in(await self.until(ERROR))

    async def until_done(self, response_id: str) -> Spoken:
        """The whole response, also where its end has been waited past."""
        while not any(is_done(event, response_id) for event in self.events):
            event = await self.next()
            assert event["type"] != ERROR, event
        return spoken(self.events, response_id)

    async def add(self, item: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Create an item; what the conversation has then."""
        await self.send("conversation.item.create", item=item, **fields)
        added = await self.until("conversation.item.added")
        done = await self.until("conversation.item.done")
        assert added["item"]["id"] == done["item"]["id"]
        assert added["previous_item_id"] == done["previous_item_id"]
        return dict(done["item"])

    async def say(self, text: str, role: str = "user", **fields: Any) -> str:
        """Create a message; its id."""
        previous = (
            {"previous_item_id": fields.pop("previous_item_id")} if "previous_item_id" in fields else {}
        )
        return str((await self.add(message(text, role, **fields), **previous))["id"])

    async def begin(self, **response: Any) -> str:
        """Ask for a response; its id as soon as it is created."""
        await self.send("response.create", response=response)
        return str((await self.until("response.created"))["response"]["id"])

    async def respond(self, **response: Any) -> Spoken:
        return await self.until_done(await self.begin(**response))

    async def ask(self, text: str, **response: Any) -> Spoken:
        """One turn."""
        await self.say(text)
        return await self.respond(**response)

    async def retrieve(self, item_id: str) -> dict[str, Any]:
        await self.send("conversation.item.retrieve", item_id=item_id)
        item = (await self.until("conversation.item.retrieved"))["item"]
        assert item["id"] == item_id
        return dict(item)

    async def closed(self) -> tuple[int, str]:
        """Code and reason of the close that comes after whatever events."""
        try:
            while True:
                await self.next()
        except ConnectionClosed as error:
            close = error.rcvd
        assert close is not None, "no close frame"
        return close.code, close.reason

    def forget(self) -> None:
        """All events that were waited past."""
        del self.events[: self._num_read]
        self._num_read = 0

    def vanish(self) -> None:
        """Reset the connection, without a word."""
        raw = self.connection.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.transport.abort()

    def assert_no_error_left(self) -> None:
        """No error came after the last event that was waited for."""
        assert not [each for each in self.events[self._num_read :] if each["type"] == ERROR]


@asynccontextmanager
async def talking(port: int, model: str = MODEL, **options: Any) -> AsyncIterator[Talk]:
    """A conversation with a gateway; its session has been created. `options`: of `websockets`' `connect`."""
    options = {"max_size": None, "ping_interval": None, "proxy": None, **options}
    async with connect(f"ws://127.0.0.1:{port}{PATH}?model={model}", **options) as connection:
        talk = Talk(connection)
        created = await talk.next()
        assert created["type"] == "session.created", created
        yield talk
        talk.assert_no_error_left()


def message(text: str, role: str = "user", **fields: Any) -> dict[str, Any]:
    """An item: a message of one text."""
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **fields}


def error_in(event: Event) -> dict[str, Any]:
    """The error of an event, which has every field that clients read."""
    assert event.keys() == {"type", "event_id", "error"}, event
    error = event["error"]
    assert {"type", "code", "message", "param", "event_id"} == error.keys(), error
    assert error["message"]
    return dict(error)


def is_done(event: Event, response_id: str) -> bool:
    return bool(event["type"] == DONE and event["response"]["id"] == response_id)


# -- the order of a response's events ------------------------------------------------------------------------


def spoken(events: Sequence[Event], response_id: str) -> Spoken:
    """A response that has ended, of all events of its connection.

    Raises `AssertionError` where an event is missing, out of place or says something else than the others.
    """
    said = Spoken(response_id)
    own = list(_events_of(events, response_id))
    created, *middle, done = own
    assert created["type"] == "response.created", created
    assert created["response"]["status"] == "in_progress"
    assert is_done(done, response_id), done
    said.response = done["response"]
    in_conversation = said.response.get("conversation_id") is not None
    while middle:
        middle = _read_item(said, middle, in_conversation)
    assert said.response["output"] == said.items
    assert all(item["status"] != "in_progress" for item in said.items)
    return said


def _events_of(events: Sequence[Event], response_id: str) -> Iterator[Event]:
    """Those of a response and of its items, in order."""
    item_ids: set[str] = set()
    for event in events:
        if event["type"] == "response.output_item.added" and event["response_id"] == response_id:
            item_ids.add(event["item"]["id"])
        about = event.get("response", {}).get("id"), event.get("response_id")
        is_items = event["type"].startswith("conversation.item.") and (
            event.get("item", {}).get("id") in item_ids and not event["type"].endswith(".retrieved")
        )
        if response_id in about or is_items:
            yield event


def _read_item(said: Spoken, events: Sequence[Event], in_conversation: bool) -> list[Event]:
    """One item from its beginning to its end; the events after it."""
    added = events[0]
    assert added["type"] == "response.output_item.added", added
    assert added["output_index"] == len(said.items)
    kind, item_id = added["item"]["type"], added["item"]["id"]
    rest = list(events[1:])
    if in_conversation:
        _take(rest, "conversation.item.added", item_id)
    if kind == "message":
        _read_text(said, rest, item_id)
    else:
        assert kind == "function_call", added
        _read_call(said, rest, item_id)
    if in_conversation:
        assert _take(rest, "conversation.item.done", item_id)["item"]["id"] == item_id
    item = _take(rest, "response.output_item.done", item_id)["item"]
    said.items.append(item)
    if kind == "message" and item["content"]:
        assert [part["text"] for part in item["content"]] == [said.text]
    return rest


def _read_text(said: Spoken, rest: list[Event], item_id: str) -> None:
    """A content part, if there is one."""
    if not rest or rest[0]["type"] != "response.content_part.added":
        return
    assert _take(rest, "response.content_part.added", item_id)["part"]["text"] == ""
    while rest[0]["type"] == DELTA:
        delta = _take(rest, DELTA, item_id)["delta"]
        assert delta, "a delta without text"
        said.deltas.append(delta)
    assert _take(rest, "response.output_text.done", item_id)["text"] == said.text
    assert _take(rest, "response.content_part.done", item_id)["part"]["text"] == said.text


def _read_call(said: Spoken, rest: list[Event], item_id: str) -> None:
    pieces = []
    while rest[0]["type"] == "response.function_call_arguments.delta":
        pieces.append(_take(rest, "response.function_call_arguments.delta", item_id)["delta"])
    done = _take(rest, "response.function_call_arguments.done", item_id)
    assert done["arguments"] == "".join(pieces)
    said.calls.append((done["name"], done["arguments"]))


def _take(rest: list[Event], kind: str, item_id: str) -> Event:
    """The next event, which must be this one of this item."""
    assert rest, f"{kind} is missing"
    event = rest.pop(0)
    assert event["type"] == kind, f"{event} where {kind} must come"
    assert event.get("item_id", event.get("item", {}).get("id")) == item_id, event
    return event

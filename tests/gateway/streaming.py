"""Resumable streams over an engine driven by hand: how they are started and read, and a store that they share
with processes that are not there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from time import time
from typing import Any

from gateway.journal import Journal
from gateway.journal_writer import DONE_EVENT
from gateway.stream_meta import PENDING, Pending, StreamMeta
from gateway.stream_ports import StoreEvents
from gateway.streams import Stream as Kept
from pipeline.stream_errors import KeyReused
from tests.gateway import answering
from tests.gateway.answering import Client, turns
from tests.gateway.asgi import Request
from tests.gateway.serving import Service, chat

STREAMS = "/v1/streams"
RETRY = b"retry: 1000\n\n"


class Started:
    """A stream that a POST has made, as its client knows it."""

    def __init__(self, service: Service, client: Client, first_call: int) -> None:
        self.client = client
        self.engines = service.engine.streams[first_call:]  # its choices in the engine
        self._service = service
        self.id: str = client.json["id"]
        self.token: str = client.json["token"]

    @property
    def engine(self) -> answering.Stream:
        return self.engines[0]

    @property
    def kept(self) -> Kept:
        """As the process has it."""
        return self._service.streams._streams[self.id]

    @property
    def path(self) -> str:
        return f"{STREAMS}/{self.id}"

    async def ends(self, text: str = "the end") -> None:
        """The engine says the last of it."""
        for engine in self.engines:
            engine.say(text, "stop")
        await turns()
        assert self.kept.answer is None


async def post(service: Service, body: bytes | None = None, **headers: str) -> Client:
    """The response to a POST. Underscores in the headers' names are dashes."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await Request(STREAMS, chat() if body is None else body, headers=named).run(service)


async def start(service: Service, body: bytes | None = None, **headers: str) -> Started:
    """A stream that the engine has taken."""
    num_calls = len(service.engine.streams)
    client = await post(service, body, **headers)
    assert client.status == 201, client.body
    return Started(service, client, num_calls)


class Read:
    """A GET for a stream's events."""

    def __init__(
        self,
        service: Service,
        stream: Started | str,
        query: str | None = None,
        last_event_id: str | None = None,
        extensions: Mapping[str, Any] | None = None,
        **headers: str,
    ) -> None:
        """`query`: instead of the token of the stream. `stream`: it, or an id."""
        if query is None:
            query = "" if isinstance(stream, str) else f"token={stream.token}"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if last_event_id is not None:
            named["last-event-id"] = last_event_id
        stream_id = stream if isinstance(stream, str) else stream.id
        self.request = Request(
            f"{STREAMS}/{stream_id}/events",
            method="GET",
            headers=named,
            extensions=extensions,
            query=query.encode("latin-1"),
        )
        self.client = self.request.client
        self.task = self.request.start(service)

    @property
    def events(self) -> bytes:
        """What has come after the first lines."""
        body = self.client.body
        assert body.startswith(b"retry: 1000\n"), body
        return body.partition(b"\n\n")[2].replace(b": ping\n\n", b"")

    @property
    def ids(self) -> list[str]:
        lines = self.events.split(b"\n")
        return [line.removeprefix(b"id: ").decode() for line in lines if line.startswith(b"id: ")]

    @property
    def error(self) -> Any:
        """Of the event `failed` that has ended it."""
        return error_of(self.client)

    async def to_end(self) -> Read:
        await asyncio.wait_for(asyncio.shield(self.task), 5)
        return self

    async def leaves(self) -> None:
        self.request.disconnect()
        await self.to_end()


async def read(service: Service, stream: Started | str, query: str | None = None, **options: Any) -> Read:
    """A reader that has got what is there."""
    made = Read(service, stream, query, **options)
    await turns(8)
    return made


def error_of(client: Client) -> Any:
    frame = client.frames[-1].split(b"\n")
    assert frame[-2] == b"event: failed", frame
    assert client.is_ended
    return json.loads(frame[-1].removeprefix(b"data: "))["error"]


def frame(number: int) -> bytes:
    return b'data: {"n":%d}\n\n' % number


class SharedStore:
    """`Store` for one process. What others do in it, the test does; each call is remembered."""

    def __init__(self) -> None:
        self.owner = "me"
        self.metas: dict[str, StreamMeta] = {}
        self.copies: dict[str, Journal] = {}
        self.elsewhere: set[str] = set()  # streams that are read there
        self.has_ended: set[str] = set()  # streams of others whose end is there
        self.error: Exception | None = None  # what each wait ends with
        self.gate = asyncio.Event()  # while it is not set, waits go on
        self.gate.set()
        self.calls: list[tuple[str, ...]] = []
        self.events: StoreEvents | None = None
        self.publishes = True  # it has each event at once
        self._claims: dict[str, tuple[str, str]] = {}

    async def _wait(self, *call: str) -> None:
        self.calls.append(call)
        await self.gate.wait()
        if self.error is not None:
            raise self.error

    def count(self, *call: str) -> int:
        return self.calls.count(call)

    async def start(self, events: StoreEvents) -> None:
        self.events = events

    async def close(self) -> None:
        self.calls.append(("close",))

    async def claim(self, key: str, stream_id: str, body_digest: str) -> StreamMeta | Pending | None:
        await self._wait("claim", key)
        holder, digest = self._claims.setdefault(key, (stream_id, body_digest))
        if digest != body_digest:
            raise KeyReused
        return None if holder == stream_id else self.metas.get(holder, PENDING)

    async def release(self, key: str, stream_id: str) -> None:
        await self._wait("release", key)
        if self._claims.get(key, ("",))[0] == stream_id:
            del self._claims[key]

    async def create(self, meta: StreamMeta, key: str | None) -> None:
        await self._wait("create", meta.id)
        self.metas[meta.id] = meta

    def journal_of(self, stream_id: str) -> Callable[[Journal], None]:
        def written(journal: Journal) -> None:
            if self.publishes:
                journal.publish(journal.written)

        return written

    async def meta(self, stream_id: str) -> StreamMeta | None:
        await self._wait("meta", stream_id)
        return self.metas.get(stream_id)

    def follow(self, meta: StreamMeta, copy: Journal) -> None:
        self.calls.append(("follow", meta.id))
        assert meta.id not in self.copies
        self.copies[meta.id] = copy

    def unfollow(self, stream_id: str) -> None:
        self.calls.append(("unfollow", stream_id))
        del self.copies[stream_id]

    async def cancel(self, meta: StreamMeta) -> bool:
        await self._wait("cancel", meta.id, meta.owner)
        return meta.id in self.has_ended

    async def delete(self, stream_id: str) -> None:
        await self._wait("delete", stream_id)
        self.metas.pop(stream_id, None)

    async def read_elsewhere(self, stream_ids: Collection[str]) -> set[str]:
        await self._wait("read_elsewhere", *stream_ids)
        return self.elsewhere & set(stream_ids)

    # -- what other processes do

    def has(self, number: int = 1) -> StreamMeta:
        """A stream of another process."""
        now_s = time()
        meta = StreamMeta(f"{number:032x}", f"token-{number}", "other", None, now_s, now_s + 99, "digest")
        self.metas[meta.id] = meta
        return meta

    def writes(self, stream_id: str, num_events: int = 1, is_end: bool = False) -> None:
        """The next events of a stream that is followed here."""
        copy = self.copies[stream_id]
        for _ in range(num_events):
            number = copy.written + 1
            copy.restore(number, b"\0" + (DONE_EVENT if is_end else frame(number)), is_end)

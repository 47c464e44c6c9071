"""`POST /v1/streams`: an answer that runs on without the connection that asked for it.

    a chat body -> 201 {id, object, url, token, expires_at}

Whatever is wrong before the engine has it is an HTTP error here: nothing but 200 can be read by EventSource.
"""

from __future__ import annotations

import contextlib
import re
import time
from hashlib import blake2b
from http import HTTPStatus
from secrets import token_hex, token_urlsafe
from time import monotonic
from typing import Final

from backend.fault_log import log_fault
from gateway.answer import COMPLETE, Answer
from gateway.detached import Detached
from gateway.edge import EdgeParts, Endpoint
from gateway.exchange import Exchange
from gateway.flow import Prompt, Route
from gateway.frames import json_bytes
from gateway.journal_writer import JournalOutlet, JournalWriter
from gateway.stream_meta import Pending, StreamMeta
from gateway.stream_routes import NO_STORE, PATH
from gateway.streams import Stream, Streams
from gateway.writers import JSON_HEADERS, head
from pipeline.errors import HeadraceError, InvalidRequest
from pipeline.stream_errors import KeyInProgress

_SANE_KEY: Final = re.compile(rb"[\x21-\x7e]{1,255}")


class StreamStart(Endpoint):
    """`POST /v1/streams`: the answer runs on without the connection."""

    def __init__(self, parts: EdgeParts, route: Route, streams: Streams) -> None:
        super().__init__(parts)
        self._route = route
        self._streams = streams
        self._handed_on: set[Exchange] = set()

    async def serve(self, exchange: Exchange) -> None:
        body = await self.flow.read(exchange)
        key, stream_id, digest = _idempotency_key(exchange), token_hex(16), _digest(body)
        held = await self._claim(key, stream_id, digest)
        if held is not None:
            exchange.record.ended = COMPLETE
            _created(exchange, held)
        else:
            try:
                stream = await self._start(exchange, body, stream_id, digest, key)
            except BaseException:
                await self._release(key, stream_id)
                raise
            _created(exchange, stream.meta)
        await self.flush(exchange)

    def over(self, exchange: Exchange) -> None:
        if exchange in self._handed_on:
            self._handed_on.remove(exchange)
        else:
            super().over(exchange)

    async def _claim(self, key: str | None, stream_id: str, digest: str) -> StreamMeta | None:
        """The stream that this key has started before."""
        held = None if key is None else await self._streams.store.claim(key, stream_id, digest)
        if isinstance(held, Pending):
            raise KeyInProgress
        return held

    async def _release(self, key: str | None, stream_id: str) -> None:
        if key is not None:
            with contextlib.suppress(HeadraceError):  # why the request failed says more
                await self._streams.store.release(key, stream_id)

    async def _start(
        self, exchange: Exchange, body: bytes, stream_id: str, digest: str, key: str | None
    ) -> Stream:
        record, streams = exchange.record, self._streams
        streams.check_room()
        prompt, ready = await self.flow.prepare(exchange, self._route, body)
        now_s = time.time()
        meta = StreamMeta(
            id=stream_id,
            token=token_urlsafe(24),
            owner=streams.store.owner,
            key_id=record.key_id,
            created_s=now_s,
            expires_s=now_s + streams.limits.lifetime_s,
            body_digest=digest,
        )
        stream = await streams.create(meta, key)
        client = Detached(record, JournalOutlet(stream.journal))
        shape = self._route.shape(record.request_id, int(now_s), prompt.request.model)
        try:
            writer = JournalWriter(
                client.outlet,
                shape,
                prompt.model.vocabulary,
                record,
                prompt.request.delivery,
                len(ready.calls),
                keeps_text=self.flow.keeps_text(prompt),
            )
            stream.answer = self.flow.start(client, writer, prompt, ready)
        except BaseException:
            await streams.discard(stream)
            raise
        self._handed_on.add(exchange)
        self.flow.in_progress.add(client)  # a drain must not end between this and the task's first step
        streams.spawn(self._run(stream, client, stream.answer, prompt))
        return stream

    async def _run(self, stream: Stream, client: Detached, answer: Answer, prompt: Prompt) -> None:
        """The life of a stream's answer."""
        try:
            await self.flow.finish(client, answer, prompt)
        except Exception as error:  # nobody waits for this task
            log_fault(error, client.record.request_id)
        finally:
            self.flow.in_progress.discard(client)
            self._streams.ended(stream, monotonic())
            self.remember(client.record)


def _idempotency_key(exchange: Exchange) -> str | None:
    """The request's key, with that of its sender: others cannot find it. Raises `InvalidRequest`."""
    shown = exchange.headers.get(b"idempotency-key")
    if shown is None:
        return None
    if not _SANE_KEY.fullmatch(shown):
        raise InvalidRequest(
            f"The idempotency key has {len(shown)} characters; it must be 1 to 255 visible ASCII ones.",
            "idempotency-key",
        )
    return f"{exchange.record.key_id or ''}:{shown.decode()}"


def _digest(body: bytes) -> str:
    return blake2b(body, digest_size=16).hexdigest()


def _created(exchange: Exchange, meta: StreamMeta) -> None:
    record = exchange.record
    record.status = HTTPStatus.CREATED
    events = f"{PATH}/{meta.id}/events"
    body = json_bytes(
        {
            "id": meta.id,
            "object": "stream",
            "url": f"{events}?token={meta.token}",
            "token": meta.token,
            "expires_at": int(meta.expires_s),
        }
    )
    headers = head([*JSON_HEADERS, (b"location", events.encode()), NO_STORE], record)
    exchange.outlet.start(HTTPStatus.CREATED, [*headers, (b"content-length", b"%d" % len(body))])
    exchange.outlet.end(body)

"""`GET /v1/streams/ID/events`: one reader of a stream, as EventSource is one.

EventSource reconnects after every end but a 204, and shows its page nothing of any status but 200. So this
route has no other: what is wrong is told as a named event `failed`, whose id makes the next GET a 204.

Not here: the way of an event to its reader (`gateway/stream_reader.py`).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from http import HTTPStatus
from time import monotonic
from typing import Final

from backend.fault_log import log_fault
from gateway.answer import COMPLETE
from gateway.edge import EdgeParts, Endpoint
from gateway.error_body import how_it_ended
from gateway.exchange import Exchange
from gateway.journal import Journal
from gateway.stream_reader import LATER, RETRY, StreamReader, farewell
from gateway.stream_routes import (
    STREAM_ROUTE,
    StreamAccess,
    no_content,
    query_of,
    request_id_header,
    stream_id_of,
)
from gateway.streams import Stream
from gateway.writers import SSE_HEADERS
from pipeline.errors import ClientGone, HeadraceError
from pipeline.stream_errors import BadEventId, StoreUnavailable

EVENTS_ROUTE: Final = f"{STREAM_ROUTE}/events"
FAILED_ID: Final = "failed"  # the id of an event that ends a reader whatever the stream does
COPY_LIMIT_S: Final = 2.0  # for a copy to get where its reader was
_NUMBER: Final = re.compile(r"[0-9]{1,15}")


class StreamEvents(Endpoint):
    """`GET /v1/streams/ID/events`: one reader."""

    def __init__(self, parts: EdgeParts, access: StreamAccess) -> None:
        super().__init__(parts)
        self._access = access
        self._readers: dict[Exchange, StreamReader] = {}  # until all that they were sent has left

    async def serve(self, exchange: Exchange) -> None:
        query = query_of(exchange)
        shown = exchange.headers.get(b"last-event-id", b"").decode("latin-1") or query.get(
            "last_event_id", ""
        )
        if shown == FAILED_ID:
            exchange.record.ended = COMPLETE
            no_content(exchange)
        else:
            await self._answer(exchange, query, shown)
        await self.flush(exchange)

    def look(self, now_s: float) -> None:
        """Heartbeats, and readers that do not read; called several times a second."""
        for exchange, reader in list(self._readers.items()):
            reason = reader.look(now_s)
            if reason is not None:
                exchange.on_gone(reason)
                exchange.outlet.drop()
                exchange.close()

    def cut(self, error: HeadraceError) -> None:
        """The server stops: readers of streams that go on elsewhere go there. Ours have been ended."""
        for reader in list(self._readers.values()):
            reader.leave(error)

    def over(self, exchange: Exchange) -> None:
        record, reader = exchange.record, self._readers.pop(exchange, None)
        if reader is not None:
            record.ended, record.detail = reader.ended, reader.detail
        self.metrics.requests.labels(EVENTS_ROUTE, str(record.status), record.ended).inc()
        line = {
            "time": round(time.time(), 3),
            "event": "stream_reader",
            "id": record.request_id,
            "route": EVENTS_ROUTE,
            "client": record.client,
            "key": record.key_id,
            "stream": stream_id_of(exchange.path),
            "status": record.status,
            "total_ms": round((monotonic() - record.started_s) * 1e3, 3),
            "events": 0 if reader is None else reader.num_events,
            "bytes": 0 if reader is None else reader.num_bytes,
            "lag_peak_events": 0 if reader is None else reader.peak_lag,
            "ended": record.ended,
            "detail": record.detail,
            "buffered_peak_bytes": exchange.outlet.peak,
        }
        self.request_log.write(line)

    async def _answer(self, exchange: Exchange, query: Mapping[str, str], shown: str) -> None:
        try:
            stream, after = await exchange.unless_gone(self._open(exchange, query, shown))
        except ClientGone:
            raise
        except Exception as error:
            if not isinstance(error, HeadraceError):
                log_fault(error, exchange.record.request_id)
            self._failed(exchange, error)
        else:
            if stream.journal.is_over and after == stream.journal.last:
                exchange.record.ended = COMPLETE
                no_content(exchange)
            elif stream.error is not None:
                self._failed(exchange, stream.error, is_final=stream.state != "copy")
            else:
                await self._follow(exchange, stream, after)

    async def _open(self, exchange: Exchange, query: Mapping[str, str], shown: str) -> tuple[Stream, int]:
        """The stream, and the number after which its reader goes on. Raises what is wrong."""
        meta = await self._access.meta(exchange, query)
        if shown and not _NUMBER.fullmatch(shown):
            raise BadEventId(
                f"The event id {shown[:40]!r} is none that this stream gave; it must be a number."
            )
        after = int(shown or 0)
        stream = self._access.streams.open(meta)
        if stream.state == "copy":
            await _filled(stream.journal, after)
        last = stream.journal.written  # of which other processes may have told more than we have
        if after > last:
            raise BadEventId(f"The event id {after} is none that this stream gave; its last one is {last}.")
        return stream, after

    async def _follow(self, exchange: Exchange, stream: Stream, after: int) -> None:
        exchange.record.status = HTTPStatus.OK
        exchange.outlet.start(HTTPStatus.OK, _event_headers(exchange))
        reader = StreamReader(
            exchange.outlet, stream.journal, after, self.flow.limits_of(exchange), monotonic()
        )
        exchange.on_gone = reader.close
        self._readers[exchange] = reader
        self._access.streams.attach(stream, reader)
        try:
            reader.start()
            await exchange.finished()
        finally:
            self._access.streams.detach(stream, reader)
            if not reader.ended:
                reader.close("the server has ended the connection")

    def _failed(self, exchange: Exchange, error: Exception, is_final: bool = False) -> None:
        record = exchange.record
        record.status = HTTPStatus.OK
        record.ended, record.detail = how_it_ended(error)
        exchange.outlet.start(HTTPStatus.OK, _event_headers(exchange))
        said = farewell(error, is_final)
        exchange.outlet.end(said if said == LATER else RETRY + said)


class _Filled:
    """`Follower` of a copy: done when it has what its reader had, or will never have more."""

    def __init__(self, journal: Journal, after: int) -> None:
        self._journal = journal
        self._after = after
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.advance()

    def advance(self) -> None:
        journal = self._journal
        if not self.done.done() and (journal.last >= max(self._after, 1) or journal.is_over):
            self.done.set_result(None)

    def fail(self, error: HeadraceError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


async def _filled(journal: Journal, after: int) -> None:
    """Wait until a copy is there. Raises `StoreUnavailable`."""
    if not after:
        return
    waiting = _Filled(journal, after)
    journal.followers.add(waiting)
    try:
        async with asyncio.timeout(COPY_LIMIT_S):
            await waiting.done
    except TimeoutError:
        raise StoreUnavailable from None
    finally:
        journal.followers.discard(waiting)


def _event_headers(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    return [*SSE_HEADERS, request_id_header(exchange)]

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
from gateway.edge import Endpoint
from gateway.error_body import INTERNAL_CODE
from gateway.exchange import Exchange
from gateway.flow import Flow
from gateway.journal import Journal
from gateway.keys import ApiKeys
from gateway.metrics import Metrics
from gateway.outlet import ReaderLimits
from gateway.request_log import RequestLog
from gateway.stream_reader import RETRY, StreamReader, failed_frame
from gateway.stream_routes import (
    STREAM_ROUTE,
    find_stream,
    no_content,
    query_of,
    request_id_header,
    stream_id_of,
)
from gateway.streams import Stream, Streams
from gateway.writers import SSE_HEADERS
from pipeline.errors import ClientGone, Draining, HeadraceError
from pipeline.stream_errors import BadEventId, StoreUnavailable

EVENTS_ROUTE: Final = f"{STREAM_ROUTE}/events"
FAILED_ID: Final = "failed"  # the id of an event that ends a reader whatever the stream does
# The store may be back when the client is, or another process answer it: no event, so that it comes with its
# own id. No blank line: it would make the client forget that.
LATER: Final = b"retry: 3000\n"
COPY_LIMIT_S: Final = 2.0  # for a copy to get where its reader was
_NUMBER: Final = re.compile(r"[0-9]{1,15}")


class StreamEvents(Endpoint):
    """`GET /v1/streams/ID/events`: one reader."""

    def __init__(
        self,
        flow: Flow,
        streams: Streams,
        keys: ApiKeys,
        metrics: Metrics,
        request_log: RequestLog,
        reader: ReaderLimits,
    ) -> None:
        super().__init__(flow, metrics, request_log, reader)
        self._streams = streams
        self._keys = keys
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

    def over(self, exchange: Exchange) -> None:
        record, reader = exchange.record, self._readers.pop(exchange, None)
        if reader is not None:
            record.ended, record.detail = reader.ended, reader.detail
            exchange.on_gone = _ignore  # an exchange waits for the collector, and a journal must not
        self.metrics.requests.labels(EVENTS_ROUTE, str(record.status), record.ended).inc()
        line = {
            "time": round(time.time(), 3),
            "event": "stream_reader",
            "id": record.request_id,
            "route": EVENTS_ROUTE,
            "client": record.client,
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
        except (StoreUnavailable, Draining) as error:
            self._failed(exchange, error, LATER)
        except HeadraceError as error:
            self._failed(exchange, error, RETRY + failed_frame(error))
        except Exception as error:
            log_fault(error, exchange.record.request_id)
            self._failed(exchange, error, RETRY + failed_frame(error))
        else:
            if stream.journal.is_over and after == stream.journal.last:
                exchange.record.ended = COMPLETE
                no_content(exchange)
            elif stream.error is not None:
                self._failed(exchange, stream.error, RETRY + failed_frame(stream.error))
            else:
                await self._follow(exchange, stream, after)

    async def _open(self, exchange: Exchange, query: Mapping[str, str], shown: str) -> tuple[Stream, int]:
        """The stream, and the number after which its reader goes on. Raises what is wrong."""
        stream = await find_stream(exchange, self._streams, self._keys, query)
        if shown and not _NUMBER.fullmatch(shown):
            raise BadEventId(
                f"The event id {shown[:40]!r} is none that this stream gave; it must be a number."
            )
        after = int(shown or 0)
        if stream.is_copy:
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
        self._streams.attach(stream, reader)
        try:
            reader.start()
            await exchange.finished()
        finally:
            self._streams.detach(stream, reader)
            if not reader.ended:
                reader.close("the server has ended the connection")

    def _failed(self, exchange: Exchange, error: Exception, body: bytes) -> None:
        record = exchange.record
        record.status = HTTPStatus.OK
        if isinstance(error, HeadraceError):
            record.ended, record.detail = error.code or error.type, error.log_detail
        else:
            record.ended = INTERNAL_CODE
        exchange.outlet.start(HTTPStatus.OK, _event_headers(exchange))
        exchange.outlet.end(body)


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


def _ignore(reason: str) -> None:
    pass


def _event_headers(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    return [*SSE_HEADERS, request_id_header(exchange)]

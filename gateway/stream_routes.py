"""What the routes of resumable streams share: their paths, whom they let in, and how a stream is deleted.

    POST   /v1/streams              a chat body -> 201 {id, object, url, token, expires_at}; stream_start.py
    GET    /v1/streams/ID/events    the events after `Last-Event-ID`, and on to the end; stream_events.py
    DELETE /v1/streams/ID           204

Not here: the life of a stream (`gateway/streams.py`).
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs

from gateway.answer import COMPLETE
from gateway.edge import Endpoint
from gateway.exchange import Exchange
from gateway.flow import Flow
from gateway.keys import ApiKeys
from gateway.metrics import Metrics
from gateway.outlet import ReaderLimits
from gateway.request_log import RequestLog
from gateway.stream_meta import StreamMeta
from gateway.streams import Stream, Streams
from pipeline.errors import BadKey
from pipeline.stream_errors import BadStreamToken, UnknownStream

PATH: Final = "/v1/streams"
STREAM_ROUTE: Final = f"{PATH}/{{id}}"  # as logs and metrics name it
NO_STORE: Final = (b"cache-control", b"no-store")
_STREAM_ID: Final = re.compile(r"[0-9a-f]{32}")


class StreamDelete(Endpoint):
    """`DELETE /v1/streams/ID`."""

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

    async def serve(self, exchange: Exchange) -> None:
        exchange.record.route = STREAM_ROUTE
        stream = await find_stream(exchange, self._streams, self._keys, query_of(exchange))
        await self._streams.cancel(stream)
        exchange.record.ended = COMPLETE
        no_content(exchange)
        await self.flush(exchange)


async def find_stream(
    exchange: Exchange, streams: Streams, keys: ApiKeys, query: Mapping[str, str]
) -> Stream:
    """The stream of the path, if this client may have it. Raises what is wrong."""
    stream_id = stream_id_of(exchange.path)
    stream = None if stream_id is None else await streams.find(stream_id)
    if stream is None:
        raise UnknownStream
    _check_access(exchange, stream.meta, keys, query)
    return stream


def _check_access(exchange: Exchange, meta: StreamMeta, keys: ApiKeys, query: Mapping[str, str]) -> None:
    """By the stream's token, or by the API key that started it. Raises `BadStreamToken`."""
    _, _, bearer = exchange.headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    token = meta.token.encode()
    if any(hmac.compare_digest(shown.encode(), token) for shown in (query.get("token", ""), bearer.strip())):
        return
    try:
        if meta.key_id is not None and keys.check(exchange.headers) == meta.key_id:
            return
    except BadKey:
        pass
    raise BadStreamToken


def stream_id_of(path: str) -> str | None:
    found = path.removeprefix(PATH + "/").removesuffix("/events")
    return found if _STREAM_ID.fullmatch(found) else None


def query_of(exchange: Exchange) -> dict[str, str]:
    """The last of each name's values; nothing of a query that no client of ours sends."""
    try:
        found = parse_qs(exchange.query_string.decode("latin-1"), max_num_fields=16)
    except ValueError:
        return {}
    return {name: values[-1] for name, values in found.items()}


def no_content(exchange: Exchange) -> None:
    exchange.record.status = HTTPStatus.NO_CONTENT
    exchange.outlet.start(HTTPStatus.NO_CONTENT, [NO_STORE, request_id_header(exchange)])
    exchange.outlet.end()


def request_id_header(exchange: Exchange) -> tuple[bytes, bytes]:
    return b"x-request-id", exchange.record.request_id.encode()

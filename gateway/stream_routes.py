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
from gateway.edge import EdgeParts, Endpoint
from gateway.exchange import Exchange
from gateway.keys import ApiKeys
from gateway.stream_meta import StreamMeta
from gateway.streams import Streams
from pipeline.errors import BadKey
from pipeline.stream_errors import BadStreamToken, UnknownStream

PATH: Final = "/v1/streams"
STREAM_ROUTE: Final = f"{PATH}/{{id}}"  # as logs and metrics name it
NO_STORE: Final = (b"cache-control", b"no-store")
_STREAM_ID: Final = re.compile(r"[0-9a-f]{32}")


class StreamAccess:
    """Which stream a request means, and whether its client may have it."""

    def __init__(self, streams: Streams, keys: ApiKeys) -> None:
        self.streams = streams
        self._keys = keys

    async def meta(self, exchange: Exchange, query: Mapping[str, str]) -> StreamMeta:
        """The stream of the path. Nothing is done for it yet: who guesses must not keep it alive.

        By its token, or by the API key that started it. Raises `UnknownStream`, `BadStreamToken`,
        `StoreUnavailable`.
        """
        stream_id = stream_id_of(exchange.path)
        meta = None if stream_id is None else await self.streams.known(stream_id)
        if meta is None:
            raise UnknownStream
        if not self._has_token(exchange, query, meta.token) and not self._has_key(exchange, meta.key_id):
            raise BadStreamToken
        exchange.record.key_id = meta.key_id
        return meta

    def _has_token(self, exchange: Exchange, query: Mapping[str, str], token: str) -> bool:
        _, _, bearer = exchange.headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        shown = (query.get("token", ""), bearer.strip())
        return any(hmac.compare_digest(each.encode(), token.encode()) for each in shown)

    def _has_key(self, exchange: Exchange, key_id: str | None) -> bool:
        try:
            return key_id is not None and self._keys.check(exchange.headers) == key_id
        except BadKey:
            return False


class StreamDelete(Endpoint):
    """`DELETE /v1/streams/ID`."""

    def __init__(self, parts: EdgeParts, access: StreamAccess) -> None:
        super().__init__(parts)
        self._access = access

    async def serve(self, exchange: Exchange) -> None:
        exchange.record.route = STREAM_ROUTE
        meta = await self._access.meta(exchange, query_of(exchange))
        await self._access.streams.cancel(meta)
        exchange.record.ended = COMPLETE
        no_content(exchange)
        await self.flush(exchange)


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

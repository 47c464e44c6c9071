"""The routes of resumable streams, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.routing import Route as StarletteRoute

from gateway.edge import EdgeParts, Endpoint
from gateway.exchange import Scope
from gateway.flow import Route
from gateway.keys import ApiKeys
from gateway.stream_events import EVENTS_ROUTE, StreamEvents
from gateway.stream_routes import PATH, STREAM_ROUTE, StreamAccess, StreamDelete
from gateway.stream_start import StreamStart
from gateway.streams import Streams

_FOLDER: Final = PATH + "/"


class StreamEdge:
    """`route` says how a body becomes a chat."""

    def __init__(self, parts: EdgeParts, route: Route, streams: Streams, keys: ApiKeys) -> None:
        access = StreamAccess(streams, keys)
        self._start = StreamStart(parts, route, streams)
        self._events = StreamEvents(parts, access)
        self._delete = StreamDelete(parts, access)
        self.look = self._events.look
        self.cut = self._events.cut

    def endpoint(self, scope: Scope) -> Endpoint | None:
        """Who answers a request for one of these routes: without Starlette, which is on the way of tokens."""
        method, path = scope["method"], scope["path"]
        if method == "POST":
            return self._start if path == PATH else None
        if not path.startswith(_FOLDER):
            return None
        rest = path[len(_FOLDER) :]
        if method == "GET":
            return self._events if rest.endswith("/events") and rest.count("/") == 1 else None
        return self._delete if method == "DELETE" and "/" not in rest else None

    def routes(self) -> Sequence[StarletteRoute]:
        """The same for Starlette, which answers what is none of them."""
        events = StarletteRoute(EVENTS_ROUTE, self._events, methods=["GET"])
        assert events.methods is not None
        events.methods.discard("HEAD")  # which Starlette adds: it would be a reader
        return (
            StarletteRoute(PATH, self._start, methods=["POST"]),
            events,
            StarletteRoute(STREAM_ROUTE, self._delete, methods=["DELETE"]),
        )

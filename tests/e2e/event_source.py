"""An EventSource as the WHATWG's living standard has it (HTML, 9.2): its parser, and how it comes back.

Every connection and every message is kept for the test to look at. What the messages must say is the tests'
business. Times are the server's, scaled down, so that a `retry` of a second costs a test ten milliseconds.
"""

from __future__ import annotations

import asyncio
import codecs
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import httptools

DEFAULT_RETRY_MS: Final = 3000
LIMIT_S: Final = 30.0  # for a connection to bring anything at all, a heartbeat or an end


@dataclass(frozen=True, slots=True)
class Message:
    """One event as a page gets it. `connection`: the number of the one that brought it, from 0."""

    type: str
    data: str
    last_event_id: str
    connection: int


class EventParser:
    """The bytes of event streams to their events, one stream after the other.

    `last_event_id` is the one of the event source: what a new connection sends. With `by_the_letter` the
    buffer behind it begins empty with each stream, as the standard's words have it; browsers keep it.
    """

    def __init__(self, on_event: Callable[[str, str, str], None], by_the_letter: bool = False) -> None:
        self._on_event = on_event
        self._by_the_letter = by_the_letter
        self.last_event_id = ""
        self.retry_ms = DEFAULT_RETRY_MS
        self.begin()

    def begin(self) -> None:
        """A new stream: what the last one left unfinished is lost."""
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")  # which drops one BOM
        self._line = ""
        self._skips_lf = False
        self._type = ""
        self._data: list[str] = []
        self._id = "" if self._by_the_letter else self.last_event_id

    def feed(self, data: bytes) -> None:
        """The next bytes, cut anywhere."""
        text = self._decoder.decode(data)
        if text and self._skips_lf:
            self._skips_lf = False
            text = text.removeprefix("\n")
        self._skips_lf = text.endswith("\r") or (self._skips_lf and not text)
        *lines, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for line in lines:
            self._take(self._line + line)
            self._line = ""
        self._line += rest

    def _take(self, line: str) -> None:
        if not line:
            self._dispatch()
            return
        name, _, value = line.partition(":")  # a comment has no name
        value = value.removeprefix(" ")
        if name == "event":
            self._type = value
        elif name == "data":
            self._data.append(value)
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "retry" and value.isascii() and value.isdigit():
            self.retry_ms = int(value)

    def _dispatch(self) -> None:
        """A blank line. It moves the last event id even if there is nothing to tell."""
        self.last_event_id = self._id
        kind, data = self._type, self._data
        self._type, self._data = "", []
        if data:
            self._on_event(kind or "message", "\n".join(data), self.last_event_id)


@dataclass(slots=True)
class Connection:
    """One request and what became of it. `status` 0: it ended before its head was complete."""

    last_event_id: str | None
    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    num_bytes: int = 0  # of its body
    is_complete: bool = False  # the body came to its own end

    def header(self, name: str) -> str:
        """A header's values, joined; empty if there is none."""
        return ", ".join(value for key, value in self.headers if key == name)


class _Response:
    """Takes the bytes of a response for a connection; its body goes to the parser as it comes."""

    def __init__(self, connection: Connection, parser: EventParser) -> None:
        self._connection = connection
        self._events = parser
        self._http = httptools.HttpResponseParser(self)
        self.feed = self._http.feed_data
        self.is_refused = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._connection.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        connection = self._connection
        connection.status = self._http.get_status_code()
        essence = connection.header("content-type").partition(";")[0].strip().lower()
        self.is_refused = connection.status != 200 or essence != "text/event-stream"

    def on_body(self, data: bytes) -> None:
        self._connection.num_bytes += len(data)
        if not self.is_refused:
            self._events.feed(data)

    def on_message_complete(self) -> None:
        self._connection.is_complete = True


class EventSource:
    """Follows one stream until the server says that it is over, or somebody closes it.

    `path` goes to a port of this machine. `on_message` may be a page's `close()` on `done`. After
    `max_connections` it gives up, so that an endless loop of reconnections fails a test and does not hang it.
    """

    def __init__(
        self,
        port: int,
        path: str,
        *,
        tls: ssl.SSLContext | None = None,
        headers: Sequence[tuple[str, str]] = (),
        retry_scale: float = 0.01,
        by_the_letter: bool = False,
        max_connections: int = 1000,
        on_message: Callable[[EventSource, Message], None] = lambda source, message: None,
    ) -> None:
        self.port, self.path = port, path
        self._tls = tls
        self._headers = headers
        self._retry_scale = retry_scale
        self._max_connections = max_connections
        self._on_message = on_message
        self._parser = EventParser(self._on_event, by_the_letter)
        self.messages: list[Message] = []
        self.connections: list[Connection] = []
        self.is_closed = False  # by the page
        self.has_failed = False  # by the server: it is told not to come back

    @property
    def last_event_id(self) -> str:
        return self._parser.last_event_id

    def close(self) -> None:
        """As a page does: nothing more is told, and it does not come back."""
        self.is_closed = True

    async def run(self) -> EventSource:
        """Returns when it is closed or has failed; itself."""
        while True:
            await self._connect()
            if self.is_closed or self.has_failed:
                return self
            assert len(self.connections) < self._max_connections, f"{self._max_connections} connections"
            await asyncio.sleep(self._parser.retry_ms / 1000 * self._retry_scale)

    def _on_event(self, kind: str, data: str, last_event_id: str) -> None:
        if not self.is_closed:
            message = Message(kind, data, last_event_id, len(self.connections) - 1)
            self.messages.append(message)
            self._on_message(self, message)

    async def _connect(self) -> None:
        """One connection to its end."""
        connection = Connection(self.last_event_id or None)
        self.connections.append(connection)
        self._parser.begin()
        response = _Response(connection, self._parser)
        with suppress(OSError):  # refused, reset: EventSource tries again
            name = "localhost" if self._tls else None
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", self.port, ssl=self._tls, server_hostname=name
            )
            try:
                writer.write(self._request(connection))
                await self._read(reader, response, connection)
            finally:
                writer.transport.abort()

    def _request(self, connection: Connection) -> bytes:
        lines = [f"GET {self.path} HTTP/1.1", "host: localhost", "accept: text/event-stream"]
        lines += [f"{name}: {value}" for name, value in self._headers]
        if connection.last_event_id is not None:
            lines.append(f"last-event-id: {connection.last_event_id}")
        return "\r\n".join([*lines, "cache-control: no-store", "", ""]).encode()

    async def _read(self, reader: asyncio.StreamReader, response: _Response, connection: Connection) -> None:
        while not (connection.is_complete or response.is_refused or self.is_closed):
            try:
                data = await asyncio.wait_for(reader.read(1 << 16), LIMIT_S)
            except TimeoutError:  # which is an OSError, and no reason to come back
                raise AssertionError(f"nothing came for {LIMIT_S:g} s") from None
            if not data:
                return
            response.feed(data)
        self.has_failed = response.is_refused

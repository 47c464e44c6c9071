"""An HTTP/2 client that shows what is on the wire: many streams on one TLS connection, each read as it comes.

A stream takes the place of a `Wire`, so that one test speaks HTTP/1.1 and HTTP/2. Flow control follows the
reader: what a test does not read is not acknowledged, and the server's window closes.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)

from tests.wire import LIMIT_S, Head, Wire

STREAM_WINDOW_BYTES: Final = 65_535  # HTTP/2's default
_CONNECTION_WINDOW_BYTES: Final = 16 << 20  # a stream that nobody reads must not stop the others
_NOT_IN_HTTP2: Final = frozenset({"host", "connection", "transfer-encoding"})


class StreamLost(ConnectionResetError):
    """The stream ended untidily: the server has reset it, or the connection is gone. `code` is HTTP/2's."""

    def __init__(self, code: int) -> None:
        super().__init__(f"HTTP/2 error code {code}")
        self.code = code


class H2Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, window_bytes: int) -> None:
        self._reader = reader
        self._writer = writer
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._inboxes: dict[int, asyncio.Queue[Head | DataReceived | StreamLost | None]] = {}
        self._window_opened = asyncio.Event()
        self._h2.local_settings.initial_window_size = window_bytes
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_CONNECTION_WINDOW_BYTES)
        self.flush()
        self._running = asyncio.create_task(self._run())

    def stream(self) -> H2Stream:
        """For one request after another; take several to have them side by side."""
        return H2Stream(self)

    async def close(self) -> None:
        """Close the connection with all its streams, as a browser's window does."""
        self._writer.close()
        with suppress(ConnectionError, ssl.SSLError, TimeoutError):
            await self._writer.wait_closed()
        self._running.cancel()
        await asyncio.wait([self._running])

    async def send(self, headers: list[tuple[str, str]], body: bytes) -> int:
        """Send a request; the number of its stream. Returns early when the server has answered already."""
        number = self._h2.get_next_available_stream_id()
        self._inboxes[number] = asyncio.Queue()
        self._h2.send_headers(number, headers, end_stream=not body)
        self.flush()
        left = memoryview(body)
        while left and self._inboxes[number].empty():
            size = min(self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size)
            if size > 0:
                piece, left = left[:size], left[size:]
                self._h2.send_data(number, bytes(piece), end_stream=not left)
                self.flush()
                await asyncio.wait_for(self._writer.drain(), LIMIT_S)
            else:
                self._window_opened.clear()
                await asyncio.wait_for(self._window_opened.wait(), LIMIT_S)
        return number

    async def receive(self, number: int) -> Head | bytes | None:
        """What comes next on a stream: head, piece of the body, None at its tidy end. Raises `StreamLost`."""
        item = await asyncio.wait_for(self._inboxes[number].get(), LIMIT_S)
        if isinstance(item, StreamLost):
            raise item
        if not isinstance(item, DataReceived):
            return item
        with suppress(Exception):  # the stream or the connection has ended meanwhile: nobody waits for it
            self._h2.acknowledge_received_data(item.flow_controlled_length or 0, number)
            self.flush()
        return item.data or b""

    def reset(self, number: int) -> None:
        self._h2.reset_stream(number, ErrorCodes.CANCEL)
        self.flush()

    def flush(self) -> None:
        if data := self._h2.data_to_send():
            self._writer.write(data)

    async def _run(self) -> None:
        with suppress(ConnectionError, ssl.SSLError):
            while data := await self._reader.read(1 << 16):
                for event in self._h2.receive_data(data):
                    self._handle(event)
                self.flush()
        self._lose_all(ErrorCodes.CONNECT_ERROR)

    def _handle(self, event: Event) -> None:
        if isinstance(event, ConnectionTerminated):
            self._lose_all(int(event.error_code or 0))
        elif isinstance(event, WindowUpdated | RemoteSettingsChanged):
            self._window_opened.set()
        number: int = getattr(event, "stream_id", None) or 0
        inbox = self._inboxes.get(number)
        if inbox is None:
            return
        if isinstance(event, ResponseReceived):
            pairs = [(str(name), str(value)) for name, value in event.headers or ()]
            inbox.put_nowait(Head(int(dict(pairs)[":status"]), tuple(pairs[1:])))
        elif isinstance(event, DataReceived):
            inbox.put_nowait(event)
        elif isinstance(event, StreamEnded):
            inbox.put_nowait(None)
        elif isinstance(event, StreamReset):
            inbox.put_nowait(StreamLost(int(event.error_code or 0)))
        self._window_opened.set()  # who still sends sees that it is answered

    def _lose_all(self, code: int) -> None:
        for inbox in self._inboxes.values():
            inbox.put_nowait(StreamLost(code))
        self._window_opened.set()


class H2Stream(Wire):
    """A stream as a `Wire`: a request, its head, its body frame by frame."""

    def __init__(self, client: H2Client) -> None:
        self._client = client
        self._number = 0
        self._ended = True
        self._events = bytearray()

    async def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Head:
        """As `Wire.request`, on a new stream."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {"content-type": "application/json"} if content else {}
        given.update(headers or {})
        given.setdefault("content-length", str(len(content)))
        own = [(":method", method), (":scheme", "https"), (":authority", "localhost"), (":path", path)]
        fields = [pair for pair in given.items() if pair[0] not in _NOT_IN_HTTP2]
        self._ended = False
        self._events.clear()
        self._number = await self._client.send(own + fields, content)
        return await self.head()

    async def head(self) -> Head:
        head = await self._client.receive(self._number)
        assert isinstance(head, Head), head
        return head

    async def piece(self) -> bytes:
        """The next piece of the body, as DATA frames cut it; empty at its tidy end."""
        while not self._ended:
            data = await self._client.receive(self._number)
            assert not isinstance(data, Head)
            self._ended = data is None
            if data:
                return data
        return b""

    async def close(self) -> None:
        """Cancel the stream, as a browser's tab does; the connection stays."""
        if not self._ended:
            self._ended = True
            self._client.reset(self._number)


@asynccontextmanager
async def connect_h2(
    port: int, tls: ssl.SSLContext, window_bytes: int = STREAM_WINDOW_BYTES
) -> AsyncIterator[H2Client]:
    """A connection to a port of this machine; `tls` must offer `h2` alone. Closed at the end."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=tls, server_hostname="localhost", ssl_shutdown_timeout=0.1
    )
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
    client = H2Client(reader, writer, window_bytes)
    try:
        yield client
    finally:
        await client.close()

"""An HTTP/2 client for load: many streams on one TLS connection, each played as an HTTP/1.1 connection.

A protocol that was written for a socket (`load.StreamClient`) works on a stream unchanged: it writes a
request as HTTP/1.1 and receives a status line and the body, without any coding. Its `abort` resets the
stream and leaves the connection open, as a browser's does.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Final, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, DataReceived, Event, ResponseReceived, StreamEnded, StreamReset
from h2.exceptions import StreamClosedError

WINDOW_BYTES: Final = 1 << 30  # a client that counts never makes the server wait
_NOT_IN_HTTP2: Final = frozenset(("host", "connection", "transfer-encoding"))


class H2Stream(asyncio.Transport):
    """What a protocol takes for its transport; one request."""

    def __init__(self, client: H2Client, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._client = client
        self._number: int | None = None
        self.protocol = protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """The whole request as HTTP/1.1."""
        head, _, body = bytes(data).partition(b"\r\n\r\n")
        line, *fields = head.decode("latin-1").split("\r\n")
        method, path, _ = line.split(" ")
        pairs = [(name.lower(), value.strip()) for name, _, value in (each.partition(":") for each in fields)]
        headers = [(":method", method), (":scheme", "https"), (":authority", "localhost"), (":path", path)]
        headers += [pair for pair in pairs if pair[0] not in _NOT_IN_HTTP2]
        self._number = self._client.send(self, headers, body)

    def abort(self) -> None:
        if self._number is not None:
            self._client.reset(self._number)
            self._number = None


class H2Client(asyncio.Protocol):
    """One connection. Make one with `connect`, then `open` streams on it."""

    def __init__(self) -> None:
        self._h2 = H2Connection(H2Configuration(client_side=True))
        self._streams: dict[int, H2Stream] = {}
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)  # set before any other callback

    @classmethod
    async def connect(cls, host: str, port: int, tls: ssl.SSLContext) -> H2Client:
        """Raises `OSError`, and `RuntimeError` if the server does not speak HTTP/2."""
        loop = asyncio.get_running_loop()
        transport, client = await loop.create_connection(
            cls, host, port, ssl=tls, server_hostname="localhost"
        )
        if transport.get_extra_info("ssl_object").selected_alpn_protocol() != "h2":
            transport.abort()
            raise RuntimeError("the server does not speak HTTP/2")
        return client

    def open(self, protocol: asyncio.Protocol) -> H2Stream:
        """A stream, which asks at once."""
        stream = H2Stream(self, protocol)
        protocol.connection_made(stream)
        return stream

    def close(self) -> None:
        """Cut the connection with all its streams."""
        self._transport.abort()

    def send(self, stream: H2Stream, headers: list[tuple[str, str]], body: bytes) -> int:
        """The number of the new stream."""
        number = self._h2.get_next_available_stream_id()
        self._streams[number] = stream
        self._h2.send_headers(number, headers, end_stream=not body)
        size = self._h2.max_outbound_frame_size
        for start in range(0, len(body), size):
            self._h2.send_data(number, body[start : start + size], end_stream=start + size >= len(body))
        self._flush()
        return number

    def reset(self, number: int) -> None:
        """Nothing happens to a stream that is over."""
        if self._streams.pop(number, None) is not None:
            with suppress(StreamClosedError):  # its end has been read, and is handled next
                self._h2.reset_stream(number, ErrorCodes.CANCEL)
            self._flush()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._h2.local_settings.initial_window_size = WINDOW_BYTES
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW_BYTES)
        self._flush()

    def data_received(self, data: bytes) -> None:
        for event in self._h2.receive_data(data):
            self._handle(event)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.protocol.connection_lost(exc)

    def _handle(self, event: Event) -> None:
        if isinstance(event, ConnectionTerminated):
            self.close()
            return
        number: int = getattr(event, "stream_id", None) or 0
        stream = self._streams.get(number)
        if isinstance(event, DataReceived):
            self._h2.acknowledge_received_data(event.flow_controlled_length or 0, number)
        if stream is None:
            return
        if isinstance(event, ResponseReceived):
            status = dict(event.headers or ())[b":status"]
            stream.protocol.data_received(b"HTTP/2.0 %b\r\n\r\n" % status)
        elif isinstance(event, DataReceived):
            stream.protocol.data_received(event.data or b"")
        elif isinstance(event, StreamEnded | StreamReset):
            self._streams.pop(number, None)
            stream.protocol.connection_lost(None)

    def _flush(self) -> None:
        if data := self._h2.data_to_send():
            self._transport.write(data)

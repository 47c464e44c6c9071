"""A client that shows what is really on the wire: it sends the bytes it is given and reads frame by frame.

For tests of exact output, of timing between frames and of clients that behave badly. HTTP/1.1 only, one
request after another on a connection. Every wait is bounded, so that a server that holds something back fails
the test.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 30.0  # for one read; far longer than any answer takes, shorter than a test's timeout


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of a response; header names in lower case, in order, with repeats."""

    status: int
    headers: tuple[tuple[str, str], ...]

    def __getitem__(self, name: str) -> str:
        """A header's value. Raises `KeyError` if it is absent or repeated."""
        values = [value for key, value in self.headers if key == name]
        if len(values) != 1:
            raise KeyError(f"{name}: {len(values)} values in {self.headers}")
        return values[0]

    def get(self, name: str) -> str | None:
        return self[name] if any(key == name for key, _ in self.headers) else None


@dataclass(frozen=True, slots=True)
class Frame:
    """One server-sent event as it came: its bytes with the blank line, and the loop's time at its end."""

    raw: bytes
    at_s: float

    @property
    def is_comment(self) -> bool:
        return self.raw.startswith(b":")

    @property
    def is_done(self) -> bool:
        return self.raw == b"data: [DONE]\n\n"

    @property
    def data(self) -> Any:
        """The JSON of a frame that is exactly `data: …`. Raises `AssertionError` for any other."""
        assert self.raw.startswith(b"data: "), self.raw
        assert self.raw.count(b"\n") == 2, self.raw
        return json.loads(self.raw[len(b"data: ") : -2])


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._head: Head | None = None
        self._left = 0  # bytes of a content-length body that have not been read
        self._ended = True
        self._events = bytearray()

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)
        await asyncio.wait_for(self._writer.drain(), LIMIT_S)

    async def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Head:
        """Send a request and read the head of the response. A body that is not bytes goes as JSON."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        lines = {
            "host": "localhost",
            **({"content-type": "application/json"} if content else {}),
            **(headers or {}),
        }
        lines.setdefault("content-length", str(len(content)))
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        await self.send(f"{method} {path} HTTP/1.1\r\n{text}\r\n".encode() + content)
        return await self.head()

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Head:
        return await self.request("POST", path, body, headers)

    async def read(self, num_bytes: int) -> bytes:
        """Bytes as they come, for what is not HTTP any more."""
        return await self._read(self._reader.readexactly(num_bytes))

    async def head(self) -> Head:
        """Read status line and headers."""
        raw = await self._read(self._reader.readuntil(b"\r\n\r\n"))
        status_line, *lines = raw[:-4].decode("latin-1").split("\r\n")
        pairs = (line.partition(":")[::2] for line in lines)
        self._head = Head(int(status_line.split(" ")[1]), tuple((k.lower(), v.strip()) for k, v in pairs))
        self._events.clear()
        self._left = int(self._head.get("content-length") or 0)
        self._ended = self._head.get("transfer-encoding") is None and self._left == 0
        return self._head

    async def piece(self) -> bytes:
        """The next piece of the body, as the chunked coding cuts it; empty at its end."""
        if self._ended:
            return b""
        if self._left:
            data = await self._read(self._reader.read(self._left))
            assert data, f"the body ended {self._left} bytes early"
            self._left -= len(data)
            self._ended = not self._left
            return data
        size = int(await self._read(self._reader.readuntil(b"\r\n")), 16)
        chunk = await self._read(self._reader.readexactly(size + 2))
        assert chunk.endswith(b"\r\n")
        self._ended = size == 0
        return chunk[:-2]

    async def body(self) -> bytes:
        """The rest of the body."""
        pieces = []
        while piece := await self.piece():
            pieces.append(piece)
        return b"".join(pieces)

    async def json(self) -> Any:
        return json.loads(await self.body())

    async def frame(self) -> Frame | None:
        """The next server-sent event; None at the end of the body, which must not cut one."""
        while (end := self._events.find(b"\n\n")) < 0:
            piece = await self.piece()
            if not piece:
                assert not self._events, f"the body ends within a frame: {bytes(self._events)!r}"
                return None
            self._events += piece
        raw = bytes(self._events[: end + 2])
        del self._events[: end + 2]
        return Frame(raw, asyncio.get_running_loop().time())

    async def frames(self) -> list[Frame]:
        """All events up to the end of the body."""
        frames = []
        while frame := await self.frame():
            frames.append(frame)
        return frames

    async def closed_by_peer(self) -> bool:
        """Whether the next thing that comes is the end of the connection."""
        try:
            return await self._read(self._reader.read(1)) == b""
        except ConnectionError:
            return True

    async def close(self) -> None:
        """Close as a browser's tab does."""
        self._writer.close()
        with suppress(ConnectionError, ssl.SSLError, TimeoutError):  # the peer was quicker, or says nothing
            await self._writer.wait_closed()

    def reset(self) -> None:
        """Vanish: the peer gets a reset instead of an end."""
        sock: socket.socket = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def _read(self, reading: Any) -> bytes:
        data: bytes = await asyncio.wait_for(reading, LIMIT_S)
        return data


@asynccontextmanager
async def connect(
    port: int | None = None, uds: Path | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Wire]:
    """A connection to a port of this machine, or to a Unix socket. Closed at the end."""
    if uds is not None:
        reader, writer = await asyncio.open_unix_connection(str(uds), limit=1 << 20)
    else:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1",
            port,
            ssl=tls,
            server_hostname="localhost" if tls else None,
            # A browser's tab says goodbye and closes; asyncio by itself waits 30 s for an answer.
            ssl_shutdown_timeout=0.1 if tls else None,
            limit=1 << 20,
        )
    wire = Wire(reader, writer)
    try:
        yield wire
    finally:
        await wire.close()

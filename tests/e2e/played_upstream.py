"""A gateway that the test plays: it sees what nginx passes on, and answers byte by byte as it likes.

Not here: nginx itself (`nginx_site.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from tests import tcp_server
from tests.wire import LIMIT_S

EMPTY: Final = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


def stream_head(content_type: str = "text/event-stream; charset=utf-8") -> bytes:
    """As the gateway begins a stream."""
    fields = f"content-type: {content_type}\r\ncache-control: no-cache\r\nserver-timing: parse;dur=1.5\r\n"
    return f"HTTP/1.1 200 OK\r\n{fields}transfer-encoding: chunked\r\n\r\n".encode()


class Request:
    """What nginx has passed on, and the connection to answer it on."""

    def __init__(
        self, head: bytes, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.head = head
        self.body = body
        self._reader = reader
        self.writer = writer

    @property
    def path(self) -> str:
        """With its query."""
        return self.head.split(b" ", 2)[1].decode()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def end(self) -> None:
        """The tidy end of a chunked body."""
        await self.send(b"0\r\n\r\n")

    async def read(self, num_bytes: int) -> bytes:
        return await asyncio.wait_for(self._reader.readexactly(num_bytes), LIMIT_S)

    async def peer_gone(self) -> None:
        """Returns when nginx has closed this connection."""
        with suppress(ConnectionError):
            assert await asyncio.wait_for(self._reader.read(1), LIMIT_S) == b""


class Upstream:
    """Hands each request to the test, in order."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Request] = asyncio.Queue()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request on each connection; what comes after it is the test's to `read`."""
        with suppress(asyncio.IncompleteReadError):  # nginx had nothing to ask
            head = await reader.readuntil(b"\r\n\r\n")
            lines = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:-2])
            body = await reader.readexactly(int(lines.get(b"content-length", 0)))
            self.requests.put_nowait(Request(head, body, reader, writer))

    async def next(self) -> Request:
        return await asyncio.wait_for(self.requests.get(), LIMIT_S)


@asynccontextmanager
async def listening(path: Path) -> AsyncIterator[Upstream]:
    """An upstream on this Unix socket."""
    played = Upstream()
    try:
        async with tcp_server.listening(played.connected, limit=1 << 20, uds=path):
            yield played
    finally:
        path.unlink(missing_ok=True)  # noqa: ASYNC240 - a socket's name

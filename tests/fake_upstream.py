"""A cheap HTTP/1.1 server that plays engines' servers in tests: kept-alive connections, streams, faults.

What a server of some kind says is `fake_openai_server.py`'s and `fake_sglang_server.py`'s.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.tcp_server import StreamServer

REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    422: "Unprocessable",
    429: "Busy",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it came. `body`: decoded JSON, None without one."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass(slots=True)
class Reply:
    """A whole answer, or a stream of pieces of its body.

    `gap_s`: before each piece but the first. `breaks_off`: the connection is closed after the last piece,
    without the end of the body. `hangs`: nothing comes after the last piece, and the connection stays.
    `is_silent`: nothing comes at all. `raw`: these bytes come instead of a response, and the end.
    """

    status: int = 200
    body: bytes = b""
    pieces: Sequence[bytes] | None = None
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    gap_s: float = 0.0
    breaks_off: bool = False
    hangs: bool = False
    is_silent: bool = False
    raw: bytes | None = None


class FakeUpstream:
    """A server on a free port of loopback. `asked`: all requests; `num_left`: clients gone before the end."""

    def __init__(self, answer: Callable[[Asked], Reply]) -> None:
        self._answer = answer
        self._server = StreamServer(self._connected)
        self.asked: list[Asked] = []
        self.num_connections = 0
        self.num_left = 0
        self.port = 0

    async def start(self, port: int = 0, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        await self._server.start(port, host, tls)
        self.port = self._server.port

    async def stop(self) -> None:
        """Close the port and all connections."""
        await self._server.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def of_path(self, path: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.path == path]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer. False: the connection ends with it."""
        asked = await _read(reader)
        self.asked.append(asked)
        reply = self._answer(asked)
        if reply.is_silent:
            await reader.read(1)
            self.num_left += 1
            return False
        if reply.raw is not None:
            writer.write(reply.raw)
            await writer.drain()
            return False
        fields = {"content-type": reply.content_type, **reply.headers}
        if reply.pieces is None:
            fields["content-length"] = str(len(reply.body))
            writer.write(_head(reply.status, fields) + reply.body)
            await writer.drain()
            return True
        fields["transfer-encoding"] = "chunked"
        writer.write(_head(reply.status, fields))
        gone = asyncio.ensure_future(reader.read(1))
        try:
            if not await _send(reply, writer, gone):
                self.num_left += 1
                return False
            if reply.hangs:
                await gone
                self.num_left += 1
                return False
            if reply.breaks_off:
                writer.transport.abort()
                return False
        finally:
            gone.cancel()  # before the end: else it might take the first byte of the next request
            with suppress(asyncio.CancelledError, ConnectionError):
                await gone
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def _send(reply: Reply, writer: asyncio.StreamWriter, gone: asyncio.Future[bytes]) -> bool:
    """All pieces, each a chunk. False: the client went away."""
    for number, piece in enumerate(reply.pieces or ()):
        if number and reply.gap_s:
            await asyncio.wait([gone], timeout=reply.gap_s)
        if gone.done():
            return False
        writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        await writer.drain()
    await asyncio.sleep(0)
    return not gone.done()


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *lines = head[:-4].split("\r\n")
    method, path, _ = line.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Asked(method, path, headers, json.loads(body) if body else None)


def _head(status: int, fields: Mapping[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}\r\n{lines}\r\n".encode("latin-1")


def json_reply(value: Any, status: int = 200) -> Reply:
    return Reply(status, json.dumps(value, ensure_ascii=False).encode())


def stream_reply(events: Sequence[bytes], **options: Any) -> Reply:
    """Server-sent events, each `data: …`; one chunk of the body each."""
    return Reply(pieces=list(events), content_type="text/event-stream; charset=utf-8", **options)


def event(value: Any) -> bytes:
    """One event with JSON as servers write it."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@asynccontextmanager
async def serving(answer: Callable[[Asked], Reply]) -> AsyncIterator[FakeUpstream]:
    server = FakeUpstream(answer)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def serve_forever(answer: Callable[[Asked], Reply], port: int) -> None:
    """For a process of its own: prints its URL when it listens."""
    server = FakeUpstream(answer)
    await server.start(port)
    print(server.url, flush=True)
    await asyncio.Event().wait()

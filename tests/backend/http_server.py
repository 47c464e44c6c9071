"""A server that does to a connection exactly what a test says, and a receiver that keeps what it is told."""

from __future__ import annotations

import asyncio
import functools
import inspect
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop

from backend.http_ports import Headers, HttpFault, Origin
from tests.tcp_server import listening


def on_both_loops(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test on asyncio's loop and on uvloop: their transports differ where connections end."""

    @functools.wraps(test)
    def on_one(run: Callable[[Awaitable[None]], None], **arguments: Any) -> None:
        run(test(**arguments))

    signature = inspect.signature(test)
    first = inspect.Parameter("run", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    on_one.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[first, *signature.parameters.values()], return_annotation=None
    )
    del on_one.__wrapped__
    return pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])(on_one)


class Peer:
    """The server's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def request(self) -> tuple[str, dict[str, str], bytes]:
        """Its first line, headers and body. Raises `IncompleteReadError` when the client has left."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:-2])
        body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return lines[0], headers, body

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bytes, head: bytes = b"HTTP/1.1 200 OK") -> None:
        await self.say(b"%b\r\ncontent-length: %d\r\n\r\n%b" % (head, len(body), body))

    async def stuck(self) -> None:
        """Returns when the kernel takes no more of what is said: the client does not read."""
        num_same, seen = 0, 0
        while num_same < 40:
            left = self.writer.transport.get_write_buffer_size()
            num_same = num_same + 1 if left == seen > 0 else 0
            seen = left
            await asyncio.sleep(0.001)

    async def gone(self) -> None:
        """Returns when the client has closed; whatever it sends until then is dropped."""
        while True:
            try:
                if not await self.reader.read(1 << 16):
                    return
            except ConnectionError:
                return


@dataclass
class Served:
    origin: Origin
    peers: list[Peer] = field(default_factory=list)
    faults: list[BaseException] = field(default_factory=list)

    @property
    def num_connections(self) -> int:
        return len(self.peers)


Script = Callable[[Peer, int], Awaitable[None]]  # the connection and its number, from 0


@asynccontextmanager
async def serving(
    script: Script,
    tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
    uds: Path | None = None,
) -> AsyncIterator[Served]:
    """Runs `script` for each connection and closes it afterwards. `tls`: of the server and of the client."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        served.peers.append(peer)
        try:
            await script(peer, len(served.peers) - 1)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        except Exception as error:  # not in the loop's hands: the test fails with it
            served.faults.append(error)
        finally:
            writer.close()

    server_tls, client_tls = tls or (None, None)
    async with listening(connected, tls=server_tls, uds=uds) as server:
        if uds is not None:
            served = Served(Origin("localhost", 80, client_tls, str(uds)))
        else:
            served = Served(Origin("localhost" if tls else "127.0.0.1", server.port, client_tls))
        yield served
    assert not served.faults


class Kept:
    """A receiver that keeps all."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = ()
        self.parts: list[bytes] = []
        self.fault: HttpFault | None = None
        self.end = ""
        self.over = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.has_data = asyncio.Event()
        self.on_data: Callable[[bytes], None] | None = None

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def begun(self, status: int, headers: Headers) -> None:
        assert not self.status
        assert not self.end
        self.status, self.headers = status, headers
        self.has_begun.set()

    def data(self, data: bytes) -> None:
        assert data
        assert self.status
        assert not self.end
        self.parts.append(data)
        self.has_data.set()
        if self.on_data is not None:
            self.on_data(data)

    def ended(self) -> None:
        assert self.status
        self._end("ended")

    def failed(self, fault: HttpFault) -> None:
        self.fault = fault
        self._end("failed")

    def _end(self, end: str) -> None:
        assert not self.end
        self.end = end
        self.over.set()

"""Servers in the tests' process that lose no connection: all tests that need one listen through this module.

asyncio's own server forgets a connection that is accepted while it closes (python/cpython#109564), and a
handler that is cancelled before its first step closes nothing. The collector finds such a socket minutes
later, in the middle of another test. Here each connection is known from `accept` on, and the end waits until
the last one is closed.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class ProtocolServer:
    """Gives each connection a protocol of `factory`. `port`: where it listens."""

    def __init__(self, factory: Callable[[], asyncio.Protocol]) -> None:
        self.port = 0
        self._factory = factory
        self._tls: ssl.SSLContext | None = None
        self._listener: socket.socket | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._accepted: dict[socket.socket, asyncio.Transport | None] = {}  # None: it is opening

    async def start(
        self,
        port: int = 0,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
        uds: Path | None = None,
    ) -> None:
        """Listen on a port of this machine, 0 for a free one, or on a Unix socket."""
        if uds is not None:
            self._listener = socket.create_server(str(uds), family=socket.AF_UNIX, backlog=128)
        else:
            self._listener = socket.create_server((host, port), backlog=128)
            self.port = self._listener.getsockname()[1]
        self._tls = tls
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept, self._listener)

    async def stop(self) -> None:
        """Close the port and all connections. May be called twice; `start` listens again."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for accepted, transport in self._accepted.items():
            if transport is None and self._tls is not None:  # else a handshake waits for a silent client
                _shut_down(accepted)
        await asyncio.gather(*self._opening)
        await self.end_work()
        for accepted, transport in self._accepted.items():
            if transport is not None and accepted.fileno() != -1:
                _abort(accepted, transport)
        while any(each.fileno() != -1 for each in self._accepted):  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0)
        self._accepted.clear()

    async def end_work(self) -> None:
        """What is still done for connections has ended when this returns."""

    def opened(self, transport: asyncio.Transport, protocol: asyncio.Protocol) -> None:
        """A connection is ready, and the server still runs."""

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        for each in [each for each in self._accepted if each.fileno() == -1]:
            del self._accepted[each]
        self._accepted[accepted] = None
        keep(self._opening, self._open(accepted))

    async def _open(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        loop, protocol = asyncio.get_running_loop(), self._factory()
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=self._tls)
        except OSError:  # the handshake failed, or the client has left
            return
        self._accepted[accepted] = transport
        if self._listener is not None:
            self.opened(transport, protocol)


class StreamServer(ProtocolServer):
    """Runs `connected` for each connection, and cancels it at the end. `limit`: of its reader, in bytes."""

    def __init__(self, connected: Connected, limit: int = 1 << 16) -> None:
        super().__init__(self._protocol)
        self._connected = connected
        self._limit = limit
        self._running: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []  # one that nobody holds warns that it is not closed

    def opened(self, transport: asyncio.Transport, protocol: asyncio.Protocol) -> None:
        assert isinstance(protocol, _StreamProtocol)
        loop = asyncio.get_running_loop()
        writer = asyncio.StreamWriter(transport, protocol, protocol.reader, loop)
        self._writers = [*(each for each in self._writers if not each.is_closing()), writer]
        keep(self._running, self._connected(protocol.reader, writer))

    async def end_work(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _protocol(self) -> asyncio.Protocol:
        return _StreamProtocol(asyncio.StreamReader(self._limit, asyncio.get_running_loop()))


class _StreamProtocol(asyncio.StreamReaderProtocol):
    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader, loop=asyncio.get_running_loop())
        self.reader = reader


def keep(tasks: set[asyncio.Task[None]], work: Any) -> None:
    """Start a task, in the set as long as it runs."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _shut_down(accepted: socket.socket) -> None:
    with suppress(OSError):  # the client has left
        accepted.shutdown(socket.SHUT_RDWR)


def _abort(accepted: socket.socket, transport: asyncio.Transport) -> None:
    try:
        transport.abort()
    except AttributeError:  # asyncio's TLS transport, after a second `close`
        _shut_down(accepted)


@asynccontextmanager
async def started(server: ProtocolServer, **options: Any) -> AsyncIterator[ProtocolServer]:
    """It runs until this is left; `options` are those of `start`."""
    await server.start(**options)
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def listening(
    connected: Connected, limit: int = 1 << 16, **options: Any
) -> AsyncIterator[ProtocolServer]:
    """A running `StreamServer`."""
    async with started(StreamServer(connected, limit), **options) as server:
        yield server


@asynccontextmanager
async def dialled(
    port: int | None = None, uds: str | None = None, **options: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client's connection to a port of this machine or to a Unix socket, closed when this is left."""
    if uds is not None:
        reader, writer = await asyncio.open_unix_connection(uds, **options)
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


@contextmanager
def losing_nothing() -> Iterator[None]:
    """Fails if the collector finds an open socket or transport afterwards."""
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(each.message) for each in caught] == []

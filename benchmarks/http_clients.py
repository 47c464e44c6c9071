"""Clients of HTTP that `bench_http_clients.py` compares: ours, the least possible, aiohttp, httpx.

Each opens streams and sends requests in the same way, and counts events. Not here: what is measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, cast

import aiohttp
import httptools
import httpx

from backend.http_client import HttpClient
from backend.http_ports import Headers, HttpFault, HttpRequest, Origin
from backend.sse_reader import SseReader

HOST: Final = "127.0.0.1"
AT_ONCE: Final = 16
MAX_EVENT_BYTES: Final = 1 << 20
BODY: Final = b'{"model":"m","input":"a short text"}'
JSON: Final = (b"content-type", b"application/json")


class Counted:
    """Events so far, of all streams."""

    def __init__(self) -> None:
        self.num_events = 0


class Way(Protocol):
    """A client of HTTP."""

    name: str

    async def open(self, port: int) -> None: ...

    def stream(self, counted: Counted) -> Coroutine[Any, Any, None]:
        """One stream, until it is cancelled."""

    async def request(self) -> None:
        """A request with its whole response."""

    async def close(self) -> None: ...


# -- ours ----------------------------------------------------------------------------------------------------


class _Events:
    """Our receiver, as an engine's is: every event is told at once."""

    def __init__(self, counted: Counted) -> None:
        self._counted = counted
        self._read = SseReader(MAX_EVENT_BYTES).feed
        self.failed_with: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begun(self, status: int, headers: Headers) -> None:
        pass

    def data(self, data: bytes) -> None:
        for _ in self._read(data):
            self._counted.num_events += 1

    def ended(self) -> None:
        self.failed(HttpFault("the stream ended"))

    def failed(self, fault: HttpFault) -> None:
        self.failed_with.set_exception(fault)


class Ours:
    name = "ours"

    async def open(self, port: int) -> None:
        self._client, self._origin = HttpClient(), Origin(HOST, port)

    async def stream(self, counted: Counted) -> None:
        events = _Events(counted)
        call = self._client.send(self._origin, HttpRequest("POST", "/stream", [JSON], BODY), events)
        try:
            await events.failed_with
        finally:
            call.abort()

    async def request(self) -> None:
        request = HttpRequest("POST", "/v1/embeddings", [JSON], BODY)
        assert (await self._client.fetch(self._origin, request, 30.0, 1 << 20)).status == 200

    async def close(self) -> None:
        await self._client.close()


# -- the least -----------------------------------------------------------------------------------------------


class _Bare(asyncio.Protocol):
    """Parses, counts chunks of body, and that is all. Answers end a future."""

    def __init__(self, counted: Counted) -> None:
        self._counted = counted
        self._parts: list[bytes] = []
        self.on_body = self._parts.append
        self._feed = httptools.HttpResponseParser(self).feed_data
        self.answered: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._feed(data)
        if self._parts:
            self._counted.num_events += len(self._parts)
            self._parts.clear()

    def on_message_complete(self) -> None:
        if self.answered is not None:
            self.answered.set_result(None)


class Bare:
    name = "bare"
    _REQUEST: Final = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"

    async def open(self, port: int) -> None:
        self._port = port
        self._free: list[_Bare] = []

    async def _connected(self, counted: Counted) -> _Bare:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: _Bare(counted), HOST, self._port))[1]

    async def stream(self, counted: Counted) -> None:
        protocol = await self._connected(counted)
        try:
            protocol.transport.write(self._REQUEST % (b"/stream", len(BODY), BODY))
            await asyncio.get_running_loop().create_future()
        finally:
            protocol.transport.abort()

    async def request(self) -> None:
        protocol = self._free.pop() if self._free else await self._connected(Counted())
        protocol.answered = asyncio.get_running_loop().create_future()
        protocol.transport.write(self._REQUEST % (b"/v1/embeddings", len(BODY), BODY))
        await protocol.answered
        self._free.append(protocol)

    async def close(self) -> None:
        for protocol in self._free:
            protocol.transport.abort()


# -- the others ----------------------------------------------------------------------------------------------


class Aiohttp:
    def __init__(self, has_lines: bool) -> None:
        self.name = "aiohttp_lines" if has_lines else "aiohttp_reads"
        self._has_lines = has_lines

    async def open(self, port: int) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(f"http://{HOST}:{port}", connector=connector, timeout=timeout)

    async def stream(self, counted: Counted) -> None:
        headers = {"content-type": "application/json"}
        async with self._session.post("/stream", data=BODY, headers=headers) as response:
            if self._has_lines:
                async for line in response.content:
                    counted.num_events += line.startswith(b"data: ")
            else:
                read = SseReader(MAX_EVENT_BYTES).feed
                async for data in response.content.iter_any():
                    counted.num_events += len(read(data))

    async def request(self) -> None:
        headers = {"content-type": "application/json"}
        async with self._session.post("/v1/embeddings", data=BODY, headers=headers) as response:
            assert await response.read()

    async def close(self) -> None:
        await self._session.close()


class Httpx:
    def __init__(self, has_lines: bool) -> None:
        self.name = "httpx_lines" if has_lines else "httpx_reads"
        self._has_lines = has_lines

    async def open(self, port: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=AT_ONCE)
        self._client = httpx.AsyncClient(base_url=f"http://{HOST}:{port}", limits=limits, timeout=None)

    async def stream(self, counted: Counted) -> None:
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", "/stream", content=BODY, headers=headers) as response:
            if self._has_lines:
                async for line in response.aiter_lines():
                    counted.num_events += line.startswith("data: ")
            else:
                read = SseReader(MAX_EVENT_BYTES).feed
                async for data in response.aiter_raw():
                    counted.num_events += len(read(data))

    async def request(self) -> None:
        headers = {"content-type": "application/json"}
        response = await self._client.post("/v1/embeddings", content=BODY, headers=headers)
        assert response.content

    async def close(self) -> None:
        await self._client.aclose()


WAYS: Final[tuple[Callable[[], Way], ...]] = (
    Bare,
    Ours,
    lambda: Aiohttp(False),
    lambda: Aiohttp(True),
    lambda: Httpx(False),
    lambda: Httpx(True),
)

"""Requests through an ASGI app: driven by hand, or over a real server and sockets that can be made slow."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import uvicorn

from backend.address import stop_listening
from gateway.http_protocol import HttpConfig
from tests.gateway.answering import Client


class Request:
    """One request. `receive` gives the pieces of the body, then waits for a disconnect or the end."""

    def __init__(
        self,
        path: str = "/v1/chat/completions",
        *body: bytes,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        extensions: Mapping[str, Any] | None = None,
        query: bytes = b"",
    ) -> None:
        self.client = Client()
        given = {"content-type": "application/json"} | dict(headers or {})
        pairs = [(name.encode(), value.encode()) for name, value in given.items()]
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query,
            "headers": pairs,
            "server": ("localhost", 80),
            "client": ("localhost", 1),
            "extensions": dict(extensions or {}),
        }
        self._pieces = list(body) or [b""]
        self._gone = asyncio.Event()
        self._is_open = False
        self.num_received = 0

    async def receive(self) -> dict[str, Any]:
        self.num_received += 1
        if self._gone.is_set():
            return {"type": "http.disconnect"}
        if self._pieces:
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces) or self._is_open}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """As a server does it: the end of the response is a disconnect for who waits for one."""
        await self.client(message)
        if message.get("more_body") is False:
            self._gone.set()

    def keep_open(self) -> None:
        """The body does not end."""
        self._is_open = True

    def disconnect(self) -> None:
        self._gone.set()

    def start(self, app: Any) -> asyncio.Task[None]:
        return asyncio.create_task(app(self.scope, self.receive, self.send))

    async def run(self, app: Any) -> Client:
        """Until the app returns."""
        await asyncio.wait_for(app(self.scope, self.receive, self.send), 10)
        return self.client


@asynccontextmanager
async def served(app: Any, lifespan: Literal["on", "off"] = "off") -> AsyncIterator[int]:
    """The app on a free port, under the gateway's HTTP protocol; the kernel buffers little of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # connections inherit it
        config = HttpConfig(
            app, max_header_bytes=1 << 16, header_limit_s=20, lifespan=lifespan, log_config=None, ws="none"
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        try:
            yield listener.getsockname()[1]
        finally:
            for each in server.servers:
                await stop_listening(each)
            await server.shutdown(sockets=[listener])


def slow_client(port: int, request: bytes) -> socket.socket:
    """A client that takes little: it has sent its request, and reads when it is told to."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(10)
    client.connect(("127.0.0.1", port))
    client.sendall(request)
    return client

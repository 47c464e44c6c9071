"""A small ASGI app with the seams of the real one, to try the server, the supervisor and the signals on.

As a program it serves with the settings of the environment: `python -m tests.gateway.tiny_app`.

    GET /            200 `ok`
    POST /echo       the body's length, once it has all arrived
    POST /early      413 before the body was read; `?close` closes the connection too
    GET /stream      a line every 20 ms, until the client leaves or the app cuts it
    GET /pid         the process id
    WebSocket        sends back what it gets
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from gateway.listen import bind, url
from gateway.server import run
from gateway.settings_load import load


class TinyApp:
    """Counts open streams, refuses new ones while draining, ends them with an error line when cut."""

    def __init__(self) -> None:
        self.num_open_requests = 0
        self._draining = False
        self._cut = asyncio.Event()

    def begin_drain(self) -> None:
        self._draining = True

    def cut(self) -> None:
        self._cut.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await _echo(receive, send)
        elif scope["path"] == "/stream" and not self._draining:
            await self._stream(receive, send)
        else:
            status, body, headers = await self._answer(scope, receive)
            await _respond(send, status, body, headers)

    async def _answer(self, scope: Any, receive: Any) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
        path = scope["path"]
        if path == "/echo":
            return 200, b"%d" % await _body_length(receive), []
        if path == "/early":
            return 413, b"too large", [(b"connection", b"close")] if scope["query_string"] == b"close" else []
        if path == "/pid":
            return 200, b"%d" % os.getpid(), []
        return (503, b"draining", []) if self._draining else (200, b"ok", [])

    async def _lifespan(self, receive: Any, send: Any) -> None:
        await receive()
        if os.environ.get("TINY_APP_FAILS"):
            await send({"type": "lifespan.startup.failed", "message": "told to fail"})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _stream(self, receive: Any, send: Any) -> None:
        self.num_open_requests += 1
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not self._cut.is_set() and not gone.done():
                await send({"type": "http.response.body", "body": b"tick\n", "more_body": True})
                await asyncio.sleep(0.02)
            await send({"type": "http.response.body", "body": b"cut\n", "more_body": False})
        finally:
            gone.cancel()
            self.num_open_requests -= 1


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _echo(receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})


async def _body_length(receive: Any) -> int:
    length, more = 0, True
    while more:
        message = await receive()
        length += len(message.get("body", b""))
        more = message.get("more_body", False)
    return length


async def _respond(send: Any, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    headers = [(b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main() -> int:
    settings = load().settings
    sockets = bind(settings.http)
    app = TinyApp()
    print(f"listening {url(settings.http, sockets)}", flush=True)
    return run(app, app, settings, sockets, lambda: print("started", flush=True))


if __name__ == "__main__":
    sys.exit(main())

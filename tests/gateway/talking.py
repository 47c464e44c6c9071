"""A talk that echoes, and a real server for WebSockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

from gateway.http_protocol import HttpConfig
from gateway.keys import ApiKeys
from gateway.listen import bind
from gateway.realtime_admission import Admission
from gateway.realtime_ports import OpenedSocket
from gateway.realtime_socket import RealtimeLimits, RealtimeSocket
from gateway.record import RequestRecord
from gateway.server import Server
from gateway.settings import Http
from pipeline.errors import HeadraceError


class EchoTalk:
    """Sends back what it gets; remembers the rest. While `is_idle` is off, a response is active."""

    def __init__(self, socket: OpenedSocket) -> None:
        self.socket = socket
        self.is_idle = True
        self.last_active_s = monotonic()
        self.heard: list[str] = []
        self.refusals: list[HeadraceError] = []
        self.losses: list[str] = []
        self.is_opened = False

    def opened(self) -> None:
        assert not self.losses
        self.is_opened = True

    def received(self, text: str) -> None:
        assert self.is_opened
        assert not self.losses
        self.heard.append(text)
        self.socket.outlet.push(text.encode())

    def refused(self, error: HeadraceError) -> None:
        assert not self.losses
        self.refusals.append(error)
        self.socket.outlet.push(f"error {error.code}".encode())

    def lost(self, reason: str) -> None:
        self.losses.append(reason)


class EchoService:
    """`RealtimeSocket` with talks that echo, and what the server asks of an app."""

    def __init__(
        self,
        keys: tuple[str, ...] = (),
        origins: tuple[str, ...] = (),
        talk: type[EchoTalk] = EchoTalk,
        **options: Any,
    ) -> None:
        self.talk = talk
        self.talks: list[EchoTalk] = []
        self.records: list[RequestRecord] = []
        limits, admission = RealtimeLimits(**options), Admission(ApiKeys(keys), origins)
        self.socket = RealtimeSocket(self._talk, admission, limits, remember=self.records.append)

    def _talk(self, socket: OpenedSocket) -> EchoTalk:
        self.talks.append(self.talk(socket))
        return self.talks[-1]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.socket(scope, receive, send)

    @property
    def num_open_requests(self) -> int:
        return self.socket.num_open

    def begin_drain(self) -> None:
        self.socket.drain()

    def cut(self) -> None:
        self.socket.cut(HeadraceError("cut"))


@contextlib.asynccontextmanager
async def served(app: Any, max_bytes: int = 1 << 20, **options: Any) -> AsyncIterator[int]:
    """The app behind the gateway's protocols on a free port."""
    sockets, started = bind(Http(port=0)), asyncio.Event()
    config = HttpConfig(
        app,
        **({"max_header_bytes": 1 << 16, "header_limit_s": 30.0, "ws_max_size": max_bytes} | options),
        lifespan="off",
        log_config=None,
        access_log=False,
    )
    server = Server(config, app, drain_limit_s=0.0, started=started.set)
    task = asyncio.create_task(server.serve(sockets=sockets))
    await started.wait()
    try:
        yield sockets[0].getsockname()[1]
    finally:
        server.stop()
        await task

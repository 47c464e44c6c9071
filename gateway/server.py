"""Runs the ASGI app under uvicorn: sockets, signals, draining. What the app does is not known here.

SIGTERM or SIGINT drains: new generations get 503 while the listener stays open (a load balancer sees
`/ready` turn 503, not refused connections), running ones finish or are cut at the drain limit, and the
process exits 0. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, Final, Protocol

import uvicorn

from gateway.event_loop import loop_factory, settle_memory
from gateway.http_protocol import HttpConfig
from gateway.outlet import nothing
from gateway.settings import Settings

log = logging.getLogger("headrace.server")

_TICK_S: Final = 1.0
_POLL_S: Final = 0.05
_CUT_LIMIT_S: Final = 3.0  # for the error frames of cut streams to leave
_GRACE_S: Final = 5  # for connections to close after that; whatever is left then is cancelled
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Work(Protocol):
    """What the server asks of the app while it drains."""

    @property
    def num_open_requests(self) -> int: ...

    def begin_drain(self) -> None:
        """From now on: not ready, and no new generations."""

    def cut(self) -> None:
        """End what is still running with a named error."""


def run(
    app: Any, work: Work, settings: Settings, sockets: list[socket.socket], started: Callable[[], None]
) -> int:
    """Serve until a signal ends it; the exit code. `started` is called once connections are taken."""
    server = Server(_config(app, settings), work, settings.http.drain_limit_s, started)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(server.serve(sockets=sockets))
    except SystemExit:  # uvicorn's way to say that the app's startup failed; it has logged why
        return 1
    return 0 if server.started else 1


def _config(app: Any, settings: Settings) -> HttpConfig:
    http, realtime = settings.http, settings.realtime
    return HttpConfig(
        app,
        max_header_bytes=http.max_header_bytes,
        header_limit_s=http.header_limit_s,
        ws_max_size=realtime.websocket_max_bytes,
        ws_ping_interval=realtime.websocket_ping_s,
        ws_ping_timeout=realtime.websocket_ping_limit_s,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=http.backlog,
        timeout_keep_alive=math.ceil(http.keep_alive_s),
        timeout_graceful_shutdown=_GRACE_S,
        ssl_certfile=http.ssl_certfile,
        ssl_keyfile=http.ssl_keyfile,
    )


class Server(uvicorn.Server):
    """uvicorn's server with our own signals and a drain between the last request and the end."""

    def __init__(
        self, config: HttpConfig, work: Work, drain_limit_s: float, started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._work = work
        self._drain_limit_s = drain_limit_s
        self._on_started = started
        self._stopping = asyncio.Event()
        self._wake: Callable[[], object] = nothing  # the main loop, also out of a signal's handler

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's raises the signal again at the end, so that a clean drain would not exit 0."""
        before = {each: signal.signal(each, self.handle_exit) for each in _SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.stop()

    def stop(self) -> None:
        """Drain, then end."""
        self.should_exit = True
        self._wake()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._wake = partial(loop.call_soon_threadsafe, self._stopping.set)
        await super().startup(sockets)
        settle_memory()
        self._on_started()

    async def main_loop(self) -> None:
        """Until it is to end. uvicorn's looks ten times a second whether it is, which costs 1 ms of CPU."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._stopping.wait()
        await self._drain()

    async def _drain(self) -> None:
        self._work.begin_drain()
        log.info("draining: %d open requests, limit %g s", self._work.num_open_requests, self._drain_limit_s)
        if not await self._wait_until_idle(self._drain_limit_s):
            log.warning("drain limit reached: cutting %d requests", self._work.num_open_requests)
            self._work.cut()
            await self._wait_until_idle(_CUT_LIMIT_S)

    async def _wait_until_idle(self, limit_s: float) -> bool:
        deadline_s = time.monotonic() + limit_s
        while self._work.num_open_requests and time.monotonic() < deadline_s:  # noqa: ASYNC110 - it only counts
            await asyncio.sleep(_POLL_S)
        return not self._work.num_open_requests

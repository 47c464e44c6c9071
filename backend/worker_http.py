"""A worker's own HTTP port: `/metrics` (vLLM's names, and the link's figures) and `/health`.

Loopback unless told otherwise: it has no keys, and neither answer holds text of users.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from backend.link_server import LinkServer

_STOP_S: Final = 2
_TICK_S: Final = 1.0  # for the date in the answers' heads


class LinkCollector(Collector):
    """The link server's figures, read when they are asked for."""

    def __init__(self, server: LinkServer) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        server = self._server
        for name, text, value in (
            ("headrace_link_connections", "Gateways that are connected.", server.num_connections),
            ("headrace_link_jobs", "Jobs in the engine's hands, waiting ones too.", server.num_running),
            ("headrace_link_jobs_waiting", "Jobs without a first token.", server.num_waiting),
            (
                "headrace_link_assembly_bytes",
                "Bytes of prompts on their way in pieces.",
                server.assembly.num_bytes,
            ),
            ("headrace_link_ready", "1 while jobs are taken.", int(server.is_accepting)),
        ):
            yield GaugeMetricFamily(name, text, value)
        text = "Outputs of the engine for jobs that had already ended."
        yield CounterMetricFamily("headrace_link_late_outputs", text, server.num_late)


class WorkerHttp:
    """The port. `start` binds it and raises `OSError` where it cannot; `url` is real from then on."""

    def __init__(self, server: LinkServer, host: str, port: int) -> None:
        self.url = ""
        self._link = server
        self._host = host
        self._port = port
        self._registry = CollectorRegistry()
        self._registry.register(LinkCollector(server))
        self._uvicorn: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, self._port), family=family)
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{listener.getsockname()[1]}"
        routes = [Route("/metrics", self._metrics), Route("/health", self._health)]
        config = uvicorn.Config(Starlette(routes=routes), log_config=None, access_log=False, lifespan="off")
        config.timeout_graceful_shutdown = _STOP_S
        self._uvicorn = _Server(config)
        self._task = asyncio.create_task(self._uvicorn.serve(sockets=[listener]))

    async def stop(self) -> None:
        if self._uvicorn is not None and self._task is not None:
            self._uvicorn.stop()
            await self._task

    async def _metrics(self, request: Request) -> Response:
        """vLLM registers its own metrics in prometheus_client's default registry."""
        self._link.refresh()
        body = generate_latest(REGISTRY) + generate_latest(self._registry)
        return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})

    async def _health(self, request: Request) -> Response:
        state = _state(self._link)
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)


class _Server(uvicorn.Server):
    """Signals are the worker's business: it drains first."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Until it is to end. uvicorn's looks ten times a second whether it is, which costs 1 ms of CPU."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._stopping.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _state(server: LinkServer) -> str:
    if server.died.done():
        return "dead"
    return "ok" if server.is_ready else "starting"

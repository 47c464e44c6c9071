"""The one place that builds and connects objects: settings in, an ASGI app out."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from importlib.metadata import version
from time import monotonic
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from gateway import parts
from gateway.audit import Audit, audit_log
from gateway.client_address import ClientAddresses
from gateway.cors import cors, with_headers
from gateway.docs_page import page_routes
from gateway.edge import EdgeParts, Endpoint, GenerationEndpoint
from gateway.event_loop import settle_memory
from gateway.exchange import Receive, Scope
from gateway.flow import BodyLimits, Flow, generation_routes, stream_route
from gateway.keys import ApiKeys
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.next_turns import NextTurns
from gateway.outlet import ReaderLimits, Send
from gateway.passthrough import Passthrough
from gateway.passthrough_head import is_own
from gateway.realtime_admission import Admission
from gateway.realtime_edge import realtime_socket
from gateway.realtime_ports import PATH as REALTIME_PATH
from gateway.request_log import RequestLog
from gateway.settings import Settings
from gateway.stream_edge import StreamEdge
from gateway.stream_metrics import StreamMetrics
from gateway.stream_routes import PATH as STREAMS_PATH
from gateway.system_routes import SystemRoutes, http_error
from gateway.token_parts import TokenParts
from gateway.warmup import Warmup
from pipeline.errors import Draining, HeadraceError
from pipeline.values import ModelInfo

FIRST_WORKER_LIMIT_S: Final = 2.0  # a linked worker is there in 0.1 s, and its tokenizer is loaded in 1 s

PARSERS_LIMIT_S: Final = 60.0  # while a model is being loaded: vLLM's parsers take 5 s on an idle machine


class StartError(Exception):
    """The gateway must not serve with these settings."""


class Gateway:
    """Everything that one gateway process runs, and what the server asks of it while it drains."""

    def __init__(self, settings: Settings, token_fd: int | None = None, is_restart: bool = False) -> None:
        prompts = settings.prompts
        self.settings = settings
        self._is_restart = is_restart
        self.start_problem: str | None = None  # why it must not serve
        self._is_loading = False
        self.metrics = Metrics()
        self.request_log = RequestLog(sys.stdout)
        self.audit_log = audit_log(settings.answers.audit_log, self.request_log)
        self.keys = ApiKeys(settings.access.api_key)
        self.request_limits = parts.request_limits(settings)
        self.rules = parts.live_rules(settings, self.metrics)
        self._media = parts.media_loader(settings)
        self.tokens = tokens = TokenParts(settings, self.metrics, token_fd, self._media.load)
        chat_template = prompts.chat_template.read_text() if prompts.chat_template else None
        self.models = Models(
            parts.inbound_options(settings),
            tokens.store,
            tokens.needs,
            tokens.encoders.executor,
            chat_template,
            partial(parts.load_parsers, settings.answers),
        )
        limits, turns = parts.warm_limits(settings), parts.warm_turns()
        self.warmup = Warmup(prompts.warm, self.models.prefix_ids, self.metrics, limits, turns)
        self.http = parts.http_client(settings)
        self.upstreams = parts.upstream_addresses(settings)
        self.pool = parts.worker_pool(
            settings, self.upstreams, self._load_model, self.http, self.warmup.worker_changed
        )
        self.next_turns = NextTurns(tokens.needs, tokens.encoders, prompts.remember_answers)
        self.flow = self._flow(settings)
        self.streams = parts.streams(settings, self.metrics)
        self._stream_metrics = StreamMetrics(self.metrics, self.streams)
        self.publishers: list[Callable[[], None]] = [self._stream_metrics.publish]
        self.looks: list[Callable[[float], None]] = [self.streams.look]
        self.drains: list[Callable[[], None]] = []
        self.cuts: list[Callable[[HeadraceError], None]] = [self.flow.cut]

    def _flow(self, settings: Settings) -> Flow:
        return Flow(
            engine=self.pool,
            models=self.models,
            keys=self.keys,
            rules=self.rules,
            needs=self.tokens.needs,
            metrics=self.metrics,
            limits=parts.answer_limits(settings),
            body=BodyLimits(settings.http.max_body_bytes, settings.http.body_limit_s),
            next_turns=self.next_turns,
            audit=Audit(self.metrics, self.audit_log),
            way_out=parts.way_out(settings.answers),
            observe_prompt=self.warmup.observe,
            check_media=self._media.check,
        )

    async def _load_model(self, info: ModelInfo, files: Mapping[str, bytes]) -> None:
        self._is_loading = True
        try:
            await self.models.load(info, files)
        finally:
            self._is_loading = False
        settle_memory()

    @property
    def system(self) -> SystemRoutes:
        """The routes about this process itself."""
        return SystemRoutes(
            self.pool,
            self.keys,
            self.metrics,
            self.publish,
            lambda: self.flow.is_draining,
            self.warmup,
            self.rules.status,
        )

    @property
    def num_open_requests(self) -> int:
        return len(self.flow.in_progress)

    def begin_drain(self) -> None:
        """From now on: not ready, and no new generations."""
        self.flow.is_draining = True
        self.warmup.cease()
        for drain in self.drains:
            drain()

    def cut(self) -> None:
        """End what is still running with a named error."""
        for cut in self.cuts:
            cut(Draining("The server is shutting down; the answer was cut off."))

    def publish(self) -> None:
        """Bring the gauges up to date: for a scrape; once a second where another process may be asked."""
        self.flow.open.publish()
        self.metrics.tasks.set(len(asyncio.all_tasks()))
        self.metrics.publish_workers(self.pool.statuses())
        self.rules.publish()
        self.models.publish(self.metrics)
        for publish in self.publishers:
            publish()
        self._tell_lost_lines()
        self.warmup.publish()
        self.tokens.publish()

    def _tell_lost_lines(self) -> None:
        """To the server's log, too: that lines are lost is said where nobody scrapes."""
        for log in (self.request_log, self.audit_log):
            if log is not None:
                self.metrics.lost_lines.inc(log.take_lost())

    async def _first_worker(self) -> None:
        """Wait a moment for a worker before connections are taken. Raises `StartError` for one that misfits.

        A process that was restarted beside others would refuse, as not ready, what they could serve; and such
        a worker is not its affair.
        """
        started_s = monotonic()
        while True:
            if not self._is_restart and (misfits := self.pool.misfits()):
                self.start_problem = misfits[0]
                raise StartError(misfits[0])
            if self.pool.models() and self.pool.is_settled():
                return
            if monotonic() - started_s > (PARSERS_LIMIT_S if self._is_loading else FIRST_WORKER_LIMIT_S):
                return
            await asyncio.sleep(0.02)  # the pool has no event for this

    @contextlib.asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        """ASGI's lifespan."""
        await self.pool.start()
        await self.streams.start()
        # Where no other process may be asked, a scrape comes here.
        publish = self.publish if self.metrics.is_shared else self._tell_lost_lines
        watch = asyncio.create_task(self.flow.open.watch(publish, self.looks), name="watch open requests")
        try:
            await self._first_worker()
            async with self.rules.watching():
                yield
        finally:
            watch.cancel()
            await asyncio.wait([watch])
            await self.warmup.stop()
            await self.next_turns.stop()
            await self.streams.close()
            await self.pool.stop()
            await self.http.close()
            await self.tokens.close()
            await self._media.close()
            self._tell_lost_lines()
            self.request_log.flush()
            if self.audit_log is not None:
                self.audit_log.flush()


class App:
    """The ASGI app.

    Generation routes are reached directly: Starlette's middleware wraps `send` twice, 1 us a token.
    """

    def __init__(self, gateway: Gateway, reader: ReaderLimits) -> None:
        self.gateway = gateway
        access = gateway.settings.access
        self._cors = cors(access)
        self._addresses = ClientAddresses(
            access.forwarded_allow_ips, gateway.settings.http.uds is not None, access.log_client_address
        )
        edge = EdgeParts(gateway.flow, gateway.metrics, gateway.request_log, reader)
        limits, reasoning_content = gateway.request_limits, gateway.settings.answers.reasoning_content
        self._endpoints = {
            path: GenerationEndpoint(edge, route)
            for path, route in generation_routes(limits, reasoning_content).items()
        }
        route = stream_route(limits, reasoning_content)
        self._streams = StreamEdge(edge, route, gateway.streams, gateway.keys)
        gateway.looks.append(self._streams.look)
        gateway.cuts.append(self._streams.cut)
        admission = Admission(gateway.keys, access.allowed_origins)
        self._realtime = realtime_socket(
            edge, admission, gateway.pool, limits, gateway.settings.realtime, reader
        )
        gateway.publishers.append(self._publish)
        gateway.looks.append(self._realtime.check)
        gateway.drains.append(self._realtime.drain)
        gateway.cuts.append(self._realtime.cut)
        self._passed = self._passthrough(edge)
        self._others = self._other_routes()

    def _passthrough(self, edge: EdgeParts) -> Passthrough | None:
        made = self.gateway
        return parts.passthrough(
            made.settings, made.upstreams, edge, made.keys, made.http, made.pool.replicas, made.rules
        )

    def _other_routes(self) -> Starlette:
        gateway = self.gateway
        posts = [Route(path, endpoint, methods=["POST"]) for path, endpoint in self._endpoints.items()]
        pages = page_routes(version("headrace"), gateway.request_limits)
        others = Starlette(
            routes=[*posts, *self._streams.routes(), *gateway.system.routes(), *pages],
            lifespan=gateway.running,
            exception_handlers={HTTPException: http_error},
        )
        # A slash too many is 404: a redirect would name the client's Host header, and lose a POST's body.
        others.router.redirect_slashes = False
        return others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if self._cors is not None and await self._cors.answered(scope, send):
                return
            self._addresses.note(scope)
            path = scope["path"]
            endpoint: Endpoint | None = self._endpoints.get(path) if scope["method"] == "POST" else None
            if endpoint is None and path.startswith(STREAMS_PATH):
                endpoint = self._streams.endpoint(scope)
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
            if path == REALTIME_PATH:
                await self._realtime(scope, receive, with_headers(scope, send))
                return
            if self._passed is not None and path.startswith("/v1/") and not is_own(path):
                await self._passed(scope, receive, send)
                return
        elif scope["type"] == "websocket":
            self._addresses.note(scope)
            if scope["path"] == REALTIME_PATH:
                await self._realtime(scope, receive, send)
                return
        elif scope["type"] == "lifespan":
            send = partial(self._send_lifespan, send)
        await self._others(scope, receive, with_headers(scope, send))

    def _publish(self) -> None:
        self.gateway.metrics.conversations.set(self._realtime.num_open)

    async def _send_lifespan(self, send: Send, message: Any) -> None:
        """A start that is refused for a known reason needs no traceback."""
        if message["type"] == "lifespan.startup.failed" and self.gateway.start_problem is not None:
            message = {"type": message["type"], "message": ""}
        await send(message)


def build_app(settings: Settings, token_fd: int | None = None, is_restart: bool = False) -> App:
    """The ASGI app of one process. `token_fd`: memory that it shares with others.

    `is_restart`: beside others that serve. Raises what is wrong with the rule files or the link's TLS files.
    """
    limits = settings.limits
    return App(
        Gateway(settings, token_fd, is_restart), ReaderLimits(limits.slow_reader_bytes, limits.slow_reader_s)
    )

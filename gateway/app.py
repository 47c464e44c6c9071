"""The one place that builds and connects objects: settings in, an ASGI app out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from time import monotonic
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from backend.address import parse_address
from backend.catalog import OnModel
from backend.pool import ClientLimits, PoolSettings, WorkerPool
from filters.patterns import Patterns
from filters.stream import CompiledRules
from gateway.answer import AnswerLimits
from gateway.docs_page import page_routes
from gateway.edge import GenerationEndpoint
from gateway.exchange import Receive, Scope
from gateway.flow import BodyLimits, Flow, generation_routes
from gateway.keys import ApiKeys
from gateway.link_tls import client_tls
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.openai_schema import RequestLimits
from gateway.outlet import ReaderLimits, Send
from gateway.request_log import RequestLog
from gateway.rule_files import read_all_rules
from gateway.server import settle_memory
from gateway.settings import Settings
from gateway.system_routes import SystemRoutes, http_error
from pipeline.assembly import GenerationDefaults
from pipeline.errors import Draining
from pipeline.inbound import InboundOptions
from pipeline.validation import ControlPolicy, InputLimits
from pipeline.values import ModelInfo

FIRST_WORKER_LIMIT_S: Final = 2.0  # a linked worker is there in 0.1 s, and its tokenizer is loaded in 1 s


class Gateway:
    """Everything that one gateway process runs, and what the server asks of it while it drains."""

    def __init__(self, settings: Settings) -> None:
        limits, text = settings.limits, settings.text
        rules = read_all_rules(text.rules, text.rules_action)
        self.metrics = Metrics()
        self.request_log = RequestLog(sys.stdout)
        self.keys = ApiKeys(settings.access.api_key)
        self.request_limits = RequestLimits(
            max_n=limits.max_n, max_choices=min(RequestLimits().max_choices, limits.queue_max_requests)
        )
        # `tokenizers` runs long texts outside of the GIL, one thread each.
        self._encoders = ThreadPoolExecutor(
            max_workers=max(2, os.cpu_count() or 1), thread_name_prefix="encode"
        )
        options = InboundOptions(
            limits=InputLimits(max_characters=limits.max_text_chars, max_messages=limits.max_messages),
            control_characters=ControlPolicy(others=text.control_characters),
            defaults=GenerationDefaults(max_tokens=limits.default_max_tokens),
            rules=Patterns(rules.for_direction("input")) if rules.for_direction("input") else None,
        )
        self.models = Models(options, self._encoders)
        self.pool = _pool(settings, self._load_model)
        self.flow = Flow(
            engine=self.pool,
            models=self.models,
            keys=self.keys,
            rules=CompiledRules(rules.for_direction("output"), text.max_hold_chars, text.hold_policy),
            encoders=self._encoders,
            metrics=self.metrics,
            limits=_answer_limits(settings),
            body=BodyLimits(settings.http.max_body_bytes, settings.http.body_limit_s),
        )

    async def _load_model(self, info: ModelInfo, files: Mapping[str, bytes]) -> None:
        await self.models.load(info, files)
        settle_memory()

    @property
    def num_open_requests(self) -> int:
        return len(self.flow.in_progress)

    def begin_drain(self) -> None:
        """From now on: not ready, and no new generations."""
        self.flow.is_draining = True

    def cut(self) -> None:
        """End what is still running with a named error."""
        self.flow.cut(Draining("The server is shutting down; the answer was cut off."))

    def publish(self) -> None:
        """Bring the gauges up to date: once a second, for other processes, and for a scrape."""
        self.flow.open.publish()
        self.metrics.tasks.set(len(asyncio.all_tasks()))
        self.metrics.publish_workers(self.pool.statuses())

    async def _first_worker(self) -> None:
        """Wait a moment for a worker before connections are taken.

        A process that was restarted beside others would refuse, as not ready, what they could serve.
        """
        deadline_s = monotonic() + FIRST_WORKER_LIMIT_S
        while not self.pool.models() and monotonic() < deadline_s:  # noqa: ASYNC110 - the pool has no such event
            await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        """ASGI's lifespan."""
        await self.pool.start()
        await self._first_worker()
        watch = asyncio.create_task(self.flow.open.watch(self.publish), name="watch open requests")
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait([watch])
            await self.pool.stop()
            self._encoders.shutdown(wait=False, cancel_futures=True)
            self.request_log.flush()


class App:
    """The ASGI app.

    Generation routes are reached directly: Starlette's middleware wraps `send` twice, 1 us a token.
    """

    def __init__(self, gateway: Gateway, reader: ReaderLimits) -> None:
        self.gateway = gateway
        self._endpoints = {
            path: GenerationEndpoint(gateway.flow, route, gateway.metrics, gateway.request_log, reader)
            for path, route in generation_routes(gateway.request_limits).items()
        }
        system = SystemRoutes(
            gateway.pool, gateway.keys, gateway.metrics, gateway.publish, lambda: gateway.flow.is_draining
        )
        posts = [Route(path, endpoint, methods=["POST"]) for path, endpoint in self._endpoints.items()]
        pages = page_routes(version("headrace"), gateway.request_limits)
        self._others = Starlette(
            routes=[*posts, *system.routes(), *pages],
            lifespan=gateway.running,
            exception_handlers={HTTPException: http_error},
        )
        # A slash too many is 404: a redirect would name the client's Host header, and lose a POST's body.
        self._others.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(scope["path"])
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await self._others(scope, receive, send)


def build_app(settings: Settings) -> App:
    """The ASGI app of one process. Raises what is wrong with the rule files or the link's TLS files."""
    limits = settings.limits
    return App(Gateway(settings), ReaderLimits(limits.slow_reader_bytes, limits.slow_reader_s))


def _pool(settings: Settings, on_model: OnModel) -> WorkerPool:
    limits = settings.limits
    pool = PoolSettings(
        cache_dir=settings.general.cache.expanduser(),
        secret=settings.link.link_secret.encode() if settings.link.link_secret else None,
        tls=client_tls(settings.link),
        gateway=f"gateway-{os.getpid()}",
        limits=ClientLimits(stall_s=limits.stall_limit_s),
        max_waiting_requests=limits.queue_max_requests,
        max_waiting_tokens=limits.queue_max_tokens,
    )
    return WorkerPool([parse_address(worker) for worker in settings.link.worker], pool, on_model)


def _answer_limits(settings: Settings) -> AnswerLimits:
    limits = settings.limits
    return AnswerLimits(
        queue_s=limits.queue_limit_s,
        stall_s=limits.stall_limit_s,
        request_s=limits.request_limit_s,
        hold_s=settings.text.max_hold_s,
        slow_reader_s=limits.slow_reader_s,
        heartbeat_s=limits.heartbeat_s,
    )

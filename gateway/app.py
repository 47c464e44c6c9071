"""The one place that builds and connects objects: settings in, an ASGI app out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from backend.address import parse_address
from backend.catalog import OnModel
from backend.pool import ClientLimits, PoolSettings, WorkerPool
from backend.remote_worker import RemoteWorker
from gateway.answer import AnswerLimits
from gateway.docs_page import page_routes
from gateway.edge import GenerationEndpoint
from gateway.exchange import Receive, Scope
from gateway.flow import BodyLimits, Flow, generation_routes
from gateway.keys import ApiKeys
from gateway.link_tls import client_tls
from gateway.live_rules import LiveRules
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.next_turns import NextTurns
from gateway.openai_schema import RequestLimits
from gateway.outlet import ReaderLimits, Send
from gateway.request_log import RequestLog
from gateway.rules_version import RuleOptions
from gateway.server import settle_memory
from gateway.settings import Settings
from gateway.settings_answers import parser_for
from gateway.system_routes import SystemRoutes, http_error
from gateway.token_parts import TokenParts
from gateway.turns import Turns
from gateway.warmup import WarmLimits, Warmup
from pipeline.assembly import GenerationDefaults
from pipeline.control_characters import ControlPolicy
from pipeline.errors import Draining
from pipeline.inbound import InboundOptions
from pipeline.validation import InputLimits
from pipeline.values import ModelInfo

FIRST_WORKER_LIMIT_S: Final = 2.0  # a linked worker is there in 0.1 s, and its tokenizer is loaded in 1 s


class StartError(Exception):
    """The gateway must not serve with these settings."""


class Gateway:
    """Everything that one gateway process runs, and what the server asks of it while it drains."""

    def __init__(self, settings: Settings, token_fd: int | None = None, is_restart: bool = False) -> None:
        text, prompts = settings.text, settings.prompts
        self._is_restart = is_restart
        self.start_problem: str | None = None  # why it must not serve
        self.metrics = Metrics()
        self.request_log = RequestLog(sys.stdout)
        self.keys = ApiKeys(settings.access.api_key)
        self.request_limits = _request_limits(settings)
        self.rules = LiveRules(
            text.rules,
            text.rules_action,
            RuleOptions(text.max_hold_chars, text.hold_policy, text.max_seen_text_bytes),
            self.metrics,
            text.rules_reload_s,
        )
        self.tokens = tokens = TokenParts(settings, self.metrics, token_fd)
        chat_template = prompts.chat_template.read_text() if prompts.chat_template else None
        self.models = Models(
            _inbound_options(settings), tokens.store, tokens.needs, tokens.encoders.executor, chat_template
        )
        self.warmup = Warmup(
            prompts.warm, self.models.prefix_ids, self.metrics, _warm_limits(settings), _turns()
        )
        self.pool = _pool(settings, self._load_model, self.warmup.worker_changed)
        self.next_turns = NextTurns(tokens.needs, tokens.encoders, prompts.remember_answers)
        self.flow = Flow(
            engine=self.pool,
            models=self.models,
            keys=self.keys,
            rules=self.rules,
            needs=tokens.needs,
            metrics=self.metrics,
            limits=_answer_limits(settings),
            body=BodyLimits(settings.http.max_body_bytes, settings.http.body_limit_s),
            next_turns=self.next_turns,
            observe_prompt=self.warmup.observe,
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
        self.warmup.cease()

    def cut(self) -> None:
        """End what is still running with a named error."""
        self.flow.cut(Draining("The server is shutting down; the answer was cut off."))

    def publish(self) -> None:
        """Bring the gauges up to date: once a second, for other processes, and for a scrape."""
        self.flow.open.publish()
        self.metrics.tasks.set(len(asyncio.all_tasks()))
        self.metrics.publish_workers(self.pool.statuses())
        self.rules.publish()
        self.warmup.publish()
        self.tokens.publish()

    async def _first_worker(self) -> None:
        """Wait a moment for a worker before connections are taken. Raises `StartError` for one that misfits.

        A process that was restarted beside others would refuse, as not ready, what they could serve; and such
        a worker is not its affair.
        """
        deadline_s = monotonic() + FIRST_WORKER_LIMIT_S
        while monotonic() < deadline_s:
            if not self._is_restart and (misfits := self.pool.misfits()):
                self.start_problem = misfits[0]
                raise StartError(misfits[0])
            if self.pool.models() and self.pool.is_settled():
                return
            await asyncio.sleep(0.02)  # the pool has no event for this

    @contextlib.asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        """ASGI's lifespan."""
        await self.pool.start()
        watch = asyncio.create_task(self.flow.open.watch(self.publish), name="watch open requests")
        try:
            await self._first_worker()
            async with self.rules.watching():
                yield
        finally:
            watch.cancel()
            await asyncio.wait([watch])
            await self.warmup.stop()
            await self.next_turns.stop()
            await self.pool.stop()
            await self.tokens.close()
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
            gateway.pool,
            gateway.keys,
            gateway.metrics,
            gateway.publish,
            lambda: gateway.flow.is_draining,
            gateway.warmup,
            gateway.rules.status,
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
        if scope["type"] == "lifespan":
            send = partial(self._send_lifespan, send)
        await self._others(scope, receive, send)

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


def _request_limits(settings: Settings) -> RequestLimits:
    limits = settings.limits
    return RequestLimits(
        max_n=limits.max_n,
        max_choices=min(RequestLimits().max_choices, limits.queue_max_requests),
        max_stop_strings=limits.max_stop_strings,
        max_stop_chars=limits.max_stop_chars,
        drop_lone_surrogates=settings.text.unencodable_characters == "strip",
    )


def _inbound_options(settings: Settings) -> InboundOptions:
    limits, text, prompts = settings.limits, settings.text, settings.prompts
    return InboundOptions(
        limits=InputLimits(
            max_characters=limits.max_text_chars,
            max_bytes=limits.max_text_bytes,
            max_messages=limits.max_messages,
            max_parts=limits.max_content_parts,
            max_values=limits.max_values,
        ),
        control_characters=ControlPolicy(text.unencodable_characters, text.control_characters),
        defaults=GenerationDefaults(max_tokens=limits.default_max_tokens),
        templates={template.name: template for template in prompts.templates},
        context_policy=prompts.context_policy,
        raw_control_strings=prompts.raw_control_strings == "control",
    )


def _warm_limits(settings: Settings) -> WarmLimits:
    prompts = settings.prompts
    return WarmLimits(prompts.rewarm_interval_s, prompts.warm_before_ready, prompts.warm_ready_limit_s)


def _turns() -> Turns:
    """The processes of one gateway share the folder of their metrics."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    return Turns(Path(folder) if folder else None)


def _pool(settings: Settings, on_model: OnModel, on_change: Callable[[RemoteWorker], None]) -> WorkerPool:
    limits = settings.limits
    pool = PoolSettings(
        cache_dir=settings.general.cache.expanduser(),
        secret=settings.link.link_secret.encode() if settings.link.link_secret else None,
        tls=client_tls(settings.link),
        gateway=f"gateway-{os.getpid()}",
        limits=ClientLimits(stall_s=limits.stall_limit_s),
        max_waiting_requests=limits.queue_max_requests,
        max_waiting_tokens=limits.queue_max_tokens,
        reasoning_parser_of=partial(parser_for, settings.answers.reasoning_parser),
    )
    workers = [parse_address(worker) for worker in settings.link.worker]
    return WorkerPool(workers, pool, on_model, on_change=on_change)


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

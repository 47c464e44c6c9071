"""The routes that generate over an engine that is driven by hand, with a small real model's text side."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from time import monotonic
from typing import Any

from filters.rules import Rule, RuleSet
from gateway.answer import AnswerLimits
from gateway.audit import Audit
from gateway.edge import EdgeParts, GenerationEndpoint
from gateway.encoders import Encoders
from gateway.flow import BodyLimits, Flow, generation_routes, stream_route
from gateway.keys import ApiKeys
from gateway.metrics import Metrics
from gateway.models import Model, Models
from gateway.needs import NeedServer
from gateway.next_turns import NextTurns
from gateway.openai_schema import RequestLimits
from gateway.outlet import ReaderLimits
from gateway.own_store import OwnStore
from gateway.request_log import RequestLog
from gateway.rules_version import RuleOptions, compile_rules
from gateway.stream_edge import StreamEdge
from gateway.streams import StreamLimits, Streams
from gateway.way_out import OutputOptions, WayOut
from pipeline.inbound import Inbound, InboundOptions
from pipeline.model_text import ModelText
from pipeline.token_buffer import BufferPool
from pipeline.token_cache import TokenCache
from pipeline.tokenizing import TokenStore
from pipeline.values import ModelInfo
from tests.gateway.answering import MODEL, Engine
from tests.pipeline.model_files import model_files

INFO = ModelInfo(MODEL, max_model_len=65536, block_size=16, default_sampling={}, fingerprint="f")
CHAT = "/v1/chat/completions"
RAW = "/v1/completions"


@cache
def _text() -> ModelText:
    """Nothing in it changes, and it takes 20 ms to build."""
    return ModelText.from_files(model_files())


class _Rules:
    """Rules that never change."""

    def __init__(self, rules: RuleSet) -> None:
        self.current = compile_rules(rules, RuleOptions(), 1)


class Service:
    """Everything behind the routes that generate but workers and sockets."""

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        keys: Sequence[str] = (),
        limits: AnswerLimits | None = None,
        body: BodyLimits | None = None,
        reader: ReaderLimits | None = None,
        remember_answers: bool = True,
        options: OutputOptions | None = None,
        streams: Streams | None = None,
    ) -> None:
        self._log = io.StringIO()
        self._request_log = RequestLog(self._log)
        self.engine = Engine(monotonic())
        self.metrics = Metrics()
        self.store = TokenStore(TokenCache(1 << 20), BufferPool(16 << 20))
        self.encoders = Encoders(num_threads=1)
        needs = NeedServer(self.encoders, self.store.pool, wait_limit_s=5.0)
        self.models = Models(InboundOptions(), self.store, needs, self.encoders.executor)
        self.next_turns = NextTurns(needs, self.encoders, remember_answers, gather_s=0.0)
        self.flow = Flow(
            engine=self.engine,
            models=self.models,
            keys=(api_keys := ApiKeys(keys)),
            rules=_Rules(RuleSet(tuple(rules))),  # type: ignore[arg-type]
            needs=needs,
            next_turns=self.next_turns,
            metrics=self.metrics,
            limits=limits or AnswerLimits(),
            body=body or BodyLimits(),
            audit=Audit(self.metrics, self._request_log),
            way_out=WayOut(options or OutputOptions()),
        )
        edge = EdgeParts(self.flow, self.metrics, self._request_log, reader or ReaderLimits(1 << 16))
        self._endpoints = {
            path: GenerationEndpoint(edge, route)
            for path, route in generation_routes(RequestLimits()).items()
        }
        self.streams = streams or Streams(StreamLimits(), OwnStore())
        self.stream_edge = StreamEdge(edge, stream_route(RequestLimits()), self.streams, api_keys)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        endpoint = self._endpoints.get(scope["path"]) or self.stream_edge.endpoint(scope)
        assert endpoint is not None, scope["path"]
        await endpoint(scope, receive, send)

    @property
    def lines(self) -> list[Any]:
        """The request log."""
        return [line for line in self._all_lines() if "event" not in line]

    @property
    def audit_lines(self) -> list[Any]:
        """What rules have found."""
        return [line for line in self._all_lines() if line.get("event") == "rule_hit"]

    @property
    def reader_lines(self) -> list[Any]:
        """Readers of streams."""
        return [line for line in self._all_lines() if line.get("event") == "stream_reader"]

    def _all_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.log.splitlines()]

    @property
    def log(self) -> str:
        self._request_log.flush()
        return self._log.getvalue()

    def sample(self, name: str, **labels: str) -> float:
        self.metrics.flush()
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def service(loaded: bool = True, **options: Any) -> AsyncIterator[Service]:
    """A service; with `loaded` it knows the model `m`."""
    made = Service(**options)
    try:
        if loaded:
            made.models._models[MODEL] = Model(
                INFO, _text(), Inbound(_text(), INFO, InboundOptions(), made.store)
            )
        await made.streams.start()
        yield made
    finally:
        await made.streams.close()
        await made.next_turns.stop()
        made.encoders.close()


def chat(content: Any = "hi", **fields: Any) -> bytes:
    """A chat's body."""
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": MODEL, "messages": messages, **fields}).encode()


def raw(prompt: Any = "hi", **fields: Any) -> bytes:
    """A completion's body."""
    return json.dumps({"model": MODEL, "prompt": prompt, **fields}).encode()

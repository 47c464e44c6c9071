"""An SGLang server as an `UpstreamKind`: where it tells of itself, and its `/generate` as the wire of ids.

Source: SGLang 0.5.23, `srt/entrypoints/http_server.py`. `/health` is not asked: it generates a token and
takes a second or more. Closing a connection aborts its request 2 s later (`create_abort_task`), and
`/abort_request` at once: all requests whose ids begin with the one that it is given (`scheduler.py`).
`--incremental-streaming-output` saves all ids again with each event.

Not here: the request's fields (`sglang_request.py`), the events (`sglang_stream.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from backend.http_ports import HttpRequest
from backend.lenient import count
from backend.load_metrics import read_load, read_loads
from backend.sglang_request import PriorityRule, generate_body
from backend.sglang_stream import SglangReader
from backend.upstream_models import read_models
from backend.upstream_ports import (
    JSON_HEADERS,
    NOT_SHOWN,
    STREAM_HEADERS,
    Ask,
    EngineStats,
    ServedModel,
    Traits,
)
from backend.upstream_tokenize import ask_token_ids
from pipeline.ports import Sink
from pipeline.values import EngineCall

_GENERATE: Final = "/generate"


class SglangWire:
    """`upstream_ports.TokenWire`."""

    def __init__(self, rule: PriorityRule = PriorityRule()) -> None:  # noqa: B008
        self._rule = rule

    def request(self, call: EngineCall, request_id: str) -> HttpRequest:
        """The POST for one choice. Raises `InvalidRequest` for a parameter that SGLang does not have."""
        body = msgspec.json.encode(generate_body(call, request_id, self._rule))
        return HttpRequest("POST", _GENERATE, STREAM_HEADERS, body)

    def reader(self, call: EngineCall, sink: Sink) -> SglangReader:
        return SglangReader(call, sink)

    def abort(self, request_id: str) -> HttpRequest:
        """Ends it at once, and all whose ids begin with this one: `request_id` must be no beginning."""
        return HttpRequest("POST", "/abort_request", JSON_HEADERS, msgspec.json.encode({"rid": request_id}))


class _ServerInfo(msgspec.Struct):
    """Of its hundreds of settings."""

    version: Any = None
    page_size: Any = None
    enable_priority_scheduling: Any = None
    schedule_low_priority_values_first: Any = None


class SglangKind:
    """`upstream_ports.UpstreamKind`."""

    is_text = False

    async def models(self, ask: Ask) -> Sequence[ServedModel]:
        """Its model. Adapters are left out: `/generate` takes no model, and knows them by their paths."""
        return read_models((await ask("GET", "/v1/models")).body)[:1]

    async def traits(self, ask: Ask, sends_defaults: bool) -> Traits:
        response = await ask("GET", "/server_info", allowed=(404,))
        if response.status == 404:  # an older version
            response = await ask("GET", "/get_server_info")
        info = msgspec.json.decode(response.body, type=_ServerInfo)
        rule = PriorityRule(
            info.enable_priority_scheduling is True, info.schedule_low_priority_values_first is True
        )
        return Traits(
            wire=SglangWire(rule),
            api="generate",
            block_size=count(info.page_size) or 1,
            versions={"sglang": str(info.version)[:100]} if info.version else {},
        )

    async def token_ids(self, ask: Ask, model: str, text: str) -> Sequence[int] | None:
        return await ask_token_ids(ask, model, text)

    async def stats(self, ask: Ask) -> EngineStats:
        """`/metrics`, else `/v1/loads`; a server that has neither is only asked whether it answers."""
        response = await ask("GET", "/metrics", allowed=NOT_SHOWN)
        if response.status == 200:
            return read_load(response.body)
        response = await ask("GET", "/v1/loads?include=core", allowed=NOT_SHOWN)
        if response.status == 200:
            return read_loads(response.body)
        await ask("GET", "/get_model_info")
        return EngineStats()

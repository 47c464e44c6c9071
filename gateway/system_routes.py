"""The routes for operators and newcomers: liveness, readiness, metrics, version, models, and the pages.

All but `/v1/models` are outside the keys and the request log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from backend.pool import WorkerPool
from backend.upstream_ports import UNKNOWN_MODEL_LEN
from gateway.error_body import error_response
from gateway.frames import json_bytes
from gateway.keys import ApiKeys
from gateway.metrics import Metrics
from gateway.warmup import Warmup
from pipeline.errors import BadKey, HeadraceError, InvalidRequest, UnknownModel


class SystemRoutes:
    """Answers about the gateway itself."""

    def __init__(
        self,
        pool: WorkerPool,
        keys: ApiKeys,
        metrics: Metrics,
        publish: Callable[[], None],
        is_draining: Callable[[], bool],
        warmup: Warmup | None = None,
        rules_status: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._pool = pool
        self._keys = keys
        self._metrics = metrics
        self._publish = publish  # brings the gauges up to date
        self._is_draining = is_draining
        self._rules_status = rules_status
        self._warmup = warmup

    def routes(self) -> Sequence[Route]:
        return (
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/version", self.version),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
        )

    async def health(self, request: Request) -> Response:
        """The process lives."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 when requests can be served; `?verbose` says why or why not."""
        is_draining, warmup = self._is_draining(), self._warmup
        is_warming = warmup is not None and warmup.holds_ready()
        is_ready = not is_draining and not is_warming and bool(self._pool.models())
        body: dict[str, Any] = {"ready": is_ready, "draining": is_draining}
        if is_warming:
            body["warming"] = True
        if "verbose" in request.query_params:
            body["workers"] = [asdict(status) for status in self._pool.statuses()]
            body["warm"] = warmup.report() if warmup is not None else []
            body["rules"] = self._rules_status() if self._rules_status is not None else {}
        return _json(body, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        self._publish()
        return Response(self._metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        workers = {status.name: status.versions for status in self._pool.statuses() if status.versions}
        return _json({"version": version("headrace"), "workers": workers})

    async def models(self, request: Request) -> Response:
        """OpenAI's list of the models that have a ready worker."""
        return self._with_key(request) or _json({"object": "list", "data": self._models()})

    async def model(self, request: Request) -> Response:
        """One model of the list."""
        name = request.path_params["name"]
        found = [model for model in self._models() if model["id"] == name]
        known = tuple(model["id"] for model in self._models())
        return self._with_key(request) or (_json(found[0]) if found else _error(UnknownModel(name, known)))

    def _with_key(self, request: Request) -> Response | None:
        """The refusal of a request without a good key."""
        try:
            self._keys.check(dict(request.scope["headers"]))
        except BadKey as error:
            return _error(error)
        return None

    def _models(self) -> list[dict[str, Any]]:
        return [
            {
                "id": info.name,
                "object": "model",
                "created": info.created,
                "owned_by": "headrace-scripted" if info.scripted else "headrace",
                "max_model_len": None if info.max_model_len >= UNKNOWN_MODEL_LEN else info.max_model_len,
            }
            for info in self._pool.models()
        ]


def _json(value: Any, status: int = 200) -> Response:
    return Response(json_bytes(value), status, media_type="application/json")


def _error(error: HeadraceError) -> Response:
    status, headers, body = error_response(error)
    return Response(body, status, {name.decode(): value.decode() for name, value in headers})


async def http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such path, wrong method) in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    shown = InvalidRequest(f"{error.detail}: {request.method} {request.url.path[:200]}")
    _, headers, body = error_response(shown)
    own = {name.decode(): value.decode() for name, value in headers}
    return Response(body, error.status_code, {**own, **(error.headers or {})})

"""The routes for operators: alive, ready, metrics, version, models, and refusals in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import httpx
import pytest
from openai.types import Model as OpenAiModel
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from backend.pool import WorkerPool, WorkerStatus
from gateway.keys import ApiKeys
from gateway.metrics import Metrics
from gateway.prompt_settings import WarmPrompt
from gateway.system_routes import SystemRoutes, http_error
from gateway.warmup import WarmLimits, Warmup
from pipeline.values import ModelInfo
from tests.gateway.serving import INFO
from tests.gateway.test_metrics import STATUS
from tests.gateway.test_warmup import FakeWorker

AUTH = {"authorization": "Bearer secret"}


class Pool:
    """What the routes ask of a pool."""

    def __init__(self, models: Sequence[ModelInfo]) -> None:
        self._models = models

    def models(self) -> Sequence[ModelInfo]:
        return self._models

    def statuses(self) -> Sequence[WorkerStatus]:
        return [STATUS]


class Site:
    """The routes as an app, with what they show in hand."""

    def __init__(
        self,
        *models: ModelInfo,
        keys: Sequence[str] = (),
        draining: bool = False,
        warmup: Warmup | None = None,
    ) -> None:
        self.metrics = Metrics()
        pool = Pool(models)
        publish: Callable[[], None] = lambda: self.metrics.publish_workers(pool.statuses())  # noqa: E731
        routes = SystemRoutes(
            cast(WorkerPool, pool), ApiKeys(keys), self.metrics, publish, lambda: draining, warmup
        ).routes()
        posts = [Route("/v1/chat/completions", lambda request: None, methods=["POST"])]
        self._app = Starlette(routes=[*posts, *routes], exception_handlers={HTTPException: http_error})

    async def ask(self, path: str, method: str = "GET", **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.request(method, path, **options)


@pytest.mark.parametrize("draining", [False, True])
async def test_health_is_the_process_alone(draining: bool) -> None:
    answer = await Site(keys=["secret"], draining=draining).ask("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("models", "draining", "status"), [([INFO], False, 200), ([], False, 503), ([INFO], True, 503)]
)
async def test_ready_needs_a_model_and_no_drain(models: list[ModelInfo], draining: bool, status: int) -> None:
    answer = await Site(*models, keys=["secret"], draining=draining).ask("/ready")
    assert answer.status_code == status
    assert answer.json() == {"ready": status == 200, "draining": draining}


async def test_ready_says_why_when_asked() -> None:
    (worker,) = (await Site(INFO).ask("/ready?verbose")).json()["workers"]
    assert (worker["address"], worker["state"], worker["running"]) == ("tcp://w:1", "ready", 3)


async def test_ready_waits_for_warm_prompts_where_it_should() -> None:
    prompt = WarmPrompt(messages=({"role": "system", "content": "Be brief."},))
    limits = WarmLimits(before_ready=True, ready_limit_s=0.0)

    async def no_ids(model: str, prompt: WarmPrompt) -> bytes:
        raise AssertionError("the test ends before")

    warmup = Warmup([prompt], no_ids, Metrics(), limits)
    site = Site(INFO, warmup=warmup)
    answer = await site.ask("/ready")
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "draining": False, "warming": True})
    worker = FakeWorker()
    worker.state = "ready"
    warmup.worker_changed(worker)  # and the time is over at once
    answer = await site.ask("/ready?verbose")
    assert (answer.status_code, "warming" in answer.json()) == (200, False)
    (shown,) = answer.json()["warm"]
    assert (shown["worker"], shown["states"]["pending"]) == (worker.key, 1)
    assert [row["title"] for row in shown["prompts"]] == ["1 message"]
    await warmup.stop()


async def test_metrics_are_prometheus_text_with_the_workers_figures() -> None:
    site = Site(INFO, keys=["secret"])
    site.metrics.gaps.observe(0.1)
    answer = await site.ask("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert families["headrace_worker_running"].samples[0].value == 3
    counts = families["headrace_time_between_tokens_seconds"].samples
    assert [each.value for each in counts if each.name.endswith("_count")] == [1]


async def test_version_names_ours_and_the_workers() -> None:
    answer = (await Site(INFO).ask("/version")).json()
    assert set(answer) == {"version", "workers"}
    assert answer["version"][0].isdigit()


async def test_models_are_a_list_for_openais_client() -> None:
    scripted = ModelInfo("s/x", 100, 16, {}, "f", scripted=True, created=5)
    answer = (await Site(INFO, scripted).ask("/v1/models")).json()
    assert answer["object"] == "list"
    models = [OpenAiModel.model_validate(each, strict=True) for each in answer["data"]]
    assert [(each.id, each.owned_by, each.created) for each in models] == [
        ("m", "headrace", 0),
        ("s/x", "headrace-scripted", 5),
    ]
    assert answer["data"][1]["max_model_len"] == 100


async def test_one_model_is_found_by_its_name_with_slashes() -> None:
    site = Site(ModelInfo("org/name", 100, 16, {}, "f"))
    assert (await site.ask("/v1/models/org/name")).json()["id"] == "org/name"
    missing = await site.ask("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m", "/v1/models/other"])
async def test_models_are_behind_the_keys(path: str) -> None:
    site = Site(INFO, keys=["secret"])
    refused = await site.ask(path)
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"].startswith("Bearer")
    assert (await site.ask(path, headers=AUTH)).status_code in (200, 404)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
async def test_what_is_not_there_is_refused_in_openais_shape(method: str, path: str, status: int) -> None:
    answer = await Site(INFO).ask(path, method)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert path in error["message"]
    assert ("allow" in answer.headers) == (status == 405)


async def test_a_long_path_is_shown_in_part() -> None:
    answer = await Site().ask("/" + "x" * 5000)
    assert len(answer.json()["error"]["message"]) < 300

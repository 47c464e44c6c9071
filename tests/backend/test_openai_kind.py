"""What the gateway asks OpenAI-compatible servers about themselves, and what they lack."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from backend.http_client import HttpResponse
from backend.openai_kind import OpenAiKind
from backend.upstream_openai import OpenAiWire
from backend.upstream_ports import EngineStats, ServedModel
from tests.fake_openai_server import DIALECTS, MODEL, Play, reply
from tests.fake_upstream import Asked


class Refused(Exception):
    """A status that was not allowed."""


class Questions:
    """`upstream_ports.Ask` of the fake server."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self.asked: list[str] = []

    async def __call__(
        self, method: str, target: str, body: bytes = b"", allowed: Sequence[int] = ()
    ) -> HttpResponse:
        self.asked.append(target)
        answer = reply(self._play, Asked(method, target, {}, None))
        if answer.status != 200 and answer.status not in allowed:
            raise Refused(target)
        return HttpResponse(answer.status, (), answer.body)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_load_and_models_of_every_dialect(dialect: str) -> None:
    ask = Questions(Play(dialect))
    assert await OpenAiKind().models(ask) == [ServedModel(MODEL, 4096)]
    tells_load = dialect in ("vllm", "sglang", "tgi", "llamacpp")
    assert await OpenAiKind().stats(ask) == (EngineStats(2, 1) if tells_load else EngineStats())


async def test_every_connection_has_a_wire_of_its_own() -> None:
    ask = Questions(Play())
    first, second = [await OpenAiKind().traits(ask, sends_defaults=False) for _ in range(2)]
    assert isinstance(first.wire, OpenAiWire)
    assert first.wire is not second.wire, "what one server refuses, another may take"


async def test_server_that_is_not_healthy_does_not_live() -> None:
    for dialect in ("vllm", "tgi", "llamacpp", "trtllm"):
        with pytest.raises(Refused, match="health"):
            await OpenAiKind().stats(Questions(Play(dialect, is_healthy=False)))


async def test_sglangs_health_is_not_asked() -> None:
    for has_metrics in (True, False):
        ask = Questions(Play("sglang", has_metrics=has_metrics))
        assert await OpenAiKind().stats(ask) == EngineStats(2, 1)
        assert "/health" not in ask.asked


async def test_metrics_that_are_off_are_no_fault() -> None:
    ask = Questions(Play("llamacpp", has_metrics=False))
    assert await OpenAiKind().stats(ask) == EngineStats()
    assert ask.asked[-1] == "/health"


async def test_server_without_a_health_route_is_asked_for_its_models() -> None:
    ask = Questions(Play("ollama"))
    await OpenAiKind().stats(ask)
    assert ask.asked[-1] == "/v1/models"


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_page_that_only_operators_may_see_is_no_fault(status: int) -> None:
    async def ask(method: str, target: str, body: bytes = b"", allowed: Sequence[int] = ()) -> HttpResponse:
        if target == "/v1/models":
            return HttpResponse(200, (), b"")
        assert status in allowed
        return HttpResponse(status, (), b"<html>vllm:num_requests_running 5</html>")

    assert await OpenAiKind().stats(ask) == EngineStats()

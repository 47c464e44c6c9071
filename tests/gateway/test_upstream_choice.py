"""Which server a passed request goes to: real upstream servers in a pool, before servers like vLLM's."""

from __future__ import annotations

import asyncio
import io
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from backend.catalog import Catalog
from backend.http_client import HttpClient
from backend.openai_kind import OpenAiKind
from backend.pool import WorkerPool
from backend.replica import QueueBounds
from backend.upstream_server import UpstreamServer, UpstreamSettings
from gateway.edge import EdgeParts
from gateway.flow import BodyLimits
from gateway.keys import ApiKeys
from gateway.metrics import Metrics
from gateway.outlet import ReaderLimits
from gateway.passthrough import Passthrough
from gateway.request_log import RequestLog
from gateway.upstream_choice import UpstreamChoice
from pipeline.errors import NoWorker, QueueFull, UnknownModel, WorkerLost
from pipeline.values import ModelInfo
from tests.backend.fake_vllm import FakeVllm, Refuse, fake_vllm
from tests.backend.linked import until
from tests.gateway.asgi import Request

BODY = b'{"model": "m", "input": "a"}'


class Chosen:
    """A pool of these servers, and the choice among them."""

    def __init__(self, servers: list[FakeVllm], max_passed: int, bounds: QueueBounds) -> None:
        self.http = HttpClient()
        settings = UpstreamSettings(
            bounds=bounds, heartbeat_s=0.01, models_s=0.02, min_backoff_s=0.01, max_backoff_s=0.05
        )
        catalog, rng = Catalog(self._on_model), random.Random(1)
        self.addresses = [server.address for server in servers]
        self.upstreams = [
            UpstreamServer(address, OpenAiKind(), settings, catalog, self.http, rng)
            for address in self.addresses
        ]
        self.pool = WorkerPool(self.upstreams, catalog)
        self.choice = UpstreamChoice(self.addresses, "key", self.pool.replicas, max_passed)

    async def _on_model(self, info: ModelInfo, files: Mapping[str, bytes]) -> None: ...

    def app(self) -> Passthrough:
        flow: Any = SimpleNamespace(in_progress=set(), is_draining=False)
        parts = EdgeParts(flow, Metrics(), RequestLog(io.StringIO()), ReaderLimits())
        body = BodyLimits(1 << 20, 60.0)
        return Passthrough(parts, ApiKeys([]), body, self.http, self.choice, lambda: False, 60.0, 60.0)

    async def all_ready(self) -> None:
        await until(lambda: all(server.state == "ready" for server in self.upstreams))


@asynccontextmanager
async def chosen(
    *servers: FakeVllm, max_passed: int = 256, bounds: QueueBounds | None = None
) -> AsyncIterator[Chosen]:
    it = Chosen(list(servers), max_passed, bounds or QueueBounds())
    await it.pool.start()
    try:
        yield it
    finally:
        await it.pool.stop()
        await it.http.close()


@asynccontextmanager
async def two(**options: Any) -> AsyncIterator[tuple[Chosen, FakeVllm, FakeVllm]]:
    async with fake_vllm() as first, fake_vllm() as second, chosen(first, second, **options) as it:
        await it.all_ready()
        yield it, first, second


async def frozen(server: FakeVllm) -> None:
    """It answers nothing more, nor is an answer on its way."""
    server.is_frozen = True
    num_asked = len(server.asked)
    await until(lambda: len(server.asked) > num_asked)


async def test_requests_that_are_open_at_once_are_spread() -> None:
    may_end = asyncio.Event()

    async def held(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        await may_end.wait()
        yield b"{}"

    async with two() as (it, first, second):
        first.answer = second.answer = held
        app = it.app()
        requests = [Request("/v1/embeddings", BODY) for _ in range(10)]
        tasks = [request.start(app) for request in requests]
        await until(lambda: first.num_streams + second.num_streams == 10)
        assert (first.num_streams, second.num_streams) == (5, 5)
        assert [status.outstanding_requests for status in it.pool.statuses()] == [5, 5]
        may_end.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert {request.client.status for request in requests} == {200}
        for upstream in it.upstreams:
            load = upstream.load
            assert (load.num_requests, load.outstanding_tokens, load.num_waiting) == (0, 0, 0)


async def test_one_at_a_time_they_take_turns() -> None:
    async with two() as (it, _, _):
        found = []
        for _ in range(6):
            place = it.choice("m")
            found.append(place.target.name)
            place.release()
        assert found == [str(address) for address in it.addresses] * 3


async def test_a_server_that_generates_gets_fewer() -> None:
    async with two() as (it, _, _):
        share = it.upstreams[0].load.add(3, 0)
        found = Counter(it.choice("m").target.name for _ in range(7))
        assert [found[str(address)] for address in it.addresses] == [2, 5]
        share.release()


async def test_a_place_is_given_back_once() -> None:
    async with two(max_passed=1) as (it, _, _):
        place, _ = it.choice("m"), it.choice("m")
        place.begun(200)
        assert [upstream.load.num_waiting for upstream in it.upstreams] == [0, 1]
        place.release()
        place.release()
        assert [upstream.load.num_requests for upstream in it.upstreams] == [0, 1]
        assert it.choice("m").target == place.target
        with pytest.raises(QueueFull):
            it.choice("m")


async def test_no_more_are_passed_at_once_than_a_server_may_have() -> None:
    async with two(max_passed=2) as (it, _, _):
        places = [it.choice("m") for _ in range(4)]
        for place in places:
            place.begun(200)
        with pytest.raises(QueueFull, match=r"\(2 ready\)"):
            it.choice("m")
        places[1].release()
        assert it.choice("m").target == places[1].target


async def test_those_that_wait_join_the_queue_of_generations() -> None:
    async with two(bounds=QueueBounds(max_waiting_requests=1)) as (it, _, _):
        first, second = it.choice("m"), it.choice("m")
        assert first.target != second.target
        with pytest.raises(QueueFull):
            it.choice(None)
        with pytest.raises(QueueFull):
            it.pool.check_room("m")
        second.begun(200)
        assert it.choice(None).target == second.target


@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_that_is_full_is_left_out_while_there_are_others(status: int) -> None:
    async def refuses(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        raise Refuse(status)
        yield b""

    async with two() as (it, first, second):
        first.answer = refuses
        app, request = it.app(), Request("/v1/embeddings", BODY)
        await request.run(app)
        assert request.client.status == status
        it.choice._servers[0].full_until_s += 1e6  # however slow this machine is
        assert {it.choice("m").target.name for _ in range(4)} == {str(second.address)}
        it.pool.check_room("m")
        await second.stop()
        await until(lambda: it.upstreams[1].state != "ready")
        assert it.choice("m").target.name == str(first.address)


async def test_a_server_that_is_silent_is_left_out_while_there_are_others() -> None:
    async with two() as (it, first, second):
        await frozen(first)
        it.upstreams[0].heard_s -= 1e6
        assert {it.choice("m").target.name for _ in range(4)} == {str(second.address)}
        first.is_frozen = False


async def test_a_server_that_broke_a_request_is_left_out_until_it_has_answered() -> None:
    async with two() as (it, first, _):
        place = it.choice("m")
        assert place.target.name == str(first.address)
        await frozen(first)
        place.lost(WorkerLost("gone"))
        place.release()
        assert {it.choice(None).target.name for _ in range(4)} == {str(it.addresses[1])}
        first.is_frozen = False
        await until(lambda: it.upstreams[0].heard_s > 0)


async def test_a_model_is_unknown_only_when_every_server_has_said_what_it_serves() -> None:
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(fake_vllm()) for _ in range(2)]
        second.is_frozen = True
        it = await stack.enter_async_context(chosen(first, second))
        await until(lambda: it.upstreams[0].state == "ready")
        with pytest.raises(NoWorker, match="1 connecting"):
            it.choice("other")
        second.is_frozen = False
        await it.all_ready()
        with pytest.raises(UnknownModel, match="This server has: m"):
            it.choice("other")


async def test_a_model_whose_servers_restart_is_not_unknown() -> None:
    async with two() as (it, first, second):
        second.models = [{"id": "n", "max_model_len": 2048, "parent": None}]
        await until(lambda: it.upstreams[1].model_names == ("n",))
        await first.stop()
        await until(lambda: it.upstreams[0].state != "ready")
        with pytest.raises(NoWorker, match="servers: 1 ") as caught:
            it.choice("m")
        assert "'m'" not in str(caught.value)
        with pytest.raises(UnknownModel, match="m, n"):
            it.choice("other")
        assert it.choice(None).target.name == str(second.address)
        await second.stop()
        await until(lambda: it.upstreams[1].state != "ready")
        with pytest.raises(NoWorker, match="No upstream server is ready"):
            it.choice(None)


async def test_targets_have_the_key_and_the_address() -> None:
    async with two() as (it, _, _):
        target = it.choice("m").target
        assert (target.origin, target.prefix) == (it.addresses[0].origin, it.addresses[0].prefix)
        assert target.headers == ((b"authorization", b"Bearer key"),)

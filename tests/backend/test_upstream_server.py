"""Upstream servers in a pool: how they become ready, how they are lost, and what becomes of their calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend import upstream_doubts, upstream_server
from backend.catalog import Catalog
from backend.http_client import HttpClient
from backend.pool import PoolSettings, RemoteWorker, WorkerPool
from backend.replica import QueueBounds
from backend.upstream_server import UpstreamServer, UpstreamSettings
from backend.upstream_vllm import VllmKind
from pipeline.errors import (
    EngineFailed,
    EngineRejected,
    HeadraceError,
    NoWorker,
    QueueFull,
    UnknownModel,
    WorkerLost,
)
from pipeline.values import EngineCall, FirstToken, ModelInfo, Prompt
from tests.backend.fake_vllm import Cut, FakeVllm, Refuse, fake_vllm
from tests.backend.linked import (
    RecordingSink,
    ids_of,
    is_lent,
    make_call,
    make_medium,
    make_tokenizer,
    scripted,
    until,
)
from tests.backend.vllm_streams import TEMPERATURE, completion_event


class Pooled:
    """A pool of these servers, and what it was told."""

    def __init__(self, folder: Path, *servers: FakeVllm, workers: Any = (), **settings: Any) -> None:
        tokenizer = settings.pop("tokenizer", None) or make_tokenizer(folder / "model")
        self.infos: list[ModelInfo] = []
        self.changes: list[tuple[str, str]] = []
        self.http = HttpClient()
        options: dict[str, Any] = {
            "tokenizer_of": lambda model: tokenizer,
            "heartbeat_s": 0.01,
            "models_s": 0.02,
        }
        options |= {"min_backoff_s": 0.01, "max_backoff_s": 0.05} | settings
        upstream = UpstreamSettings(**options)
        catalog, rng = Catalog(self._on_model, upstream.reasoning_parser_of), random.Random(1)
        self.upstreams = [
            UpstreamServer(server.address, VllmKind(), upstream, catalog, self.http, rng, self._changed)
            for server in servers
        ]
        pool = PoolSettings(cache_dir=folder / "cache", min_backoff_s=0.01, max_backoff_s=0.05)
        linked = [RemoteWorker(worker.address, pool, catalog, rng) for worker in workers]
        self.pool = WorkerPool([*self.upstreams, *linked], catalog)

    async def _on_model(self, info: ModelInfo, files: Mapping[str, bytes]) -> None:
        assert "tokenizer.json" in files
        self.infos.append(info)

    def _changed(self, server: UpstreamServer) -> None:
        self.changes.append((server.key, server.state))

    @property
    def states(self) -> list[str]:
        return [status.state for status in self.pool.statuses()]

    async def all_ready(self) -> None:
        await until(lambda: set(self.states) == {"ready"})

    async def ask(self, **options: Any) -> RecordingSink:
        sink = RecordingSink()
        self.pool.submit(make_call(options.pop("prompt", [1, 2, 3]), **{"model": "m"} | options), sink)
        await asyncio.wait_for(sink.ended, 20)
        return sink


@asynccontextmanager
async def pooled(folder: Path, *servers: FakeVllm, **settings: Any) -> AsyncIterator[Pooled]:
    pooled = Pooled(folder, *servers, **settings)
    await pooled.pool.start()
    try:
        yield pooled
    finally:
        await pooled.pool.stop()
        await pooled.http.close()


# -- models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_generate", [True, False])
async def test_call_goes_out_as_ids_and_comes_back_as_ids(tmp_path: Path, has_generate: bool) -> None:
    model = with_defaults(tmp_path / "with")
    async with (
        fake_vllm(has_generate=has_generate, cached_tokens=3) as server,
        pooled(tmp_path, server, tokenizer=model) as it,
    ):
        await it.all_ready()
        (info,) = it.pool.models()
        assert (info.name, info.max_model_len, info.block_size) == ("m", 2048, 128)
        assert (info.default_sampling, info.is_text, it.infos) == ({"temperature": 0.6}, False, [info])
        sink = await it.ask(prompt=[5, 6], max_tokens=5)
        assert (sink.ids, sink.ended.result()) == ([5, 6, 5, 6, 5], "length")
        assert sink.first == FirstToken(cached_tokens=3)
        (status,) = it.pool.statuses()
        assert status.engine_path == ("generate" if has_generate else "completions")
        assert (status.running, status.waiting, status.preemptions) == (5, 4, 1)
        assert (status.versions, status.models) == ({"vllm": "0.32.0"}, ("m",))
        assert (status.outstanding_requests, status.outstanding_tokens) == (0, 0)
        with pytest.raises(UnknownModel, match="This server has: m"):
            it.pool.check_room("gpt-9")


async def test_without_a_generation_config_the_servers_own_defaults_count(tmp_path: Path) -> None:
    async with fake_vllm() as server, pooled(tmp_path, server) as it:
        await it.all_ready()
        assert it.pool.statuses()[0].engine_path == "completions"
        assert "/inference/v1/generate" not in server.asked
        await it.ask(max_tokens=2)
        assert "temperature" not in server.calls[0][1]


async def test_model_without_a_tokenizer_is_a_misfit_and_says_what_is_missing(tmp_path: Path) -> None:
    async with fake_vllm() as server:
        async with pooled(tmp_path, server, tokenizer_of=lambda model: None) as it:
            await until(it.pool.is_settled)
            (misfit,) = it.pool.misfits()
            assert "serves 'm'" in misfit
            assert "tokenizer" in misfit
        async with pooled(tmp_path, server, tokenizer_of=lambda model: tmp_path / "nothing") as it:
            await until(it.pool.is_settled)
            assert "has no tokenizer.json" in it.pool.misfits()[0]
            with pytest.raises(NoWorker, match="1 refused"):
                it.pool.check_room("m")


async def test_folder_of_another_models_tokenizer_is_a_misfit_until_the_server_is_the_right_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The ids of the folder's `</s>`; its words are unknown to the texts."""

    def tokenize(text: str, end: int = 500) -> list[int]:
        return [end] if text == "</s>" else [0] * len(text.split())

    async with (
        fake_vllm(tokenize=lambda text: tokenize(text, 7)) as server,
        pooled(tmp_path, server) as it,
    ):
        await until(lambda: it.states == ["refused"])
        (misfit,) = it.pool.misfits()
        assert f"vllm+http://127.0.0.1:{server.port} has another tokenizer for 'm'" in misfit
        assert str(tmp_path / "model") in misfit
        assert (it.infos, it.pool.statuses()[0].reason) == ([], misfit)
        asked = server.asked.count("/v1/models")
        await until(lambda: server.asked.count("/v1/models") > asked + 2)
        assert len([record for record in caplog.records if "another tokenizer" in record.getMessage()]) == 1
        server.tokenize = tokenize
        await it.all_ready()
        assert it.pool.misfits() == []
        server.models = [{"id": "m", "max_model_len": 64}]  # changed while it is connected: asked again
        server.tokenize = lambda text: tokenize(text, 7)
        await until(lambda: it.states == ["refused"])


async def test_key_is_shown_and_a_wrong_one_is_the_operators_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_vllm(api_key="right") as server:
        async with pooled(tmp_path, server, api_key="right") as it:
            await it.all_ready()
            await it.ask()
            server.api_key = "other"  # while it is connected
            error = (await it.ask()).ended.result()
            assert isinstance(error, EngineFailed)
            assert "upstream_api_key" in error.log_detail
            assert "right" not in error.log_detail.replace("key right", "")
        async with pooled(tmp_path, server, api_key="wrong-7") as it:
            await until(lambda: "refused" in it.states)
            assert "HTTP 401" in it.pool.statuses()[0].reason
    assert "upstream_api_key" in caplog.text
    assert "wrong-7" not in caplog.text


async def test_adapter_that_is_loaded_later_is_served_and_one_that_is_gone_is_not(tmp_path: Path) -> None:
    async with fake_vllm() as server, pooled(tmp_path, server) as it:
        await it.all_ready()
        server.models.append({"id": "lora", "parent": "m"})
        await until(lambda: len(it.pool.models()) == 2)
        assert (await it.ask(model="lora")).ended.result() == "length"
        assert server.calls[-1][1]["model"] == "lora"
        server.models.pop()
        await until(lambda: len(it.pool.models()) == 1)
        assert [state for _, state in it.changes] == ["ready"]  # it never left
        with pytest.raises(NoWorker):
            it.pool.check_room("lora")


async def test_model_that_is_gone_when_it_is_called_is_asked_for_again(tmp_path: Path) -> None:
    async with fake_vllm() as server, pooled(tmp_path, server, models_s=1000) as it:
        await it.all_ready()
        server.models = [{"id": "other", "max_model_len": 64}]
        server.answer = refusing(404, b'{"error":{"message":"The model `m` does not exist.","code":404}}')
        error = (await it.ask()).ended.result()
        assert isinstance(error, WorkerLost), "another server may have it"
        assert (error.status_hint, error.code) == (404, "not_served")
        await until(lambda: [info.name for info in it.pool.models()] == ["other"])


def with_defaults(folder: Path) -> Path:
    """A model whose calls hold its sampling defaults."""
    model = make_tokenizer(folder)
    (model / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [1, 2]}')
    return model


async def test_model_without_defaults_that_joins_later_gets_the_servers_own(tmp_path: Path) -> None:
    """`/inference/v1/generate` would sample it at a temperature of 1."""
    folders = {"m": with_defaults(tmp_path / "with"), "bare": make_tokenizer(tmp_path / "bare")}
    async with fake_vllm() as server, pooled(tmp_path, server, tokenizer_of=folders.get) as it:
        await it.all_ready()
        await it.ask()
        server.models.append({"id": "bare"})
        await until(lambda: it.upstreams[0].serves("bare"))
        for model in ("bare", "m"):
            assert (await it.ask(model=model)).ended.result() == "length"
        server.models.pop()
        await until(lambda: not it.upstreams[0].serves("bare"))
        await it.ask()
        apis = ["generate", "completions", "completions", "generate"]
        assert [path.rsplit("/", 1)[-1] for path, _, _ in server.calls] == apis
        assert [state for _, state in it.changes] == ["ready"]


@pytest.mark.parametrize("status", [403, 404, 405])
async def test_route_that_is_gone_is_used_no_more_though_the_list_is_the_same(
    tmp_path: Path, status: int
) -> None:
    model = with_defaults(tmp_path / "with")
    async with fake_vllm() as server, pooled(tmp_path, server, models_s=1000, tokenizer=model) as it:
        await it.all_ready()
        assert (await it.ask()).ended.result() == "length"
        server.missing_status, server.has_generate = status, False
        assert isinstance((await it.ask()).ended.result(), HeadraceError)
        await until(lambda: it.pool.statuses()[0].engine_path == "completions")
        assert (await it.ask()).ended.result() == "length"
        assert [state for _, state in it.changes] == ["ready"]


async def test_linked_worker_and_upstream_server_serve_one_model_side_by_side(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "model")
    async with (
        fake_vllm() as server,
        scripted(tmp_path, tokenizer=tokenizer, model_names=("m",)) as worker,
        pooled(tmp_path, server, tokenizer=tokenizer, workers=[worker]) as it,
    ):
        await it.all_ready()
        assert len(it.infos) == 1
        assert (
            len(
                {
                    it.pool.submit(make_call([1], model="m", affinity=n), RecordingSink()).worker
                    for n in range(20)
                }
            )
            == 2
        )
    other = make_tokenizer(tmp_path / "other", num_words=400)
    async with (
        fake_vllm() as server,
        scripted(tmp_path, tokenizer=tokenizer, model_names=("m",)) as worker,
        pooled(tmp_path, server, tokenizer=other, workers=[worker]) as it,
    ):
        await until(lambda: sorted(it.states) == ["ready", "refused"])


# -- faults ------------------------------------------------------------------------------------------------


def refusing(status: int, body: bytes = b"{}") -> Any:
    async def answer(path: str, asked: dict[str, Any]) -> AsyncIterator[bytes]:
        raise Refuse(status, body)
        yield b""

    return answer


def cutting(*events: bytes) -> Any:
    async def answer(path: str, asked: dict[str, Any]) -> AsyncIterator[bytes]:
        for event in events:
            yield event
            await asyncio.sleep(0.01)
        raise Cut

    return answer


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, TEMPERATURE, EngineRejected, "temperature must be non-negative, got -1.0"),
        (422, b'{"detail":[{"msg":"bad"}]}', EngineRejected, "bad"),
        (413, b"", EngineRejected, "refuses the request"),
        (429, b"", QueueFull, "HTTP 429"),
        (503, b"{}", QueueFull, "HTTP 503"),
        (500, b'{"error":{"message":"the secret prompt"}}', EngineFailed, "the secret prompt"),
        (502, b"<html>", EngineFailed, "gave up"),
        (302, b"", EngineFailed, "HTTP 302"),
    ],
)
async def test_refusal_is_an_error_by_its_status_and_words_are_not_logged(
    tmp_path: Path, status: int, body: bytes, kind: type[HeadraceError], words: str
) -> None:
    async with fake_vllm() as server, pooled(tmp_path, server) as it:
        await it.all_ready()
        server.answer = refusing(status, body)
        error = (await it.ask()).ended.result()
        assert isinstance(error, kind)
        assert words in str(error)
        assert "secret" not in error.log_detail
        assert "non-negative" not in error.log_detail
        assert it.pool.statuses()[0].outstanding_requests == 0


async def test_server_that_was_full_is_left_out_where_there_are_others(tmp_path: Path) -> None:
    async with fake_vllm() as one, fake_vllm() as two, pooled(tmp_path, one, two, heartbeat_s=1000) as it:
        await it.all_ready()
        one.answer = refusing(503)
        full = it.upstreams[0]
        sink = RecordingSink()
        full.submit(make_call([1], model="m"), sink)
        assert isinstance(await asyncio.wait_for(sink.ended, 20), QueueFull)
        for affinity in range(10):  # whatever the routing likes
            assert (await it.ask(affinity=affinity)).ended.result() == "length"
        assert full.load.num_requests == 0


@pytest.mark.parametrize("events", [(), (completion_event([1]),)], ids=["before a byte", "in the stream"])
async def test_connection_that_is_cut_fails_its_own_call_alone(
    tmp_path: Path, events: tuple[bytes, ...]
) -> None:
    async with fake_vllm() as server, pooled(tmp_path, server) as it:
        await it.all_ready()
        server.answer = cutting(*events)
        sink = await it.ask()
        assert isinstance(sink.ended.result(), WorkerLost)
        assert len(sink.ids) == len(events)
        server.answer = server.echo
        assert (await it.ask()).ended.result() == "length", "it serves the others"
        assert [state for _, state in it.changes] == ["ready"]
        assert it.pool.statuses()[0].outstanding_tokens == 0


@pytest.mark.parametrize("status", [404, 429, 0], ids=["404", "429", "cut"])
async def test_one_clients_call_takes_the_server_from_nobody(
    tmp_path: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A route that it has not, a prompt of too many tokens a minute, or that breaks its answer, on and on."""
    monkeypatch.setattr(upstream_doubts, "MODELS_GAP_S", 1e6)

    async def answer(path: str, asked: dict[str, Any]) -> AsyncIterator[bytes]:
        if asked["prompt"] == [66]:
            raise Refuse(status) if status else Cut
        async for event in server.echo(path, asked):
            yield event

    async with fake_vllm() as server, pooled(tmp_path, server, models_s=1000) as it:
        await it.all_ready()
        server.answer = answer
        for _ in range(20):
            assert isinstance((await it.ask(prompt=[66])).ended.result(), WorkerLost | QueueFull)
            it.pool.check_room("m")
            assert (await it.ask(prompt=[1])).ended.result() == "length"
        assert [state for _, state in it.changes] == ["ready"]
        assert it.pool.statuses()[0].num_connects == 1
        if status != 429:
            await until(lambda: server.asked.count("/v1/models") > 1)
            assert server.asked.count("/v1/models") == 2, "asked again, but not for each of them"


@pytest.mark.parametrize("status", [404, 429, 0], ids=["404", "429", "cut"])
async def test_sink_that_submits_again_within_its_fault_gets_another_server(
    tmp_path: Path, status: int
) -> None:
    async def fail(path: str, asked: dict[str, Any]) -> AsyncIterator[bytes]:
        raise Refuse(status) if status else Cut
        yield b""

    async with fake_vllm() as one, fake_vllm() as two, pooled(tmp_path, one, two, heartbeat_s=1000) as it:
        await it.all_ready()
        workers: list[str] = []
        ended: asyncio.Future[RecordingSink] = asyncio.get_running_loop().create_future()

        class Again(RecordingSink):
            def failed(self, error: HeadraceError) -> None:
                for _ in range(10):  # whatever the routing likes
                    again = RecordingSink()
                    handle = it.pool.submit(make_call([1], model="m", affinity=len(workers)), again)
                    workers.append(handle.worker)
                ended.set_result(again)

        for bad, good in ((one, two), (two, one)):
            bad.answer, good.answer = fail, good.echo
            first = next(each for each in it.upstreams if each.key == str(bad.address))
            first.submit(make_call([1], model="m"), Again())
            assert await asyncio.wait_for((await ended).ended, 20) == "length"
            assert set(workers) == {str(good.address)}
            assert it.states == ["ready", "ready"]
            workers.clear()
            ended = asyncio.get_running_loop().create_future()
            await until(lambda: all(each.load.num_requests == 0 for each in it.upstreams))


async def test_server_that_broke_a_call_is_lost_if_it_does_not_answer_either(tmp_path: Path) -> None:
    async with fake_vllm() as server, pooled(tmp_path, server, heartbeat_s=1000) as it:
        await it.all_ready()
        server.answer, server.health = cutting(), 503
        assert isinstance((await it.ask()).ended.result(), WorkerLost)
        await until(lambda: it.states == ["connecting"])  # at once, not at the next heartbeat
        assert "GET /health with HTTP 503" in it.pool.statuses()[0].reason


async def test_server_that_broke_a_call_and_is_frozen_is_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_server, "ANSWER_S", 0.05)
    async with fake_vllm() as server, pooled(tmp_path, server, heartbeat_s=1000, max_backoff_s=5.0) as it:
        await it.all_ready()

        async def freeze(path: str, asked: dict[str, Any]) -> AsyncIterator[bytes]:
            server.is_frozen = True
            raise Cut
            yield b""

        server.answer = freeze
        assert isinstance((await it.ask()).ended.result(), WorkerLost)
        await until(lambda: it.states == ["stalled"])
        assert "broke a call, and has not answered since" in it.pool.statuses()[0].reason


async def test_servers_words_do_not_show_it_the_gateways_key(tmp_path: Path) -> None:
    key = "sk-UPSTREAM-KEY"

    async def quote(path: str, asked: dict[str, Any]) -> AsyncIterator[bytes]:
        if asked["prompt"] == [1]:
            raise Refuse(400, b'{"error":{"message":"headers: ' + str(server.calls[-1][2]).encode() + b'"}}')
        yield b'data: {"error":{"message":"Bearer sk-UPSTREAM-KEY"}}\n\n'

    async with fake_vllm(api_key=key, answer=quote) as server, pooled(tmp_path, server, api_key=key) as it:
        await it.all_ready()
        for prompt in ([1], [2]):
            error = (await it.ask(prompt=prompt)).ended.result()
            assert isinstance(error, HeadraceError)
            assert "Bearer ***" in error.message
            assert key not in error.message


async def test_sink_that_submits_again_when_its_server_is_gone_gets_another(tmp_path: Path) -> None:
    async with fake_vllm() as one, fake_vllm() as two, pooled(tmp_path, one, two, heartbeat_s=1000) as it:
        await it.all_ready()
        ended: asyncio.Future[RecordingSink] = asyncio.get_running_loop().create_future()

        class Again(RecordingSink):
            def failed(self, error: HeadraceError) -> None:
                assert isinstance(error, WorkerLost)
                second = RecordingSink()
                it.pool.submit(make_call([1], model="m", affinity=3), second)
                ended.set_result(second)

        gone = (
            one
            if it.pool.submit(make_call([1], model="m", affinity=3), RecordingSink()).worker.endswith(
                str(one.port)
            )
            else two
        )
        await until(lambda: it.upstreams[0].load.num_requests + it.upstreams[1].load.num_requests == 0)
        await gone.stop()
        it.pool.submit(make_call([1], model="m", affinity=3), Again())
        assert await asyncio.wait_for((await ended).ended, 20) == "length"
        assert sorted(it.states) == ["connecting", "ready"]


async def test_server_that_comes_back_is_used_again(tmp_path: Path) -> None:
    async with fake_vllm() as server, pooled(tmp_path, server) as it:
        await it.all_ready()
        await server.stop()
        await until(lambda: it.states == ["connecting"])
        with pytest.raises(NoWorker, match="1 connecting"):
            it.pool.check_room("m")
        await server.start()
        await it.all_ready()
        assert (await it.ask()).ended.result() == "length"
        assert [state for _, state in it.changes] == ["ready", "connecting", "ready"]
        assert it.pool.statuses()[0].num_connects == 2


async def test_server_whose_engine_has_died_gets_no_calls(tmp_path: Path) -> None:
    async with fake_vllm() as server, pooled(tmp_path, server) as it:
        await it.all_ready()
        server.health = 503
        await until(lambda: it.states == ["connecting"])
        assert "GET /health with HTTP 503" in it.pool.statuses()[0].reason


async def test_server_that_is_frozen_is_stalled(tmp_path: Path) -> None:
    async with fake_vllm() as server, pooled(tmp_path, server, stall_s=0.1, max_backoff_s=5.0) as it:
        await it.all_ready()
        server.is_frozen = True
        await until(lambda: it.states == ["stalled"])
        assert "0.1 s" in it.pool.statuses()[0].reason


@pytest.mark.parametrize(
    ("body", "words"), [(b"<html>", "cannot be read"), (b'{"data":[]}', "lists no model")]
)
async def test_server_that_lists_no_models_is_not_ready(tmp_path: Path, body: bytes, words: str) -> None:
    async with fake_vllm() as server, pooled(tmp_path, server) as it:
        await it.all_ready()
        server.models_body = body
        await until(lambda: it.states == ["connecting"])
        assert words in it.pool.statuses()[0].reason


# -- calls -------------------------------------------------------------------------------------------------


async def test_abort_closes_the_connection_and_nothing_comes_after_it(tmp_path: Path) -> None:
    async with fake_vllm() as server, pooled(tmp_path, server) as it:
        await it.all_ready()
        sink = RecordingSink()
        handle = it.pool.submit(make_call([1], model="m", max_tokens=10**6), sink)
        await until(lambda: len(sink.ids) > 3)
        num_ids = len(sink.ids)
        handle.abort()
        handle.abort()
        await until(lambda: server.num_streams == 0)
        assert (len(sink.ids), sink.ended.done()) == (num_ids, False)
        assert it.pool.statuses()[0].outstanding_requests == 0


async def test_connections_are_used_again(tmp_path: Path) -> None:
    async with fake_vllm() as server, pooled(tmp_path, server, heartbeat_s=1000) as it:
        await it.all_ready()
        for _ in range(5):
            assert (await it.ask()).ended.result() == "length"
            await until(lambda: it.http.num_idle == it.http.num_connections)
        assert server.num_connections == 1


async def test_queue_bounds_and_load_are_of_this_process(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def wait(path: str, asked: dict[str, Any]) -> AsyncIterator[bytes]:
        await gate.wait()
        yield completion_event([1], "length")

    bounds = QueueBounds(max_waiting_requests=2, max_waiting_tokens=100)
    async with fake_vllm(answer=wait) as server, pooled(tmp_path, server, bounds=bounds) as it:
        await it.all_ready()
        background = RecordingSink()
        it.upstreams[0].submit_background(replace(make_call([1] * 500, model="m"), priority=9), background)
        sinks = [RecordingSink() for _ in range(2)]
        it.pool.submit(make_call([1] * 90, model="m", max_tokens=7), sinks[0])
        with pytest.raises(QueueFull):
            it.pool.submit(make_call([1] * 11, model="m"), RecordingSink())
        it.pool.submit(make_call([1] * 10, model="m", max_tokens=3), sinks[1])
        with pytest.raises(QueueFull):
            it.pool.check_room("m")
        (status,) = it.pool.statuses()
        assert (status.waiting_requests, status.waiting_tokens) == (2, 100)
        assert (status.outstanding_requests, status.outstanding_tokens) == (3, 110)
        gate.set()
        for sink in (*sinks, background):
            assert await asyncio.wait_for(sink.ended, 20) == "length"
        assert all("priority" not in asked for _, asked, _ in server.calls)
        (status,) = it.pool.statuses()
        assert (status.outstanding_requests, status.outstanding_tokens, status.waiting_tokens) == (0, 0, 0)


async def test_prompt_is_let_go_of_once_the_server_has_taken_it(tmp_path: Path) -> None:
    async with fake_vllm() as server, pooled(tmp_path, server) as it:
        await it.all_ready()
        buffer = bytearray(ids_of([1, 2, 3]))
        call = EngineCall("m", Prompt(memoryview(buffer), 3, 0), {}, 10**6)
        sink = RecordingSink()
        handle = it.pool.submit(call, sink)
        del call
        assert is_lent(buffer)
        await until(lambda: sink.ids)
        assert not is_lent(buffer)
        handle.abort()


async def test_call_with_media_is_refused_here(tmp_path: Path) -> None:
    async with fake_vllm() as server, pooled(tmp_path, server) as it:
        await it.all_ready()
        call = replace(make_call([1], model="m"), media=(make_medium(b"x"),))
        with pytest.raises(EngineRejected, match="takes no media of kind 'image'"):
            it.pool.submit(call, RecordingSink())


async def test_warm_ups_learn_what_they_need(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(fake_vllm())
        it = await stack.enter_async_context(pooled(tmp_path, server))
        assert it.upstreams[0].welcome is None
        with pytest.raises(WorkerLost, match="connecting"):
            it.upstreams[0].submit_background(make_call([1]), RecordingSink())
        await it.all_ready()
        welcome = it.upstreams[0].welcome
        assert welcome is not None
        assert (welcome.worker, welcome.model_names) == (f"vllm+http://127.0.0.1:{server.port}", ["m"])
        assert (welcome.max_model_len, welcome.block_size) == (2048, 128)
        assert welcome.fingerprint == it.infos[0].fingerprint

"""The gateway as it is wired: a worker that makes up tokens, the real protocol, clients on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from backend.link_server import LinkServer
from backend.scripted import ScriptedOptions, scripted_server
from filters.rules import RuleError
from gateway.app import App, build_app
from gateway.settings import Access, General, Limits, Link, Settings, Text
from tests.gateway.answering import until
from tests.gateway.asgi import served, slow_client
from tests.pipeline.model_files import model_files
from tests.wire import Wire, connect

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "hello"}],
    "stream": True,
    "max_tokens": 20,
}


class Site:
    """A running gateway, its worker, and its port."""

    def __init__(self, app: App, worker: LinkServer, port: int) -> None:
        self.gateway = app.gateway
        self.worker = worker
        self.port = port

    @property
    def num_running(self) -> int:
        """Requests in the worker's engine."""
        stats = self.worker._engine.stats()
        return stats.running + stats.waiting


@contextlib.asynccontextmanager
async def site(
    folder: Path, limits: Limits | None = None, step_ms: float = 1.0, **groups: Any
) -> AsyncIterator[Site]:
    """Worker and gateway in this process, ready."""
    model = folder / "model"
    model.mkdir()
    for name, data in model_files().items():
        (model / name).write_bytes(data)
    options = ScriptedOptions(tokenizer=model, listen=f"unix://{folder}/worker.sock", step_ms=step_ms)
    worker = scripted_server(options)
    await worker.start()
    try:
        settings = Settings(
            general=General(cache=folder / "cache"),
            link=Link(worker=(str(worker.address),)),
            limits=limits or Limits(),
            **groups,
        )
        app = build_app(settings)
        async with served(app, lifespan="on") as port:
            await until(app.gateway.pool.models)
            yield Site(app, worker, port)
    finally:
        await worker.stop()


async def post(wire: Wire, **fields: Any) -> int:
    return (await wire.post(CHAT, BODY | fields)).status


# -- answers -------------------------------------------------------------------------------------------------


async def test_a_stream_over_the_wire_is_complete_and_equal_to_the_whole(tmp_path: Path) -> None:
    async with site(tmp_path) as made, connect(made.port) as wire:
        assert await post(wire, stream_options={"include_usage": True}) == 200
        frames = await wire.frames()
        assert frames[-1].is_done
        chunks = [frame.data for frame in frames[:-1]]
        text = "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"])
        assert await post(wire, stream=False) == 200
        whole = await wire.json()
        assert whole["choices"][0]["message"]["content"] == text
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == 20
        await until(lambda: made.gateway.num_open_requests == 0)


async def test_choices_and_logprobs_over_the_wire(tmp_path: Path) -> None:
    async with site(tmp_path) as made, connect(made.port) as wire:
        assert await post(wire, stream=False, n=3, seed=1, logprobs=True, top_logprobs=2, max_tokens=5) == 200
        choices = (await wire.json())["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        for choice in choices:
            entries = choice["logprobs"]["content"]
            assert len(entries) == 5
            assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
            joined = b"".join(bytes(entry["bytes"]) for entry in entries)
            assert joined.decode(errors="replace") == choice["message"]["content"]


async def test_rules_apply_in_both_directions(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("- {id: in, match: forbidden, action: block, direction: input}\n")
    async with (
        site(tmp_path, text=Text(rules=(str(tmp_path / "rules.yaml"),))) as made,
        connect(made.port) as wire,
    ):
        assert await post(wire, messages=[{"role": "user", "content": "for" + "bidden"}]) == 400
        assert (await wire.json())["error"]["code"] == "content_filter"
        assert await post(wire, stream=False) == 200
        await wire.body()


async def test_system_routes_and_keys_are_wired(tmp_path: Path) -> None:
    async with site(tmp_path, access=Access(api_key=("secret",))) as made, connect(made.port) as wire:
        for path, status in (
            ("/health", 200),
            ("/ready", 200),
            ("/version", 200),
            ("/metrics", 200),
            ("/v1/models", 401),
        ):
            assert (await wire.request("GET", path)).status == status, path
            body = await wire.body()
        assert json.loads(body)["error"]["code"] == "invalid_api_key"
        assert await post(wire) == 401
        await wire.body()
        head = await wire.post(CHAT, BODY | {"max_tokens": 2}, {"authorization": "Bearer secret"})
        assert head.status == 200
        await wire.frames()
        assert (await wire.request("GET", "/metrics")).status == 200
        metrics = (await wire.body()).decode()
        assert (
            'headrace_requests_total{ended="invalid_api_key",route="/v1/chat/completions",status="401"} 1.0'
            in metrics
        )
        assert "headrace_worker_ready{" in metrics
        assert (await wire.request("GET", CHAT)).status == 405
        assert (await wire.json())["error"]["type"] == "invalid_request_error"


async def test_each_request_leaves_one_line_without_its_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with site(tmp_path) as made, connect(made.port) as wire:
        await post(wire, messages=[{"role": "user", "content": "xylophone"}], max_tokens=2)
        await wire.frames()
        await until(lambda: made.gateway.num_open_requests == 0)
        made.gateway.request_log.flush()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["ended"] for line in lines] == ["complete"]
    assert "xylophone" not in json.dumps(lines)


# -- clients that go or do not read --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_closed_connection_empties_the_engine(tmp_path: Path, stream: bool) -> None:
    async with site(tmp_path) as made:
        async with connect(made.port) as wire:
            body = json.dumps(BODY | {"max_tokens": 20000, "stream": stream}).encode()
            await wire.send(
                b"POST %s HTTP/1.1\r\ncontent-type: application/json\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
                % (CHAT.encode(), len(body))
            )
            await wire.send(body)
            await until(lambda: made.num_running == 1)
        await until(lambda: made.num_running == 0 and made.gateway.num_open_requests == 0)


async def test_a_closed_connection_empties_the_engine_behind_a_pipelined_request(tmp_path: Path) -> None:
    async with site(tmp_path) as made:
        async with connect(made.port) as wire:
            body = json.dumps(BODY | {"max_tokens": 20000}).encode()
            head = (
                b"POST %s HTTP/1.1\r\ncontent-type: application/json\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
                % (CHAT.encode(), len(body))
            )
            await wire.send((head + body) * 3)
            await until(lambda: made.num_running == 1)
        await until(lambda: made.num_running == 0 and made.gateway.num_open_requests == 0)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(slow_reader_bytes=20_000, slow_reader_s=600),
        Limits(slow_reader_bytes=1 << 30, slow_reader_s=0.2),
    ],
    ids=["bytes", "time"],
)
async def test_a_client_that_does_not_read_is_cut_and_frees_the_engine(
    tmp_path: Path, limits: Limits
) -> None:
    async with site(tmp_path, limits, step_ms=0.0) as made:
        body = json.dumps(BODY | {"max_tokens": 30_000}).encode()
        request = (
            b"POST %s HTTP/1.1\r\ncontent-type: application/json\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
            % (CHAT.encode(), len(body))
        )
        client = slow_client(made.port, request + body)
        try:
            await until(lambda: made.num_running == 1)
            await until(lambda: made.num_running == 0 and made.gateway.num_open_requests == 0)
            data = await asyncio.get_running_loop().run_in_executor(None, read_all, client)
            assert data.startswith(b"HTTP/1.1 200")
            assert b"[DONE]" not in data
            assert not data.endswith(b"0\r\n\r\n")  # no client takes it for complete
        finally:
            client.close()


def read_all(client: socket.socket) -> bytes:
    """What the kernel still has, up to the end of the connection."""
    data = b""
    while part := client.recv(1 << 20):
        data += part
    return data


# -- draining ------------------------------------------------------------------------------------------------


async def test_a_drain_refuses_new_requests_and_cuts_old_ones(tmp_path: Path) -> None:
    async with site(tmp_path, step_ms=5.0) as made, connect(made.port) as wire, connect(made.port) as other:
        assert await post(wire, max_tokens=20000) == 200
        first = await wire.frame()
        assert first is not None
        assert first.data["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        made.gateway.begin_drain()
        assert await post(other) == 503
        assert (await other.json())["error"]["code"] == "draining"
        assert (await other.request("GET", "/ready")).status == 503
        await other.body()
        assert made.gateway.num_open_requests == 1
        made.gateway.cut()
        last = (await wire.frames())[-1]
        assert last.data["error"]["code"] == "draining"
        await until(lambda: made.num_running == 0 and made.gateway.num_open_requests == 0)


# -- settings that stop the start ----------------------------------------------------------------------------


def test_a_bad_rule_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("- {id: a, match: x, action: mask}\n")
    with pytest.raises(RuleError, match=r"rules.yaml:1"):
        build_app(Settings(text=Text(rules=(str(tmp_path / "rules.yaml"),))))


def test_missing_tls_files_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        build_app(Settings(link=Link(link_cafile=tmp_path / "none.pem")))


async def test_lines_that_the_log_has_lost_are_told_though_nobody_scrapes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with site(tmp_path) as made:
        made.gateway.request_log.num_lost += 3
        await until(lambda: "3 log lines were lost" in caplog.text)

"""Pages of other origins before a real gateway in a real browser, and the client's address in its log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import stack
from tests.e2e.resting import assert_no_fault, logged
from tests.gateway.browser import open_tab, running_browser
from tests.pipeline.model_files import model_files
from tests.processes import Process, free_port, headrace
from tests.stack import Gateway, Worker, running, start_gateway
from tests.tcp_server import listening
from tests.wire import connect

KEY = "key-of-a-page-1234"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "hello"}],
    "stream": True,
    "max_tokens": 5,
}
TOO_LARGE = 2048

# What a page's script can tell of an answer, or the name of what its fetch throws.
ASK = """
(async (url, options) => {{
    let response;
    try {{ response = await fetch(url, options); }} catch (error) {{ return error.name; }}
    const text = await response.text();
    const names = ["x-request-id", "server-timing", "content-type"];
    const timings = performance.getEntriesByName(url).flatMap((entry) => entry.serverTiming || []);
    return {{
        status: response.status,
        text,
        headers: names.map((name) => response.headers.get(name)),
        timings: timings.map((timing) => timing.name),
    }};
}})({url}, {options})
"""


@dataclass(frozen=True, slots=True)
class Served:
    gateway: Gateway
    worker: Worker
    pages: tuple[int, int]  # ports of two origins; the first one is allowed


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, data in model_files().items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def served(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    pages = free_port(), free_port()
    origin = f"http://127.0.0.1:{pages[0]}"
    flags = ("--api-key", KEY, "--allowed-origins", origin, "--forwarded-allow-ips", "127.0.0.1,10.0.0.0/8")
    with ExitStack() as started:
        worker = started.enter_context(stack.start_scripted(folder, tokenizer))
        gateway = started.enter_context(
            start_gateway(folder, [worker], *flags, "--max-body-bytes", str(TOO_LARGE))
        )
        yield Served(gateway, worker, pages)
        assert_no_fault(gateway)


@asynccontextmanager
async def page(port: int) -> AsyncIterator[str]:
    """An empty page on a port of this machine; its URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # a browser opens connections that it may need, and says nothing
            return
        html = b"<!doctype html><title>page</title>"
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        )
        writer.write(head % len(html) + html)
        await writer.drain()
        writer.close()

    async with listening(answer, port=port):
        yield f"http://127.0.0.1:{port}/"


def asking(gateway: Gateway, path: str, body: Any = None, **headers: str) -> str:
    options: dict[str, Any] = {"headers": headers}
    if body is not None:
        options |= {"method": "POST", "body": json.dumps(body)}
        headers.setdefault("content-type", "application/json")
    return ASK.format(url=json.dumps(gateway.url + path), options=json.dumps(options))


# -- in a browser --------------------------------------------------------------------------------------------


@pytest.mark.browser
async def test_a_page_reads_streams_refusals_and_timings_where_it_is_allowed(
    served: Served, tmp_path: Path
) -> None:
    gateway, authorization = served.gateway, f"Bearer {KEY}"
    with running_browser(tmp_path) as browser_port:
        async with page(served.pages[0]) as url, open_tab(browser_port) as tab:
            await tab.open(url)
            refused = await tab.run(asking(gateway, CHAT, BODY))
            assert refused["status"] == 401
            assert "invalid_api_key" in refused["text"]
            told = await tab.run(
                asking(gateway, CHAT, BODY, authorization=authorization, **{"x-request-id": "of-the-page"})
            )
            assert told["status"] == 200
            assert told["text"].endswith("data: [DONE]\n\n")
            request_id, server_timing, content_type = told["headers"]
            assert request_id == "of-the-page"
            assert server_timing.startswith("parse;dur=")
            assert content_type == "text/event-stream; charset=utf-8"
            assert {"parse", "tokenize", "queue"} <= set(told["timings"])
            large = BODY | {"messages": [{"role": "user", "content": "x" * TOO_LARGE}]}
            assert (await tab.run(asking(gateway, CHAT, large, authorization=authorization)))["status"] == 413
            assert (await tab.run(asking(gateway, "/nothing")))["status"] == 404
            assert (await tab.run(asking(gateway, "/v1/models", authorization=authorization)))[
                "status"
            ] == 200
        async with page(served.pages[1]) as url, open_tab(browser_port) as tab:
            await tab.open(url)
            for script in (
                asking(gateway, "/v1/models"),
                asking(gateway, "/v1/models", authorization=authorization),
                asking(gateway, CHAT, BODY, authorization=authorization),
            ):
                assert await tab.run(script) == "TypeError"


# -- on the wire ---------------------------------------------------------------------------------------------


async def test_a_preflight_needs_no_key_and_leaves_the_connection_as_it_was(served: Served) -> None:
    origin = f"http://127.0.0.1:{served.pages[0]}"
    asks = {"origin": origin, "access-control-request-method": "POST"}
    async with connect(served.gateway.port) as wire:
        for path in (CHAT, "/v1/models", "/nothing"):
            head = await wire.request("OPTIONS", path, None, asks)
            assert (head.status, head["access-control-allow-origin"]) == (204, origin)
            assert head.get("content-length") is None
            assert head.get("transfer-encoding") is None
        head = await wire.request("OPTIONS", CHAT, None, asks | {"origin": origin + "1"})
        assert (head.status, head.get("access-control-allow-origin")) == (204, None)
        head = await wire.post(CHAT, BODY, {"origin": origin, "authorization": f"Bearer {KEY}"})
        assert (head.status, head["access-control-allow-origin"]) == (200, origin)
        assert (await wire.frames())[-1].is_done


@pytest.mark.parametrize(
    ("request_id", "forwarded_for", "client"),
    [
        ("direct", {}, "127.0.0.1"),
        ("one-proxy", {"x-forwarded-for": "1.2.3.4"}, "1.2.3.4"),
        ("two-proxies", {"x-forwarded-for": "6.6.6.6, 2a00::1, 10.1.2.3"}, "2a00::1"),
        ("garbage", {"x-forwarded-for": "MARKER of a user"}, "127.0.0.1"),
    ],
)
async def test_the_log_has_the_client_behind_trusted_proxies(
    served: Served, request_id: str, forwarded_for: dict[str, str], client: str
) -> None:
    headers = {"x-request-id": request_id, "authorization": f"Bearer {KEY}"} | forwarded_for
    async with connect(served.gateway.port) as wire:
        assert (await wire.post(CHAT, BODY, headers)).status == 200
        await wire.frames()
    assert (await asyncio.to_thread(logged, served.gateway, request_id))["client"] == client
    assert "MARKER" not in served.gateway.log.read_text()


async def test_over_a_unix_socket_the_proxy_is_believed(served: Served, tmp_path: Path) -> None:
    path, log = tmp_path / "gateway.sock", tmp_path / "uds.log"
    command = headrace("gateway", "--uds", str(path), "--worker", served.worker.address)
    with running(Process("uds", command, log)) as process:
        process.wait_until(lambda: "listening on" in process.log_text(), stack.START_S, "listening")
        async with connect(uds=path) as wire:
            for forwarded_for in ({"x-forwarded-for": "6.6.6.6, 1.2.3.4"}, {}):
                assert (await wire.post(CHAT, BODY, forwarded_for)).status == 200
                await wire.frames()
        process.wait_until(lambda: process.log_text().count('"client"') == 2, stack.START_S, "logging")
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert [line["client"] for line in lines] == ["1.2.3.4", None]

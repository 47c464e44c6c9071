"""JSON lines and plain text from a real gateway: the answers of SSE, and none that broke looks whole."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import stack
from tests.components import need
from tests.e2e.asking import CHAT, COMPLETE, FAILED, MODEL, ask, chat
from tests.e2e.resting import assert_no_fault, num_jobs, wait_for
from tests.stack import Gateway, Worker
from tests.wire import connect

RAW = "/v1/completions"
WORD = "forbidden"
SAID = f"What is {WORD} must not leave."
BROKEN = '{"a": 1, "b": 2} and more'
STRANGE = "a\u2028b\u0085c\r\n\r\nd流水👋 </b>"
TEXT = {"accept": "text/plain"}
NDJSON = {"accept": "application/x-ndjson"}


@dataclass(frozen=True, slots=True)
class Served:
    worker: Worker
    gateway: Gateway

    @property
    def port(self) -> int:
        return self.gateway.port


@pytest.fixture(scope="module")
def served(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway with a rule that blocks `WORD`, before a worker that says `SAID` or `STRANGE` if told to."""
    folder = tmp_path_factory.mktemp("text_streams")
    rules, script = folder / "words.txt", folder / "script.json"
    rules.write_text(WORD + "\n")
    script.write_text(json.dumps({"Block it": SAID, "Be strange": STRANGE, "Be JSON": BROKEN}))
    with ExitStack() as running:
        worker = running.enter_context(stack.start_scripted(folder, embedded_model, "--script", str(script)))
        flags = ("--rules", str(rules), "--rules-action", "block")
        yield Served(worker, running.enter_context(stack.start_gateway(folder, [worker], *flags)))


async def body_of(port: int, body: dict[str, Any], headers: dict[str, str], path: str = CHAT) -> bytes:
    """The whole body of a stream."""
    async with connect(port) as wire:
        head = await wire.post(path, body, headers)
        assert head.status == 200
        assert head["content-type"] == f"{headers['accept']}; charset=utf-8"
        return await wire.body()


def text_of(body: bytes) -> str:
    """The text of a stream of JSON lines, each of which is read by itself."""
    *lines, rest = body.split(b"\n")
    assert rest == b""
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    assert choices[-1]["finish_reason"]
    return "".join(each.get("text", "") or each.get("delta", {}).get("content", "") for each in choices)


@pytest.mark.parametrize("content", ["Tell me a story.", "Be strange"])
async def test_every_form_has_the_same_text(served: Served, content: str) -> None:
    body = chat(content, 40, ignore_eos=False)
    expected = await ask(served.port, body)
    assert expected.kind == COMPLETE
    assert content != "Be strange" or expected.text == STRANGE
    assert (await body_of(served.port, body, TEXT)).decode() == expected.text
    lines = await body_of(served.port, body, NDJSON)
    assert text_of(lines) == expected.text
    assert len(lines.decode().splitlines()) == lines.count(b"\n")
    assert_no_fault(served.gateway)


async def test_completions_have_every_form_too(served: Served) -> None:
    body = {"model": MODEL, "prompt": "Once", "stream": True, "max_tokens": 20}
    text = (await body_of(served.port, body, TEXT, RAW)).decode()
    assert text
    async with connect(served.port) as wire:
        await wire.post(RAW, body | {"stream": False})
        assert (await wire.json())["choices"][0]["text"] == text
    *lines, rest = (await body_of(served.port, body, NDJSON, RAW)).split(b"\n")
    assert rest == b""
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == text


async def test_lines_come_as_the_tokens_do(served: Served) -> None:
    """Each is there before the next token is made; and the usage comes last."""
    body = chat("Slowly", 5, stream_options={"include_usage": True, "include_timings": True})
    async with connect(served.port) as wire:
        await wire.post(CHAT, body, NDJSON)
        pieces = [piece async for piece in _pieces(wire)]
    assert all(piece.endswith(b"\n") for piece in pieces)
    last = json.loads(pieces[-1].splitlines()[-1])
    assert last["usage"]["completion_tokens"] == 5
    assert last["timings"]["ttft_ms"] > 0


async def _pieces(wire: Any) -> Any:
    while piece := await wire.piece():
        yield piece


async def test_a_refused_field_is_named(served: Served) -> None:
    async with connect(served.port) as wire:
        head = await wire.post(CHAT, chat(n=2), TEXT)
        assert head.status == 400
        assert (await wire.json())["error"]["param"] == "n"


# -- cuts ----------------------------------------------------------------------------------------------------


def curl(port: int, body: dict[str, Any]) -> subprocess.CompletedProcess[bytes]:
    fields = ["-H", "content-type: application/json", "-H", "accept: text/plain", "-d", json.dumps(body)]
    url = f"http://127.0.0.1:{port}{CHAT}"
    return subprocess.run([need("curl"), "-sN", *fields, url], capture_output=True, timeout=30, check=False)


async def test_a_blocked_text_is_cut_after_what_was_allowed(served: Served) -> None:
    body = chat("Block it", 40)
    assert (await ask(served.port, body)).text == SAID[: SAID.index(WORD)]
    seen = await asyncio.to_thread(curl, served.port, body)
    assert seen.stdout.decode() == SAID[: SAID.index(WORD)]
    assert seen.returncode == 18  # a partial file
    await asyncio.to_thread(wait_for, served.gateway, lambda: num_jobs(served.worker) == 0, "rid of it")
    assert_no_fault(served.gateway)


async def test_a_text_that_fails_is_cut_after_what_was_allowed(served: Served) -> None:
    """It was to be JSON, and is none from some place on."""
    body = chat("Be JSON", 40, ignore_eos=False, response_format={"type": "json_object"})
    expected = await ask(served.port, body)
    assert (expected.kind, expected.code) == (FAILED, "invalid_answer")
    assert expected.text
    received = bytearray()
    async with (
        httpx.AsyncClient() as client,
        client.stream("POST", served.gateway.url + CHAT, json=body, headers=TEXT) as response,
    ):
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            await _collect(response, received)
    assert received.decode() == expected.text
    assert_no_fault(served.gateway)


async def _collect(response: httpx.Response, received: bytearray) -> None:
    async for piece in response.aiter_raw():
        received += piece

"""A server that answers as vLLM's does, on a free port: for tests of what can go wrong with one.

It echoes the prompt's ids, one an event, over and over. Whoever needs another answer sets `answer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from backend.upstream_address import UpstreamAddress, parse_upstream
from tests.backend.vllm_streams import METRICS, completion_event, generate_event, usage_event
from tests.tcp_server import StreamServer

JSON = "application/json"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
DISABLED = (
    b'{"error":{"message":"Scale-out endpoints are disabled.","type":"PermissionDeniedError","code":403}}'
)


class Cut(Exception):
    """Close the connection now, in whatever state it is."""


class Refuse(Exception):
    """Answer with this status and body instead of a stream."""

    def __init__(self, status: int, body: bytes = b"{}", kind: str = JSON) -> None:
        super().__init__(status)
        self.status, self.body, self.kind = status, body, kind


Answer = Callable[[str, dict[str, Any]], AsyncIterator[bytes]]


class FakeVllm:
    """What it was asked (`calls`: path and body), what it is to answer, and the streams that are open."""

    def __init__(self) -> None:
        self.models: list[dict[str, Any]] = [{"id": "m", "max_model_len": 2048, "parent": None}]
        self.models_body: bytes | None = None  # instead of a list of them
        self.has_generate = True
        self.missing_status = 403  # what it says of /generate where it has none
        self.api_key: str | None = None
        self.health = 200
        self.metrics = METRICS
        self.cached_tokens: int | None = None
        self.tokenize: Callable[[str], list[int]] | None = None  # None: a version without the route
        self.is_frozen = False  # it accepts connections, and says nothing
        self.answer: Answer = self.echo
        self.calls: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.asked: list[str] = []  # every path, the calls' too
        self.num_streams = 0
        self.num_connections = 0
        self.port = 0
        self._server = StreamServer(self._connected)

    @property
    def address(self) -> UpstreamAddress:
        return parse_upstream(f"vllm+http://127.0.0.1:{self.port}")

    async def start(self) -> None:
        await self._server.start(self.port)
        self.port = self._server.port

    async def stop(self) -> None:
        """As a process that is killed: every connection is reset, and nobody listens."""
        self.is_frozen = False
        await self._server.stop()

    async def echo(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        is_generate = path.endswith("/generate")
        prompt = body["token_ids"] if is_generate else body["prompt"]
        max_tokens = body["sampling_params"]["max_tokens"] if is_generate else body["max_tokens"]
        for index in range(max_tokens):
            ids, finish = [prompt[index % len(prompt)]], "length" if index == max_tokens - 1 else None
            if is_generate:
                yield generate_event(ids, finish)
            else:
                yield completion_event(ids, finish, prompt if index == 0 else None)
            await asyncio.sleep(0)
        yield usage_event(self.cached_tokens)
        yield b"data: [DONE]\n\n"

    # -- one connection ------------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                method, path, headers, body = await _request(reader)
                self.asked.append(path)
                while self.is_frozen:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                await self._respond(writer, method, path, headers, body)
        except (asyncio.IncompleteReadError, ConnectionError, Cut):
            pass
        finally:
            writer.transport.abort()

    async def _respond(
        self, writer: asyncio.StreamWriter, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> None:
        guarded = path.startswith(("/v1", "/inference"))
        if guarded and self.api_key is not None and headers.get("authorization") != f"Bearer {self.api_key}":
            _write(writer, 401, b'{"error":"Unauthorized"}')
        elif path == "/tokenize" and self.tokenize is not None:
            prompt = msgspec.json.decode(body)["prompt"]
            ids = self.tokenize(prompt)
            _write(
                writer, 200, msgspec.json.encode({"count": len(ids), "max_model_len": 2048, "tokens": ids})
            )
        elif method == "POST" and path != "/tokenize":
            await self._generate(writer, path, headers, body)
        elif path == "/v1/models":
            listed = msgspec.json.encode({"object": "list", "data": self.models})
            _write(writer, 200, listed if self.models_body is None else self.models_body)
        elif path == "/health":
            _write(writer, self.health, b"")
        elif path == "/metrics":
            _write(writer, 200, self.metrics, "text/plain")
        elif path == "/version":
            _write(writer, 200, b'{"version":"0.32.0"}')
        else:
            _write(writer, 404, b'{"detail":"Not Found"}')

    async def _generate(
        self, writer: asyncio.StreamWriter, path: str, headers: dict[str, str], body: bytes
    ) -> None:
        if path.endswith("/generate") and not self.has_generate:
            _write(writer, self.missing_status, DISABLED)
            return
        asked = msgspec.json.decode(body)
        if not asked:
            _write(
                writer, 400, b'{"error":{"message":"2 validation errors","type":"Bad Request","code":400}}'
            )
            return
        self.calls.append((path, asked, headers))
        try:
            await self._stream(writer, self.answer(path, asked))
        except Refuse as refusal:
            _write(writer, refusal.status, refusal.body, refusal.kind)

    async def _stream(self, writer: asyncio.StreamWriter, events: AsyncIterator[bytes]) -> None:
        self.num_streams += 1
        has_begun = False
        try:
            async for event in events:
                if not has_begun:
                    has_begun = True
                    writer.write(STREAM_HEAD)
                if writer.transport.is_closing():
                    raise Cut
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        finally:
            self.num_streams -= 1


async def _request(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = dict(line.split(": ", 1) for line in lines)
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return method, path, headers, body


def _write(writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = JSON) -> None:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


@asynccontextmanager
async def fake_vllm(**options: Any) -> AsyncIterator[FakeVllm]:
    """A running one, with these attributes."""
    server = FakeVllm()
    for name, value in options.items():
        assert hasattr(server, name), name
        setattr(server, name, value)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
